"""Measures how fast ranks load what each can read only a part of, against what gloo itself takes to move the bytes.

    python -m benchmark.exchange [--quick] [--out DIR]

Four ranks, each with a folder of its own as on four hosts, save state A, of which every rank has all, and load all of
it back. In between, each rank broadcasts a quarter of as many bytes and does nothing else. Prints a table and writes it
and all samples to exchange.md and exchange.json. Takes about a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmark import machine
from benchmark.processes import ROOT, BenchmarkError, environments
from benchmark.ratios import median_of, paired_ratio
from benchmark.run import HERE
from benchmark.states import TensorSpec, layout
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.storage.base import FolderIdentity

__all__ = ["as_markdown", "measure"]

_RANKS = 4
_PIECE_BYTES = 64 << 20
_GOAL = 0.7
_FULL, _QUICK = 15, 7
_TIMEOUT_SECONDS = 600.0
_LOG_LINES = 20


class NodeFolder(LocalStorage):
    """A folder that no other rank sees, as on a host of its own."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self._rank = rank

    def identity(self) -> FolderIdentity:
        """Of a host with the rank's number."""
        return FolderIdentity(f"host{self._rank}", self._rank, self._rank)


def measure(rounds: int, seed: int, cores: int, scratch: Path) -> dict[str, Any]:
    """Run the ranks and collect what they measured.

    Args:
        rounds: How often both are measured.
        seed: Of the order within the rounds.
        cores: How many cores the ranks share.
        scratch: Folder for the checkpoint.

    Returns:
        The slower rank's seconds of the load and of the broadcasts alone, by round; the ratio of the broadcasts' time
        to the load's with its interval; bytes; settings.

    Raises:
        BenchmarkError: a rank failed.
    """
    allowed = sorted(os.sched_getaffinity(0))
    used = allowed[:cores]
    os.sched_setaffinity(0, used)  # the ranks inherit it
    try:
        with tempfile.TemporaryDirectory(prefix="exchange-", dir=scratch) as name:
            found = _run_ranks(Path(name), rounds, seed)
    finally:
        os.sched_setaffinity(0, allowed)
    slower = {
        kind: {i: max(one[kind][str(i)] for one in found) for i in range(rounds)} for kind in ("load", "broadcast")
    }
    ratio = paired_ratio(slower["broadcast"], slower["load"])
    assert ratio is not None
    middle, low, high = ratio
    return {
        "ranks": _RANKS,
        "cores": len(used),
        "total_bytes": found[0]["total_bytes"],
        "bytes_read": [one["bytes_read"] for one in found],
        "bytes_received": [one["bytes_received"] for one in found],
        "load": slower["load"],
        "broadcast": slower["broadcast"],
        "ratio": middle,
        "low": low,
        "high": high,
        "goal": _GOAL,
        "met": middle >= _GOAL,
    }


def _run_ranks(folder: Path, rounds: int, seed: int) -> list[dict[str, Any]]:
    """What each rank measured."""
    logs = [folder / f"{rank}.log" for rank in range(_RANKS)]
    processes = []
    try:
        for rank, environment in enumerate(environments(_RANKS)):
            options = {"rank": rank, "rounds": rounds, "seed": seed, "scratch": folder}
            words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
            with logs[rank].open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "benchmark.exchange", *words],
                        cwd=ROOT,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait(processes, logs)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(_RANKS)]


