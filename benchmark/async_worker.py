"""One rank of one peer that saves while it trains. See :mod:`.worker`."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from benchmark.peers import AsyncPeer, Pending
from benchmark.worker import WORLD_SIZE, Worker, serve

_WARM_UP_STEPS = 30
_STEPS_BETWEEN = 10  # so that a save, like a copy, finds the caches as a step leaves them
_STEPS_AFTER = 20  # by which what a save leaves behind would show
_START_SECONDS = 0.3
_SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[1]):
    pass
"""


class AsyncWorker(Worker):
    """Does the commands, each a method with the command's name; ``build`` and :meth:`prepare` come first.

    Args:
        peer: Name of the peer.
        rank: This process's rank.
        barrier: Connected to the other rank.
    """

    def __init__(self, peer: str, rank: int, barrier: socket.socket) -> None:
        # Cores of its own, as launchers give them: otherwise the kernel moves both to and fro, which blurs all times.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[rank::WORLD_SIZE])
        super().__init__(peer, rank, barrier)
        self._async_peer = cast(AsyncPeer, self._peer)
        self._step: Callable[[bool], bool]
        self._copy: Callable[[], None]

    def prepare(self) -> None:
        """Make what is trained and the memory that is copied to, and use both."""
        self._step = self._async_peer.trainer()
        self._copy = self._async_peer.copier(self._states["same"])
        self._train(_WARM_UP_STEPS)
        self._copy()

    def save_first(self, path: str) -> float:
        """Save for the first time, and have the state's values gone as soon as the call returns; its seconds."""
        self._meet()
        start = time.perf_counter()
        pending = self._start_save(path)
        seconds = time.perf_counter() - start
        self.zero("same")
        pending.result()
        return seconds

    def train_and_save(self, path: str, steps: int) -> dict[str, float]:
        """Train, copy the state, train and save, train.

        Args:
            path: The folder.
            steps: How many are done before and after.

        Returns:
            In seconds: ``baseline``, of those steps, all of them; ``copy``; ``stall``, until the call returned;
            ``background``, from then on until this rank's save had ended; ``during``, of the steps from the call's
            return until all ranks' saves had ended; ``total``, of the call and all steps until well after that. And the
            counts ``baseline_steps``, ``during_steps``, ``total_steps``.
        """
        gc.collect()
        with _awake():
            self._meet()
            before = self._train(steps)
            copy = _timed(self._copy)
            self._train(_STEPS_BETWEEN)
            found = self._save(path)
            after = self._train(steps)
        return {"baseline": before + after, "baseline_steps": 2 * steps, "copy": copy, **found}

    def _train(self, steps: int) -> float:
        return _timed(lambda: [self._step(True) for _ in range(steps)])

    def _save(self, path: str) -> dict[str, float]:
        start = time.perf_counter()
        pending = self._start_save(path)
        returned = time.perf_counter()
        ended, steps, ended_everywhere = 0.0, 0, False
        while not ended_everywhere:
            if not ended and pending.done():
                ended = time.perf_counter()
            ended_everywhere = self._step(bool(ended))
            steps += 1
        until = time.perf_counter()
        pending.result()
        self._train(_STEPS_AFTER)
        return {
            "stall": returned - start,
            "background": ended - returned,
            "during": until - returned,
            "during_steps": steps,
            "total": time.perf_counter() - start,
            "total_steps": steps + _STEPS_AFTER,
        }

    def _start_save(self, path: str) -> Pending:
        return self._async_peer.start_save(self._states["same"], Path(path))


@contextmanager
def _awake() -> Iterator[None]:
    """Let this process's core never halt, but for what others do on it.

    A step ends with waiting for the other rank. On a virtual machine a halted core takes so long to come back that
    whatever keeps it awake, a save too, makes steps faster, by more than it costs.
    """
    process = subprocess.Popen([sys.executable, "-c", _SPIN, str(os.getpid())], stdin=subprocess.DEVNULL)
    try:
        time.sleep(_START_SECONDS)
        yield
    finally:
        process.kill()
        process.wait()


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    serve(AsyncWorker)
