"""Functions that test_pool.py sends to ranks."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from test.ranks.groups import group_of


class RichError(Exception):
    """An exception with attributes of several kinds."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.missing_ranks = (1, 2)
        self.failures = {3: ValueError("inner")}
        self.lock = threading.Lock()


def rank_and(*values: object) -> tuple[object, ...]:
    """Return this rank and the arguments."""
    return (dist.get_rank(), *values)


def slow_first(seconds: float) -> int:
    """Return this rank, the later the lower it is."""
    time.sleep(seconds / (1 + dist.get_rank()))
    return dist.get_rank()


def threads_and_device() -> tuple[str, str]:
    """Return how many threads OpenMP may use, and the device."""
    return os.environ["OMP_NUM_THREADS"], paddle.get_device()


def sum_over(size: int) -> float:
    """Add up the ranks of the first ``size``."""
    value = paddle.to_tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=group_of(size))
    return float(value)


def ranks_of(size: int) -> tuple[list[int], int]:
    """Return the members of a group, and the place of this rank in it."""
    group = group_of(size)
    return list(group.ranks), int(group.rank)


def sum_over_new_groups(count: int) -> list[float]:
    """Add up the ranks of ``count`` new groups of ranks 1 and above."""
    members = list(range(1, dist.get_world_size()))
    sums = []
    for _ in range(count):
        group = dist.new_group(members, backend="gloo")
        value = paddle.to_tensor([float(dist.get_rank())])
        if dist.get_rank() in members:
            dist.all_reduce(value, group=group)
        sums.append(float(value))
    return sums


def raise_on(ranks: list[int]) -> int:
    """Raise on ``ranks``, return the rank on others."""
    if dist.get_rank() in ranks:
        raise RichError(f"boom on {dist.get_rank()}")
    return dist.get_rank()


def raise_out_of_step(rank: int) -> None:
    """Let all but ``rank`` start a sum that never completes, and give up on it."""
    if dist.get_rank() != rank:
        threading.Thread(target=dist.all_reduce, args=(paddle.ones([1]),), daemon=True).start()
        time.sleep(0.2)
    raise ValueError("out of step")


def missing_file() -> None:
    """Raise the error of a file that does not exist."""
    Path("/no/such/file").read_bytes()


def unpicklable() -> Any:
    """Return what cannot be sent back."""
    return threading.Lock()


def kill_rank(rank: int) -> int:
    """Kill one rank while the others wait for it."""
    if dist.get_rank() == rank:
        print("these are the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return dist.get_rank()


def hang_here(rank: int, directory: str | None = None) -> int:
    """Let one rank sleep longer than the test waits, after all have left a file if there is a directory for it."""
    if directory is not None:
        Path(directory, str(dist.get_rank())).touch()
    if dist.get_rank() == rank:
        time.sleep(60)
    return dist.get_rank()


def hang_at_the_very_end(directory: str) -> None:
    """Let the process wait for ever after Python has ended. A file has its id for its name."""
    Path(directory, str(os.getpid())).touch()
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.pause, None, None)


def process_id() -> int:
    """Return the id of the rank's process."""
    return os.getpid()


def left_to_chance() -> tuple[object, ...]:
    """Return what differs between processes: hashes and addresses, what is drawn from generators without a seed."""
    return hash("any text"), id(dist), random.random(), float(np.random.random()), float(paddle.rand([1]))


def touch_and_wait(directory: str) -> int:
    """Leave a file named after the rank, then wait until it is told to go on."""
    Path(directory, str(dist.get_rank())).touch()
    while not Path(directory, "go").exists():
        time.sleep(0.02)
    return dist.get_rank()
