"""Simulated ranks: threads of one process whose hubs share one lock and hand each other their messages.

The sessions, and what they do about silence and failure, are those of the real hub; only the carrier differs.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..control.board import Board
from ..control.board_hub import BoardHub
from ..control.wire import Message
from .in_process_transport import InProcessTransport, Pipes

__all__ = ["InProcessWorld"]


class InProcessWorld:
    """A group of simulated ranks.

    Args:
        ranks: How many, numbered from 0; or their numbers.
        coordinator: One of them; by default the first.
    """

    def __init__(self, ranks: int | Sequence[int], coordinator: int | None = None) -> None:
        self.ranks = tuple(range(ranks)) if isinstance(ranks, int) else tuple(ranks)
        self.coordinator = self.ranks[0] if coordinator is None else coordinator
        self._lock = threading.RLock()
        self._opened = threading.Condition(self._lock)
        self._queue: deque[tuple[int, int, Message, bytes]] = deque()
        self._delivering = False
        self._ticking = False
        self._cut_off: set[int] = set()
        self._pipes = Pipes(self.ranks)
        self._boards = {rank: self._board(rank) for rank in self.ranks}

    def _board(self, rank: int) -> Board:
        carrier = InProcessCarrier(partial(self._send, rank), self._flush, self._reschedule)
        return Board(rank, self.ranks, self.coordinator, carrier, self._lock)

    def hub(self, rank: int, on_abandon: Callable[[], None] | None = None) -> InProcessHub:
        """The hub of ``rank``; see :class:`BoardHub` about ``on_abandon``."""
        return InProcessHub(self, self._boards[rank], on_abandon)

    def transport(self, rank: int) -> InProcessTransport:
        """The transport of ``rank``."""
        return InProcessTransport(self._pipes, rank)

    def disconnect(self, rank: int) -> None:
        """End the connection of ``rank``, as if its process had been killed; of the coordinator, every connection."""
        with self._lock:
            self._cut_off.add(rank)
            if rank != self.coordinator:
                self._boards[self.coordinator].lose(rank)
                self._boards[rank].lose(self.coordinator)
                return
            for other in self.ranks:
                self._boards[other].lose(rank)
                self._boards[rank].lose(other)

    def _send(self, source: int, destination: int, message: Message, payload: bytes) -> None:
        """Queue a message. Called with the lock held, like :meth:`_flush`."""
        if source not in self._cut_off:
            self._queue.append((source, destination, message, payload))

    def _flush(self) -> None:
        """Deliver what is queued, and what that gives rise to, in order."""
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._queue:
                source, destination, message, payload = self._queue.popleft()
                self._boards[destination].deliver(source, message, payload)
        finally:
            self._delivering = False

    def _reschedule(self) -> None:
        """See that time passes. Called with the lock held."""
        if self._ticking:
            self._opened.notify()
        else:
            self._ticking = True
            threading.Thread(target=self._tick, name="paddle_dist_ckpt in-process ticker", daemon=True).start()

    def _tick(self) -> None:
        """Let time pass on every rank until no session is left open."""
        with self._lock:
            while True:
                due = min(board.tick() for board in self._boards.values())
                self._flush()
                if math.isinf(due):
                    self._ticking = False
                    return
                self._opened.wait(max(0.0, due - time.monotonic()))


@dataclass(frozen=True, slots=True)
class InProcessCarrier:
    """Implements :class:`Carrier` for one simulated rank."""

    send: Callable[[int, Message, bytes], None]
    flush: Callable[[], None]
    reschedule: Callable[[], None]


class InProcessHub(BoardHub):
    """Implements :class:`paddle_dist_ckpt.core.protocols.ControlHub` for a simulated rank; made by InProcessWorld."""

    def __init__(self, world: InProcessWorld, board: Board, on_abandon: Callable[[], None] | None) -> None:
        super().__init__(board, on_abandon)
        self._world = world

    def close(self) -> None:
        """End the rank's connection; sessions that are open fail."""
        super().close()
        self._world.disconnect(self._board.rank)
