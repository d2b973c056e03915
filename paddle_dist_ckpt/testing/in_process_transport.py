"""Bulk transfers between simulated ranks: a queue for every ordered pair of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from ..control.ranks import NoTransport
from ..core.memory import Bytes1D
from ..errors import CheckpointError, CollectiveError

__all__ = ["InProcessTransport", "Pipes"]


class Pipes:
    """The queues of a group of simulated ranks.

    Args:
        ranks: The group's members.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._changed = threading.Condition()
        self._queues: dict[tuple[int, int], deque[Bytes1D]] = {
            (source, destination): deque() for source in ranks for destination in ranks
        }

    def put(self, source: int, destination: int, data: Bytes1D) -> None:
        """Append ``data`` to the queue from ``source`` to ``destination``."""
        with self._changed:
            self._queues[source, destination].append(data)
            self._changed.notify_all()

    def take(self, source: int, destination: int, broken: threading.Event) -> Bytes1D | None:
        """Remove the queue's first item, once there is one; None if ``broken`` is set first."""
        queue = self._queues[source, destination]
        with self._changed:
            self._changed.wait_for(lambda: broken.is_set() or queue)
            return None if broken.is_set() else queue.popleft()

    def wake(self) -> None:
        """Let those who wait look at their ``broken``."""
        with self._changed:
            self._changed.notify_all()


class InProcessTransport(NoTransport):
    """Implements :class:`paddle_dist_ckpt.core.protocols.Transport` for a simulated rank; made by InProcessWorld.

    The source does not wait for the others.
    """

    def __init__(self, pipes: Pipes, rank: int) -> None:
        self._pipes = pipes
        self._rank = rank
        self._broken = threading.Event()

    def broadcast(self, data: Bytes1D, source: int, most: int) -> None:
        """See :class:`paddle_dist_ckpt.core.protocols.Transport`. Raises as :meth:`exchange` does."""
        parts = dict.fromkeys(self._pipes.ranks, data) if source == self._rank else {}
        self._scatter(parts, data, data.size, source)

    def exchange(
        self,
        outgoing: Mapping[int, Bytes1D],
        incoming: Mapping[int, Bytes1D],
        senders: Sequence[tuple[int, int]],
        most: int,
    ) -> None:
        """See :class:`paddle_dist_ckpt.core.protocols.Transport`.

        Raises:
            CheckpointError: a part is too large, ranks named different sizes, or the transport was abandoned.
        """
        nothing = np.zeros(0, np.uint8)
        for sender, size in senders:
            self._scatter(outgoing if sender == self._rank else {}, incoming.get(sender, nothing), size, sender)

    def _scatter(self, parts: Mapping[int, Bytes1D], into: Bytes1D, size: int, source: int) -> None:
        """Send to each rank its own part, of at most ``size`` bytes."""
        self._check()
        if source != self._rank:
            self._take(into, size, source)
            return
        for rank in self._pipes.ranks:
            padded = np.zeros(size, np.uint8)
            part = parts.get(rank, padded[:0])
            if part.size > size:
                raise CheckpointError(f"rank {source} sends {part.size} bytes to rank {rank} where {size} were agreed")
            padded[: part.size] = part
            if rank != source:
                self._pipes.put(source, rank, padded)

    def _take(self, into: Bytes1D, size: int, source: int) -> None:
        sent = self._pipes.take(source, self._rank, self._broken)
        self._check()
        assert sent is not None
        if sent.size != size or into.size > size:
            raise CheckpointError(f"rank {self._rank} expected {size} bytes from rank {source}, which sent {sent.size}")
        into[:] = sent[: into.size]

    def abandon(self) -> None:
        """Mark it broken: calls that are blocked, and later ones, raise CollectiveError."""
        self._broken.set()
        self._pipes.wake()

    def _check(self) -> None:
        if self._broken.is_set():
            raise CollectiveError(
                f"the transport of rank {self._rank} was abandoned in the middle of an operation; make a new one"
            )
