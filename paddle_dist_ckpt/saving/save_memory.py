"""What a save works with on one rank; and what is remembered from one to the next of the same group of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ..core.buffers import Buffers
from ..core.memory import Bytes1D, fresh_pages
from ..errors import CheckpointError
from ..folder.context import Context
from ..storage.helpers import StorageCall
from .async_save import AsyncSave
from .describe import KnownState
from .known_plan import KnownPlan
from .planned_save import PlannedSave

__all__ = ["SaveContext", "SaveMemory"]

Allocate = Callable[[int], Bytes1D]
_POLL_SECONDS = 0.2


@dataclass(slots=True, eq=False)
class SaveMemory:
    """One rank's memory, kept with its connection to the group.

    Attributes:
        turn: Held by the save that uses the memory: one at a time, until it has ended.
        last: The latest save in the background, which may still hold the turn.
        known: The state that was saved last.
        plan: This rank's part of the last plan.
        planned: On the coordinator: the last plan.
        given_up: On the coordinator: saves that have failed, and perhaps could not remove their files.
        unfinished: Publications of earlier saves that were given up, and may still take effect.
        sampled: On the coordinator: in how many saves a part of the copies was compared.
    """

    turn: threading.Lock = field(default_factory=threading.Lock)
    last: AsyncSave | None = None
    known: KnownState | None = None
    plan: KnownPlan = field(default_factory=KnownPlan)
    planned: PlannedSave | None = None
    given_up: set[str] = field(default_factory=set)
    unfinished: list[StorageCall] = field(default_factory=list)
    sampled: int = 0
    _buffer: Bytes1D = field(default_factory=lambda: np.empty(0, np.uint8))
    _buffer_is_fast: bool = False
    _windows: dict[int, Buffers] = field(default_factory=dict)  # by their count

    @contextmanager
    def take_turn(self, may_wait: bool, check: Callable[[], None]) -> Iterator[None]:
        """Around a save: wait for the group's save before this one, if it still goes on in the background.

        Args:
            may_wait: Whether to wait, and not to raise.
            check: Called now and then while waiting; may raise to stop.

        Raises:
            CheckpointError: it goes on, and this save is not to wait; or it failed, and nobody has noticed.
        """
        if not self.turn.acquire(blocking=False):
            if not may_wait:
                raise CheckpointError("an earlier save still goes on in the background, and when_busy is 'raise'")
            while not self.turn.acquire(timeout=_POLL_SECONDS):
                check()
        try:
            last, self.last = self.last, None
            if last is not None:
                last.raise_unobserved()
            yield
        finally:
            self.turn.release()

    def snapshot_buffer(self, nbytes: int, allocate: Allocate | None = None) -> Bytes1D:
        """Memory for a snapshot: the same again while it is large enough, so that its pages are there already.

        Args:
            nbytes: How much.
            allocate: Makes memory that copies from devices are fast with; None if there are none.

        Raises:
            MemoryError: there is not so much.
        """
        if len(self._buffer) < nbytes or (allocate is not None and not self._buffer_is_fast):
            self._buffer = np.empty(0, np.uint8)  # first of all make room
            try:
                self._buffer = allocate(nbytes) if allocate is not None else fresh_pages(nbytes, inherited=False)
            except MemoryError as error:
                raise MemoryError(
                    f"{error}; a save in the background copies what its rank writes: SaveOptions(snapshot_bytes=...) "
                    "bounds the copy, and async_save=False makes none"
                ) from None
            self._buffer_is_fast = allocate is not None
        return self._buffer[:nbytes]

    def window_buffers(self, count: int, allocate: Allocate | None = None) -> Buffers:
        """Buffers for ``count`` windows. Those of ``allocate``, as for a snapshot, are kept for the next save."""
        if allocate is None:
            return Buffers(count)
        if count not in self._windows:
            self._windows = {count: Buffers(count, allocate)}
        return self._windows[count]


@dataclass(frozen=True, slots=True)
class SaveContext(Context):
    """One rank's surroundings in a save.

    Attributes:
        memory: What is remembered from one save to the next.
        replace_newest: Whether a save without an id replaces the newest checkpoint.
    """

    memory: SaveMemory = field(default_factory=SaveMemory)
    replace_newest: bool = False
