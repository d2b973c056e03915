"""Running the tasks of one rank's I/O on a few threads."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 (Paddle needs it, and when the interpreter ends it cannot be imported)
import itertools
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["Beside", "after_fork", "at_exit", "io_threads", "lower_priority", "run_all"]

T = TypeVar("T")

_MOST_THREADS = 4
_LOWEST_PRIORITY = 19


def io_threads(ranks_on_host: int, waits: bool) -> int:
    """How many threads a rank should use for I/O and hashing: its part of the host's cores, at most 4.

    Args:
        ranks_on_host: How many ranks share the cores.
        waits: Whether threads wait for a disk, so that even on one core two of them get more done than one.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # a platform without it, or a sandbox that does not allow it
        cores = os.cpu_count() or 1
    return max(2 if waits else 1, min(_MOST_THREADS, cores // max(1, ranks_on_host)))


def lower_priority(nice: int = _LOWEST_PRIORITY) -> None:
    """Let this thread alone (Linux) run only where nothing else wants the core, for it is in nobody's way then.

    With a smaller ``nice``, it also gets a part of a core that is never idle: of 10, about a tenth.

    Not SCHED_IDLE: on a host whose cores are all busy, that may never run.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # not allowed here; it then competes as an equal
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, max(nice, os.getpriority(os.PRIO_PROCESS, own)))


def at_exit() -> bool:
    """Whether the interpreter is ending, so that no thread can be started any more: in ``atexit`` functions."""
    return not threading.main_thread().is_alive()


def after_fork(method: Callable[[], object]) -> None:
    """Have a method called in every process that is forked from this one, as long as its object is there."""
    made = weakref.WeakMethod(method)

    def call() -> None:
        found = made()
        if found is not None:
            found()

    os.register_at_fork(after_in_child=call)


def run_all(tasks: Iterable[Callable[[], None]], threads: int, check: Callable[[], None]) -> None:
    """Run the tasks, several at a time. The first that fails ends the rest, and its exception is raised.

    This thread runs tasks as well, and all of them if there is but one: another thread may cost more than a small task.

    Args:
        tasks: What to run. Each is taken, by one thread at a time, when a thread is free to run it, and is run then. A
            generator is closed at the end.
        threads: How many threads.
        check: Called between tasks; may raise to stop them.
    """
    run = _Run(tasks, check)
    try:
        run.on(1 if at_exit() else threads)
    except BaseException as error:  # an interruption, after which files are closed in which the threads still work
        run.failures.insert(0, error)
        run.wait()
    run.end()
    if run.failures:
        raise run.failures[0]


class _Run:
    """Tasks that are being run.

    Attributes:
        failures: What they have raised, an interruption first.
    """

    def __init__(self, tasks: Iterable[Callable[[], None]], check: Callable[[], None]) -> None:
        self._tasks, self._check = iter(tasks), check
        self._taken: list[Callable[[], None]] = []  # ahead of their turn
        self._lock, self._ended = threading.Lock(), threading.Condition()
        self._working: set[int] = set()
        self.failures: list[BaseException] = []

    def on(self, threads: int) -> None:
        """Run all on this thread and others, unless there are too few for these."""
        if threads > 1:
            for task in itertools.islice(self._tasks, 2):
                self._taken.append(task)
        # Not by a pool: one that is interrupted may not know of a thread that it has started, and that waits for ever.
        others = threads - 1 if len(self._taken) > 1 else 0
        workers = list[threading.Thread]()
        with suppress(RuntimeError):  # there can be no more threads: those that there are do it all
            for number in range(others):
                # A daemon: one whose start was interrupted may wait for ever, and the end of the process would for it.
                worker = threading.Thread(target=self._work_beside, name=f"paddle_dist_ckpt_{number}", daemon=True)
                worker.start()
                workers.append(worker)
        self._work()
        for worker in workers:
            worker.join()

    def wait(self) -> None:
        """Wait until no other thread works any more."""
        with self._ended:
            self._ended.wait_for(lambda: not self._working)

    def end(self) -> None:
        """Close a generator of tasks."""
        if isinstance(self._tasks, Generator):
            for task in self._taken:  # it has failed before they could run; they may hold memory that is being filled
                with suppress(BaseException):
                    task()
            self._tasks.close()

    def _work_beside(self) -> None:
        # IMPORTANT: not of the thread that runs all, which may be interrupted within this, and would wait for itself.
        self._working.add(threading.get_ident())
        try:
            self._work()
        finally:
            with self._ended:
                self._working.remove(threading.get_ident())
                self._ended.notify()

    def _work(self) -> None:
        try:
            while not self.failures:
                task = self._take()
                if task is None:
                    return
                task()
        except Exception as error:
            self.failures.append(error)
        except BaseException as error:  # an interruption, if this is the main thread
            self.failures.insert(0, error)

    def _take(self) -> Callable[[], None] | None:
        with self._lock:
            self._check()
            if self.failures:
                return None
            return self._taken.pop(0) if self._taken else next(self._tasks, None)


class Beside:
    """Runs tasks beside its owner, one after the other, on a thread that lives from the first one to :meth:`finish`.

    Only the owner's thread calls it. The other one is a daemon, so nobody waits for a task whose owner has been given
    up: if the owner hangs, the thread stays as well, and does nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, task: Callable[[], T]) -> Future[T]:
        """Have a task run when those before it have ended."""
        result: Future[T] = Future()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"paddle_dist_ckpt {self._name}", daemon=True)
            thread.start()  # raises where there can be no more threads: nothing is to be finished then
            self._thread = thread
        self._tasks.put((task, result))
        return result

    def finish(self) -> None:
        """Wait until all tasks have ended, which use their owner's memory no more then, and end the thread."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (one := self._tasks.get()) is not None:
            task, result = one
            try:
                result.set_result(task())
            except BaseException as error:
                result.set_exception(error)
            del one, task, result  # not to be kept until the next one comes
