"""The state machines behind appointments, with messages that take their time, and connections that break."""

from __future__ import annotations

import logging
import random
from collections import deque

import pytest

from paddle_dist_ckpt.control import failures
from paddle_dist_ckpt.control.appointment import Appointer, Attendance, Attendances, BoardAppointments
from paddle_dist_ckpt.control.wire import Appointed, Message, Whereabouts
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError, RankFailureError
from paddle_dist_ckpt.testing.in_process import InProcessWorld
from test.strategies import draws

LABEL = ("t", 0)


class Net:
    """Ranks whose messages arrive when the test lets them."""

    def __init__(self, ranks: int) -> None:
        self.lost: set[int] = set()
        self.members = [Attendance(LABEL) for _ in range(ranks)]
        self.to: list[deque[Message]] = [deque() for _ in self.members]
        self.back: list[deque[Message]] = [deque() for _ in self.members]
        self.lead = Appointer(LABEL, tuple(range(ranks)), self.lost, lambda rank, m, payload: self.emit(rank, m))

    def emit(self, rank: int, message: Message) -> None:
        if rank not in self.lost:
            self.to[rank].append(message)

    def say(self, rank: int) -> None:
        self.back[rank].append(self.members[rank].whereabouts())

    def deliver(self, rank: int) -> None:
        """The next message in each direction."""
        if self.to[rank]:
            message = self.to[rank].popleft()
            assert isinstance(message, Appointed)
            if self.members[rank].handle(message):
                self.say(rank)
        if self.back[rank]:
            answer = self.back[rank].popleft()
            assert isinstance(answer, Whereabouts)
            self.lead.handle(rank, answer)

    def settle(self) -> None:
        while any(self.to) or any(self.back):
            for rank in range(len(self.members)):
                self.deliver(rank)

    def break_off(self, rank: int) -> None:
        self.to[rank].clear()
        self.back[rank].clear()
        self.lost.add(rank)
        self.lead.lose()

    def come_back(self, rank: int) -> None:
        self.lost.discard(rank)
        self.lead.regain(rank)
        self.say(rank)


def test_nobody_goes_on_from_its_answer_to_the_decision() -> None:
    net = Net(3)
    for rank, step in enumerate((4, 9, 2)):
        net.members[rank].reach(step)
    net.members[2].wish()
    net.say(2)
    net.deliver(2)
    for rank in (0, 1):
        assert net.members[rank].may_reach(10)
        net.deliver(rank)
        assert not net.members[rank].may_reach(10)
        assert net.members[rank].may_reach(net.members[rank].step)
    assert net.members[2].may_reach(3)
    assert not net.members[2].reach(3)
    net.settle()
    assert [[step for step in range(15) if member.reach(step)] for member in net.members] == [[10]] * 3


def test_a_lost_rank_holds_up_nobody_and_is_asked_again() -> None:
    net = Net(3)
    net.members[0].reach(5)
    net.members[0].wish()
    net.say(0)
    net.deliver(0)
    net.deliver(0)
    net.deliver(1)
    assert not net.members[0].may_reach(6)
    net.break_off(2)
    net.settle()
    assert net.members[0].may_reach(6)
    assert not net.members[0].reach(6)
    net.come_back(2)
    net.settle()
    assert [[step for step in range(15) if member.reach(step)] for member in net.members] == [[7]] * 3


def test_of_too_many_early_ones_the_oldest_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    numbered = Attendances(lambda label: None)
    mine = numbered.next("mine")
    with caplog.at_level(logging.WARNING, "paddle_dist_ckpt"):
        found = [numbered.at((f"t{number}", 0)) for number in range(101)]
    assert len(caplog.messages) == 1
    assert numbered.at(("mine", 0)) is mine
    assert numbered.next("t100") is found[100]
    assert numbered.next("t0") is not found[0]


@pytest.mark.parametrize("seed", range(draws(20, 400)))
def test_all_agree_whatever_is_late_or_lost(seed: int) -> None:
    source = random.Random(seed)
    net = Net(4)
    last = 400
    breaks = source.choice([0.0, 0.01, 0.05])
    speed = [source.choice([1, 1, 3, 30]) for _ in net.members]
    step = [-1] * 4
    found: list[list[int]] = [[] for _ in net.members]
    while min(step) < last:
        rank = source.choices(range(4), speed)[0]
        if source.random() < breaks:
            if rank in net.lost:
                net.come_back(rank)
            elif rank != 0:
                net.break_off(rank)
        if source.random() < 0.7:
            net.deliver(rank)
        member = net.members[rank]
        if step[rank] < last and member.may_reach(step[rank] + 1):
            step[rank] += 1
            if member.reach(step[rank]):
                found[rank].append(step[rank])
            elif source.random() < 0.02:
                member.wish()
                if rank not in net.lost:
                    net.say(rank)
        elif source.random() < 0.3 and rank in net.lost:
            net.come_back(rank)
    assert found[1:] == [found[0]] * 3


def open_question() -> tuple[InProcessWorld, list[BoardAppointments]]:
    """Ranks of which one, 2, has fallen silent, and a question that it does not answer."""
    world = InProcessWorld(3)
    appointments = [world.hub(rank).appointments("t", 0.2) for rank in range(3)]
    world._cut_off.add(2)
    assert not appointments[1].reach(4)
    assert not appointments[0].reach(4, wish=True)
    return world, appointments


def test_waiting_in_vain_names_who_is_silent() -> None:
    _, appointments = open_question()
    for rank, missing in ((0, (2,)), (1, (0,))):
        assert not appointments[rank].reach(3)
        for _ in range(2):
            with pytest.raises(CheckpointTimeoutError, match="waiting for the decision about 't' timed out") as caught:
                appointments[rank].reach(5)
            assert caught.value.missing_ranks == missing


def test_waiting_for_a_lost_coordinator_fails_at_once() -> None:
    world, appointments = open_question()
    world.disconnect(0)
    with pytest.raises(RankFailureError, match="connection lost") as caught:
        appointments[1].reach(5)
    assert list(caught.value.failures) == [0]


def test_a_closed_hub_says_so_to_who_waits() -> None:
    _, appointments = open_question()
    appointments[1]._board.shut(failures.record("the control hub was closed"))
    with pytest.raises(CheckpointError, match="hub was closed"):
        appointments[1].reach(5)
