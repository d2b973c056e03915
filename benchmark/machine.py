"""The machine on which is measured: what it is, what it holds of files in memory, and how much memory a process has."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "cached_part",
    "describe",
    "drop",
    "filesystem",
    "give_back_memory",
    "memory_of_machine",
    "read_in",
    "reset_peak_memory",
    "used_memory",
]

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # for /proc/self/clear_refs
_READ_BYTES = 8 << 20
_MOST_LEFT = 0.01
_libc = ctypes.CDLL(None, use_errno=True)
_mincore = _libc.mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def describe(folder: Path) -> dict[str, Any]:
    """What a reader needs to know of the machine to judge the numbers."""
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(int(memory.split()[1]) / (1 << 20), 1),
        "filesystem": filesystem(folder),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def filesystem(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    place = folder.resolve()
    within = [
        (len(Path(point).parts), i, kind) for i, (point, kind) in enumerate(mounts) if place.is_relative_to(point)
    ]
    return max(within)[2] if within else "unknown"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


# -- memory of this process


def reset_peak_memory() -> dict[str, int]:
    """Begin to watch for the highest use of memory; returns the use now."""
    give_back_memory()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    return used_memory()


def used_memory() -> dict[str, int]:
    """This process's memory in bytes, as the kernel names it."""
    lines = [line.split() for line in _STATUS.read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1:] == ["kB"]}


def memory_of_machine() -> dict[str, int]:
    """The machine's memory in bytes, as the kernel names it."""
    lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}


def give_back_memory() -> None:
    """Let the allocator return what is free: memory that it kept would hide what the next call needs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# -- the page cache


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
