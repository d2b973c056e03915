"""Appointments: at which step all ranks do something, agreed on without any waiting for another to get there.

A rank wishes for an appointment. The coordinator asks all ranks how far they are. Each answers at once, from its hub's
thread, and promises to go no further before it has heard the decision: the first step beyond all the answers. So a rank
knows of an appointment before it gets there, wherever the others are; it waits only if its next step comes within the
one exchange of messages that a decision takes.

Both sides are state machines without I/O, threads or clocks; :class:`BoardAppointments` is what user threads have of
them, over a :class:`.board.Board`. A message is all that its sender knows, so that the latest
makes up for those that were lost with a connection, and each side need only repeat it. Nobody can miss a decision: the
next one takes every rank's answer to a question that tells of it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Set
from typing import TYPE_CHECKING, Any

import msgspec

from . import failures
from .coordinator import Emit
from .session import LONGEST_WAIT, SHORTEST_TIMEOUT
from .wire import BEFORE, MAX_TOPIC, Appointed, ErrorRecord, Label, Whereabouts

if TYPE_CHECKING:
    from .board import Board

__all__ = ["Appointer", "Attendance", "Attendances", "BoardAppointments", "check_topic"]

_MOST_EARLY = 100
_logger = logging.getLogger("paddle_dist_ckpt")


class Attendance:
    """Any rank's side: how far it is, what it has promised, and which appointments are ahead of it.

    Attributes:
        lead: If this rank is the coordinator, that side of them.
        step: The furthest step that the rank has come to.
    """

    def __init__(self, label: Label, lead: Appointer | None = None) -> None:
        self.label = label
        self.lead = lead
        self.step = BEFORE
        self._wish = BEFORE
        self._heard = Appointed(label)
        self._ahead: deque[int] = deque()
        self._asked_about = BEFORE
        self._answer = False

    def handle(self, message: Appointed) -> bool:
        """Take in a message from the coordinator; returns whether it asks something new."""
        if message.decided > self._heard.decided:
            self._ahead.append(message.after)
        if message.end is not None:  # an appointment that the coordinator does not come to is void
            self._ahead = deque(after for after in self._ahead if after < message.end)
        asks = message.open and message.asked > self._heard.asked
        self._heard = message
        return asks

    def may_reach(self, step: int) -> bool:
        """Whether no promise forbids to go on to ``step``."""
        return step <= self.step or not self._heard.open

    def reach(self, step: int) -> bool:
        """Come to a step, which may be reached; returns whether there is an appointment. It says so again if asked."""
        if step != self._asked_about:
            self._asked_about, self._answer = step, False
        while self._ahead and self._ahead[0] < step:
            self._ahead.popleft()
            self._answer = True
        self.step = max(self.step, step)
        return self._answer

    def wish(self) -> None:
        """Wish for an appointment beyond the step that the rank has come to."""
        self._wish = self.step

    def whereabouts(self) -> Whereabouts:
        """What the coordinator is to know; with it goes the promise, if a question is open."""
        return Whereabouts(self.label, self._heard.asked, self.step, self._wish)


class Appointer:
    """The coordinator's side.

    A question that a rank cannot answer, for it is one of ``lost``, those without a connection as it changes, is taken
    back: nobody shall wait for it. It is asked again when the rank is back.
    """

    def __init__(self, label: Label, ranks: tuple[int, ...], lost: Set[int], emit: Emit) -> None:
        self._ranks = ranks
        self._lost = lost
        self._emit = emit
        self._steps: dict[int, int] = {}
        self._wish = BEFORE
        self._news = Appointed(label)

    @property
    def silent(self) -> list[int]:
        """The ranks whose answers are missing."""
        return [rank for rank in self._ranks if rank not in self._steps]

    def handle(self, rank: int, message: Whereabouts) -> None:
        """Take in where a rank is. A wish is fulfilled already by a decision for a step that it has yet to reach."""
        self._wish = max(self._wish, message.wish)
        if self._news.open and message.answered == self._news.asked:
            self._steps[rank] = message.step
            if not self.silent:
                self._tell(open=False, decided=self._news.decided + 1, after=max(self._steps.values()))
        self._ask()

    def lose(self) -> None:
        """The connection to a rank is lost."""
        if self._news.open:
            self._tell(open=False)

    def regain(self, rank: int) -> None:
        """``rank`` is connected, for the first time or again."""
        self._emit(rank, self._news, b"")
        self._ask()

    def end(self, step: int) -> None:
        """The coordinator, which came as far as ``step``, goes no further: no appointments any more."""
        self._tell(open=False, end=step)

    def _ask(self) -> None:
        if self._wish > self._news.after and not (self._news.open or self._lost or self._news.end is not None):
            self._steps.clear()
            self._tell(open=True, asked=self._news.asked + 1)

    def _tell(self, **changes: Any) -> None:
        self._news = msgspec.structs.replace(self._news, **changes)
        for rank in self._ranks:
            self._emit(rank, self._news, b"")


class Attendances:
    """The attendances of one rank, by label; the labels of a topic are numbered.

    One may be made by a message, before this rank comes to its number. Of those, the oldest are forgotten if there are
    too many. On the coordinator, ``lead`` makes its side of a label's appointments.
    """

    def __init__(self, lead: Callable[[Label], Appointer | None]) -> None:
        self._lead = lead
        self._made: dict[Label, Attendance] = {}
        self._counts: dict[str, int] = {}

    def __iter__(self) -> Iterator[Attendance]:
        return iter(list(self._made.values()))

    def next(self, topic: str) -> Attendance:
        """That of the topic's next number."""
        number = self._counts.get(topic, 0)
        found = self.at((topic, number))
        self._counts[topic] = number + 1
        return found

    def at(self, label: Label) -> Attendance:
        """That of a label."""
        if label not in self._made:
            early = [(topic, number) for topic, number in self._made if number >= self._counts.get(topic, 0)]
            if len(early) == _MOST_EARLY:
                _logger.warning("messages about %r are dropped, as this rank has no such appointments", early[0][0])
                del self._made[early[0]]
            self._made[label] = Attendance(label, self._lead(label))
        return self._made[label]


