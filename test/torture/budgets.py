"""What a call costs: in a forked process, the memory that becomes resident and the processor time."""

from __future__ import annotations

import os
import pickle
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = ["Cost", "bytes_on_disk", "cost_of"]

T = TypeVar("T")
_HANGS = 20  # s of processor time
_MOST_TEXT = 8 << 10  # characters of an outcome, more than any message may have
_ADDRESSES = 64 << 30  # of address space, most of which is never touched


@dataclass(frozen=True, slots=True)
class Cost:
    """What became of a call: what it returned, or the name of what it raised and its text; bytes; seconds."""

    outcome: str
    kinds: tuple[str, ...]
    memory: int
    seconds: float


def bytes_on_disk(folder: Path) -> int:
    """What the files of a folder take on the disk."""
    return sum(min(status.st_blocks * 512, status.st_size) for status in map(Path.stat, folder.iterdir()))


def cost_of(work: Callable[[T], object], small: T, large: T) -> Cost:
    """Give something in a child what may be large, after what is small, so that what it needs of code is there."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            resource.setrlimit(resource.RLIMIT_CPU, (_HANGS, _HANGS))
            with suppress(Exception):
                work(small)
            before = resource.getrusage(resource.RUSAGE_SELF)
            resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, resource.RLIM_INFINITY))
            outcome, kinds = "", tuple[str, ...]()
            try:
                outcome = str(work(large))
            except BaseException as error:
                outcome, kinds = (
                    f"{type(error).__name__}: {error}",
                    tuple(kind.__name__ for kind in type(error).__mro__),
                )
            after = resource.getrusage(resource.RUSAGE_SELF)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            cost = Cost(outcome[:_MOST_TEXT], kinds, (after.ru_maxrss - before.ru_maxrss) << 10, seconds)
            os.write(writer, pickle.dumps(cost))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(pid, 0)
    assert data, f"the process ended with {status}, by a signal or the memory of the machine"
    cost = pickle.loads(data)
    assert isinstance(cost, Cost)
    return cost
