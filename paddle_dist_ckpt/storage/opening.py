"""Opens what a folder has under a name, which anybody may have put there, for reading."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["open_to_read", "still_there"]

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
_OF_CACHE = re.compile("(models|datasets|spaces)--")


def open_to_read(path: str, anywhere: bool) -> int:
    """A descriptor of a file. All that is read of local folders is opened here.

    A FIFO would wait for a writer, a device may have no end, and a link may lead to what its maker is not allowed to
    read: none of them is opened. The files of a Hugging Face cache (``models--a--b/blobs/<digest>``) are content for
    anybody to read, and the folders of its users are full of links to them.

    Args:
        path: The file's path, of text since a Path takes longer to make than a small file to read.
        anywhere: Whether links may lead out of its folder.

    Raises:
        IsADirectoryError: it is something else than a file, or a link that leaves the folder.
        OSError: it cannot be opened.
    """
    try:
        descriptor = _open(path)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device that is not there
            raise _no_file(path) from None
        if error.errno != errno.ELOOP or not os.path.lexists(path):  # a folder on the way is a link to itself
            raise
        target = _target(path, anywhere)
        descriptor = _open(target)
        try:
            if not anywhere and not _is(descriptor, target):  # a folder on the way has become a link
                raise _no_file(path) from None
        except OSError:
            os.close(descriptor)
            raise
    try:
        with still_there():
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _no_file(path)
        os.set_blocking(descriptor, True)  # some filesystems would have a read fail that has to wait
    except OSError:
        with suppress(OSError):  # that is stale, too
            os.close(descriptor)
        raise
    return descriptor


@contextmanager
def still_there() -> Iterator[None]:
    """A block in which an open file's error that it is not there says that it is stale: its name may mean another one.

    That is what GlusterFS says of a file that another host has replaced just after it was opened.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error


def _open(path: str | Path) -> int:
    try:
        return os.open(path, _FLAGS)
    except BlockingIOError:  # it is lent to a client of a file server here, which has to give it back first
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise
        return os.open(path, _FLAGS & ~os.O_NONBLOCK)


def _target(link: str, anywhere: bool) -> Path:
    """The file that a link stands for, if it may be read."""
    try:
        os.stat(link)  # which takes far less time to find that there is nothing
        target = Path(os.path.realpath(link, strict=True))
    except OSError as error:
        if _leads_nowhere(error):
            raise _no_file(link) from None
        if error.errno == errno.EINVAL:  # while it was followed, something else took its place
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), link) from None
        raise
    of_cache = target.parent.name == "blobs" and _OF_CACHE.match(target.parents[1].name)
    if not (anywhere or of_cache or target.is_relative_to(os.path.realpath(os.path.dirname(link)))):
        raise IsADirectoryError(
            errno.EISDIR,
            f"it is a link to {target}, outside its folder; LocalStorage(path, follow_links=True) reads it",
            link,
        )
    if not target.is_file():
        raise _no_file(link)
    return target


def _is(descriptor: int, path: Path) -> bool:
    """Whether what has been opened is the file of this path, as far as this system tells.

    Raises:
        FileNotFoundError: it is gone by now.
    """
    try:
        opened = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return True
    if opened.endswith(" (deleted)") and opened != str(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return opened == str(path)


def _leads_nowhere(error: OSError) -> bool:
    """Whether it says of a link that it can never lead to a file."""
    return error.errno in (errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR)


def _no_file(path: str) -> IsADirectoryError:
    """The error for what is something else than a file."""
    return IsADirectoryError(errno.EISDIR, "it is no file", path)
