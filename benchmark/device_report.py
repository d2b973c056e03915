"""From what ranks with devices measured to ratios, goals and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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

__all__ = ["LIMITED", "UNLIMITED", "as_markdown", "goals", "ratios"]

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


def ratios(seconds: Seconds) -> list[dict[str, Any]]:
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


def goals(compared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each goal in words, what was found, and whether that is enough; of what :func:`ratios` returned."""
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
        "## Copies and memory",
        "",
        *table(["", "copies", "their bytes : state", "core"], _copy_rows(found)),
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
