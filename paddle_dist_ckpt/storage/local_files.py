"""The open files of a local folder: one that is being written, one that is read."""

from __future__ import annotations

import errno
import functools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from ..core.memory import Bytes1D
from .direct import ALIGNMENT, is_cached, open_direct, read_direct
from .opening import still_there

__all__ = ["LocalReadable", "LocalWritable", "about", "close_read", "read_bytes", "uninterrupted", "up_to_date"]

_logger = logging.getLogger("paddle_dist_ckpt")
_MOST_BUFFERS = 1024  # IOV_MAX
_NO_HOLES = (errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_STALE_SECONDS = 3.0  # for which a name may mean what another host has replaced or removed; GlusterFS has 1 by default
_LOOK_AGAIN = 0.05  # seconds
_LEAST_PIECE, _MOST_PIECE = 64 << 10, 1 << 30
_LEAST_DIRECT = 256 << 10  # less is read through the cache, which reads ahead
P = ParamSpec("P")
T = TypeVar("T")


class about:  # noqa: N801 (it is called like a function; as a generator it would take a third of a small read's time)
    """Makes every OSError in its block say which path it is about: those of open files name none, or a number."""

    __slots__ = ("_path",)

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, OSError):
            return
        if error.errno is None:
            if str(self._path) not in str(error):
                error.args = (f"{error}: {self._path}",)
        elif not isinstance(error.filename, (str, bytes, os.PathLike)) or str(error.filename).startswith("/proc/"):
            error.filename = str(self._path)


class _about_open(about):  # noqa: N801
    """The same of an open file. A network filesystem calls its handle stale if another host has removed it."""

    __slots__ = ()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno == errno.ESTALE and _is_gone_soon(self._path):
            raise FileNotFoundError(errno.ENOENT, "another host has removed it", str(self._path)) from error
        super().__exit__(kind, error, trace)


def _is_gone(path: str | Path) -> bool:
    """Whether it is certain that there is nothing of this name."""
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _is_gone_soon(path: str | Path) -> bool:
    """The same, if this host is given the time to notice."""
    deadline = time.monotonic() + _STALE_SECONDS
    while not _is_gone(path):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_AGAIN)
    return True


def up_to_date(path: str, work: Callable[[], T]) -> T:
    """Open a file and begin to read it: again as long as its name stands for one that another host has replaced.

    A client of a network filesystem may go by what it knows of a name for a while, and what it opens then is stale.
    """
    deadline = None
    while True:
        try:
            return work()
        except OSError as error:
            now = time.monotonic()
            deadline = now + _STALE_SECONDS if deadline is None else deadline
            if error.errno != errno.ESTALE or now >= deadline:
                raise
            _logger.debug("%s: another host has replaced or removed it: %s", path, error)
        time.sleep(_LOOK_AGAIN)


def uninterrupted(work: Callable[P, T]) -> Callable[P, T]:
    """Does something again when a signal came meanwhile, for whose sake some filesystems in user space give it up.

    Python itself does so where a file is open, and not where something has a path. What the signal's handler has raised
    goes on its way.
    """

    @functools.wraps(work)
    def repeated(*args: P.args, **more: P.kwargs) -> T:
        while True:
            with suppress(InterruptedError):
                return work(*args, **more)

    return repeated


def close_read(descriptor: int, path: str | Path) -> None:
    """Close what was only read. What was read is right, whatever goes wrong here."""
    try:
        os.close(descriptor)
    except OSError as error:
        _logger.debug("%s: closed after it was read, with an error: %s", path, error)


def read_bytes(descriptor: int, limit: int | None) -> bytes:
    """An open file's content, or its first ``limit`` bytes. (A Python file gives what it has when a read fails.)"""
    pieces, left = list[bytes](), sys.maxsize if limit is None else limit
    with still_there():
        size = min(max(os.fstat(descriptor).st_size, _LEAST_PIECE), _MOST_PIECE)  # mostly all, so it is not copied
        while piece := os.read(descriptor, min(size, left)):
            pieces.append(piece)
            left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class LocalWritable:
    """A file with two descriptors: one that bypasses the page cache where that is possible, one for everything else."""

    def __init__(self, path: Path, for_all: bool = False) -> None:
        """Make the file; ``for_all``: readable whatever the umask is, for whoever may enter the folder."""
        self._path = path
        with about(path):
            self._cached = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                if for_all:
                    with suppress(OSError):  # some filesystems have no modes
                        os.fchmod(self._cached, os.fstat(self._cached).st_mode | 0o444)
                self._direct = open_direct(self._cached, os.O_WRONLY)
            except BaseException:
                with suppress(OSError):
                    os.unlink(path)  # nobody else would know of it
                os.close(self._cached)
                raise

    def write(self, data: Bytes1D, offset: int) -> None:
        view = data.data
        direct = self._direct if offset % ALIGNMENT == 0 and data.ctypes.data % ALIGNMENT == 0 else None
        with _about_open(self._path):
            while len(view):
                pages = len(view) // ALIGNMENT * ALIGNMENT
                if direct is not None and pages:
                    try:
                        written = os.pwrite(direct, view[:pages], offset)
                    except OSError as error:
                        if error.errno != errno.EINVAL:
                            raise
                        written = 0  # this device wants another alignment
                    if not written or written % ALIGNMENT:
                        direct = None
                else:
                    written = os.pwrite(self._cached, view, offset)
                    if written <= 0:
                        raise OSError(errno.EIO, "a write wrote nothing", str(self._path))
                view, offset = view[written:], offset + written

    def extend(self, nbytes: int) -> bool:
        try:
            with _about_open(self._path):
                os.ftruncate(self._cached, nbytes)
        except OSError as error:
            if error.errno not in _NO_HOLES:
                raise
            _logger.debug("%s: cannot be made longer without writing: %s", self._path, error)
            return False
        return True

    def sync(self) -> None:
        with _about_open(self._path):
            os.fsync(self._cached)  # of the file, whichever descriptor it was written by

    def close(self) -> None:
        # A descriptor is given back even if close() fails; to close it again could close another file.
        direct, self._direct = self._direct, None
        with _about_open(self._path), suppress(InterruptedError):  # what is to be durable was synced before
            try:
                if direct is not None:
                    os.close(direct)
            finally:
                os.close(self._cached)


