"""The folder of a manager's steps: which are committed, with which metrics, and whether it is the folder it was."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..core.decoding import lacks_memory
from ..errors import CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError
from ..files.codec import Note
from ..files.names import metadata_id, step_name, step_of
from ..files.room import bytes_on_disk
from ..folder.ids import note_of, save_of
from ..folder.nothing import steps_text
from ..storage import Folders, Storage
from ..storage.base import FolderIdentity
from .retention import Metrics, Retention

__all__ = ["NOTE", "Steps", "is_link", "step_folder"]

NOTE = "checkpoint_manager"
"""Where the user_metadata of a step's checkpoint has the step and its metrics."""

_logger = logging.getLogger("paddle_dist_ckpt")
_MOST_MET = 10  # steps that a rank remembers to have saved or restored


def step_folder(root: Path, step: int) -> Path:
    """The folder of a step."""
    return root / step_name(step)


def is_link(folder: Path, opened: Folders) -> bool:
    """Whether a folder is a link to one elsewhere."""
    return opened.run("a look at", folder, folder.is_symlink)


class Steps:
    """What a folder of steps holds. Methods look into folders by what is passed as ``opened``.

    Attributes:
        root: The folder.
        saves: The save that each committed step is of, as of the last look.
        metrics: Those of each committed step.
        unread: Steps of which it is not known whether they are committed, and why.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._identity: FolderIdentity | None = None
        self._met: list[int] = []  # steps that this rank has saved or restored, the latest last
        self.saves: dict[int, str] = {}
        self.metrics: dict[int, Metrics] = {}
        self.unread: dict[int, Exception] = {}

    def folder(self, step: int) -> Path:
        """The folder of a step."""
        return step_folder(self.root, step)

    def look(self, opened: Folders) -> None:
        """See which steps are committed. What is known of a step is not read again, unless it was saved anew.

        Raises:
            CheckpointError: see :meth:`check_same`.
        """
        self.check_same(opened)
        saves: dict[int, str] = {}
        metrics: dict[int, Metrics] = {}
        unread: dict[int, Exception] = {}
        for step in self.folders(opened):
            storage = opened(self.folder(step))
            try:
                save = save_of(storage, step)
                if save is not None and self.saves.get(step) == save:
                    saves[step], metrics[step] = save, self.metrics[step]
                elif save is not None and (note := note_of(storage, step)) is not None:
                    saves[step], metrics[step] = note.save_id, self._metrics_in(storage, note)
            except CheckpointTimeoutError:
                raise  # not only of this step will nothing be heard
            except (CheckpointError, OSError) as error:
                _logger.warning("not counted among the steps: %s: %s", storage.location, error)
                if _may_be_committed(error):
                    unread[step] = error
        self.saves, self.metrics, self.unread = saves, metrics, unread

    def meet(self, step: int, opened: Folders) -> None:
        """Remember that this rank has saved or restored a step, or saves it in the background, and in which folder."""
        self._met = [*(one for one in self._met if one != step), step][-_MOST_MET:]
        with suppress(FileNotFoundError):
            self._identity = opened(self.root).identity()

    def forget(self, step: int) -> None:
        """Do not expect a step to be there, which this rank has failed to save."""
        self._met = [one for one in self._met if one != step]

    def has_just_met(self, step: int) -> bool:
        """Whether a step is the last one that this rank has saved or restored."""
        return self._met[-1:] == [step]

    def check_same(self, opened: Folders) -> None:
        """See that the folder is the one that it was: what it was may be not mounted any more, and have all the steps.

        Raises:
            CheckpointError: it is another one, or gone, and has none of the steps that are known here: those that the
                coordinator has seen, of the same saves; on other ranks, and before it has seen any, those that this
                rank has met; or a link to nowhere.
        """
        try:
            identity = opened(self.root).identity()
        except FileNotFoundError:
            if is_link(self.root, opened):
                raise CheckpointError(f"{self.root} is a link to nowhere: is what it leads to mounted?") from None
            identity = None
        known: dict[int, str | None] = dict(self.saves)  # a copy, for a thread may be removing some
        if not known:  # what was met may be gone by the rules, or not there yet, and any other run has such a step
            known.update(dict.fromkeys(self._met))
        if identity != self._identity and known and not any(self._has(*save, opened) for save in known.items()):
            raise CheckpointError(
                f"{self.root} is {'gone' if identity is None else 'another folder than before'}, without "
                f"{steps_text(sorted(known))} of before: is it mounted? Nothing is done there; to go on all the same, "
                "make a new manager"
            )
        self._identity = identity

    def _has(self, step: int, save: str | None, opened: Folders) -> bool:
        """Whether a step is there, saved by this save; of None, whether there is anything of it."""
        storage = opened(self.folder(step))
        try:
            return bool(storage.names()) if save is None else save_of(storage, step) == save
        except CheckpointTimeoutError:
            raise
        except (CheckpointError, OSError):  # it cannot be read now, but it is there
            return True

    def highest(self, opened: Folders) -> int | None:
        """The highest step that is committed here; others, and what cannot be read, are passed over."""
        for step in reversed(self.folders(opened)):
            try:
                if save_of(opened(self.folder(step)), step) is not None:
                    return step
            except CheckpointTimeoutError:
                raise
            except (CheckpointError, OSError) as error:
                _logger.debug("step %d is passed over: %s", step, error)
        return None

    def latest(self) -> int | None:
        """The latest committed step, None if there is none, as of the last look.

        A higher one that is damaged does not count. To pass over one that the disk only did not give, or that there was
        not enough memory for, would be to go on from an earlier step, or to begin anew, and to replace what is there;
        and so would be to take a folder of which no step can be read for an empty one.

        Raises:
            CheckpointError: a step that may be the latest could not be read.
        """
        latest = max(self.metrics, default=None)
        self._check_passed_over("latest", (step for step in self.unread if latest is None or step > latest))
        return latest

    def best(self, retention: Retention) -> int | None:
        """The best committed step by these rules, None if there is none, as of the last look.

        As for the latest, one that is damaged does not count, but for one that was only not read another is not given.

        Raises:
            CheckpointError: a step that may be the best could not be read.
        """
        if retention.best is not None:
            self._check_passed_over("best", self.unread)
        found = next(iter(retention.best_of(self.metrics)), None)
        if found is None and self.metrics:  # what restore(step=None) does is another thing
            named = None if retention.best is None else retention.best[0]
            why = "the manager has no best" if named is None else f"no step has a value of the metric {named!r}"
            _logger.warning("%s: no step is the best one, for %s; restore(step=None) takes the latest", self.root, why)
        return found

    def _check_passed_over(self, what: str, steps: Iterable[int]) -> None:
        """Refuse to take another step for what one of some that could not be read may be.

        One that is damaged is passed over, if there are others.
        """
        for step in sorted(steps, reverse=True):
            error = self.unread[step]
            if not self.metrics or isinstance(error, OSError) or lacks_memory(error):
                raise CheckpointError(
                    f"{self.folder(step)} cannot be read, and may be the {what} step: {error}; if the disk "
                    "is at fault, try again when it answers; restore(state, step=...) takes another step"
                ) from error

    def check_root(self, opened: Folders) -> None:
        """Refuse what is no place for steps.

        Raises:
            ValueError: it is a file, the folder of a step, or one of another checkpoint.
        """
        root = self.root
        try:
            names = opened(root).names()
        except NotADirectoryError:
            raise ValueError(
                f"root must be the folder of the steps' folders, and {root} is a file, or below one"
            ) from None
        except OSError:  # whoever uses it will hear of that
            return
        if not any(metadata_id(name) is not None for name in names) or any(step_of(name) is not None for name in names):
            return
        if step_of(root.name) is not None:
            raise ValueError(f"root must be the folder of all steps, and {root} is that of one; pass {root.parent}")
        raise ValueError(
            f"root must be the folder of the steps' folders, and {root} holds a checkpoint itself; pass another folder "
            "(restore(state, path=...) loads from this one)"
        )

    def folders(self, opened: Folders) -> list[int]:
        """The steps that have a folder, committed or not, ascending."""
        names = opened(self.root).names()
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def _metrics_in(self, storage: Storage, whole: Note) -> Metrics:
        user = whole.user_metadata(partial(bytes_on_disk, storage))
        note = user.get(NOTE) if isinstance(user, dict) else None
        found: Any = note.get("metrics") if isinstance(note, dict) else None
        if not isinstance(found, dict):
            return {}
        return {name: value for name, value in found.items() if type(value) is float}


def _may_be_committed(error: Exception) -> bool:
    """Whether a step may be there that could not be looked at; not if it is gone, or no folder."""
    is_no_folder = isinstance(error, NotADirectoryError) or getattr(error, "errno", None) == errno.ELOOP
    return not (is_no_folder or isinstance(error, CheckpointNotFoundError))
