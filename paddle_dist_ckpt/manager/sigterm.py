"""Tells those who asked for it that the process got SIGTERM.

There is one handler for all of them. Launchers send the signal several times in a row, so repetitions count only some
seconds later; then, and when nobody asks any more, it does what it would have done without the handler. If those who
asked have done what the signal was for, the handler stays for so long, since it would be repeated to what comes next.
If none of them has by the time that the last one ends, it does then what it would have done.

Others may put a handler of theirs on top and call this one from it, and that for as long as the process lives. So what
was there before is remembered, of each time that this one was installed.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

__all__ = ["on_sigterm"]

_REPEAT_SECONDS = 10.0
_listeners: dict[object, Callable[[], None]] = {}
_before: list[Any] = []  # what was there each time that `_handle` was put in place, the latest last
_passing = 0  # how many of those are being called at the moment, for they may have been put on top of `_handle` as well
_first: float | None = None  # when the signal came whose repetitions do not count
_served = False  # whether one of those who have ended has done what it was for


def on_sigterm(listener: Callable[[], None]) -> Callable[..., None]:
    """Have a function called, on the main thread, when SIGTERM comes. To be called there.

    Returns:
        A function that ends this. It may be called on any thread, and again. It takes whether the signal has been
        served: then its repetitions still do not count, nor does the first one, if another rank has told of it that got
        it earlier. By default it has not; if none of those who have asked has served one that came, the last to end has
        it do what it would have done. Not so if it is told that an exception is on its way, which is to be seen.
    """
    global _first, _served
    if signal.getsignal(signal.SIGTERM) is not _handle:
        _before.append(signal.signal(signal.SIGTERM, _handle))
        _first = None
    if not _listeners:
        _first, _served = None, False
    token = object()
    _listeners[token] = listener

    def end(served: bool = False, raising: bool = False) -> None:
        global _first, _served
        is_own = signal.getsignal(signal.SIGTERM) is _handle
        is_main = threading.current_thread() is threading.main_thread()
        _served = _served or served
        _listeners.pop(token, None)
        if _served and _first is None and not _listeners:
            _first = time.monotonic()
        is_left = _first is not None and not _served and not _listeners and not raising
        if is_left:
            _first = None  # or the next one who asks would be taken to be repeating it
        if not _listeners and not _is_repeated() and is_main:
            _give_back()
        if is_left and is_main and not is_own:  # who is on top has heard of it, and called the handler
            _pass_on(signal.SIGTERM, None)
        elif is_left:
            signal.raise_signal(signal.SIGTERM)

    return end


def _forget() -> None:
    """In a process that was forked, which does not have its parent's listeners."""
    global _first, _served
    _listeners.clear()
    _first, _served = None, False


def _ignore() -> None:
    """When the interpreter ends, which takes its handlers away before the process has ended."""
    if _is_repeated() and signal.getsignal(signal.SIGTERM) is _handle:
        with suppress(ValueError):  # not on the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


os.register_at_fork(after_in_child=_forget)
atexit.register(_ignore)


def _is_repeated() -> bool:
    """Whether a signal that comes now would repeat one that somebody acts on, or has acted on."""
    heard = bool(_listeners) or _served
    return heard and _first is not None and time.monotonic() - _first <= _REPEAT_SECONDS


def _handle(number: int, frame: FrameType | None) -> None:
    global _first, _served
    if _is_repeated():
        return
    # Without listeners, this was forked, or the last one ended on another thread, or with repetitions to come.
    if not _listeners or _first is not None:
        _pass_on(number, frame)
        return
    _first, _served = time.monotonic(), False
    for listener in list(_listeners.values()):
        listener()


def _give_back() -> bool:
    """Put in place what was there before; returns False if somebody else has taken the signal meanwhile."""
    if signal.getsignal(signal.SIGTERM) is not _handle:
        return False
    before = _before[-1] if _before else None
    signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
    del _before[-1:]  # and not before: after an interrupt it is to be put in place yet
    return True


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Do what the signal would have done without the handler."""
    global _passing
    if _give_back():
        signal.raise_signal(signal.SIGTERM)
        return
    # It is called by what was put on top of it, which would only call it again.
    before = _before[-1 - _passing] if _passing < len(_before) else None
    if callable(before):
        _passing += 1
        try:
            before(number, frame)
        finally:
            _passing -= 1
    elif before != signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
