"""Stands between the library and the operating system, at the calls of ``os`` that have to do with a folder.

A handler is given each call before it is made, and makes it: so it can write down what was done, kill or stop the
process first, or raise what a broken disk would. Ranks that are threads of one process see the folder by different
paths, which lead to the same place, so that a call tells whose it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from test.system_calls import replace_call

__all__ = ["CHANGES", "Call", "Disks", "Interposer", "Perform"]

_BY_PATH = ("open", "mkdir", "rmdir", "unlink", "remove", "truncate", "chmod")
_LOOKING = ("listdir", "scandir", "stat", "lstat", "statvfs", "utime", "readlink", "access")
_BY_TWO_PATHS = ("link", "rename", "replace", "symlink")
_BY_DESCRIPTOR = ("pwrite", "pwritev", "write", "writev", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "close")
_READING = ("pread", "preadv", "read", "readv", "fstat", "lseek")
_OTHERS = ("sendfile", "copy_file_range", "splice", "mkfifo", "mknod", "removexattr", "setxattr", "sync")
CHANGES = frozenset({*_BY_PATH, *_BY_TWO_PATHS, *_BY_DESCRIPTOR})
"""Calls that change what is on the disk, or what will be after a loss of power."""

_ALL = [name for name in (*CHANGES, *_LOOKING, *_READING, *_OTHERS) if hasattr(os, name)]
_ORIGINAL = {name: getattr(os, name) for name in _ALL}
_OWN_DESCRIPTOR = "/proc/self/fd/"


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the library is about to make.

    Attributes:
        rank: Who makes it.
        number: How many this rank has made before.
        name: The function of ``os``.
        path: What it is about, from the rank's own folder on; of a descriptor, what it was opened by.
        arguments: All that it was given.
    """

    rank: int
    number: int
    name: str
    path: str
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"rank {self.rank}, call {self.number}: {self.name} {self.path or '.'}"


Perform = Callable[..., Any]
"""Makes the call; given arguments, with these in the place of its own."""
Handler = Callable[[Call, Perform], Any]


class Disks:
    """Folders that ranks see, each by a path of its own: all the same disk, or each a disk of its own.

    Args:
        folder: Where to make them; empty.
        ranks: How many ranks there are.
        shared: Whether they have one disk.
    """

    def __init__(self, folder: Path, ranks: int = 1, shared: bool = True) -> None:
        self.roots = [folder / f"disk{number}" for number in range(1 if shared else ranks)]
        for root in self.roots:
            root.mkdir(exist_ok=True)
        self.views = [folder / f"rank{rank}" for rank in range(ranks)]
        for rank, view in enumerate(self.views):
            if not view.is_symlink():
                view.symlink_to(self.roots[rank % len(self.roots)].name)

    def paths(self, name: str) -> list[Path]:
        """A folder as each rank sees it."""
        return [view / name for view in self.views]

    def folders(self, name: str) -> list[Path]:
        """A folder as it is on each disk."""
        return [root / name for root in self.roots]


class Interposer:
    """While it is entered, calls of ``os`` that are about what the ranks see go to a handler. One at a time."""

    def __init__(self, disks: Disks, handler: Handler) -> None:
        self._prefixes = [(f"{view}", rank) for rank, view in enumerate(disks.views)]
        self._handler = handler
        self._lock = threading.Lock()
        self._patch = pytest.MonkeyPatch()
        self._opened: dict[int, tuple[int, str]] = {}
        self.counts = dict.fromkeys(range(len(disks.views)), 0)

    def __enter__(self) -> Interposer:
        assert os.open is _ORIGINAL["open"], "there is another one"
        for name in _ALL:
            replace_call(self._patch, name, self._wrapped(name))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _wrapped(self, name: str) -> Callable[..., Any]:
        original, by_descriptor = _ORIGINAL[name], name in _BY_DESCRIPTOR or name in _READING

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            found = self._about(args[0] if args else None, by_descriptor)
            if found is None:
                return original(*args, **kwargs)
            rank, path = found
            with self._lock:
                number = self.counts[rank]
                self.counts[rank] += 1
            call = Call(rank, number, name, path, args)
            return self._handler(call, lambda *given: self._perform(call, original, given or args, kwargs))

        return wrapper

    def _about(self, first: Any, by_descriptor: bool) -> tuple[int, str] | None:
        """Whose call it is and what about; None if it has nothing to do with the ranks."""
        if isinstance(first, int):
            return self._opened.get(first)
        if by_descriptor or not isinstance(first, (str, os.PathLike)):
            return None
        text = os.fspath(first)
        if not isinstance(text, str):
            return None
        if text.startswith(_OWN_DESCRIPTOR):
            with suppress(ValueError):
                return self._opened.get(int(text[len(_OWN_DESCRIPTOR) :]))
        for prefix, rank in self._prefixes:
            if text.startswith(prefix) and text[len(prefix) : len(prefix) + 1] in ("", "/"):
                return rank, text[len(prefix) + 1 :]
        return None

    def _perform(self, call: Call, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if call.name == "close":
            self._opened.pop(args[0], None)
        result = original(*args, **kwargs)
        if call.name == "open":
            self._opened[result] = (call.rank, call.path)
        return result
