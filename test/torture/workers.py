"""Processes that make attempts, one each at a time, and are killed if one takes too long."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from .suites import MEMORY, Suite, prefix

__all__ = ["Result", "Worker"]

_LOOK_EVERY = 2.0  # seconds


class Result(NamedTuple):
    """How an attempt has ended.

    Attributes:
        outcomes: What it has returned.
        seconds: How long it took.
        broken: What has gone wrong, if something has.
    """

    outcomes: Counter[str]
    seconds: float
    broken: str | None = None


class Worker:
    """A process that makes attempts. Those that it starts in turn are killed with it.

    Attributes:
        pipe: Has something to be received when an attempt has ended.
        task: What it is doing.
    """

    def __init__(self) -> None:
        self.task: tuple[Suite, int] | None = None
        self._start()

    def _start(self) -> None:
        self.pipe, far = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(far,), daemon=False)
        self._process.start()
        far.close()

    def give(self, suite: Suite, seed: int) -> None:
        """Let it make an attempt."""
        self.task, self._begun = (suite, seed), time.monotonic()
        self.pipe.send((suite, seed))

    def take(self) -> Result:
        """The result, when there is one."""
        self.task = None
        try:
            result: Result = self.pipe.recv()
        except EOFError:
            self._clear()
            result = Result(Counter(), self.seconds, f"the process has ended with {self._process.exitcode}")
            self._start()
        return result

    @property
    def seconds(self) -> float:
        """For how long it has been busy."""
        return time.monotonic() - self._begun

    def hangs(self) -> bool:
        """Whether its attempt takes too long."""
        return self.task is not None and self.seconds > self.task[0].seconds

    def kill(self) -> None:
        """End it, and what it has started."""
        with suppress(ProcessLookupError):
            assert self._process.pid is not None
            os.killpg(self._process.pid, signal.SIGKILL)
        self._clear()

    def _clear(self) -> None:
        """Remove what it has left when it ended."""
        self._process.join()
        for folder in Path(MEMORY).glob(f"{prefix(self._process.pid or 0)}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _serve(pipe: Connection) -> None:
    parent = os.getppid()
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    with suppress(EOFError):  # nobody wants anything any more
        while os.getppid() == parent:
            if pipe.poll(_LOOK_EVERY):  # other workers have this pipe too, so that it does not end with the parent
                pipe.send(_attempt(*pipe.recv()))


def _attempt(suite: Suite, seed: int) -> Result:
    begun = time.monotonic()
    try:
        return Result(suite.try_seed(seed), time.monotonic() - begun)
    except BaseException:
        return Result(Counter(), time.monotonic() - begun, traceback.format_exc())
