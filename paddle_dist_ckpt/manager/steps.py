"""The folder of a manager of steps: which steps are committed, with which metrics, and how they are removed."""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..core.decoding import lacks_memory
from ..errors import CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError, DurabilityUnknownError
from ..files.codec import Note
from ..files.names import MOST_IDS, metadata_id, metadata_name, parse_claim, parse_data_file, step_name, step_of
from ..files.room import bytes_on_disk
from ..folder.claims import is_abandoned
from ..folder.commit import remove_saves
from ..folder.delete import Deletion, begin_clearing, begin_deletion
from ..folder.ids import note_of, save_of
from ..folder.nothing import steps_text
from ..folder.other_claims import StuckClaimError
from ..options import as_integer, as_number
from ..storage import Folders, Storage
from ..storage.base import FolderIdentity
from .retention import Metrics, Retention

__all__ = [
    "NOTE",
    "Steps",
    "check_seconds",
    "checked_metrics",
    "checked_step",
    "remove_step",
    "step_folder",
]

NOTE = "checkpoint_manager"
"""Where the user_metadata of a step's checkpoint has the step and its metrics."""

_logger = logging.getLogger("paddle_dist_ckpt")
_MOST_MET = 10  # steps that a rank remembers to have saved or restored


def step_folder(root: Path, step: int) -> Path:
    """The folder of a step."""
    return root / step_name(step)


