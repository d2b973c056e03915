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
import stat
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from ..core.host import this_host
from ..core.memory import Bytes1D
from .base import FolderIdentity, ReadableFile, Storage, WritableFile
from .local_files import LocalReadable, LocalWritable, about, close_read, read_bytes, uninterrupted, up_to_date
from .noreplace import rename_noreplace
from .opening import open_to_read
from .paths import local_path

__all__ = ["LocalStorage", "as_source", "as_storage", "give_name", "rename"]

_logger = logging.getLogger("paddle_dist_ckpt")
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
_NO_ANSWER = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EOVERFLOW)
_NO_TIMES = (errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_NO_FLAGS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)
_MOST_DURABLE = 1024
_FOR_ALL = ".claim"  # what everybody who works in a folder has to know, with whatever umask others work there
_COARSEST = 3.0  # seconds; the times of some filesystems are even
_durable: dict[Path, tuple[int, ...]] = {}  # folders whose names were made durable, and what told them from others


def as_storage(path: object) -> Storage:
    """The storage that a user means by ``path``: a str or PathLike names a local folder, a Storage is itself.

    Raises:
        TypeError: it is none of these.
        ValueError: it is empty, or a URL rather than a path.
    """
    if isinstance(path, (str, os.PathLike)):
        return LocalStorage(path)
    if isinstance(path, type):
        raise TypeError(f"path must be a str, a PathLike or a Storage, not the class {path.__name__}")
    if isinstance(path, Storage):
        return path
    lacks = [name for name in vars(Storage) if not name.startswith("_") and getattr(path, name, None) is None]
    what = f", which has no {', '.join(lacks)}" if hasattr(path, "publish") else ""
    raise TypeError(f"path must be a str, a PathLike or a Storage, not {type(path).__name__}{what}")


def as_source(path: object) -> Storage:
    """The storage to read from that a user means by ``path``: what :func:`as_storage` takes, or a part of a folder.

    A path to a file means this file alone; one to a `.metadata` also this library's data files of that number. One that
    names nothing, but before ``_dist0.pdparams`` and the like, means the files of that prefix.

    Raises:
        TypeError, ValueError: see :func:`as_storage`.
    """
    storage = as_storage(path)
    if isinstance(storage, LocalStorage) and not os.path.isdir(storage.location):
        folder, name = os.path.split(storage.location)
        if os.path.isfile(storage.location):
            names = re.escape(name)
            if of_checkpoint := re.fullmatch(r"([0-9]+)\.metadata", name):  # and data files of this library's saves
                names += rf"|[0-9]+_{of_checkpoint[1]}\.[0-9a-f]{{16}}\..+"
            return _PartOfFolder(folder, re.compile(names), storage._follow_links)
        if glob.glob(f"{glob.escape(storage.location)}_dist0.pd*"):
            return _PartOfFolder(folder, re.compile(rf"{re.escape(name)}_dist[0-9]+\.\w+"), storage._follow_links)
    return storage


