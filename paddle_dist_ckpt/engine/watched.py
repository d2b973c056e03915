"""A transport that says when it is in a collective, so that one that hangs can be told from a rank that works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.memory import Bytes1D
from ..core.protocols import CollectiveWatch, Transport

__all__ = ["WatchedTransport"]


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
