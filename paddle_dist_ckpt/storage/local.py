"""A folder of a POSIX filesystem: a local disk, or one that several hosts mount."""

from __future__ import annotations

import errno
import functools
import glob
import itertools
import logging
import os
import queue
import re
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..core.memory import Bytes1D
from .base import FolderIdentity, ReadableFile, Storage, WritableFile
from .direct import ALIGNMENT, is_cached, open_direct, read_direct
from .opening import open_to_read

__all__ = ["LocalStorage", "as_source", "as_storage", "give_name"]

_logger = logging.getLogger("paddle_dist_ckpt")
_MOST_BUFFERS = 1024  # IOV_MAX
_LEAST_DIRECT = 256 << 10  # less is read through the cache, which reads ahead
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def as_storage(path: object) -> Storage:
    """The storage that a user means by ``path``: a str or PathLike names a local folder, a Storage is itself.

    Raises:
        TypeError: it is none of these.
        ValueError: it is empty, or an address rather than a path.
    """
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        if not text or "://" in text or "\0" in text:
            raise ValueError(f"path must name a local folder, not {text!r}; for other places pass a Storage")
        return LocalStorage(text)
    if isinstance(path, Storage):
        return path
    raise TypeError(f"path must be a str, a PathLike or a Storage, not {type(path).__name__}")


def as_source(path: object) -> Storage:
    """The storage to read from that a user means by ``path``: what :func:`as_storage` takes, or a part of a folder.

    A path to a file means this file alone. One that names nothing, but before ``_dist0.pdparams`` and the like, means
    the files of that prefix.

    Raises:
        TypeError, ValueError: see :func:`as_storage`.
    """
    storage = as_storage(path)
    if isinstance(storage, LocalStorage) and not os.path.isdir(storage.location):
        folder, name = os.path.split(storage.location)
        if os.path.isfile(storage.location):
            return _PartOfFolder(folder, re.compile(re.escape(name)))
        if glob.glob(f"{glob.escape(storage.location)}_dist0.pd*"):
            return _PartOfFolder(folder, re.compile(rf"{re.escape(name)}_dist\d+\.\w+"))
    return storage


class LocalStorage:
    """A folder of a mounted filesystem.

    Args:
        path: The folder.
        follow_links: Whether to read what links in the folder lead to, wherever that is. Else those that lead out of
            the folder are refused, but for those to the ``blobs`` of a Hugging Face cache.
    """

    def __init__(self, path: str | os.PathLike[str], *, follow_links: bool = False) -> None:
        self._root = Path(os.path.abspath(os.fspath(path)))
        self._follow_links = follow_links
        self._buffers: queue.SimpleQueue[Bytes1D] = queue.SimpleQueue()  # of readers past the cache

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(LocalStorage, follow_links=self._follow_links), (self.location,)  # without the buffers

    @property
    def location(self) -> str:
        return str(self._root)

    def prepare(self) -> None:
        folders = (self._root, *self._root.parents)
        missing = list(itertools.takewhile(lambda folder: not folder.exists(), folders))
        self._root.mkdir(parents=True, exist_ok=True)
        for made in missing:
            _sync_folder(made.parent)

    def identity(self) -> FolderIdentity:
        status = self._root.stat()
        return FolderIdentity(_host(), status.st_dev, status.st_ino)

    def free_bytes(self) -> int | None:
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._root))
        except FileNotFoundError:
            return []

    def create(self, name: str) -> WritableFile:
        return _LocalWritable(self._root / name)

    def open(self, name: str) -> ReadableFile:
        return _LocalReadable(open_to_read(self._root, name, self._follow_links), self._root / name, self._buffers)

    def size(self, name: str) -> int:
        return (self._root / name).stat().st_size

    def read(self, name: str, limit: int | None = None) -> bytes:
        with open(open_to_read(self._root, name, self._follow_links), "rb") as file:
            return file.read(-1 if limit is None else limit)

    def publish(
        self, name: str, data: bytes, temporary: str, replace: bool, confirm: Callable[[], None] | None = None
    ) -> bool:
        source, target = self._root / temporary, self._root / name
        file = _LocalWritable(source)
        try:
            with closing(file):
                file.write(np.frombuffer(data, np.uint8), 0)
                # IMPORTANT: the content is durable before the name is. Otherwise a crash could leave an empty file.
                file.sync()
                if confirm is not None:
                    confirm()
            if replace:
                os.replace(source, target)
            elif not give_name(source, target):
                return False
        finally:
            source.unlink(missing_ok=True)
        self.sync()
        return True

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def sync(self) -> None:
        _sync_folder(self._root)

    def touch(self, name: str) -> None:
        os.utime(self._root / name)

    def modified(self, name: str) -> float:
        return (self._root / name).lstat().st_mtime

    def __repr__(self) -> str:
        return f"LocalStorage({self.location!r})"


