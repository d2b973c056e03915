"""A storage of which no operation is waited for without end: what a disk that hangs does to others is an error."""

from __future__ import annotations

import errno
import functools
import logging
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..core.memory import Bytes1D
from ..errors import CheckpointTimeoutError
from .base import FolderIdentity, ReadableFile, Storage, WritableFile
from .capabilities import extended, has_folders, hole_bytes, is_hole, is_part, what_is_on_disk
from .helpers import Helpers, StorageCall
from .local import LocalStorage

__all__ = ["Folders", "bounded", "bounded_folders"]

T = TypeVar("T")
_logger = logging.getLogger("paddle_dist_ckpt")
_MOST = 64 << 20  # in one operation; as much as the largest block
_SYNC_EVERY = 256 << 20
_LOOK_SECONDS = 1.0  # after which a disk that has hung before is taken to hang on


@contextmanager
def bounded(
    find: Callable[[], Storage],
    path: object,
    seconds: float | None,
    rank: int,
    unfinished: list[StorageCall] | None = None,
) -> Iterator[Storage]:
    """A storage whose operations are given up when they take too long, until the end of the block.

    Each of them runs on another thread. One that is given up goes on there for as long as it takes: it has memory of
    its own, its file is closed when it has returned and not before, and what it should make or publish by then is not
    made any more, unless it is just about to. After it every operation raises at once.

    Args:
        find: Finds the storage, which may take an operation, too.
        path: What is to be found, for messages.
        seconds: The longest that an operation may take; None for the storage as it is.
        rank: This rank, for messages.
        unfinished: Publications that were given up and may still take effect, which the caller keeps from one block to
            the next: while there are any in this folder, the next one waits for them.

    Raises:
        CheckpointTimeoutError: all operations raise it; it names the operation, the file and the rank.
    """
    if seconds is None and not unfinished:
        yield find()
        return
    with closing(Helpers(math.inf if seconds is None else seconds, rank)) as helpers:
        storage = helpers.run(StorageCall(f"a look at {path}", lambda _: find()))
        yield _BoundedStorage(storage, helpers, [] if unfinished is None else unfinished)


class Folders:
    """Local folders: what opens them as storages, and does with them what a storage does not do.

    Args:
        opened: Makes the storage of a folder.
        helpers: What runs operations, and gives them up; None to run them on the caller's thread.
    """

    def __init__(self, opened: Callable[[Path], Storage] = LocalStorage, helpers: Helpers | None = None) -> None:
        self._opened, self._helpers = opened, helpers

    def __call__(self, folder: Path) -> Storage:
        """A folder's storage."""
        storage = self._opened(folder)
        return storage if self._helpers is None else _BoundedStorage(storage, self._helpers, [])

    def run(
        self,
        doing: str,
        path: object,
        work: Callable[[], T],
        late: Callable[[T], None] = lambda result: None,
        final: bool = False,
    ) -> T:
        """Do something in the file system.

        Args:
            doing: What, for messages.
            path: To what.
            work: Does it.
            late: Undoes it, or says so, if it is done after it was given up.
            final: Whether it takes effect as soon as it is begun, and is not undone.

        Raises:
            CheckpointTimeoutError: it takes too long, or something else did before.
        """
        if self._helpers is None:
            return work()

        def begun(call: StorageCall) -> T:
            if final:
                call.decide()
            return work()

        result: T = self._helpers.run(StorageCall(f"{doing} {path}", begun, late, patient=final))
        return result

    def run_each(self, doing: str, path: object, steps: Generator[None, None, T]) -> T:
        """Do something step by step, each of which may take as long as one operation; returns what the last one does.

        Raises:
            CheckpointTimeoutError: see :meth:`run`.
        """
        while True:
            try:
                self.run(doing, path, functools.partial(next, steps))
            except StopIteration as end:
                result: T = end.value
                return result

    def end_with(self, doing: str, path: object, work: Callable[[], None]) -> None:
        """Clean up: without waiting for that if something was given up before, or if it takes too long itself."""
        if self._helpers is None:
            work()
            return
        with suppress(CheckpointTimeoutError):
            self._helpers.end_with(StorageCall(f"{doing} {path}", lambda _: work()))


