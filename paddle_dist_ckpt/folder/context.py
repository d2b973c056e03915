"""What a save and a load have in common on one rank: a folder, the other ranks, and the framework's tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..core.protocols import ControlSession, Transport
from ..storage.base import Folder, Storage
from ..tree.state_dict import Adapter

__all__ = ["Context", "Rounds", "Stopwatch"]

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Context:
    """One rank's surroundings.

    Attributes:
        storage: The folder.
        session: For control messages among the ranks.
        transport: For bulk data among them.
        adapter: Makes the framework's tensors and objects accessible.
    """

    storage: Storage
    session: ControlSession
    transport: Transport
    adapter: Adapter

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the coordinator."""
        return self.session.rank == self.session.coordinator

    def folder(self) -> Folder:
        """Which folder this rank sees."""
        host, device, inode = self.storage.identity()
        return Folder(host, device, inode, self.storage.free_bytes())

    def rounds(self, make_coordinator: Callable[[], C]) -> Rounds[C]:
        """The rounds in which an object, made on the coordinator alone, answers what every rank says."""
        return Rounds(self.session, make_coordinator() if self.is_coordinator else None)


@dataclass(frozen=True, slots=True)
class Rounds(Generic[C]):
    """The rounds of one save or load.

    Attributes:
        session: What they are rounds of.
        coordinator: Who answers; None on all other ranks.
    """

    session: ControlSession
    coordinator: C | None

    def hold(
        self, name: str, local: Callable[[], bytes], answer: Callable[[C, Mapping[int, bytes]], Mapping[int, bytes]]
    ) -> bytes:
        """Hold one round, as :meth:`..core.protocols.ControlSession.gather_scatter` does.

        Args:
            name: Names the round in errors.
            local: Makes this rank's message.
            answer: The method of the coordinator's object that replies to every rank's message.

        Returns:
            The reply for this rank.
        """

        def combine(messages: Mapping[int, bytes]) -> Mapping[int, bytes]:
            assert self.coordinator is not None, "only the coordinator combines"
            return answer(self.coordinator, messages)

        return self.session.gather_scatter(name, local, combine)


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """How long the phases of a save or load take.

    Attributes:
        seconds: By phase; a phase that comes again adds up.
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a phase, or a part of one."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
