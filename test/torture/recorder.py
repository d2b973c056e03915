"""Writes down what the calls of ``os`` do to a disk, so that it can be told what a loss of power would leave of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from .calls import CHANGES, Call, Disks, Interposer, Perform
from .power import ROOT, Effect, Image, Names, Resize, Sync, Write, image_of

__all__ = ["Recorder"]

_NEW = os.O_CREAT | os.O_EXCL
_FD = "/proc/self/fd/"


class Recorder:
    """Records what is done to a disk while it is entered; everything that was there before is durable.

    It refuses calls whose effects it does not know, and at the end what it has written down must amount to what is
    there: so nothing that the library does can pass it by.

    Attributes:
        log: What was done.
    """

    def __init__(self, disks: Disks) -> None:
        (self._root,) = disks.roots
        self.log: list[Effect] = []
        self._next = ROOT
        self._tree: dict[int, dict[str, int]] = {ROOT: {}}
        self._opened: dict[int, int] = {}
        self._lock = threading.Lock()
        self._scan(self._root, ROOT)
        for inode in range(self._next + 1):
            self.log.append(Sync(inode))
        self.begin = len(self.log)
        self._interposer = Interposer(disks, self._handle)

    def _scan(self, folder: Path, inode: int) -> None:
        for path in sorted(folder.iterdir()):
            number = self._add(inode, path.name, path.is_dir())
            if path.is_dir():
                self._scan(path, number)
            else:
                self.log.append(Write(number, 0, path.read_bytes()))

    def _add(self, folder: int, name: str, makes: bool = False) -> int:
        self._next += 1
        if makes:
            self._tree[self._next] = {}
        self._tree[folder][name] = self._next
        self.log.append(Names(folder, added=(name, self._next), makes=makes))
        return self._next

    def __enter__(self) -> Recorder:
        self._interposer.__enter__()
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._interposer.__exit__()
        if kind is None:
            assert _image_in(self._root) == image_of(self.log, len(self.log)), "something was done behind its back"

    def now(self) -> int:
        """How much has been done."""
        with self._lock:
            return len(self.log)

    def _handle(self, call: Call, perform: Perform) -> Any:
        if call.name not in CHANGES:
            return perform()
        with self._lock:
            result = perform()
            self._write_down(call, result)
            return result

    def _find(self, path: str) -> tuple[int, str]:
        """The number of the folder that something is in, and its name there."""
        *folders, name = path.split("/")
        inode = ROOT
        for folder in folders:
            inode = self._tree[inode][folder]
        return inode, name

    def _number(self, path: str) -> int:
        if not path:
            return ROOT
        folder, name = self._find(path)
        return self._tree[folder][name]

    def _write_down(self, call: Call, result: Any) -> None:
        name, args = call.name, call.arguments
        if name == "open":
            self._open(call, args[1], result)
        elif name == "close":
            self._opened.pop(args[0], None)
        elif name in ("fsync", "fdatasync"):
            self.log.append(Sync(self._opened[args[0]]))
        elif name == "pwrite":
            self.log.append(Write(self._opened[args[0]], args[2], bytes(memoryview(args[1])[:result])))
        elif name == "ftruncate":
            self.log.append(Resize(self._opened[args[0]], args[1]))
        elif name == "mkdir":
            self._add(*self._find(call.path), makes=True)
        elif name in ("unlink", "remove", "rmdir"):
            self._name(*self._find(call.path))
        elif name in ("link", "rename", "replace"):
            self._move(call)
        else:
            raise AssertionError(f"what does os.{name} do to a disk?")

    def _open(self, call: Call, flags: int, descriptor: int) -> None:
        path = os.fspath(call.arguments[0])
        assert not flags & os.O_TRUNC, "what does O_TRUNC do to a disk?"
        if path.startswith(_FD):
            inode = self._opened[int(path[len(_FD) :])]
        elif flags & os.O_CREAT:
            assert flags & _NEW == _NEW, "opens a file that may be there"
            inode = self._add(*self._find(call.path))
        else:
            inode = self._number(call.path)
        self._opened[descriptor] = inode

    def _name(self, folder: int, removed: str | None, added: tuple[str, int] | None = None) -> None:
        if removed is not None:
            del self._tree[folder][removed]
        if added is not None:
            self._tree[folder][added[0]] = added[1]
        self.log.append(Names(folder, removed, added))

    def _move(self, call: Call) -> None:
        folder, name = self._find(call.path)
        source, target = (Path(os.fspath(argument)) for argument in call.arguments[:2])
        assert source.parent == target.parent, "moves something to another folder"
        removed = None if call.name == "link" else name
        self._name(folder, removed, (target.name, self._tree[folder][name]))


def _image_in(folder: Path) -> Image:
    return {path.name: _image_in(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()}
