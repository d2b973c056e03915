"""The coordinator's side of all sessions: which there are, which are over, and which ranks are out of step.

Sessions are matched by counting: the n-th of one rank belongs to the n-th of the others. What would be lost if a
mismatch just made all ranks begin to count anew, after one error on each:

- A rank that comes late for several calls that the others have given up makes each of them, and each must fail. If it
  counted anew after the first, its second would be matched with a later call of the others. So it catches up by number.
- A rank that has left out a call, and one that comes late for it, look alike until the others are seen in a newer call,
  which then fails on all. If they come to theirs only after the rank's was answered as late, they are in step by number
  and at different calls. So the table has doubts until a session succeeds, in which a save compares what it can.
- A session that all ranks have opened, such as a save in the background, is no part of a mismatch, and goes on.

It keeps a session even if the coordinator itself has not opened it yet, so that the ranks that wait there learn at once
when one of them fails.
"""

from __future__ import annotations

import math

from . import failures, wire
from .coordinator import BEATS_PER_TIMEOUT, CoordinatorSession, Emit, Links
from .wire import ErrorRecord

__all__ = ["CoordinatorTable"]

_REMEMBERED = 16
_NO_DOUBT = -2
_NEXT = "the next calls are matched by number again, so bring all ranks to the same one (a barrier will do)"
_LATE_GRACE = 1.0
"""Longest wait, in seconds, of a rank that opens a session which is over, for the others to open a newer one."""


