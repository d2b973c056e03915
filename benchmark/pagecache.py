"""What the kernel holds of files in memory: brought in, thrown out, and looked at."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

__all__ = ["cached_part", "drop", "read_in"]

_READ_BYTES = 8 << 20
_MOST_LEFT = 0.01
_libc = ctypes.CDLL(None, use_errno=True)
_mincore = _libc.mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def read_in(folder: Path) -> None:
    """Bring all files of a folder into the page cache. (Files written past it are not there otherwise.)"""
    buffer = memoryview(bytearray(_READ_BYTES))
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(folder: Path, checked: bool = True) -> None:
    """Have the page cache forget all files of a folder.

    Args:
        folder: The folder.
        checked: Whether to see that it has.

    Raises:
        OSError: the kernel keeps them.
    """
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is yet to be written would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = cached_part(folder) if checked else 0.0
    if left > _MOST_LEFT:
        raise OSError(f"{left:.0%} of {folder} is in the page cache after POSIX_FADV_DONTNEED")


def cached_part(folder: Path) -> float:
    """The part of a folder's pages that are in the page cache, from 0 to 1."""
    cached = pages = 0
    for path in _files(folder):
        if size := path.stat().st_size:
            count = -(-size // mmap.PAGESIZE)
            cached, pages = cached + _cached_pages(path, size, count), pages + count
    return cached / pages if pages else 0.0


def _cached_pages(path: Path, size: int, count: int) -> int:
    flags = np.zeros(count, np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        view = np.frombuffer(memory, np.uint8)
        failed = _mincore(view.ctypes.data, size, flags.ctypes.data)
        del view  # or the mapping could not be closed
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return int((flags & 1).sum())


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
