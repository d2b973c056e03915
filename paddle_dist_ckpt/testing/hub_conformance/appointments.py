"""Steps on which ranks agree ahead."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from .cases import AT_ONCE, LONG, RANKS, HubGroup, assert_works, first_appointment, one_round, own_number, run

__all__ = ["AppointmentTests"]


class AppointmentTests:
    """See :class:`paddle_dist_ckpt.testing.hub_conformance.HubConformance`."""

    @pytest.mark.parametrize("wishing", [[0], [2], [1, 3], [0, 1, 2, 3]], ids=str)
    def test_a_wish_is_an_appointment_of_all_ranks(self, group: HubGroup, wishing: list[int]) -> None:
        def work(hub: Any, rank: int) -> int:
            return first_appointment(hub.appointments("t", LONG), 7 if rank in wishing else None)

        outcomes = run(group, work)
        assert set(outcomes) == set(range(RANKS))
        assert len(set(outcomes.values())) == 1
        assert outcomes[0] > 7

    def test_nobody_waits_for_a_rank_to_reach_a_step(self, group: HubGroup) -> None:
        far = threading.Barrier(2)

        def work(hub: Any, rank: int) -> int:
            appointments = hub.appointments("t", LONG)
            if rank == 2:  # goes on only when rank 1 has its appointment
                assert not appointments.reach(0)
                far.wait(AT_ONCE)
            found = first_appointment(appointments, 5 if rank == 1 else None)
            if rank == 1:
                far.wait(AT_ONCE)
            return found

        assert len(set(run(group, work).values())) == 1

    def test_a_rank_may_make_its_appointments_last(self, group: HubGroup) -> None:
        found: dict[int, int] = run(group, lambda hub, rank: first_appointment(hub.appointments("t", LONG), 3), [0, 1])
        found |= run(group, lambda hub, rank: first_appointment(hub.appointments("t", LONG)), [2, 3])
        assert len(set(found.values())) == 1

    def test_topics_and_their_numbers_do_not_mix(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> list[int]:
            first, second, other = (hub.appointments(topic, LONG) for topic in ("a", "a", "b"))
            found = first_appointment(second, 4 if rank == 3 else None)
            return [found, *(step for step in range(2 * found) if first.reach(step) or other.reach(step))]

        outcomes = run(group, work)
        assert {len(found) for found in outcomes.values()} == {1}
        assert len({found[0] for found in outcomes.values()}) == 1

    def test_one_wish_after_another(self, group: HubGroup) -> None:
        together = threading.Barrier(RANKS)

        def work(hub: Any, rank: int) -> list[int]:
            appointments = hub.appointments("t", LONG)
            found = [first_appointment(appointments, 3 if rank == 1 else None)]
            for step in range(found[0] + 1, found[0] + 400):
                together.wait(AT_ONCE)
                if appointments.reach(step, wish=rank == 2 and step == found[0] + 10):
                    found.append(step)
            return found

        outcomes = run(group, work)
        assert len(outcomes[0]) == 2
        assert list(outcomes.values()) == [outcomes[0]] * RANKS

    def test_a_step_may_be_reached_again(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> list[bool]:
            appointments = hub.appointments("t", LONG)
            found = first_appointment(appointments, 5 if rank == 1 else None)
            return [appointments.reach(step) for step in (found, found, found + 1, found + 1)]

        assert run(group, work) == {rank: [True, True, False, False] for rank in range(RANKS)}

    def test_where_steps_fall_back_there_are_none_before_those_that_were_reached(self, group: HubGroup) -> None:
        together = threading.Barrier(RANKS)

        def work(hub: Any, rank: int) -> int:
            appointments = hub.appointments("t", LONG)
            assert not any(appointments.reach(step) for step in range(100))
            together.wait(AT_ONCE)
            return first_appointment(appointments, 10 if rank == 1 else None)

        outcomes = run(group, work)
        assert set(outcomes.values()) == {outcomes[0]}
        assert outcomes[0] >= 100

    def test_a_rank_without_connection_holds_up_nobody(self, group: HubGroup) -> None:
        assert_works(group)
        group.cut(3)

        def work(hub: Any, rank: int) -> list[bool]:
            appointments = hub.appointments("t", LONG)
            return [appointments.reach(step, wish=rank == 1 and step == 5) for step in range(100)]

        assert run(group, work, [0, 1, 2]) == {rank: [False] * 100 for rank in (0, 1, 2)}

    def test_a_rank_that_has_closed_holds_up_nobody(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> int:
            appointments = hub.appointments("t", LONG)
            if rank == 2:
                appointments.close()
                appointments.close()
                return int(appointments.reach(1, wish=True))
            return first_appointment(appointments, 5 if rank == 1 else None)

        outcomes = run(group, work)
        assert outcomes.pop(2) == 0
        assert len(set(outcomes.values())) == 1

    def test_when_the_coordinator_has_closed_there_are_no_more(self, group: HubGroup) -> None:
        group.hub(0).appointments("t", LONG).close()

        def work(hub: Any, rank: int) -> list[bool]:
            appointments = hub.appointments("t", LONG)
            return [appointments.reach(step, wish=step == 5) for step in range(1000)]

        assert run(group, work, [1, 2, 3]) == {rank: [False] * 1000 for rank in (1, 2, 3)}

    def test_appointments_and_sessions_side_by_side(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> int:
            appointments = hub.appointments("t", LONG)
            for step in itertools.count():
                if appointments.reach(step, wish=rank == 2 and step == 5):
                    return step
                assert one_round(own_number)(hub, rank) == own_number(rank)
            return -1

        outcomes = run(group, work)
        assert set(outcomes.values()) == {outcomes[0]}
        assert outcomes[0] > 5

    def test_a_topic_has_bounds(self, group: HubGroup) -> None:
        with pytest.raises(ValueError, match="1025 characters"):
            group.hub(0).appointments("t" * 1025, LONG)
