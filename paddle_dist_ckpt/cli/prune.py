"""``prune``: removes steps from the folder of a CheckpointManager."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from ..visible import visible
from .arguments import Json, Yes, alone_only, confirm
from .documents import print_json
from .output import count, human_bytes, say

if TYPE_CHECKING:
    from ..manager.prune import Pruned, PrunePlan
    from .inspection import StepsFacts

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
        typer.Option(
            "--best",
            metavar="NAME:MODE[:N]",
            help="Keep the best step, or the N best, as well: loss:min, accuracy:max:3.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove old steps of a CheckpointManager, after asking.

    The rules are those of the manager, which removes steps by itself after each save if it is told to. Folders of steps
    whose save has died are removed as well; steps that are being saved, and links to folders elsewhere, are not, nor
    what the rules keep when the question is answered, if steps were saved or removed meanwhile. Do not remove steps
    while a job restores one of them.

    \b
    Examples:
      paddle-dist-ckpt prune run-7 --keep-last 3 --best loss:min --dry-run
      paddle-dist-ckpt prune run-7 --keep-last 3 --best loss:min --yes
    """
    from dataclasses import asdict
    from pathlib import Path

    from ..errors import CheckpointNotFoundError
    from ..manager.prune import Pruned, carry_out, plan_prune
    from ..manager.retention import Retention
    from .inspection import no_steps_text, steps_facts

    alone_only("prune")
    metric = _metric_of(best)
    facts = steps_facts(root)
    if facts is None:
        raise CheckpointNotFoundError(no_steps_text(root))
    plan = plan_prune(Path(facts.path), Retention(keep_last, keep_every, metric), dry_run)
    if metric is not None and plan.doomed:
        _check_known(metric[0], facts)
    sizes = {step.step: step.bytes for step in facts.steps} | plan.abandoned_bytes
    done = Pruned(plan.kept, plan.doomed, plan.abandoned, plan.littered, [], [], [], [], [])
    if (plan.doomed or plan.abandoned or plan.littered) and not dry_run:
        _ask(plan, sizes, yes)
        done = carry_out(plan)
    freed = sum(sizes.get(step, 0) for step in [*done.removed, *done.abandoned] if step not in done.unfinished)
    if json:
        print_json({"path": facts.path, **asdict(done), "bytes": freed, "dry_run": dry_run})
    else:
        _say_what_became(done, freed, dry_run)
    if problems := _problems(done):
        for problem in problems:
            say(problem, err=True)
        raise typer.Exit(1)


def _metric_of(best: str | None) -> tuple[str, str, int] | None:
    """A metric's name, whether its smallest or its largest value is the best, and how many of the best are meant, of
    ``NAME:MODE`` or ``NAME:MODE:N``."""
    if best is None:
        return None
    found = re.fullmatch(r"(.+):(min|max)(?::([1-9][0-9]{0,8}))?", best, re.DOTALL)
    if found is None:
        raise typer.BadParameter(
            "pass a metric's name and min or max, such as loss:min or loss:min:3", param_hint="--best"
        )
    return found[1], found[2], int(found[3] or 1)


def _check_known(name: str, facts: StepsFacts) -> None:
    """Refuse a metric that no step has: the best step by it would be removed without a word."""
    known = {metric for step in facts.steps for metric in step.metrics}
    if name not in known:
        text = visible(", ".join(sorted(known))) or "none"
        raise typer.BadParameter(f"no step has the metric {name!r}; their metrics: {text}", param_hint="--best")


def _ask(plan: PrunePlan, sizes: Mapping[int, int], yes: bool) -> None:
    """Say what is to be removed, and ask whether it may be, unless that was answered before."""
    doomed = [*plan.doomed, *plan.abandoned]
    if not yes:
        say(f"keeps    {_listed(plan.kept)}", err=True)
        say(f"removes  {_listed(doomed)}", err=True)
        if plan.littered:
            say(f"and what dead saves have left beside {_listed(plan.littered)}", err=True)
    size = human_bytes(sum(sizes.get(step, 0) for step in doomed))
    what = f"{count(len(doomed), 'step')} of {len(plan.kept) + len(doomed)}, {size}" if doomed else "what is left"
    confirm(f"Remove {what}?", yes)


def _problems(done: Pruned) -> list[str]:
    """What could not be done, a line for each kind."""
    kinds = {
        "could not be removed": done.refused,
        "what dead saves have left could not be removed beside": done.untidied,
        "removed, but data files could not be; they are left to a later save": done.unfinished,
        "deleted, but the storage has not confirmed that; the data files are left to a later save": done.unconfirmed,
    }
    return [f"{text}: {_listed(steps)}" for text, steps in kinds.items() if steps]


def _say_what_became(done: Pruned, freed: int, dry_run: bool) -> None:
    removed = [*done.removed, *done.abandoned]
    if removed:
        say(f"{'would remove' if dry_run else 'removed'} {count(len(removed), 'step')}, {human_bytes(freed)}")
        say(f"  {_listed(removed)}")
        say(f"{'would keep' if dry_run else 'kept'} {_listed(done.kept)}")
    else:
        nothing = "nothing was removed" if done.left or done.refused or done.unconfirmed else "nothing to remove"
        say(f"{nothing}; kept {_listed(done.kept)}")
    if done.tidied:
        verb = "would remove" if dry_run else "removed"
        say(f"{verb} what dead saves have left beside {_listed(done.tidied)}")
    if done.left:
        reasons = "they were saved anew, the rules keep them now, somebody is there, or something else is in the folder"
        say(f"left, for {reasons}: {_listed(done.left)}")


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
