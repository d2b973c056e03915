"""The transport of a process that works alone, and so never sends anything."""

from __future__ import annotations

from ..core.ports import Bytes1D

__all__ = ["NoTransport"]


class NoTransport:
    """Implements :class:`..core.ports.Transport` by having nobody to talk to."""

    def send(self, data: Bytes1D, destination: int) -> None:
        """Never called."""
        raise AssertionError("there is nobody to send to")

    def recv(self, data: Bytes1D, source: int) -> None:
        """Never called."""
        raise AssertionError("there is nobody to receive from")

    def broadcast(self, data: Bytes1D, source: int) -> None:
        """Never called."""
        raise AssertionError("there is nobody to broadcast to")
