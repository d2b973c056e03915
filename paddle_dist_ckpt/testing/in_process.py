"""Simulated ranks: threads of one process whose hubs share one lock and hand each other their messages.

The sessions, and what they do about silence and failure, are those of the real hub; only the carrier differs.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence

from ..control.board import Board
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
        self.lock = threading.RLock()
        self._opened = threading.Condition(self.lock)
        self._queue: deque[tuple[int, int, Message, bytes]] = deque()
        self._delivering = False
        self._ticking = False
        self._cut_off: set[int] = set()
        self._pipes = Pipes(self.ranks)
        self._hubs = {rank: InProcessHub(self, rank) for rank in self.ranks}

    def hub(self, rank: int) -> InProcessHub:
        """The hub of ``rank``, always the same."""
        return self._hubs[rank]

    def transport(self, rank: int) -> InProcessTransport:
        """The transport of ``rank``."""
        return InProcessTransport(self._pipes, rank)

    def disconnect(self, rank: int) -> None:
        """End the connection of ``rank``, as if its process had been killed; of the coordinator, every connection."""
        with self.lock:
            self._cut_off.add(rank)
            if rank != self.coordinator:
                self._hubs[self.coordinator].lose(rank)
                self._hubs[rank].lose(self.coordinator)
                return
            for other in self.ranks:
                self._hubs[other].lose(rank)
                self._hubs[rank].lose(other)

    def send(self, source: int, destination: int, message: Message, payload: bytes) -> None:
        """Queue a message. Called with the lock held, like :meth:`flush`."""
        if source not in self._cut_off:
            self._queue.append((source, destination, message, payload))

    def flush(self, sooner: bool = False) -> None:
        """Deliver what is queued, and what that gives rise to, in order; if ``sooner``, see that time passes."""
        if not self._delivering:
            self._delivering = True
            try:
                while self._queue:
                    source, destination, message, payload = self._queue.popleft()
                    self._hubs[destination].deliver(source, message, payload)
            finally:
                self._delivering = False
        if sooner and self._ticking:
            self._opened.notify()
        elif sooner:
            self._ticking = True
            threading.Thread(target=self._tick, name="paddle_dist_ckpt in-process ticker", daemon=True).start()

    def _tick(self) -> None:
        """Let time pass on every rank until no session is left open."""
        with self.lock:
            while True:
                due = min(hub.tick() for hub in self._hubs.values())
                self.flush()
                if math.isinf(due):
                    self._ticking = False
                    return
                self._opened.wait(max(0.0, due - time.monotonic()))


class InProcessHub(Board):
    """Implements :class:`paddle_dist_ckpt.core.protocols.ControlHub` for a simulated rank; made by InProcessWorld."""

    def __init__(self, world: InProcessWorld, rank: int) -> None:
        super().__init__(rank, world.ranks, world.coordinator, world.lock)
        self._world = world

    def _carry(self, destination: int, message: Message, payload: bytes) -> None:
        self._world.send(self.rank, destination, message, payload)

    def _flush(self, sooner: bool) -> None:
        self._world.flush(sooner)

    def close(self) -> None:
        """End the rank's connection; sessions that are open fail."""
        super().close()
        self._world.disconnect(self.rank)
