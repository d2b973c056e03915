"""A storage whose operations can be made to fail, to be slow, or to be watched."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

from ..core.memory import Bytes1D
from ..storage import LocalStorage
from ..storage.base import FolderIdentity, ReadableFile, WritableFile

__all__ = ["FaultyStorage"]

Hook = Callable[[str, str], None]


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