@contextmanager
def bounded_folders(seconds: float | None, rank: int) -> Iterator[Folders]:
    """Local folders in which all that takes too long is given up, until the end of the block; see :func:`bounded`."""
    if seconds is None:
        yield Folders()
        return
    with closing(Helpers(seconds, rank)) as helpers:
        yield Folders(helpers=helpers)


class _BoundedStorage:
    """Implements :class:`.base.Storage` by another one."""

    def __init__(self, inner: Storage, helpers: Helpers, unfinished: list[StorageCall]) -> None:
        self._inner, self._helpers, self._unfinished = inner, helpers, unfinished
        self._buffers: queue.SimpleQueue[Bytes1D] = queue.SimpleQueue()  # of all files together
        self.location = inner.location
        self.is_part, self.has_folders = is_part(inner), has_folders(inner)

    def _run(
        self, doing: str, name: str, work: Callable[[], T], late: Callable[[Any], None] = lambda result: None
    ) -> T:
        path = f"{self.location}/{name}" if name else self.location
        result: T = self._helpers.run(StorageCall(f"{doing} {path}", lambda _: work(), late))
        return result

    def prepare(self) -> None:
        self._run("making", "", self._inner.prepare)

    def identity(self) -> FolderIdentity:
        return self._run("a look at", "", self._inner.identity)

    def free_bytes(self) -> int | None:
        return self._run("a look at", "", self._inner.free_bytes)

    def names(self) -> list[str]:
        return self._run("listing", "", self._inner.names)

    def create(self, name: str) -> WritableFile:
        def undo(file: WritableFile) -> None:
            file.close()
            self._inner.delete(name)

        file = self._run("making", name, functools.partial(self._inner.create, name), undo)
        return _BoundedWritable(file, f"{self.location}/{name}", self._helpers)

    def open(self, name: str) -> ReadableFile:
        def work() -> tuple[ReadableFile, int]:
            file = self._inner.open(name)
            return file, file.size

        file, size = self._run("opening", name, work, lambda opened: opened[0].close())
        return _BoundedReadable(file, size, self._buffers, f"{self.location}/{name}", self._helpers)

    def size(self, name: str) -> int:
        return self._run("a look at", name, functools.partial(self._inner.size, name))

    def read(self, name: str, limit: int | None = None) -> bytes:
        return self._run("reading", name, functools.partial(self._inner.read, name, limit))

    def publish(
        self, name: str, data: bytes, temporary: str, replace: bool, confirm: Callable[[], None] | None = None
    ) -> bool:
        path = f"{self.location}/{name}"

        def work(operation: StorageCall) -> bool:
            def confirmed() -> None:
                operation.asking = True
                try:
                    if confirm is not None:
                        confirm()
                finally:
                    operation.asking = False
                operation.decide()

            return self._inner.publish(name, data, temporary, replace, confirmed)

        def late(published: bool) -> None:
            if published:
                _logger.warning("%s is published after all, long after that was given up", path)

        # IMPORTANT: what was given up must not come after this and undo it.
        for earlier in list(self._unfinished):
            if earlier.location == self.location:
                self._helpers.wait_for(earlier)
                self._unfinished.remove(earlier)
        operation = StorageCall(f"publishing {path}", work, late, patient=True, location=self.location)
        try:
            published: bool = self._helpers.run(operation)
            return published
        finally:
            if operation.may_still_happen and not operation.ended.is_set():
                self._unfinished.append(operation)

    def is_published(self, name: str, data: bytes) -> bool:
        """See :func:`.capabilities.is_published`. The look is not waited for long: the disk hangs."""
        look = StorageCall(f"a look at {name}", lambda _: self._inner.read(name, len(data) + 1) == data)
        self._helpers.begin(look)
        with suppress(Exception):
            return look.ended.wait(_LOOK_SECONDS) and bool(look.result())
        return False

    def delete(self, name: str) -> None:
        self._run("removing", name, functools.partial(self._inner.delete, name))

    def sync(self) -> None:
        self._run("fsync of", "", self._inner.sync)

    def touch(self, name: str) -> None:
        self._run("touching", name, functools.partial(self._inner.touch, name))

    def modified(self, name: str) -> float:
        return self._run("a look at", name, functools.partial(self._inner.modified, name))


