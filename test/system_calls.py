"""Calls of the operating system about one folder: counted, and made to fail one at a time."""

from __future__ import annotations

import errno
import os
import pathlib
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATH_CALLS = (
    "open",
    "listdir",
    "stat",
    "lstat",
    "statvfs",
    "mkdir",
    "utime",
    "unlink",
    "rmdir",
    "link",
    "replace",
    "rename",
)
FILE_CALLS = ("pwrite", "preadv", "fsync", "fstat", "close")
Call = tuple[str, str]
"""What is called, and the name of the file or folder that it is about."""


def replace_call(patch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> None:
    """Have ``os`` call another function, and pathlib, which until Python 3.10 keeps references of its own."""
    real, accessor = getattr(os, name), getattr(pathlib, "_NormalAccessor", None)
    patch.setattr(os, name, function)
    if accessor is not None and vars(accessor).get(name) is real:
        patch.setattr(accessor, name, staticmethod(function))


class SystemCalls:
    """What is done in a folder, by all threads of this process.

    Args:
        folder: Calls about it and what is in it count, by path or by an open file.
        at: The number of the call that fails, from 0; None for none.
        after: Whether it does its work before it fails, as a call over a network may that loses the answer.
        number: What it fails with.
        above: Whether the folders above count as well.

    Attributes:
        calls: What was called.
        failed: The call that failed.
    """

    def __init__(
        self, folder: Path, at: int | None = None, after: bool = False, number: int = errno.EIO, above: bool = False
    ) -> None:
        self._folder, self._at, self._after, self._number, self._above = str(folder), at, after, number, above
        self._open: dict[int, str] = {}
        self._lock = threading.Lock()
        self.calls: list[Call] = []
        self.failed: Call | None = None

    @contextmanager
    def watched(self) -> Iterator[SystemCalls]:
        """Watch, for a while."""
        with pytest.MonkeyPatch.context() as patch:
            for name in PATH_CALLS:
                replace_call(patch, name, self._of_path(name, getattr(os, name)))
            for name in FILE_CALLS:
                replace_call(patch, name, self._of_file(name, getattr(os, name)))
            yield self

    def _about(self, target: Any) -> str | None:
        """Which of the folder's paths is meant."""
        if isinstance(target, int):
            return self._open.get(target)
        path = os.fsdecode(target)
        if path.startswith("/proc/self/fd/"):
            return self._open.get(int(path.rpartition("/")[2]))
        inside = path == self._folder or path.startswith(self._folder + "/")
        return path if inside or (self._above and self._folder.startswith(path)) else None

    def _call(self, name: str, path: str | None, work: Callable[[], Any]) -> Any:
        if path is None:
            return work()
        with self._lock:
            fails = len(self.calls) == self._at
            self.calls.append((name, os.path.basename(path)))
        if not fails:
            return work()
        self.failed = self.calls[self._at or 0]
        if self._after or name == "close":  # a descriptor is given back in any case
            result = work()
            if name == "open":  # as the system would: nobody has got the descriptor
                self._open.pop(result, None)
                os.close(result)
        raise OSError(self._number, "injected")

    def _of_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any = ".", *args: Any, **more: Any) -> Any:
            path = self._about(target)
            result = self._call(name, path, lambda: real(target, *args, **more))
            if name == "open" and path is not None:
                self._open[result] = path
            return result

        return call

    def _of_file(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *args: Any) -> Any:
            path = self._open.pop(descriptor, None) if name == "close" else self._open.get(descriptor)
            return self._call(name, path, lambda: real(descriptor, *args))

        return call


def failing(number: int, text: str | None = None) -> Callable[..., Any]:
    """A call that fails with this, whatever it is asked for."""

    def call(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number) if text is None else text)

    return call


def make_stale_when_removed(patch: pytest.MonkeyPatch) -> None:
    """Have an open file of no use when its name is gone, as on NFS if another host removes it."""
    for name in ("read", "preadv", "pwrite", "fsync"):
        patch.setattr(os, name, _refusing_removed(getattr(os, name)))


def _refusing_removed(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(descriptor: int, *args: Any) -> Any:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(descriptor, *args)

    return call
