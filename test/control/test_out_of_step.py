"""Sessions that ranks are not in together: who is told what, and whether the next ones go on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from paddle_dist_ckpt.control import failures, wire
from paddle_dist_ckpt.control.coordinator import GRACE, CoordinatorSession, Links
from paddle_dist_ckpt.control.coordinator_table import CoordinatorTable
from paddle_dist_ckpt.errors import CheckpointError
from paddle_dist_ckpt.testing.in_process import InProcessWorld
from paddle_dist_ckpt.version import __version__


def test_ranks_need_not_begin_at_0_nor_the_coordinator_be_the_first() -> None:
    world = InProcessWorld([4, 6, 9], coordinator=6)

    def work(rank: int) -> bytes:
        with world.hub(rank).session("save", 5) as session:
            assert (session.ranks, session.coordinator) == ((4, 6, 9), 6)
            return session.gather_scatter("a", lambda: b"%d" % rank, lambda parts: parts)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, [4, 6, 9])) == [b"4", b"6", b"9"]


def test_a_rank_that_is_ahead_fails_the_calls_concerned_at_once_and_is_in_step_then() -> None:
    world = InProcessWorld(3)
    world._hubs[1]._opened = 2  # as if two of its calls had failed before it had a hub

    def work(rank: int) -> tuple[BaseException | None, bytes]:
        failed: BaseException | None = None
        try:
            with world.hub(rank).session("save", 100) as session:
                session.gather_scatter("a", lambda: b"", lambda parts: parts)
        except CheckpointError as error:
            failed = error
        with world.hub(rank).session("save", 100) as session:
            return failed, session.gather_scatter("a", lambda: b"%d" % rank, lambda parts: parts)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, range(3)))
    assert [reply for _, reply in found] == [b"0", b"1", b"2"]
    errors = [error for error, _ in found]
    assert "on rank 1: is 2 calls ahead of the other ranks" in str(errors[0])
    assert str(errors[2]) == str(errors[0])
    assert "2 calls behind the other ranks; the next calls are matched by number again, so bring" in str(errors[1])


def check_all_are_in_the_next(table: CoordinatorTable, sent: list[tuple[int, wire.Message]]) -> None:
    """Both ranks are in session 1, and nobody was told of a failure."""
    assert not any(isinstance(message, wire.Verdict) for _, message in sent)
    assert table.sessions[1].kinds.keys() == {0, 1}
    assert not table.sessions[1].failing


def test_a_session_without_rounds_leaves_no_rank_behind() -> None:
    """However late the news of it comes to a coordinator that is in the next one already."""
    sent: list[tuple[int, wire.Message]] = []
    table = CoordinatorTable((0, 1), 0, Links(), lambda rank, message, payload: sent.append((rank, message)))
    for rank, message in [
        (0, wire.Open(0, "save", 100.0, "0.1.0")),
        (0, wire.Bye(0)),
        (0, wire.Open(1, "save", 100.0, "0.1.0")),
        (1, wire.Open(0, "save", 100.0, "0.1.0")),
        (1, wire.Bye(0)),
        (1, wire.Open(1, "save", 100.0, "0.1.0")),
    ]:
        table.handle(rank, message, b"", 0.0)
        table.tick(0.0)
    check_all_are_in_the_next(table, sent)


def test_a_late_call_that_its_rank_has_left_does_not_make_the_next_one_fail() -> None:
    sent: list[tuple[int, wire.Message]] = []
    table = CoordinatorTable((0, 1), 0, Links(), lambda rank, message, payload: sent.append((rank, message)))
    failed = failures.record("it failed")
    for rank, message in [
        (0, wire.Open(0, "save", 100.0, "0.1.0")),
        (0, wire.Fail(0, "", failed)),
        (0, wire.Bye(0)),
    ]:
        table.handle(rank, message, b"", 0.0)
    table.tick(GRACE + 0.1)  # over for all, without rank 1
    sent.clear()
    for rank, message in [
        (1, wire.Open(0, "save", 100.0, "0.1.0")),
        (1, wire.Bye(0)),
        (0, wire.Open(1, "save", 100.0, "0.1.0")),
        (1, wire.Open(1, "save", 100.0, "0.1.0")),
    ]:
        table.handle(rank, message, b"", 2.0)
    table.tick(2.0)
    check_all_are_in_the_next(table, sent)


def test_a_late_call_whose_connection_is_lost_does_not_make_the_next_one_fail() -> None:
    """Its rank has given it up as the others have, though the news of that may still come."""
    sent: list[tuple[int, wire.Message]] = []
    table = CoordinatorTable((0, 1), 0, Links(), lambda rank, message, payload: sent.append((rank, message)))
    failed = failures.record("it failed")
    for message in [wire.Open(0, "save", 100.0, "0.1.0"), wire.Fail(0, "", failed), wire.Bye(0)]:
        table.handle(0, message, b"", 0.0)
    table.lose(1, 0.0)
    table.handle(1, wire.Open(0, "save", 100.0, "0.1.0"), b"", 2.0)
    table.lose(1, 2.0)
    sent.clear()
    for rank, message in [
        (0, wire.Open(1, "save", 100.0, "0.1.0")),
        (1, wire.Bye(0)),
        (1, wire.Open(1, "save", 100.0, "0.1.0")),
    ]:
        table.handle(rank, message, b"", 2.0)
        table.tick(2.0)
    check_all_are_in_the_next(table, sent)


def failed_before_rank_2_came(
    has_answered: bool = True,
) -> tuple[CoordinatorSession, list[tuple[int, wire.Message]]]:
    """A session of three ranks in which rank 1 has raised an error of its own; and what is sent."""
    sent: list[tuple[int, wire.Message]] = []
    session = CoordinatorSession(0, (0, 1, 2), 0, Links(), lambda rank, message, _: sent.append((rank, message)), 0.0)
    for rank in (0, 1):
        session.handle(rank, wire.Open(0, "save", 10.0, "0.1.0"), b"", 0.0)
    if has_answered:
        session.handle(0, wire.Answer(0, 0, "plan"), b"", 0.0)
    session.handle(1, wire.Fail(0, "plan", failures.record("it failed"), 0), b"", 0.0)
    return session, sent


def test_an_error_waits_for_a_rank_until_it_is_silent_for_too_long() -> None:
    session, _ = failed_before_rank_2_came()
    now = 0.0
    while session.verdict is None and now < 20:
        due = session.tick(now)
        assert due >= now or session.verdict is not None, "it would be looked at without end"
        for rank in (0, 1):
            session.handle(rank, wire.Beat(0), b"", now)
        now = min(due, now + 1) + 0.01
    assert 10 < now < 12
    assert session.verdict is not None
    assert {rank: error.message.partition(";")[0] for rank, error in session.verdict.failures} == {
        1: "it failed",
        2: "it timed out: rank 2 not heard of for 10 s",
    }


def test_an_error_waits_for_no_rank_that_was_told_to_leave_the_call_out() -> None:
    """It comes late for the call before, which the others have given up."""
    sent: list[tuple[int, wire.Message]] = []
    table = CoordinatorTable((0, 1, 2), 0, Links(), lambda rank, message, payload: sent.append((rank, message)))

    ticks = iter(np.arange(0, 10, 0.05).tolist())

    def say(now: float, *messages: tuple[int, wire.Open | wire.Fail | wire.Bye]) -> None:
        for tick in itertools.takewhile(lambda tick: tick < now, ticks):
            for rank in (0, 1) if messages else ():
                table.handle(rank, wire.Beat(max(table.sessions, default=0)), b"", tick)
            table.tick(tick)
        for rank, message in messages:
            table.handle(rank, message, b"", now)
        table.tick(now)

    say(0.0, (0, wire.Open(0, "save", 5.0, "0.1.0")), (1, wire.Open(0, "save", 5.0, "0.1.0")))
    say(5.1)
    say(5.2, (0, wire.Bye(0)), (1, wire.Bye(0)))
    say(6.0, (0, wire.Open(1, "save", 5.0, "0.1.0")), (1, wire.Open(1, "save", 5.0, "0.1.0")))
    say(6.0, (1, wire.Fail(1, "plan", failures.record("it failed"), 0)))
    sent.clear()
    say(7.0, (2, wire.Open(0, "save", 5.0, "0.1.0")))
    say(7.0 + GRACE)
    verdicts = {rank: message for rank, message in sent if isinstance(message, wire.Verdict)}
    assert verdicts.keys() == {0, 1, 2}
    assert {verdicts[rank].resume for rank in range(3)} == {2}, "all are in step again"
    assert [rank for rank, _ in verdicts[0].error.failures] == [1, 2]


def test_what_a_rank_has_raised_is_told_beside_a_disagreement() -> None:
    session, _ = failed_before_rank_2_came()
    session.handle(2, wire.Open(0, "load", 10.0, "0.1.0"), b"", 5.0)
    session.tick(5.0 + GRACE)
    assert session.verdict is not None
    assert session.verdict.message.startswith("ranks disagree about the call: ")
    assert session.verdict.message.endswith("; rank 1 failed: it failed")


def test_ranks_that_run_different_versions_are_told_so() -> None:
    """Nothing else is said, which would only follow from it: other names of calls, messages that are not understood."""
    sent = list[tuple[int, wire.Message]]()
    session = CoordinatorSession(0, (0, 1, 2), 0, Links(), lambda rank, message, _: sent.append((rank, message)), 0.0)
    session.handle(0, wire.Open(0, "save", 10.0, "0.1.0"), b"", 0.0)
    session.handle(1, wire.Open(0, "write", 10.0, "0.2.0"), b"", 0.0)
    session.handle(2, wire.Open(0, "save", 10.0, "0.1.0"), b"", 0.1)
    verdicts = {rank: message.error for rank, message in sent if isinstance(message, wire.Verdict)}
    assert verdicts.keys() == {0, 1, 2}
    assert {error.type_name for error in verdicts.values()} == {"CheckpointError"}
    assert {error.message for error in verdicts.values()} == {
        "ranks run different versions of paddle_dist_ckpt (ranks 0, 2: 0.1.0, rank 1: 0.2.0); "
        "install the same one on every rank"
    }


def test_a_rank_says_which_version_it_runs() -> None:
    opened = list[wire.Message]()
    world = InProcessWorld(2)
    hub = world.hub(1)
    hub._carry = lambda destination, message, payload: opened.append(message)  # type: ignore[method-assign]
    with hub.session("save", 1.0):
        pass
    assert opened[0] == wire.Open(0, "save", 1.0, __version__)


@pytest.mark.parametrize(
    ("round_of_rank_1", "text"),
    [
        (0, "save failed on rank 1: KeyboardInterrupt"),
        (
            1,
            "ranks disagree about round 1: rank 0 calls 'write', rank 1 calls 'plan'; all ranks must make the same "
            "calls in the same order; rank 1 failed: KeyboardInterrupt",
        ),
    ],
)
def test_a_rank_that_fails_before_it_hears_the_reply_disagrees_with_nobody(round_of_rank_1: int, text: str) -> None:
    session = CoordinatorSession(0, (0, 1), 0, Links(), lambda rank, message, payload: None, 0.0)
    for rank in (0, 1):
        session.handle(rank, wire.Open(0, "save", 10.0, "0.1.0"), b"", 0.0)
        session.handle(rank, wire.Answer(0, 0, "plan"), b"", 0.0)
    session.reply({0: b"", 1: b""})
    session.handle(0, wire.Answer(0, 1, "write"), b"", 0.0)
    error = failures.record_of(KeyboardInterrupt(), failures.SHARED_IN_LOCAL)
    session.handle(1, wire.Fail(0, "plan", error, round_of_rank_1), b"", 0.0)
    session.tick(1.0)
    assert session.verdict is not None
    assert session.verdict.message == text
    assert (session.verdict.type_name == "RankFailureError") == (round_of_rank_1 == 0)
    assert [rank for rank, _ in session.verdict.failures] == ([1] if round_of_rank_1 == 0 else [])


def test_a_failure_without_a_round_can_be_read() -> None:
    frame = msgspec.msgpack.encode(["Fail", 3, "plan", ["OSError", "x"]])
    assert wire.decode(frame) == wire.Fail(3, "plan", wire.ErrorRecord("OSError", "x"), -1)


@pytest.mark.parametrize("what", ["connection", "patience", "patience before any answer"])
def test_an_error_waits_for_nobody_when_another_rank_is_gone(what: str) -> None:
    session, _ = failed_before_rank_2_came(has_answered=what != "patience before any answer")
    session.tick(5.0)
    assert session.verdict is None
    if what == "connection":
        session.lose(0, 5.0)
    else:
        session.handle(1, wire.Bye(0), b"", 5.0)
    session.tick(5.0 + GRACE)
    assert session.verdict is not None


def test_nobody_waits_for_a_call_of_which_the_end_alone_was_heard() -> None:
    """Its beginning was lost with a connection."""
    sent: list[tuple[int, wire.Message]] = []
    table = CoordinatorTable((0, 1), 0, Links(), lambda rank, message, payload: sent.append((rank, message)))
    table.handle(1, wire.Bye(0), b"", 0.0)
    table.handle(0, wire.Open(0, "save", 200.0, "0.1.0"), b"", 0.1)
    due = table.tick(0.2)
    while not any(isinstance(message, wire.Verdict) for _, message in sent):
        assert due < 5
        due = table.tick(due)
    (told,) = [(rank, message) for rank, message in sent if isinstance(message, wire.Verdict)]
    assert told[0] == 0
    assert "on rank 1: the connection was lost while it made this call" in told[1].error.message
    table.handle(0, wire.Bye(0), b"", 6.0)
    for rank in (0, 1):
        table.handle(rank, wire.Open(1, "save", 200.0, "0.1.0"), b"", 6.0)
    assert [table.handle(rank, wire.Answer(1, 0, "r"), b"x", 6.0) for rank in (0, 1)] == [False, True]


def test_a_call_that_nobody_else_has_begun_names_the_rank_of_which_the_end_was_heard() -> None:
    sent: list[tuple[int, wire.Message]] = []
    table = CoordinatorTable((0, 1), 0, Links(), lambda rank, message, payload: sent.append((rank, message)))
    table.handle(1, wire.Bye(0), b"", 0.0)
    table.tick(5.0)
    table.handle(0, wire.Open(0, "save", 200.0, "0.1.0"), b"", 5.1)
    table.tick(30.0)
    (told,) = [message for _, message in sent if isinstance(message, wire.Verdict)]
    assert told.error.type_name == "RankFailureError"
    assert "on rank 1: the connection was lost while it made this call" in told.error.message


@pytest.mark.parametrize(
    ("name", "local", "text"),
    [
        ("", lambda: b"", "a round needs a name"),
        ("r", lambda: b"123456789", "what local returns has 9 bytes; a message may have 8"),
    ],
    ids=["no name", "too long"],
)
def test_what_cannot_be_sent_is_refused_and_the_others_are_told(
    name: str, local: Callable[[], bytes], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_PAYLOAD", 8)
    world = InProcessWorld(2)

    def work(rank: int) -> BaseException | None:
        try:
            with world.hub(rank).session("save", 60.0) as session:
                session.gather_scatter(name if rank else "r", local if rank else lambda: b"", lambda parts: parts)
        except (ValueError, CheckpointError) as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(work, (0, 1)))
    assert all(text in str(error) for error in errors), errors