class LocalReadable:
    """A file that is read through the page cache, or past it where the cache does not hold what is wanted."""

    def __init__(self, descriptor: int, path: Path, buffers: queue.SimpleQueue[Bytes1D]) -> None:
        self._descriptor, self._path, self._buffers = descriptor, path, buffers
        try:
            with _about_open(path):
                self._size = os.fstat(self._descriptor).st_size
        except BaseException:
            close_read(descriptor, path)
            raise
        self._lock = threading.Lock()
        self._direct: int | None = None
        self._may_be_direct = True  # until that was tried

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, buffers: Sequence[Bytes1D], offset: int, once: bool = False) -> None:
        views = [buffer.data for buffer in buffers if len(buffer)]
        direct = self._open_direct() if once and self._is_missing(offset, sum(map(len, views))) else None
        while views:
            got = 0
            with _about_open(self._path):
                if direct is not None and len(views[0]) >= _LEAST_DIRECT:
                    got = read_direct(direct, views[0], offset, self._buffers)
                if got == 0:
                    got = os.preadv(self._descriptor, views[: _MOST_BUFFERS if direct is None else 1], offset)
            if got <= 0:
                raise EOFError(f"{self._path} ends at byte {offset}")
            offset += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if got:
                views[0] = views[0][got:]

    def read_windows(self, data: Bytes1D, offset: int, nbytes: int, each: Callable[[memoryview], object]) -> None:
        view, preadv = data.data, os.preadv
        with _about_open(self._path):
            for start in range(0, len(view), nbytes):
                window = view[start : start + nbytes]
                if preadv(self._descriptor, (window,), offset + start) != len(window):
                    self.read_into([data[start : start + nbytes]], offset + start)
                each(window)

    @property
    def on_disk(self) -> tuple[tuple[int, int], int]:
        """What tells the file from others whatever it is called, and how many bytes it has that are no holes.

        Some filesystems do not say, by saying 0 of a file that is no hole: all are meant then.
        """
        with _about_open(self._path):
            status = os.fstat(self._descriptor)
        nbytes = status.st_blocks * 512
        if not nbytes and not self.is_hole(0, self._size):
            nbytes = self._size
        return (status.st_dev, status.st_ino), min(self._size, nbytes)

    def is_cached(self) -> bool:
        return is_cached(self._descriptor, 0, self._size)

    def is_hole(self, offset: int, nbytes: int) -> bool:
        try:
            return os.lseek(self._descriptor, offset, os.SEEK_DATA) >= offset + nbytes
        except OSError as error:
            return error.errno == errno.ENXIO and offset + nbytes <= self._size  # no data behind it

    def hole_bytes(self, offset: int, nbytes: int) -> int:
        end, holes = min(offset + nbytes, self._size), 0
        while offset < end:
            try:
                start = min(end, os.lseek(self._descriptor, offset, os.SEEK_DATA))
                holes += start - offset
                offset = os.lseek(self._descriptor, start, os.SEEK_HOLE) if start < end else end
            except OSError as error:
                return holes + (end - offset if error.errno == errno.ENXIO else 0)
        return holes

    def _is_missing(self, offset: int, nbytes: int) -> bool:
        """Whether the cache lacks so much of a range that it is better read past it."""
        return nbytes >= _LEAST_DIRECT and not is_cached(self._descriptor, offset, nbytes)

    def _open_direct(self) -> int | None:
        with self._lock:
            if self._may_be_direct:
                self._may_be_direct = False
                self._direct = open_direct(self._descriptor, os.O_RDONLY)
            return self._direct

    def close(self) -> None:
        if self._direct is not None:
            close_read(self._direct, self._path)
        close_read(self._descriptor, self._path)
