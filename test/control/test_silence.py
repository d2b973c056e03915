"""What both sides of a session make of silence, of farewells and of answers at odd times."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from paddle_dist_ckpt.control import failures, wire
from paddle_dist_ckpt.control import session as control_session
from paddle_dist_ckpt.control.coordinator import GRACE, CoordinatorSession, Links
from paddle_dist_ckpt.control.member import MemberSession
from paddle_dist_ckpt.errors import CheckpointTimeoutError, RankFailureError
from paddle_dist_ckpt.testing.in_process import InProcessWorld
from paddle_dist_ckpt.version import __version__
from test.waiting import PATIENCE


@pytest.mark.parametrize("order", ["round, bye", "bye, round"])
def test_a_farewell_that_crosses_an_answer_ends_the_round(order: str) -> None:
    # The coordinator closed the session before this rank's answer reached it, so it will not judge it any more.
    member = MemberSession(0, "save", rank=1, coordinator=0, timeout=10.0, now=0.0)
    if order == "bye, round":
        member.handle(wire.Bye(0), b"", now=1.0)
        assert member.verdict is None
    member.begin_round("write")
    member.handle(wire.Bye(0), b"", now=1.0)
    error = member.error()
    assert type(error) is RankFailureError
    assert "closed the session before the end of round 'write'" in str(error)


def test_a_reply_counts_though_the_coordinator_has_left_when_it_is_taken() -> None:
    member = MemberSession(0, "save", rank=1, coordinator=0, timeout=10.0, now=0.0)
    member.begin_round("write")
    member.handle(wire.Reply(0, 0), b"done", now=1.0)
    member.handle(wire.Bye(0), b"", now=1.0)
    assert member.verdict is None
    assert member.take_reply() == b"done"


def test_nobody_waits_for_more_of_a_rank_that_has_left() -> None:
    """Such as a part of a message of its next session, which is large."""
    session = CoordinatorSession(0, (0, 1), 0, Links(), lambda rank, message, payload: None, 0.0)
    for rank in (0, 1):
        session.handle(rank, wire.Open(0, "save", 10.0, "0.1.0"), b"", 0.0)
    session.handle(1, wire.Bye(0), b"", 1.0)
    session.hear(1, 1.0)
    for tenths in range(10, 200):
        session.handle(0, wire.Beat(0), b"", tenths / 10)
        session.tick(tenths / 10)
    assert session.verdict is None


def test_different_rounds_are_told_at_once_although_a_rank_has_not_come() -> None:
    session = CoordinatorSession(0, (0, 1, 2), 0, Links(), lambda rank, message, payload: None, 0.0)
    for rank, name in enumerate(("plan", "write")):
        session.handle(rank, wire.Open(0, "save", 10.0, "0.1.0"), b"", 0.0)
        session.handle(rank, wire.Answer(0, 0, name), b"", 0.0)
    session.tick(GRACE)
    assert session.verdict is not None
    assert "ranks disagree about round 0: rank 0 calls 'plan', rank 1 calls 'write'" in session.verdict.message


def test_what_comes_of_the_coordinator_is_no_news_of_a_session_that_it_has_not_come_to() -> None:
    member = MemberSession(0, "save", rank=1, coordinator=0, timeout=10.0, now=0.0)
    for tenths in range(120):
        member.hear(tenths / 10)
        member.tick(tenths / 10)
    assert isinstance(member.error(), CheckpointTimeoutError)


def test_a_rank_may_be_silent_for_the_whole_timeout() -> None:
    session = CoordinatorSession(0, (0, 1), 0, Links(), lambda rank, message, payload: None, 0.0)
    for rank in (0, 1):
        session.handle(rank, wire.Open(0, "save", 10.0, "0.1.0"), b"", 0.0)
    for tenths in range(110):
        session.handle(0, wire.Beat(0), b"", tenths / 10)
        session.tick(tenths / 10)
        assert (session.verdict is None) == (tenths <= 10 * (10.0 + GRACE) + 1)


def test_no_rank_is_called_silent_that_has_come_and_waits_longer_than_the_first_one() -> None:
    session = CoordinatorSession(0, (0, 1, 2), 0, Links(), lambda rank, message, payload: None, 0.0)
    session.handle(1, wire.Open(0, "save", 1.0, "0.1.0"), b"", 0.0)
    session.handle(2, wire.Open(0, "save", 30.0, "0.1.0"), b"", 0.0)
    for tenths in range(400):
        for rank in (1, 2):
            if tenths % (1 if rank == 1 else 30) == 0:
                session.handle(rank, wire.Beat(0), b"", tenths / 10)
        session.tick(tenths / 10)
    assert session.verdict is not None
    assert session.verdict.missing_ranks == (0,)


def test_an_answer_to_another_round_is_not_mixed_with_those_of_this_one() -> None:
    session = CoordinatorSession(0, (0, 1), 0, Links(), lambda rank, message, payload: None, 0.0)
    for rank in (0, 1):
        session.handle(rank, wire.Open(0, "save", 10.0, "0.1.0"), b"", 0.0)
        session.handle(rank, wire.Answer(0, rank, "plan"), b"", 0.0)
    assert session.parts() is None
    session.tick(1.0)
    assert session.verdict is not None
    assert "on rank 1: answered round 1 while the session was in round 0" in session.verdict.message


@pytest.mark.parametrize("others", ["have given up", "are gone"])
def test_a_coordinator_that_slept_hears_first_what_the_others_sent_meanwhile(others: str) -> None:
    sent: list[wire.Message] = []
    session = CoordinatorSession(0, (0, 1, 2), 0, Links(), lambda rank, message, payload: sent.append(message), 0.0)
    for rank in (1, 2):
        session.handle(rank, wire.Open(0, "save", 1.0, "0.1.0"), b"", 0.0)
    session.tick(0.0)
    session.handle(0, wire.Open(0, "save", 1.0, "0.1.0"), b"", 9.0)
    session.handle(0, wire.Answer(0, 0, "plan"), b"", 9.0)
    again = session.tick(9.0)
    assert session.verdict is None
    if others == "have given up":
        for rank in (1, 2):
            session.handle(rank, wire.Fail(0, "", failures.timeout_error("save", [0], 1.0)), b"", 9.01)
        session.tick(9.01 + GRACE)
    else:
        assert again <= 9.0 + GRACE
        session.tick(9.01 + GRACE)
        assert session.failing
        session.tick(99.0)  # having slept again
    assert session.verdict is not None
    assert session.verdict.missing_ranks == ((0,) if others == "have given up" else (1, 2))


@pytest.mark.parametrize("others", ["wait", "have given up"])
def test_a_coordinator_that_slept_ends_no_round_before_it_knows_who_still_waits(others: str) -> None:
    """The others had answered before it slept; that they have given up since comes after its own answer."""
    session = CoordinatorSession(0, (0, 1, 2), 0, Links(), lambda rank, message, payload: None, 0.0)
    for rank in (1, 2):
        session.handle(rank, wire.Open(0, "save", 1.0, "0.1.0"), b"", 0.0)
        session.handle(rank, wire.Answer(0, 0, "plan"), b"", 0.0)
    session.tick(0.0)
    session.handle(0, wire.Open(0, "save", 1.0, "0.1.0"), b"", 9.0)
    session.handle(0, wire.Answer(0, 0, "plan"), b"", 9.0)
    assert session.parts() is None
    if others == "have given up":
        session.handle(1, wire.Fail(0, "", failures.timeout_error("save", [0], 1.0)), b"", 9.01)
    else:
        for rank in (1, 2):
            session.handle(rank, wire.Beat(0), b"", 9.0 + GRACE / 2)
    again = session.tick(9.0 + GRACE / 2)
    assert session.parts() is None
    assert others == "have given up" or again <= 9.0 + GRACE
    session.tick(9.0 + GRACE)
    assert (session.parts() is not None) == (others == "wait")


def test_a_rank_that_is_lost_while_the_coordinator_combines_ends_the_round_for_all() -> None:
    sent: list[tuple[int, wire.Message]] = []
    session = CoordinatorSession(0, (0, 1, 2), 0, Links(), lambda rank, message, _: sent.append((rank, message)), 0.0)
    for rank in range(3):
        session.handle(rank, wire.Open(0, "save", 10.0, "0.1.0"), b"", 0.0)
        session.handle(rank, wire.Answer(0, 0, "write"), b"", 0.0)
    assert session.parts() is not None
    session.lose(2, 0.1)
    session.reply(dict.fromkeys(range(3), b""))
    session.tick(0.1 + GRACE)
    assert not any(isinstance(message, wire.Reply) for _, message in sent)
    assert {rank for rank, message in sent if isinstance(message, wire.Verdict)} >= {0, 1}


def test_a_rank_that_slept_hears_first_what_the_coordinator_sent_meanwhile() -> None:
    member = MemberSession(0, "save", rank=1, coordinator=0, timeout=1.0, now=0.0)
    member.tick(0.0)
    _, again = member.tick(9.0)
    assert member.verdict is None
    assert again < 9.2
    member.tick(9.01 + GRACE)
    assert member.verdict is None
    message, _ = member.tick(9.5)
    assert isinstance(message, wire.Fail)
    assert member.verdict is not None
    assert member.verdict.missing_ranks == (0,)


def test_an_answer_of_another_round_fails_its_rank_and_what_comes_after_a_farewell_is_nothing() -> None:
    sent: list[tuple[int, wire.Message]] = []
    session = CoordinatorSession(0, (0, 1, 2), 0, Links(), lambda rank, message, _: sent.append((rank, message)), 0.0)
    for rank in range(3):
        session.handle(rank, wire.Open(0, "save", 10.0, __version__), b"", 0.0)
    session.handle(2, wire.Bye(0), b"", 0.0)
    session.handle(2, wire.Answer(0, 5, "write"), b"", 0.0)
    assert not session.failing
    session.handle(1, wire.Answer(0, 5, "write"), b"", 0.0)
    session.tick(2 * GRACE)
    assert session.verdict is not None
    assert "rank 1" in session.verdict.message
    assert "answered round 5 while the session was in round 0" in session.verdict.message
    assert [rank for rank, message in sent if isinstance(message, wire.Verdict)] == [0, 1]


def test_a_tiny_timeout_of_one_rank_does_not_have_all_send_beats_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world, sent = InProcessWorld(3), list[wire.Message]()
    send = world.send

    def noted(source: int, destination: int, message: wire.Message, payload: bytes) -> None:
        sent.append(message)
        send(source, destination, message, payload)

    def work(rank: int) -> None:
        with world.hub(rank).session("save", 0.01 if rank == 2 else 60.0) as session:
            session.gather_scatter("r", lambda: time.sleep(1) or b"", lambda parts: parts)

    monkeypatch.setattr(world, "send", noted)
    begun = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert 10 <= sum(isinstance(message, wire.Beat) for message in sent) < 100 * (time.monotonic() - begun)


def test_a_tiny_timeout_counts_as_a_longer_one_where_another_thread_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_session, "SHORTEST_TIMEOUT", PATIENCE)
    world = InProcessWorld(1)

    def load() -> str:
        with world.hub(0).session("load", 0.01) as session:
            return session.run_collectives(world.transport(0), lambda transfers: "loaded")

    with ThreadPoolExecutor(1) as pool, world.hub(0).session("save", PATIENCE) as earlier:
        loading = pool.submit(load)
        assert not wait([loading], 0.3).done
        earlier.end_collectives()
        assert loading.result(PATIENCE) == "loaded"
