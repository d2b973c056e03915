"""Measures how well copies from and to a device overlap with hashing, writing and reading.

    python -m benchmark.device [--quick] [--smoke]

The device is the one that the tests build with g++ (test/device_plugin): no GPU is needed. Prints a table, and writes
it and all samples to benchmark/results/. Takes about 70 seconds, with --quick about 40.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.command import main
from benchmark.ranks import Ranks
from benchmark.report import (
    duration,
    goal,
    goals_section,
    heading,
    interval,
    median_interval,
    median_of,
    notes,
    paired_ratio,
    percent,
    table,
    times,
)
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

LIMITED, UNLIMITED = "limited", "unlimited"
Seconds = Mapping[str, Mapping[str, Mapping[int, float]]]
"""By work and by whether copies are limited, for each round."""

_MIB = 2**20
_MOST_OF_SLOWER = 1.15
_WHAT = (("save", "copy", "write"), ("load", "copy back", "read"))
_TITLES = {
    "write": "write: save of the same state in host memory",
    "copy": "copy: from the device to the host, nothing else",
    "save": "save",
    "stall": "save in the background: until the call returns",
    "read": "read: load of the same state into host memory",
    "copy back": "copy: from the host to the device, nothing else",
    "load": "load",
    "exchange": 'load with `exchange="always"`, cut along the other dimension',
}
_NOTES = """
There is no GPU: the device is the plugin of `test/device_plugin`. Its copies between host and device go over one link
for each direction, whose speed can be set: a copy waits until its bytes would have arrived, which takes no time of a
core, and then moves them, which takes as much as a memcpy; on a real device that would be free. Two ranks have a device
each and are bound to a core each of those given above; the default group's collectives are the device's. Half of every
matrix of state A, and all of every vector, is on each device.

*Copy* moves all of these bytes between the device and one buffer that is used again, by address, 2 MiB at a time, two
at once; *write* and *read* save and load tensors of the same values and layout in host memory. Before the rounds,
*write* and *read* are measured, and the link's speeds are set so that *copy* takes as long. In every round all works
are done once in shuffled order; a rank first waits for the other one, and a round's time is that of the slower rank.
Saves go to a new folder each, which is deleted afterwards; pending writes are flushed between measurements. Loads find
the files in the page cache. Medians over the rounds, and medians of the ratios within a round, with bootstrap intervals
of 95 %. *Hidden* is (copy + write - save) / min(copy, write), or the same for a load: 100 % if the shorter of the two
goes on wholly beside the longer one, 0 % if it waits for it, and less if something else takes time too. The *stall* is
from the second save on; each save is waited for before the next work begins.

*Copies* are the library's on the worse rank as the runtime counted them, *core* the time of the rank's process on its
core, with copies at the limited speed. Memory is the most at any moment beyond what there was before the call, on the
worse rank, in the first call of its kind. That of the host is the growth of the resident set to its peak (VmHWM, reset
before), of which this device's memory is a part.

A save in the background whose values were overwritten as soon as the call had returned was loaded and compared value by
value; so was every kind of load, and what is there when all is done.
""".strip()


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
    compared = _ratios(found["seconds"])
    return {**found, "ratios": compared, "goals": _goals(compared), "versions": versions}


def _ratios(seconds: Seconds) -> list[dict[str, Any]]:
    """How long each took compared with what it cannot be faster than, and how much was hidden."""
    found = []
    for limit in (LIMITED, UNLIMITED):
        for work, copy, other in _WHAT:
            times, copies, others = (seconds[name][limit] for name in (work, copy, other))
            slower = {i: max(copies[i], others[i]) for i in times}
            hidden = [(copies[i] + others[i] - times[i]) / min(copies[i], others[i]) for i in times]
            row = _ratio(work, f"max({copy}, {other})", limit, times, slower)
            found.append({**row, "hidden": median_interval(hidden)})
        found.append(_ratio("stall", "copy", limit, seconds["stall"][limit], seconds["copy"][limit]))
    return found


def _ratio(work: str, base: str, limit: str, times: Mapping[int, float], bases: Mapping[int, float]) -> dict[str, Any]:
    return {"work": work, "base": base, "copies": limit, "ratio": paired_ratio(times, bases)}


def _goals(compared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each goal in words, what was found, and whether that is enough; of what :func:`_ratios` returned."""
    save = next(row for row in compared if (row["work"], row["copies"]) == ("save", LIMITED))
    wanted = f"at most {_MOST_OF_SLOWER:g}x the slower of copy and write"
    found, met = interval(save["ratio"], times), save["ratio"][0] <= _MOST_OF_SLOWER
    return [goal("A: save from a device, copies as slow as the disk", wanted, found, met)]


def as_markdown(found: Mapping[str, Any]) -> str:
    """The report."""
    lines = [
        *heading("Devices", found),
        "State A (6 layers of hidden size 1536, float32, 0.68 GB) on the devices of two ranks, "
        f"{found['bytes'] / 1e9:.2f} GB each. The device is one to test with; see below.",
        "",
        "## Save",
        "",
        *_time_table(found, ("write", "copy", "save", "stall"), "the disk"),
        "",
        "## Load",
        "",
        *_time_table(found, ("read", "copy back", "load"), "reading"),
        "",
        "## Copies",
        "",
        *table(["", "copies", "their bytes : state", "core"], _copy_rows(found)),
        "",
        "## Memory during saves and loads",
        "",
        *table(["most at any moment", "host", "device"], _memory_rows(found)),
        "",
        *goals_section(found["goals"]),
        *notes(_NOTES),
    ]
    return "\n".join(lines)


def _time_table(found: Mapping[str, Any], works: Sequence[str], as_slow_as: str) -> list[str]:
    seconds, speed = found["seconds"], found["speeds"][works[0]]
    rows = [
        [_TITLES[work], *(interval(seconds[work][limit], duration) for limit in (LIMITED, UNLIMITED))] for work in works
    ]
    for work in works:
        cells = [row for row in found["ratios"] if row["work"] == work]
        if cells:
            rows.append([f"{work} : {cells[0]['base']}", *(interval(row["ratio"], times) for row in cells)])
        if cells and "hidden" in cells[0]:
            rows.append([f"{work}: hidden", interval(cells[0]["hidden"], percent), "–"])
    return table(["", f"copies as slow as {as_slow_as}: {speed / 1e9:.2f} GB/s", "copies without a limit"], rows)


def _copy_rows(found: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for work in ("write", "save", "stall", "read", "load"):
        copies = found["copies"][work]
        core = duration(median_of(found["cpu"][work][LIMITED]))
        rows.append([work, f"{copies['calls']:,} calls", f"{copies['bytes'] / found['bytes']:.2f}x", core])
    return rows


def _memory_rows(found: Mapping[str, Any]) -> list[list[str]]:
    return [
        [_TITLES[work], *(f"{peak[kind] / _MIB:.0f} MiB" for kind in ("host", "device"))]
        for work, peak in found["memory"].items()
    ]


if __name__ == "__main__":
    raise SystemExit(main("device", measure, as_markdown))
