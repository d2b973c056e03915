"""What this library sets out to reach, and whether a run shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmark.peers import PROBES
from benchmark.report import duration, goal, interval, median_of, paired_ratio, times

__all__ = ["goals"]

Key = tuple[str, str, str]
Seconds = Mapping[Key, Mapping[int, float]]
Planning = Mapping[Key, Sequence[float]]
Memory = Mapping[Key, Sequence[Mapping[str, float]]]

_SAVE, _LOAD, _SWAPPED = "save", "load, same layout", "load, Shard(0) and Shard(1) swapped"
_B_SAVE, _B_LOAD = "save, new tensors", "load, same layout, new tensors"
_B_SWAPPED = "load, Shard(1) instead of Shard(0), new tensors"


@dataclass(frozen=True, slots=True)
class _Ratio:
    """At least ``limit`` times as fast as a peer (``"best probe"``: the fastest of the probes)."""

    state: str
    work: str
    peer: str
    limit: float


@dataclass(frozen=True, slots=True)
class _Time:
    """At most so many seconds."""

    state: str
    work: str
    limit: float


@dataclass(frozen=True, slots=True)
class _Planning(_Time):
    """At most so many seconds until it is known what to write, in a second save of the same structure."""


@dataclass(frozen=True, slots=True)
class _Peak:
    """At most so many MiB beyond the tensors, on the worse rank."""

    state: str
    work: str
    limit: float


_GOALS: tuple[_Ratio | _Time | _Planning | _Peak, ...] = (
    _Ratio("A", _SAVE, "best probe", 0.9),
    _Ratio("A", _SAVE, "torch_dcp", 1.4),
    _Ratio("A", _SAVE, "paddle_builtin", 1.7),
    _Ratio("A", "save after 3 s idle", "torch_dcp", 2.5),
    _Ratio("A", _LOAD, "probe", 0.9),
    _Ratio("A", _LOAD, "torch_dcp", 1.5),
    _Ratio("A", _LOAD, "paddle_builtin", 5),
    _Ratio("A", _SWAPPED, "torch_dcp", 1.8),
    _Ratio("A", _SWAPPED, "paddle_builtin", 14),
    _Ratio("A", "load 1 of 6 layers", "torch_dcp", 1.5),
    _Ratio("A", "cold load, same layout", "probe", 1.0),
    _Ratio("A", "cold load, same layout", "torch_dcp", 1.6),
    _Time("B", _B_SAVE, 0.2),
    _Time("B", "save again", 0.08),
    _Time("B", _B_LOAD, 0.2),
    _Time("B", _B_SWAPPED, 0.2),
    *(_Ratio("B", work, "torch_dcp", 50) for work in (_B_SAVE, "save again", _B_LOAD, _B_SWAPPED)),
    *(_Ratio("B", work, "paddle_builtin", 12) for work in (_B_SAVE, "save again", _B_LOAD)),
    _Ratio("B", _B_SWAPPED, "paddle_builtin", 250),
    _Planning("A", _SAVE, 0.006),
    _Planning("B", "save again", 0.025),
    _Peak("A", _SAVE, 32),
    _Peak("A", _LOAD, 32),
    _Peak("C", _SAVE, 64),
    _Peak("C", _LOAD, 64),
)


def goals(seconds: Seconds, planning: Planning, memory: Memory) -> list[dict[str, Any]]:
    """Each goal, what was found, and whether that is enough; goals that were not measured are left out."""
    rows = []
    for one in _GOALS:
        if isinstance(one, _Ratio):
            found = _ratio(one, seconds)
        elif isinstance(one, _Planning):
            found = _time(one, planning.get((one.state, one.work, "ours"), []), "coordination and planning in at most")
        elif isinstance(one, _Time):
            found = _time(one, list(seconds.get((one.state, one.work, "ours"), {}).values()), "at most")
        else:
            found = _peak(one, memory)
        if found is not None:
            rows.append(goal(f"{one.state}: {one.work}", *found))
    return rows


def _ratio(one: _Ratio, seconds: Seconds) -> tuple[str, str, bool] | None:
    peers = PROBES if one.peer == "best probe" else (one.peer,)
    samples = [s for peer in peers if (s := seconds.get((one.state, one.work, peer)))]
    ours = seconds.get((one.state, one.work, "ours"))
    ratio = paired_ratio(min(samples, key=median_of), ours) if samples and ours else None
    if ratio is None:
        return None
    names = {"best probe": "the best probe", "probe": "the probe", "torch_dcp": "torch DCP", "paddle_builtin": "Paddle"}
    return f"at least {one.limit:g}x {names[one.peer]}", interval(ratio, times), ratio[0] >= one.limit


def _time(one: _Time, samples: Sequence[float], text: str) -> tuple[str, str, bool] | None:
    if not samples:
        return None
    median = float(np.median(samples))
    return f"{text} {duration(one.limit)}", duration(median), median <= one.limit


def _peak(one: _Peak, memory: Memory) -> tuple[str, str, bool] | None:
    samples = memory.get((one.state, one.work, "ours"))
    if not samples:
        return None
    peak = float(np.median([sample["peak"] for sample in samples])) / 2**20
    return f"at most {one.limit:g} MiB of memory", f"{peak:.1f} MiB", peak <= one.limit
