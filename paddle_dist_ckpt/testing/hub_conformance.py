"""What every control hub must do, as tests that whoever writes one can run over it.

Derive a class whose name begins with ``Test``, and give it a fixture that makes a group of hubs, new for every test::

    class TestMyHub(HubConformance):
        @pytest.fixture
        def group(self):
            group = MyGroup()  # see HubGroup
            yield group
            group.close()

pytest shows what was compared if it is told to before the import, in conftest.py:
``pytest.register_assert_rewrite("paddle_dist_ckpt.testing.hub_conformance")``.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from ..core.protocols import Appointments, CollectiveWatch
from ..errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    RankFailureError,
    StateDictMismatchError,
    UnsupportedValueError,
)
from .hub_cases import (
    AT_ONCE,
    LONG,
    RANKS,
    SHORT,
    HubGroup,
    assert_works,
    echo,
    in_background,
    one_round,
    own_number,
    raising,
    run,
    slowly,
)

__all__ = ["HubConformance"]


def failing_combine(error: BaseException) -> Callable[[Any, int], object]:
    """A session whose ``combine`` raises."""

    def work(hub: Any, rank: int) -> object:
        def combine(parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
            raise error

        with hub.session("load", LONG) as session:
            return session.gather_scatter("plan", lambda: b"", combine)

    return work


def first_appointment(appointments: Appointments, wish_at: int | None = None) -> int:
    """Go on, step by step, until there is an appointment."""
    for step in itertools.count():
        if appointments.reach(step, wish=step == wish_at):
            return step
        time.sleep(0.0005)
    raise AssertionError("there is no end of steps")


class HubConformance:
    """Tests of a :class:`paddle_dist_ckpt.core.protocols.ControlHub`."""

    @pytest.fixture
    def group(self) -> Iterator[HubGroup]:
        """A new group of hubs; to be overridden."""
        raise NotImplementedError("derive from HubConformance, and make a fixture 'group'")

    # -- sessions: rounds, errors, deadlines

    def test_every_rank_gets_its_own_reply_in_every_round(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> list[bytes]:
            with hub.session("save", LONG) as session:
                assert (session.rank, session.ranks, session.coordinator) == (rank, (0, 1, 2, 3), 0)

                def combine(parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
                    assert rank == 0
                    everything = b",".join(parts[source] for source in sorted(parts))
                    return {target: everything + b">%d" % target for target in parts}

                return [session.gather_scatter(f"r{i}", lambda: b"%d" % rank, combine) for i in range(20)]

        assert run(group, work) == {rank: [b"0,1,2,3>%d" % rank] * 20 for rank in range(RANKS)}

    def test_empty_and_large_messages(self, group: HubGroup) -> None:
        large = bytes(range(256)) * (1 << 15)

        def work(hub: Any, rank: int) -> tuple[bytes, bytes]:
            with hub.session("save", LONG) as session:
                first = session.gather_scatter("large", lambda: large + own_number(rank), echo)
                return first, session.gather_scatter("empty", lambda: b"", echo)

        assert run(group, work) == {rank: (large + own_number(rank), b"") for rank in range(RANKS)}

    def test_two_sessions_alive_at_once(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> list[bytes]:
            with hub.session("save", LONG) as background:
                got = [background.gather_scatter("a", lambda: b"a%d" % rank, echo)]
                late: list[bytes] = []

                def finish() -> None:
                    late.append(background.gather_scatter("b", lambda: b"b%d" % rank, echo))

                # Odd ranks are ahead in the one session, even ranks in the other.
                thread = threading.Thread(target=finish)
                if rank % 2:
                    thread.start()
                with hub.session("load", LONG) as foreground:
                    got.append(foreground.gather_scatter("c", lambda: b"c%d" % rank, echo))
                if not rank % 2:
                    thread.start()
                thread.join()
                return got + late

        assert run(group, work) == {rank: [b"a%d" % rank, b"c%d" % rank, b"b%d" % rank] for rank in range(RANKS)}

    def test_a_failure_of_one_session_leaves_another_alone(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> bytes:
            with hub.session("save", LONG) as background:
                with pytest.raises(RankFailureError), hub.session("load", LONG) as foreground:
                    foreground.gather_scatter("c", lambda: raising({1: OSError("x")})(rank), echo)
                return bytes(background.gather_scatter("a", lambda: own_number(rank), echo))

        assert run(group, work) == {rank: own_number(rank) for rank in range(RANKS)}

    def test_an_error_of_one_rank_is_raised_on_all(self, group: HubGroup) -> None:
        original = OSError(28, "No space left on device")
        outcomes = run(group, one_round(raising({2: original})))
        for rank, error in outcomes.items():
            assert type(error) is RankFailureError
            assert str(error) == "save failed in round 'write' on rank 2: OSError: [Errno 28] No space left on device"
            assert list(error.failures) == [2]
            if rank == 2:
                assert error.failures[2] is original
                assert error.__cause__ is original
            else:
                assert type(error.failures[2]) is CheckpointError
                assert str(error.failures[2]) == "OSError: [Errno 28] No space left on device"
        assert_works(group)

    def test_errors_of_several_ranks_are_collected(self, group: HubGroup) -> None:
        together = threading.Barrier(2)

        def local(rank: int) -> bytes:
            if rank in (1, 3):
                together.wait(10)
            if rank == 3:
                raise CheckpointCorruptedError("bad block")
            if rank == 1:
                raise OSError("no")
            if rank == 2:
                # Busy beyond the grace, so that the verdict does not wait for it.
                time.sleep(0.6)
            return b""

        for error in run(group, one_round(local)).values():
            assert set(error.failures) == {1, 3}
            assert "on rank 1: OSError: no; on rank 3: CheckpointCorruptedError: bad block" in str(error)

    @pytest.mark.parametrize("kind", [UnsupportedValueError, StateDictMismatchError, ValueError, TypeError])
    def test_a_shared_error_in_local_keeps_its_type(self, group: HubGroup, kind: type[Exception]) -> None:
        outcomes = run(group, one_round(raising({1: kind("bad a"), 3: kind("bad b")})))
        for error in outcomes.values():
            assert type(error) is kind
            assert str(error) == "on rank 1: bad a; on rank 3: bad b"
        assert str(outcomes[1].__cause__) == "bad a"

    def test_the_same_error_on_every_rank_is_told_once(self, group: HubGroup) -> None:
        outcomes = run(group, one_round(raising({rank: ValueError("path is empty") for rank in range(RANKS)})))
        assert {(type(error), str(error)) for error in outcomes.values()} == {(ValueError, "path is empty")}

    def test_mismatch_problems_of_all_ranks_are_merged(self, group: HubGroup) -> None:
        errors = {1: StateDictMismatchError("m", ["a", "b"]), 2: StateDictMismatchError("m", ["b", "c"])}
        for error in run(group, one_round(raising(errors))).values():
            assert type(error) is StateDictMismatchError
            assert str(error) == "on ranks 1, 2: m"
            assert error.problems == ("a", "b", "c")

    def test_shared_and_other_errors_together_name_the_ranks(self, group: HubGroup) -> None:
        errors = {1: UnsupportedValueError("bad"), 2: OSError("no")}
        for rank, error in run(group, one_round(raising(errors))).items():
            assert type(error) is RankFailureError
            assert set(error.failures) == {1, 2}
            assert type(error.failures[1]) is UnsupportedValueError
            assert (error.failures[2] is errors[2]) == (rank == 2)

    def test_a_subclass_of_value_error_is_an_error_of_its_rank(self, group: HubGroup) -> None:
        error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        assert all(type(found) is RankFailureError for found in run(group, one_round(raising({1: error}))).values())

    @pytest.mark.parametrize(
        "kind",
        [CheckpointNotFoundError, CheckpointCorruptedError, StateDictMismatchError, UnsupportedValueError, ValueError],
    )
    def test_a_shared_error_in_combine_keeps_its_type(self, group: HubGroup, kind: type[Exception]) -> None:
        error = kind("x", ["p", "q"]) if kind is StateDictMismatchError else kind("x")
        outcomes = run(group, failing_combine(error))
        assert outcomes[0] is error
        for found in outcomes.values():
            assert type(found) is kind
            assert str(found) == "x" or kind is ValueError
            assert getattr(found, "problems", ()) == getattr(error, "problems", ())
        assert_works(group)

    def test_another_error_in_combine_names_the_coordinator(self, group: HubGroup) -> None:
        original = OSError("disk gone")
        for rank, error in run(group, failing_combine(original)).items():
            assert type(error) is RankFailureError
            assert str(error) == "load failed in round 'plan' on rank 0: OSError: disk gone"
            assert (error.failures[0] is original) == (rank == 0)

    def test_combine_must_reply_to_every_rank(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> object:
            with hub.session("load", LONG) as session:
                return session.gather_scatter("plan", lambda: b"", lambda parts: {0: b""})

        for error in run(group, work).values():
            assert type(error) is ValueError
            assert "[0, 1, 2, 3]" in str(error)

    def test_ranks_that_do_different_things_all_raise(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> object:
            with hub.session("load" if rank == 2 else "save", LONG) as session:
                return session.gather_scatter("plan", lambda: b"", echo)

        for error in run(group, work).values():
            assert type(error) is CheckpointError
            assert "rank 0 calls 'save', rank 1 calls 'save', rank 2 calls 'load', rank 3 calls 'save'" in str(error)
        assert_works(group)

    def test_ranks_in_different_rounds_all_raise(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> object:
            with hub.session("save", LONG) as session:
                return session.gather_scatter("write" if rank == 2 else "plan", lambda: b"", echo)

        for error in run(group, work).values():
            assert type(error) is CheckpointError
            assert "rank 1 calls 'plan', rank 2 calls 'write'" in str(error)

    @pytest.mark.parametrize("missing", [[1, 3], [0], [0, 2]], ids=str)
    def test_missing_ranks_time_out_and_may_come_back(self, group: HubGroup, missing: list[int]) -> None:
        present = [rank for rank in range(RANKS) if rank not in missing]
        begun = time.monotonic()
        outcomes = run(group, one_round(own_number, SHORT), present)
        took = time.monotonic() - begun
        for error in outcomes.values():
            assert type(error) is CheckpointTimeoutError
            assert error.missing_ranks == tuple(missing)
        assert SHORT <= took < SHORT + AT_ONCE
        # The late ranks find the session abandoned; then all are level again.
        begun = time.monotonic()
        late = run(group, one_round(own_number, LONG), missing)
        assert time.monotonic() - begun < AT_ONCE
        for error in late.values():
            assert type(error) is CheckpointTimeoutError
            assert "arrived late" in str(error)
        assert_works(group)

    @pytest.mark.parametrize("skipping", [0, 3])
    @pytest.mark.parametrize("first", [True, False], ids=["comes first", "comes last"])
    def test_a_rank_that_leaves_out_a_call_is_in_step_again_after_the_next(
        self, group: HubGroup, skipping: int, first: bool
    ) -> None:
        others = [rank for rank in range(RANKS) if rank != skipping]
        for error in run(group, one_round(own_number, SHORT), others).values():
            assert type(error) is CheckpointTimeoutError

        def next_call(hub: Any, rank: int) -> bytes:
            time.sleep(0.0 if (rank == skipping) == first else 0.3)
            with hub.session("save", LONG) as session:
                return bytes(session.gather_scatter("plan", lambda: own_number(rank), echo))

        begun = time.monotonic()
        outcomes = run(group, next_call)
        assert time.monotonic() - begun < AT_ONCE
        assert "arrived late" in str(outcomes[skipping])
        for rank in others:
            assert type(outcomes[rank]) is RankFailureError
            assert list(outcomes[rank].failures) == [skipping]
            assert "behind" in str(outcomes[rank])
        assert_works(group)

    def test_work_may_last_longer_than_the_timeout(self, group: HubGroup) -> None:
        def local(rank: int) -> bytes:
            if rank in (0, 2):
                time.sleep(2 * SHORT)
            return own_number(rank)

        assert run(group, one_round(local, SHORT)) == {rank: own_number(rank) for rank in range(RANKS)}

    def test_combine_may_last_longer_than_the_timeout(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> bytes:
            def combine(parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
                time.sleep(2 * SHORT)
                return parts

            with hub.session("save", SHORT) as session:
                return bytes(session.gather_scatter("plan", lambda: own_number(rank), combine))

        assert run(group, work) == {rank: own_number(rank) for rank in range(RANKS)}

    def test_a_lost_connection_is_noticed_at_once(self, group: HubGroup) -> None:
        def local(rank: int) -> bytes:
            if rank == 2:
                time.sleep(0.1)
                group.cut(2)
            return b""

        begun = time.monotonic()
        outcomes = run(group, one_round(local))
        assert time.monotonic() - begun < AT_ONCE
        for rank in (0, 1, 3):
            assert type(outcomes[rank]) is RankFailureError
            assert {failed: str(error) for failed, error in outcomes[rank].failures.items()} == {2: "connection lost"}
            assert str(outcomes[rank]) == "save failed in round 'write' on rank 2: connection lost"
        assert isinstance(outcomes[2], CheckpointError)

    def test_a_lost_coordinator_is_noticed_at_once(self, group: HubGroup) -> None:
        def local(rank: int) -> bytes:
            if rank == 0:
                time.sleep(0.1)
                group.cut(0)
            return b""

        begun = time.monotonic()
        outcomes = run(group, one_round(local))
        assert time.monotonic() - begun < AT_ONCE
        for rank in (1, 2, 3):
            assert type(outcomes[rank]) is RankFailureError
            assert str(outcomes[rank].failures[0]) == "connection lost"

    @pytest.mark.parametrize("first", [True, False])
    def test_a_rank_lost_between_sessions_fails_the_next_at_once(self, group: HubGroup, first: bool) -> None:
        if first:  # there are connections, but there was no session
            run(group, lambda hub, rank: first_appointment(hub.appointments("t", LONG), 0 if rank == 3 else None))
        else:
            assert_works(group)
        group.cut(3)
        begun = time.monotonic()
        outcomes = run(group, one_round(own_number), [0, 1, 2])
        assert time.monotonic() - begun < AT_ONCE
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

        begun = time.monotonic()
        outcomes = run(group, work)
        assert time.monotonic() - begun < AT_ONCE
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
        begun = time.monotonic()
        error = run(group, one_round(own_number), [3])[3]
        assert time.monotonic() - begun < AT_ONCE
        # Told when it opens the session, or, if that was faster than the news, in its first round.
        assert isinstance(error, CheckpointError)
        assert "closed session 0 (save) already" in str(error) or "closed the session before" in str(error)
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
        def work(hub: Any, rank: int) -> object:
            with hub.session("load", LONG) as session:
                got = session.run_collectives(lambda watch: rank + 10)
                assert session.run_collectives(lambda watch: None) is None
                with pytest.raises(ZeroDivisionError):
                    session.run_collectives(lambda watch: 1 // 0)
                session.gather_scatter("end", lambda: b"", echo)
                return got

        assert run(group, work) == {rank: rank + 10 for rank in range(RANKS)}
        assert sorted(group.abandoned) == [0, 1, 2, 3]  # what raised half-way may have left out operations

    def test_stuck_collectives_are_given_up_when_another_rank_fails(self, group: HubGroup) -> None:
        never = threading.Event()

        def work(hub: Any, rank: int) -> object:
            with hub.session("load", LONG) as session:

                def local() -> bytes:
                    if rank == 1:
                        time.sleep(0.1)
                        raise OSError("no")
                    session.run_collectives(lambda watch: never.wait(60))
                    return b""

                return session.gather_scatter("exchange", local, echo)

        begun = time.monotonic()
        outcomes = run(group, work)
        assert time.monotonic() - begun < AT_ONCE
        never.set()
        for error in outcomes.values():
            assert type(error) is RankFailureError
            assert list(error.failures) == [1]
        assert sorted(group.abandoned) == [0, 2, 3]
        assert_works(group)

    def test_collectives_that_hang_on_every_rank_are_given_up(self, group: HubGroup) -> None:
        never = threading.Event()

        def work(hub: Any, rank: int) -> object:
            def stuck(watch: CollectiveWatch) -> object:
                with watch.waiting():
                    return never.wait(60)

            with hub.session("load", SHORT) as session:
                return session.run_collectives(stuck)

        outcomes = run(group, work)
        never.set()
        for error in outcomes.values():
            assert type(error) is RankFailureError
            assert "no progress" in str(error)
        assert sorted(group.abandoned) == [0, 1, 2, 3]
        assert_works(group)

    def test_collectives_may_wait_longer_than_the_timeout_for_a_rank_that_works(self, group: HubGroup) -> None:
        meeting = threading.Event()

        def work(hub: Any, rank: int) -> object:
            def slow(watch: CollectiveWatch) -> str:
                if rank == 2:
                    time.sleep(2 * SHORT)  # works, and the others wait for it in a collective
                    meeting.set()
                with watch.waiting():
                    meeting.wait(60)
                return "done"

            with hub.session("load", SHORT) as session:
                return session.run_collectives(slow)

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
                    session.run_collectives(lambda watch: None)
                return "seen"

        assert run(group, work) == dict.fromkeys(range(RANKS), "seen")
        assert_works(group)

    def test_a_closed_hub_says_so(self, group: HubGroup) -> None:
        group.hub(1).close()
        with pytest.raises(CheckpointError, match="hub was closed"), group.hub(1).session("save", LONG) as session:
            session.check()

    # -- several sessions at once

    def test_sessions_come_and_go_while_others_are_at_work_on_their_threads(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> list[bytes]:
            pending: list[Future[bytes]] = []
            got: list[bytes] = []
            for _ in range(3):
                pending.append(in_background(hub, own_number, rounds=20))
                got += [one_round(lambda rank: b"f%d" % rank)(hub, rank) for _ in range(5)]
            return got + [each.result(10) for each in pending]

        assert run(group, work) == {rank: [b"f%d" % rank] * 15 + [own_number(rank)] * 3 for rank in range(RANKS)}

    @pytest.mark.parametrize("culprit", [0, 2])
    def test_a_failure_in_the_background_leaves_the_foreground_alone(self, group: HubGroup, culprit: int) -> None:
        def work(hub: Any, rank: int) -> bytes:
            failing = in_background(hub, slowly(raising({culprit: OSError("full")})))
            with hub.session("load", LONG) as foreground:
                foreground.gather_scatter("plan", lambda: b"", echo)
                assert isinstance(failing.exception(10), RankFailureError)
                foreground.check()
                assert one_round(own_number)(hub, rank) == own_number(rank)
                return bytes(foreground.gather_scatter("write", lambda: own_number(rank), echo))

        assert run(group, work) == {rank: own_number(rank) for rank in range(RANKS)}
        assert_works(group)

    @pytest.mark.parametrize("culprit", [0, 2])
    def test_failures_in_the_foreground_leave_the_background_alone(self, group: HubGroup, culprit: int) -> None:
        def work(hub: Any, rank: int) -> bytes:
            working = in_background(hub, slowly(), rounds=3)
            for _ in range(3):
                with pytest.raises(RankFailureError, match="OSError: no"):
                    one_round(raising({culprit: OSError("no")}))(hub, rank)
            assert one_round(own_number)(hub, rank) == own_number(rank)
            return working.result(10)

        assert run(group, work) == {rank: own_number(rank) for rank in range(RANKS)}

    @pytest.mark.parametrize("missing", [0, 3])
    @pytest.mark.parametrize("comes_back", ["late", "one call behind"])
    def test_a_session_given_up_for_a_rank_leaves_an_older_one_alone(
        self, group: HubGroup, missing: int, comes_back: str
    ) -> None:
        together = threading.Barrier(RANKS)

        def work(hub: Any, rank: int) -> bytes:
            working = in_background(hub, slowly(), rounds=10)
            if rank != missing:
                with pytest.raises(CheckpointTimeoutError) as caught:
                    one_round(own_number, SHORT)(hub, rank)
                assert caught.value.missing_ranks == (missing,)
            together.wait(10)
            if rank == missing:
                with pytest.raises(CheckpointTimeoutError, match="arrived late"):
                    one_round(own_number)(hub, rank)
            elif comes_back == "one call behind":
                with pytest.raises(RankFailureError, match="behind"):
                    one_round(own_number)(hub, rank)
            together.wait(10)
            assert one_round(own_number)(hub, rank) == own_number(rank)
            return working.result(10)

        assert run(group, work) == {rank: own_number(rank) for rank in range(RANKS)}
        assert_works(group)

    @pytest.mark.parametrize("missing", [0, 3])
    def test_a_rank_that_is_behind_is_noticed_in_all_sessions_that_wait_for_it(
        self, group: HubGroup, missing: int
    ) -> None:
        others = [rank for rank in range(RANKS) if rank != missing]
        for error in run(group, one_round(own_number, SHORT), others).values():
            assert type(error) is CheckpointTimeoutError

        def work(hub: Any, rank: int) -> list[BaseException | None]:
            if rank == missing:
                time.sleep(0.3)
                with pytest.raises(CheckpointTimeoutError, match="arrived late"):
                    one_round(own_number)(hub, rank)
                return []
            background = in_background(hub, own_number)
            with pytest.raises(RankFailureError, match="behind"):
                one_round(own_number)(hub, rank)
            return [background.exception(10)]

        begun = time.monotonic()
        outcomes = run(group, work)
        assert time.monotonic() - begun < AT_ONCE
        for rank in others:
            (error,) = outcomes[rank]
            assert isinstance(error, RankFailureError)
            assert list(error.failures) == [missing]
        assert_works(group)

    def test_an_older_session_that_succeeds_takes_away_no_doubt(self, group: HubGroup) -> None:
        gave_up = threading.Event()
        caught_up = threading.Barrier(RANKS)

        def work(hub: Any, rank: int) -> list[bool]:
            background = hub.session("save", LONG)
            with background:
                background.gather_scatter("plan", lambda: b"", echo)
                if rank != 3:
                    with pytest.raises(CheckpointTimeoutError):
                        one_round(own_number, SHORT)(hub, rank)
                    gave_up.set()
                assert gave_up.wait(10)
                background.gather_scatter("write", lambda: b"", echo)
            doubtful = background.doubtful
            if rank == 3:
                with pytest.raises(CheckpointTimeoutError):
                    one_round(own_number)(hub, rank)
            caught_up.wait(10)
            with hub.session("load", LONG) as following:
                doubtful_then = following.doubtful
                following.gather_scatter("plan", lambda: b"", echo)
            return [doubtful, doubtful_then, following.doubtful]

        outcomes = run(group, work)
        assert outcomes == {0: [True, True, False]} | {rank: [False] * 3 for rank in (1, 2, 3)}

    def test_a_lost_connection_fails_every_session_that_is_open(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> BaseException | None:
            background = in_background(hub, slowly(), rounds=100)
            with pytest.raises(CheckpointError), hub.session("load", LONG) as foreground:
                foreground.gather_scatter("plan", lambda: b"", echo)
                if rank == 2:
                    group.cut(2)
                foreground.gather_scatter("write", lambda: b"", echo)
            return background.exception(10)

        outcomes = run(group, work)
        assert isinstance(outcomes.pop(2), CheckpointError)
        for error in outcomes.values():
            assert isinstance(error, RankFailureError)
            assert list(error.failures) == [2]

    # -- appointments

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
