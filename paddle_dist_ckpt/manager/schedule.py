"""Which training steps are due for a save if time or a signal decides: the same on all ranks, and nobody waits.

The coordinator decides. It keeps a horizon ahead of the steps: up to there it has announced what is due. What it
decides is for the first step beyond, and announced at once. So a rank knows about a step before it gets there, wherever
the others are. One that gets beyond the horizon it has heard of waits for the next announcement.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ..core.protocols import Channel
from ..errors import CheckpointError
from .horizon import NEVER, Announcement, Decision, Horizon, Request

__all__ = ["Schedule"]

T = TypeVar("T")
_LONGEST_REASON = 100


class Schedule:
    """Says at which steps to save. Every rank makes one and asks it at the same steps, once a step.

    Ranks may be several steps apart. If steps fall back, which they must do on all ranks alike, what is decided then is
    due only beyond the steps that had been announced; a new schedule is better.

    Args:
        channel: Nothing else may use it.
        timeout: Longest silence of the coordinator, in seconds, for a rank that waits.
        interval_seconds: Time from one save to the next; None if time does not matter. The coordinator's counts.
        clock: Monotonic time, in seconds.
    """

    def __init__(
        self,
        channel: Channel,
        timeout: float,
        *,
        interval_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if interval_seconds is not None and not interval_seconds > 0:
            raise ValueError(f"interval_seconds must be None or more than 0, not {interval_seconds!r}")
        self._channel = channel
        self._timeout = timeout
        self._clock = clock
        leads = channel.rank == channel.coordinator
        self._lead = Horizon(interval_seconds, len(channel.ranks) == 1, clock()) if leads else None
        self._asked: deque[str] = deque()
        self._step: int | None = None
        self._furthest = NEVER
        self._due = False
        self._horizon = NEVER
        self._ended = False
        self._pending: deque[Decision] = deque()
        self._reasons: tuple[str, ...] = ()

    def is_due(self, step: int) -> bool:
        """Whether to save at this step: true once for each decision, at the same steps on every rank.

        Asked again about the same step, it says the same. It takes microseconds. Only a rank that is further than the
        coordinator has announced waits: before the coordinator's first call, say, or if the steps suddenly leap.

        Raises:
            RankFailureError: the rank had to wait, but the connection to the coordinator is lost.
            CheckpointTimeoutError: the rank waited in vain.
            CheckpointError: the hub is closed, or announcements have been missed.
        """
        if step == self._step:
            if self._asked and self._lead is None:
                self._pass_on()
            return self._due
        if self._lead is not None:
            self._decide(self._lead, step)
        else:
            if self._asked:
                self._pass_on()
            if step > self._horizon:
                self._catch_up(step)
        self._due = bool(self._pending) and self._act(step)
        self._step = step
        self._furthest = max(self._furthest, step)
        return self._due

    def request(self, reason: str) -> None:
        """Ask for one save, at the next step that all ranks can agree on.

        Any rank may, on any thread or in a signal handler. The others learn of it by this rank's next :meth:`is_due`.

        Args:
            reason: Such as ``SIGTERM``; see :attr:`reasons`.
        """
        self._asked.append(f"rank {self._channel.rank}: {reason}"[:_LONGEST_REASON])

    @property
    def stopping(self) -> bool:
        """Whether a requested save has become due; from the same step on all ranks."""
        return bool(self._reasons)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why saves were requested that have become due, such as ``rank 3: SIGTERM``; the same on all ranks.

        If many ranks request the same save, the first few that the coordinator heard of.
        """
        return self._reasons

    def saved(self, step: int) -> None:
        """Tell that this step was saved, for whatever reason: the interval begins anew."""
        if self._lead is not None:
            self._lead.saved(self._clock())

    def close(self) -> None:
        """End it: from here on nothing is due. On the coordinator that goes for all ranks; none waits any more."""
        if self._ended:
            return
        end = Announcement(self._furthest, ended=True) if self._lead is None else self._lead.end()
        self._take_in(end)
        if self._lead is not None:
            self._channel.announce(msgspec.msgpack.encode(end))

    def _decide(self, lead: Horizon, step: int) -> None:
        """On the coordinator."""
        if self._ended:
            return
        requests = [_decode(data, Request, source) for source, data in self._channel.heard()]
        if self._asked:
            requests.append(self._own_request())
        news = lead.call(step, self._clock(), requests)
        if news is not None:
            self._take_in(news)
            if len(self._channel.ranks) > 1:
                self._channel.announce(msgspec.msgpack.encode(news))

    def _own_request(self) -> Request:
        reasons = [self._asked.popleft() for _ in range(len(self._asked))]
        return Request(self._furthest, tuple(dict.fromkeys(reasons)))

    def _pass_on(self) -> None:
        """Tell the coordinator what was requested here, unless a decision that fulfils it is known."""
        self._listen()
        request = self._own_request()
        if not self._ended and not any(known.reasons and known.step > request.after for known in self._pending):
            self._channel.announce(msgspec.msgpack.encode(request))

    def _catch_up(self, step: int) -> None:
        """Wait until it is known what is due at ``step``."""
        self._listen()
        while step > self._horizon and not self._ended:
            self._channel.wait(self._timeout)
            self._listen()

    def _listen(self) -> None:
        for source, data in self._channel.heard():
            self._take_in(_decode(data, Announcement, source))

    def _take_in(self, news: Announcement) -> None:
        if self._ended:
            return
        if news.forgotten > self._horizon:
            raise CheckpointError(
                f"rank {self._channel.rank} has missed announcements about the steps from {self._horizon + 1} to "
                f"{news.forgotten}, so it cannot know which of them the other ranks save"
            )
        self._pending.extend(decision for decision in news.decisions if decision.step > self._horizon)
        self._horizon = max(self._horizon, news.horizon)
        self._ended = news.ended
        if news.ended:
            self._pending = deque(decision for decision in self._pending if decision.step <= news.horizon)

    def _act(self, step: int) -> bool:
        due = False
        while self._pending and self._pending[0].step <= step:
            self._reasons += self._pending.popleft().reasons
            due = True
        return due


def _decode(data: bytes, kind: type[T], source: int) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"rank {source} sent what is no {kind.__name__} of a schedule: {error}") from error
