"""What commands print: JSON, numbers with units, lines in columns; coloured on terminals, and never wrapped."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from ..core.text import encodable, escaped, value_text, visible

__all__ = ["count", "human_bytes", "lines_text", "plain", "print_columns", "print_json", "say", "shape_text"]

_MOST_LETTERS = 100_000  # of a value that JSON has no type for
_WIDEST = 200  # letters of a column
_LINES = 1000  # that are printed together
_STYLES = {"head": "bold", "good": "green", "bad": "red", "faint": "dim", "name": "cyan"}


def print_json(document: Any) -> None:
    """Print one JSON document. Numbers that JSON lacks are strings: NaN, Infinity, -Infinity."""
    import msgspec

    def text(value: Any, indent: str) -> str:
        data = msgspec.json.encode(plain(msgspec.to_builtins(value, enc_hook=plain)))
        lines = msgspec.json.format(data, indent=2).decode().split("\n")
        return f"\n{indent}".join(escaped(line, _json_escape) for line in lines)

    names = document if isinstance(document, dict) else [each.name for each in dataclasses.fields(document)]
    end = "{\n"
    for name in names:
        value = document[name] if isinstance(document, dict) else getattr(document, name)
        typer.echo(f'{end}  "{name}": ', nl=False)
        end = ",\n"
        if not isinstance(value, list) or len(value) <= _LINES:
            typer.echo(text(value, "  "), nl=False)
            continue
        for start in range(0, len(value), _LINES):  # little by little, for there may be very many
            lines = text(value[start : start + _LINES], "  ")
            first, last = (0 if start == 0 else 1), (None if start + _LINES >= len(value) else -len("\n  ]"))
            typer.echo(("," if start else "") + lines[first:last], nl=False)
    typer.echo("\n}")


def plain(value: Any) -> Any:
    """A value in what JSON has: what it lacks becomes text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return encodable(value)
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {plain(key): plain(item) for key, item in value.items()}
    return value_text(value, _MOST_LETTERS)


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def lines_text(text: str) -> str:
    """A message of several lines, each of them visible. All but the first are indented, so that none of them looks like
    a message of its own."""
    return "\n    ".join(visible(line, None) for line in text.split("\n"))


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
    text = visible(text, None)
    if style and _coloured(err):
        from rich.console import Console

        Console(stderr=err, soft_wrap=True, highlight=False, markup=False, emoji=False).print(
            text, style=_STYLES[style]
        )
    else:
        typer.echo(text, err=err)


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
                widths[i] = min(max(widths[i], len(visible(cell))), _WIDEST)

    def line(row: Sequence[str]) -> str:
        pairs = enumerate(zip(map(visible, row), widths, strict=False))
        return "  ".join([c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in pairs]).rstrip()

    if head:
        say(line(head), "head")
    lines = map(line, rows)
    while some := list(itertools.islice(lines, _LINES)):
        typer.echo("\n".join(some))


def _coloured(err: bool) -> bool:
    stream = sys.stderr if err else sys.stdout
    return stream.isatty()
