"""Transports around others: for a process that works alone, and one that says when it waits in a collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.memory import Bytes1D
from ..core.protocols import CollectiveWatch, Transport

__all__ = ["NoTransport", "WatchedTransport"]


class NoTransport:
    """Implements :class:`..core.protocols.Transport` for a group of one, to which nothing needs to be sent."""

    def broadcast(self, data: Bytes1D, source: int, most: int) -> None:
        """There is nobody else."""

    def exchange(
        self,
        outgoing: Mapping[int, Bytes1D],
        incoming: Mapping[int, Bytes1D],
        senders: Sequence[tuple[int, int]],
        most: int,
    ) -> None:
        """There is nobody else."""


class WatchedTransport:
    """Implements :class:`..core.protocols.Transport` by another one."""

    def __init__(self, inner: Transport, watch: CollectiveWatch) -> None:
        self._inner, self._watch = inner, watch

    def broadcast(self, data: Bytes1D, source: int, most: int) -> None:
        """See :class:`..core.protocols.Transport`."""
        with self._watch.waiting():
            self._inner.broadcast(data, source, most)

    def exchange(
        self,
        outgoing: Mapping[int, Bytes1D],
        incoming: Mapping[int, Bytes1D],
        senders: Sequence[tuple[int, int]],
        most: int,
    ) -> None:
        """See :class:`..core.protocols.Transport`."""
        with self._watch.waiting():
            self._inner.exchange(outgoing, incoming, senders, most)
