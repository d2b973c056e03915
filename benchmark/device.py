"""Measures how well copies from and to a device overlap with hashing, writing and reading.

    python -m benchmark.device [--quick] [--out DIR]

The device is the one that the tests build with g++ (test/device_plugin): no GPU is needed. Prints a table, and writes
it and all samples to device.md and device.json. Takes about 70 seconds, with --quick about 40.
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

import numpy as np

from benchmark import machine, pagecache
from benchmark.device_report import LIMITED, UNLIMITED, as_markdown, goals, ratios
from benchmark.outcome import add_arguments, remove, write
from benchmark.processes import BenchmarkError, Ranks, started
from benchmark.run import HERE, say
from test.device_plugin import build

__all__ = ["measure"]

_FULL, _QUICK = 7, 3
_SAVES, _LOADS = ("write", "copy", "save", "stall"), ("read", "copy back", "load")
_WRITING = ("write", "save", "stall")
_READING = ("read", "load")
_CALIBRATIONS = 3

Answer = Mapping[str, float]


class Run:
    """One run of the benchmark.

    Args:
        ranks: The processes.
        scratch: Folder for checkpoints.
        seed: Of the order within the rounds.
    """

    def __init__(self, ranks: Ranks, scratch: Path, seed: int) -> None:
        self._ranks, self._scratch, self._order = ranks, scratch, random.Random(seed)
        self._checkpoint = scratch / "checkpoint"

    def measure(self, rounds: int) -> dict[str, Any]:
        """Everything; see :func:`measure`."""
        say("the ranks make their states")
        self._ranks.do("build", state="A", layouts=["same", "swapped"])
        nbytes = max(self._ranks.do("prepare", path=str(self._scratch / "connect")))
        memory = self._peaks()
        speeds = {"write": self._speed("write", "copy", nbytes), "read": self._speed("read", "copy back", nbytes)}
        samples = self._rounds(rounds, speeds)
        for state in ("same", "host"):
            self._ranks.do("check", layout=state)  # neither loads nor copies have changed it
        seconds, cpu = (
            {
                work: {limit: {i: one[kind] for i, one in found.items()} for limit, found in limits.items()}
                for work, limits in samples.items()
            }
            for kind in ("seconds", "cpu")
        )
        copies = {work: limits[LIMITED][0] for work, limits in samples.items()}
        return {
            "bytes": nbytes,
            "speeds": speeds,
            "seconds": seconds,
            "cpu": cpu,
            "copies": {work: {kind: one[kind] for kind in ("calls", "bytes")} for work, one in copies.items()},
            "memory": memory,
        }

    def _peaks(self) -> dict[str, dict[str, int]]:
        """What the first of each kind needs of memory; sees whether the right values come back, too."""
        do, earlier = self._ranks.do, self._scratch / "first-in-background"
        found = {"save": self._peak("save", self._checkpoint)}
        do("save_first", path=str(earlier))
        found["load"] = self._peak("load", earlier)
        do("check", layout="same")
        remove(earlier)
        do("zero", layout="swapped")
        found["exchange"] = self._peak("exchange", self._checkpoint)
        do("check", layout="swapped")
        do("zero", layout="host")
        return found

    def _peak(self, work: str, path: Path) -> dict[str, int]:
        say(f"memory: {work}")
        answers = self._ranks.do("peak", work=work, path=str(path))
        return {kind: max(answer[kind] for answer in answers) for kind in answers[0]}

    def _speed(self, work: str, copy: str, nbytes: int) -> float:
        """The speed, in bytes per second, at which a rank's copies take as long as something else."""
        say(f"how fast to {copy}")
        self._do(work, 0)  # the first one does not count
        target = float(np.median([self._do(work, 0)["seconds"] for _ in range(_CALIBRATIONS)]))
        taken = min(self._do(copy, nbytes / target)["seconds"] for _ in range(_CALIBRATIONS))
        beside = min(taken - target, target / 2)  # what a copy takes beside its time on the link
        return nbytes / (target - beside)

    def _rounds(self, rounds: int, speeds: Mapping[str, float]) -> dict[str, dict[str, dict[int, Answer]]]:
        """The slower rank's samples by work and limit, for each round."""
        samples: dict[str, dict[str, dict[int, Answer]]] = {}
        turns = [(work, limit) for work in (*_SAVES, *_LOADS) for limit in (LIMITED, UNLIMITED)]
        once = [turn for turn in turns if turn not in (("write", UNLIMITED), ("read", UNLIMITED))]
        for i in range(rounds):
            for work, limit in self._order.sample(once, len(once)):
                say(f"round {i + 1} of {rounds}: {work}, {limit}")
                speed = speeds["write" if work in _SAVES else "read"] if limit == LIMITED else 0.0
                samples.setdefault(work, {}).setdefault(limit, {})[i] = self._do(work, speed)
        for work in ("write", "read"):
            samples[work][UNLIMITED] = samples[work][LIMITED]  # there are no copies in it
        return samples

    def _do(self, work: str, speed: float) -> Answer:
        """Have the ranks do something; of each number the larger one."""
        path = self._scratch / "save" if work in _WRITING else self._checkpoint
        if work in _READING:
            pagecache.read_in(path)
        answers = self._ranks.do("measure", work=work, path=str(path), speed=speed)
        if work in _WRITING:
            remove(path)
        return {name: max(answer[name] for answer in answers) for name in answers[0]}


def measure(rounds: int, seed: int, scratch: Path) -> dict[str, Any]:
    """Run the ranks and collect what they measured.

    Args:
        rounds: How often each work is measured.
        seed: Of the order within the rounds.
        scratch: Folder for the checkpoints.

    Returns:
        ``bytes`` of a rank; ``speeds`` of copies to the host and to the device, in bytes per second, named after what
        they are as slow as; ``seconds`` and ``cpu`` by work and limit, for each round; ``copies`` by work; ``memory``;
        ``ratios``, ``goals`` and ``versions``.

    Raises:
        BenchmarkError: a rank failed.
    """
    pythons = {"ours_device": Path(sys.executable)}
    with started(pythons, scratch, "benchmark.device_worker") as (ranks,):
        versions = ranks.do("versions")[0]
        found = Run(ranks, scratch, seed).measure(rounds)
    compared = ratios(found["seconds"])
    return {**found, "ratios": compared, "goals": goals(compared), "versions": versions}


def main() -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure saves from and loads to a device.")
    add_arguments(parser, _FULL, _QUICK, HERE / "results")
    args = parser.parse_args()
    reason = build.reason_to_skip()
    if reason is not None:
        print(f"Nothing was measured with a device: {reason}.", file=sys.stderr)
        return 0
    rounds = args.rounds or (_QUICK if args.quick else _FULL)
    args.out.mkdir(parents=True, exist_ok=True)
    about = machine.describe(args.out)
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)  # the ranks inherit it
    try:
        with tempfile.TemporaryDirectory(prefix="device-", dir=args.scratch or args.out) as folder:
            found = measure(rounds, args.seed, Path(folder))
    except BenchmarkError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    say("")
    found = {
        "machine": about,
        "load_after": round(os.getloadavg()[0], 2),
        "command": " ".join(["python -m benchmark.device", *sys.argv[1:]]),
        "settings": {"rounds": rounds, "seed": args.seed, "cores": len(cores)},
        **found,
    }
    write(args.out, "device", found, as_markdown(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
