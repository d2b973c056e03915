"""Interrupts, as Ctrl-C makes them, at a chosen place: where Python lets the handlers of signals run, calls begin."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

__all__ = ["interrupted"]


def interrupted(number: int, work: Callable[[], object]) -> bool:
    """Have an interrupt come in some work where the call of this number begins; returns whether there are so many."""
    calls = itertools.count()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and next(calls) == number:
            sys.settrace(None)
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):  # it may be lost in what Python calls by itself
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(None)
    return next(calls) > number
