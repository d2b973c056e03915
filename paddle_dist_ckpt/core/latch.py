"""What one thread sets for others that wait for it, and no interrupt leaves locked."""

from __future__ import annotations

import threading
from contextlib import suppress

__all__ = ["Latch"]


class Latch:
    """As :class:`threading.Event`, but that a signal's handler may raise in it at any moment.

    An Event's methods are Python around a lock. An interrupt in one of them, such as Ctrl-C, may leave that taken, and
    who sets the Event after that, or waits for it, waits without end; so do the other ranks then.
    """

    def __init__(self) -> None:
        self._set = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._set

    def set(self) -> None:
        """Set it, for good."""
        self._set = True  # first: who is interrupted after this has set it, and who waits looks now and then
        with suppress(RuntimeError):  # it is open already
            self._closed.release()

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, for so many seconds at most; returns whether it is."""
        if not self._set and self._closed.acquire(timeout=seconds):
            with suppress(RuntimeError):  # it was set once more just now
                self._closed.release()  # for others that wait
        return self._set
