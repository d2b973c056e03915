"""What reports are made of: medians and ratios with their intervals, numbers with units, tables, goals."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = [
    "by_work",
    "duration",
    "goal",
    "goals_section",
    "heading",
    "interval",
    "median_interval",
    "median_of",
    "megabytes",
    "notes",
    "paired_ratio",
    "percent",
    "table",
    "times",
    "with_machine",
]

_RESAMPLES = 4000
_TABLE = re.compile(r"^(?<!\|\n)(?=\|)", re.MULTILINE)  # where one begins


def median_of(samples: Mapping[int, float]) -> float:
    """The median over all rounds."""
    return float(np.median(list(samples.values())))


def paired_ratio(samples: Mapping[int, float], base: Mapping[int, float]) -> tuple[float, float, float] | None:
    """The median over the common rounds of the ratio within a round, and its 95 % percentile bootstrap interval."""
    rounds = sorted(samples.keys() & base.keys())
    return median_interval([samples[i] / base[i] for i in rounds]) if rounds else None


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its 95 % percentile bootstrap interval."""
    drawn = np.random.default_rng(0).choice(np.array(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def by_work(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], Any]:
    """The samples of ``benchmark.run``, by state, work and peer's name."""
    return {(row["state"], row["work"], row["peer"]): row["samples"] for row in rows}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, all but its first column aligned to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def duration(seconds: float) -> str:
    """Seconds as a reader wants them."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def megabytes(nbytes: float) -> str:
    """Bytes, in MB."""
    return f"{nbytes / 1e6:.1f} MB"


def times(ratio: float) -> str:
    """How many times as long, or as much."""
    return f"{ratio:.3g}x"


def percent(part: float) -> str:
    """A part of 1."""
    return f"{part * 100:.3g} %"


def interval(found: Mapping[int, float] | Sequence[float], shown: Callable[[float], str]) -> str:
    """A median with its 95 % interval: of samples by round, or already computed, as three numbers."""
    middle, low, high = median_interval(list(found.values())) if isinstance(found, Mapping) else found
    return f"{shown(middle)} ({shown(low)} to {shown(high)})"


def goal(work: str, wanted: str, found: str, met: bool | None) -> dict[str, Any]:
    """A goal in words, what was found, and whether that is enough; None where it was not measured."""
    return {"work": work, "goal": wanted, "found": found, "met": met}


def goals_section(goals: Sequence[Mapping[str, Any]]) -> list[str]:
    """A heading, and the table of goals."""
    verdicts = {True: "met", False: "**missed**", None: ""}
    rows = [[row["work"], row["goal"], row["found"], verdicts[row["met"]]] for row in goals]
    return ["## Goals", "", *table(["work", "goal", "found", ""], rows), ""]


def heading(title: str, found: Mapping[str, Any]) -> list[str]:
    """The title, and how it was measured; on which machine is said above each table, by :func:`with_machine`."""
    about, settings = found["machine"], found["settings"]
    versions = "".join(f", {name} {version}" for name, version in found.get("versions", {}).items())
    rounds = f" Rounds: {settings['rounds']}." if "rounds" in settings else ""
    day = f" Measured on {found['date']}." if "date" in found else ""
    lines = [
        f"# {title}",
        "",
        f"{about['filesystem']}, {about['kernel']}, Python {about['python']}{versions}. Load average before the run: "
        f"{about['load_before']}, after it: {found['load_after']}.{rounds} Command: `{found['command']}`.{day}",
        "",
    ]
    if settings["smoke"]:
        lines += ["**This was to see that all works, with tiny states: the numbers mean nothing.**", ""]
    return lines


def with_machine(report: str, found: Mapping[str, Any]) -> str:
    """A report with a line above each table: on which machine it was measured, and what one thread can do there."""
    about, settings = found["machine"], found["settings"]
    cores = f"{settings['cores']} of {about['cores']} cores" if "cores" in settings else f"{about['cores']} cores"
    rates = ", ".join(f"{name} {rate:.3g}" for name, rate in about["rates"].items())
    line = f"{about['cpu']}, {cores}, {about['memory_gib']} GiB of memory; GB/s of one thread: {rates}"
    return _TABLE.sub(f"{line}\n\n", report)


def notes(text: str) -> list[str]:
    """How it was measured."""
    return ["## How it was measured", "", text, ""]