class Steps:
    """What a folder of steps holds. Methods look into folders by what is passed as ``opened``.

    Attributes:
        metrics: Of each committed step, as of the last look.
        unread: Steps of which it is not known whether they are committed, and why.
        refused: The steps that were to be removed, and that the storage has refused to remove.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._saves: dict[int, str] = {}
        self._told: set[int] = set()  # steps of which it was said that they have no `.metadata`
        self._identity: FolderIdentity | None = None
        self._met: list[int] = []  # steps that this rank has saved or restored, the latest last
        self._claimed: set[int] | None = None  # steps in whose folders there were claims, if that is known
        self.metrics: dict[int, Metrics] = {}
        self.unread: dict[int, Exception] = {}
        self.refused: set[int] = set()

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
            storage = opened(step_folder(self._root, step))
            try:
                save = save_of(storage, step)
                if save is not None and self._saves.get(step) == save:
                    saves[step], metrics[step] = save, self.metrics[step]
                elif save is not None and (note := note_of(storage, step)) is not None:
                    saves[step], metrics[step] = note.save_id, self._metrics_in(storage, note)
            except CheckpointTimeoutError:
                raise  # not only of this step will nothing be heard
            except (CheckpointError, OSError) as error:
                _logger.warning("not counted among the steps: %s: %s", storage.location, error)
                if _may_be_committed(error):
                    unread[step] = error
        self._saves, self.metrics, self.unread = saves, metrics, unread

    def meet(self, step: int, opened: Folders) -> None:
        """Remember that this rank has saved or restored a step, or saves it in the background, and in which folder."""
        self._met = [*(one for one in self._met if one != step), step][-_MOST_MET:]
        with suppress(FileNotFoundError):
            self._identity = opened(self._root).identity()

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
            identity = opened(self._root).identity()
        except FileNotFoundError:
            if _is_link(self._root, opened):
                raise CheckpointError(f"{self._root} is a link to nowhere: is what it leads to mounted?") from None
            identity = None
        known: dict[int, str | None] = dict(self._saves)  # a copy, for a thread may be removing some
        if not known:  # what was met may be gone by the rules, or not there yet, and any other run has such a step
            known.update(dict.fromkeys(self._met))
        if identity != self._identity and known and not any(self._has(*save, opened) for save in known.items()):
            raise CheckpointError(
                f"{self._root} is {'gone' if identity is None else 'another folder than before'}, without "
                f"{steps_text(sorted(known))} of before: is it mounted? Nothing is done there; to go on all the same, "
                "make a new manager"
            )
        self._identity = identity

    def _has(self, step: int, save: str | None, opened: Folders) -> bool:
        """Whether a step is there, saved by this save; of None, whether there is anything of it."""
        storage = opened(step_folder(self._root, step))
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
                if save_of(opened(step_folder(self._root, step)), step) is not None:
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
        for step in sorted(self.unread, reverse=True):
            if latest is None or step > latest:
                self._check_passed_over(step, "latest", latest is None)
        return latest

    def best(self, retention: Retention) -> int | None:
        """The best committed step by these rules, None if there is none, as of the last look.

        As for the latest, one that is damaged does not count, but for one that was only not read another is not given.

        Raises:
            CheckpointError: a step that may be the best could not be read.
        """
        best = retention.best_of(self.metrics)
        for step in sorted(self.unread, reverse=True) if retention.best is not None else ():
            self._check_passed_over(step, "best", not self.metrics)
        return best

    def _check_passed_over(self, step: int, what: str, all_are: bool) -> None:
        """Refuse to take another step for what one may be that could not be read, unless it is damaged and not all are.

        Raises:
            CheckpointError: see above.
        """
        error = self.unread[step]
        if all_are or isinstance(error, OSError) or lacks_memory(error):
            raise CheckpointError(
                f"{step_folder(self._root, step)} cannot be read, and may be the {what} step: {error}; if the disk "
                "is at fault, try again when it answers; restore(state, step=...) takes another step"
            ) from error

    def check_root(self, opened: Folders) -> None:
        """Refuse what is no place for steps.

        Raises:
            ValueError: it is a file, the folder of a step, or one of another checkpoint.
        """
        root = self._root
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
        names = opened(self._root).names()
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def _metrics_in(self, storage: Storage, whole: Note) -> Metrics:
        user = whole.user_metadata(partial(bytes_on_disk, storage))
        note = user.get(NOTE) if isinstance(user, dict) else None
        found: Any = note.get("metrics") if isinstance(note, dict) else None
        if not isinstance(found, dict):
            return {}
        return {name: value for name, value in found.items() if type(value) is float}

    def removable(self, steps: Iterable[int], opened: Folders) -> list[int]:
        """Those of some steps that are no links to folders elsewhere, of which nothing is to be removed."""
        return [step for step in steps if not _is_link(step_folder(self._root, step), opened)]

    def begin_removals(self, steps: Iterable[int], littered: Iterable[int], opened: Folders) -> dict[int, Deletion]:
        """Make steps uncommitted, or set out to remove what is left of those that never were.

        What was saved under a step since the last look stays, and so does a folder in which somebody is at work.

        Args:
            steps: The steps.
            littered: Others, which stay: what dead saves have left in their folders is removed.
            opened: See the class.

        Returns:
            Those of which something is removed, in this order. Those of ``steps`` that are not among them, and are none
            of the steps any more, may come back with a crash of the machine.
        """
        begun: dict[int, Deletion] = {}
        try:
            for step in steps:
                self._begin_removal(step, False, begun, opened)
            for step in littered:
                self._begin_removal(step, True, begun, opened)
        except BaseException:  # an interrupt
            for removal in begun.values():
                removal.leave()
            raise
        return begun

    def _begin_removal(self, step: int, tidies: bool, begun: dict[int, Deletion], opened: Folders) -> None:
        """Begin one of them; if it ``tidies``, the step stays."""
        storage, save = opened(step_folder(self._root, step)), self._saves.get(step)
        what = f"what dead saves have left beside step {step}" if tidies else f"step {step}"
        try:
            if _is_link(step_folder(self._root, step), opened):
                raise CheckpointError(f"{storage.location} is a link now")
            if tidies or save is None:
                begun[step] = begin_clearing(storage, step, of_checkpoint=tidies)
            else:
                begun[step] = begin_deletion(storage, step, save)
        except DurabilityUnknownError as error:
            _logger.warning("%s", error)
        except (OSError, CheckpointError) as error:
            _logger.warning("%s is left for now: %s", what, error)
            if isinstance(error, (OSError, StuckClaimError)):
                self.refused.add(step)
            return
        else:
            _logger.info("removing %s: %s", what, storage.location)
        if not tidies:
            self.metrics.pop(step, None)
            self._saves.pop(step, None)

    def littered(self, opened: Folders, now: float | None = None, anew: bool = True) -> list[int]:
        """Committed steps in whose folders dead saves have left something, and nobody works any more.

        Args:
            opened: See the class.
            now: See :meth:`abandoned`.
            anew: Whether to look into all folders, and not only into those that had claims when that was done last.
        """
        looked = self.folders(opened) if anew or self._claimed is None else sorted(self._claimed)
        self._claimed = set()
        committed: dict[int, Storage] = {}
        for step in looked:
            folder = step_folder(self._root, step)
            with suppress(OSError):  # one that cannot be listed is left alone
                names = [] if _is_link(folder, opened) else opened(folder).names()
                if any(parse_claim(name) is not None for name in names):
                    self._claimed.add(step)
                    if metadata_name(step) in names:
                        committed[step] = opened(folder)
        if not committed:
            return []
        time = self._now(opened) if now is None else now
        return [step for step, storage in committed.items() if _is_left(storage, time)]

    def abandoned(self, opened: Folders, now: float | None = None) -> list[int]:
        """Steps that were never committed, or are half removed, and that nobody works on any more.

        Where no claim speaks of a folder's data files, they may be all that is left of a step, so it is none of these.

        Args:
            opened: See the class.
            now: The time. By default that of the folder's own clock, for which the folder is touched: whoever removes
                something asks that.
        """
        left = self.removable((step for step in self.folders(opened) if step not in self.metrics), opened)
        if not left:
            return []
        time = self._now(opened) if now is None else now
        return [step for step in left if self._is_abandoned(step, opened(step_folder(self._root, step)), time)]

    def _now(self, opened: Folders) -> float:
        """The time by the folder's own clock."""
        root = opened(self._root)
        with suppress(PermissionError):  # then it is earlier by that clock, and fewer are abandoned
            root.touch(".")
        return root.modified(".")

    def _is_abandoned(self, step: int, storage: Storage, now: float) -> bool:
        """Whether nothing in a folder can be of use. Whatever has a `.metadata`, of any id or format, can be."""
        try:
            names = storage.names()
            if any(name.endswith(".metadata") for name in names) or not is_abandoned(storage, now):
                return False
        except OSError:
            return False
        claimed = any(parse_claim(name) is not None for name in names)
        data = next((name for name in names if parse_data_file(name) is not None), None)
        if data is None or claimed:
            return True
        if step not in self._told:
            self._told.add(step)
            _logger.warning(
                "step %d is left: %s has data files, such as %s, but no .metadata; if it was lost, rebuild_metadata "
                "may make it again, and if not, the folder can be removed",
                step,
                storage.location,
                data,
            )
        return False


