"""Tasks on threads: what an interruption of the thread that waits for them does."""

from __future__ import annotations

import _thread
import errno
import functools
import itertools
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from paddle_dist_ckpt.core import threads
from paddle_dist_ckpt.core.latch import Latch
from paddle_dist_ckpt.core.threads import Beside, io_threads, run_all
from test.interrupts import interrupted
from test.waiting import PATIENCE


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


def test_a_generator_of_tasks_is_closed_when_an_interruption_is_raised() -> None:
    given_back = threading.Event()

    def tasks() -> Iterator[Callable[[], None]]:
        try:
            yield _thread.interrupt_main
            while True:
                yield functools.partial(time.sleep, 0.01)
        finally:
            given_back.set()

    unfinished = tasks()  # which is not closed by being forgotten
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all(unfinished, 2, lambda: None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert given_back.is_set()


def test_the_only_task_is_run_by_the_thread_that_asks() -> None:
    ran: list[threading.Thread] = []
    run_all(iter([lambda: ran.append(threading.current_thread())]), 4, lambda: None)
    assert ran == [threading.current_thread()]


@pytest.mark.parametrize("threads", [2, 3])
def test_as_many_tasks_run_at_once_as_there_are_threads(threads: int) -> None:
    meeting, ran = threading.Barrier(threads), set[int]()

    def task() -> None:
        meeting.wait(30)
        ran.add(threading.get_ident())

    run_all([task] * threads, threads, lambda: None)
    assert len(ran) == threads
    assert threading.get_ident() in ran


@pytest.mark.parametrize("fails", ["the first task", "taking the second", "taking the third"])
def test_what_has_been_taken_is_run_although_something_fails(fails: str) -> None:
    """A task may hold memory that a device is filling, and gives it back when it runs."""
    made, ran = list[int](), list[int]()

    def task(number: int) -> None:
        ran.append(number)
        if fails == "the first task" and number == 0:
            raise ValueError("failed")

    def tasks() -> Iterator[Callable[[], None]]:
        for number in range(10):
            if fails == {1: "taking the second", 2: "taking the third"}.get(number):
                raise ValueError("failed")
            made.append(number)
            yield functools.partial(task, number)

    with pytest.raises(ValueError, match="failed"):
        run_all(tasks(), 2, lambda: None)
    assert sorted(ran) == made


@pytest.mark.parametrize("possible", [0, 1])
def test_tasks_are_run_by_as_many_threads_as_there_can_be(monkeypatch: pytest.MonkeyPatch, possible: int) -> None:
    ran, started, start = list[int](), list[threading.Thread](), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started) == possible:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    run_all((functools.partial(ran.append, number) for number in range(50)), 4, lambda: None)
    assert sorted(ran) == list(range(50))
    assert len(started) == possible


def test_tasks_beside_their_owner_run_in_order() -> None:
    beside, order = Beside("test"), list[int]()
    gate = threading.Event()
    results = [beside.start(functools.partial(gate.wait, 30))]
    results += [beside.start(functools.partial(order.append, number)) for number in range(5)]
    assert order == []
    gate.set()
    assert results[0].result(30) is True
    results[-1].result(30)
    assert order == list(range(5))


def test_a_task_beside_its_owner_that_fails_stops_no_other() -> None:
    beside = Beside("test")
    for _ in range(2):
        failing, other = beside.start(lambda: 1 // 0), beside.start(lambda: 3)
        assert other.result(30) == 3
        with pytest.raises(ZeroDivisionError):
            failing.result(30)


def test_who_finishes_waits_for_all_tasks_beside() -> None:
    beside, ended = Beside("test"), list[int]()
    beside.finish()  # there are none

    def slow(number: int) -> None:
        time.sleep(0.05)
        ended.append(number)

    for number in range(3):
        beside.start(functools.partial(slow, number))
    beside.finish()
    assert ended == [0, 1, 2]


def test_tasks_beside_their_owner_share_a_thread_until_the_owner_finishes() -> None:
    beside = Beside("test")
    threads = [beside.start(threading.current_thread).result(30) for _ in range(3)]
    assert len(set(threads)) == 1
    beside.finish()
    assert not threads[0].is_alive()
    other = beside.start(threading.current_thread).result(30)
    assert other is not threads[0]
    beside.finish()
    assert not other.is_alive()


def test_nothing_is_kept_of_a_task_beside_that_has_ended() -> None:
    class Memory:
        pass

    beside, memory = Beside("test"), Memory()
    gone = weakref.ref(memory)
    beside.start(functools.partial(lambda _: None, memory)).result(30)
    del memory
    until = time.monotonic() + 30
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.001)
    assert gone() is None
    beside.finish()


def test_a_thread_beside_that_cannot_be_started_leaves_nothing_to_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    beside, ran = Beside("test"), list[int]()

    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            beside.start(functools.partial(ran.append, 1))
        beside.finish()
    beside.start(functools.partial(ran.append, 2)).result(30)
    beside.finish()
    assert ran == [2]


def each_place(work: Callable[[], object]) -> None:
    """Have an interrupt come at each call in some work. That must not wait without end, whatever thread it is on."""
    came = [True]
    for number in itertools.count():
        came.clear()
        thread = threading.Thread(target=lambda n=number: came.append(interrupted(n, work)), daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert came, f"an interrupt at call {number} is never over"
        if not came[0]:
            return


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt that Python has lost
def test_an_interruption_is_over_wherever_it_comes() -> None:
    """Also in what the thread does that waits for the others, which then must not wait for itself."""
    each_place(lambda: run_all((functools.partial(time.sleep, 0) for _ in range(6)), 3, lambda: None))


def test_a_latch_can_be_set_and_waited_for_after_an_interruption() -> None:
    def use(latch: Latch) -> None:
        latch.wait(0)
        latch.set()
        latch.wait(0)

    found = list[bool]()

    def work() -> None:
        for number in itertools.count():
            latch = Latch()
            came = interrupted(number, functools.partial(use, latch))
            latch.set()
            found.append(latch.wait(PATIENCE))
            if not came:
                return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert len(found) > 5
    assert all(found)


def test_a_latch_wakes_all_that_wait() -> None:
    latch = Latch()
    assert not latch.wait(0)
    assert not latch.is_set()
    found = list[bool]()
    threads = [threading.Thread(target=lambda: found.append(latch.wait(PATIENCE))) for _ in range(3)]
    for thread in threads:
        thread.start()
    latch.set()
    latch.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [True] * 3
    assert latch.wait(0)


def test_a_sandbox_that_does_not_tell_which_cores_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(process: int) -> set[int]:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(threads.os, "sched_getaffinity", refused)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 3)
    assert io_threads(1, False) == 3
