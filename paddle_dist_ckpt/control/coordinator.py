"""The coordinator's side of sessions: a state machine without I/O, threads or clocks.

It is told what arrives (:meth:`CoordinatorTable.handle`), whose connection is lost and what time it is, and calls
``emit`` for what is to be sent. It runs even for a session that the coordinator itself has not opened yet, so that the
ranks that wait there learn at once when one of them fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paddle_dist_ckpt.control import failures, wire
from paddle_dist_ckpt.control.wire import ErrorRecord, Message

__all__ = ["BEATS_PER_TIMEOUT", "GRACE", "CoordinatorSession", "CoordinatorTable", "Emit"]

GRACE = 0.25
"""Seconds that the first failure waits for those of other ranks, so that the error can name them all."""
BEATS_PER_TIMEOUT = 10
_REMEMBERED = 16
_LATE_GRACE = 1.0
"""Longest wait, in seconds, of a rank that opens a session which is over, for the others to open a newer one."""

Emit = Callable[[int, Message, bytes], None]
"""Sends a message and its payload to a rank."""


class CoordinatorSession:
    """One session: who has arrived, the current round's answers, and what has gone wrong.

    Args:
        number: Of the session.
        ranks: Its members.
        coordinator: One of them.
        emit: Sends to a rank.
        now: Monotonic time, in seconds. Silence is counted from here: from the first news of this session.
    """

    def __init__(self, number: int, ranks: tuple[int, ...], coordinator: int, emit: Emit, now: float) -> None:
        self._number = number
        self._ranks = ranks
        self._coordinator = coordinator
        self._emit = emit
        self._timeout = math.inf
        self._next_beat = math.inf
        self._heard = dict.fromkeys(ranks, now)
        self._kinds: dict[int, str] = {}
        self._left: set[int] = set()
        self._round = 0
        self._names: dict[int, str] = {}
        self._answers: dict[int, bytes] = {}
        self._failures: dict[int, ErrorRecord] = {}
        self._outside_rounds = False
        self._moved = False
        self.resume = 0
        self._judged_at = math.inf
        self.verdict: ErrorRecord | None = None

    @property
    def left_out(self) -> bool:
        """Whether some rank never opened it."""
        return any(rank not in self._kinds for rank in self._ranks)

    def has_opened(self, rank: int) -> bool:
        """Whether ``rank`` has opened it."""
        return rank in self._kinds

    @property
    def abandoned(self) -> bool:
        """The coordinator has closed it, and no verdict is being awaited."""
        return self._coordinator in self._left and not self.failing

    @property
    def failing(self) -> bool:
        """Something has gone wrong; the verdict is there or awaits the other ranks' errors."""
        return self.verdict is not None or not math.isinf(self._judged_at)

    def handle(self, rank: int, message: Message, payload: bytes, now: float) -> None:
        """Take in a message of this session."""
        self._heard[rank] = now
        self._moved = self._moved or (isinstance(message, wire.Beat) and message.moved)
        if isinstance(message, wire.Open):
            self._on_open(rank, message, now)
        elif isinstance(message, wire.Answer):
            self._on_answer(rank, message, payload, now)
        elif isinstance(message, wire.Fail):
            self._on_fail(rank, message, now)
        elif isinstance(message, wire.Bye):
            self._on_bye(rank, now)
        self._judge_if_due(now)

    def _on_open(self, rank: int, message: wire.Open, now: float) -> None:
        self._kinds[rank] = message.kind
        # The first to arrive waits longest: its timeout counts until the coordinator's own is known.
        if rank == self._coordinator or math.isinf(self._timeout):
            self._timeout = message.timeout
        if rank == self._coordinator:
            self._next_beat = now
        if len(set(self._kinds.values())) > 1:
            self._begin_judging(now)

    def _on_answer(self, rank: int, message: wire.Answer, payload: bytes, now: float) -> None:
        if message.round != self._round:
            text = f"answered round {message.round} while the session was in round {self._round}"
            self.fail_rank(rank, failures.record(text), now)
            return
        self._names[rank] = message.name
        self._answers[rank] = payload
        if len(set(self._names.values())) > 1:
            self._begin_judging(now)
        self._blame_those_who_left(now)

    def _on_fail(self, rank: int, message: wire.Fail, now: float) -> None:
        if message.name:
            self._names[rank] = message.name
        else:
            self._outside_rounds = True
        self.fail_rank(rank, message.error, now)

    def _on_bye(self, rank: int, now: float) -> None:
        self._left.add(rank)
        if rank == self._coordinator and not self.failing:
            for other in self._ranks:
                if other not in self._left:
                    self._emit(other, wire.Bye(self._number), b"")
        self._blame_those_who_left(now)

    def _blame_those_who_left(self, now: float) -> None:
        """A rank that has closed the session is no failure, unless a round still waits for it."""
        if not self._answers:
            return
        for rank in self._left - self._answers.keys():
            name = next(iter(self._names.values()))
            self.fail_rank(rank, failures.record(f"closed the session before round {name!r}"), now)

    def fail_rank(self, rank: int, error: ErrorRecord, now: float) -> None:
        """Note that ``rank`` has failed; the first error of a rank counts."""
        self._failures.setdefault(rank, error)
        self._begin_judging(now)

    def lose(self, rank: int, now: float) -> None:
        """Note that the connection to ``rank`` is lost. Nothing to a session that the rank has closed."""
        if rank not in self._left:
            self.fail_rank(rank, failures.record("connection lost"), now)
            self._judge_if_due(now)

    def _begin_judging(self, now: float) -> None:
        self._judged_at = min(self._judged_at, now + GRACE)

    def tick(self, now: float) -> float:
        """Send the beats that are due and see who is missing.

        Returns:
            When to call again, as monotonic time.
        """
        if any(now - heard > self._timeout for rank, heard in self._heard.items() if rank not in self._left):
            self._begin_judging(now)
        self._judge_if_due(now)
        if self.verdict is not None or self.abandoned:
            return math.inf
        if now >= self._next_beat:
            self._next_beat = now + self._timeout / BEATS_PER_TIMEOUT
            for rank in self._ranks:
                if rank not in self._left:
                    self._emit(rank, wire.Beat(self._number, self._moved), b"")
            self._moved = False
        silent_at = min((heard for rank, heard in self._heard.items() if rank not in self._left), default=math.inf)
        return min(self._next_beat, self._judged_at, silent_at + self._timeout)

    def _judge_if_due(self, now: float) -> None:
        if self.verdict is not None or not self.failing:
            return
        missing = self._missing(now)
        if now >= self._judged_at or all(self._accounted_for(rank, missing) for rank in self._ranks):
            self.judge(now)

    def _missing(self, now: float) -> set[int]:
        """The silent ranks. One that fell silent together with them may have sent its last beat an interval later."""
        silence = self._timeout * (1 - 1 / BEATS_PER_TIMEOUT)
        late = {rank for rank, heard in self._heard.items() if rank not in self._left and now - heard > silence}
        return late if any(now - self._heard[rank] > self._timeout for rank in late) else set()

    def _accounted_for(self, rank: int, missing: set[int]) -> bool:
        if rank in self._failures or rank in self._left or rank in missing:
            return True
        return rank in (self._kinds if len(set(self._kinds.values())) > 1 else self._answers)

    def judge(self, now: float) -> None:
        """Decide on the session's failure and tell every rank."""
        self._push(self._disagreement() or self._failure(now))

    def _push(self, verdict: ErrorRecord) -> None:
        if self.verdict is not None:
            return
        self.verdict = verdict
        for rank in self._ranks:
            if rank not in self._left:
                notice = rank not in self._kinds
                self._emit(rank, wire.Verdict(self._number, verdict, resume=self.resume, notice=notice), b"")

    def _disagreement(self) -> ErrorRecord | None:
        for said, what in ((self._kinds, f"session {self._number}"), (self._names, f"round {self._round}")):
            if len(set(said.values())) > 1:
                lines = ", ".join(f"rank {rank} calls {said[rank]!r}" for rank in sorted(said))
                advice = "all ranks must make the same calls in the same order"
                return failures.record(f"ranks disagree about {what}: {lines}; {advice}")
        return None

    def _failure(self, now: float) -> ErrorRecord:
        kind = next(iter(self._kinds.values()), "session")
        name = next(iter(self._names.values()), "")
        place = f" in round {name!r}" if name and not self._outside_rounds else ""
        missing = self._missing(now) - self._failures.keys()
        if not self._failures:
            return failures.timeout_error(f"{kind}{place}", missing, self._timeout)
        failed = dict(self._failures)
        for rank in missing:
            failed[rank] = failures.timeout_error("it", [rank], self._timeout)
        return failures.failure_of_ranks(f"{kind} failed{place}", failed, self._ranks)

    def parts(self) -> Mapping[int, bytes] | None:
        """The current round's answers, once every rank's is there."""
        return self._answers if len(self._answers) == len(self._ranks) else None

    def reply(self, replies: Mapping[int, bytes]) -> None:
        """End the round with a reply for every rank. After a failure nothing is sent: the verdict is the reply."""
        if self.failing:
            return
        finished, self._round = self._round, self._round + 1
        self._names, self._answers = {}, {}
        for rank in self._ranks:
            self._emit(rank, wire.Reply(self._number, finished), replies[rank])

    def fail_combine(self, error: ErrorRecord) -> None:
        """End the session because ``combine`` raised."""
        name = next(iter(self._names.values()), "")
        doing = f"{self._kinds[self._coordinator]} failed in round {name!r}"
        self._push(error if error.shared else failures.failure_of_ranks(doing, {self._coordinator: error}, self._ranks))


