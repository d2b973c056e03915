"""Operations that may never return, each on a thread of its own, and waited for no longer than is allowed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..core.latch import Latch
from ..errors import CheckpointTimeoutError

__all__ = ["Helpers", "StorageCall"]

_LOOK_EVERY = 1.0  # seconds
_GRACE = 1.0  # seconds that others get to return when an operation is given up
_AT_ONCE = 3  # a commit, what it asks for on the way, and the refreshing of a claim


class StorageCall:
    """One call of a storage, on a helper's thread.

    Attributes:
        doing: What it does and to what, for messages: ``fsync of /folder/file``.
        patient: Whether it is waited for in full even if another operation is given up meanwhile.
        location: The folder that it publishes in, if it does.
        ended: Set when it has returned.
        asking: Whether it waits for somebody else just now, who has a bound of his own.
    """

    def __init__(
        self,
        doing: str,
        work: Callable[[StorageCall], Any],
        late: Callable[[Any], None] = lambda result: None,
        patient: bool = False,
        location: str = "",
    ) -> None:
        self.doing, self.patient, self.location = doing, patient, location
        self.ended = Latch()
        self.asking = False
        self._work, self._late = work, late
        self._lock = threading.Lock()
        self._begun = self._withdrawn = self._given_up = self._decided = False
        self._results, self._errors = list[Any](), list[BaseException]()

    def run(self) -> None:
        """Do it, on whatever thread; or not, if it was withdrawn before."""
        if not self._begin():
            return
        try:
            self._results.append(self._work(self))
        except BaseException as error:
            self._errors.append(error)
        with self._lock:
            self.ended.set()
            late = self._given_up
        if late and self._results:
            with suppress(Exception):  # nobody is left to hear of it
                self._late(self._results[0])

    def _begin(self) -> bool:
        with self._lock:
            self._begun = not self._withdrawn
            return self._begun

    def decide(self) -> None:
        """In the work: what follows takes effect, unless the operation has been given up by now.

        Raises:
            CheckpointTimeoutError: it has.
        """
        with self._lock:
            if self._given_up:
                raise CheckpointTimeoutError(f"{self.doing} came too late")
            self._decided = True

    def withdraw(self) -> bool:
        """Have it not begin, unless it has begun. Returns whether it has not."""
        with self._lock:
            self._withdrawn = not self._begun
            return self._withdrawn

    def give_up(self) -> bool:
        """Wait for it no longer, unless it has ended. Returns whether it has not."""
        with self._lock:
            self._given_up = self._given_up or not self.ended.is_set()
            return not self.ended.is_set()

    @property
    def may_still_happen(self) -> bool:
        """Whether its decision was taken before it was given up."""
        return self._decided

    def result(self) -> Any:
        """What the work has returned; raises what it has raised."""
        if self._errors:
            raise self._errors[0]
        return self._results[0]


class Helpers:
    """Daemon threads that run the operations of one storage; to be closed.

    When an operation takes too long, it is given up, and so is the storage: every operation after it raises at once
    what the first one did. Time in which this process stands still does not count.

    Args:
        seconds: The longest that an operation may take; infinity sets no bound.
        rank: This rank, for messages.
    """

    def __init__(self, seconds: float, rank: int) -> None:
        self.seconds = seconds
        self._rank = rank
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[StorageCall | None] = queue.SimpleQueue()
        self._closed = False
        self._stalls: list[str] = []
        # Later ones could not be started if the interpreter is ending, while a save in the background still goes on.
        self._idle = sum(self._start(None) for _ in range(_AT_ONCE))

    def close(self) -> None:
        """End the threads, each when it has nothing to do any more."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._waiting.put(None)
            self._idle = 0  # what begins later must not wait behind that

    def run(self, operation: StorageCall) -> Any:
        """Run an operation and return its result.

        Raises:
            CheckpointTimeoutError: it did not return in time, or an earlier one did not.
            BaseException: what it raises.
        """
        if self._stalls:
            raise self._timeout(self._stalls[0])
        try:
            self.begin(operation)
            self.wait_for(operation)
        except CheckpointTimeoutError:
            raise
        except BaseException:
            # IMPORTANT: after an interruption, nobody cleans up before what is under way is over or given up.
            if not operation.withdraw():
                self.wait_for(operation)
            raise
        return operation.result()

    def wait_for(self, operation: StorageCall) -> None:
        """Wait until an operation has ended.

        Raises:
            CheckpointTimeoutError: it takes too long, or another one did.
        """
        seconds = self.seconds
        step = min(seconds / 10, _LOOK_EVERY)
        waited = since_stall = 0.0
        while not operation.ended.wait(step):
            waited = 0.0 if operation.asking else waited + step
            since_stall += step if self._stalls and not operation.patient else 0.0
            if waited >= seconds and operation.give_up():
                self._stalls.append(self._message(operation))
                # What has hung first is the cause; but what may still take effect is to be known.
                raise self._timeout(self._stalls[-1 if operation.may_still_happen else 0])
            if since_stall >= _GRACE and operation.give_up():
                raise self._timeout(self._stalls[0])

    def _message(self, operation: StorageCall) -> str:
        text = (
            f"{operation.doing} has not returned for {self.seconds:g} s on rank {self._rank}; see whether that disk "
            "still answers, or raise progress_timeout"
        )
        if operation.may_still_happen:
            text += "; whether it takes effect is not known: it may do so even later, when the disk answers again"
        return text

    def _timeout(self, text: str) -> CheckpointTimeoutError:
        return CheckpointTimeoutError(text, [self._rank])

    def end_with(self, operation: StorageCall) -> None:
        """Run an operation that ends something: without waiting for it if an earlier one was given up."""
        if self._stalls:
            self.begin(operation)
        else:
            self.run(operation)

    def begin(self, operation: StorageCall) -> None:
        """Have a thread run an operation; this one if there is none, and none can be started any more."""
        with self._lock:
            helped = self._idle > 0
            if helped:
                self._idle -= 1
                self._waiting.put(operation)
        if not helped and not self._start(operation):
            operation.run()

    def _start(self, first: StorageCall | None) -> bool:
        """Start a thread, with something to do or idle; returns whether that was possible."""
        try:
            threading.Thread(target=self._serve, args=(first,), name="paddle_dist_ckpt storage", daemon=True).start()
        except RuntimeError:  # the interpreter is ending
            return False
        return True

    def _serve(self, operation: StorageCall | None) -> None:
        while True:
            if operation is not None:
                operation.run()
                operation = None  # and what it has read or written need not be kept
                with self._lock:
                    if self._closed:
                        return
                    self._idle += 1
            operation = self._waiting.get()
            if operation is None:
                return
