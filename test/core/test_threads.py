"""Tasks on threads: what an interruption of the thread that waits for them does."""

from __future__ import annotations

import _thread
import functools
import signal
import threading
import time

import pytest

from paddle_dist_ckpt.core.threads import run_all


def test_nothing_runs_any_more_when_an_interruption_is_raised() -> None:
    lock, started, ended = threading.Lock(), list[int](), list[int]()

    def task(number: int) -> None:
        with lock:
            started.append(number)
        if number == 1:
            _thread.interrupt_main()
        time.sleep(0.2)
        with lock:
            ended.append(number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs do not have
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all((functools.partial(task, number) for number in range(100)), 3, lambda: None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(started) == sorted(ended)
    assert len(started) < 10
