"""A storage whose operations can be made to fail, to be slow, or to be watched; a transport that delivers otherwise."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..control.ranks import NoTransport
from ..core.memory import Bytes1D
from ..core.protocols import Transport
from ..storage import LocalStorage
from ..storage.base import FolderIdentity, ReadableFile, WritableFile

__all__ = ["FaultyStorage", "FaultyTransport", "Stall"]

Hook = Callable[[str, str], None]


class Stall:
    """A hook that makes a folder hang: one operation waits until it is released, as on a disk that does not answer.

    Args:
        operation: The first of this kind waits.
        at: Only for names with this part.
        for_good: Everything that is done after it waits, too.

    Attributes:
        reached: Set when one waits.
    """

    def __init__(self, operation: str, at: str = "", for_good: bool = False) -> None:
        self._operation, self._at, self._for_good = operation, at, for_good
        self._lock = threading.Lock()
        self._released = threading.Event()
        self.reached = threading.Event()

    def __call__(self, operation: str, name: str) -> None:
        with self._lock:
            first = not self.reached.is_set() and operation == self._operation and self._at in name
            if first:
                self.reached.set()
        if first or (self._for_good and self.reached.is_set()):
            self._released.wait()

    def release(self) -> None:
        """Let what waits go on."""
        self._released.set()


class FaultyStorage:
    """A local folder that calls ``hook(operation, name)`` before everything it does; the hook may raise or wait.

    Operations: prepare, names, create, write, sync_file, open, read_into, size, read, publish, delete, sync, touch,
    modified.

    Args:
        path: The folder.
        hook: Called before each operation.
        identity: Pretend to be another folder, as on another host.
        free_bytes: Pretend to have so much room.
    """

    def __init__(
        self, path: Any, hook: Hook, identity: FolderIdentity | None = None, free_bytes: int | None = None
    ) -> None:
        self._inner = LocalStorage(path)
        self._hook, self._identity, self._free_bytes = hook, identity, free_bytes

    @staticmethod
    def no_space(name: str) -> OSError:
        """What a full disk raises."""
        return OSError(errno.ENOSPC, "No space left on device", name)

    @property
    def location(self) -> str:
        return self._inner.location

    def prepare(self) -> None:
        self._hook("prepare", "")
        self._inner.prepare()

    def identity(self) -> FolderIdentity:
        return self._identity or self._inner.identity()

    def free_bytes(self) -> int | None:
        return self._inner.free_bytes() if self._free_bytes is None else self._free_bytes

    def names(self) -> list[str]:
        self._hook("names", "")
        return self._inner.names()

    def create(self, name: str) -> WritableFile:
        self._hook("create", name)
        return _FaultyWritable(self._inner.create(name), name, self._hook)

    def open(self, name: str) -> ReadableFile:
        self._hook("open", name)
        return _FaultyReadable(self._inner.open(name), name, self._hook)

    def size(self, name: str) -> int:
        self._hook("size", name)
        return self._inner.size(name)

    def read(self, name: str, limit: int | None = None) -> bytes:
        self._hook("read", name)
        return self._inner.read(name, limit)

    def publish(
        self, name: str, data: bytes, temporary: str, replace: bool, confirm: Callable[[], None] | None = None
    ) -> bool:
        self._hook("publish", name)
        return self._inner.publish(name, data, temporary, replace, confirm)

    def delete(self, name: str) -> None:
        self._hook("delete", name)
        self._inner.delete(name)

    def sync(self) -> None:
        self._hook("sync", "")
        self._inner.sync()

    def touch(self, name: str) -> None:
        self._hook("touch", name)
        self._inner.touch(name)

    def modified(self, name: str) -> float:
        self._hook("modified", name)
        return self._inner.modified(name)


class _FaultyWritable:
    def __init__(self, inner: WritableFile, name: str, hook: Hook) -> None:
        self._inner, self._name, self._hook = inner, name, hook

    def write(self, data: Bytes1D, offset: int) -> None:
        self._hook("write", self._name)
        self._inner.write(data, offset)

    def sync(self) -> None:
        self._hook("sync_file", self._name)
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


class _FaultyReadable:
    def __init__(self, inner: ReadableFile, name: str, hook: Hook) -> None:
        self._inner, self._name, self._hook = inner, name, hook

    @property
    def size(self) -> int:
        return self._inner.size

    def read_into(self, buffers: Sequence[Bytes1D], offset: int, once: bool = False) -> None:
        self._hook("read_into", self._name)
        self._inner.read_into(buffers, offset, once)

    def is_cached(self) -> bool:
        return self._inner.is_cached()

    def close(self) -> None:
        self._inner.close()


class FaultyTransport(NoTransport):
    """Implements :class:`paddle_dist_ckpt.core.protocols.Transport` by another, and says that all went well.

    Args:
        inner: Moves the bytes.
        spoil: Called when bytes have come, with ``"broadcast"`` or ``"exchange"``, their source, what was there before,
            and what is there now, which it may change.
    """

    def __init__(self, inner: Transport, spoil: Callable[[str, int, Bytes1D, Bytes1D], None]) -> None:
        self._inner, self._spoil = inner, spoil

    def broadcast(self, data: Bytes1D, source: int, most: int) -> None:
        """Broadcast. ``spoil`` is called on the source as well, with equal bytes."""
        before = data.copy()
        self._inner.broadcast(data, source, most)
        self._spoil("broadcast", source, before, data)

    def exchange(
        self,
        outgoing: Mapping[int, Bytes1D],
        incoming: Mapping[int, Bytes1D],
        senders: Sequence[tuple[int, int]],
        most: int,
    ) -> None:
        """Exchange."""
        before = {source: data.copy() for source, data in incoming.items()}
        self._inner.exchange(outgoing, incoming, senders, most)
        for source, data in incoming.items():
            self._spoil("exchange", source, before[source], data)

    def abandon(self) -> None:
        """Abandon the other."""
        self._inner.abandon()
