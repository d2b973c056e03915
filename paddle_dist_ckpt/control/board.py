"""A hub but for what carries its messages: numbers sessions, routes messages to state machines, lets user threads wait.

It knows neither sockets nor threads: a subclass moves what it sends, and calls :meth:`Board.deliver`,
:meth:`Board.lose`, :meth:`Board.regain` and :meth:`Board.tick`.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from ..errors import CheckpointError
from ..version import __version__
from . import failures, wire
from .appointment import Appointer, Attendances, BoardAppointments
from .coordinator import Links
from .coordinator_table import CoordinatorTable
from .member import MemberSession
from .session import Session
from .wire import ErrorRecord, Message

__all__ = ["Board"]

T = TypeVar("T")
_FAREWELL_SECONDS = 5.0
ToCoordinator = wire.Open | wire.Answer | wire.Fail | wire.Beat | wire.Bye | wire.Received | wire.Whereabouts


class Board(ABC):
    """Implements :class:`paddle_dist_ckpt.core.protocols.ControlHub`. A process forked from this one cannot use it.

    Args:
        rank: This rank.
        ranks: The members of every session.
        coordinator: One of them, on which the state machines are that decide.
        lock: Becomes the board's; simulated ranks of one process share one.

    Attributes:
        lock: Guards the board. Whoever takes it as the lock of ``changed`` may be interrupted before it is given back:
            a Condition's own methods are Python.
        changed: Notified, with the lock held, when there is news for user threads.
        table: All ranks' sessions, on the coordinator.
        attendances: This rank's part in appointments.
        links: What is known of the ranks' connections.
        broken: Why no session can succeed any more, if so.
    """

    def __init__(
        self, rank: int, ranks: tuple[int, ...], coordinator: int, lock: threading.RLock | None = None
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.coordinator = coordinator
        self.lock = lock or threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.links = Links()
        self.attendances = Attendances(self._lead)
        self.broken: ErrorRecord | None = None
        self.table = CoordinatorTable(ranks, coordinator, self.links, self._emit) if rank == coordinator else None
        self._sessions: dict[int, MemberSession] = {}
        self._opened = 0  # how many sessions this rank has opened, or has tried to
        self._pid = os.getpid()

    def session(self, kind: str, timeout: float, place: Session | None = None) -> Session:
        """See :class:`paddle_dist_ckpt.core.protocols.ControlHub`.

        Args:
            place: The session that has this one's place in the order of calls, if it is another hub's.

        Raises:
            CheckpointError: this process was forked from the one that made the hub.
        """
        self._check_process()
        return Session(self, kind, timeout, place)

    def appointments(self, topic: str, timeout: float) -> BoardAppointments:
        """See :class:`paddle_dist_ckpt.core.protocols.ControlHub`.

        Raises:
            CheckpointError: this process was forked from the one that made the hub.
            ValueError: the topic is too long.
        """
        self._check_process()
        return BoardAppointments(self, topic, timeout)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise CheckpointError("the control hub belongs to the process that this one was forked from; make another")

    def close(self) -> None:
        """End the connection. Sessions that are open fail, here and on the other ranks."""
        self.shut(failures.record("the control hub was closed"))

    def pass_over(self, number: int) -> None:
        """Have the next session be of this number at least: this rank's calls before it have come to nothing."""
        with self.lock:
            self._opened = max(self._opened, number)

    @abstractmethod
    def _carry(self, destination: int, message: Message, payload: bytes) -> None:
        """Move a message to another rank, in order for each. Called with the lock held; must not block."""

    @abstractmethod
    def _flush(self, sooner: bool) -> None:
        """See that what was sent arrives, and what has come is delivered. Called with the lock held.

        Args:
            sooner: A deadline may have come nearer: tick again.
        """

    def number(self, kind: str, timeout: float, least: int = 0) -> MemberSession:
        """Make the next session, of which nobody knows until it is opened. Called with the lock held, as `open` is.

        Its number is ``least`` at least: that of its place in the order of calls, by which ranks are in step again
        after a call that one of them has not opened here.
        """
        number = max(self._opened, max(self._sessions, default=-1) + 1, least)
        made = MemberSession(number, kind, self.rank, self.coordinator, timeout, time.monotonic())
        made.opener = threading.get_ident()
        return made

    def open(self, session: MemberSession) -> None:
        """Open a session and announce it. One that cannot succeed is failed, and not announced."""
        # IMPORTANT: by this one step it is both counted and there to be left. An interrupt between two would have the
        # others told of its end, and the next session be of its number.
        self._sessions[session.number] = session
        self._opened = max(self._opened, session.number + 1)
        if self.broken is not None:
            session.fail(self.broken)
            return
        if self.coordinator in self.links.lost:
            # IMPORTANT: an Open would arrive over the next connection, when this has failed, and look like a call that
            # this rank makes too late, see MemberPort.send.
            session.lose_coordinator()
            return
        self.post(wire.Open(session.number, session.kind, session.timeout, __version__))
        if self.table is not None:
            session.lead = self.table.sessions.get(session.number)

    def has_opened(self, session: MemberSession | None) -> bool:
        """Whether a session has been opened, be it that an interrupt came before it was announced, and not left."""
        return session is not None and self._sessions.get(session.number) is session

    def leave(self, session: MemberSession, succeeded: bool) -> None:
        """Close a session: the others no longer count on this rank in it. It may be done again.

        After a success, the coordinator waits until all have what it has sent them in it: its process may end without
        any warning from now on. It does not wait for one that is lost, nor for long.
        """
        with self.lock:
            self._opened = max(self._opened, session.number + 1)
            self._sessions.pop(session.number, None)
            self.changed.notify_all()  # who waits for its collectives
            self.post(wire.Bye(session.number))
            if succeeded and self.table is not None:
                unheard = self.table.unheard.setdefault(session.number, set())
                self.changed.wait_for(lambda: not unheard or self.broken is not None, _FAREWELL_SECONDS)
            if self.table is not None:
                self.table.unheard.pop(session.number, None)

    def ahead_of(self, session: MemberSession, counts: Callable[[MemberSession], bool]) -> MemberSession | None:
        """The first session before this one that counts, as those do whose collectives are still to come.

        A thread that opens a session while it is in another one could not wait for that.
        """
        with self.lock:
            ahead = (one for number, one in sorted(self._sessions.items()) if number < session.number)
            return next((one for one in ahead if counts(one) and one.opener != session.opener), None)

    def doubt(self) -> None:
        """On the coordinator: be doubtful until a session succeeds, since ranks may not be at the same calls."""
        with self.lock:
            if self.table is not None:
                self.table.doubt()

    def post(self, message: ToCoordinator, payload: bytes = b"") -> None:
        """Send to the coordinator, which may be this rank."""
        with self.lock:
            self._post(message, payload)
            self.settle(not isinstance(message, wire.Answer))

    def settle(self, sooner: bool = False) -> None:
        """After messages were sent, with the lock held: see :meth:`_flush`."""
        self._flush(sooner or (self.table is not None and self.table.failing))

    def _post(self, message: ToCoordinator, payload: bytes = b"") -> None:
        if self.table is not None:
            self._handle(self.rank, message, payload)
        else:
            self._carry(self.coordinator, message, payload)

    def _handle(self, source: int, message: ToCoordinator, payload: bytes) -> None:
        """On the coordinator: take in a message from any rank. User threads there wait for whole rounds only."""
        assert self.table is not None
        if isinstance(message, wire.Whereabouts):
            lead = self.attendances.at(message.label).lead
            assert lead is not None
            lead.handle(source, message)
        elif self.table.handle(source, message, payload, time.monotonic()):
            self.changed.notify_all()

    def _emit(self, destination: int, message: Message, payload: bytes) -> None:
        """Send from the coordinator to a rank."""
        if destination == self.rank:
            self._receive(message, payload)
        else:
            self._carry(destination, message, payload)

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
        with self.lock:
            while True:
                value = result()
                if value is not None:
                    return value
                if session.verdict is not None:
                    raise session.error()
                self.changed.wait(watch() if watch is not None else None)

    def deliver(self, source: int, message: Message, payload: bytes) -> None:
        """Take in a message from another rank."""
        with self.lock:
            if self.table is None:
                self._receive(message, payload)
            elif isinstance(message, ToCoordinator):
                self._handle(source, message, payload)
            self.settle()

    def hear(self, rank: int) -> None:
        """A part of a message has come from ``rank``, whose beats wait behind the rest."""
        with self.lock:
            now = time.monotonic()
            if self.table is not None:
                for session in self.table.sessions.values():
                    session.hear(rank, now)
            else:
                for own in self._sessions.values():
                    own.hear(now)

    def _receive(self, message: Message, payload: bytes) -> None:
        """Take in a message from the coordinator."""
        if isinstance(message, wire.Appointed):
            attendance = self.attendances.at(message.label)
            if attendance.handle(message):
                self._post(attendance.whereabouts())
        elif not isinstance(message, wire.Whereabouts):
            if isinstance(message, wire.Verdict):
                self._opened = max(self._opened, message.resume)
            session = self._sessions.get(message.session)
            if session is not None:
                session.handle(message, payload, time.monotonic())
                if isinstance(message, (wire.Bye, wire.Verdict)) and self.table is None:
                    self._post(wire.Received(message.session))
        if not isinstance(message, wire.Beat):
            self.changed.notify_all()

    def lose(self, rank: int) -> None:
        """The connection to ``rank`` is lost."""
        with self.lock:
            self.links.lost.add(rank)
            if self.table is not None:
                self.table.lose(rank, time.monotonic())
                for attendance in self.attendances:
                    if attendance.lead is not None:
                        attendance.lead.lose()
            elif rank == self.coordinator:
                for session in self._sessions.values():
                    session.lose_coordinator()
            self.changed.notify_all()
            self.settle()

    def differ(self, rank: int, protocol: int) -> None:
        """``rank`` runs a version of this library that speaks another protocol."""
        with self.lock:
            if self.table is not None:
                self.table.differ(rank, protocol, time.monotonic())
            self.changed.notify_all()
            self.settle()

    def regain(self, rank: int) -> None:
        """``rank`` is connected, for the first time or again."""
        with self.lock:
            self.links.lost.discard(rank)
            self.links.absent.discard(rank)
            self.links.differing.pop(rank, None)
            for attendance in self.attendances:
                if attendance.lead is not None:
                    attendance.lead.regain(rank)
                else:
                    self._post(attendance.whereabouts())
            self.settle()

    def _lead(self, label: wire.Label) -> Appointer | None:
        return None if self.table is None else Appointer(label, self.ranks, self.links.lost, self._emit)

    def tick(self) -> float:
        """Send the beats that are due and see who has been silent for too long.

        Returns:
            When to call again, as monotonic time; infinity if no session is open.
        """
        with self.lock:
            now = time.monotonic()
            due = math.inf
            for session in self._sessions.values():
                message, again = session.tick(now)
                due = min(due, again)
                if message is not None:
                    self._post(message)
            if self.table is not None:
                due = min(due, self.table.tick(now))
            self.changed.notify_all()  # a session may have failed
            return due

    def shut(self, error: ErrorRecord) -> None:
        """Fail every session on this rank with ``error``, and those opened later."""
        with self.lock:
            try:
                if self.table is not None:
                    self.table.close(time.monotonic())
            finally:  # whatever comes of what the others are told
                self.broken = self.broken or error
                for session in self._sessions.values():
                    session.fail(error)
                self.changed.notify_all()
            self.settle()
