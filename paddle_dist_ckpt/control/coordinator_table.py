"""The coordinator's side of all sessions: which there are, which are over, and which ranks are out of step.

It keeps a session even if the coordinator itself has not opened it yet, so that the ranks that wait there learn at once
when one of them fails.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from . import failures, wire
from .coordinator import BEATS_PER_TIMEOUT, CoordinatorSession, Emit
from .wire import ErrorRecord, Message

__all__ = ["CoordinatorTable"]

_REMEMBERED = 16
_LATE_GRACE = 1.0
"""Longest wait, in seconds, of a rank that opens a session which is over, for the others to open a newer one."""


@dataclass(frozen=True, slots=True)
class _Late:
    """Why a session is over that a rank has opened only now, and until when the answer to the rank can wait."""

    error: ErrorRecord
    until: float


class CoordinatorTable:
    """All sessions of a hub, on its coordinator.

    Args:
        ranks: The members of every session.
        coordinator: One of them.
        lost: Those without a connection, as it changes.
        emit: Sends to a rank.
    """

    def __init__(self, ranks: tuple[int, ...], coordinator: int, lost: Set[int], emit: Emit) -> None:
        self._ranks = ranks
        self._coordinator = coordinator
        self._lost = lost
        self._emit = emit
        self._sessions: dict[int, CoordinatorSession] = {}
        self._verdicts: dict[int, ErrorRecord] = {}
        self._late: dict[tuple[int, int], _Late] = {}  # by rank and session
        self._opened = 0
        self._doubted: int | None = None

    def handle(
        self, rank: int, message: wire.Open | wire.Answer | wire.Fail | wire.Beat | wire.Bye, payload: bytes, now: float
    ) -> bool:
        """Take in a message from ``rank``, which may be the coordinator itself.

        Returns:
            Whether it completes a round, so that ``combine`` can run.
        """
        number = message.session
        if rank == self._coordinator and isinstance(message, wire.Open):
            self._opened = number + 1
        session = self._sessions.get(number)
        if session is None:
            session = self._begin(rank, message, now)
        if session is None:
            return False
        session.handle(rank, message, payload, now)
        self._catch_up(now)
        self._retire(number, session)
        return isinstance(message, wire.Answer) and session.parts() is not None

    def _begin(self, rank: int, message: Message, now: float) -> CoordinatorSession | None:
        """Begin the session that ``message`` opens; if it is over already, say so to whom it came late."""
        if not isinstance(message, wire.Open):
            return None
        number = message.session
        over = self._verdicts.get(number)
        # Only the coordinator's own Open, just counted, may begin a session below ``_opened``.
        if over is None and number < self._opened and rank != self._coordinator:
            over = failures.record(f"the coordinator has closed session {number} ({message.kind}) already")
        if over is not None:
            self._late[rank, number] = _Late(over, now + min(_LATE_GRACE, message.timeout / BEATS_PER_TIMEOUT))
            self._catch_up(now)
            return None
        session = CoordinatorSession(number, self._ranks, self._coordinator, self._emit, now)
        self._sessions[number] = session
        for lost in self._lost:
            session.lose(lost, now)
        return session

    def _catch_up(self, now: float) -> None:
        """Put ranks in step again that opened a session which was over.

        If the others wait in newer sessions, the rank has left out a call, or it makes one that they have given up. To
        let it join would mix what belongs to different calls. So those fail, and the next is the same for all.
        Otherwise the rank just comes late.
        """
        for (rank, number), late in list(self._late.items()):
            newer = [n for n, session in self._sessions.items() if n > number and not session.has_opened(rank)]
            for n in newer:
                text = f"is {n - number} call(s) behind the other ranks; from the next call on, all are in step"
                self._sessions[n].fail_rank(rank, failures.record(text), now)
            if newer:
                self._answer_late(rank, number, resume=max(newer) + 1)
            elif now >= late.until:
                self._answer_late(rank, number, resume=0)
        for number in sorted(self._sessions):
            self._fail_overtaken(number, now)

    def _fail_overtaken(self, number: int, now: float) -> None:
        """Fail a session that a rank has left out, as its opening a newer one shows, and that newer one with it."""
        session = self._sessions[number]
        newer = [other for other in self._sessions if other > number]
        ahead = {rank: n for n in sorted(newer) for rank in self._ranks if self._sessions[n].has_opened(rank)}
        left_out = {rank: n for rank, n in ahead.items() if not session.has_opened(rank)}
        if session.failing or not left_out:
            return
        newest = max(left_out.values())
        session.resume = newest + 1
        for rank, n in left_out.items():
            text = f"is {n - number} call(s) ahead of other ranks; from the next call on, all are in step"
            session.fail_rank(rank, failures.record(text), now)
        for rank in self._ranks:
            if session.has_opened(rank) and not self._sessions[newest].has_opened(rank):
                text = f"is {newest - number} call(s) behind other ranks; from the next call on, all are in step"
                self._sessions[newest].fail_rank(rank, failures.record(text), now)

    def _answer_late(self, rank: int, number: int, resume: int) -> None:
        late = self._late.pop((rank, number))
        self._emit(rank, wire.Verdict(number, late.error, late=True, resume=resume), b"")

    def _retire(self, number: int, session: CoordinatorSession) -> None:
        if session.verdict is not None:
            if session.left_out:
                self._doubted = max(number, self._doubted or 0)
            self._verdicts[number] = session.verdict
            if len(self._verdicts) > _REMEMBERED:
                del self._verdicts[min(self._verdicts)]
        if session.verdict is not None or session.abandoned:
            self._sessions.pop(number, None)

    @property
    def doubtful(self) -> bool:
        """See :class:`paddle_dist_ckpt.core.protocols.ControlSession`."""
        return self._doubted is not None

    def dispel(self, number: int) -> None:
        """A session has succeeded. One that was opened before others were given up says nothing about those."""
        if self._doubted is not None and number > self._doubted:
            self._doubted = None

    @property
    def failing(self) -> bool:
        """A verdict is due soon."""
        return any(session.failing for session in self._sessions.values())

    def find(self, number: int) -> CoordinatorSession | None:
        """The session, unless it is over."""
        return self._sessions.get(number)

    def end(self, number: int, error: ErrorRecord) -> None:
        """End a session because ``combine`` raised ``error``."""
        session = self._sessions.get(number)
        if session is not None:
            session.fail_combine(error)
            self._retire(number, session)

    def lose(self, rank: int, now: float) -> None:
        """The connection to ``rank`` is lost: sessions that need it fail, now and until it is back."""
        for number, session in list(self._sessions.items()):
            session.lose(rank, now)
            self._retire(number, session)

    def tick(self, now: float) -> float:
        """Let time pass in every session; returns when to call again."""
        self._catch_up(now)
        due = min((late.until for late in self._late.values()), default=math.inf)
        for number, session in list(self._sessions.items()):
            due = min(due, session.tick(now))
            self._retire(number, session)
        return due

    def close(self, now: float) -> None:
        """Tell every rank of the failures that still wait for their grace to pass."""
        for session in self._sessions.values():
            if session.failing:
                session.judge(now)
