"""Hidden folders beside the place of an export.

A claim in each is kept fresh while its process lives, as that of a save is (:mod:`.claims`). So a later export can tell
which of them a dead one has left, and removes these.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

from ..storage import Folders, LocalStorage
from ..storage.base import Storage
from ..storage.local_files import uninterrupted
from ..storage.made_folder import MadeFolder
from .claims import MOST_CLAIM_BYTES, is_expired
from .own_claim import OwnClaim

__all__ = ["HiddenFolder", "is_seen"]

_logger = logging.getLogger("paddle_dist_ckpt")
_CLAIM = ".claim"  # with the name of its folder: who gives another folder that name has not made it one to be removed
_GONE = ".gone"


class HiddenFolder:
    """A hidden folder that this process makes, until it is published or removed.

    Args:
        out: The place of the export.
        name: The folder's name beside it, which nobody else knows.
        folders: Opens local folders, and does what else is done to them.
    """

    def __init__(self, out: Path, name: str, folders: Folders) -> None:
        self.path, self._out, self._folders = out.with_name(name), out, folders
        self._claim = OwnClaim(folders(self.path), _CLAIM)
        self._made: MadeFolder | None = None

    def make(self, source: str = "", mode: int = 0o777) -> None:
        """Make it. Whatever comes between, it is there until :meth:`remove`.

        What dead exports to the same place have left is removed first: its room may be needed. Of others there is a
        warning. All stay where one of them is exported from: it may have been left by a killed export of a state_dict,
        and be wanted yet; or this one's own, which has seen to the others.

        Args:
            source: The folder that is exported from.
            mode: The folder's mode, of which the umask takes something away.

        Raises:
            OSError: it cannot be made.
            CheckpointError: no thread can be started that keeps its claim fresh.
        """
        self._folders(self._out.parent).prepare()
        make = functools.partial(_make, self.path, mode)
        self._made = self._folders.run("making", self.path, make, lambda _: self.path.rmdir())
        with suppress(OSError):  # they do not prevent this one
            self._see_to_others(self._out, source)
        self._claim.publish(os.fsencode(self.path.name))
        self._claim.keep_fresh(lambda: None)

    def _see_to_others(self, out: Path, source: str) -> None:
        """Remove what dead exports have left, and say which other hidden folders there are."""
        now = self._folders.run("a look at", self.path, functools.partial(_time_of, self.path))
        others = functools.partial(_hidden_folders, out, self.path, source)
        for hidden in self._folders.run("listing", out.parent, others):
            left = self._folders.run_each("removing", hidden, _removal_if_dead(hidden, now))
            if left is None:
                _logger.info("%s is removed: an export to %s that was killed has left it", hidden, out)
            else:
                _logger.warning(
                    "%s: another export to %s goes on, or was killed and has left it behind; if so, remove it",
                    left,
                    out,
                )

    def check_held(self) -> None:
        """See that nobody has taken this process, which was silent, for dead, and has removed the folder.

        Raises:
            CheckpointError: somebody has.
        """
        self._claim.check_held()

    def finish(self) -> None:
        """Remove the claim: the folder has all that it is to have, and is about to be no hidden one any more."""
        self._claim.remove()

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        self._claim.stop()
        self._folders.end_with("removing", self.path, functools.partial(_remove, self.path, self._made))


def is_seen(storage: Storage) -> bool:
    """Whether this rank sees the hidden folder that another one has made and named so."""
    name = os.fsencode(Path(storage.location).name)
    with suppress(FileNotFoundError):
        return storage.read(_CLAIM, len(name) + 1) == name
    return False


def _make(path: Path, mode: int) -> MadeFolder:
    # A network filesystem whose first answer is lost says that it was there: nobody else knows its name.
    uninterrupted(path.mkdir)(mode, exist_ok=True)
    return MadeFolder(path)


def _aside(hidden: Path) -> Path:
    """The name under which it is removed, so that a rank that has not heard of a failure yet makes no file in it."""
    return hidden if hidden.name.endswith(_GONE) else hidden.with_name(hidden.name + _GONE)


def _remove(path: Path, folder: MadeFolder | None) -> None:
    if folder is None:  # it is empty, if it was made: an interrupt has come since, or an error
        with suppress(OSError):
            path.rmdir()
        return
    left = folder.remove(_aside(path))
    if left is not None:
        _logger.warning("%s is left of an export, and can be removed", left)


def _time_of(folder: Path) -> float:
    """The time by the clock of the folder's filesystem, told as claims are dated."""
    storage = LocalStorage(folder)
    storage.touch(".")
    return storage.modified(".")


def _hidden_folders(out: Path, own: Path, source: str) -> list[Path]:
    """The hidden folders of exports to a place, but for the own one; none if one of them is the source."""
    # What has more in its name is of a place such as NAME.export-old.
    hidden = re.compile(rf"\.{re.escape(out.name)}\.(export|state)-[^.]*({re.escape(_GONE)})?")
    found = [entry for entry in out.parent.iterdir() if hidden.fullmatch(entry.name) and entry != own]
    return [] if os.path.realpath(source) in map(os.path.realpath, found) else sorted(found)


def _removal_if_dead(hidden: Path, now: float) -> Generator[None, None, Path | None]:
    """Remove a folder if it is a hidden one as these are, and its claim has expired; returns what is left of it."""
    try:
        folder, storage = MadeFolder(hidden, is_new=False), LocalStorage(hidden)
        is_one = storage.read(_CLAIM, MOST_CLAIM_BYTES) == os.fsencode(hidden.name.removesuffix(_GONE))
        if not (is_one and is_expired(storage, _CLAIM, now)):
            return hidden
    except OSError:
        return hidden
    return (yield from folder.removal(_aside(hidden)))
