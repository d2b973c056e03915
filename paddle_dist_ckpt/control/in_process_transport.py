"""Bulk transfers between simulated ranks: a queue for every ordered pair of them."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import numpy.typing as npt

from paddle_dist_ckpt.errors import CheckpointError

__all__ = ["InProcessTransport", "Pipes"]

Bytes1D = npt.NDArray[np.uint8]


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
        """Append a copy of ``data`` to the queue from ``source`` to ``destination``."""
        with self._changed:
            self._queues[source, destination].append(data.copy())
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


class InProcessTransport:
    """Implements :class:`paddle_dist_ckpt.core.ports.Transport` for a simulated rank; made by InProcessWorld.

    Sending does not wait for the receiver.
    """

    def __init__(self, pipes: Pipes, rank: int) -> None:
        self._pipes = pipes
        self._rank = rank
        self._broken = threading.Event()

    def send(self, data: Bytes1D, destination: int) -> None:
        """See :class:`paddle_dist_ckpt.core.ports.Transport`."""
        self._check()
        self._pipes.put(self._rank, destination, data)

    def recv(self, data: Bytes1D, source: int) -> None:
        """See :class:`paddle_dist_ckpt.core.ports.Transport`.

        Raises:
            CheckpointError: the source sent another number of bytes, or the transport was abandoned.
        """
        sent = self._pipes.take(source, self._rank, self._broken)
        self._check()
        assert sent is not None
        if sent.shape != data.shape:
            raise CheckpointError(
                f"rank {self._rank} expected {data.size} bytes from rank {source}, which sent {sent.size}"
            )
        data[:] = sent

    def broadcast(self, data: Bytes1D, source: int) -> None:
        """See :class:`paddle_dist_ckpt.core.ports.Transport`. Raises as :meth:`recv` does."""
        if source != self._rank:
            self.recv(data, source)
            return
        for rank in self._pipes.ranks:
            if rank != source:
                self.send(data, rank)

    def abandon(self) -> None:
        """Mark it broken: calls that are blocked, and later ones, raise CheckpointError."""
        self._broken.set()
        self._pipes.wake()

    def _check(self) -> None:
        if self._broken.is_set():
            raise CheckpointError(
                f"the transport of rank {self._rank} was abandoned in the middle of an operation; make a new one"
            )
