"""``diff``: where two checkpoints differ."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.text import value_text
from .arguments import Json
from .documents import print_json
from .output import count, print_columns, say, shape_text

if TYPE_CHECKING:
    from .comparison import ComparisonFacts

__all__ = ["diff"]

_MOST_LETTERS = 60


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="One checkpoint's folder.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other's; may be the same folder.", show_default=False)],
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", help="Compare a key only, what lies below it, or a pattern: '*.weight'."),
    ] = None,
    id_a: Annotated[int | None, typer.Option("--id-a", metavar="N", min=0, help="Which of A; else the newest.")] = None,
    id_b: Annotated[int | None, typer.Option("--id-b", metavar="N", min=0, help="Which of B; else the newest.")] = None,
    prefix_a: Annotated[
        str | None, typer.Option("--prefix-a", metavar="KEY", help="Only what lies below this key of A, without it.")
    ] = None,
    prefix_b: Annotated[
        str | None, typer.Option("--prefix-b", metavar="KEY", help="Only what lies below this key of B, without it.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare two checkpoints, of whatever formats, bit by bit.

    Names the keys that only one of them has, tensors of which shape, element type or items differ, values that differ,
    and keys that cannot be read; ends with 1 if there are any. How tensors are cut does not matter. Of tensors that
    differ it says how many items do, the largest absolute difference, the largest one relative to the larger of the two
    items, and how many items are NaN in each. Tensors of different element types are compared by value as well. Both
    are read in little memory, and verified, where the format has checksums.

    Started by paddle.distributed.launch, the ranks share the work by bytes; the first one prints.

    \b
    Examples:
      paddle-dist-ckpt diff checkpoints checkpoints --id-a 100 --id-b 200 model
      paddle-dist-ckpt diff checkpoints exported --prefix-a model
    """
    from ..storage import as_source, local_path
    from .comparison import compare_together
    from .matching import Side
    from .ranks import joined, print_once

    def show(facts: ComparisonFacts) -> int:
        # Of a single file the file, and not its folder.
        one, other = (replace(side, path=local_path(path)) for side, path in ((facts.a, a), (facts.b, b)))
        facts = replace(facts, a=one, b=other)
        print_json(facts) if json else _print(facts)
        return 0 if facts.equal else 1

    sides = Side(as_source(a), id_a, prefix_a), Side(as_source(b), id_b, prefix_b)
    with joined("diff") as session:
        found = compare_together(session, *sides, pattern, False if json else None)
        code = print_once(session, lambda: show(found[0]))
    raise typer.Exit(code)


def _print(facts: ComparisonFacts) -> None:
    for name, side in (("a", facts.a), ("b", facts.b)):
        say(f"{name}: {side.path}  checkpoint {side.unique_id}, {side.format}", "head")
    if facts.equal:
        say(f"equal: {count(facts.same, 'key')}", "good")
        return
    for name, keys in (("a", facts.only_in_a), ("b", facts.only_in_b)):
        for key in keys:
            say(f"only in {name}: {key}")
    for name, reasons in (("a", facts.unread_in_a), ("b", facts.unread_in_b)):
        for key, reason in reasons.items():
            say(f"not read in {name}: {key}: {reason}")
    changed = [change for change in facts.tensors if change.shapes[0] != change.shapes[1]]
    for change in changed:
        shapes, types = map(shape_text, change.shapes), change.dtypes
        says = " | ".join(f"{shape} {dtype}" for shape, dtype in zip(shapes, types, strict=True))
        say(f"shape: {change.key}: {says}")
    rows = [
        [
            change.key,
            change.dtypes[0] if change.dtypes[0] == change.dtypes[1] else " | ".join(change.dtypes),
            f"{change.differing:,} of {change.elements:,}",
            f"{change.max_abs:.3g}",
            f"{change.max_rel:.3g}",
            " | ".join(map(str, change.nan)) if change.nan is not None and any(change.nan) else "",
        ]
        for change in facts.tensors
        if change.elements is not None
    ]
    if rows:
        print_columns(rows, ["tensor", "dtype", "items that differ", "max abs", "max rel", "nan"], right=[2, 3, 4])
    for value in facts.values:
        a, b = (value_text(each, _MOST_LETTERS) for each in (value.a, value.b))
        if a == b and type(value.a) is not type(value.b):  # numpy's numbers and texts look like Python's
            a, b = f"{a} ({type(value.a).__name__})", f"{b} ({type(value.b).__name__})"
        say(f"value: {value.key}: {a} | {b}")
    parts = {
        "equal": facts.same,
        "different": len(facts.tensors) + len(facts.values),
        "only in a": len(facts.only_in_a),
        "only in b": len(facts.only_in_b),
    }
    if unread := {*facts.unread_in_a, *facts.unread_in_b}:
        parts["not read"] = len(unread)
    say(", ".join(f"{number:,} {name}" for name, number in parts.items()), "bad")
