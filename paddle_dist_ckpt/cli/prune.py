"""``prune``: removes steps from the folder of a CheckpointManager."""

from __future__ import annotations

from typing import Annotated

import typer

from .arguments import Json, Yes, alone_only, confirm
from .documents import print_json
from .output import count, human_bytes, say

__all__ = ["prune"]


def prune(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of the steps' folders.", show_default=False)],
    keep_last: Annotated[
        int, typer.Option("--keep-last", metavar="N", min=1, help="How many of the latest steps to keep.")
    ],
    keep_every: Annotated[
        int | None,
        typer.Option("--keep-every", metavar="N", min=1, help="Keep the steps that are multiples of this as well."),
    ] = None,
    best: Annotated[
        str | None,
        typer.Option("--best", metavar="NAME:MODE", help="Keep the best step as well: loss:min, accuracy:max."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove old steps of a CheckpointManager, after asking.

    The rules are those of the manager, which removes steps by itself after each save if it is told to. Folders of steps
    whose save has died are removed as well; steps that are being saved, and links to folders elsewhere, are not. Do
    not remove steps while a job restores one of them.

    \b
    Examples:
      paddle-dist-ckpt prune run-7 --keep-last 3 --best loss:min --dry-run
      paddle-dist-ckpt prune run-7 --keep-last 3 --best loss:min --yes
    """
    from pathlib import Path

    from ..errors import CheckpointNotFoundError
    from ..manager.prune import carry_out, plan_prune
    from ..manager.steps import Retention
    from .inspection import no_steps_text, steps_facts

    alone_only("prune")
    name, _, mode = (best or "").rpartition(":")
    if best is not None and (not name or mode not in ("min", "max")):
        raise typer.BadParameter("pass a metric's name and min or max, such as loss:min", param_hint="--best")
    facts = steps_facts(root)
    if facts is None:
        raise CheckpointNotFoundError(no_steps_text(root))
    retention = Retention(keep_last, keep_every, (name, mode) if best is not None else None)
    plan = plan_prune(Path(facts.path), retention)
    sizes = {step.step: step.bytes for step in facts.steps}
    freed = sum(sizes.get(step, 0) for step in plan.doomed)
    removed, left, unconfirmed = [*plan.doomed, *plan.abandoned], list[int](), list[int]()
    if removed and not dry_run:
        if not yes:
            say(f"keeps    {_listed(plan.kept)}", err=True)
            say(f"removes  {_listed(removed)}", err=True)
        confirm(f"Remove {count(len(removed), 'step')} of {len(plan.kept) + len(removed)}, {human_bytes(freed)}?", yes)
        gone = carry_out(plan)
        unconfirmed = [step for step in plan.doomed if step not in gone and step not in plan.steps.metrics]
        left = [step for step in removed if step not in gone and step not in unconfirmed]
        removed = [step for step in removed if step in gone]
        freed = sum(sizes.get(step, 0) for step in removed)
    if json:
        document = {
            "path": facts.path,
            "kept": sorted([*plan.kept, *(step for step in plan.doomed if step in left)]),
            "removed": [step for step in plan.doomed if step in removed],
            "abandoned": [step for step in plan.abandoned if step in removed],
            "unconfirmed": unconfirmed,
        }
        print_json({**document, "bytes": freed, "dry_run": dry_run})
    elif removed:
        say(f"{'would remove' if dry_run else 'removed'} {count(len(removed), 'step')}, {human_bytes(freed)}")
        say(f"  {_listed(removed)}")
        say(f"{'would keep' if dry_run else 'kept'} {_listed(plan.kept)}")
    else:
        say(f"{'nothing was removed' if left or unconfirmed else 'nothing to remove'}; kept {_listed(plan.kept)}")
    if left and not json:
        say(f"left, for they were saved anew or somebody is at work there: {_listed(left)}")
    if unconfirmed:
        text = "deleted, but the storage has not confirmed that; the data files are left to a later save"
        say(f"{text}: {_listed(unconfirmed)}", err=True)
        raise typer.Exit(1)


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
