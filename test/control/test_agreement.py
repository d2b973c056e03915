"""Ranks that name different coordinators, or one that there is not: every rank hears of it at once."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paddle_dist_ckpt.control import AgreedHub, RefusingHub
from paddle_dist_ckpt.control.board import Board
from paddle_dist_ckpt.control.session import Ending, Session
from paddle_dist_ckpt.core.protocols import ControlHub
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError, RankFailureError
from paddle_dist_ckpt.testing.in_process import InProcessWorld

RANKS = 3
LONG = 200.0
SHORT = 0.3
AT_ONCE = 10.0


class Job:
    """Ranks in one process, whose calls may name any of them as the coordinator; rank 0 is the first one."""

    def __init__(self) -> None:
        self._worlds = [InProcessWorld(RANKS, coordinator) for coordinator in range(RANKS)]
        self.made: list[tuple[int, int]] = []
        self._hubs: dict[tuple[int, int], ControlHub] = {}

    def _make(self, rank: int, coordinator: int) -> ControlHub:
        meeting = self._worlds[0].hub(rank)
        make = functools.partial(self.made_by, rank, coordinator)
        return AgreedHub(meeting, coordinator, make) if coordinator else meeting

    def made_by(self, rank: int, coordinator: int, _: float, check: Callable[[], None]) -> Any:
        while rank != coordinator and (coordinator, coordinator) not in self.made:
            check()
            time.sleep(0.01)
        self.made.append((rank, coordinator))
        return self._worlds[coordinator].hub(rank)

    def hub(self, rank: int, coordinator: int) -> ControlHub:
        if coordinator >= RANKS:
            return RefusingHub(
                self._worlds[0].hub(rank), ValueError(f"coordinator_rank {coordinator} is not there"), coordinator
            )
        if (rank, coordinator) not in self._hubs:
            self._hubs[rank, coordinator] = self._make(rank, coordinator)
        return self._hubs[rank, coordinator]

    def call(
        self,
        named: dict[int, int],
        kinds: dict[int, str] | None = None,
        timeout: float = LONG,
        victim: int | None = None,
    ) -> dict[int, Any]:
        """One call of each rank in ``named``, with the coordinator there; what each got or raised.

        The thread of a ``victim`` is called so.
        """

        def work(rank: int, coordinator: int) -> Any:
            threading.current_thread().name = "victim" if rank == victim else f"rank {rank}"
            try:
                hub = self.hub(rank, coordinator)
                with Ending(hub.session((kinds or {}).get(rank, "save"), timeout)) as made, made as session:
                    reply = session.gather_scatter("plan", lambda: b"%d" % rank, lambda parts: parts)
                    return session.coordinator, reply, session.doubtful
            except (CheckpointError, ValueError, KeyboardInterrupt) as error:
                return error

        begun = time.monotonic()
        with ThreadPoolExecutor(RANKS) as threads:
            futures = {rank: threads.submit(work, rank, coordinator) for rank, coordinator in named.items()}
            results = {rank: future.result(60) for rank, future in futures.items()}
        assert time.monotonic() - begun < AT_ONCE
        return results


def works(job: Job, coordinator: int) -> None:
    named = dict.fromkeys(range(RANKS), coordinator)
    assert job.call(named) == {rank: (coordinator, b"%d" % rank, False) for rank in named}


def each(results: dict[int, Any], kind: type[Exception], check: Callable[[Any], bool] = lambda _: True) -> None:
    for rank, error in results.items():
        assert type(error) is kind, (rank, error)
        assert check(error), error


@pytest.mark.parametrize("before", [(), (0,), (2, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("named", [(0, 1, 1), (1, 0, 0), (0, 1, 2), (2, 2, 0), (1, 1, 2), (2, 1, 1)], ids=str)
def test_different_coordinators_are_named_at_once_on_every_rank(named: tuple[int, ...], before: tuple[int]) -> None:
    job = Job()
    for coordinator in before:
        works(job, coordinator)
    results = job.call(dict(enumerate(named)))
    said = [f"rank {rank} calls 'save' with coordinator_rank={coordinator}" for rank, coordinator in enumerate(named)]
    each(results, ValueError, lambda error: all(text in str(error) for text in said))
    for coordinator in range(RANKS):  # and they are in step again
        works(job, coordinator)


def test_a_coordinator_that_all_name_has_a_hub_of_its_own_made_once() -> None:
    job = Job()
    for coordinator in (2, 0, 2):
        works(job, coordinator)
    assert sorted(job.made) == [(0, 2), (1, 2), (2, 2)]


def test_closing_ends_the_hub_of_its_own_alone() -> None:
    job = Job()
    for coordinator in (2, 1):
        works(job, coordinator)
    for rank in range(RANKS):
        job.hub(rank, 2).close()
    each(job.call(dict.fromkeys(range(RANKS), 2)), CheckpointError, lambda error: "was closed" in str(error))
    for coordinator in (0, 1):
        works(job, coordinator)


def test_different_calls_that_name_one_coordinator_are_no_different_coordinators() -> None:
    job = Job()
    results = job.call({0: 2, 1: 2, 2: 2}, {1: "load"})
    each(results, CheckpointError, lambda error: "rank 1 calls 'load with" in str(error))
    works(job, 2)


@pytest.mark.parametrize("coordinators", [(1, 1), (1, 2)])
def test_calls_of_two_threads_are_matched_by_their_order_also_if_one_goes_on_late(
    monkeypatch: pytest.MonkeyPatch, coordinators: tuple[int, int]
) -> None:
    job, enter = Job(), Session.__enter__
    for coordinator in coordinators:
        works(job, coordinator)
    begun = [threading.Event() for _ in range(RANKS)]

    def late(session: Session) -> Session:
        if threading.current_thread().name == "0 first" and session._place is not None:
            time.sleep(0.5)
        opened = enter(session)
        begun[session.rank].set()
        return opened

    def call(rank: int, name: str) -> None:
        if name == "second":
            assert begun[rank].wait(10)
        hub = job.hub(rank, coordinators[name == "second"])
        with hub.session("save", LONG) as session:
            said[rank, name] = session.gather_scatter("plan", name.encode, lambda parts: dict.fromkeys(parts, parts[0]))

    monkeypatch.setattr(Session, "__enter__", late)
    said: dict[tuple[int, str], bytes] = {}
    threads = [
        threading.Thread(target=call, args=(rank, name), name=f"{rank} {name}", daemon=True)
        for rank in range(RANKS)
        for name in ("first", "second")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert said == {(rank, name): name.encode() for rank in range(RANKS) for name in ("first", "second")}


@pytest.mark.parametrize("others", [0, 1, 7])
def test_a_coordinator_that_is_not_there_is_told_to_every_rank(others: int) -> None:
    job = Job()
    results = job.call({0: others, 1: 7, 2: others})
    # It may fail before it hears of the others, or after.
    told = ("coordinator_rank 7 is not there", "rank 1 calls 'save' with coordinator_rank=7")
    each(results, ValueError, lambda error: any(text in str(error) for text in told))
    works(job, 0)
    works(job, 1)


def test_a_rank_that_does_not_come_is_named_and_leaves_a_doubt() -> None:
    job = Job()
    each(job.call({0: 1, 1: 1}, timeout=SHORT), CheckpointTimeoutError, lambda error: error.missing_ranks == (2,))
    late = job.call({0: 1, 1: 1, 2: 1})  # rank 2 is a call behind
    assert all(isinstance(error, CheckpointError) for error in late.values()), late
    results = job.call({0: 1, 1: 1, 2: 1})
    assert {rank: doubtful for rank, (_, _, doubtful) in results.items()} == {0: False, 1: True, 2: False}
    works(job, 1)


def test_appointments_are_with_the_coordinator_that_was_agreed_on() -> None:
    job = Job()
    works(job, 2)
    made = [job.hub(rank, 2).appointments("steps", LONG) for rank in range(RANKS)]
    assert [one.leads for one in made] == [False, False, True]
    with pytest.raises(ValueError, match="not there"):
        job.hub(0, 9).appointments("steps", LONG)


def test_closing_ends_the_connection_to_a_coordinator_that_was_named_and_no_other() -> None:
    job = Job()
    job.hub(1, 2).close()  # nothing yet
    works(job, 2)
    job.hub(1, 2).close()
    results = job.call(dict.fromkeys(range(RANKS), 2))
    assert all(isinstance(error, CheckpointError) for error in results.values()), results
    works(job, 0)


@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize(
    ("place", "before"),
    [
        ("made_by", False),
        *((place, before) for place in ("wait_to_be_followed", "number", "open") for before in (0, 1)),
    ],
)
def test_a_rank_that_fails_between_the_agreement_and_its_own_session_is_told_to_all(
    monkeypatch: pytest.MonkeyPatch, place: str, victim: int, before: bool
) -> None:
    """And the next call is made by all."""
    job, failed = Job(), threading.Event()
    if before:
        works(job, 1)

    def fail_once(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            of_own = not isinstance(given[0], Board) or given[0].coordinator == 1
            if of_own and threading.current_thread().name.startswith("victim") and not failed.is_set():
                failed.set()
                raise KeyboardInterrupt
            return original(*given)

        return call

    if place == "made_by":
        monkeypatch.setattr(job, place, fail_once(job.made_by))
    else:
        owner: Any = Session if place == "wait_to_be_followed" else Board
        monkeypatch.setattr(owner, place, fail_once(getattr(owner, place)))
    results = job.call(dict.fromkeys(range(RANKS), 1), victim=victim)
    assert failed.is_set()
    for rank, error in results.items():
        if rank == victim:
            assert isinstance(error, KeyboardInterrupt)
        else:
            assert isinstance(error, RankFailureError), error
            assert f"rank {victim}" in str(error)
            assert "KeyboardInterrupt" in str(error)
    assert [type(one) for one in job.call(dict.fromkeys(range(RANKS), 1)).values()] == [tuple] * RANKS
    works(job, 1)


def test_work_of_the_first_round_that_looks_for_failures_finds_one_from_before_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a save that waits for its turn, which may be long."""
    job, number = Job(), Board.number
    works(job, 1)

    def interrupted(board: Board, *given: Any) -> Any:
        if board.coordinator == 1 and threading.current_thread().name == "victim":
            raise KeyboardInterrupt
        return number(board, *given)

    def work(rank: int) -> bool:
        threading.current_thread().name = "victim" if rank == 2 else f"rank {rank}"
        made, over = job.hub(rank, 1).session("save", LONG), threading.Event()

        def wait_for_a_turn() -> bytes:
            begun = time.monotonic()
            while time.monotonic() - begun < AT_ONCE:
                session.check()
                time.sleep(0.01)
            over.set()
            return b""

        with pytest.raises((RankFailureError, KeyboardInterrupt)), Ending(made), made as session:
            session.gather_scatter("plan", wait_for_a_turn, lambda parts: parts)
        return over.is_set()

    monkeypatch.setattr(Board, "number", interrupted)
    with ThreadPoolExecutor(RANKS) as threads:
        assert list(threads.map(work, range(RANKS))) == [False] * RANKS
