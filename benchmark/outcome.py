"""What the benchmarks of saves have in common: arguments, cleaning up, and writing down what was found."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.report import table

__all__ = ["add_arguments", "closing_sections", "remove", "write"]


def add_arguments(parser: argparse.ArgumentParser, full: int, quick: int, out: Path) -> None:
    """Add the arguments that say how much is measured, on what, and where the results go."""
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, help=f"default: {full}, or {quick}")
    parser.add_argument("--seed", type=int, default=0, help="of the order within the rounds")
    parser.add_argument("--cores", type=int, default=2, help="how many cores all ranks may use together")
    parser.add_argument("--out", type=Path, default=out, help="folder for the results")
    parser.add_argument("--scratch", type=Path, help="existing folder for checkpoints, 2 GB; default: that of --out")


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, at nobody's cost."""
    shutil.rmtree(checkpoint)
    os.sync()  # nobody pays for what another one left in the page cache


def closing_sections(found: Mapping[str, Any], notes: str) -> list[str]:
    """The last sections of a report: goals, and how it was measured."""
    rows = [[row["work"], row["goal"], row["found"], "met" if row["met"] else "**missed**"] for row in found["goals"]]
    return [
        "## Goals",
        "",
        *table(["work", "goal", "found", ""], rows),
        "",
        "## How it was measured",
        "",
        notes,
        "",
    ]


def write(out: Path, name: str, found: Mapping[str, Any], report: str) -> None:
    """Write the findings and the report, and print the report."""
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(report, encoding="utf-8")
    print(report)
