"""The transport of a process that works alone, and so never sends anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.memory import Bytes1D

__all__ = ["NoTransport"]


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
