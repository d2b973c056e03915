"""Holds all that was measured against all goals.

    python -m benchmark.summary [--results DIR] [--smoke]

Reads what the other benchmarks wrote, prints tables with a row for every goal, and writes them to goals.md (with
--smoke it does not). Works of benchmark.run that were not measured have no row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.command import BENCHMARKS, RESULTS
from benchmark.report import goals_section, with_machine

_FILES = [benchmark.files or name for name, benchmark in BENCHMARKS.items()]


def summary(results: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What was found, by the names of the files, and the names of the files that are missing."""
    files = {name: results / f"{name}.json" for name in _FILES}
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items() if path.exists()}
    return found, [name for name in _FILES if name not in found]


def as_markdown(found: Mapping[str, Mapping[str, Any]], missing: Sequence[str]) -> str:
    """How many goals are met, and a table for each of the files, which may be of different machines."""
    goals = [row for one in found.values() for row in one["goals"]]
    met, missed, unknown = (sum(row["met"] is verdict for row in goals) for verdict in (True, False, None))
    lines = ["# Goals", "", f"{met} met, {missed} missed, {unknown} not measured.", ""]
    if missing:
        lines += [f"Not there: {', '.join(f'{name}.json' for name in missing)}.", ""]
    for name, one in found.items():
        lines += [f"## {name}", "", *with_machine("\n".join(goals_section(one["goals"])[2:]), one).split("\n")]
    return "\n".join(lines)


def main() -> int:
    """Print and write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Hold all that was measured against all goals.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the JSON files")
    parser.add_argument("--smoke", action="store_true", help="write nothing")
    args = parser.parse_args()
    report = as_markdown(*summary(args.results))
    if not args.smoke:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / "goals.md").write_text(report, encoding="utf-8")
    print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
