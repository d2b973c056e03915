"""``recipes``: what recipes, or an aoa_config, would make of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..visible import visible
from .arguments import CheckpointPath, Identifier, Json, alone_only
from .documents import print_json
from .output import count, human_bytes, print_columns, say, shape_text

if TYPE_CHECKING:
    from .making import MadeFacts, PartFacts, RecipesFacts

__all__ = ["recipes"]

_MOST_KEYS = 20
_MOST_PARTS = 8


def recipes(
    path: CheckpointPath,
    rules: Annotated[
        str,
        typer.Argument(
            metavar="RULES", help="An aoa_config in a JSON file, or FILE.py or FILE.py:NAME.", show_default=False
        ),
    ],
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", help="Show a key only, what lies below it, or a pattern: '*.weight'."),
    ] = None,
    unique_id: Identifier = None,
    into: Annotated[
        str | None,
        typer.Option("--into", metavar="PATH", help="A checkpoint with tensors like those that are to be filled."),
    ] = None,
    cast: Annotated[bool, typer.Option("--cast", help="Convert dtypes, as LoadOptions(cast=True) does.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every tensor and every part.")] = False,
    json: Json = False,
) -> None:
    """Show what recipes or an aoa_config would make of a checkpoint, without loading it.

    That is, for each tensor that is made: shape, element type, bytes to be read, the expression, and the boxes of
    stored tensors that it is made of; then what is loaded as it is stored, what nothing asks for, statements that
    change nothing, and all that does not fit, as a load would say it; ends with 1 if there is any of the last.

    A JSON file has an aoa_config, or a list of its statements, and needs Paddle 3.3. A file of Python is run; it has
    recipes, a mapping as LoadOptions(recipes=...) takes it, or an aoa_config, or functions that return these.

    What is wanted is what can be made, as in a merged load: keys with placeholders are those for which the checkpoint
    has tensors. With --into it is what another checkpoint has, by keys, shapes and element types, whole.

    \b
    Examples:
      paddle-dist-ckpt recipes checkpoints aoa_config.json
      paddle-dist-ckpt recipes checkpoints recipes.py --into exported '*.qkv.weight'
    """
    from ..errors import CheckpointNotFoundError
    from ..storage import as_source, local_path
    from .making import read_rules, recipes_facts

    alone_only("recipes")
    wanted = None if into is None else as_source(into)
    facts = recipes_facts(as_source(path), unique_id, read_rules(rules), wanted, pattern, cast)
    if pattern is not None and not (facts.made or facts.as_stored or facts.left or facts.problems):
        raise CheckpointNotFoundError(f"no wanted tensor matches '{visible(pattern)}'")
    facts = replace(facts, path=local_path(path))
    print_json(facts) if json else _print(facts, everything)
    raise typer.Exit(1 if facts.problems else 0)


def _print(facts: RecipesFacts, everything: bool) -> None:
    say(f"{facts.path}  checkpoint {facts.unique_id}, {facts.format}", "head")
    shown = facts.made if everything else facts.made[:_MOST_KEYS]
    for made in shown:
        say()
        _print_made(made, everything)
    if len(shown) < len(facts.made):
        say(f"… {count(len(facts.made) - len(shown), 'more tensor')}; see --all", "faint")
    say()
    says = f"{count(len(facts.made), 'tensor')} made, {len(facts.as_stored):,} as stored"
    say(f"{says}; {human_bytes(facts.bytes)} to be read")
    for title, lines in (
        ("left as they are", facts.left),
        ("not asked for", facts.unused),
        ("statements that change nothing", facts.idle),
    ):
        if lines:
            say(f"{title}: {_listed(lines, everything)}")
    if facts.problems:
        say(f"{count(len(facts.problems), 'problem')}, for which a load would be refused:", "bad")
        for problem in facts.problems:
            say(f"  {problem}")


def _print_made(made: MadeFacts, everything: bool) -> None:
    say(f"{made.key}  {shape_text(made.shape)} {made.dtype}, reads {human_bytes(made.bytes)}", "name")
    if made.recipe is not None:
        say(f"  {made.recipe}")
    parts = made.parts if everything else made.parts[:_MOST_PARTS]
    print_columns([["  " + _region(part.to, _turned(part)), f"from {_source(part)}"] for part in parts])
    if len(parts) < len(made.parts):
        say(f"  … {count(len(made.parts) - len(parts), 'more part')}; see --all", "faint")


def _turned(part: PartFacts) -> list[int]:
    return [1 if axis < 0 else part.shape[axis] for axis in part.axes]


def _source(part: PartFacts) -> str:
    axes = [axis for axis in part.axes if axis >= 0]
    turned = "" if axes == sorted(axes) else f", axes {shape_text(axes)}"
    return f"{part.stored} {_region(part.offset, part.shape)}{turned}"


def _region(offset: Sequence[int], shape: Sequence[int]) -> str:
    return "[" + ", ".join(f"{start}:{start + length}" for start, length in zip(offset, shape, strict=True)) + "]"


def _listed(lines: Sequence[str], everything: bool) -> str:
    shown = lines if everything else lines[:_MOST_KEYS]
    more = f", … {len(lines) - len(shown):,} more" if len(shown) < len(lines) else ""
    return ", ".join(shown) + more
