"""One rank's switchboard: numbers sessions, routes messages to state machines, and lets user threads wait for those.

It knows neither sockets nor threads: a :class:`Carrier` moves what it sends, and whoever drives the carrier calls
:meth:`Board.deliver`, :meth:`Board.lose`, :meth:`Board.regain` and :meth:`Board.tick`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from . import failures, wire
from .appointment import Appointer, Attendance, Attendances
from .coordinator_table import CoordinatorTable
from .member import MemberSession
from .wire import ErrorRecord, Message

__all__ = ["LONGEST_WAIT", "Board"]

T = TypeVar("T")
LONGEST_WAIT = 3600.0
"""In seconds: what the operating system takes as a timeout is bounded."""
ToCoordinator = wire.Open | wire.Answer | wire.Fail | wire.Beat | wire.Bye | wire.Whereabouts


class Carrier(Protocol):
    """Moves messages to other ranks, in order for each. Called with the board's lock held; must not block."""

    def send(self, destination: int, message: Message, payload: bytes) -> None: ...

    def flush(self) -> None:
        """See that what was sent arrives, and what has come is delivered."""
        ...

    def reschedule(self) -> None:
        """Tick again: a deadline may have come nearer."""
        ...


class Board:
    """The sessions and appointments of one rank; on the coordinator also the state machines that decide on both.

    Args:
        rank: This rank.
        ranks: The members of every session.
        coordinator: One of them.
        carrier: Moves messages.
        lock: Guards the board; simulated ranks of one process share one.
        opened: How many sessions this rank has opened, or has tried to.
    """

    def __init__(
        self,
        rank: int,
        ranks: tuple[int, ...],
        coordinator: int,
        carrier: Carrier,
        lock: threading.RLock | None = None,
        opened: int = 0,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.coordinator = coordinator
        self.changed = threading.Condition(lock)
        self._carrier = carrier
        self._lost: set[int] = set()
        self._table = CoordinatorTable(ranks, coordinator, self._lost, self._emit) if rank == coordinator else None
        self._attendances = Attendances(self._lead)
        self._sessions: dict[int, MemberSession] = {}
        self._opened = opened
        self._broken: ErrorRecord | None = None

    def open(self, kind: str, timeout: float) -> MemberSession:
        """Open the next session and announce it. One that is over already is returned as failed."""
        with self.changed:
            now = time.monotonic()
            session = MemberSession(self._opened, kind, self.rank, self.coordinator, timeout, now)
            self._opened += 1
            self._sessions[session.number] = session
            if self._broken is not None:
                session.fail(self._broken)
            else:
                self.post(wire.Open(session.number, kind, timeout))
                if self.coordinator in self._lost:
                    session.lose_coordinator()
            return session

    @property
    def doubtful(self) -> bool:
        """See :class:`paddle_dist_ckpt.core.protocols.ControlSession`."""
        return self._table is not None and self._table.doubtful

    def close(self, session: MemberSession) -> None:
        """Close a session: the others no longer count on this rank in it."""
        with self.changed:
            del self._sessions[session.number]
            self.post(wire.Bye(session.number))

    def post(self, message: ToCoordinator, payload: bytes = b"") -> None:
        """Send to the coordinator, which may be this rank."""
        with self.changed:
            self._post(message, payload)
            self._settle(not isinstance(message, wire.Answer))

    def _settle(self, rescheduled: bool = False) -> None:
        self._carrier.flush()
        if rescheduled or (self._table is not None and self._table.failing):
            self._carrier.reschedule()

    def _post(self, message: ToCoordinator, payload: bytes = b"") -> None:
        if self._table is not None:
            self._handle(self.rank, message, payload)
        else:
            self._carrier.send(self.coordinator, message, payload)

    def _handle(self, source: int, message: ToCoordinator, payload: bytes) -> None:
        """On the coordinator: take in a message from any rank. User threads there wait for whole rounds only."""
        assert self._table is not None
        if isinstance(message, wire.Whereabouts):
            lead = self._attendances.at(message.label).lead
            assert lead is not None
            lead.handle(source, message)
        elif self._table.handle(source, message, payload, time.monotonic()):
            self.changed.notify_all()

    def _emit(self, destination: int, message: Message, payload: bytes) -> None:
        """Send from the coordinator to a rank."""
        if destination == self.rank:
            self._receive(message, payload)
        else:
            self._carrier.send(destination, message, payload)

    def parts(self, session: MemberSession) -> Mapping[int, bytes] | None:
        """On the coordinator: every rank's answer to the current round, once they are there."""
        assert self._table is not None
        state = self._table.sessions.get(session.number)
        return None if state is None else state.parts()

    def reply(self, session: MemberSession, replies: Mapping[int, bytes]) -> None:
        """On the coordinator: end the round."""
        assert self._table is not None
        with self.changed:
            state = self._table.sessions.get(session.number)
            if state is not None:
                state.reply(replies)
            self._carrier.flush()

    def wait(
        self, session: MemberSession, result: Callable[[], T | None], watch: Callable[[], float] | None = None
    ) -> T:
        """Wait until ``result`` is not None.

        Args:
            session: The session to wait in.
            result: Called with the lock held whenever something has changed.
            watch: Called now and then as well; returns in how many seconds to call it again.

        Raises:
            What made the session fail, if it fails first.
        """
        with self.changed:
            while True:
                value = result()
                if value is not None:
                    return value
                if session.verdict is not None:
                    raise session.error()
                self.changed.wait(watch() if watch is not None else None)

    def deliver(self, source: int, message: Message, payload: bytes) -> None:
        """Take in a message from another rank."""
        with self.changed:
            if self._table is None:
                self._receive(message, payload)
            elif isinstance(message, ToCoordinator):
                self._handle(source, message, payload)
            self._settle()

    def _receive(self, message: Message, payload: bytes) -> None:
        """Take in a message from the coordinator."""
        if isinstance(message, (wire.Hello, wire.Whereabouts)):
            return
        if isinstance(message, wire.Appointed):
            attendance = self._attendances.at(message.label)
            if attendance.handle(message):
                self._post(attendance.whereabouts())
            self.changed.notify_all()
            return
        if isinstance(message, wire.Verdict):
            self._opened = max(self._opened, message.resume)
        session = self._sessions.get(message.session)
        if session is None:
            return
        session.handle(message, payload, time.monotonic())
        if not isinstance(message, wire.Beat):
            self.changed.notify_all()

    def lose(self, rank: int) -> None:
        """The connection to ``rank`` is lost."""
        with self.changed:
            self._lost.add(rank)
            if self._table is not None:
                self._table.lose(rank, time.monotonic())
                for attendance in self._attendances:
                    if attendance.lead is not None:
                        attendance.lead.lose()
            elif rank == self.coordinator:
                for session in self._sessions.values():
                    session.lose_coordinator()
            self.changed.notify_all()
            self._settle()

    def regain(self, rank: int) -> None:
        """``rank`` is connected, for the first time or again."""
        with self.changed:
            self._lost.discard(rank)
            for attendance in self._attendances:
                if attendance.lead is not None:
                    attendance.lead.regain(rank)
                else:
                    self._post(attendance.whereabouts())
            self._settle()

    def attend(self, topic: str) -> Attendance:
        """This rank's part in the topic's next appointments."""
        with self.changed:
            return self._attendances.next(topic)

    def reach(self, attendance: Attendance, step: int, wish: bool, timeout: float) -> bool:
        """See :class:`paddle_dist_ckpt.core.protocols.Appointments`."""
        until = 0.0
        with self.changed:
            while not attendance.may_reach(step):
                until = until or time.monotonic() + timeout
                left = until - time.monotonic()
                error = self._hindrance(attendance, timeout, left <= 0)
                if error is not None:
                    raise failures.copy_of(error)
                self.changed.wait(min(left, LONGEST_WAIT))
            due = attendance.reach(step)
            if wish and not due:
                attendance.wish()
                self.post(attendance.whereabouts())
            return due

    def _hindrance(self, attendance: Attendance, timeout: float, over: bool) -> ErrorRecord | None:
        """Why no decision is to be expected, if so."""
        if self._broken is not None:
            return self._broken
        waiting = f"waiting for the decision about {attendance.label[0]!r}"
        if self.coordinator in self._lost:
            lost = {self.coordinator: failures.record("connection lost")}
            return failures.failure_of_ranks(f"{waiting} failed", lost, self.ranks)
        silent = [self.coordinator] if attendance.lead is None else attendance.lead.silent
        return failures.timeout_error(waiting, silent, timeout) if over else None

    def end_attendance(self, attendance: Attendance) -> None:
        """On the coordinator: no rank has an appointment any more, beyond where the coordinator is."""
        with self.changed:
            if attendance.lead is not None:
                attendance.lead.end(attendance.step)
            self._carrier.flush()

    def _lead(self, label: wire.Label) -> Appointer | None:
        leads = self.rank == self.coordinator
        return Appointer(label, self.ranks, self._lost, self._emit) if leads else None

    def tick(self) -> float:
        """Send the beats that are due and see who has been silent for too long.

        Returns:
            When to call again, as monotonic time; infinity if no session is open.
        """
        with self.changed:
            now = time.monotonic()
            due = math.inf
            for session in self._sessions.values():
                message, again = session.tick(now)
                due = min(due, again)
                if isinstance(message, (wire.Beat, wire.Fail)):
                    self._post(message)
            if self._table is not None:
                due = min(due, self._table.tick(now))
            self.changed.notify_all()  # a session may have failed
            return due

    def shut(self, error: ErrorRecord) -> None:
        """Fail every session on this rank with ``error``, and those opened later."""
        with self.changed:
            if self._table is not None:
                self._table.close(time.monotonic())
            self._broken = self._broken or error
            for session in self._sessions.values():
                session.fail(error)
            self.changed.notify_all()
            self._carrier.flush()
