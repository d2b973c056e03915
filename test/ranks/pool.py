"""A world of ranks that is started once and sent functions to run."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from test.ranks.remote import RankError, RankLostError, RemoteError, function_name
from test.ranks.world import World

__all__ = ["RankPool"]

_START_SECONDS = 180.0
_CHECK_SECONDS = 5.0
_POLL_SECONDS = 0.5


class RankPool:
    """Warm ranks. They start with the first `run` and stay until `close`.

    A rank that dies or hangs ends the whole world, since its peers may wait for it for ever; the next `run` starts a
    new one. After a function raised, the next `run` first makes sure that all ranks still meet in their groups.

    Args:
        size: Number of ranks, all in one world.
    """

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._world: World | None = None
        self._suspect = False

    def run(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        ranks: int | Sequence[int] | None = None,
        timeout: float = 300.0,
        raises: bool = True,
    ) -> list[Any]:
        """Call ``function(*args)`` on some ranks at the same time and return what each returned.

        Args:
            function: A function at the top level of an importable module, or its name as ``module:function``.
            args: Arguments, the same on every rank. They and the results are pickled.
            ranks: Which ranks to call: all when None, the first n for an int, else these.
            timeout: Seconds that the slowest rank may take.
            raises: Raise what a rank raises. If False, a `RemoteError` stands in the place of that rank's result.

        Returns:
            One result for each rank called, in the order of ``ranks``.

        Raises:
            RankError: The function raised on one or more ranks.
            RankLostError: A rank died or took longer than ``timeout``.
        """
        world = self._checked_world()
        replies = self._call(world, function_name(function), args, self._chosen(ranks), timeout)
        errors = [reply for reply in replies if isinstance(reply, RemoteError)]
        self._suspect = bool(errors)
        if errors and raises:
            raise RankError(function_name(function), len(replies), errors)
        return replies

    def close(self) -> None:
        """Kill the ranks. A later `run` starts new ones."""
        if self._world is not None:
            self._world.close()
        self._world = None
        self._suspect = False

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chosen(self, ranks: int | Sequence[int] | None) -> list[int]:
        chosen = list(range(self.size if ranks is None else ranks) if isinstance(ranks, int | None) else ranks)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(self.size)):
            raise ValueError(f"ranks={ranks!r} must name different ranks from 0 to {self.size - 1}")
        return chosen

    def _checked_world(self) -> World:
        if self._suspect and self._world is not None:
            self._suspect = False
            everyone = list(range(self.size))
            try:
                replies = self._call(self._world, "test.ranks.groups:check_groups", (), everyone, _CHECK_SECONDS)
            except RankLostError:
                replies = []
            if not replies or any(isinstance(reply, RemoteError) for reply in replies):
                self.close()
        return self._world or self._started_world()

    def _started_world(self) -> World:
        self._world = World(self.size, groups=True)
        self._replies(self._world, list(range(self.size)), "start", _START_SECONDS)
        return self._world

    def _call(self, world: World, name: str, args: tuple[Any, ...], ranks: list[int], timeout: float) -> list[Any]:
        call = pickle.dumps((name, args))
        for rank in ranks:
            try:
                world.ranks[rank].connection.send_bytes(call)
            except OSError:
                raise self._lost(world, [rank], f"rank {rank} died before {name} was called") from None
        return self._replies(world, ranks, name, timeout)

    def _replies(self, world: World, ranks: list[int], name: str, timeout: float) -> list[Any]:
        """Return one reply for each of ``ranks``: what it returned, or a `RemoteError`."""
        deadline = time.monotonic() + timeout
        replies: dict[int, Any] = {}
        waiting = {world.ranks[rank].connection: rank for rank in ranks}
        try:
            while waiting:
                for connection in wait(waiting, min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
                    assert isinstance(connection, Connection)
                    rank = waiting[connection]
                    try:
                        _, replies[rank] = connection.recv()
                    except (EOFError, ConnectionError):
                        world.await_end(rank)
                        raise self._lost(world, [rank], f"rank {rank} died in {name}", replies) from None
                    del waiting[connection]
                if waiting and time.monotonic() > deadline:
                    late = sorted(waiting.values())
                    world.dump_stacks(late)
                    raise self._lost(world, late, f"ranks {late} took longer than {timeout:g} s in {name}", replies)
        except BaseException:
            self.close()  # a rank that was not heard out would answer the next call with this one's result
            raise
        return [replies[rank] for rank in ranks]

    def _lost(self, world: World, ranks: list[int], what: str, replies: dict[int, Any] | None = None) -> RankLostError:
        """End the world, and return an error that tells ``what`` happened and what ``ranks`` wrote to their logs."""
        raised = [reply for reply in (replies or {}).values() if isinstance(reply, RemoteError)]
        parts = [what, world.logs(ranks), *(f"--- rank {error.rank} had raised\n{error.traceback}" for error in raised)]
        self.close()
        return RankLostError("\n".join(parts), ranks)
