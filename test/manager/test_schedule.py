"""Which steps are due: the same ones on every rank, whatever the order in which ranks ask, and without a deadlock."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from paddle_dist_ckpt.control import SoloHub, ZmqHub
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError, RankFailureError
from paddle_dist_ckpt.manager.schedule import Schedule
from paddle_dist_ckpt.testing.in_process import InProcessWorld
from test.control.groups import AT_ONCE, LONG, Store


class Clock:
    """Time that stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeChannel:
    """Implements Channel among ranks that take turns on one thread; one that has to wait calls ``on_wait``."""

    def __init__(self, rank: int, everyone: dict[int, FakeChannel]) -> None:
        self.rank = rank
        self.coordinator = 0
        self.inbox: deque[tuple[int, bytes]] = deque()
        self.announced = 0
        self.waited = 0
        self.deaf = False
        self.on_wait: Callable[[], bool] | None = None
        self._everyone = everyone

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._everyone)

    def announce(self, data: bytes) -> None:
        self.announced += 1
        for rank, other in self._everyone.items():
            if rank != self.rank and self.coordinator in (rank, self.rank) and not other.deaf:
                other.inbox.append((self.rank, data))

    def heard(self) -> list[tuple[int, bytes]]:
        notes = list(self.inbox)
        self.inbox.clear()
        return notes

    def wait(self, timeout: float) -> None:
        self.waited += 1
        while not self.inbox:
            if self.on_wait is None or not self.on_wait():
                raise CheckpointTimeoutError("silence", [0])


class Ranks:
    """Schedules of ranks that take turns, with a clock that only the test moves."""

    def __init__(self, count: int = 3, interval: float | None = None) -> None:
        self.clock = Clock()
        self.channels: dict[int, FakeChannel] = {}
        for rank in range(count):
            self.channels[rank] = FakeChannel(rank, self.channels)
        self.schedules = [
            Schedule(channel, 1.0, interval_seconds=interval, clock=self.clock) for channel in self.channels.values()
        ]

    def call(self, step: int, seconds: float = 0.0) -> bool:
        """All ranks ask about a step, the coordinator first; it took so long to get there."""
        self.clock.now += seconds
        answers = {schedule.is_due(step) for schedule in self.schedules}
        assert len(answers) == 1
        assert len({schedule.stopping for schedule in self.schedules}) == 1
        assert len({schedule.reasons for schedule in self.schedules}) == 1
        return answers.pop()

    def due(self, steps: range, seconds: float = 0.0) -> list[int]:
        return [step for step in steps if self.call(step, seconds)]


def test_nothing_is_due_without_an_interval_or_a_request() -> None:
    ranks = Ranks()
    assert ranks.due(range(1000), 1.0) == []
    assert [schedule.stopping for schedule in ranks.schedules] == [False] * 3


def test_the_first_call_of_the_coordinator_tells_the_others_at_once() -> None:
    ranks = Ranks()
    with pytest.raises(CheckpointTimeoutError):
        ranks.schedules[1].is_due(7)
    assert not ranks.schedules[0].is_due(7)
    assert ranks.channels[0].announced == 1
    # What failed for lack of news can be asked again.
    assert not ranks.schedules[1].is_due(7)


@pytest.mark.parametrize("stride", [1, 10])
@pytest.mark.parametrize("seconds", [10.0, 0.3, 0.01])
def test_the_others_may_be_two_calls_ahead(stride: int, seconds: float) -> None:
    ranks = Ranks()
    learnt = 3
    for call in range(300):
        ranks.clock.now += seconds
        ranks.schedules[0].is_due(call * stride)
        if call == learnt:
            for schedule in ranks.schedules[1:]:
                schedule.is_due(call * stride)
        if call >= learnt:
            for schedule in ranks.schedules[1:]:
                assert not schedule.is_due((call + 1) * stride)
                assert not schedule.is_due((call + 2) * stride)
    assert ranks.channels[1].waited == 0


