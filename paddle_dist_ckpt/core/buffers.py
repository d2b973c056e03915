"""Buffers that a few threads share, made when they are first needed and used again."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .memory import Bytes1D, fresh_pages

__all__ = ["Buffers"]

_LARGE = 16 << 20


class Buffers:
    """A few buffers. They start at a page, as direct I/O demands. There is one at a time of those above 16 MiB.

    Args:
        count: How many may be in use at once.
        allocate: Makes a buffer of a given size.
    """

    def __init__(self, count: int, allocate: Callable[[int], Bytes1D] = fresh_pages) -> None:
        self._allocate = allocate
        self._free: queue.SimpleQueue[Bytes1D | None] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(None)
        self._free_large: queue.SimpleQueue[Bytes1D | None] = queue.SimpleQueue()
        self._free_large.put(None)

    @contextmanager
    def borrow(self, size: int) -> Iterator[Bytes1D]:
        """A buffer of ``size`` bytes, its content arbitrary, until the end of the block."""
        buffer = self.take(size)
        try:
            yield buffer[:size]
        finally:
            self.give_back(buffer)

    def take(self, size: int) -> Bytes1D:
        """A buffer of ``size`` bytes or more, its content arbitrary; waits for one."""
        free = self._free_large if size > _LARGE else self._free
        buffer = free.get()
        try:
            if buffer is None or len(buffer) < size:
                buffer = None  # first of all make room
                buffer = self._allocate(size)
            return buffer
        except BaseException:
            free.put(None)
            raise

    def give_back(self, buffer: Bytes1D) -> None:
        """Give back a buffer that was taken."""
        (self._free_large if len(buffer) > _LARGE else self._free).put(buffer)
