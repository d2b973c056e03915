"""What commands print for people: numbers with units, lines in columns; coloured on terminals, and never wrapped."""

from __future__ import annotations

import itertools
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence

import typer

from ..visible import MOST_LINE, visible

__all__ = ["count", "human_bytes", "print_columns", "say", "say_text", "shape_text"]

_WIDEST = 200  # letters of a column
_LINES = 1000  # that are printed together
_PIECE = 1 << 16  # letters of a text that are printed together
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_STYLES = {"head": "bold", "good": "green", "bad": "red", "faint": "dim", "name": "cyan"}


def human_bytes(nbytes: int) -> str:
    """A number of bytes as people say it: ``1.5 GiB``."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{nbytes} B" if units[0] == "B" else f"{size:.4g} {units[0]}" if size < 1000 else f"{size:.0f} {units[0]}"


def count(number: int, what: str) -> str:
    """``1 file``, ``2,000 files``."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def shape_text(shape: Sequence[int]) -> str:
    """A shape as numpy prints it without the trailing comma: ``(2, 3)``, ``()``."""
    return "(" + ", ".join(map(str, shape)) + ")"


def say(text: str = "", style: str = "", err: bool = False) -> None:
    """Print a line, in a style if somebody looks at it.

    Args:
        text: What to print.
        style: ``head``, ``good``, ``bad``, ``faint``, ``name``, or none.
        err: To stderr.
    """
    text = visible(text, MOST_LINE)
    if style and _coloured(err):
        from rich.console import Console

        Console(stderr=err, soft_wrap=True, highlight=False, markup=False, emoji=False).print(
            text, style=_STYLES[style]
        )
    else:
        typer.echo(text, err=err)


def say_text(text: str) -> None:
    """Print a text of several lines, however long it is, little by little."""
    for start in range(0, len(text), _PIECE):
        typer.echo(visible(text[start : start + _PIECE], None, "\n"), nl=False)
    typer.echo()


def print_columns(rows: Iterable[Sequence[str]], head: Sequence[str] = (), right: Sequence[int] = ()) -> None:
    """Print rows in columns, each as wide as it must be; a few cells that are very wide stand out.

    Args:
        rows: The cells, which are asked for twice; a row may be shorter than others.
        head: The columns' names, if they are to be printed.
        right: Columns whose cells stand at the right.
    """
    widths: list[int] = []
    for row in itertools.chain([head], rows):
        widths += [0] * (len(row) - len(widths))
        if len(row) > 1:  # a row of one cell is a line
            for i, cell in enumerate(row):
                widths[i] = min(max(widths[i], _width(visible(cell))), _WIDEST)

    def line(row: Sequence[str]) -> str:
        cells = [(cell, " " * (width - _width(cell))) for cell, width in zip(map(visible, row), widths, strict=False)]
        return "  ".join(
            [blank + cell if i in right else cell + blank for i, (cell, blank) in enumerate(cells)]
        ).rstrip()

    if head:
        say(line(head), "head")
    lines = map(line, rows)
    while some := list(itertools.islice(lines, _LINES)):
        typer.echo("\n".join(some))


def _width(text: str) -> int:
    """How many columns of a terminal a text takes: Chinese letters have two each, marks above a letter none."""
    others = "".join(_NOT_ASCII.findall(text))  # each of which is looked at
    width = sum((2 if unicodedata.east_asian_width(c) in "WF" else 1) for c in others if not unicodedata.combining(c))
    return len(text) - len(others) + width


def _coloured(err: bool) -> bool:
    stream = sys.stderr if err else sys.stdout
    return stream is not None and stream.isatty()  # none: it was closed before the command began
