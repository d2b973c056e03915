"""What commands print: JSON, numbers with units, lines in columns; coloured on terminals, and never wrapped."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import typer

__all__ = ["clean", "count", "human_bytes", "plain", "print_columns", "print_json", "say", "shape_text"]

_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
_STYLES = {"head": "bold", "good": "green", "bad": "red", "faint": "dim", "name": "cyan"}


def print_json(document: Any) -> None:
    """Print one JSON document. Numbers that JSON lacks are strings: NaN, Infinity, -Infinity."""
    import msgspec

    typer.echo(
        msgspec.json.format(msgspec.json.encode(plain(msgspec.to_builtins(document, enc_hook=repr))), indent=2).decode()
    )


def plain(value: Any) -> Any:
    """A value in what JSON has: what it lacks becomes text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")  # halves of surrogate pairs
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {plain(key): plain(item) for key, item in value.items()}
    return repr(value)


def clean(text: str) -> str:
    """Text from a checkpoint or an error without what a terminal would obey: control characters become visible."""
    return text.translate(_VISIBLE)


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
    """Print a line or several, in a style if somebody looks at it.

    Args:
        text: What to print.
        style: ``head``, ``good``, ``bad``, ``faint``, ``name``, or none.
        err: To stderr.
    """
    text = clean(text)
    if style and _coloured(err):
        from rich.console import Console

        Console(stderr=err, soft_wrap=True, highlight=False, markup=False).print(text, style=_STYLES[style])
    else:
        typer.echo(text, err=err)


def print_columns(rows: Sequence[Sequence[str]], head: Sequence[str] = (), right: Sequence[int] = ()) -> None:
    """Print rows in columns, each as wide as it must be.

    Args:
        rows: The cells; a row may be shorter than others.
        head: The columns' names, if they are to be printed.
        right: Columns whose cells stand at the right.
    """
    table = [head, *rows] if head else list(rows)
    widths: list[int] = []
    for row in table:
        widths += [0] * (len(row) - len(widths))
        if len(row) > 1:  # a row of one cell is a line
            widths = [max(known, len(cell)) for known, cell in zip(widths, row, strict=False)] + widths[len(row) :]
    lines = []
    for row in table:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))]
        lines.append("  ".join(cells).rstrip())
    if head:
        say(lines.pop(0), "head")
    if lines:
        typer.echo("\n".join(clean(line).replace("\n", "\\n") for line in lines))


def _coloured(err: bool) -> bool:
    stream = sys.stderr if err else sys.stdout
    return stream.isatty()
