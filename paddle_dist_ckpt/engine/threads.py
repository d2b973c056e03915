"""Running the tasks of one rank's I/O on a few threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

__all__ = ["io_threads", "run_all"]

_MOST_THREADS = 4


def io_threads(ranks_on_host: int, waits: bool) -> int:
    """How many threads a rank should use for I/O and hashing: its part of the host's cores, at most 4.

    Args:
        ranks_on_host: How many ranks share the cores.
        waits: Whether threads wait for a disk, so that even on one core two of them get more done than one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2 if waits else 1, min(_MOST_THREADS, cores // max(1, ranks_on_host)))


def run_all(tasks: Iterable[Callable[[], None]], threads: int, check: Callable[[], None]) -> None:
    """Run the tasks, several at a time. The first that fails ends the rest, and its exception is raised.

    Args:
        tasks: What to run.
        threads: How many threads.
        check: Called between tasks; may raise to stop them.
    """
    if threads == 1:
        for task in tasks:
            check()
            task()
        return

    def checked(task: Callable[[], None]) -> None:
        check()
        task()

    with ThreadPoolExecutor(threads, thread_name_prefix="paddle_dist_ckpt") as pool:
        futures: list[Future[None]] = [pool.submit(checked, task) for task in tasks]
        wait(futures, return_when=FIRST_EXCEPTION)
        pool.shutdown(wait=True, cancel_futures=True)
    for future in futures:
        if not future.cancelled():
            future.result()