class CoordinatorTable:
    """All sessions of a hub, on its coordinator.

    Args:
        ranks: All ranks.
        coordinator: This one.
        links: What is known of their connections.
        emit: Sends.

    Attributes:
        sessions: Those that are not over, by number.
        unheard: The ranks that may not have all that was sent to them, of sessions that the coordinator has closed.
    """

    def __init__(self, ranks: tuple[int, ...], coordinator: int, links: Links, emit: Emit) -> None:
        self._ranks = ranks
        self._coordinator = coordinator
        self._links = links
        self._emit = emit
        self.sessions: dict[int, CoordinatorSession] = {}
        self.unheard: dict[int, set[int]] = {}
        self._verdicts: dict[int, ErrorRecord] = {}
        # By rank and session: why it is over that the rank has opened only now, until when the answer can wait.
        self._late: dict[tuple[int, int], tuple[ErrorRecord, float]] = {}
        self._opened = 0
        self._doubted = _NO_DOUBT  # the newest session in which, or after which, there is doubt; -1: before all

    def handle(
        self,
        rank: int,
        message: wire.Open | wire.Answer | wire.Fail | wire.Beat | wire.Bye | wire.Received,
        payload: bytes,
        now: float,
    ) -> bool:
        """Take in a message from ``rank``, which may be the coordinator itself.

        Returns:
            Whether it is news for a user thread: it completes a round, so that ``combine`` can run, or all ranks have
            what was sent to them.
        """
        if isinstance(message, wire.Open):
            self._on_open(rank, message, now)
        elif isinstance(message, wire.Bye):
            self._late.pop((rank, message.session), None)  # it has given up as the others have: its next is the next
        session = self.sessions.get(message.session)
        if session is None and isinstance(message, wire.Bye) and self._is_to_come(message.session):
            # Its Open was lost with a connection. Whoever opens it later shall not wait for this rank.
            session = self._begin(message.session, now)
            session.fail_rank(rank, failures.record("the connection was lost while it made this call"), now)
        if session is not None:
            if isinstance(message, wire.Bye) and rank == self._coordinator:
                self.unheard[message.session] = session.listening - self._links.lost
            session.handle(rank, message, payload, now)
        if isinstance(message, wire.Open):
            self._put_in_step(now)
        self._retire()
        if isinstance(message, (wire.Bye, wire.Received)):
            return self._on_heard(message.session, rank)
        return isinstance(message, wire.Answer) and session is not None and session.parts() is not None

    def _on_heard(self, number: int, rank: int) -> bool:
        unheard = self.unheard.get(number, set())
        unheard.discard(rank)
        return not unheard

    def _on_open(self, rank: int, message: wire.Open, now: float) -> None:
        """Begin the session, if it is new; if it is over already, note that ``rank`` came late to it."""
        number = message.session
        if rank == self._coordinator:
            self._opened = number + 1
        if number in self.sessions:
            return
        over = self._verdicts.get(number)
        # Only the coordinator's own Open, just counted, may begin a session below ``_opened``.
        if over is None and number < self._opened and rank != self._coordinator:
            self._emit(rank, wire.Bye(number), b"")  # closed without a round; nothing to a rank that had none either
            return
        if over is not None:
            until = now + min(_LATE_GRACE, message.timeout / BEATS_PER_TIMEOUT)
            self._late[rank, number] = failures.late(over, rank), until
            return
        self._begin(number, now)

    def _is_to_come(self, number: int) -> bool:
        return number >= self._opened and number not in self._verdicts

    def _begin(self, number: int, now: float) -> CoordinatorSession:
        session = CoordinatorSession(number, self._ranks, self._coordinator, self._links, self._emit, now)
        self.sessions[number] = session
        for lost in self._links.lost:
            session.lose(lost, now)
        for differing, protocol in self._links.differing.items():
            session.differ(differing, protocol, now)
        return session

    def _put_in_step(self, now: float) -> None:
        """Fail the sessions that ranks are not in together, so that the next is the same for all.

        A rank that opens a newer session than one that it is not in has left that out. One that opens a session which
        is over, while others are in a newer one, has left out a call, or makes one that they have given up: to let it
        join would mix what belongs to different calls. If no others are, nor come soon, it is late, and may catch up,
        call by call.
        """
        apart: set[int] = set()
        for number, session in sorted(self.sessions.items()):
            over = session.failing and not session.waits
            for rank in () if over else set(self._ranks) - session.kinds.keys():
                at = [n for r, n in self._late if r == rank and n < number]
                at += [n for n, s in self.sessions.items() if rank in s.kinds and (n > number or n in apart)]
                if at:
                    ahead = at[0] - number
                    calls = "call" if abs(ahead) == 1 else "calls"
                    where = f"{abs(ahead)} {calls} {'ahead of' if ahead > 0 else 'behind'}"
                    text = f"is {where} the other ranks; {_NEXT}"
                    session.fail_rank(rank, failures.record(text), now)
                    apart.add(number)
        for number in apart:
            self.sessions[number].resume = max(self.sessions) + 1
        for (rank, number), (error, until) in list(self._late.items()):
            newer = [n for n, session in self.sessions.items() if n > number and rank not in session.kinds]
            if newer or now >= until:
                del self._late[rank, number]
                self._emit(rank, wire.Verdict(number, error, max(newer) + 1 if newer else 0), b"")

    def _retire(self) -> None:
        """Forget the sessions that are over, but for why."""
        for number, session in list(self.sessions.items()):
            if session.verdict is not None:
                if len(session.kinds) < len(self._ranks):
                    self._doubted = max(number, self._doubted)
                self._verdicts[number] = session.verdict
                if session.listening:
                    self.unheard[number] = session.listening - self._links.lost
                if len(self._verdicts) > _REMEMBERED:
                    del self._verdicts[min(self._verdicts)]
            elif session.abandoned:
                # One that was opened before others were given up says nothing about those.
                if number > self._doubted:
                    self._doubted = _NO_DOUBT
            else:
                continue
            del self.sessions[number]

    @property
    def doubtful(self) -> bool:
        """See :class:`paddle_dist_ckpt.core.protocols.ControlSession`."""
        return self._doubted != _NO_DOUBT

    def doubt(self) -> None:
        """Have doubts until a session succeeds that the coordinator opens from now on."""
        self._doubted = max(self._doubted, self._opened - 1)

    @property
    def failing(self) -> bool:
        """A verdict is due, soon or when all ranks have come."""
        return any(session.failing for session in self.sessions.values())

    def lose(self, rank: int, now: float) -> None:
        """The connection to ``rank`` is lost: sessions that need it fail, now and until it is back."""
        for session in self.sessions.values():
            session.lose(rank, now)
        for unheard in self.unheard.values():
            unheard.discard(rank)
        for late in [late for late in self._late if late[0] == rank]:
            del self._late[late]  # it gives up all that it has opened, as at a farewell in `handle`
        self._retire()

    def differ(self, rank: int, protocol: int, now: float) -> None:
        """``rank`` cannot connect, for it speaks another protocol: sessions fail, now and until it can."""
        self._links.differing[rank] = protocol
        for session in self.sessions.values():
            session.differ(rank, protocol, now)
        self._retire()

    def tick(self, now: float) -> float:
        """Let time pass in every session; returns when to call again."""
        self._put_in_step(now)
        due = [session.tick(now) for session in self.sessions.values()]
        self._retire()
        return min([math.inf, *due, *(until for _, until in self._late.values())])

    def close(self, now: float) -> None:
        """Tell every rank of the failures that still wait for their grace to pass."""
        for session in self.sessions.values():
            if session.failing:
                session.judge(now)
