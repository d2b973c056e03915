"""Removes steps from a manager's folder by its own rules, without a manager: for a command, and without ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .steps import NOTE, Retention, Steps, remove_step

__all__ = ["carry_out", "plan_prune"]


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What is to be removed from a folder of steps.

    Attributes:
        root: The folder.
        kept: The committed steps that stay, ascending.
        doomed: The committed steps that go, ascending.
        abandoned: Steps that were never committed, and that nobody works on any more; they go as well.
    """

    root: Path
    kept: list[int]
    doomed: list[int]
    abandoned: list[int]


def plan_prune(root: Path, retention: Retention) -> PrunePlan:
    """What a manager with these rules would remove after the save of the latest step.

    Steps that are links to folders elsewhere stay.
    """
    steps = Steps(root, NOTE)
    steps.look()
    if not steps.metrics:
        return PrunePlan(root, [], [], [])
    latest = max(steps.metrics)
    doomed = retention.doomed(steps.metrics, latest, steps.linked())
    abandoned = [step for step in steps.abandoned(latest) if step not in steps.linked()]
    return PrunePlan(root, [step for step in sorted(steps.metrics) if step not in doomed], doomed, abandoned)


def carry_out(plan: PrunePlan) -> None:
    """Remove what is to be removed: first all `.metadata`, for good, then the files."""
    steps = Steps(plan.root, NOTE)
    for step in plan.doomed:
        steps.uncommit(step)
    for step in [*plan.doomed, *plan.abandoned]:
        remove_step(plan.root, step)
