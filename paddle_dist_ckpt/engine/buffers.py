"""Buffers that a few threads share, made when they are first needed and used again."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from ..core.memory import fresh_pages
from ..core.ports import Bytes1D

__all__ = ["Buffers"]


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
                buffer = fresh_pages(size)
            yield buffer[:size]
        finally:
            self._free.put(buffer)
