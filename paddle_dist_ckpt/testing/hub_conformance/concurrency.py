"""Several sessions at once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from ...control.ranks import NoTransport
from ...errors import CheckpointError, CheckpointTimeoutError, RankFailureError
from .cases import (
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

__all__ = ["ConcurrencyTests"]

_MOST_SECONDS = 10.0  # that a session is waited for which is not to be


class ConcurrencyTests:
    """See :class:`paddle_dist_ckpt.testing.hub_conformance.HubConformance`."""

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

        outcomes = run(group, work)
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

    @pytest.mark.parametrize("how", ["close", "end_collectives", "neither"])
    def test_collectives_wait_for_sessions_that_other_threads_opened_before(self, group: HubGroup, how: str) -> None:
        def work(hub: Any, rank: int) -> list[str]:
            begun, may_end, done = threading.Event(), threading.Event(), list[str]()

            def earlier() -> None:
                with hub.session("save", LONG) as session:
                    session.gather_scatter("plan", lambda: b"", echo)
                    begun.set()
                    if how != "neither":
                        time.sleep(0.1 * rank)
                        session.run_collectives(NoTransport(), lambda transfers: done.append("earlier"))
                    if how == "end_collectives":
                        session.end_collectives()
                    if how != "close" and not may_end.wait(_MOST_SECONDS):
                        done.append("the later one waits for this one's end")

            thread = threading.Thread(target=earlier)
            thread.start()
            assert begun.wait(10)
            try:
                with hub.session("load", LONG if how != "neither" else SHORT) as session:
                    session.gather_scatter("plan", lambda: b"", echo)
                    session.run_collectives(NoTransport(), lambda transfers: done.append("later"))
            except CheckpointError as error:
                done.append(str(error))
            may_end.set()
            thread.join(10)
            return done

        for found in run(group, work).values():
            if how == "neither":
                assert "for another thread's save on the same group" in found[0] or "timed out" in found[0], found
            else:
                assert found == ["earlier", "later"]
        assert_works(group)

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
