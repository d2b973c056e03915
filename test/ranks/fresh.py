"""Ranks of a world of their own, for tests that kill them or look at how they end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from test.ranks.remote import RemoteError, function_name
from test.ranks.world import RankProcess, World

__all__ = ["FreshRanks", "RankExit", "fresh_ranks", "logs_of"]

_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank ended.

    Attributes:
        rank: The rank.
        exit_code: 0 after the function returned, 1 after it raised, -9 after SIGKILL.
        result: What the function returned, else None.
        error: What the function raised, else None.
        log: The end of what the rank printed.
        timed_out: It was killed because it ran past the timeout; its log has its stack.
    """

    rank: int
    exit_code: int
    result: Any
    error: RemoteError | None
    log: str
    timed_out: bool


def logs_of(ends: Iterable[RankExit]) -> str:
    """How ranks ended, and all that is known of what they printed, to be shown by a test that fails."""
    return "\n".join(
        f"rank {end.rank}: exit code {end.exit_code}, timed out: {end.timed_out}\n{end.log}" for end in ends
    )


class FreshRanks:
    """New processes in a world of their own, which run one function or script each and then end.

    A context manager, that kills what is left when it is closed::

        with FreshRanks(2, cases.save_forever, path) as ranks:
            wait_for(path / "0.metadata")
            ranks.kill(1)
            first, second = ranks.wait()

    Args:
        size: Number of ranks.
        target: A function at the top level of an importable module, its name as ``module:function``, or the path of
            a Python file, which runs as the main program of a rank that has joined the world.
        args: Arguments of the function, or of the script.
        env: Environment variables to set on top of this process's own.
        at_import: Those of ``env`` that Paddle reads when it is imported: with this, the ranks are forked. See `World`.
    """

    def __init__(
        self,
        size: int,
        target: Callable[..., Any] | str | Path,
        *args: Any,
        env: Mapping[str, str] | None = None,
        at_import: Mapping[str, str] | None = None,
    ) -> None:
        call: tuple[str, tuple[Any, ...]]
        if isinstance(target, Path):
            call = "test.ranks.worker:run_script", (str(target), *map(str, args))
        else:
            call = function_name(target), args
        self._world = World(size, env=env, at_import=at_import)
        for rank in self._world.ranks:
            rank.connection.send(call)
            rank.connection.send(None)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        self._world.ranks[rank].process.send_signal(number)

    def result(self, rank: int) -> Any:
        """What the function has returned on one rank; None if it has not yet, whatever the others do."""
        replies: dict[int, Any] = {}
        _drain(self._world.ranks[rank], replies)
        return replies.get(rank)

    def wait(self, timeout: float = 120.0) -> list[RankExit]:
        """Wait until all ranks have ended, and kill those that have not after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        replies: dict[int, Any] = {}
        running = list(self._world.ranks)
        while running and time.monotonic() < deadline:
            for rank in running:
                _drain(rank, replies)
            running = [rank for rank in running if rank.process.poll() is None]
            time.sleep(_POLL_SECONDS)
        late = [rank.rank for rank in running]
        if late:
            self._world.dump_stacks(late)
            for each in late:
                self.kill(each)
        return [_exit(rank, replies, rank.rank in late) for rank in self._world.ranks]

    def close(self) -> None:
        """Kill the ranks that still run."""
        self._world.close()

    def __enter__(self) -> FreshRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            running = [each.rank for each in self._world.ranks if each.process.poll() is None]
            self._world.dump_stacks(running)
            print(self._world.logs(range(len(self._world.ranks))))  # which pytest shows if the test fails
        self.close()


def fresh_ranks(
    size: int,
    target: Callable[..., Any] | str | Path,
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    at_import: Mapping[str, str] | None = None,
) -> list[RankExit]:
    """Run ``target`` in ``size`` new processes and return how each ended. See `FreshRanks`."""
    with FreshRanks(size, target, *args, env=env, at_import=at_import) as ranks:
        return ranks.wait(timeout)


def _drain(rank: RankProcess, replies: dict[int, Any]) -> None:
    """Take what ``rank`` has sent, if anything; its last word is its reply."""
    try:
        while rank.connection.poll():
            kind, value = rank.connection.recv()
            if kind != "ready":
                replies[rank.rank] = value
    except (EOFError, ConnectionError):
        return


def _exit(rank: RankProcess, replies: dict[int, Any], timed_out: bool) -> RankExit:
    code = rank.process.wait()
    _drain(rank, replies)
    reply = replies.get(rank.rank)
    error = reply if isinstance(reply, RemoteError) else None
    return RankExit(rank.rank, code, None if error else reply, error, rank.log_tail(), timed_out)
