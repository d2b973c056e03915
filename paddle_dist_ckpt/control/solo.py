"""A hub for one rank that works alone: the same calls, no messages, and errors as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from ..core.protocols import CollectiveWatch
from ..errors import CheckpointTimeoutError
from .channel import check_note, check_topic
from .session import check_payload, check_replies

__all__ = ["SoloChannel", "SoloHub", "SoloSession"]

T = TypeVar("T")


class SoloSession:
    """Implements :class:`paddle_dist_ckpt.core.protocols.ControlSession` for one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self._rank,)

    @property
    def coordinator(self) -> int:
        return self._rank

    @property
    def doubtful(self) -> bool:
        return False

    def check(self) -> None:
        """Does nothing: there is no other rank that could have failed."""

    def gather_scatter(
        self,
        name: str,
        local: Callable[[], bytes],
        combine: Callable[[Mapping[int, bytes]], Mapping[int, bytes]],
    ) -> bytes:
        """Run ``local``, then ``combine``; what they raise is raised as it is."""
        data = check_payload(local(), "what local returns")
        return check_replies(combine({self._rank: data}), self.ranks)[self._rank]

    def run_collectives(self, work: Callable[[CollectiveWatch], T]) -> T:
        """Run ``work`` here and now."""
        return work(_NoWatch())


class _NoWatch:
    """Implements :class:`paddle_dist_ckpt.core.protocols.CollectiveWatch` where there is nobody to wait for."""

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()


class SoloChannel:
    """Implements :class:`paddle_dist_ckpt.core.protocols.Channel` for one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self._rank,)

    @property
    def coordinator(self) -> int:
        return self._rank

    def announce(self, data: bytes) -> None:
        """There is nobody to hear it."""
        check_note(data)

    def heard(self) -> list[tuple[int, bytes]]:
        """Nothing: there is nobody else."""
        return []

    def wait(self, timeout: float) -> None:
        """Raises at once, as nothing will ever arrive.

        Raises:
            CheckpointTimeoutError: always.
        """
        raise CheckpointTimeoutError(f"rank {self._rank} waits for notes, but there is no other rank to send any")


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

    def channel(self, topic: str) -> SoloChannel:
        """Make a channel, on which there is never anything to hear."""
        check_topic(topic)
        return SoloChannel(self._rank)

    def close(self) -> None:
        """Does nothing: no connection is held."""
