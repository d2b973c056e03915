"""Removes steps from a manager's folder by its own rules, without a manager: for a command, and without ranks."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..files.names import metadata_name, parse_data_file
from ..folder.checkpoint import read_checkpoint
from ..folder.delete import warn_of_files_elsewhere
from ..storage import Folders, LocalStorage
from .retention import Retention
from .steps import Steps, remove_step, step_folder

__all__ = ["PrunePlan", "Pruned", "carry_out", "plan_prune"]


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What is to be removed from a folder of steps.

    Attributes:
        steps: The folder's steps, as they were seen.
        root: The folder.
        retention: The rules.
        kept: The committed steps that stay, ascending.
        doomed: The committed steps that go, ascending.
        abandoned: Steps that were never committed, and that nobody works on any more; they go as well.
        littered: Those of ``kept`` beside which dead saves have left something, which goes.
        abandoned_bytes: What the data files in the folders of ``abandoned`` have.
    """

    steps: Steps
    root: Path
    retention: Retention
    kept: list[int]
    doomed: list[int]
    abandoned: list[int]
    littered: list[int]
    abandoned_bytes: dict[int, int]


def plan_prune(root: Path, retention: Retention, dry_run: bool = False) -> PrunePlan:
    """What a manager with these rules would remove after the save of the latest step.

    Steps that are links to folders elsewhere stay. A ``dry_run``, which is not carried out, changes nothing, so it goes
    by the host's clock.
    """
    steps, opened = Steps(root), Folders()
    steps.look(opened)
    doomed = steps.removable(_doomed(steps, retention), opened)
    now = time.time() if dry_run else None
    kept = [step for step in sorted(steps.metrics) if step not in doomed]
    littered = [step for step in steps.littered(opened, now) if step in kept]
    abandoned = steps.abandoned(opened, now)
    sizes = {step: _data_bytes(LocalStorage(step_folder(root, step))) for step in abandoned}
    return PrunePlan(steps, root, retention, kept, doomed, abandoned, littered, sizes)


def _doomed(steps: Steps, retention: Retention) -> list[int]:
    """The committed steps that the rules do not keep, as of the last look."""
    return retention.doomed(steps.metrics, max(steps.metrics), ()) if steps.metrics else []


def _data_bytes(storage: LocalStorage) -> int:
    """What the data files in a folder have, as far as that can be seen."""
    total = 0
    with suppress(OSError):
        for name in storage.names():
            if parse_data_file(name) is not None:
                with suppress(OSError):
                    total += storage.size(name)
    return total


@dataclass(frozen=True, slots=True)
class Pruned:
    """What has become of a plan.

    Attributes:
        kept: The committed steps that there are, ascending.
        removed: The steps that were committed and are gone, ascending,
        abandoned: and those that were not.
        tidied: Committed steps that stay, without what dead saves had left beside them.
        left: Steps that stay, for they were saved anew, the rules keep them now, or somebody is at work in their
            folders; and those that were never committed, if something else is in the folder.
        refused: Steps that stay, for the storage has refused to remove them.
        untidied: Steps that stay, beside which what dead saves have left could not be removed.
        unfinished: Removed steps of which data files could not be removed; a later save or prune does it.
        unconfirmed: Steps that are gone, but may come back with a crash of the machine; their data files are there.
    """

    kept: list[int]
    removed: list[int]
    abandoned: list[int]
    tidied: list[int]
    left: list[int]
    refused: list[int]
    untidied: list[int]
    unfinished: list[int]
    unconfirmed: list[int]


def carry_out(plan: PrunePlan) -> Pruned:
    """Remove what is to be removed: first all `.metadata`, for good, then the files.

    What the rules keep by now stays: steps for whose sake it was to go may be gone, or saved anew with other metrics.

    Raises:
        CheckpointError: the folder is gone, or another one.
    """
    opened = Folders()
    plan.steps.check_same(opened)
    now = Steps(plan.root)
    now.look(opened)
    doomed = [step for step in _doomed(now, plan.retention) if step in plan.doomed]
    for step in doomed:
        with suppress(OSError, CheckpointError):  # what is wrong will be heard of
            storage = LocalStorage(step_folder(plan.root, step))
            warn_of_files_elsewhere(storage, read_checkpoint(storage, step))
    begun = plan.steps.begin_removals([*doomed, *plan.abandoned], plan.littered, opened)
    left, unfinished = dict(begun), []
    try:
        for step, removal in begun.items():
            unfinished += [] if removal.finish() else [step]
            del left[step]
            # The files are gone, and what has their names now is somebody else's.
            remove_step(plan.root, step, (), opened)
    finally:
        for removal in left.values():  # an interrupt
            removal.leave()
    still = [step for step in plan.doomed if step in plan.steps.metrics]
    gone = [step for step in plan.abandoned if step in begun and not os.path.lexists(step_folder(plan.root, step))]
    kept = [step for step in sorted({*plan.kept, *still}) if not _is_gone(plan, step)]
    stay = [*(step for step in still if step in kept), *(step for step in plan.abandoned if step not in gone)]
    refused = [step for step in stay if step in plan.steps.refused]
    return Pruned(
        kept=kept,
        removed=[step for step in plan.doomed if step in begun],
        abandoned=gone,
        tidied=[step for step in plan.littered if step in begun],
        left=[step for step in stay if step not in refused],
        refused=refused,
        untidied=[step for step in plan.littered if step not in begun],
        unfinished=unfinished,
        unconfirmed=[step for step in plan.doomed if step not in begun and step not in still],
    )


def _is_gone(plan: PrunePlan, step: int) -> bool:
    """Whether somebody else has removed a committed step, as far as that can be seen."""
    try:
        os.stat(step_folder(plan.root, step) / metadata_name(step))
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False
