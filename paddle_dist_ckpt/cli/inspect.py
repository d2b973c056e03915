"""``inspect``: what a checkpoint or a folder of steps holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.text import key_text, value_text
from .arguments import CheckpointPath, Identifier, Json
from .documents import print_json
from .output import count, human_bytes, print_columns, say

if TYPE_CHECKING:
    from .inspection import CheckpointFacts, StepsFacts

__all__ = ["inspect"]

_MOST_VALUES = 20
_MOST_METRICS = 20  # each is a column
_MOST_LETTERS = 100


def inspect(
    path: CheckpointPath,
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", help="A key, what lies below it, or a pattern such as '*.weight'."),
    ] = None,
    unique_id: Identifier = None,
    depth: Annotated[
        int | None, typer.Option("--depth", metavar="N", min=1, help="How many levels of the tree to show.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every tensor and value, equal layers too, one by one.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what a checkpoint holds, and how its tensors are cut.

    That is: who saved it, its tensors as a tree with shapes, element types and sizes, how each is cut, and its values.

    Reads no tensors. PATH may be the folder of a CheckpointManager as well: then its steps are listed, with sizes and
    metrics. Numbered layers of equal content are shown once, and deep levels are summed up: see --all and --depth.

    \b
    Examples:
      paddle-dist-ckpt inspect checkpoints
      paddle-dist-ckpt inspect checkpoints 'model.*.weight' --id 3 --json
    """
    from ..errors import CheckpointNotFoundError
    from ..folder.nothing import managers_text
    from ..storage import as_source, as_storage, local_path
    from .inspection import checkpoint_facts, steps_facts

    steps = steps_facts(path) if unique_id is None else None
    if steps is not None:
        if pattern is not None:
            raise CheckpointNotFoundError(
                f"{steps.path} holds no keys itself; {managers_text(as_storage(path)) or 'it is a folder of steps'}"
            )
        print_json(steps) if json else _print_steps(steps)
        if steps.unread:
            raise typer.Exit(1)
        return
    facts = replace(checkpoint_facts(as_source(path), unique_id, pattern), path=local_path(path))
    if json:
        print_json(facts)
    else:
        _print_checkpoint(facts, depth, everything)


def _print_checkpoint(facts: CheckpointFacts, depth: int | None, everything: bool) -> None:
    from .tree import tree_rows

    say(f"{facts.path}  checkpoint {facts.unique_id}", "head")
    others = [number for number in facts.ids if number != facts.unique_id]
    rows = [
        ["format", facts.format],
        ["saved", ", ".join(filter(None, [facts.created, f"by {count(facts.world_size, 'rank')}"]))],
        ["writer", facts.library + (f", Paddle {facts.paddle_version}" if facts.paddle_version else "")],
        ["files", f"{count(facts.files, 'file')}, {human_bytes(facts.file_bytes)}"],
        ["tensors", f"{count(len(facts.tensors), 'tensor')}, {human_bytes(facts.tensor_bytes)}"],
    ]
    if others:
        rows.append(["other ids", ", ".join(map(str, others[-20:]))])
    rows += [
        ["metadata", f"{key_text(name)} = {value_text(value, _MOST_LETTERS)}"]
        for name, value in facts.user_metadata.items()
    ]
    print_columns([row for row in rows if row[1]])
    if facts.tensors:
        say()
        print_columns(
            tree_rows(facts.tensors, depth, everything), ["tensor", "shape", "dtype", "size", "cut in"], right=[3]
        )
    if facts.values:
        say()
        say(count(len(facts.values), "value"), "head")
        shown = facts.values if everything else facts.values[:_MOST_VALUES]
        print_columns(
            [
                [
                    value.key,
                    value_text(value.value, _MOST_LETTERS)
                    if value.bytes is None
                    else f"<a value of {human_bytes(value.bytes)}>",
                ]
                for value in shown
            ]
        )
        if len(shown) < len(facts.values):
            say(f"… {count(len(facts.values) - len(shown), 'more value')}; see --all", "faint")
    if facts.left_out:
        say()
        say(f"not read: {count(len(facts.left_out), 'key')}", "head")
        print_columns([[key, reason] for key, reason in facts.left_out.items()])


def _print_steps(facts: StepsFacts) -> None:
    say(f"{facts.path}  {count(len(facts.steps), 'step')}", "head")
    known = sorted({name for step in facts.steps for name in step.metrics})
    names = known[:_MOST_METRICS]
    rows = [
        [
            str(step.step),
            human_bytes(step.bytes),
            step.created,
            *(f"{step.metrics[name]:.6g}" if name in step.metrics else "" for name in names),
            "latest" if step.step == facts.latest else "",
        ]
        for step in facts.steps
    ]
    print_columns(rows, ["step", "size", "saved", *names, ""], right=[0, 1, *range(3, 3 + len(names))])
    for name in names:
        if name in facts.lowest:
            say(f"{name} is lowest at step {facts.lowest[name]}, highest at step {facts.highest[name]}")
    if len(names) < len(known):
        say(f"… {count(len(known) - len(names), 'more metric')}; see --json", "faint")
    for folder in facts.uncommitted:
        say(f"{folder} holds no checkpoint: it is being saved, or a save has failed", "faint")
    for folder, reason in facts.unread.items():
        say(f"{folder} cannot be read: {reason}")
