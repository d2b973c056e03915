"""Tells those who asked for it that the process got SIGTERM.

There is one handler for all of them. What was there before comes back with the first signal, so that a second one does
what it would have done anyway, and when nobody asks any more.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["on_sigterm"]

_listeners: dict[object, Callable[[], None]] = {}
_previous: Any = None


def on_sigterm(listener: Callable[[], None]) -> Callable[[], None]:
    """Have a function called, on the main thread, when SIGTERM comes. To be called there.

    Returns:
        A function that ends this. It may be called on any thread, and again.
    """
    global _previous
    if signal.getsignal(signal.SIGTERM) is not _handle:
        _previous = signal.signal(signal.SIGTERM, _handle)
    token = object()
    _listeners[token] = listener

    def end() -> None:
        _listeners.pop(token, None)
        if not _listeners and threading.current_thread() is threading.main_thread():
            _give_back()

    return end


def _handle(number: int, frame: FrameType | None) -> None:
    listeners = list(_listeners.values())
    for listener in listeners:
        listener()
    _give_back()
    if not listeners:  # the last one ended on a thread that may not change handlers
        signal.raise_signal(signal.SIGTERM)


def _give_back() -> None:
    """Put in place what was there before, unless somebody else has taken the signal meanwhile."""
    if signal.getsignal(signal.SIGTERM) is _handle:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if _previous is None else _previous)
