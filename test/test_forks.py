"""Forks of a process that runs tests."""

from __future__ import annotations

import gc
import os


def test_a_fork_does_not_end_what_was_garbage_before() -> None:
    """Paddle's may wait at its end for threads that have not come along, for ever."""
    ended: list[int] = []

    class Garbage:
        def __del__(self) -> None:
            ended.append(os.getpid())

    gc.disable()  # or it may be gone before the fork
    try:
        garbage = Garbage()
        garbage.itself = garbage  # type: ignore[attr-defined]
        del garbage
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(len(ended))
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gc.collect()
    assert ended == [os.getpid()], "garbage it was"