def check_topic(topic: str) -> str:
    """Return ``topic`` as it can be sent, if it can be one. Halves of surrogate pairs in it are replaced.

    Raises:
        ValueError: it is too long.
    """
    if len(topic) > MAX_TOPIC:
        raise ValueError(f"the topic has {len(topic)} characters; a topic may have {MAX_TOPIC}")
    return topic.encode(errors="replace").decode()


class BoardAppointments:
    """Implements :class:`paddle_dist_ckpt.core.protocols.Appointments`."""

    def __init__(self, board: Board, topic: str, timeout: float) -> None:
        self._board = board
        self._timeout = max(timeout, SHORTEST_TIMEOUT)
        with board.lock:
            self._attendance = board.attendances.next(check_topic(topic))
        self._closed = False

    @property
    def leads(self) -> bool:
        return self._board.rank == self._board.coordinator

    def reach(self, step: int, wish: bool = False) -> bool:
        """See :class:`paddle_dist_ckpt.core.protocols.Appointments`."""
        board, attendance, until = self._board, self._attendance, time.monotonic() + self._timeout
        if self._closed:
            return False
        with board.lock:
            while not attendance.may_reach(step):
                left = until - time.monotonic()
                error = self._hindrance(left <= 0)
                if error is not None:
                    raise failures.copy_of(error)
                board.changed.wait(min(left, LONGEST_WAIT))
            due = attendance.reach(step)
            if wish and not due:
                attendance.wish()
                board.post(attendance.whereabouts())
            return due

    def _hindrance(self, over: bool) -> ErrorRecord | None:
        """Why no decision is to be expected, if so."""
        board, (topic, _), lead = self._board, self._attendance.label, self._attendance.lead
        if board.broken is not None:
            return board.broken
        waiting = f"waiting for the decision about {topic!r}"
        if board.coordinator in board.links.lost:
            lost = {board.coordinator: failures.record(failures.LOST)}
            return failures.failure_of_ranks(f"{waiting} failed", lost, board.ranks)
        silent = [board.coordinator] if lead is None else lead.silent
        return failures.timeout_error(waiting, silent, self._timeout) if over else None

    def close(self) -> None:
        """See :class:`paddle_dist_ckpt.core.protocols.Appointments`."""
        lead = self._attendance.lead
        with self._board.lock:
            if lead is not None and not self._closed:
                lead.end(self._attendance.step)
                self._board.settle()
            self._closed = True