class LocalStorage:
    """A folder of a mounted filesystem.

    Args:
        path: The folder; ``~`` is the home folder.
        follow_links: Whether to read what links in the folder lead to, wherever that is. Else those that lead out of
            the folder are refused, but for those to the ``blobs`` of a Hugging Face cache.

    Raises:
        ValueError: the path is empty, or a URL rather than a path.
    """

    has_folders = True

    def __init__(self, path: str | os.PathLike[str], *, follow_links: bool = False) -> None:
        self._root = Path(local_path(path))
        self._location = str(self._root)
        self._follow_links = follow_links
        self._buffers: queue.SimpleQueue[Bytes1D] = queue.SimpleQueue()  # of readers past the cache

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(LocalStorage, follow_links=self._follow_links), (self.location,)  # without the buffers

    @property
    def location(self) -> str:
        return self._location

    @uninterrupted
    def prepare(self) -> None:
        with about(self._root):
            folders = (self._root, *self._root.parents)
            missing = list(itertools.takewhile(lambda folder: not folder.exists(), folders))
            there = self._root if not missing else missing[-1].parent
            if there.is_file():
                raise FileExistsError(errno.EEXIST, "it is a file, and a folder is needed there", str(there))
            for folder in filter(Path.is_symlink, missing):
                reason = f"it is a link to {os.readlink(folder)}, which is not there, and a folder is needed there"
                raise FileExistsError(errno.EEXIST, reason, str(folder))
            self._root.mkdir(parents=True, exist_ok=True)
            real = Path(os.path.realpath(self._root))
        for folder in {self._root, real}:
            _sync_names(folder)

    @uninterrupted
    def identity(self) -> FolderIdentity:
        with about(self._root):
            status = self._root.stat()
        return FolderIdentity(this_host(), status.st_dev, status.st_ino)

    @uninterrupted
    def free_bytes(self) -> int | None:
        try:
            with about(self._root):
                status = os.statvfs(self._root)
        except OSError as error:
            if error.errno not in _NO_ANSWER:
                raise
            _logger.debug("%s: it is not known how much room there is: %s", self._root, error)
            return None
        is_known = status.f_blocks and status.f_frsize  # some do not say how large they are
        return status.f_bavail * status.f_frsize if is_known else None

    @uninterrupted
    def names(self) -> list[str]:
        try:
            with about(self._root):
                return sorted(os.listdir(self._root))
        except FileNotFoundError:
            return []

    def create(self, name: str) -> WritableFile:
        return LocalWritable(self._root / name)

    def open(self, name: str) -> ReadableFile:
        path = self._root / name
        return up_to_date(str(path), lambda: LocalReadable(self._open(str(path)), path, self._buffers))

    @uninterrupted
    def _open(self, path: str) -> int:
        with about(path):
            return open_to_read(path, self._follow_links)

    @uninterrupted
    def size(self, name: str) -> int:
        path = os.path.join(self.location, name)
        with about(path):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                return status.st_size
            descriptor = open_to_read(path, self._follow_links)  # a link may not lead everywhere
            try:
                return os.fstat(descriptor).st_size
            finally:
                close_read(descriptor, path)

    def read(self, name: str, limit: int | None = None) -> bytes:
        path = os.path.join(self.location, name)
        return up_to_date(path, lambda: self._read(path, limit))

    def _read(self, path: str, limit: int | None) -> bytes:
        descriptor = self._open(path)
        try:
            with about(path):
                return read_bytes(descriptor, limit)
        finally:
            close_read(descriptor, path)

    def publish(
        self, name: str, data: bytes, temporary: str, replace: bool, confirm: Callable[[], None] | None = None
    ) -> bool:
        source, target = self._root / temporary, self._root / name
        try:
            with closing(LocalWritable(source, name.endswith(_FOR_ALL))) as file:
                file.write(np.frombuffer(data, np.uint8), 0)
                # IMPORTANT: the content is durable before the name is. Otherwise a crash could leave an empty file.
                file.sync()
                if confirm is not None:
                    confirm()
            if replace:
                rename(source, target)
            elif not give_name(source, target):
                return False
        finally:
            _remove_temporary(source)
        self.sync()
        return True

    @uninterrupted
    def delete(self, name: str) -> None:
        with about(self._root / name):
            try:
                (self._root / name).unlink(missing_ok=True)
            except IsADirectoryError as error:
                _logger.warning("%s is left: %s", self._root / name, error)

    def sync(self) -> None:
        _sync_folder(self._root)

    @uninterrupted
    def touch(self, name: str) -> None:
        path = self._root / name
        with about(path):
            try:
                os.utime(path, follow_symlinks=name == ".")
            except OSError as error:
                if error.errno not in _NO_TIMES or not _written_again(path):
                    raise
                _logger.debug("%s: no times can be set here, so it is written again", path)

    @uninterrupted
    def modified(self, name: str) -> float:
        with about(self._root / name):
            return os.stat(self._root / name, follow_symlinks=name == ".").st_mtime

    def __repr__(self) -> str:
        return f"LocalStorage({self.location!r})"


