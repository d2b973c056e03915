"""A transport that tells whoever watches over it that it gets on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..core.ports import Bytes1D, Transport

__all__ = ["WatchedTransport"]


class WatchedTransport:
    """Implements :class:`..core.ports.Transport` by another one, calling ``alive`` before each operation."""

    def __init__(self, inner: Transport, alive: Callable[[], None]) -> None:
        self._inner, self._alive = inner, alive

    def broadcast(self, data: Bytes1D, source: int) -> None:
        """See :class:`..core.ports.Transport`."""
        self._alive()
        self._inner.broadcast(data, source)

    def scatter(self, parts: Mapping[int, Bytes1D], into: Bytes1D, size: int, source: int) -> None:
        """See :class:`..core.ports.Transport`."""
        self._alive()
        self._inner.scatter(parts, into, size, source)
