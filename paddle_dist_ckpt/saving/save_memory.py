"""What is remembered from one save to the next of the same group: plans, buffers, and the save that still goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..core.buffers import Buffers
from ..core.memory import Bytes1D, fresh_pages
from .async_save import AsyncSave
from .describe import KnownState
from .messages import Transfer
from .part import FilePart
from .planned_save import PlannedSave

__all__ = ["SaveMemory"]

Allocate = Callable[[int], Bytes1D]


@dataclass(slots=True, eq=False)
class SaveMemory:
    """One rank's memory, kept with its connection to the group.

    Attributes:
        turn: Held by the save that uses the memory: one at a time, until its last byte is written.
        last: The latest save in the background, which may still hold the turn.
        known: The state that was saved last.
        plan_id: Names the plan by which ``parts`` were made, 0 for none.
        block_bytes: The block size by which they were made.
        total_bytes: All that the ranks write together by that plan.
        transfers: What the ranks send each other of partial tensors.
        parts: This rank's files.
        planned: On the coordinator: the last plan.
    """

    turn: threading.Lock = field(default_factory=threading.Lock)
    last: AsyncSave | None = None
    known: KnownState | None = None
    plan_id: int = 0
    block_bytes: int = 0
    total_bytes: int = 0
    transfers: list[Transfer] = field(default_factory=list)
    parts: list[FilePart] = field(default_factory=list)
    planned: PlannedSave | None = None
    _buffer: Bytes1D = field(default_factory=lambda: np.empty(0, np.uint8))
    _buffer_is_fast: bool = False
    _windows: Buffers | None = None
    _windows_count: int = 0

    def snapshot_buffer(self, nbytes: int, allocate: Allocate | None = None) -> Bytes1D:
        """Memory for a snapshot: the same again while it is large enough, so that its pages are there already.

        Args:
            nbytes: How much.
            allocate: Makes memory that copies from devices are fast with; None if there are none.

        Raises:
            MemoryError: there is not so much.
        """
        fast = allocate is not None
        if len(self._buffer) < nbytes or (fast and not self._buffer_is_fast):
            self._buffer = np.empty(0, np.uint8)  # first of all make room
            self._buffer = allocate(nbytes) if allocate is not None else fresh_pages(nbytes, inherited=False)
            self._buffer_is_fast = fast
        return self._buffer[:nbytes]

    def window_buffers(self, count: int, allocate: Allocate | None = None) -> Buffers:
        """Buffers for ``count`` windows. Those of ``allocate``, as for a snapshot, are kept for the next save."""
        if allocate is None:
            return Buffers(count)
        if self._windows is None or self._windows_count != count:
            self._windows, self._windows_count = Buffers(count, allocate), count
        return self._windows
