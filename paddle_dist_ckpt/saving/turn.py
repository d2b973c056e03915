"""Whose turn it is, of several saves that use the same memory: never a lock that an interrupt could leave taken."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..errors import CheckpointError

__all__ = ["Ticket", "Turn"]

_POLL_SECONDS = 0.02


class Ticket:
    """What a save is known by while it waits for its turn, and has it.

    Attributes:
        over: Whether the save has ended, however it did. It then has no turn any more.
        goes_on: Whether it goes on in the background, when its call has ended.
        thread: Which thread is at work for it; None while it waits for the one of the background to begin.
    """

    def __init__(self) -> None:
        self.over = self.goes_on = False
        self.thread: int | None = threading.get_ident()
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether the save is one of the process that this one was forked from, of whose end nobody hears here."""
        return os.getpid() != self._pid


class Turn:
    """A queue of tickets, of which the first that is not over has the turn.

    A signal's handler, that of Ctrl-C for one, may raise between two instructions of any function, those of context
    managers too. So a ticket joins the queue when the block has begun that ends it, and who makes it sets ``over`` once
    more where the save has ended for sure.
    """

    def __init__(self) -> None:
        self._queue: list[Ticket] = []

    def join(self, ticket: Ticket) -> None:
        """Join the queue, before the save's session opens: later, two of several threads, whose calls have begun in the
        same order on all ranks, could each have the turn on one rank, and wait for it on another."""
        self._queue.append(ticket)

    @contextmanager
    def taken(self, ticket: Ticket, may_wait: bool, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Have the turn until the end of the block.

        Args:
            ticket: A new one.
            may_wait: Whether to wait for it, and not to raise.
            check: Called now and then while waiting; may raise to stop.

        Raises:
            CheckpointError: somebody else has it, and this one is not to wait, or would wait for ever: this very thread
                may have it.
        """
        try:
            if ticket not in self._queue:
                self.join(ticket)
            while not self._is_first(ticket):
                if not may_wait:
                    raise CheckpointError("an earlier save still goes on in the background, and when_busy is 'raise'")
                check()
                time.sleep(_POLL_SECONDS)
            yield
        finally:
            ticket.over = True

    def _is_first(self, ticket: Ticket) -> bool:
        for other in list(self._queue):
            if other is ticket:
                return True
            if not other.over and other.is_inherited:
                raise CheckpointError(
                    "a save still went on when this process was forked, and has not ended here: a forked process needs "
                    "a CheckpointManager of its own"
                )
            if not other.over and other.thread == threading.get_ident():
                raise CheckpointError(
                    "a save was called within another one of the same ranks, which it would wait for: by a "
                    "state_dict(), or by a handler of the log or of a signal"
                )
            if not other.over:
                return False
            with suppress(ValueError):  # somebody else has removed it
                self._queue.remove(other)
        return False
