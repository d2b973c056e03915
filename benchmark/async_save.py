"""Measures saves in the background of several libraries: how long the call takes, and what training loses after it.

    python -m benchmark.async_save [--quick] [--out DIR]

Prints a table, and writes it and all samples to async_save.md and async_save.json. Takes about 7 minutes, with --quick
about 2.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark import machine
from benchmark.async_report import as_markdown, goals, merged
from benchmark.outcome import add_arguments, remove, write
from benchmark.processes import BenchmarkError, Ranks, started
from benchmark.run import HERE, say
from benchmark.schedule import Peer

__all__ = ["PEERS", "measure"]

PEERS = (
    Peer("ours_async", "paddle_dist_ckpt", "paddle"),
    Peer("torch_dcp_async", "torch DCP, by a thread", "torch"),
    Peer("torch_dcp_async_cached", "torch DCP, by a thread, staging memory kept", "torch"),
    Peer("torch_dcp_async_process", "torch DCP, by a process", "torch"),
)
_FULL, _QUICK = 20, 5
_STEPS = 60  # without a save, on either side of one


def measure(pythons: Mapping[str, Path], rounds: int, seed: int, scratch: Path) -> dict[str, Any]:
    """Run the ranks and collect what they measured.

    Args:
        pythons: For each peer that takes part, the interpreter of its environment.
        rounds: How often each saves.
        seed: Of the order within the rounds.
        scratch: Folder for the checkpoints.

    Returns:
        ``first``, the stall of the first save, and ``measured``, by peer's name; ``goals``; ``versions``.

    Raises:
        BenchmarkError: a rank failed.
    """
    order = random.Random(seed)
    with started(dict(pythons), scratch, "benchmark.async_worker") as all_ranks:
        versions = {k: v for ranks in all_ranks for k, v in ranks.do("versions")[0].items()}
        first = {ranks.peer: _prepare(ranks, scratch) for ranks in all_ranks}
        measured: dict[str, dict[str, dict[int, float]]] = {name: {} for name in pythons}
        for i in range(-1, rounds):  # the first is the warm-up
            for ranks in order.sample(all_ranks, len(all_ranks)):
                say(f"round {i + 1} of {rounds}: {ranks.peer}")
                turn = _train_and_save(ranks, scratch)
                if i >= 0:
                    for name, value in turn.items():
                        measured[ranks.peer].setdefault(name, {})[i] = value
    return {"first": first, "measured": measured, "goals": goals(measured), "versions": versions}


def _prepare(ranks: Ranks, scratch: Path) -> float:
    """Have ranks ready to train, and see whether they save what is there when the call is made; that call's seconds."""
    say(f"{ranks.peer} gets ready")
    path = scratch / f"first-{ranks.peer}"
    ranks.do("build", state="A", layouts=["same"])
    ranks.do("prepare")
    seconds = max(ranks.do("save_first", path=str(path)))
    ranks.do("load", path=str(path), layout="same", memory=False)
    ranks.do("check", layout="same")
    remove(path)
    return seconds


def _train_and_save(ranks: Ranks, scratch: Path) -> dict[str, float]:
    path = scratch / f"save-{ranks.peer}"
    answers = ranks.do("train_and_save", path=str(path), steps=_STEPS)
    remove(path)
    return merged(answers)


def main() -> int:
    """Measure and write; returns the exit code."""
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(description="Measure saves that go on while two ranks train.")
    add_arguments(parser, _FULL, _QUICK, HERE / "results")
    parser.add_argument("--peers", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--torch-python",
        type=Path,
        default=HERE / ".venv" / "bin" / "python",
        help="Python of an environment with torch and numpy",
    )
    args = parser.parse_args()
    peers = [peer for peer in PEERS if peer.name in args.peers]
    pythons = {peer.name: Path(sys.executable) if peer.environment == "paddle" else args.torch_python for peer in peers}
    rounds = args.rounds or (_QUICK if args.quick else _FULL)
    args.out.mkdir(parents=True, exist_ok=True)
    about = machine.describe(args.out)
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)  # the ranks inherit it
    try:
        with tempfile.TemporaryDirectory(prefix="async-save-", dir=args.scratch or args.out) as folder:
            found = measure(pythons, rounds, args.seed, Path(folder))
    except BenchmarkError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    say("")
    found = {
        "machine": about,
        "command": " ".join(["python -m benchmark.async_save", *sys.argv[1:]]),
        "settings": {"rounds": rounds, "seed": args.seed, "cores": len(cores), "steps": _STEPS},
        **found,
    }
    write(args.out, "async_save", found, as_markdown(found, peers))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
