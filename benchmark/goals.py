"""What this library sets out to reach, and whether a run shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmark.ratios import median_of, paired_ratio
from benchmark.schedule import PROBES

__all__ = ["goals_table"]

Seconds = Mapping[tuple[str, str, str], Mapping[int, float]]
Memory = Mapping[tuple[str, str, str], Sequence[Mapping[str, int]]]

_SAVE, _LOAD, _SWAPPED = "save", "load, same layout", "load, Shard(0) and Shard(1) swapped"
_B_SAVE, _B_LOAD = "save, new tensors", "load, same layout, new tensors"
_B_SWAPPED = "load, Shard(1) instead of Shard(0), new tensors"


@dataclass(frozen=True, slots=True)
class _Ratio:
    """At least ``least`` times as fast as a peer (``"best probe"``: the fastest of the probes)."""

    state: str
    work: str
    peer: str
    least: float


@dataclass(frozen=True, slots=True)
class _Time:
    """At most so many seconds."""

    state: str
    work: str
    most: float


@dataclass(frozen=True, slots=True)
class _Peak:
    """At most so many MiB beyond the tensors, on the worse rank."""

    state: str
    work: str
    most: float


_GOALS: tuple[_Ratio | _Time | _Peak, ...] = (
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
    _Peak("A", _SAVE, 32),
    _Peak("A", _LOAD, 32),
    _Peak("C", _SAVE, 64),
    _Peak("C", _LOAD, 64),
)


def goals_table(seconds: Seconds, memory: Memory) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the goal, what was found, whether that is enough. Goals that were not measured are left out."""
    rows = []
    for goal in _GOALS:
        if isinstance(goal, _Ratio):
            found = _ratio_row(goal, seconds)
        elif isinstance(goal, _Time):
            found = _time_row(goal, seconds)
        else:
            found = _peak_row(goal, memory)
        if found is not None:
            rows.append([f"{goal.state}: {goal.work}", *found])
    return ["work", "goal", "found", ""], rows


def _ratio_row(goal: _Ratio, seconds: Seconds) -> list[str] | None:
    peers = PROBES if goal.peer == "best probe" else (goal.peer,)
    samples = [s for peer in peers if (s := seconds.get((goal.state, goal.work, peer)))]
    ours = seconds.get((goal.state, goal.work, "ours"))
    ratio = paired_ratio(min(samples, key=median_of), ours) if samples and ours else None
    if ratio is None:
        return None
    names = {"best probe": "the best probe", "probe": "the probe", "torch_dcp": "torch DCP", "paddle_builtin": "Paddle"}
    middle, low, high = ratio
    text = f"{middle:.3g}x ({low:.3g} to {high:.3g})"
    return [f"at least {goal.least:g}x {names[goal.peer]}", text, _verdict(middle >= goal.least)]


def _time_row(goal: _Time, seconds: Seconds) -> list[str] | None:
    samples = seconds.get((goal.state, goal.work, "ours"))
    if not samples:
        return None
    median = median_of(samples)
    return [f"at most {goal.most * 1000:g} ms", f"{median * 1000:.3g} ms", _verdict(median <= goal.most)]


def _peak_row(goal: _Peak, memory: Memory) -> list[str] | None:
    samples = memory.get((goal.state, goal.work, "ours"))
    if not samples:
        return None
    peak = float(np.median([sample["peak"] for sample in samples])) / 2**20
    return [f"at most {goal.most:g} MiB of memory", f"{peak:.1f} MiB", _verdict(peak <= goal.most)]


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"
