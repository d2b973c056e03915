"""A transport that tells whoever watches over it that it gets on."""

from __future__ import annotations

from collections.abc import Callable

from ..core.ports import Bytes1D, Transport

__all__ = ["WatchedTransport"]


class WatchedTransport:
    """Implements :class:`..core.ports.Transport` by another one, calling ``alive`` before each transfer."""

    def __init__(self, inner: Transport, alive: Callable[[], None]) -> None:
        self._inner, self._alive = inner, alive

    def send(self, data: Bytes1D, destination: int) -> None:
        """See :class:`..core.ports.Transport`."""
        self._alive()
        self._inner.send(data, destination)

    def recv(self, data: Bytes1D, source: int) -> None:
        """See :class:`..core.ports.Transport`."""
        self._alive()
        self._inner.recv(data, source)

    def broadcast(self, data: Bytes1D, source: int) -> None:
        """See :class:`..core.ports.Transport`."""
        self._alive()
        self._inner.broadcast(data, source)
