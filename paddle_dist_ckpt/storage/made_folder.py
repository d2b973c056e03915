"""A folder that is made for a while, and removed again: that one, and no other that has its name by then."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .local import rename
from .local_files import about, close_read, uninterrupted

__all__ = ["MadeFolder"]

_logger = logging.getLogger("paddle_dist_ckpt")


class MadeFolder:
    """A folder that was made for a while, in which there are files alone.

    Who may write to the folder above may rename what is in it, whoever owns that, and give another folder this one's
    name.

    Args:
        path: Where it is.
        is_new: Whether this process has just made it; or else another one has, and has died.

    Raises:
        FileExistsError: something is in it already, so it is another one.
        OSError: it cannot be looked at.
    """

    def __init__(self, path: Path, is_new: bool = True) -> None:
        self.path, self._is_new = path, is_new
        try:
            with about(path), _opened(path) as descriptor:
                status = os.fstat(descriptor)
                if is_new and os.listdir(descriptor):
                    raise FileExistsError(errno.EEXIST, "it is another folder than was made", str(path))
        except OSError:
            if is_new:
                with suppress(OSError):  # too many files are open, say; one in which something is stays
                    os.rmdir(path)
            raise
        self._identity = status.st_dev, status.st_ino

    def remove(self, aside: Path) -> Path | None:
        """Remove it with its files, as far as that can be done. If another folder has its name by now, that stays.

        Nor is anything removed of one that has another name by now, or, if another process has made it, that cannot be
        given one: that process may live, and be about to give it the name under which it is to stay.

        Args:
            aside: A name to give it before, so that nobody who knows the other one makes a file in it meanwhile.

        Returns:
            What is left of it; None if nothing is.
        """
        steps = self.removal(aside)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                left: Path | None = end.value
                return left

    def removal(self, aside: Path) -> Generator[None, None, Path | None]:
        """The same in steps of one file each: a folder of many takes long, though none of them does."""
        name = self.path
        with suppress(OSError), _opened(self.path) as descriptor:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != self._identity:
                _logger.warning("%s is another folder than the one that was made there, so it stays", self.path)
                return None
            try:
                rename(self.path, aside)
                name = aside
            except OSError as error:  # the name may be too long
                if not self._is_new or isinstance(error, FileNotFoundError):
                    raise
            # IMPORTANT: by the descriptor, which is this folder's whatever has its name by now. Hidden files come last:
            # they tell whoever finds the rest, if this is killed, that it can be removed.
            for file in sorted(os.listdir(descriptor), key=lambda name: name.startswith(".")):
                with suppress(OSError):
                    uninterrupted(os.unlink)(file, dir_fd=descriptor)
                yield
            uninterrupted(os.rmdir)(name)  # which removes no folder that has something in it
        return name if os.path.lexists(name) else None


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        close_read(descriptor, folder)
