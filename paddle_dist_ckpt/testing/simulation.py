"""Ranks as threads of one process, each with its own state_dict and, if wanted, its own folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..core.protocols import ControlHub, Transport
from ..loading.context import LoadContext
from ..loading.load import load
from ..options import LoadOptions, SaveOptions
from ..reports import LoadReport, SaveReport
from ..saving.async_save import AsyncSave
from ..saving.context import SaveContext
from ..saving.save import save, save_in_background
from ..saving.save_memory import SaveMemory
from ..storage import as_storage
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
        with self.hub.session("save", options.timeout) as session:
            context = SaveContext(as_storage(path), session, self.transport, NumpyAdapter(), self.memory)
            return save(state_dict, context, unique_id, options)

    def save_in_background(
        self, state_dict: dict[Any, Any], path: Any, unique_id: int | None = None, options: SaveOptions | None = None
    ) -> AsyncSave:
        """Save together with the other ranks; return when the snapshot is taken."""
        options = options or SaveOptions(timeout=60)
        with ExitStack() as opened:
            session = opened.enter_context(self.hub.session("save in background", options.timeout))
            context = SaveContext(as_storage(path), session, self.transport, NumpyAdapter(), self.memory)
            return save_in_background(state_dict, opened, context, unique_id, options)

    def load(
        self, state_dict: dict[Any, Any], path: Any, unique_id: int | None = None, options: LoadOptions | None = None
    ) -> LoadReport:
        """Load together with the other ranks."""
        options = options or LoadOptions(timeout=60)
        with self.hub.session("load", options.timeout) as session:
            context = LoadContext(as_storage(path), session, self.transport, NumpyAdapter())
            return load(state_dict, context, unique_id, options)


def run_ranks(
    ranks: int | Sequence[int], work: Callable[[SimulatedRank], T], coordinator: int | None = None
) -> list[T | BaseException]:
    """Run ``work`` on every rank at once; returns what each returned, or raised."""
    world = InProcessWorld(ranks, coordinator)
    members = tuple(range(ranks)) if isinstance(ranks, int) else tuple(ranks)
    results: list[Any] = [None] * len(members)

    def run(place: int, rank: int) -> None:
        transport = world.transport(rank)
        hub = world.hub(rank, transport.abandon)
        try:
            results[place] = work(SimulatedRank(rank, members, hub, transport))
        except BaseException as error:
            results[place] = error
        finally:
            hub.close()

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
