"""Ranks as threads that use the hubs of a group, and calls that all of them make."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Protocol

from ...core.protocols import Appointments, ControlHub

__all__ = [
    "AT_ONCE",
    "LONG",
    "RANKS",
    "SHORT",
    "HubGroup",
    "assert_works",
    "echo",
    "first_appointment",
    "in_background",
    "one_round",
    "own_number",
    "raising",
    "run",
    "slowly",
]

RANKS = 4
LONG = 500.0
"""A timeout that no test may wait for, nor for a tenth of it: what :func:`run` has waited for was noticed at once."""
SHORT = 0.5
AT_ONCE = 20.0


class HubGroup(Protocol):
    """The hubs of ranks 0 to ``RANKS - 1``, of which 0 is the coordinator."""

    def hub(self, rank: int) -> ControlHub:
        """The hub of a rank, always the same."""
        ...

    def cut(self, rank: int) -> None:
        """End a rank's connection as its death would."""
        ...


def run(group: HubGroup, work: Callable[[ControlHub, int], object], ranks: Sequence[int] = range(RANKS)) -> Any:
    """Call ``work(hub, rank)`` on a thread per rank; returns, by rank, what each returned or raised.

    Raises:
        AssertionError: that takes twice ``AT_ONCE`` on some.
    """
    outcomes: dict[int, Any] = {}

    def body(rank: int) -> None:
        try:
            outcomes[rank] = work(group.hub(rank), rank)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 2 * AT_ONCE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert set(outcomes) == set(ranks), f"ranks {set(ranks) - set(outcomes)} hang"
    return outcomes


def echo(parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
    """A ``combine`` that returns to each rank its own message."""
    return parts


def one_round(local: Callable[[int], bytes], timeout: float = LONG) -> Callable[[ControlHub, int], bytes]:
    """A session of one round 'write', with ``local(rank)`` as what a rank does in it."""

    def work(hub: ControlHub, rank: int) -> bytes:
        with hub.session("save", timeout) as session:
            return session.gather_scatter("write", lambda: local(rank), echo)

    return work


def own_number(rank: int) -> bytes:
    """A message that differs from rank to rank."""
    return str(rank).encode()


def assert_works(group: HubGroup, ranks: Sequence[int] = range(RANKS)) -> None:
    """The next session succeeds."""
    assert run(group, one_round(own_number), ranks) == {rank: own_number(rank) for rank in ranks}


def raising(errors: Mapping[int, BaseException]) -> Callable[[int], bytes]:
    """A ``local`` that raises on some ranks."""

    def local(rank: int) -> bytes:
        if rank in errors:
            raise errors[rank]
        return b""

    return local


def slowly(local: Callable[[int], bytes] = own_number, seconds: float = 0.1) -> Callable[[int], bytes]:
    """A ``local`` that takes its time."""

    def work(rank: int) -> bytes:
        time.sleep(seconds)
        return local(rank)

    return work


def in_background(
    hub: ControlHub, local: Callable[[int], bytes], rounds: int = 1, timeout: float = LONG
) -> Future[bytes]:
    """Open a session here, then use and close it on a thread of its own."""
    opened = ExitStack()
    session = opened.enter_context(hub.session("save", timeout))
    result: Future[bytes] = Future()

    def body() -> None:
        reply = b""
        try:
            with opened:
                for number in range(rounds):
                    reply = session.gather_scatter(f"r{number}", lambda: local(session.rank), echo)
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(reply)

    threading.Thread(target=body, daemon=True).start()
    return result


def first_appointment(appointments: Appointments, wish_at: int | None = None) -> int:
    """Go on, step by step, until there is an appointment."""
    for step in itertools.count():
        if appointments.reach(step, wish=step == wish_at):
            return step
        time.sleep(0.0005)
    raise AssertionError("there is no end of steps")
