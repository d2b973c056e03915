"""Forked processes that do one thing and send back how it ended, unless they are killed or stopped first."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from test.waiting import PATIENCE

__all__ = ["Child", "Failed"]


@dataclass(frozen=True, slots=True)
class Failed:
    """What a child has raised: its type and the types that this is one of, by name; its text; failed ranks, if said."""

    kinds: tuple[str, ...]
    text: str
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """An error in words."""
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return cls(kinds, str(error), tuple(getattr(error, "failures", None) or getattr(error, "missing_ranks", ())))


class Child:
    """A process that is forked to call ``work``; a context manager, which ends it.

    The process that forks should have one thread: others do not exist in the child, but the locks that they hold do.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reader)
            _run(work, writer)
        os.close(writer)
        self._status: int | None = None
        self._received, self._ended = b"", False

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._reader)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self._status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._wait(0)

    def thaw(self) -> None:
        """Let it go on if it is stopped."""
        os.kill(self.pid, signal.SIGCONT)

    def is_stopped(self) -> bool:
        """Wait until it stops (True) or has ended (False)."""
        return os.WIFSTOPPED(self._wait(os.WUNTRACED))

    def _wait(self, options: int) -> int:
        _, status = os.waitpid(self.pid, options)
        if not os.WIFSTOPPED(status):
            self._status = status
        return status

    def wait(self, seconds: float = PATIENCE) -> None:
        """Wait until ``work`` has ended, or the process.

        Raises:
            AssertionError: it does not.
        """
        deadline = time.monotonic() + seconds
        while not self._ended:
            ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"a process hangs for {seconds} s"
            part = os.read(self._reader, 1 << 16)
            self._received += part
            self._ended = not part

    def result(self, seconds: float = PATIENCE) -> Any:
        """What ``work`` has returned, or `Failed`; None if the process was killed.

        Raises:
            AssertionError: it does not end, or ended in another way.
        """
        self.wait(seconds)
        status = self._wait(0) if self._status is None else self._status
        if self._received:
            return pickle.loads(self._received)
        assert os.WIFSIGNALED(status), f"a process ended with {status}"
        assert os.WTERMSIG(status) == signal.SIGKILL, f"a process was ended by signal {os.WTERMSIG(status)}"
        return None


def _run(work: Callable[[], Any], writer: int) -> None:
    try:
        try:
            message = pickle.dumps(work())
        except BaseException as error:
            message = pickle.dumps(Failed.of(error))
        while message:
            message = message[os.write(writer, message) :]
    finally:
        os._exit(0)
