"""Ranks that may have named different coordinators: each has a hub of its own, on which the others would never come.

So there is one hub on which all calls of a group meet: that of the group's first rank. A call that names another
coordinator opens a session there before its own. Sessions are matched by counting and compared by what is being done,
so a call that names another one, or the first rank, is found as any two different calls are: at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from ..core.protocols import Appointments, ControlHub, ControlSession
from .appointment import BoardAppointments
from .board import Board
from .session import Ending, Session
from .wire import NAMED_COORDINATOR

__all__ = ["AgreedHub", "RefusingHub"]

Make = Callable[[float, Callable[[], None]], Board]


class AgreedHub:
    """Implements :class:`paddle_dist_ckpt.core.protocols.ControlHub` for a coordinator that not every rank may name.

    Args:
        meeting: The hub of the group's first rank, which is not this coordinator.
        coordinator: The one that this rank names.
        make: Makes the coordinator's hub, when all ranks have named it; given how many seconds that may take, and what
            to call now and then: it raises if another rank has failed.
    """

    def __init__(self, meeting: ControlHub, coordinator: int, make: Make) -> None:
        self._meeting = meeting
        self._coordinator = coordinator
        self._make = make
        self._hub: Board | None = None
        self._making = threading.Lock()

    def session(self, kind: str, timeout: float) -> AbstractContextManager[Session]:
        """Make the next session. It opens after a round in which all ranks turn out to mean the same coordinator.

        Raises:
            ValueError: when it is to be opened: they do not; says who named whom.
            CheckpointTimeoutError, RankFailureError: a rank did not come, or was lost.
        """
        named = f"{kind}{NAMED_COORDINATOR}{self._coordinator}"
        return _AgreedSession(self._meeting.session(named, timeout), self._own, kind, timeout)

    def appointments(self, topic: str, timeout: float) -> BoardAppointments:
        """Make appointments with the coordinator, on which the ranks have agreed in a session before."""
        return self._own(timeout).appointments(topic, timeout)

    def close(self) -> None:
        """End the coordinator's connection; the first rank's goes on."""
        if self._hub is not None:
            self._hub.close()

    def _own(self, timeout: float, check: Callable[[], None] = lambda: None) -> Board:
        with self._making:
            if self._hub is None:
                self._hub = self._make(timeout, check)
            return self._hub


class _AgreedSession:
    """Opens a session in which the ranks meet, and then one with the coordinator on which they have agreed.

    The first stays open beside the other one. It has the place in the order of all calls on the group, whichever
    coordinator these name, in which their collectives take turns.
    """

    def __init__(self, met: AbstractContextManager[ControlSession], make: Make, kind: str, timeout: float) -> None:
        self._met, self._make = met, make
        self._kind, self._timeout = kind, timeout
        self._made: Session | None = None

    def __enter__(self) -> Session:
        try:
            meeting = self._met.__enter__()
            doubtful = meeting.gather_scatter(
                "coordinator_rank", lambda: b"", lambda asked: dict.fromkeys(asked, b"1" if meeting.doubtful else b"")
            )
            hub = self._make(self._timeout, meeting.check)
            if doubtful:
                hub.doubt()
            assert isinstance(meeting, Session)
            meeting.wait_to_be_followed()  # or the calls of several threads would be matched crosswise
            self._made = hub.session(self._kind, self._timeout, meeting)
            session = self._made.__enter__()
            meeting.be_followed()
            return session
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_open = self._made is not None and self._made.is_open
        try:
            if self._made is not None:
                self._made.__exit__(kind, error, traceback)
        finally:  # the others hear of the error in the one in which they wait for this rank
            self._met.__exit__(*((None, None, None) if is_open else (kind, error, traceback)))


class RefusingHub:
    """Implements :class:`paddle_dist_ckpt.core.protocols.ControlHub` for a rank with an argument that is wrong.

    What it raises is raised by every rank that makes the same call, for none of them has to wait for this one.

    Args:
        meeting: The hub of the group's first rank.
        error: What is wrong.
        *named: What this rank named as the coordinator, to be told to those that named another, unless it is the first
            rank.
        stands: Whether it is still wrong; once it is not, this is the hub of the group's first rank.
    """

    def __init__(
        self, meeting: ControlHub, error: ValueError, *named: object, stands: Callable[[], bool] = lambda: True
    ) -> None:
        self._meeting = meeting
        self._error = error
        self._stands = stands
        self._named = "".join(f"{NAMED_COORDINATOR}{coordinator!r:.50}" for coordinator in named)

    def session(self, kind: str, timeout: float) -> AbstractContextManager[ControlSession]:
        """Fail in the next session.

        Raises:
            ValueError: what is wrong still is.
        """
        if not self._stands():
            return self._meeting.session(kind, timeout)
        with Ending(self._meeting.session(kind + self._named, timeout)) as made, made:
            raise self._error
        raise self._error

    def appointments(self, topic: str, timeout: float) -> Appointments:
        """Make no appointments.

        Raises:
            ValueError: what is wrong still is.
        """
        if not self._stands():
            return self._meeting.appointments(topic, timeout)
        raise self._error

    def close(self) -> None:
        """Does nothing: no connection is held."""