@dataclass(frozen=True, slots=True)
class _Late:
    """A rank that has opened a session which is over: which, why it is, and until when the answer can wait."""

    number: int
    error: ErrorRecord
    until: float


class CoordinatorTable:
    """All sessions of a hub, on its coordinator.

    Args:
        ranks: The members of every session.
        coordinator: One of them.
        emit: Sends to a rank.
    """

    def __init__(self, ranks: tuple[int, ...], coordinator: int, emit: Emit) -> None:
        self._ranks = ranks
        self._coordinator = coordinator
        self._emit = emit
        self._sessions: dict[int, CoordinatorSession] = {}
        self._verdicts: dict[int, ErrorRecord] = {}
        self._lost: set[int] = set()
        self._late: dict[int, _Late] = {}
        self._opened = 0
        self.doubtful = False

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
            self._late[rank] = _Late(number, over, now + min(_LATE_GRACE, message.timeout / BEATS_PER_TIMEOUT))
            self._catch_up(now)
            return None
        session = CoordinatorSession(number, self._ranks, self._coordinator, self._emit, now)
        self._sessions[number] = session
        for lost in self._lost:
            session.lose(lost, now)
        return session

    def _catch_up(self, now: float) -> None:
        """Put ranks in step again that opened a session which was over.

        If the others wait in a newer session, the rank has left out a call, or it makes one that they have given up. To
        let it join would mix what belongs to different calls. So that session fails, and the next is the same for all.
        Otherwise the rank just comes late.
        """
        for rank, late in list(self._late.items()):
            newer = max((number for number in self._sessions if number > late.number), default=None)
            if newer is not None and not self._sessions[newer].has_opened(rank):
                text = (
                    f"is {newer - late.number} call(s) behind the other ranks; from the next call on, all are in step"
                )
                self._sessions[newer].fail_rank(rank, failures.record(text), now)
                self._answer_late(rank, late, resume=newer + 1)
            elif now >= late.until:
                self._answer_late(rank, late, resume=0)
        for number in sorted(self._sessions):
            self._fail_overtaken(number, now)

    def _fail_overtaken(self, number: int, now: float) -> None:
        """Fail a session that a rank has left out, as its opening a newer one shows, and that newer one with it."""
        session = self._sessions[number]
        newer = [other for other in self._sessions if other > number]
        ahead = {rank: n for n in newer for rank in self._ranks if self._sessions[n].has_opened(rank)}
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

    def _answer_late(self, rank: int, late: _Late, resume: int) -> None:
        del self._late[rank]
        self._emit(rank, wire.Verdict(late.number, late.error, late=True, resume=resume), b"")

    def _retire(self, number: int, session: CoordinatorSession) -> None:
        if session.verdict is not None:
            self.doubtful = self.doubtful or session.left_out
            self._verdicts[number] = session.verdict
            if len(self._verdicts) > _REMEMBERED:
                del self._verdicts[min(self._verdicts)]
        if session.verdict is not None or session.abandoned:
            self._sessions.pop(number, None)

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
        self._lost.add(rank)
        for number, session in list(self._sessions.items()):
            session.lose(rank, now)
            self._retire(number, session)

    def regain(self, rank: int) -> None:
        """``rank`` has connected again."""
        self._lost.discard(rank)

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
