"""Tells those who asked for it that the process got SIGTERM.

There is one handler for all of them. Launchers send the signal several times in a row, so repetitions count only some
seconds later; then, and when nobody asks any more, it does what it would have done without the handler.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["on_sigterm"]

_REPEAT_SECONDS = 10.0
_listeners: dict[object, Callable[[], None]] = {}
_previous: Any = None
_first: float | None = None
os.register_at_fork(after_in_child=_listeners.clear)  # a process that was forked does not have its parent's


def on_sigterm(listener: Callable[[], None]) -> Callable[[], None]:
    """Have a function called, on the main thread, when SIGTERM comes. To be called there.

    Returns:
        A function that ends this. It may be called on any thread, and again.
    """
    global _previous, _first
    if signal.getsignal(signal.SIGTERM) is not _handle:
        _previous, _first = signal.signal(signal.SIGTERM, _handle), None
    if not _listeners:
        _first = None
    token = object()
    _listeners[token] = listener

    def end() -> None:
        _listeners.pop(token, None)
        if not _listeners and threading.current_thread() is threading.main_thread():
            _give_back()

    return end


def _handle(number: int, frame: FrameType | None) -> None:
    global _first
    now = time.monotonic()
    # Without listeners, this was forked, or the last one ended on a thread that may not change handlers.
    if not _listeners or (_first is not None and now - _first > _REPEAT_SECONDS):
        _give_back()
        signal.raise_signal(signal.SIGTERM)
    elif _first is None:
        _first = now
        for listener in list(_listeners.values()):
            listener()


def _give_back() -> None:
    """Put in place what was there before, unless somebody else has taken the signal meanwhile."""
    if signal.getsignal(signal.SIGTERM) is _handle:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if _previous is None else _previous)
