"""Which steps are due: the same ones on every rank, whatever the order in which ranks ask, and without a deadlock."""

from __future__ import annotations

import errno
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import CheckpointError, CheckpointManager
from paddle_dist_ckpt.control import SoloHub, TcpHub
from paddle_dist_ckpt.manager import manager as manager_module
from paddle_dist_ckpt.manager.schedule import Schedule
from paddle_dist_ckpt.saving.rank_files import RankFiles
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from paddle_dist_ckpt.testing.hub_conformance.cases import LONG
from paddle_dist_ckpt.testing.in_process import InProcessWorld
from test.control.groups import Store
from test.jobs import all_ok
from test.waiting import PATIENCE


class Clock:
    """Time that stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Ranks:
    """Schedules of ranks that take turns, with a clock that only the test moves. Messages arrive at once."""

    def __init__(self, count: int = 3, interval: float | None = None) -> None:
        self.clock = Clock()
        hubs = in_process(count)
        self.schedules = [Schedule(hub, "steps", 1.0, interval_seconds=interval, clock=self.clock) for hub in hubs]

    def call(self, step: int, seconds: float = 0.0) -> bool:
        """All ranks ask about a step, the coordinator first; it took so long to get there."""
        self.clock.now += seconds
        answers = {schedule.is_due(step) for schedule in self.schedules}
        assert len(answers) == 1
        assert len({schedule.stopping for schedule in self.schedules}) == 1
        return answers.pop()

    def due(self, steps: range, seconds: float = 0.0) -> list[int]:
        return [step for step in steps if self.call(step, seconds)]


def in_process(count: int) -> list[Any]:
    world = InProcessWorld(count)
    return [world.hub(rank) for rank in range(count)]


def test_nothing_is_due_without_an_interval_or_a_request() -> None:
    ranks = Ranks()
    assert ranks.due(range(1000), 1.0) == []
    assert [schedule.stopping for schedule in ranks.schedules] == [False] * 3


@pytest.mark.parametrize("rank", [0, 2])
def test_a_request_is_served_at_the_next_step(rank: int) -> None:
    ranks = Ranks()
    ranks.due(range(10), 1.0)
    ranks.schedules[rank].request()
    assert ranks.due(range(10, 100), 1.0) == [11]
    assert [schedule.stopping for schedule in ranks.schedules] == [True] * 3


def test_a_request_is_served_beyond_all_ranks() -> None:
    ranks = Ranks()
    for step in range(100):
        assert not ranks.schedules[1].is_due(step)
    ranks.schedules[0].request()
    assert not ranks.schedules[0].is_due(0)
    assert [[s for s in range(200) if schedule.is_due(s)] for schedule in ranks.schedules] == [[100]] * 3


def test_the_interval_is_kept() -> None:
    ranks = Ranks(interval=60.0)
    due = ranks.due(range(1000), 1.0)
    assert {later - earlier for earlier, later in itertools.pairwise([0, *due])} <= {60, 61}
    assert len(due) == 1000 // 61


def test_a_save_for_another_reason_begins_the_interval_anew() -> None:
    ranks = Ranks(interval=60.0)
    assert ranks.due(range(50), 1.0) == []
    for schedule in ranks.schedules:
        schedule.saved(49)
    assert ranks.due(range(50, 109), 1.0) == []
    assert len(ranks.due(range(109, 115), 1.0)) == 1


def test_only_the_clock_of_the_coordinator_counts() -> None:
    hubs = in_process(2)
    clocks = [Clock(), Clock()]
    schedules = [Schedule(hub, "s", 1.0, interval_seconds=5, clock=c) for hub, c in zip(hubs, clocks, strict=True)]
    clocks[1].now += 100
    assert [[schedule.is_due(step) for schedule in schedules] for step in range(3)] == [[False] * 2] * 3
    clocks[0].now += 100
    assert [[schedule.is_due(step) for schedule in schedules] for step in (3, 4)] == [[False] * 2, [True] * 2]


def test_a_pause_is_no_reason_for_several_saves() -> None:
    ranks = Ranks(interval=100.0)
    ranks.due(range(1000), 0.01)
    ranks.clock.now += 3600.0
    assert len(ranks.due(range(1000, 2000), 0.01)) == 1


def test_requests_of_all_ranks_at_once_are_one_save() -> None:
    ranks = Ranks(count=6)
    ranks.due(range(100), 1.0)
    for schedule in ranks.schedules:
        schedule.request()
        schedule.request()
    assert ranks.due(range(100, 200), 1.0) == [101]


def test_a_request_before_the_save_that_another_asked_for_is_served_by_it() -> None:
    ranks = Ranks()
    ranks.due(range(100), 1.0)
    ranks.schedules[0].request()
    ahead = [step for step in range(100, 120) if ranks.schedules[0].is_due(step)]
    ranks.schedules[1].request()
    ranks.schedules[2].request()
    assert [[s for s in range(100, 120) if schedule.is_due(s)] for schedule in ranks.schedules[1:]] == [ahead] * 2
    assert ranks.due(range(120, 200), 1.0) == []


def test_a_request_after_another_was_served_is_a_second_save() -> None:
    ranks = Ranks()
    for first in (0, 100):
        ranks.due(range(first, first + 50), 1.0)
        ranks.schedules[2].request()
        assert len(ranks.due(range(first + 50, first + 100), 1.0)) == 1


def test_the_same_step_has_the_same_answer() -> None:
    ranks = Ranks()
    ranks.due(range(10), 1.0)
    ranks.schedules[1].request()
    for step in range(10, 20):
        first = ranks.call(step)
        assert [ranks.call(step) for _ in range(3)] == [first] * 3
    assert ranks.schedules[0].stopping


def test_a_request_from_a_signal_handler() -> None:
    ranks = Ranks()
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: ranks.schedules[1].request())
    try:
        ranks.due(range(10), 1.0)
        signal.raise_signal(signal.SIGUSR1)
        assert len(ranks.due(range(10, 20), 1.0)) == 1
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_steps_may_fall_back_on_all_ranks_alike() -> None:
    ranks = Ranks(interval=20.0)
    assert ranks.due(range(100), 1.0) != []
    ranks.schedules[1].request()
    assert ranks.due(range(50, 150), 1.0)[0] > 99
    assert ranks.schedules[2].stopping


def test_a_restart_begins_the_steps_anew_and_keeps_what_was_requested() -> None:
    ranks = Ranks()
    ranks.due(range(100), 1.0)
    ranks.schedules[1].request()
    ranks.schedules[1].is_due(100)
    ranks.schedules[2].request()
    for schedule in ranks.schedules:
        schedule.restart(-1)
    assert ranks.due(range(50), 1.0) == [1]
    for schedule in ranks.schedules:
        schedule.restart(-1)
    assert ranks.due(range(50), 1.0) == []


def test_a_rank_alone_saves_when_it_is_asked() -> None:
    clock = Clock()
    schedule = Schedule(SoloHub(), "steps", 1.0, interval_seconds=10.0, clock=clock)
    assert not schedule.is_due(0)
    schedule.request()
    assert [schedule.is_due(1), schedule.is_due(1), schedule.is_due(2)] == [True, True, False]
    assert schedule.stopping
    clock.now += 10
    assert [schedule.is_due(3), schedule.is_due(4)] == [True, False]
    schedule.close()
    clock.now += 100
    assert not schedule.is_due(5)


def test_the_end_is_told() -> None:
    ranks = Ranks(interval=7.0)
    ranks.due(range(20), 1.0)
    ranks.schedules[0].request()
    assert not ranks.schedules[0].is_due(20)
    for schedule in ranks.schedules[:2]:
        schedule.close()
        schedule.close()
    # What had been decided for steps that the coordinator does not reach is void.
    assert [schedule.is_due(step) for schedule in ranks.schedules for step in range(21, 1000)] == [False] * 3 * 979


def test_the_end_does_not_hide_what_was_due_before() -> None:
    ranks = Ranks()
    ranks.due(range(10), 1.0)
    ranks.schedules[0].request()
    due = [step for step in range(10, 30) if ranks.schedules[0].is_due(step)]
    ranks.schedules[0].close()
    assert [step for step in range(10, 50) if ranks.schedules[1].is_due(step)] == due == [11]


def test_a_rank_that_has_ended_it_hears_no_more_and_holds_up_nobody() -> None:
    ranks = Ranks(interval=5.0)
    ranks.due(range(10), 1.0)
    ranks.schedules[1].close()
    found = []
    for step in range(10, 100):
        ranks.clock.now += 1.0
        found.append(ranks.schedules[0].is_due(step))
        assert not ranks.schedules[1].is_due(step)
        assert ranks.schedules[2].is_due(step) == found[-1]
    assert any(found)


Body = Callable[[int, Schedule], Any]


def run_threads(hubs: list[Any], body: Body, interval: float | None = None) -> list[Any]:
    """Call ``body(rank, schedule)`` on a thread for each hub; none may hang."""
    results: list[Any] = [None] * len(hubs)

    def run(rank: int) -> None:
        try:
            schedule = Schedule(hubs[rank], "steps", LONG, interval_seconds=interval)
            results[rank] = body(rank, schedule)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(hubs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "ranks hang"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def random_steps(source: random.Random, count: int) -> list[int]:
    """Ascending steps whose strides are regular for a while, then others."""
    steps, step = [], source.randrange(100)
    while len(steps) < count:
        strides = source.choice([[1], [10], [3, 7], list(range(1, 20)), [1, 1, 1, 500]])
        for _ in range(source.randrange(1, 300)):
            step += source.choice(strides)
            steps.append(step)
    return steps[:count]


def walk(steps: list[int], seed: int, meet: Callable[[int, int], object]) -> Body:
    """Go through all steps, requesting at random; ``meet(rank, call)`` comes after each."""

    def body(rank: int, schedule: Schedule) -> list[int]:
        source = random.Random(seed * 1000 + rank)
        due = []
        for call, step in enumerate(steps):
            if source.random() < 0.05:
                time.sleep(source.random() * 0.002)
            if source.random() < 0.01:
                schedule.request()
            if schedule.is_due(step):
                due.append(step)
                schedule.saved(step)
            meet(rank, call)
        return due

    return body


def free(rank: int, call: int) -> None:
    """Ranks meet nowhere."""


def lockstep(ranks: int) -> Callable[[int, int], object]:
    barrier = threading.Barrier(ranks)
    return lambda rank, call: barrier.wait(20)


def assert_agreed(results: list[list[int]]) -> None:
    assert results[1:] == [results[0]] * (len(results) - 1)
    assert results[0] != []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("meet", [free, lockstep(4)], ids=["free", "in lockstep"])
def test_threads_agree(seed: int, meet: Callable[[int, int], object]) -> None:
    steps = random_steps(random.Random(seed), 3000)
    assert_agreed(run_threads(in_process(4), walk(steps, seed, meet), interval=0.01))


@pytest.mark.parametrize("meet", [free, lockstep(4)], ids=["free", "in lockstep"])
def test_real_hubs_agree(meet: Callable[[int, int], object]) -> None:
    store = Store()
    hubs = [TcpHub(rank, range(4), 0, store, "k", bind_host="127.0.0.1") for rank in range(4)]
    try:
        assert_agreed(run_threads(hubs, walk(random_steps(random.Random(1), 2000), 1, meet), interval=0.02))
    finally:
        for hub in reversed(hubs):
            hub.close()


class Progress:
    """How many calls each rank has made."""

    def __init__(self, ranks: int) -> None:
        self._made = [0] * ranks
        self._changed = threading.Condition()

    def made(self, rank: int, call: int) -> None:
        with self._changed:
            self._made[rank] = call + 1
            self._changed.notify_all()

    def wait(self, ranks: list[int], calls: int) -> None:
        """Until all ``ranks`` have made so many calls."""
        with self._changed:
            assert self._changed.wait_for(lambda: all(self._made[rank] >= calls for rank in ranks), 20), "deadlock"


@pytest.mark.parametrize("leader", [0, 2])
def test_a_rank_may_wait_for_others_that_are_any_number_of_calls_ahead(leader: int) -> None:
    progress = Progress(3)
    count = 1000

    def meet(rank: int, call: int) -> None:
        progress.made(rank, call)
        if rank == leader:
            progress.wait([other for other in range(3) if other != leader], min(call + 20, count))

    assert_agreed(run_threads(in_process(3), walk(list(range(count)), 7, meet), interval=0.01))


def test_asking_takes_microseconds() -> None:
    schedules = Ranks(2, 1000.0)
    schedules.clock.now += 1
    best = [1.0, 1.0]
    for block in range(20):
        for rank, schedule in enumerate(schedules.schedules):
            begun = time.perf_counter()
            for step in range(block * 1000, block * 1000 + 1000):
                schedule.is_due(step)
            best[rank] = min(best[rank], (time.perf_counter() - begun) / 1000)
    assert max(best) < 50e-6


def test_a_signal_after_a_return_from_a_save_that_has_failed_is_heard_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not only behind the step at which it failed, to which the ranks have yet to come again."""
    own, together, write = threading.local(), threading.Barrier(2), RankFiles._write
    monkeypatch.setattr(manager_module, "connected", lambda *_: own.ranks)
    full: list[bool] = []

    def write_if_there_is_room(files: RankFiles) -> Any:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(files)

    monkeypatch.setattr(RankFiles, "_write", write_if_there_is_room)

    def work(rank: SimulatedRank) -> tuple[int | None, bool]:
        own.ranks, state = rank.connection, {"x": np.ones(3)}
        with CheckpointManager(tmp_path, save_interval_steps=10) as steps:
            steps.save(0, state)
            steps.wait()
            together.wait(PATIENCE)
            full.append(True)
            steps.save(10, state)
            with pytest.raises(CheckpointError, match="No space left"):
                steps.wait()
            together.wait(PATIENCE)
            full.clear()
            restored = steps.restore(state)
            if rank.rank == 1:
                steps._schedule.request()
            for step in range(1, 4):
                together.wait(PATIENCE)
                steps.should_save(step)
            return restored, steps.stopping

    assert all_ok(run_ranks(2, work)) == [(0, True), (0, True)]
