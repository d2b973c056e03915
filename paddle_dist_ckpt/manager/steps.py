"""The folder of a manager of steps: which steps are committed, with which metrics, and which of them are kept."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files.names import is_ours, metadata_name
from ..folder.checkpoint import read_checkpoint
from ..folder.ids import save_of
from ..folder.lease import is_abandoned
from ..options import as_integer
from ..storage import LocalStorage

__all__ = ["NOTE", "Retention", "Steps", "check_count", "remove_step", "step_folder"]

NOTE = "checkpoint_manager"
"""Where the user_metadata of a step's checkpoint has the step and its metrics."""

_logger = logging.getLogger("paddle_dist_ckpt")
_FOLDER = re.compile(r"step-(\d{8,18})")
Metrics = Mapping[str, float]


def step_folder(root: Path, step: int) -> Path:
    """The folder of a step."""
    return root / f"step-{step:08d}"


def _step_of(name: str) -> int | None:
    match = _FOLDER.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and step_folder(Path(), step).name == name else None


class Steps:
    """What a folder of steps holds.

    Args:
        root: The folder.
        note: Where the user_metadata of a step's checkpoint has ``{"metrics": {...}}``.

    Attributes:
        metrics: Of each committed step, as of the last look.
    """

    def __init__(self, root: Path, note: str) -> None:
        self._root, self._note = root, note
        self._saves: dict[int, str] = {}
        self.metrics: dict[int, Metrics] = {}

    def look(self) -> None:
        """See which steps are committed. What is known of a step is not read again, unless it was saved anew."""
        saves: dict[int, str] = {}
        metrics: dict[int, Metrics] = {}
        for step in self.folders():
            storage = LocalStorage(step_folder(self._root, step))
            try:
                save = save_of(storage, step)
                if save is not None:
                    known = self._saves.get(step) == save
                    metrics[step] = self.metrics[step] if known else self._read(storage, step)
                    saves[step] = save
            except (CheckpointError, OSError) as error:
                _logger.warning("not counted among the steps: %s: %s", storage.location, error)
        self._saves, self.metrics = saves, metrics

    def folders(self) -> list[int]:
        """The steps that have a folder, committed or not, ascending."""
        names = LocalStorage(self._root).names()
        return sorted(step for name in names if (step := _step_of(name)) is not None)

    def _read(self, storage: LocalStorage, step: int) -> Metrics:
        note = read_checkpoint(storage, step).user_metadata.get(self._note)
        found: Any = note.get("metrics") if isinstance(note, dict) else None
        if not isinstance(found, dict):
            return {}
        return {name: value for name, value in found.items() if type(value) is float}

    def identity(self) -> bytes:
        """Which folder this rank sees, as bytes to be compared."""
        self._root.mkdir(parents=True, exist_ok=True)
        return repr(LocalStorage(self._root).identity()).encode()

    def linked(self) -> list[int]:
        """The steps that are links to folders elsewhere, of which nothing is to be removed."""
        return [step for step in self.folders() if step_folder(self._root, step).is_symlink()]

    def uncommit(self, step: int) -> None:
        """Make a step uncommitted: the first thing that is done to remove it, and the last that can fail."""
        storage = LocalStorage(step_folder(self._root, step))
        # IMPORTANT: `.metadata` is gone for good before any data file is, so that nobody takes half of a step for it.
        storage.delete(metadata_name(step))
        storage.sync()
        self.metrics.pop(step, None)
        self._saves.pop(step, None)

    def abandoned(self, after: int) -> list[int]:
        """Steps that were never committed, or are half removed, and that nobody works on any more.

        Args:
            after: A step that was committed just now; its file tells the time by the folder's own clock.
        """
        now = LocalStorage(step_folder(self._root, after)).modified(metadata_name(after))
        left = [step for step in self.folders() if step not in self.metrics]
        return [step for step in left if self._is_abandoned(step_folder(self._root, step), now)]

    @staticmethod
    def _is_abandoned(folder: Path, now: float) -> bool:
        """Whether nothing in a folder can be of use. Whatever has a `.metadata`, of any id or format, can be."""
        storage = LocalStorage(folder)
        try:
            return not any(name.endswith(".metadata") for name in storage.names()) and is_abandoned(storage, now)
        except OSError:
            return False


def remove_step(root: Path, step: int) -> None:
    """Remove the files of a step that is not committed, and its folder unless there is something else in it."""
    folder = step_folder(root, step)
    if folder.is_symlink():  # what it leads to was put there by somebody else
        return
    storage = LocalStorage(folder)
    _logger.info("removing step %d: %s", step, folder)
    for name in storage.names():
        if is_ours(name):
            storage.delete(name)
    with suppress(OSError):  # it is not there, or not empty
        folder.rmdir()


def check_count(name: str, number: int | None) -> None:
    """Refuse what is no number of steps.

    Raises:
        ValueError: it is neither None nor a positive integer.
    """
    if number is not None and (as_integer(number) or 0) < 1:
        raise ValueError(f"{name} must be None or at least 1, not {number!r}")


@dataclass(frozen=True, slots=True)
class Retention:
    """Which steps are kept: see :class:`paddle_dist_ckpt.CheckpointManager`."""

    keep_last: int | None
    keep_every: int | None
    best: tuple[str, str] | None

    def __post_init__(self) -> None:
        check_count("keep_last", self.keep_last)
        check_count("keep_every", self.keep_every)
        best: Any = self.best
        if best is not None and (
            not isinstance(best, tuple)
            or len(best) != 2
            or not isinstance(best[0], str)
            or best[1] not in ("min", "max")
        ):
            raise ValueError(f"best must be None or a metric's name and 'min' or 'max', not {best!r}")

    def best_of(self, metrics: Mapping[int, Metrics]) -> int | None:
        """The best step, the later one of equals; None if there is no metric, or no step has it."""
        if self.best is None:
            return None
        name, mode = self.best
        sign = -1.0 if mode == "min" else 1.0
        values = {step: sign * found[name] for step, found in metrics.items() if name in found}
        known = {step: value for step, value in values.items() if not math.isnan(value)}
        return max(known, key=lambda step: (known[step], step), default=None)

    def doomed(self, metrics: Mapping[int, Metrics], newest: int, in_use: Collection[int | None]) -> list[int]:
        """The steps that are not kept, ascending.

        Args:
            metrics: Of each committed step.
            newest: The step that was committed just now.
            in_use: Steps that are being read.
        """
        if self.keep_last is None:
            return []
        steps = sorted(metrics)
        kept = {newest, self.best_of(metrics), *in_use, *steps[-self.keep_last :]}
        return [step for step in steps if step not in kept and (self.keep_every is None or step % self.keep_every != 0)]
