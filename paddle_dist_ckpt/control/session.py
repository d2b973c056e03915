"""Sessions as user threads use them, over a :class:`Board`, whatever carries the messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from ..core.memory import Bytes1D
from ..core.protocols import ControlSession, Operations, Transfers, Transport
from ..errors import CheckpointTimeoutError, CollectiveError
from . import failures, wire
from .member import MemberSession
from .verified import VerifiedTransfers

if TYPE_CHECKING:
    from .board import Board

__all__ = [
    "LONGEST_WAIT",
    "SHORTEST_TIMEOUT",
    "Ending",
    "Session",
    "check_payload",
    "check_replies",
]

T = TypeVar("T")
LONGEST_WAIT = 3600.0
"""In seconds: what the operating system takes as a timeout is bounded."""
SHORTEST_TIMEOUT = 1.0
"""In seconds: of beats there are ten in that time from each rank to the coordinator, and as many back."""
_POLL_SECONDS = 0.02


def check_payload(data: object, what: str) -> bytes:
    """Return ``data`` if it can be sent.

    Raises:
        TypeError: it is not bytes.
        ValueError: it is longer than a message may be.
    """
    if not isinstance(data, bytes):
        raise TypeError(f"{what} must be bytes, not {type(data).__name__}")
    if len(data) > wire.MAX_PAYLOAD:
        raise ValueError(f"{what} has {len(data)} bytes; a message may have {wire.MAX_PAYLOAD}")
    return data


def check_replies(replies: Mapping[int, bytes], ranks: tuple[int, ...]) -> Mapping[int, bytes]:
    """Return ``replies`` if there is one for every rank, and each can be sent.

    Raises:
        TypeError: a reply is not bytes.
        ValueError: a reply is missing, too many or too long.
    """
    if set(replies) != set(ranks):
        raise ValueError(f"combine must reply to ranks {sorted(ranks)}; it replied to {sorted(replies)}")
    for rank, reply in replies.items():
        check_payload(reply, f"combine's reply to rank {rank}")
    return replies


class Ending:
    """What a session is opened in: ``with Ending(hub.session(kind, timeout)) as made, made as session``.

    A signal's handler, that of Ctrl-C for one, may raise between two instructions of any function, those by which a
    session is opened and closed too; and while it is open on one rank, the others wait for that. So whoever makes a
    session closes it once more where its block has ended for sure.
    """

    def __init__(self, made: AbstractContextManager[ControlSession]) -> None:
        self._made = made

    def __enter__(self) -> AbstractContextManager[ControlSession]:
        return self._made

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._made.__exit__(kind, error, traceback)


class Session:
    """Implements :class:`paddle_dist_ckpt.core.protocols.ControlSession`.

    A context manager: it opens on entry and closes on exit, which may be repeated. If its body raises, the other ranks
    fail too. Its collectives' turn comes by the number of ``place``, a session of another hub, if that is given.
    """

    def __init__(self, board: Board, kind: str, timeout: float, place: Session | None = None) -> None:
        self.rank, self.ranks, self.coordinator = board.rank, board.ranks, board.coordinator
        self._board = board
        self._kind = kind
        self._timeout = max(timeout, SHORTEST_TIMEOUT)
        self._transports: list[Transport] = []
        self._place = place
        self._is_open = False

    @property
    def doubtful(self) -> bool:
        return self._board.table is not None and self._board.table.doubtful

    def __enter__(self) -> Session:
        with self._board.lock:
            least = 0 if self._place is None else self._place._member.number
            self._member: MemberSession = self._board.number(self._kind, self._timeout, least)
            self._board.open(self._member)
            self._is_open = True
        return self

    @property
    def is_open(self) -> bool:
        """Whether it has been opened, and not closed."""
        return self._is_open or self._board.has_opened(getattr(self, "_member", None))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self.is_open:
            return
        try:
            self._finish(error)
        finally:
            self._board.leave(self._member, succeeded=error is None)
            self._is_open = False

    def _finish(self, error: BaseException | None) -> None:
        """Tell the others if this rank failed; let go of what must not be used any more."""
        member = self._member
        if error is not None and member.verdict is None and member.own_error is None:
            self._report(error)
        verdict = member.verdict
        if isinstance(error, CollectiveError) or (verdict is not None and failures.is_of_collectives(verdict)):
            for transport in self._transports:  # on all ranks alike, or some would wait for the others in the next call
                transport.abandon()

    def check(self) -> None:
        """Raise if the session has failed on any rank. Cheap; long work in ``local`` should call it now and then.

        Until the first round is over, a rank may have failed before it opened its own: the one in whose place this is
        has heard of that, on another hub.
        """
        if self._member.verdict is not None:
            raise self._member.error()
        if self._place is not None and self._member.round <= 0:
            self._place.check()

    def gather_scatter(
        self,
        name: str,
        local: Callable[[], bytes],
        combine: Callable[[Mapping[int, bytes]], Mapping[int, bytes]],
    ) -> bytes:
        """See :class:`paddle_dist_ckpt.core.protocols.ControlSession`."""
        if not name:
            raise ValueError("a round needs a name")
        board, member = self._board, self._member
        with board.lock:
            number = member.begin_round(name)
        self.check()
        data = self._run(lambda: check_payload(local(), "what local returns"), failures.SHARED_IN_LOCAL)
        board.post(wire.Answer(member.number, number, name), data)
        if self.rank == self.coordinator:
            lead, parts = board.wait(member, member.led_parts, self._look)
            replies = self._run(lambda: check_replies(combine(parts), self.ranks), failures.SHARED_IN_COMBINE)
            with board.lock:
                lead.reply(replies)
                board.settle()
        return board.wait(member, member.take_reply, self._look)

    def _run(self, work: Callable[[], T], shared: frozenset[str]) -> T:
        """Do this rank's part of a round. If it fails, every rank raises the verdict, so that all raise the same."""
        try:
            return work()
        except BaseException as error:
            self._report(error, shared)
            if not isinstance(error, Exception):
                raise
        return self._board.wait(self._member, lambda: None, self._look)

    def _look(self) -> float:
        """See :meth:`check`, while waiting: the other hub's news do not come here. Returns when to look again."""
        self.check()
        return _POLL_SECONDS if self._place is not None and self._member.round <= 0 else LONGEST_WAIT

    def _report(self, error: BaseException, shared: frozenset[str] = failures.SHARED_IN_LOCAL) -> None:
        """Tell the coordinator that this rank failed, unless it only raised what made the session fail."""
        member = self._member
        if member.verdict is None:
            member.own_error = error
            failure = failures.record_of(error, shared)
            self._board.post(wire.Fail(member.number, member.round_name, failure, member.round))

    def run_collectives(self, transport: Transport, work: Callable[[Transfers], T]) -> T:
        """See :class:`paddle_dist_ckpt.core.protocols.ControlSession`."""
        self._transports.append(transport)
        self.check()
        self._wait_for_earlier(self._place or self, lambda one: one.may_collect)
        task, member = _Collectives(transport), self._member
        nonce = f"{self.ranks} {self.coordinator} {member.number} {member.round} {member.round_name}"
        try:
            member.moved_since = task.moved_since
            result = task.start(VerifiedTransfers(task, self.rank, nonce), work, self._board.changed)
            self._board.wait(member, lambda: result.done() or None, lambda: self._watch(task))
            return result.result()
        except BaseException:
            # Work that hangs, that raised half-way, or that goes on after an interrupt has left out operations that the
            # other ranks count on, or would do them in their next call.
            transport.abandon()
            raise
        finally:
            member.moved_since = None  # the work holds on to all that it was for

    def end_collectives(self) -> None:
        """See :class:`paddle_dist_ckpt.core.protocols.ControlSession`."""
        with self._board.lock:
            self._member.may_collect = False
            self._board.changed.notify_all()
        if self._place is not None:
            self._place.end_collectives()

    def wait_to_be_followed(self) -> None:
        """Wait until those before this one that name the same coordinator are followed by sessions with that.

        Raises:
            CheckpointTimeoutError: they are not within the timeout.
        """
        named = self._kind.partition(wire.NAMED_COORDINATOR)[2]
        self._wait_for_earlier(
            self, lambda one: not one.is_followed and one.kind.partition(wire.NAMED_COORDINATOR)[2] == named
        )

    def be_followed(self) -> None:
        """The session with the coordinator that this one names has been opened."""
        with self._board.lock:
            self._member.is_followed = True
            self._board.changed.notify_all()

    def _wait_for_earlier(self, place: Session, counts: Callable[[MemberSession], bool]) -> None:
        """Wait until no session before this one counts any more, by the order that ``place`` has.

        Raises:
            CheckpointTimeoutError: one still does after the timeout.
        """
        board, member, until = self._board, self._member, time.monotonic() + self._timeout
        pause = LONGEST_WAIT if place is self else _POLL_SECONDS  # the other hub's news do not come here

        def is_next() -> bool | None:
            ahead = place._board.ahead_of(place._member, counts)
            if ahead is not None and time.monotonic() > until:
                raise CheckpointTimeoutError(
                    f"{member.kind} has waited {self._timeout:g} s for another thread's {ahead.kind} on the same group"
                )
            return True if ahead is None else None

        member.moved_since = lambda then: True  # meanwhile, this rank does what the others wait for as well
        try:
            board.wait(member, is_next, lambda: min(max(until - time.monotonic(), 0) + 0.01, pause))
        finally:
            member.moved_since = None

    def _watch(self, task: _Collectives) -> float:
        """Fail if the task's collective hangs, on every rank; returns in how many seconds to look again."""
        now = time.monotonic()
        still = now - max(now if task.since is None else task.since, self._member.group_moved)
        if still > self._timeout and self._member.own_error is None:
            self._report(CollectiveError(f"a collective made no progress for {still:.1f} s"))
        return min(max(self._timeout - still, self._timeout / 10), LONGEST_WAIT)