@pytest.mark.parametrize(("seconds", "most"), [(10.0, 1.0), (0.1, 1.0), (0.01, 0.15), (0.001, 0.05)])
def test_announcements_are_rare_when_steps_are_quick(seconds: float, most: float) -> None:
    ranks = Ranks()
    ranks.due(range(5000), seconds)
    before = ranks.channels[0].announced
    ranks.due(range(5000, 10_000), seconds)
    assert (ranks.channels[0].announced - before) / 5000 <= most


def calls_until_due(ranks: Ranks, first: int, seconds: float, stride: int = 1) -> int:
    for call in range(20_000):
        if ranks.call(first + call * stride, seconds):
            return call
    raise AssertionError("never due")


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("seconds", "longest"), [(10.0, 30.0), (0.1, 0.8), (0.001, 0.6)])
def test_a_request_is_served_soon(rank: int, seconds: float, longest: float) -> None:
    ranks = Ranks()
    ranks.due(range(20_000), seconds)
    ranks.schedules[rank].request("SIGTERM")
    calls = calls_until_due(ranks, 20_000, seconds)
    assert calls * seconds <= longest
    assert ranks.schedules[1].stopping
    assert ranks.schedules[1].reasons == (f"rank {rank}: SIGTERM",)
    assert ranks.due(range(20_001 + calls, 22_000), seconds) == []


def test_hurrying_through_the_first_steps_does_not_put_off_what_is_decided_later() -> None:
    ranks = Ranks()
    ranks.due(range(1000), 1e-6)
    ranks.schedules[1].request("SIGTERM")
    assert calls_until_due(ranks, 1000, 1.0) < 100


def test_a_leap_does_not_put_off_what_is_decided_later() -> None:
    ranks = Ranks()
    for step in (0, 1, 2, 100_000, 100_001):
        ranks.call(step, 1.0)
    ranks.schedules[1].request("SIGTERM")
    assert calls_until_due(ranks, 100_002, 1.0) < 5


def test_a_pause_does_no_harm() -> None:
    ranks = Ranks(interval=100.0)
    ranks.due(range(1000), 0.01)
    ranks.clock.now += 3600.0
    assert len(ranks.due(range(1000, 2000), 0.01)) == 1


def test_the_interval_is_kept() -> None:
    ranks = Ranks(interval=60.0)
    due = ranks.due(range(1000), 1.0)
    assert len(due) == pytest.approx(1000 / 62, abs=2)
    assert all(60 <= later - earlier <= 64 for earlier, later in zip([0, *due], due, strict=False))


def test_a_save_for_another_reason_begins_the_interval_anew() -> None:
    ranks = Ranks(interval=60.0)
    assert ranks.due(range(50), 1.0) == []
    for schedule in ranks.schedules:
        schedule.saved(49)
    assert ranks.due(range(50, 109), 1.0) == []
    assert len(ranks.due(range(109, 115), 1.0)) == 1


def test_a_save_is_decided_once_until_it_is_due() -> None:
    ranks = Ranks(interval=0.001)
    due = ranks.due(range(10_000), 0.001)
    assert due[0] > 1
    assert len(due) > 10
    # None is decided while another is pending, which lies as far ahead as the horizon.
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(due))


def test_requests_of_all_ranks_at_once_are_one_save() -> None:
    ranks = Ranks(count=6)
    ranks.due(range(100), 1.0)
    for schedule in ranks.schedules:
        schedule.request("SIGTERM")
        schedule.request("SIGTERM")
    due = ranks.due(range(100, 200), 1.0)
    assert len(due) == 1
    # A request that arrives after the save that it asks for is served by it, if its rank has yet to get there.
    behind = Ranks()
    behind.due(range(100), 1.0)
    behind.schedules[0].request("SIGTERM")
    ahead = [step for step in range(100, 120) if behind.schedules[0].is_due(step)]
    behind.schedules[1].request("SIGTERM")
    behind.schedules[2].request("SIGTERM")
    assert [[s for s in range(100, 120) if schedule.is_due(s)] for schedule in behind.schedules[1:]] == [ahead] * 2
    assert behind.due(range(120, 200), 1.0) == []
    assert behind.channels[1].announced == 0


