"""Removes steps from a manager's folder by its own rules, without a manager: for a command, and without ranks."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import CheckpointError
from ..files.names import metadata_name, parse_data_file
from ..folder.checkpoint import read_checkpoint
from ..folder.delete import warn_of_files_elsewhere
from ..storage import Folders, LocalStorage
from .removal import Going, Removals, remove_step
from .retention import Retention
from .steps import Steps, step_folder

__all__ = ["PrunePlan", "Pruned", "carry_out", "plan_prune"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan(Going):
    """What is to be removed from a folder of steps, with what is needed to carry that out.

    Attributes:
        kept: The committed steps that stay, ascending.
        abandoned_bytes: What the data files in the folders of ``abandoned`` have.
        steps: The folder's steps, as they were seen.
        removals: What removes them.
        retention: The rules.
    """

    kept: list[int]
    abandoned_bytes: dict[int, int]
    steps: Steps
    removals: Removals
    retention: Retention


def plan_prune(root: Path, retention: Retention, dry_run: bool = False) -> PrunePlan:
    """What a manager with these rules would remove after the save of the latest step.

    Steps that are links to folders elsewhere stay. A ``dry_run``, which is not carried out, changes nothing, so it goes
    by the host's clock.
    """
    steps, opened = Steps(root), Folders()
    steps.look(opened)
    removals = Removals(steps)
    going = removals.going(opened, _doomed(steps, retention), time.time() if dry_run else None)
    kept = [step for step in sorted(steps.metrics) if step not in going.doomed]
    littered = [step for step in going.littered if step in kept]  # not beside what cannot be read
    sizes = {step: _data_bytes(LocalStorage(step_folder(root, step))) for step in going.abandoned}
    return PrunePlan(
        doomed=going.doomed,
        abandoned=going.abandoned,
        littered=littered,
        kept=kept,
        abandoned_bytes=sizes,
        steps=steps,
        removals=removals,
        retention=retention,
    )


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
        refused: Steps that stay, for they could not be removed.
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
    opened, root = Folders(), plan.steps.root
    plan.steps.check_same(opened)
    now = Steps(root)
    now.look(opened)
    doomed = [step for step in _doomed(now, plan.retention) if step in plan.doomed]
    for step in doomed:
        with suppress(OSError, CheckpointError):  # what is wrong will be heard of
            storage = LocalStorage(step_folder(root, step))
            warn_of_files_elsewhere(storage, read_checkpoint(storage, step))
    begun = plan.removals.begin(replace(plan, doomed=doomed), opened)
    left, finished = dict(begun), list[int]()
    try:
        for step, removal in begun.items():
            finished += [step] if removal.finish() else []
            del left[step]
            # The files are gone, and what has their names now is somebody else's.
            remove_step(root, step, (), opened)
    finally:
        for removal in left.values():  # an interrupt
            removal.leave()
    still = [step for step in plan.doomed if step in plan.steps.metrics]
    gone = [step for step in plan.abandoned if step in begun and not os.path.lexists(step_folder(root, step))]
    kept = [step for step in sorted({*plan.kept, *still}) if not _is_gone(root, step)]
    stay = [*(step for step in still if step in kept), *(step for step in plan.abandoned if step not in gone)]
    refused = [step for step in stay if step in plan.removals.refused or (step in begun and step not in finished)]
    return Pruned(
        kept=kept,
        removed=[step for step in plan.doomed if step in begun],
        abandoned=gone,
        tidied=[step for step in plan.littered if step in finished],
        left=[step for step in stay if step not in refused],
        refused=refused,
        untidied=[step for step in plan.littered if step not in finished],
        unfinished=[step for step in plan.doomed if step in begun and step not in finished],
        unconfirmed=[step for step in plan.doomed if step not in begun and step not in still],
    )


def _is_gone(root: Path, step: int) -> bool:
    """Whether somebody else has removed a committed step, as far as that can be seen."""
    try:
        os.stat(step_folder(root, step) / metadata_name(step))
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False