class _PartOfFolder(LocalStorage):
    """Some files of a folder, those whose names match, to be read."""

    def __init__(self, path: str, names: re.Pattern[str]) -> None:
        super().__init__(path)
        self._names = names

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[Any, ...]]:
        return _PartOfFolder, (str(self._root), self._names)

    def names(self) -> list[str]:
        return [name for name in super().names() if self._names.fullmatch(name)]


def give_name(source: Path, target: Path) -> bool:
    """Give ``source`` the name ``target`` unless it is taken; it may keep the old name. Returns whether it was free."""
    try:
        os.link(source, target)
    except FileExistsError:
        return source.samefile(target)  # a network filesystem may have done it and lost the answer
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _logger.debug("%s: no hard links here, so a rename publishes it", target)
        if target.exists():
            return False
        source.rename(target)
    return True


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError as error:
        _logger.debug("%s: may not be read, so it is not synced (%s)", folder, error)
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _logger.debug("%s: this filesystem does not sync folders (%s)", folder, error)
    finally:
        os.close(descriptor)


@functools.cache
def _host() -> str:
    """This boot of this host. The host name alone would not tell cloned machines or containers apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


class _LocalWritable:
    """A file with two descriptors: one that bypasses the page cache where that is possible, one for everything else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cached = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._direct = open_direct(self._cached, os.O_WRONLY)
        except BaseException:
            os.close(self._cached)
            raise

    def write(self, data: Bytes1D, offset: int) -> None:
        view = data.data
        direct = self._direct if offset % ALIGNMENT == 0 and data.ctypes.data % ALIGNMENT == 0 else None
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

    def sync(self) -> None:
        os.fsync(self._cached)  # of the file, whichever descriptor it was written by

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
        os.close(self._cached)


class _LocalReadable:
    """A file that is read through the page cache, or past it where the cache does not hold what is wanted."""

    def __init__(self, descriptor: int, path: Path, buffers: queue.SimpleQueue[Bytes1D]) -> None:
        self._descriptor, self._path, self._buffers = descriptor, path, buffers
        self._size = os.fstat(self._descriptor).st_size
        self._lock = threading.Lock()
        self._direct: int | None = None
        self._may_be_direct = True  # until that was tried

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, buffers: Sequence[Bytes1D], offset: int, once: bool = False) -> None:
        views = [buffer.data for buffer in buffers if len(buffer)]
        nbytes = sum(map(len, views))
        past_cache = once and nbytes >= _LEAST_DIRECT and not is_cached(self._descriptor, offset, nbytes)
        direct = self._open_direct() if past_cache else None
        while views:
            got = 0
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

    def is_cached(self) -> bool:
        return is_cached(self._descriptor, 0, self._size)

    def _open_direct(self) -> int | None:
        with self._lock:
            if self._may_be_direct:
                self._may_be_direct = False
                with suppress(OSError):  # no /proc, or too many open files: the descriptor that there is will do
                    self._direct = open_direct(self._descriptor, os.O_RDONLY)
            return self._direct

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
        os.close(self._descriptor)