def test_a_request_that_crosses_the_decision_is_served_by_it() -> None:
    ranks = Ranks()
    ranks.due(range(100), 1.0)
    ranks.schedules[0].request("SIGTERM")
    assert not ranks.schedules[0].is_due(100)
    on_their_way = ranks.channels[1].heard()
    ranks.schedules[1].request("SIGTERM")
    assert not ranks.schedules[1].is_due(100)
    assert ranks.channels[1].announced == 1
    ranks.channels[1].inbox.extend(on_their_way)
    assert not ranks.schedules[2].is_due(100)
    assert len(ranks.due(range(101, 200), 1.0)) == 1
    assert ranks.schedules[1].reasons == ("rank 0: SIGTERM",)


def test_a_request_after_another_was_served_is_a_second_save() -> None:
    ranks = Ranks()
    for number, first in enumerate((0, 100)):
        ranks.due(range(first, first + 50), 1.0)
        ranks.schedules[2].request(f"user {number}")
        assert len(ranks.due(range(first + 50, first + 100), 1.0)) == 1
    assert ranks.schedules[1].reasons == ("rank 2: user 0", "rank 2: user 1")


def test_the_same_step_has_the_same_answer() -> None:
    ranks = Ranks()
    ranks.due(range(10), 1.0)
    ranks.schedules[1].request("x")
    for step in range(10, 20):
        first = ranks.call(step)
        assert [ranks.call(step) for _ in range(3)] == [first] * 3
    assert ranks.schedules[0].stopping


def test_a_request_between_two_questions_about_a_step_goes_out_with_the_second() -> None:
    ranks = Ranks()
    ranks.call(1)
    ranks.schedules[1].request("x")
    ranks.schedules[1].is_due(1)
    assert ranks.channels[1].announced == 1


def test_a_request_from_a_signal_handler() -> None:
    ranks = Ranks()
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: ranks.schedules[1].request("SIGUSR1"))
    try:
        ranks.due(range(10), 1.0)
        signal.raise_signal(signal.SIGUSR1)
        assert len(ranks.due(range(10, 20), 1.0)) == 1
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_steps_may_fall_back_on_all_ranks_alike() -> None:
    ranks = Ranks(interval=20.0)
    assert ranks.due(range(100), 1.0) != []
    ranks.schedules[1].request("x")
    due = ranks.due(range(50, 150), 1.0)
    assert due[0] > 99
    assert ranks.schedules[2].stopping


def test_a_rank_alone_saves_when_it_is_asked() -> None:
    clock = Clock()
    schedule = Schedule(SoloHub().channel("steps"), 1.0, interval_seconds=10.0, clock=clock)
    assert not schedule.is_due(0)
    schedule.request("x")
    assert [schedule.is_due(1), schedule.is_due(1), schedule.is_due(2)] == [True, True, False]
    clock.now += 10
    assert [schedule.is_due(3), schedule.is_due(4)] == [True, False]
    schedule.close()
    clock.now += 100
    assert not schedule.is_due(5)


def test_the_end_is_told() -> None:
    ranks = Ranks(interval=7.0)
    ranks.due(range(20), 1.0)
    ranks.schedules[0].request("x")
    assert not ranks.schedules[0].is_due(20)
    for schedule in ranks.schedules[:2]:
        schedule.close()
        schedule.close()
    # What had been decided for steps that the coordinator does not reach is void.
    assert [schedule.is_due(step) for schedule in ranks.schedules for step in range(21, 1000)] == [False] * 3 * 979
    assert ranks.channels[2].waited == 0


def test_the_end_does_not_hide_what_was_due_before() -> None:
    ranks = Ranks()
    ranks.due(range(10), 1.0)
    ranks.schedules[0].request("x")
    due = [step for step in range(10, 30) if ranks.schedules[0].is_due(step)]
    ranks.schedules[0].close()
    assert [step for step in range(10, 50) if ranks.schedules[1].is_due(step)] == due
    assert len(due) == 1


