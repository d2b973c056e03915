"""Measures how time and memory of saves and loads grow: with tensors, with bytes, with ranks.

    python -m benchmark.curves [--quick] [--smoke] [--states tensors "simulated ranks"] [--out DIR]

Prints tables with slopes, and writes them and all numbers to benchmark/results/. Takes about 10 minutes, with --quick
about 3. Each point is measured in processes of its own.
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.command import main
from benchmark.machine import memory_of_machine
from benchmark.ranks import Ranks
from benchmark.report import duration, goal, goals_section, heading, megabytes, notes, table
from benchmark.scale import measure_cached, measure_load, measure_plan
from benchmark.session import Session, say, slower, versions_of

_REPEATS = 3  # within one process, of what can be repeated
_STEEPEST = 1.05
_FITTED = 100.0  # the slope is that of the points from the largest size down to this part of it
_LEAST_SECONDS, _LEAST_BYTES = 0.002, 16 << 20  # what is below is not fitted: it is noise, or what a call always needs
_LARGE_BYTES, _MANY_TENSORS, _MANY_RANKS = 10**9, 10**5, 8  # measured by one process each
_TIMES_THE_STATE = 2.3  # the state, its files in the page cache, and what all else needs
_SMALL_TENSORS, _SIMULATED_TENSORS = 5_000, 244


@dataclass(frozen=True, slots=True)
class Curve:
    """Something that is varied, and what is measured of each size.

    Attributes:
        name: What it is, in a word.
        title: What is varied, and what stays.
        sizes: In a full, in a quick and in a smoke run.
        measures: What of each point is fitted and drawn; those that end with "memory" are bytes, others seconds.
    """

    name: str
    title: str
    sizes: tuple[Sequence[int], Sequence[int], Sequence[int]]
    measures: tuple[str, ...]


_REAL = ("first save", "save again", "load", "save: memory", "load: memory")
_PLANNED = ("plan", "cached plan", "given", "rank's plan", "plan: memory")
CURVES = (
    Curve(
        "tensors",
        "tensors of 8 x 8 float32, one rank",
        ([10**i for i in range(2, 7)], [10**i for i in range(2, 6)], []),
        _REAL,
    ),
    Curve(
        "bytes",
        "bytes, in tensors of 16 MB, one rank",
        ([10**7, 10**8, 10**9, 3 * 10**9, 8 * 10**9], [10**7, 10**8, 10**9], [10**5]),
        _REAL,
    ),
    Curve(
        "ranks",
        f"ranks that share the cores and {_SMALL_TENSORS:,} tensors of 8 x 8 float32, each cut among them",
        ([1, 2, 4, 8], [1, 2, 4], [2]),
        _REAL,
    ),
    Curve(
        "simulated ranks",
        f"simulated ranks, each with its part of {_SIMULATED_TENSORS} tensors; planning alone",
        ([64, 256, 1024, 4096, 16384], [64, 256, 1024, 4096], [4, 8]),
        _PLANNED,
    ),
)
_NOTES = f"""
Every point is measured in new processes: three, but for the largest sizes one. In each, state and ranks are made, saved
once (*first save*: the ranks get connected and the save is planned), saved {_REPEATS} times again, and loaded
{_REPEATS} times from the page cache; a point is the median of the processes' medians. *Memory* is the growth of the
worse rank's resident set to its peak in one more save and one more load, so without the state itself. Simulated ranks
are as in `benchmark.scale`, each plan the best of {_REPEATS}: *given* is the coordinator's time for one loading rank,
*rank's plan* that rank's.

