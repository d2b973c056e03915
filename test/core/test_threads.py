"""Tasks on threads: what an interruption of the thread that waits for them does."""

from __future__ import annotations

import _thread
import functools
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

    with pytest.raises(KeyboardInterrupt):
        run_all((functools.partial(task, number) for number in range(100)), 3, lambda: None)
    assert sorted(started) == sorted(ended)
    assert len(started) < 10
