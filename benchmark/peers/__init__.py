"""The libraries that are compared, one module each, with the functions of :class:`Peer`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from benchmark.states import Array, TensorSpec

__all__ = ["TRAINING_BATCH", "TRAINING_WIDTH", "AsyncPeer", "Peer", "Pending", "peer_named"]

TRAINING_WIDTH, TRAINING_BATCH = 768, 128
"""Of the three layers that are trained while a save goes on: 7 MB of weights, about 15 ms a step."""


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


class Pending(Protocol):
    """A save that goes on in the background."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def result(self) -> Any:
        """Wait until it has ended; raises what went wrong."""


class AsyncPeer(Peer, Protocol):
    """What a peer's module offers if it saves in the background too."""

    def start_save(self, state: Any, path: Path) -> Pending:
        """Begin to save into a folder that does not exist yet; the state may change once this returns."""

    def copier(self, state: Any) -> Callable[[], None]:
        """Makes what copies all of this rank's part into memory that it already has: what a snapshot needs at least."""

    def trainer(self) -> Callable[[bool], bool]:
        """Makes what does one step of a training and tells whether its argument was true on all ranks."""


def peer_named(name: str) -> Peer:
    """A peer's module."""
    return cast(Peer, importlib.import_module(f"benchmark.peers.{name}"))