class _PartOfFolder(LocalStorage):
    """Some files of a folder, those whose names match, to be read."""

    is_part = True

    def __init__(self, path: str, names: re.Pattern[str], follow_links: bool) -> None:
        super().__init__(path, follow_links=follow_links)
        self._names = names

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[Any, ...]]:
        return _PartOfFolder, (self.location, self._names, self._follow_links)

    def names(self) -> list[str]:
        return [name for name in super().names() if self._names.fullmatch(name)]


@uninterrupted
def give_name(source: Path, target: Path) -> bool:
    """Give ``source`` the name ``target`` unless it is taken; it may keep the old name. Returns whether it was free."""
    with about(source):
        status = source.stat()
    for give, lacks_it in ((os.link, _NO_LINKS), (rename_noreplace, _NO_FLAGS)):
        try:
            with about(target):
                give(source, target)
            return True
        except OSError as error:
            if _is_file(target, status):
                _logger.debug("%s: the name was given, though the answer was: %s", target, error)
                return True
            if isinstance(error, FileExistsError):
                return False
            if error.errno not in lacks_it:
                raise
            _logger.debug("%s: a filesystem without %s: %s", target, give.__name__, error)
    if target.exists():
        return False
    rename(source, target)
    return True


@uninterrupted
def rename(source: Path, target: Path) -> None:
    """Give ``source`` the name ``target``, and know that it was done whatever the answer is."""
    with about(source):
        status = source.stat()
    try:
        with about(target):
            os.replace(source, target)
    except OSError as error:
        if not _is_file(target, status):
            raise
        _logger.debug("%s: the rename was done, though the answer was: %s", target, error)


def _is_file(path: Path, status: os.stat_result) -> bool:
    """Whether a name means this very file, as it does if a filesystem has given it and then answered wrongly.

    A file that is gone may have left its number to another one, which was written at another time.
    """
    try:
        found = uninterrupted(path.lstat)()
    except OSError:
        return False
    same = found.st_size == status.st_size and found.st_mtime_ns == status.st_mtime_ns
    return same and os.path.samestat(found, status)


def _written_again(path: Path) -> bool:
    """Write a file's first byte once more, which changes its time and nothing else; returns whether that was done."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # a folder, or it may not be written
        return False
    try:
        first = os.pread(descriptor, 1, 0)
        return os.pwrite(descriptor, first, 0) == 1
    except OSError:
        return False
    finally:
        close_read(descriptor, path)


def _remove_temporary(path: Path) -> None:
    """Remove a name that is of no use any more, or leave it to the clean-up after a later save."""
    try:
        uninterrupted(path.unlink)(missing_ok=True)
    except OSError as error:
        level = logging.WARNING if os.path.lexists(path) else logging.DEBUG  # some say first that it is read-only
        _logger.log(level, "%s is left: %s", path, error)


def _sync_names(folder: Path) -> None:
    """Make the names of a folder and of those above it durable, up to the mount point: whoever made them may not have.

    It is done once in a process, and again where a name may mean another folder since. The inode does not tell that, as
    filesystems give its number again; but no name is made without a change of the folder above. Where times are whole
    seconds, another change may have the same one: such a folder counts as known when its last change is older.
    """
    done: dict[Path, tuple[int, ...]] = {}
    while folder != folder.parent:
        with about(folder):
            status, above = folder.lstat(), folder.parent.stat()
        known = status.st_ino, above.st_dev, above.st_ino, above.st_ctime_ns
        if status.st_dev != above.st_dev or _durable.get(folder) == known:
            break
        _sync_folder(folder.parent)
        if above.st_ctime_ns % 1_000_000_000 or time.time() - above.st_ctime > _COARSEST:
            done[folder] = known
        folder = folder.parent
    if len(_durable) > _MOST_DURABLE:
        _durable.clear()
    _durable.update(done)


def _sync_folder(folder: Path) -> None:
    with about(folder):
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
            close_read(descriptor, folder)
