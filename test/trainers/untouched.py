"""Proof that nothing in a folder was changed, not for a moment either. Permissions alone prove nothing to root."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EVENT = struct.Struct("iIII")  # of inotify: the watch, what happened, a cookie, the length of the name behind it
_KINDS = {
    0x2: "modified",
    0x4: "got other attributes",
    0x8: "was closed after writing",
    0x40: "was moved away",
    0x80: "was moved here",
    0x100: "was created",
    0x200: "was deleted",
    0x400: "the folder was deleted",
    0x800: "the folder was moved",
}


@contextmanager
def watched(folder: Path, locked: bool) -> Iterator[list[str]]:
    """Watch a folder of files, if ``locked`` with all rights to write taken away; what happened is in the list then."""
    paths = [*folder.iterdir(), folder]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths if locked else ():
        path.chmod(modes[path] & ~0o222)
    happened: list[str] = []
    before = _state(folder)
    watch = _watch(folder)
    try:
        yield happened
        happened += _events(watch)
        happened += [f"{name}: changed" for name in sorted({name for name, *_ in before ^ _state(folder)})]
    finally:
        os.close(watch)
        for path, mode in modes.items() if locked else ():
            path.chmod(mode)


def _state(folder: Path) -> set[tuple[str, int, int, bytes]]:
    state = {(".", folder.stat().st_mtime_ns, folder.stat().st_mode, b"")}
    for path in folder.iterdir():
        status = path.stat()
        state.add((path.name, status.st_mtime_ns, status.st_mode, path.read_bytes()))
    return state


def _watch(folder: Path) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    watch: int = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if watch < 0 or library.inotify_add_watch(watch, os.fsencode(folder), sum(_KINDS)) < 0:
        raise OSError(ctypes.get_errno(), "inotify", str(folder))
    return watch


def _events(watch: int) -> list[str]:
    data = b""
    while True:
        try:
            data += os.read(watch, 1 << 16)
        except BlockingIOError:
            break
    found: dict[str, None] = {}
    while data:
        _, kind, _, length = _EVENT.unpack_from(data)
        name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0").decode()
        found[f"{name or '.'}: {_KINDS.get(kind & sum(_KINDS), hex(kind))}"] = None
        data = data[_EVENT.size + length :]
    return list(found)
