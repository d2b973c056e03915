"""Measures how well copies from and to a device overlap with hashing, writing and reading.

    python -m benchmark.device [--quick] [--smoke]

The device is the one that the tests build with g++ (test/device_plugin): no GPU is needed. Prints a table, and writes
it and all samples to benchmark/results/. Takes about 70 seconds, with --quick about 40.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.command import main
from benchmark.device_report import LIMITED, UNLIMITED, as_markdown, goals, ratios
from benchmark.ranks import Ranks
from benchmark.session import NothingToMeasureError, Session, say, slower, versions_of
from test.device_plugin import build
from test.device_plugin.ranks import rank_environment

_WORKS = {  # the peer's method, and whose state it is given
    "write": ("save", "copied_to_host"),
    "copy": ("copy_to_host", "same"),
    "save": ("save", "same"),
    "stall": ("start_save", "same"),
    "read": ("load", "copied_to_host"),
    "copy back": ("copy_to_device", "same"),
    "load": ("load", "same"),
    "exchange": ("exchange", "swapped"),
}
_SAVES, _LOADS = ("write", "copy", "save", "stall"), ("read", "copy back", "load")
_WRITING, _READING = ("write", "save", "stall"), ("read", "load")
_CALIBRATIONS = 3
_DEVICE_BYTES = 2 << 30


class _Run:
    """One run of the benchmark.

    Args:
        session: Its settings and folder.
        ranks: The processes.
    """

    def __init__(self, session: Session, ranks: Ranks) -> None:
        self._session, self._ranks, self._order = session, ranks, random.Random(session.seed)
        self._checkpoint = session.scratch / "checkpoint"

    def measure(self) -> dict[str, Any]:
        """Everything; see :func:`measure`."""
        say("the ranks make their states")
        self._ranks.do("build", state="A", layouts=["same", "swapped"])
        self._ranks.do("derive", layout="same", work="copied_to_host")
        connect = str(self._session.scratch / "connect")
        nbytes = slower(self._ranks.do("measure", work="prepare", path=connect, speed=0))["bytes"]
        memory = self._peaks()
        speeds = {"write": self._speed("write", "copy", nbytes), "read": self._speed("read", "copy back", nbytes)}
        samples = self._rounds(speeds)
        for layout in ("same", "copied_to_host"):
            self._ranks.do("check", layout=layout)  # neither loads nor copies have changed it
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

    def _peaks(self) -> dict[str, dict[str, float]]:
        """What the first of each kind needs of memory; sees whether the right values come back, too."""
        do, earlier = self._ranks.do, self._session.scratch / "first-in-background"
        found = {"save": self._peak("save", self._checkpoint)}
        do("save_first", path=str(earlier))
        found["load"] = self._peak("load", earlier)
        do("check", layout="same")
        self._session.remove(earlier)
        do("zero", layout="swapped")
        found["exchange"] = self._peak("exchange", self._checkpoint)
        do("check", layout="swapped")
        do("zero", layout="copied_to_host")
        return found

    def _peak(self, work: str, path: Path) -> dict[str, float]:
        """The most bytes of memory on the worse rank. The device's memory is the host's: it counts as both."""
        say(f"memory: {work}")
        found = slower(self._call(work, path, 0, memory=True))
        return {"host": found["peak"], "device": found["device_peak"]}

    def _speed(self, work: str, copy: str, nbytes: float) -> float:
        """The speed, in bytes per second, at which a rank's copies take as long as something else."""
        say(f"how fast to {copy}")
        self._do(work, 0)  # the first one does not count
        target = float(np.median([self._do(work, 0)["seconds"] for _ in range(_CALIBRATIONS)]))
        taken = min(self._do(copy, nbytes / target)["seconds"] for _ in range(_CALIBRATIONS))
        beside = min(taken - target, target / 2)  # what a copy takes beside its time on the link
        return nbytes / (target - beside)

    def _rounds(self, speeds: Mapping[str, float]) -> dict[str, dict[str, dict[int, dict[str, float]]]]:
        """The slower rank's samples by work and limit, for each round."""
        samples: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
        turns = [(work, limit) for work in (*_SAVES, *_LOADS) for limit in (LIMITED, UNLIMITED)]
        once = [turn for turn in turns if turn not in (("write", UNLIMITED), ("read", UNLIMITED))]
        for i in range(self._session.rounds):
            for work, limit in self._order.sample(once, len(once)):
                say(f"round {i + 1} of {self._session.rounds}: {work}, {limit}")
                speed = speeds["write" if work in _SAVES else "read"] if limit == LIMITED else 0.0
                samples.setdefault(work, {}).setdefault(limit, {})[i] = self._do(work, speed)
        for work in ("write", "read"):
            samples[work][UNLIMITED] = samples[work][LIMITED]  # there are no copies in it
        return samples

    def _do(self, work: str, speed: float) -> dict[str, float]:
        """Have the ranks do something; of each number the larger one."""
        path = self._session.scratch / "save" if work in _WRITING else self._checkpoint
        if work in _READING:
            self._session.cache(path)
        found = slower(self._call(work, path, speed))
        if work in _WRITING:
            self._session.remove(path)
        return found

    def _call(self, work: str, path: Path, speed: float, memory: bool = False) -> list[dict[str, float]]:
        method, layout = _WORKS[work]
        return self._ranks.do("measure", work=method, path=str(path), layout=layout, memory=memory, speed=speed)


def measure(session: Session) -> dict[str, Any]:
    """Run the ranks and collect what they measured.

    Returns:
        ``bytes`` of a rank; ``speeds`` of copies to the host and to the device, in bytes per second, named after what
        they are as slow as; ``seconds`` and ``cpu`` by work and limit, for each round; ``copies`` by work; ``memory``;
        ``ratios``, ``goals`` and ``versions``.

    Raises:
        NothingToMeasureError: there can be no test device here.
    """
    reason = build.reason_to_skip()
    if reason is not None:
        raise NothingToMeasureError(reason)
    environment = functools.partial(rank_environment, memory=_DEVICE_BYTES)
    with session.started(own_core=True, environment=environment) as (ranks,):
        versions = versions_of([ranks])
        found = _Run(session, ranks).measure()
    compared = ratios(found["seconds"])
    return {**found, "ratios": compared, "goals": goals(compared), "versions": versions}


if __name__ == "__main__":
    raise SystemExit(main("device", measure, as_markdown))