The *slope* is that of a line through the points in logarithmic axes, from the largest size down to a
{_FITTED:g}th of it: 0 is a time that stays, 1 one that grows as the size does. Points below {duration(_LEAST_SECONDS)}
or {megabytes(_LEAST_BYTES)} are left out of it; "–" is where fewer than two are left.
""".strip()

Point = dict[str, float]


def measure(session: Session) -> dict[str, Any]:
    """Everything; ``curves`` with their ``points`` and ``slopes``, ``goals``, ``versions``."""
    curves, versions = [], dict[str, str]()
    for curve in (one for one in CURVES if one.name in session.states):
        points: list[Point] = []
        for size in curve.sizes[2 if session.smoke else session.quick]:
            if curve.name == "bytes" and not _has_room(session, size):
                say("")
                print(f"{size / 1e9:g} GB: not enough memory, or room in {session.scratch}; left out")
                continue
            samples = [_sample(curve, size, session, versions) for _ in range(_processes(curve, size, session))]
            points.append(
                {"size": size, **{name: float(np.median([one[name] for one in samples])) for name in samples[0]}}
            )
        slopes = {name: slope([(point["size"], point[name]) for point in points], name) for name in curve.measures}
        curves.append({"name": curve.name, "title": curve.title, "points": points, "slopes": slopes})
    return {"curves": curves, "goals": list(_goals(curves)), "versions": versions}


def _has_room(session: Session, nbytes: int) -> bool:
    memory = memory_of_machine()["MemAvailable"]
    return memory > _TIMES_THE_STATE * nbytes and shutil.disk_usage(session.scratch).free > 2 * nbytes


def _processes(curve: Curve, size: int, session: Session) -> int:
    most = {"tensors": _MANY_TENSORS, "bytes": _LARGE_BYTES, "ranks": _MANY_RANKS, "simulated ranks": 0}[curve.name]
    return session.rounds if size < most else 1


def _sample(curve: Curve, size: int, session: Session, versions: dict[str, str]) -> Point:
    """Measure one point once, in processes that end with it."""
    say(f"{curve.name}: {size:,}")
    if curve.name == "simulated ranks":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_simulated, (size, session.smoke, session.scratch))
    ranks = size if curve.name == "ranks" else 1
    state = f"tensors:{20 if session.smoke else _SMALL_TENSORS}" if curve.name == "ranks" else f"{curve.name}:{size}"
    with session.started(ranks) as (started,):
        versions.update(versions_of([started]))
        return _saved_and_loaded(started, state, session)


def _saved_and_loaded(ranks: Ranks, state: str, session: Session) -> Point:
    ranks.do("build", state=state, layouts=["same"])
    path = session.scratch / "save"

    def call(work: str, memory: bool = False, keep: bool = False) -> Mapping[str, float]:
        answers = slower(ranks.do("measure", work=work, path=str(path), memory=memory))
        if work == "save" and not keep:
            session.remove(path)
        return answers

    first = call("save")["seconds"]
    again = [call("save")["seconds"] for _ in range(_REPEATS)]
    saving = call("save", memory=True, keep=True)["peak"]
    session.cache(path)
    loads = [call("load")["seconds"] for _ in range(_REPEATS)]
    loading = call("load", memory=True)["peak"]
    session.remove(path)
    numbers = (first, float(np.median(again)), float(np.median(loads)), max(0, saving), max(0, loading))
    return dict(zip(_REAL, numbers, strict=True))


def _simulated(ranks: int, smoke: bool, folder: Path) -> Point:
    """In a process of its own: what one coordinator plans."""
    tensors = 10 if smoke else _SIMULATED_TENSORS
    row, plan = measure_plan(ranks, tensors, _REPEATS)
    cached, load = measure_cached(plan, folder), measure_load(plan)
    numbers = (row["seconds"], cached["seconds"], load["give_seconds"], load["plan_seconds"], row["peak_bytes"])
    return dict(zip(_PLANNED, map(float, numbers), strict=True))


def slope(points: Sequence[tuple[float, float]], measure: str) -> float | None:
    """How steep a measure is over the sizes in logarithmic axes; None if too little of it is more than noise."""
    least = _LEAST_BYTES if measure.endswith("memory") else _LEAST_SECONDS
    top = max((size for size, _ in points), default=0)
    fitted = [(math.log(size), math.log(value)) for size, value in points if value >= least and size >= top / _FITTED]
    if len(fitted) < 2:
        return None
    x, y = np.array(fitted).T
    return float(np.polyfit(x, y, 1)[0])


def _goals(curves: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for curve in curves:
        for name, found in curve["slopes"].items():
            shown = "too little to fit" if found is None else f"{found:.2f}"
            yield goal(
                f"{name} over {curve['name']}",
                f"slope at most {_STEEPEST:g}",
                shown,
                found is None or found <= _STEEPEST,
            )
        for point in curve["points"]:
            if point["size"] == 16384 and "cached plan" in point:
                seconds = point["cached plan"]
                yield goal(
                    "16,384 simulated ranks, 4M shards",
                    "cached plan in at most 50 ms",
                    duration(seconds),
                    seconds <= 0.05,
                )


def as_markdown(found: Mapping[str, Any]) -> str:
    """The report."""
    lines = heading("How time and memory grow", found)
    for curve in found["curves"]:
        lines += [f"## Over {curve['title']}", "", *_table(curve), ""]
    return "\n".join([*lines, *goals_section(found["goals"]), *notes(_NOTES)])


def _table(curve: Mapping[str, Any]) -> list[str]:
    slopes = curve["slopes"]
    rows = [
        [_size(curve["name"], point["size"]), *(_shown(name)(point[name]) for name in slopes)]
        for point in curve["points"]
    ]
    rows.append(["**slope**", *("–" if one is None else f"{one:.2f}" for one in slopes.values())])
    return table([curve["name"], *slopes], rows)


def _size(name: str, size: float) -> str:
    return f"{size / 1e6:,g} MB" if name == "bytes" else f"{size:,.0f}"


def _shown(measure: str) -> Callable[[float], str]:
    return megabytes if measure.endswith("memory") else duration


if __name__ == "__main__":
    raise SystemExit(main("curves", measure, as_markdown))