def _wait(processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Until all have ended well."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while any(process.poll() is None for process in processes):
        late = time.monotonic() > deadline
        for rank, process in enumerate(processes):
            if late or process.poll():
                tail = logs[rank].read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
                what = "took too long" if late else f"ended with {process.returncode}"
                raise BenchmarkError("\n".join([f"exchange, rank {rank} {what}", *tail]))
        time.sleep(0.05)
    if any(process.returncode for process in processes):
        raise BenchmarkError(f"exchange: the ranks ended with {[process.returncode for process in processes]}")


# -- one rank


def _run_rank(rank: int, rounds: int, seed: int, scratch: Path) -> None:
    """Save, then measure both in shuffled order; writes what was found to a file."""
    import paddle.distributed as dist

    import paddle_dist_ckpt as pdc
    from benchmark.peers import paddle_state

    paddle_state.setup(rank, _RANKS)
    specs = [dataclasses.replace(spec, shard_dim=None) for spec in layout("A", "same")]
    state = paddle_state.build(specs, rank, _RANKS)
    home = scratch / f"host{rank}"
    storage = NodeFolder(home, rank)
    pdc.save_state_dict(state, storage)
    paddle_state.zero(state)
    total = sum(int(np.prod(spec.shape)) * np.dtype(np.float32).itemsize for spec in specs)
    reports = []
    works: dict[str, Callable[[], Any]] = {
        "load": lambda: reports.append(pdc.load_state_dict(state, storage)),
        "broadcast": _broadcasts(rank, total),
    }
    seconds: dict[str, dict[int, float]] = {name: {} for name in works}
    order = random.Random(seed)
    for i in range(-1, rounds):  # the first is the warm-up
        for name in order.sample(list(works), len(works)):
            _read(home)
            gc.collect()
            dist.barrier()
            start = time.perf_counter()
            works[name]()
            if i >= 0:
                seconds[name][i] = time.perf_counter() - start
        if i < 0:
            _check(paddle_state.local_arrays(state), specs)
    last = reports[-1]
    found = {"total_bytes": total, "bytes_read": last.bytes_read, "bytes_received": last.bytes_received, **seconds}
    (scratch / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


def _broadcasts(rank: int, total: int) -> Callable[[], None]:
    """Makes what moves the same bytes: every rank broadcasts its part, in pieces."""
    import paddle
    import paddle.distributed as dist

    part = -(-total // _RANKS)
    sizes = [min(_PIECE_BYTES, part - start) for start in range(0, part, _PIECE_BYTES)]
    pieces = {size: paddle.full([size], rank, dtype="uint8") for size in set(sizes)}

    def run() -> None:
        for source in range(_RANKS):
            for size in sizes:
                dist.broadcast(pieces[size], src=source)

    return run


def _read(folder: Path) -> None:
    """Have the files in the page cache."""
    for path in folder.iterdir():
        path.read_bytes()


def _check(arrays: Mapping[str, Any], specs: list[TensorSpec]) -> None:
    for spec in specs:
        if not np.array_equal(arrays[spec.name], spec.local_part(0, 1)):
            raise ValueError(f"{spec.name} came back different")


# -- the report


def as_markdown(found: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """The report."""
    load, broadcast = median_of(found["load"]), median_of(found["broadcast"])
    lines = [
        "# Exchange",
        "",
        f"{about['cpu']}, {found['cores']} of {about['cores']} cores, Python {about['python']}. {found['ranks']} ranks "
        f"over gloo, each with a folder of its own; all want all of {found['total_bytes'] / 1e9:.2f} GB, of which each "
        f"can read {max(found['bytes_read']) / 1e9:.2f} GB at most. {len(found['load'])} rounds in shuffled order, the "
        "slower rank's time, files in the page cache; the load checks every block.",
        "",
        "| load | broadcasts alone | broadcasts : load (95 %) | goal | |",
        "| ---: | ---: | ---: | ---: | ---: |",
        f"| {load * 1000:.0f} ms | {broadcast * 1000:.0f} ms "
        f"| {found['ratio']:.3g} ({found['low']:.3g} to {found['high']:.3g}) "
        f"| at least {found['goal']:g} | {'met' if found['met'] else '**missed**'} |",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure a load in which ranks read for each other.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, help=f"default: {_FULL}, or {_QUICK}")
    parser.add_argument("--seed", type=int, default=0, help="of the order within the rounds")
    parser.add_argument("--cores", type=int, default=2, help="how many cores all ranks may use together")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    parser.add_argument("--scratch", type=Path, help="existing folder for the checkpoint, 1 GB; default: that of --out")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    rounds = args.rounds or (_QUICK if args.quick else _FULL)
    if args.rank is not None:
        _run_rank(args.rank, rounds, args.seed, args.scratch)
        sys.stdout.flush()
        os._exit(0)  # Paddle's own teardown waits for ranks that may be gone
    args.out.mkdir(parents=True, exist_ok=True)
    about = machine.describe(args.out)
    try:
        found = measure(rounds, args.seed, args.cores, args.scratch or args.out)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    report = as_markdown(found, about)
    (args.out / "exchange.json").write_text(json.dumps({"machine": about, **found}, indent=1) + "\n", encoding="utf-8")
    (args.out / "exchange.md").write_text(report, encoding="utf-8")
    print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
