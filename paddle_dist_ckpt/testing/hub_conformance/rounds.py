"""Sessions: rounds, the errors in them, and ranks that do not agree."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ...errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    RankFailureError,
    StateDictMismatchError,
    UnsupportedValueError,
)
from .cases import LONG, RANKS, SHORT, HubGroup, assert_works, echo, one_round, own_number, raising, run

__all__ = ["RoundTests"]


def failing_combine(error: BaseException) -> Callable[[Any, int], object]:
    """A session whose ``combine`` raises."""

    def work(hub: Any, rank: int) -> object:
        def combine(parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
            raise error

        with hub.session("load", LONG) as session:
            return session.gather_scatter("plan", lambda: b"", combine)

    return work


class RoundTests:
    """See :class:`paddle_dist_ckpt.testing.hub_conformance.HubConformance`."""

    def test_every_rank_gets_its_own_reply_in_every_round(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> list[bytes]:
            called: list[str] = []

            def local() -> bytes:
                called.append("local")
                return b"%d" % rank

            with hub.session("save", LONG) as session:
                assert (session.rank, session.ranks, session.coordinator) == (rank, (0, 1, 2, 3), 0)

                def combine(parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
                    called.append("combine")
                    everything = b",".join(parts[source] for source in sorted(parts))
                    return {target: everything + b">%d" % target for target in parts}

                replies = [session.gather_scatter(f"r{i}", local, combine) for i in range(20)]
            assert called == (["local"] if rank else ["local", "combine"]) * 20, "each of them once"
            return replies

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

    def test_a_session_may_be_closed_again_or_without_being_opened(self, group: HubGroup) -> None:
        def work(hub: Any, rank: int) -> bytes:
            hub.session("load", LONG).__exit__(None, None, None)
            made = hub.session("save", LONG)
            with made as session:
                reply = session.gather_scatter("a", lambda: own_number(rank), echo)
            made.__exit__(OSError, OSError(), None)
            return bytes(reply)

        assert run(group, work) == {rank: own_number(rank) for rank in range(RANKS)}
        assert_works(group)

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
        assert time.monotonic() - begun >= SHORT
        for error in outcomes.values():
            assert type(error) is CheckpointTimeoutError
            assert error.missing_ranks == tuple(missing)
        # The late ranks find the session abandoned; then all are level again.
        late = run(group, one_round(own_number, LONG), missing)
        for error in late.values():
            assert type(error) is CheckpointTimeoutError
            assert "arrived late" in str(error)
        assert_works(group)

    @pytest.mark.parametrize("late", [[0], [3], [1, 2, 3]], ids=str)
    def test_an_error_waits_for_ranks_that_come_late(self, group: HubGroup, late: list[int]) -> None:
        """Else the others would be in their next call when these make this one, and stay one call ahead."""

        def calls(hub: Any, rank: int) -> list[object]:
            if rank in late:
                time.sleep(0.6)
            ended: list[object] = []
            for number in range(3):
                try:
                    with hub.session("save", LONG) as session:
                        local = functools.partial(failing_first, number)
                        ended.append(session.gather_scatter("plan", local, echo))
                except RankFailureError as error:
                    ended.append(sorted(error.failures))
            return ended

        def failing_first(number: int) -> bytes:
            if number == 0:
                raise OSError("injected")
            return b"%d" % number

        for ended in run(group, calls, range(RANKS)).values():
            assert ended == [[*range(RANKS)], b"1", b"2"]

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

        outcomes = run(group, next_call)
        assert "arrived late" in str(outcomes[skipping])
        for rank in others:
            assert type(outcomes[rank]) is RankFailureError
            assert list(outcomes[rank].failures) == [skipping]
            assert "behind" in str(outcomes[rank])
        assert_works(group)
