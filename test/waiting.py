"""Waiting for what is to happen, so that no test has to guess how long a busy machine takes for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["PATIENCE", "end_of", "until"]

PATIENCE = 60.0
"""Seconds after which a test may say that something does not happen. None of them are spent if it does."""

_T = TypeVar("_T")


def until(condition: Callable[[], _T], seconds: float = PATIENCE, what: str = "what is waited for") -> _T:
    """Ask again and again until the answer is true.

    Args:
        condition: What is asked. It is quick, and may be asked any number of times.
        seconds: The deadline; generous, as nothing but a failing test waits for so long.
        what: What is to happen, for the error.

    Returns:
        The first answer that was true.

    Raises:
        AssertionError: If there was none in time.
    """
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s; last seen: {answer!r}"
        time.sleep(0.002)
    return answer


def end_of(pid: int) -> int:
    """The exit code of a child, negative for a signal. Kills it if it hangs."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")
