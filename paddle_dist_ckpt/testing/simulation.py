"""Ranks as threads of one process, each with its own state_dict and, if wanted, its own folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..control.ranks import Ranks
from ..core.protocols import ControlHub, Transport
from ..options import LoadOptions, SaveOptions
from ..reports import LoadReport, SaveReport
from ..saving.async_save import AsyncSave
from ..saving.save_memory import SaveMemory
from ..wiring import Find, load_with, save_with
from .arrays import NumpyAdapter
from .in_process import InProcessWorld

__all__ = ["SimulatedRank", "run_ranks"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """One of several ranks that are threads."""

    rank: int
    ranks: tuple[int, ...]
    hub: ControlHub
    transport: Transport
    memory: SaveMemory = field(default_factory=SaveMemory)

    def save(
        self, state_dict: dict[Any, Any], path: Any, unique_id: int | None = None, options: SaveOptions | None = None
    ) -> SaveReport:
        """Save together with the other ranks."""
        options = options or SaveOptions(timeout=60)
        report = save_with(self.connection, _found(state_dict), path, unique_id, False, options)
        assert isinstance(report, SaveReport)
        return report

    def save_in_background(
        self, state_dict: dict[Any, Any], path: Any, unique_id: int | None = None, options: SaveOptions | None = None
    ) -> AsyncSave:
        """Save together with the other ranks; return when the snapshot is taken."""
        options = options or SaveOptions(timeout=60)
        pending = save_with(self.connection, _found(state_dict), path, unique_id, True, options)
        assert isinstance(pending, AsyncSave)
        return pending

    def load(
        self, state_dict: dict[Any, Any], path: Any, unique_id: int | None = None, options: LoadOptions | None = None
    ) -> LoadReport:
        """Load together with the other ranks."""
        options = options or LoadOptions(timeout=60)
        return load_with(self.connection, _found(state_dict), path, unique_id, options)

    @property
    def connection(self) -> Ranks:
        """How it talks to the other ranks."""
        return Ranks(self.rank, self.hub, self.transport, self.transport, {"save": self.memory})


def _found(state_dict: dict[Any, Any]) -> Find:
    return lambda: (state_dict, NumpyAdapter())


def run_ranks(
    ranks: int | Sequence[int],
    work: Callable[[SimulatedRank], T],
    coordinator: int | None = None,
    over: Callable[[Transport, int], Transport] = lambda transport, rank: transport,
) -> list[T | BaseException]:
    """Run ``work`` on every rank at once; returns what each returned, or raised.

    Args:
        over: Given the transport of each rank and its number; returns the one that it uses.
    """
    world = InProcessWorld(ranks, coordinator)
    results: list[Any] = [None] * len(world.ranks)

    def run(place: int, rank: int) -> None:
        transport, hub = over(world.transport(rank), rank), world.hub(rank)
        try:
            results[place] = work(SimulatedRank(rank, world.ranks, hub, transport))
        except BaseException as error:
            results[place] = error
        finally:
            hub.close()

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(world.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
