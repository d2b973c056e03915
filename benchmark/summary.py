"""Holds all that was measured against all goals.

    python -m benchmark.summary [--results DIR]

Reads what benchmark.run, .scale, .bytes_read, .exchange, .async_save and .device wrote, prints a table with a row for
every goal, and writes it to goals.md. Works of benchmark.run that were not measured have no row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.goals import goals_table

__all__ = ["summary"]

_HERE = Path(__file__).resolve().parent
_MIB, _GIB = 2**20, 2**30
Found = Mapping[str, Any]
Row = list[str]


@dataclass(frozen=True, slots=True)
class _Limit:
    """A number that must not be exceeded.

    Attributes:
        work: What is measured.
        goal: The goal in words; ``{}`` is replaced by the limit.
        most: The limit.
        unit: What the numbers are shown in, and how many of it are 1: ``("ms", 1000)`` for seconds.
        value: Finds the number in the results; raises KeyError or StopIteration if it was not measured.
    """

    work: str
    goal: str
    most: float
    unit: tuple[str, float]
    value: Callable[[Found], float]


def _planning(state: str, work: str) -> Callable[[Found], float]:
    return lambda all_found: next(
        float(row["median"])
        for row in all_found["benchmark"]["planning"]
        if (row["state"], row["work"], row["peer"]) == (state, work, "ours")
    )


def _size(ranks: int, value: Callable[[Found], float]) -> Callable[[Found], float]:
    return lambda all_found: next(value(row) for row in all_found["scale"]["sizes"] if row["ranks"] == ranks)


def _grid(name: str) -> Callable[[Found], float]:
    return lambda all_found: all_found["scale"]["grid"][name]


def _large_job(ranks: int, shards: str, seconds: float, memory: float) -> Iterator[_Limit]:
    """The three goals for a very large job."""
    work = f"{ranks:,} simulated ranks, {shards} shards"
    yield _Limit(work, "plan in at most {}", seconds, ("s", 1), _size(ranks, lambda row: row["seconds"]))
    yield _Limit(work, "cached in at most {}", 0.05, ("ms", 1e3), _size(ranks, lambda row: row["cached"]["seconds"]))
    yield _Limit(
        work, "memory at most {}", memory * _GIB, ("GiB", 1 / _GIB), _size(ranks, lambda row: row["peak_bytes"])
    )


_MANY = "256 simulated ranks x 2,000 tensors"
_CUT = "one tensor in 1,024 x 1,024 shards"
_LIMITS = (
    _Limit(
        "A: second save of the same structure",
        "coordination and planning in at most {}",
        0.006,
        ("ms", 1e3),
        _planning("A", "save"),
    ),
    _Limit(
        "B: second save of the same structure",
        "coordination and planning in at most {}",
        0.025,
        ("ms", 1e3),
        _planning("B", "save again"),
    ),
    _Limit(_MANY, "plan in at most {}", 0.4, ("ms", 1e3), _size(256, lambda row: row["seconds"])),
    _Limit(_MANY, "`.metadata` at most {}", 5e6, ("MB", 1e-6), _size(256, lambda row: row["load"]["metadata_bytes"])),
    _Limit(
        _MANY,
        "a rank is given and plans its load in at most {}",
        0.4,
        ("ms", 1e3),
        _size(256, lambda row: row["load"]["give_seconds"] + row["load"]["plan_seconds"]),
    ),
    *_large_job(4096, "1M", 1.5, 1),
    *_large_job(16384, "4M", 8, 3),
    _Limit(_CUT, "overlap with one box in at most {}", 0.3, ("ms", 1e3), _grid("overlap_seconds")),
    _Limit(_CUT, "exact cover in at most {}", 0.3, ("ms", 1e3), _grid("cover_seconds")),
)


def summary(results: Path) -> list[Row]:
    """Work, goal, what was found, and whether that is enough, for every goal."""
    names = ("benchmark", "scale", "bytes_read", "exchange", "async_save", "device")
    files = {name: results / f"{name}.json" for name in names}
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items() if path.exists()}
    rows = _measured_side_by_side(found["benchmark"]) if "benchmark" in found else []
    rows += [_limit_row(limit, found) for limit in _LIMITS]
    for case in found.get("bytes_read", {}).get("bytes_read", []):
        goal, read = (f"{case[kind] / _MIB:.1f} MiB" for kind in ("most", "read"))
        rows.append([f"bytes read: {case['case']}", f"at most {goal}", read, _verdict(case["met"])])
    if one := found.get("exchange"):
        text = f"{one['ratio']:.3g}x ({one['low']:.3g} to {one['high']:.3g})"
        work = f"exchange: {one['ranks']} ranks with folders of their own"
        rows.append([work, f"at least {one['goal']:g}x gloo alone", text, _verdict(one["met"])])
    for name in ("async_save", "device"):
        for goal in found.get(name, {}).get("goals", []):
            rows.append([goal["work"], goal["goal"], goal["found"], _verdict(goal["met"])])
    return rows


def _measured_side_by_side(found: Found) -> list[Row]:
    seconds, memory = (
        {(row["state"], row["work"], row["peer"]): row["samples"] for row in found[kind]}
        for kind in ("seconds", "memory")
    )
    return goals_table(seconds, memory)[1]


def _limit_row(limit: _Limit, found: Found) -> Row:
    name, factor = limit.unit
    goal = limit.goal.format(f"{limit.most * factor:g} {name}")
    try:
        value = limit.value(found)
    except (KeyError, StopIteration):
        return [limit.work, goal, "not measured", ""]
    return [limit.work, goal, f"{value * factor:.3g} {name}", _verdict(value <= limit.most)]


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def as_markdown(rows: Sequence[Row]) -> str:
    """The table, and how many goals are met."""
    counts = {name: sum(row[-1] == name for row in rows) for name in ("met", "**missed**", "")}
    head = [["work", "goal", "found", ""], ["---", "---:", "---:", "---:"]]
    table = ["| " + " | ".join(line) + " |" for line in [*head, *rows]]
    text = f"{counts['met']} met, {counts['**missed**']} missed, {counts['']} not measured."
    return "\n".join(["# Goals", "", text, "", *table, ""])


def main() -> int:
    """Print and write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Hold all that was measured against all goals.")
    parser.add_argument("--results", type=Path, default=_HERE / "results", help="folder with the JSON files")
    args = parser.parse_args()
    report = as_markdown(summary(args.results))
    (args.results / "goals.md").write_text(report, encoding="utf-8")
    print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
