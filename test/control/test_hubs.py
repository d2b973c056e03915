"""The hub over TCP and its in-process twin do what every hub must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paddle_dist_ckpt.control.appointment import Attendance
from paddle_dist_ckpt.testing.hub_conformance import HubConformance
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