def remove_step(root: Path, step: int, saves: Collection[str], opened: Folders) -> None:
    """Remove the files of these saves from a step's folder, and the folder unless there is something else in it."""
    folder = step_folder(root, step)
    if _is_link(folder, opened):  # what it leads to was put there by somebody else
        return
    remove_saves(opened(folder), saves)
    with suppress(OSError):  # it is not there, or not empty
        opened.run("removing", folder, folder.rmdir)


def _may_be_committed(error: Exception) -> bool:
    """Whether a step may be there that could not be looked at; not if it is gone, or no folder."""
    is_no_folder = isinstance(error, NotADirectoryError) or getattr(error, "errno", None) == errno.ELOOP
    return not (is_no_folder or isinstance(error, CheckpointNotFoundError))


def _is_left(storage: Storage, now: float) -> bool:
    """Whether nobody is saving to a folder any more, as far as that can be seen."""
    try:
        return is_abandoned(storage, now)
    except OSError:
        return False


def _is_link(folder: Path, opened: Folders) -> bool:
    return opened.run("a look at", folder, folder.is_symlink)


def check_seconds(seconds: float | None) -> None:
    """Refuse what is no time between saves.

    Raises:
        ValueError: it is neither None nor above 0.
    """
    if seconds is None:
        return
    if not 0 < (as_number(seconds) or 0) < math.inf:
        raise ValueError(f"save_interval_seconds must be None or more than 0, not {seconds!r}")


def checked_step(step: int) -> int:
    """Return a step that may be one.

    Raises:
        ValueError: it may not.
    """
    number = as_integer(step)
    if number is None or not 0 <= number < MOST_IDS:
        raise ValueError(f"step must be an integer from 0 to below 10**18, not {step!r}")
    return number


def checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Metrics as a user passes them, as floats.

    Raises:
        TypeError: they are no mapping of names to numbers.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping of names to numbers, not {type(metrics).__name__}")
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
            raise TypeError(f"metrics must be names and numbers, not {name!r}: {value!r}")
        try:
            found[name] = float(value)
        except Exception as error:  # whatever arrays and tensors raise that have several elements
            raise TypeError(
                f"metrics must be names and numbers, and {name!r} is no single number: {value!r}"
            ) from error
    return found
