"""A training in whose course a rank saves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmark.peers.base import Checkpointer

__all__ = ["Training"]

_START_SECONDS = 0.3
_SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[1]):
    pass
"""


class Training:
    """What a rank trains, and the memory that it copies to.

    Args:
        peer: What trains, copies and saves.
        state: What is saved.
    """

    def __init__(self, peer: Checkpointer, state: Any) -> None:
        self._peer, self._state = peer, state
        self._step = peer.trainer()
        self._copy = peer.copier(state)

    def warm_up(self, steps: int) -> None:
        """Train and copy."""
        self._train(steps)
        self._copy()

    def train_for(self, seconds: float) -> None:
        """Train until this much time has passed on all ranks."""
        start = time.perf_counter()
        while not self._step(time.perf_counter() - start >= seconds):
            pass

    def turn(
        self, meet: Callable[[], None], path: str, steps: int, steps_between: int, steps_after: int
    ) -> dict[str, float]:
        """Train, copy the state, train and save, train.

        Args:
            meet: Waits for the other ranks.
            path: The folder.
            steps: How many are done before and after.
            steps_between: How many are done after the copy.
            steps_after: How many still count as the save's when it has ended.

        Returns:
            In seconds: ``baseline``, of those steps, all of them; ``copy``; ``stall``, until the call returned;
            ``background``, from then on until this rank's save had ended; ``during``, of the steps from the call's
            return until all ranks' saves had ended; ``total``, of the call and all steps until well after that. And the
            counts ``baseline_steps``, ``during_steps``, ``total_steps``.
        """
        with _awake():
            meet()
            before = self._train(steps)
            copy = _timed(self._copy)
            self._train(steps_between)
            found = self._save(path, steps_after)
            after = self._train(steps)
        return {"baseline": before + after, "baseline_steps": 2 * steps, "copy": copy, **found}

    def _train(self, steps: int) -> float:
        return _timed(lambda: [self._step(True) for _ in range(steps)])

    def _save(self, path: str, steps_after: int) -> dict[str, float]:
        start = time.perf_counter()
        pending = self._peer.start_save(self._state, Path(path))
        returned = time.perf_counter()
        ended, steps, ended_everywhere = 0.0, 0, False
        while not ended_everywhere:
            if not ended and pending.done():
                ended = time.perf_counter()
            ended_everywhere = self._step(bool(ended))
            steps += 1
        until = time.perf_counter()
        pending.result()
        self._train(steps_after)
        return {
            "stall": returned - start,
            "background": ended - returned,
            "during": until - returned,
            "during_steps": steps,
            "total": time.perf_counter() - start,
            "total_steps": steps + steps_after,
        }


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
