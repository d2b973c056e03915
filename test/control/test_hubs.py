"""The hub over TCP and its in-process twin do what every hub must."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paddle_dist_ckpt.control.appointment import Attendance
from paddle_dist_ckpt.control.session import Session
from paddle_dist_ckpt.testing.hub_conformance import HubConformance, concurrency
from test.control.groups import InProcessGroup, TcpGroup


class TestInProcessHub(HubConformance):
    @pytest.fixture
    def group(self) -> InProcessGroup:
        return InProcessGroup()


class TestTcpHub(HubConformance):
    @pytest.fixture
    def group(self) -> Iterator[TcpGroup]:
        made = TcpGroup()
        yield made
        made.close()


class Forgetful(Attendance):
    """Says once that there is an appointment."""

    def reach(self, step: int) -> bool:
        self._asked_about = -1
        return super().reach(step)


class Backward(Attendance):
    """Takes the last step for the furthest."""

    def reach(self, step: int) -> bool:
        answer = super().reach(step)
        self.step = step
        return answer


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (Forgetful, "test_a_step_may_be_reached_again"),
        (Backward, "test_where_steps_fall_back_there_are_none_before_those_that_were_reached"),
    ],
)
def test_a_broken_promise_is_found(kind: type[Attendance], test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.control.appointment.Attendance", kind)
    with pytest.raises(AssertionError):
        getattr(HubConformance, test)(HubConformance(), InProcessGroup())


def test_a_session_that_does_a_rounds_work_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    once = Session.gather_scatter

    def twice(self: Session, name: str, local: Any, combine: Any) -> bytes:
        return once(self, name, lambda: local() and local(), combine)

    monkeypatch.setattr(Session, "gather_scatter", twice)
    with pytest.raises(AssertionError):
        HubConformance().test_every_rank_gets_its_own_reply_in_every_round(InProcessGroup())


def test_a_session_that_does_not_end_its_collectives_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "end_collectives", lambda self: None)
    monkeypatch.setattr(concurrency, "_MOST_SECONDS", 1.0)
    with pytest.raises(AssertionError):
        HubConformance().test_collectives_wait_for_sessions_that_other_threads_opened_before(
            InProcessGroup(), "end_collectives"
        )
