"""This process's memory, as the kernel counts it."""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["give_back_memory", "reset_peak_memory", "used_memory"]

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # for /proc/self/clear_refs


def reset_peak_memory() -> dict[str, int]:
    """Begin to watch for the highest use of memory; returns the use now."""
    give_back_memory()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    return used_memory()


def used_memory() -> dict[str, int]:
    """This process's memory in bytes, as the kernel names it."""
    lines = [line.split() for line in _STATUS.read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1:] == ["kB"]}


def give_back_memory() -> None:
    """Let the allocator return what is free: memory that it kept would hide what the next call needs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
