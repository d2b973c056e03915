"""Interrupts, as Ctrl-C makes them, at a chosen place: where Python lets the handlers of signals run, calls begin."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

__all__ = ["interrupted"]

# Thread.start of Python 3.13 calls this when the thread is listed already, but has not begun, and takes it off the list
# for an Exception only: after an interrupt threading.enumerate() has a thread for ever that has never begun, and later
# tests would wait for its end.
_WHEN_LISTED = vars(threading.Thread)["daemon"].fget.__code__


def interrupted(number: int, work: Callable[[], object]) -> bool:
    """Have an interrupt come in some work where the call of this number begins; returns whether there are so many."""
    calls = itertools.count()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is not _WHEN_LISTED and next(calls) == number:
            sys.settrace(None)
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):  # it may be lost in what Python calls by itself
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(None)
    return next(calls) > number
