"""The table of what was tried and how it ended: as text, and for the documentation."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from .ledger import Ledger
from .suites import Suite

__all__ = ["FORMS", "table"]

FORMS = ("text", "rst", "markdown")
_HEAD = ("Suite", "Attempts", "Seconds", "Outcomes")
Row = tuple[str, str, str, str]


def table(suites: Sequence[Suite], ledger: Ledger, form: str) -> str:
    """What was done of these suites."""
    rows = []
    for suite in suites:
        done = ledger.of(suite.module)
        rows.append((suite.name, f"{done.count:,}", f"{done.seconds:,.0f}", _outcomes(done.outcomes)))
    return {"text": _text, "rst": _rst, "markdown": _markdown}[form](rows)


def _outcomes(outcomes: Counter[str]) -> str:
    return "; ".join(f"{name} {count:,}" for name, count in outcomes.most_common())


def _text(rows: Sequence[Row]) -> str:
    widths = [max(len(row[column]) for row in (_HEAD, *rows)) for column in range(3)]
    return "\n".join(
        f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}" for row in (_HEAD, *rows)
    )


def _rst(rows: Sequence[Row]) -> str:
    lines = [".. list-table::", "    :header-rows: 1", ""]
    for row in (_HEAD, *rows):
        for number, cell in enumerate(row):
            glued = cell.replace(" ", "\0").replace(";\0", "; ")  # an outcome and its number stay in one line
            start = f"    {'* -' if not number else '  -'} "
            wrapped = textwrap.wrap(glued, 120, initial_indent=start, subsequent_indent=" " * 8, break_on_hyphens=False)
            lines += [line.replace("\0", " ") for line in wrapped]
    return "\n".join(lines)


def _markdown(rows: Sequence[Row]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (_HEAD, ("---", "---:", "---:", "---"), *rows))