class _BoundedFile:
    """An open file, which is closed when all that is done to it has returned."""

    def __init__(self, close: Callable[[], None], path: str, helpers: Helpers) -> None:
        self._close, self._path, self._helpers = close, path, helpers
        self._lock = threading.Lock()
        self._under_way = 0
        self._closing = False

    def _run(self, doing: str, work: Callable[[], T]) -> T:
        result: T = self._helpers.run(StorageCall(f"{doing} {self._path}", lambda _: self._do(work)))
        return result

    def _do(self, work: Callable[[], T]) -> T:
        with self._lock:
            if self._closing:
                raise OSError(errno.EBADF, "it is closed", self._path)
            self._under_way += 1
        try:
            return work()
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._under_way -= 1
            last = self._closing and not self._under_way
        if last:
            with suppress(OSError):
                self._close()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            if self._under_way:
                return  # IMPORTANT: the system may give its number to another file, to which the rest would be written
        self._helpers.end_with(StorageCall(f"closing {self._path}", lambda _: self._close()))


class _BoundedWritable(_BoundedFile):
    def __init__(self, inner: WritableFile, path: str, helpers: Helpers) -> None:
        super().__init__(inner.close, path, helpers)
        self._inner = inner
        self._unsynced = 0

    def write(self, data: Bytes1D, offset: int) -> None:
        for start in range(0, len(data), _MOST):
            piece = data[start : start + _MOST]
            self._run("a write to", functools.partial(self._inner.write, piece, offset + start))
        with self._lock:
            self._unsynced += len(data)
            due = self._unsynced >= _SYNC_EVERY
        if due:
            self.sync()  # so that none has to wait for more than this

    def extend(self, nbytes: int) -> bool:
        return self._run("making room in", lambda: extended(self._inner, nbytes))

    def sync(self) -> None:
        with self._lock:
            self._unsynced = 0
        self._run("fsync of", self._inner.sync)


class _BoundedReadable(_BoundedFile):
    def __init__(
        self, inner: ReadableFile, size: int, buffers: queue.SimpleQueue[Bytes1D], path: str, helpers: Helpers
    ) -> None:
        super().__init__(inner.close, path, helpers)
        self._inner, self.size, self._buffers = inner, size, buffers

    def close(self) -> None:
        with suppress(CheckpointTimeoutError):  # all has been read; and other ranks do not wait for this any more
            super().close()

    def read_into(self, buffers: Sequence[Bytes1D], offset: int, once: bool = False) -> None:
        if sum(map(len, buffers)) <= _MOST:
            self._read(buffers, offset, once)
            return
        for buffer in buffers:
            for start in range(0, len(buffer), _MOST):
                self._read([buffer[start : start + _MOST]], offset + start, once)
            offset += len(buffer)

    def _read(self, buffers: Sequence[Bytes1D], offset: int, once: bool) -> None:
        # Never straight into memory that may not be there any more, or have another use, when a late read returns.
        size = sum(map(len, buffers))
        own = self._buffer(size)
        self._run("a read of", lambda: self._inner.read_into([own[:size]], offset, once))
        start = 0
        for buffer in buffers:
            buffer[:] = own[start : start + len(buffer)]
            start += len(buffer)
        self._buffers.put(own)

    def _buffer(self, size: int) -> Bytes1D:
        try:
            buffer = self._buffers.get_nowait()
        except queue.Empty:
            return np.empty(size, np.uint8)
        return buffer if len(buffer) >= size else np.empty(size, np.uint8)

    def is_cached(self) -> bool:
        return self._run("a look at", self._inner.is_cached)

    def is_hole(self, offset: int, nbytes: int) -> bool:
        return self._run("a look at", lambda: is_hole(self._inner, offset, nbytes))

    def hole_bytes(self, offset: int, nbytes: int) -> int:
        return self._run("a look at", lambda: hole_bytes(self._inner, offset, nbytes) or 0)

    @property
    def on_disk(self) -> tuple[object, int]:
        return self._run("a look at", lambda: what_is_on_disk(self._inner, self))
