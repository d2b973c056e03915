"""Collectives of a session, and the in-process transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.control import NoTransport, verified
from paddle_dist_ckpt.control.session import _Collectives
from paddle_dist_ckpt.core.memory import Bytes1D
from paddle_dist_ckpt.core.protocols import ControlSession, Transfers, Transport
from paddle_dist_ckpt.errors import CheckpointError
from paddle_dist_ckpt.testing.in_process import InProcessWorld
from test.interrupts import interrupted


def test_work_that_fails_ends_when_nothing_is_hashed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may free the memory as soon as it hears of the failure."""
    hashed = list[int]()

    def digest_of(data: Bytes1D, block_bytes: int) -> int:
        time.sleep(0.2)
        hashed.append(data.size)
        return 0

    def work(transfers: Transfers) -> None:
        transfers.broadcast(np.zeros(8, np.uint8), 1, 8, lambda: "x", kept=True)
        raise KeyError("x")

    monkeypatch.setattr(verified, "digest_of", digest_of)
    hub = InProcessWorld(1).hub(0)
    with pytest.raises(KeyError), hub.session("load", 100) as session:
        session.run_collectives(NoTransport(), work)
    assert hashed == [8]


MOST = 1 << 20


def test_transport_keeps_order_and_copies() -> None:
    world = InProcessWorld(3)
    first, second, third = (world.transport(rank) for rank in (0, 1, 2))
    data = np.arange(4, dtype=np.uint8)
    first.exchange({1: data, 2: data[:1]}, {}, [(0, 4)], MOST)
    data[:] = 9
    first.broadcast(data, 0, MOST)
    found = [np.zeros(4, np.uint8), np.zeros(4, np.uint8)]
    receiver: Transport = second
    receiver.exchange({}, {0: found[0]}, [(0, 4)], MOST)
    receiver.broadcast(found[1], 0, MOST)
    assert [list(each) for each in found] == [[0, 1, 2, 3], [9, 9, 9, 9]]
    small = np.full(1, 7, np.uint8)
    third.exchange({}, {0: small}, [(0, 4)], MOST)
    assert list(small) == [0]


def test_transport_checks_sizes() -> None:
    world = InProcessWorld(2)
    world.transport(0).exchange({1: np.zeros(3, np.uint8)}, {}, [(0, 3)], MOST)
    with pytest.raises(CheckpointError, match="rank 1 expected 4 bytes from rank 0, which sent 3"):
        world.transport(1).exchange({}, {0: np.zeros(4, np.uint8)}, [(0, 4)], MOST)
    with pytest.raises(CheckpointError, match="rank 0 sends 3 bytes to rank 1 where 2 were agreed"):
        world.transport(0).exchange({1: np.zeros(3, np.uint8)}, {}, [(0, 2)], MOST)


def test_an_abandoned_transport_raises() -> None:
    transport = InProcessWorld(2).transport(1)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(transport.broadcast, np.zeros(1, np.uint8), 0, MOST)
        transport.abandon()
        with pytest.raises(CheckpointError, match="abandoned"):
            blocked.result(5)
    with pytest.raises(CheckpointError, match="abandoned"):
        transport.broadcast(np.zeros(1, np.uint8), 1, MOST)


def test_no_rank_relies_on_a_collective_that_fails_on_another_one() -> None:
    """Which of them work is tried once for a connection."""

    class Stub(NoTransport):
        tried = False

        def __init__(self, *failing: str) -> None:
            self.failing, self.told = list(failing), list[Mapping[str, Sequence[int]]]()

        def try_out(self) -> list[str]:
            assert not self.tried
            return self.failing

        def rely_on_others(self, failing: Mapping[str, Sequence[int]]) -> None:
            self.tried = True
            self.told.append(failing)

    world, stubs = InProcessWorld(2), [Stub(), Stub("all-to-all")]

    def work(rank: int) -> None:
        for _ in range(2):
            with world.hub(rank).session("load", 10.0) as session:
                verified.agree_on_collectives(session, stubs[rank])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert [stub.told for stub in stubs] == [[{"all-to-all": [1]}]] * 2


@pytest.mark.parametrize("untried", [0, 1])
def test_collectives_are_tried_on_all_ranks_or_on_none(untried: int) -> None:
    """A rank may not have heard what all can rely on, which the others did."""
    meeting = threading.Barrier(2)

    class Stub(NoTransport):
        def __init__(self, tried: bool) -> None:
            self.tried = tried

        def try_out(self) -> list[str]:
            meeting.wait(10)
            return []

        def rely_on_others(self, failing: Mapping[str, Sequence[int]]) -> None:
            self.tried = True

    world, stubs = InProcessWorld(2), [Stub(rank != untried) for rank in range(2)]

    def work(rank: int) -> None:
        with world.hub(rank).session("load", 10.0) as session:
            verified.agree_on_collectives(session, stubs[rank])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert all(stub.tried for stub in stubs)
    assert not meeting.broken


def test_collectives_that_hang_keep_no_process_from_ending() -> None:
    before, goes_on = set(threading.enumerate()), threading.Event()
    task = _Collectives(NoTransport())
    result = task.start(verified.VerifiedTransfers(task, 0, ""), lambda _: goes_on.wait(5), threading.Condition())
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    goes_on.set()
    assert result.result(5)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_works_between_two_collectives_is_in_none(fails: bool) -> None:
    """Only in one is it given up if it does not get on for the timeout."""

    class Stub:
        def broadcast(self, data: Any, source: int, most: int) -> None:
            assert not task.moved_since(time.monotonic())
            if fails:
                raise CheckpointError("the network is down")

    task = _Collectives(Stub())  # type: ignore[arg-type]
    assert task.moved_since(time.monotonic())
    with pytest.raises(CheckpointError) if fails else nullcontext():
        task.broadcast(np.zeros(1, np.uint8), 0, MOST)
    assert task.since is None
    assert task.moved_since(time.monotonic())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt that Python has lost
def test_no_interrupt_leaves_work_in_collectives_of_which_nobody_knows() -> None:
    """What goes on in them would meet the operations of the other ranks' next call."""

    class Stub(NoTransport):
        is_abandoned = False

        def abandon(self) -> None:
            self.is_abandoned = True

    number, goes_on = 0, True
    while goes_on:
        transport, begun, ended = Stub(), threading.Event(), list[None]()
        with InProcessWorld(1).hub(0).session("save", 20.0) as session:

            def collect(session: ControlSession = session, transport: Stub = transport) -> None:
                ended.append(session.run_collectives(transport, lambda transfers: begun.set()))  # noqa: B023

            with suppress(RuntimeError):  # of Python's own Condition, which has lost its lock then
                goes_on = interrupted(number, collect)
        if not ended and not transport.is_abandoned:
            assert not begun.wait(0.1), f"interrupt {number} came to work that goes on"
        number += 1
    assert number > 10
