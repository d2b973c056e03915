"""Sessions: work that lasts, ranks that are lost, leave or are interrupted, collectives that hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ...control import NoTransport
from ...core.memory import Bytes1D
from ...core.protocols import ControlHub, Transfers
from ...errors import CheckpointError, CollectiveError, RankFailureError
from .cases import (
    LONG,
    RANKS,
    SHORT,
    HubGroup,
    assert_works,
    echo,
    first_appointment,
    one_round,
    own_number,
    raising,
    run,
    slowly,
)

__all__ = ["LossTests"]


class Meeting(NoTransport):
    """A transport on which every rank waits for an event. ``abandoned`` gets its rank whenever it is abandoned."""

    def __init__(self, event: threading.Event, rank: int, abandoned: list[int]) -> None:
        self._event, self._rank, self._abandoned = event, rank, abandoned

    def broadcast(self, data: Bytes1D, source: int, most: int) -> None:
        """Wait."""
        self._event.wait(60)

    def abandon(self) -> None:
        """Note it."""
        self._abandoned.append(self._rank)

    @staticmethod
    def attend(transfers: Transfers) -> None:
        """Do a collective."""
        transfers.broadcast(np.zeros(0, np.uint8), 0, 1, lambda: "nothing")


class LossTests:
    """See :class:`paddle_dist_ckpt.testing.hub_conformance.HubConformance`."""

    def test_work_may_last_longer_than_the_timeout(self, group: HubGroup) -> None:
        def local(rank: int) -> bytes:
            if rank in (0, 2):
                time.sleep(2 * SHORT)
            return own_number(rank)

        assert run(group, one_round(local, SHORT)) == {rank: own_number(rank) for rank in range(RANKS)}

    @pytest.mark.parametrize("patient", [[0], [2], [1, 2, 3]])
    def test_work_may_last_longer_than_the_shortest_timeout(self, group: HubGroup, patient: list[int]) -> None:
        def work(hub: ControlHub, rank: int) -> bytes:
            return one_round(slowly(seconds=2 * SHORT), LONG if rank in patient else SHORT)(hub, rank)

        assert run(group, work) == {rank: own_number(rank) for rank in range(RANKS)}

    def test_combine_may_last_longer_than_the_timeout(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> bytes:
            def combine(parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
                time.sleep(2 * SHORT)
                return parts

            with hub.session("save", SHORT) as session:
                return bytes(session.gather_scatter("plan", lambda: own_number(rank), combine))

        assert run(group, work) == {rank: own_number(rank) for rank in range(RANKS)}

    @pytest.mark.parametrize("lost", [2, 0])
    def test_a_lost_connection_is_noticed_at_once(self, group: HubGroup, lost: int) -> None:
        def local(rank: int) -> bytes:
            if rank == lost:
                time.sleep(0.1)
                group.cut(lost)
            return b""

        outcomes = run(group, one_round(local))
        alone = outcomes.pop(lost)  # the coordinator may have ended its part before it notices
        assert lost == 0 or isinstance(alone, CheckpointError)
        for error in outcomes.values():
            assert type(error) is RankFailureError
            assert {failed: str(cause) for failed, cause in error.failures.items()} == {lost: "connection lost"}
            assert f"on rank {lost}: connection lost" in str(error)

    @pytest.mark.parametrize("first", [True, False])
    def test_a_rank_lost_between_sessions_fails_the_next_at_once(self, group: HubGroup, first: bool) -> None:
        if first:  # there are connections, but there was no session
            run(group, lambda hub, rank: first_appointment(hub.appointments("t", LONG), 0 if rank == 3 else None))
        else:
            assert_works(group)
        group.cut(3)
        outcomes = run(group, one_round(own_number), [0, 1, 2])
        assert all(list(error.failures) == [3] for error in outcomes.values())

    def test_a_rank_that_leaves_after_the_last_round_is_no_failure(self, group: HubGroup) -> None:
        left = threading.Event()

        def work(hub: Any, rank: int) -> bytes:
            with hub.session("save", LONG) as session:
                reply = bytes(session.gather_scatter("write", lambda: own_number(rank), echo))
                if rank != 1:
                    assert left.wait(10)
                    time.sleep(0.5)
                    session.check()
                    return reply
            group.cut(1)
            left.set()
            return reply

        assert run(group, work) == {rank: own_number(rank) for rank in range(RANKS)}

    @pytest.mark.parametrize("waiting", [True, False])
    @pytest.mark.parametrize("leaver", [0, 2])
    def test_a_rank_that_leaves_before_the_last_round_is_named(
        self, group: HubGroup, leaver: int, waiting: bool
    ) -> None:
        def work(hub: Any, rank: int) -> object:
            with hub.session("save", LONG) as session:
                session.gather_scatter("plan", lambda: b"", echo)
                if waiting == (rank == leaver):
                    time.sleep(0.2)
                if rank == leaver:
                    return None
                return session.gather_scatter("write", lambda: b"", echo)

        outcomes = run(group, work)
        assert outcomes.pop(leaver) is None
        for error in outcomes.values():
            assert list(error.failures) == [leaver]
            assert "closed the session" in str(error)
        assert_works(group)

    def test_a_session_that_the_coordinator_has_closed_is_over(self, group: HubGroup) -> None:
        def nothing(hub: Any, rank: int) -> None:
            with hub.session("save", LONG):
                return

        run(group, nothing, [0, 1, 2])
        error = run(group, one_round(own_number), [3])[3]
        assert isinstance(error, CheckpointError)
        assert "closed the session before" in str(error)
        assert_works(group)

    @pytest.mark.parametrize("failing", [0, 2])
    def test_an_error_between_rounds_reaches_the_others(self, group: HubGroup, failing: int) -> None:
        def work(hub: Any, rank: int) -> object:
            with hub.session("save", LONG) as session:
                session.gather_scatter("plan", lambda: b"", echo)
                if rank == failing:
                    raise OSError("between")
                return session.gather_scatter("write", lambda: b"", echo)

        outcomes = run(group, work)
        assert type(outcomes.pop(failing)) is OSError
        for error in outcomes.values():
            assert str(error) == f"save failed on rank {failing}: OSError: between"
        assert_works(group)

    @pytest.mark.parametrize("stopped", [0, 2])
    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
    def test_an_interrupt_is_told_and_raised(self, group: HubGroup, kind: type[BaseException], stopped: int) -> None:
        outcomes = run(group, one_round(raising({stopped: kind("stop")})))
        assert type(outcomes.pop(stopped)) is kind
        for error in outcomes.values():
            assert type(error) is RankFailureError
            assert f"on rank {stopped}: {kind.__name__}: stop" in str(error)
        assert_works(group)

    def test_collectives_return_or_raise_what_the_work_does(self, group: HubGroup) -> None:
        abandoned: list[int] = []

        def work(hub: Any, rank: int) -> object:
            transport = Meeting(threading.Event(), rank, abandoned)
            with hub.session("load", LONG) as session:
                got = session.run_collectives(transport, lambda transfers: rank + 10)
                assert session.run_collectives(transport, lambda transfers: None) is None
                assert rank not in abandoned
                with pytest.raises(ZeroDivisionError):
                    session.run_collectives(transport, lambda transfers: 1 // 0)
                session.gather_scatter("end", lambda: b"", echo)
                return got

        assert run(group, work) == {rank: rank + 10 for rank in range(RANKS)}
        assert sorted(abandoned) == [0, 1, 2, 3]  # what raised half-way may have left out operations

    @pytest.mark.parametrize("failing", [0, 2])
    def test_all_ranks_abandon_a_transport_that_has_failed_on_one(self, group: HubGroup, failing: int) -> None:
        abandoned: list[int] = []

        def fail(transfers: Transfers) -> None:
            raise CollectiveError("nothing came")

        def work(hub: Any, rank: int) -> object:
            transport = Meeting(threading.Event(), rank, abandoned)
            with hub.session("load", LONG) as session:

                def local() -> bytes:
                    session.run_collectives(transport, fail if rank == failing else lambda transfers: None)
                    return b""

                return session.gather_scatter("read", local, echo)

        for error in run(group, work).values():
            assert type(error) is CollectiveError
            assert f"on rank {failing}: CollectiveError: nothing came" in str(error)
            assert list(error.failures) == [failing]
        assert set(abandoned) == {0, 1, 2, 3}
        assert_works(group)

    def test_stuck_collectives_are_given_up_when_another_rank_fails(self, group: HubGroup) -> None:
        never, abandoned = threading.Event(), list[int]()

        def work(hub: Any, rank: int) -> object:
            with hub.session("load", LONG) as session:

                def local() -> bytes:
                    if rank == 1:
                        time.sleep(0.1)
                        raise OSError("no")
                    transport = Meeting(never, rank, abandoned)
                    session.run_collectives(transport, lambda transfers: never.wait(60))
                    return b""

                return session.gather_scatter("exchange", local, echo)

        outcomes = run(group, work)
        never.set()
        for error in outcomes.values():
            assert type(error) is RankFailureError
            assert list(error.failures) == [1]
        assert sorted(abandoned) == [0, 2, 3]
        assert_works(group)

    def test_collectives_that_hang_on_every_rank_are_given_up(self, group: HubGroup) -> None:
        never, abandoned = threading.Event(), list[int]()

        def work(hub: Any, rank: int) -> object:
            with hub.session("load", SHORT) as session:
                return session.run_collectives(Meeting(never, rank, abandoned), Meeting.attend)

        outcomes = run(group, work)
        never.set()
        for error in outcomes.values():
            assert type(error) is CollectiveError
            assert "no progress" in str(error)
        assert set(abandoned) == {0, 1, 2, 3}
        assert_works(group)

    def test_collectives_may_wait_longer_than_the_timeout_for_a_rank_that_works(self, group: HubGroup) -> None:
        meeting, timeout = threading.Event(), 4 * SHORT  # on a busy host it may take SHORT until others hear of work

        def work(hub: Any, rank: int) -> object:
            def slow(transfers: Transfers) -> str:
                if rank == 2:
                    time.sleep(1.5 * timeout)  # works, and the others wait for it in a collective
                    meeting.set()
                Meeting.attend(transfers)
                return "done"

            with hub.session("load", timeout) as session:
                return session.run_collectives(Meeting(meeting, rank, []), slow)

        assert run(group, work) == dict.fromkeys(range(RANKS), "done")

    def test_long_work_can_look_whether_the_session_has_failed(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> object:
            session: Any
            with hub.session("save", LONG) as session:

                def local() -> bytes:
                    if rank == 1:
                        raise OSError("no")
                    while True:
                        session.check()
                        time.sleep(0.01)

                return session.gather_scatter("write", local, echo)

        for error in run(group, work).values():
            assert list(error.failures) == [1]

    def test_a_failed_session_stays_failed(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> object:
            with hub.session("save", LONG) as session:
                with pytest.raises(RankFailureError):
                    session.gather_scatter("a", lambda: raising({1: OSError("no")})(rank), echo)
                with pytest.raises(RankFailureError, match="OSError: no"):
                    session.gather_scatter("b", lambda: b"", echo)
                with pytest.raises(RankFailureError):
                    session.run_collectives(None, lambda transport: None)
                return "seen"

        assert run(group, work) == dict.fromkeys(range(RANKS), "seen")
        assert_works(group)

    def test_a_closed_hub_says_so(self, group: HubGroup) -> None:
        group.hub(1).close()
        with pytest.raises(CheckpointError, match="hub was closed"), group.hub(1).session("save", LONG) as session:
            session.check()
