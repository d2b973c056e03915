"""Who takes part in a save or load, and how they talk; for a rank that works alone, calls that send no messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..core.memory import Bytes1D
from ..core.protocols import ControlHub, ControlSession, Transfers, Transport
from .appointment import check_topic
from .session import Ending, check_payload, check_replies
from .verified import VerifiedTransfers

__all__ = ["NoTransport", "Ranks", "SoloHub"]

T = TypeVar("T")


class NoTransport:
    """Implements :class:`paddle_dist_ckpt.core.protocols.Transport` for one rank: there is nobody to send to."""

    tried = True

    def broadcast(self, data: Bytes1D, source: int, most: int) -> None:
        """Does nothing."""

    def exchange(
        self,
        outgoing: Mapping[int, Bytes1D],
        incoming: Mapping[int, Bytes1D],
        senders: Sequence[tuple[int, int]],
        most: int,
    ) -> None:
        """Does nothing."""

    def try_out(self) -> list[str]:
        """Nothing fails."""
        return []

    def get_ready(self) -> None:
        """Does nothing."""

    def rely_on_others(self, failing: Mapping[str, Sequence[int]]) -> None:
        """Does nothing."""

    def abandon(self) -> None:
        """Does nothing."""


class SoloSession:
    """Implements :class:`paddle_dist_ckpt.core.protocols.ControlSession` for one rank."""

    doubtful = False

    def __init__(self, rank: int) -> None:
        self.rank = self.coordinator = rank
        self.ranks = (rank,)

    def check(self) -> None:
        """Does nothing: there is no other rank that could have failed."""

    def end_collectives(self) -> None:
        """Does nothing: nobody waits for them."""

    def gather_scatter(
        self,
        name: str,
        local: Callable[[], bytes],
        combine: Callable[[Mapping[int, bytes]], Mapping[int, bytes]],
    ) -> bytes:
        """Run ``local``, then ``combine``; what they raise is raised as it is."""
        data = check_payload(local(), "what local returns")
        return check_replies(combine({self.rank: data}), self.ranks)[self.rank]

    def run_collectives(self, transport: Transport, work: Callable[[Transfers], T]) -> T:
        """Run ``work`` here and now."""
        return work(VerifiedTransfers(transport, self.rank, ""))


class SoloAppointments:
    """Implements :class:`paddle_dist_ckpt.core.protocols.Appointments` for one rank: what it wishes is at once."""

    leads = True

    def __init__(self) -> None:
        self._latest: int | None = None
        self._closed = False

    def reach(self, step: int, wish: bool = False) -> bool:
        """Whether it is wished at this step."""
        if wish:
            self._latest = step
        return step == self._latest and not self._closed

    def close(self) -> None:
        """No appointments any more."""
        self._closed = True


class SoloHub:
    """Implements :class:`paddle_dist_ckpt.core.protocols.ControlHub` for one rank.

    Args:
        rank: The global rank that it goes by.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank

    def session(self, kind: str, timeout: float) -> AbstractContextManager[SoloSession]:
        """Open a session. There is nobody to agree with about ``kind``, nor to wait for until ``timeout``."""
        return nullcontext(SoloSession(self._rank))

    def appointments(self, topic: str, timeout: float) -> SoloAppointments:
        """Make appointments. There is nobody to wait for."""
        check_topic(topic)
        return SoloAppointments()

    def close(self) -> None:
        """Does nothing: no connection is held."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """A connection of ranks that is made once, and used by one call after another.

    Attributes:
        rank: This process's global rank.
        hub: For control messages.
        transport: For bulk data, by the group's own collectives.
        host_transport: For bulk data that are to stay in host memory.
        memory: Whatever the caller wants to keep with the connection.
        count: How many ranks there are.
        within: The session that is open around all that is done, if one is: then there is no gap between sessions, in
            which a rank could be interrupted and the others not hear of it.
    """

    rank: int
    hub: ControlHub
    transport: Transport
    host_transport: Transport
    memory: dict[str, Any] = field(default_factory=dict)
    count: int = 1
    within: ControlSession | None = None

    def session(self, kind: str, timeout: float) -> Ending:
        """Make the hub's next session: ``with ranks.session(kind, timeout) as made, made as session``."""
        return Ending(self.make_session(kind, timeout))

    def make_session(self, kind: str, timeout: float) -> AbstractContextManager[ControlSession]:
        """The same, for who ends it once more by other means."""
        return self.hub.session(kind, timeout) if self.within is None else nullcontext(self.within)

    @classmethod
    def alone(cls, rank: int = 0) -> Ranks:
        """A rank that works alone."""
        return cls(rank, SoloHub(rank), NoTransport(), NoTransport())