class _Collectives:
    """Implements Operations by others, for work on a thread of its own, which may never come back.

    Attributes:
        since: Since when it has been in a collective, as monotonic time; None while it is not in one.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self.since: float | None = None
        self._ended = False

    def start(
        self, verified: VerifiedTransfers, work: Callable[[Transfers], T], changed: threading.Condition
    ) -> Future[T]:
        """Begin the work, by transfers over this transport; ``changed`` is notified when its result is there."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                try:
                    value = work(verified)
                    verified.settle()
                finally:
                    verified.finish()
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(value)
            self._ended = True
            with changed:
                changed.notify_all()

        threading.Thread(target=run, name="paddle_dist_ckpt collectives", daemon=True).start()
        return result

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = None

    def broadcast(self, data: Bytes1D, source: int, most: int) -> None:
        """See :class:`..core.protocols.Operations`."""
        with self._waiting():
            self._operations.broadcast(data, source, most)

    def exchange(
        self,
        outgoing: Mapping[int, Bytes1D],
        incoming: Mapping[int, Bytes1D],
        senders: Sequence[tuple[int, int]],
        most: int,
    ) -> None:
        """See :class:`..core.protocols.Operations`."""
        with self._waiting():
            self._operations.exchange(outgoing, incoming, senders, most)

    def try_out(self) -> list[str]:
        """See :class:`..core.protocols.Operations`."""
        with self._waiting():
            return self._operations.try_out()

    def moved_since(self, then: float) -> bool:
        """Whether it works outside of collectives, or has begun one since ``then``. One that has ended does neither."""
        since = self.since
        return not self._ended and (since is None or since > then)