def test_a_rank_that_has_ended_it_hears_no_more() -> None:
    ranks = Ranks(interval=5.0)
    ranks.due(range(10), 1.0)
    ranks.schedules[1].close()
    for step in range(10, 100):
        ranks.clock.now += 1.0
        ranks.schedules[0].is_due(step)
        assert not ranks.schedules[1].is_due(step)


def test_announcements_that_were_lost_are_made_up_for() -> None:
    ranks = Ranks(interval=5.0)
    ranks.due(range(20), 1.0)
    ranks.channels[2].deaf = True
    due = []
    for step in range(20, 100):
        ranks.clock.now += 1.0
        due += [step] if ranks.schedules[0].is_due(step) else []
    ranks.channels[2].deaf = False
    ranks.clock.now += 1.0
    ranks.schedules[0].is_due(100)
    assert [step for step in range(20, 100) if ranks.schedules[2].is_due(step)] == due
    assert len(due) > 5


def test_too_many_lost_announcements_are_an_error() -> None:
    ranks = Ranks(interval=5.0)
    ranks.due(range(20), 1.0)
    ranks.channels[2].deaf = True
    for step in range(20, 1000):
        ranks.clock.now += 1.0
        ranks.schedules[0].is_due(step)
    ranks.channels[2].deaf = False
    ranks.schedules[0].is_due(1000)
    with pytest.raises(CheckpointError, match="missed announcements"):
        [ranks.schedules[2].is_due(step) for step in range(20, 1000)]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="interval_seconds"):
        Ranks(interval=0)
    ranks = Ranks()
    ranks.channels[1].inbox.append((0, b"\xc1"))
    with pytest.raises(CheckpointError, match="rank 0 sent what is no Announcement"):
        ranks.schedules[1].is_due(0)


def random_steps(source: random.Random, count: int) -> list[int]:
    """Ascending steps whose strides are regular for a while, then others."""
    steps, step = [], source.randrange(100)
    while len(steps) < count:
        strides = source.choice([[1], [10], [3, 7], list(range(1, 20)), [1, 1, 1, 500]])
        for _ in range(source.randrange(1, 300)):
            step += source.choice(strides)
            steps.append(step)
    return steps[:count]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_take_turns_at_random_agree(seed: int) -> None:
    source = random.Random(seed)
    ranks = Ranks(4, interval=source.choice([None, 0.05, 2.0, 30.0]))
    steps = random_steps(source, 3000)
    speed = source.choice([1e-5, 1e-3, 0.05, 1.0])
    spread = source.choice([1, 3, 50, 3000])
    position = [0] * 4
    found: list[list[tuple[int, bool]]] = [[] for _ in position]

    def advance(rank: int) -> bool:
        if position[rank] == len(steps):
            return False
        ranks.clock.now += source.random() * speed
        if source.random() < 0.002:
            ranks.schedules[rank].request("x")
        step = steps[position[rank]]
        if ranks.schedules[rank].is_due(step):
            found[rank].append((step, ranks.schedules[rank].stopping))
            ranks.schedules[rank].saved(step)
        position[rank] += 1
        return True

    for rank in range(1, 4):
        ranks.channels[rank].on_wait = lambda: advance(0)
    while min(position) < len(steps):
        # Whoever is furthest behind, or anyone who is not too far ahead of that.
        advance(source.choice([rank for rank in range(4) if position[rank] < min(position) + spread]))
    assert found[1:] == [found[0]] * 3
    assert found[0] != []


def run_threads(hubs: list[Any], body: Callable[[int, Schedule], Any], interval: float | None = None) -> list[Any]:
    """Call ``body(rank, schedule)`` on a thread for each hub; none may hang."""
    results: list[Any] = [None] * len(hubs)

    def run(rank: int) -> None:
        try:
            schedule = Schedule(hubs[rank].channel("steps"), LONG, interval_seconds=interval)
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


Body = Callable[[int, Schedule], list[int]]


