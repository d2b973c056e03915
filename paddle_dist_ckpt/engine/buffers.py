"""Buffers that a few threads share, made when they are first needed and used again."""

from __future__ import annotations

import mmap
import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from ..core.ports import Bytes1D

__all__ = ["Buffers"]

_HUGE_PAGE = 2 << 20


class Buffers:
    """As many buffers as there are threads. They start at a page, as direct I/O demands.

    Args:
        count: How many may be borrowed at once.
    """

    def __init__(self, count: int) -> None:
        self._free: queue.SimpleQueue[Bytes1D | None] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    @contextmanager
    def borrow(self, size: int) -> Iterator[Bytes1D]:
        """A buffer of ``size`` bytes, its content arbitrary, until the end of the block."""
        buffer = self._free.get()
        try:
            if buffer is None or len(buffer) < size:
                buffer = _pages(size)
            yield buffer[:size]
        finally:
            self._free.put(buffer)


def _pages(size: int) -> Bytes1D:
    """Fresh pages, huge ones if the size is worth it: the first copy into small ones costs three times as much."""
    if size < _HUGE_PAGE:
        return np.frombuffer(mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
