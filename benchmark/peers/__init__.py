"""The libraries that are compared, one module each, with the functions of :class:`Peer`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from benchmark.states import Array, TensorSpec

__all__ = ["Peer", "peer_named"]


class Peer(Protocol):
    """What a peer's module offers. Its functions are called on both ranks alike."""

    def setup(self, rank: int, world_size: int) -> None:
        """Join the ranks; called once, before everything else."""

    def versions(self) -> dict[str, str]:
        """The versions of what is measured."""

    def build(self, specs: Sequence[TensorSpec], rank: int, world_size: int) -> Any:
        """Make this rank's part of a state."""

    def local_arrays(self, state: Any) -> dict[str, Array]:
        """What this rank holds, by name; views if possible."""

    def zero(self, state: Any) -> None:
        """Set all of it to zero."""

    def save(self, state: Any, path: Path) -> float | None:
        """Save into a folder that does not exist yet.

        Returns:
            The seconds after which it was known what to write, if the library tells.
        """

    def load(self, state: Any, path: Path) -> float | None:
        """Fill the state from a folder; returns as :meth:`save` does."""


def peer_named(name: str) -> Peer:
    """A peer's module."""
    return cast(Peer, importlib.import_module(f"benchmark.peers.{name}"))