def walk(steps: list[int], seed: int, meet: Callable[[int, int], object], rest: float) -> Body:
    """Go through all steps, resting and requesting at random; ``meet(rank, call)`` comes after each."""

    def body(rank: int, schedule: Schedule) -> list[int]:
        source = random.Random(seed * 1000 + rank)
        due = []
        for call, step in enumerate(steps):
            if source.random() < 0.05:
                time.sleep(source.random() * rest)
            if source.random() < 0.001:
                schedule.request("x")
            if schedule.is_due(step):
                due.append(step)
                schedule.saved(step)
            meet(rank, call)
        return due

    return body


def assert_agreed(results: list[list[int]]) -> None:
    assert results[1:] == [results[0]] * (len(results) - 1)
    assert results[0] != []


def free(rank: int, call: int) -> None:
    """Ranks meet nowhere."""


def in_process(count: int) -> list[Any]:
    world = InProcessWorld(count)
    return [world.hub(rank) for rank in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_threads_at_different_speeds_agree(seed: int) -> None:
    steps = random_steps(random.Random(seed), 4000)
    assert_agreed(run_threads(in_process(4), walk(steps, seed, free, 0.002), interval=0.02))


@pytest.mark.parametrize("seed", range(2))
def test_threads_in_lockstep_agree(seed: int) -> None:
    barrier = threading.Barrier(4)

    def meet(rank: int, call: int) -> None:
        barrier.wait(20)

    steps = random_steps(random.Random(seed), 3000)
    assert_agreed(run_threads(in_process(4), walk(steps, seed, meet, 0.001), interval=0.02))


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


def test_a_rank_that_runs_ahead_of_the_coordinator_agrees() -> None:
    progress = Progress(4)

    def meet(rank: int, call: int) -> None:
        progress.made(rank, call)
        if rank != 3:
            progress.wait([0, 1, 2], call - 1)
        progress.wait([0], call - (20 if rank == 3 else 3))

    steps = random_steps(random.Random(5), 3000)
    assert_agreed(run_threads(in_process(4), walk(steps, 5, meet, 0.002), interval=0.02))


def test_the_coordinator_may_wait_for_ranks_that_are_two_calls_ahead() -> None:
    progress = Progress(3)
    count = 3000

    def meet(rank: int, call: int) -> None:
        progress.made(rank, call)
        if rank == 0:
            progress.wait([1, 2], min(call + 3, count))

    assert_agreed(run_threads(in_process(3), walk(list(range(count)), 7, meet, 0.001), interval=0.02))


def test_real_hubs_agree() -> None:
    store = Store()
    hubs = [ZmqHub(rank, range(4), 0, store, "k", bind_host="127.0.0.1") for rank in range(4)]
    try:
        assert_agreed(run_threads(hubs, walk(random_steps(random.Random(1), 4000), 1, free, 0.002), interval=0.02))
        barrier = threading.Barrier(4)

        def meet(rank: int, call: int) -> None:
            barrier.wait(20)

        steps = random_steps(random.Random(2), 1000)
        assert_agreed(run_threads(hubs, walk(steps, 2, meet, 0.001), interval=0.02))
    finally:
        for hub in reversed(hubs):
            hub.close()


def test_a_lost_coordinator_does_not_leave_a_rank_waiting() -> None:
    hubs = in_process(2)
    threading.Timer(0.2, hubs[0].close).start()
    begun = time.monotonic()
    with pytest.raises(RankFailureError, match="connection lost"):
        Schedule(hubs[1].channel("steps"), LONG).is_due(0)
    assert time.monotonic() - begun < AT_ONCE


def test_asking_takes_microseconds() -> None:
    hubs = in_process(2)
    schedules = [Schedule(hub.channel("steps"), LONG, interval_seconds=1000.0) for hub in hubs]
    best = [1.0, 1.0]
    for block in range(20):
        for rank, schedule in enumerate(schedules):
            begun = time.perf_counter()
            for step in range(block * 1000, block * 1000 + 1000):
                schedule.is_due(step)
            best[rank] = min(best[rank], (time.perf_counter() - begun) / 1000)
    assert max(best) < 50e-6
