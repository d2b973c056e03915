"""Connections of the hub over TCP that break, or over which nonsense comes."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from paddle_dist_ckpt.control import TcpHub, member_port, wire
from paddle_dist_ckpt.control.bootstrap import address_of
from paddle_dist_ckpt.control.coordinator import CoordinatorSession, Links
from paddle_dist_ckpt.errors import CheckpointTimeoutError, RankFailureError
from paddle_dist_ckpt.testing.hub_conformance.cases import LONG
from test.control.tcp import Proxy, Relayed, Store, both, make, one_round
from test.waiting import PATIENCE, until


def test_nonsense_from_a_member_ends_its_connection(hubs: list[TcpHub], caplog: pytest.LogCaptureFixture) -> None:
    assert both(hubs) == [b"0", b"1"]
    with caplog.at_level(logging.WARNING, "paddle_dist_ckpt"), hubs[1].changed:
        (connection,) = hubs[1]._port.connections
        connection.send(b"\xc1", b"")
    closed = "the control connection to rank 1 is closed: "  # which may be followed by a new one at once
    until(lambda: any(closed in line for line in caplog.messages), PATIENCE, "the end of the connection")
    until(lambda: both(hubs) == [b"0", b"1"], PATIENCE, "a round over a new connection")


@pytest.mark.parametrize("sender", [0, 1])
def test_a_warning_of_nonsense_comes_once_a_minute(
    hubs: list[TcpHub], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, sender: int
) -> None:
    """On both sides, of each rank."""

    def nonsense() -> None:
        until(lambda: both(hubs) == [b"0", b"1"], PATIENCE, "a round over a new connection")
        with hubs[sender].changed:
            (connection,) = hubs[sender]._port.connections
            connection.send(b"\xc1", b"")
        until(lambda: connection not in hubs[sender]._port.connections, PATIENCE, "its end")

    def said() -> list[str]:
        return [line for line in caplog.messages if line.startswith(f"the control connection to rank {sender} is ")]

    for _ in range(4):
        nonsense()
    assert len(said()) == 1
    monkeypatch.setattr(hubs[1 - sender]._port._telling[sender], "_next", 0.0)  # as a minute later
    nonsense()
    assert len(said()) == 2
    assert said()[1] == f"{said()[0]} (and was 3 times since the last such warning)"


def test_a_session_of_a_number_after_which_none_can_come_ends_the_connection(hubs: list[TcpHub]) -> None:
    assert both(hubs) == [b"0", b"1"]
    with hubs[1].changed:
        (connection,) = hubs[1]._port.connections
        connection.send(wire.encode(wire.Open((1 << 64) - 1, "save", LONG, "0.1.0")), b"")
    # On both: one that has left out a call, and loses its connection at its next, is waited for as if it were silent.
    for outcome, lost in zip(both(hubs), ("rank 1", "rank 0"), strict=True):
        assert isinstance(outcome, RankFailureError)
        assert lost in str(outcome)
    until(lambda: both(hubs) == [b"0", b"1"], PATIENCE, "a round over a new connection")


def test_a_frame_altered_on_the_way_ends_the_connection(relayed: Relayed, caplog: pytest.LogCaptureFixture) -> None:
    hubs, proxy = relayed
    assert both(hubs) == [b"0", b"1"]
    proxy.altered = True
    assert all(isinstance(outcome, (RankFailureError, CheckpointTimeoutError)) for outcome in both(hubs))
    assert any("a frame with a wrong signature" in line for line in caplog.messages)
    proxy.altered = False
    until(lambda: both(hubs) == [b"0", b"1"], PATIENCE, "a round over a new connection")


def test_a_connection_that_breaks_fails_the_session_and_comes_back(relayed: Relayed) -> None:
    hubs, proxy = relayed
    assert both(hubs) == [b"0", b"1"]

    def cut_in_a_round(hub: TcpHub) -> Mapping[int, BaseException]:
        with pytest.raises(RankFailureError) as caught, hub.session("save", LONG) as session:

            def local() -> bytes:
                if session.rank == 0:
                    time.sleep(0.1)
                    proxy.cut()
                    # Had the round ended by now, only the rank that misses the reply would know.
                    time.sleep(0.5)
                return b""

            session.gather_scatter("r", local, lambda parts: parts)
        return caught.value.failures

    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        named = [{rank: str(e) for rank, e in found.items()} for found in pool.map(cut_in_a_round, hubs)]
    assert named == [{1: "connection lost"}, {0: "connection lost"}]
    assert time.monotonic() - begun < 5
    # It connects again by itself; until then sessions fail at once, on both sides.
    until = time.monotonic() + 10
    while (outcomes := both(hubs)) != [b"0", b"1"] and time.monotonic() < until:
        assert all(isinstance(outcome, RankFailureError) for outcome in outcomes)
        time.sleep(0.1)
    assert outcomes == [b"0", b"1"]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such limit")
def test_a_connection_on_which_nothing_gets_through_is_ended_and_another_one_made(relayed: Relayed) -> None:
    """And what was to be sent over it does not stay in memory."""
    hubs, proxy = relayed
    assert both(hubs) == [b"0", b"1"]
    (before,) = hubs[0]._port.connections
    large = bytes(64 << 20)  # more than the systems take that nobody reads

    def fail(hub: TcpHub) -> None:
        def combine(parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
            proxy.open.clear()
            return dict.fromkeys(parts, large)

        with pytest.raises(CheckpointTimeoutError), hub.session("load", 1.0) as session:
            session.gather_scatter("r", lambda: b"", combine)
            if session.rank == 0:  # it has its own reply
                session.gather_scatter("next", lambda: b"", combine)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fail, hubs))
    until(lambda: before not in hubs[0]._port.connections, PATIENCE, "the end of the connection")
    assert before.ended
    proxy.cut()
    proxy.open.set()
    until(lambda: both(hubs) == [b"0", b"1"], PATIENCE, "a round over a new connection")


@pytest.mark.parametrize("sender", [0, 1])
def test_a_part_of_a_message_is_news_of_a_rank(hubs: list[TcpHub], sender: int) -> None:
    """Its beats may wait behind the rest of a large message for longer than the timeout."""
    table = hubs[0].table
    assert table is not None
    assert both(hubs) == [b"0", b"1"]
    with hubs[1].session("save", LONG) as member, hubs[0].session("save", LONG):
        until(lambda: len(table.sessions[1].kinds) == 2 and member._member._coordinator_came, what="both")
        heard = (lambda: member._member._heard) if sender == 0 else (lambda: table.sessions[1]._heard[1])
        (connection,) = hubs[sender]._port.connections
        before = heard()
        for part in (b"\0", b"\0\0", b"\0"):
            connection.socket.send(part)
            until(lambda: heard() > before, what="news")  # noqa: B023
            before = heard()


def test_a_part_of_a_message_is_no_news_of_a_rank_in_a_session_that_it_has_not_opened() -> None:
    session = CoordinatorSession(0, (0, 1), 0, Links(), lambda to, message, payload: None, 0.0)
    session.handle(0, wire.Open(0, "save", 1.0, "1"), b"", 0.0)
    for tenths in range(16):
        session.handle(0, wire.Beat(0), b"", tenths / 10)
        session.hear(1, tenths / 10)
        session.tick(tenths / 10)
    assert session.verdict is not None
    assert session.verdict.missing_ranks == (1,)


def test_a_rank_that_connects_again_before_its_connection_is_known_to_be_lost_fails_the_session_for_all(
    relayed: Relayed,
) -> None:
    """It misses what was on its way to it; the coordinator, which has its answer, must not go on alone."""
    hubs, proxy = relayed
    assert both(hubs) == [b"0", b"1"]
    (before,) = hubs[0]._port.connections

    def cut_in_a_round(hub: TcpHub) -> bytes:
        with hub.session("save", LONG) as session:

            def local() -> bytes:
                if session.rank == 0:
                    assert hub.table is not None
                    led = hub.table.sessions[session._member.number]
                    until(lambda: 1 in led._answers, what="the other rank's answer")
                    proxy.cut_from_the_member()
                    until(lambda: before not in hub._port.connections, what="another connection")
                return b""

            return session.gather_scatter("r", local, lambda parts: parts)

    with ThreadPoolExecutor(2) as pool:
        for outcome in [pool.submit(cut_in_a_round, hub) for hub in hubs]:
            assert isinstance(outcome.exception(PATIENCE), RankFailureError)
    until(lambda: not hubs[0].links.lost and not hubs[1].links.lost, what="a new connection")
    assert both(hubs) == [b"0", b"1"]


def lose_connection(hubs: list[TcpHub], proxy: Proxy) -> None:
    """Cut what has worked; who connects anew hears nothing until the proxy is open."""
    assert both(hubs) == [b"0", b"1"]
    proxy.open.clear()
    proxy.cut()
    until(lambda: hubs[0].links.lost and hubs[1].links.lost, PATIENCE, "the end of the connection")


def test_calls_that_failed_without_a_connection_do_not_make_the_next_one_fail(relayed: Relayed) -> None:
    hubs, proxy = relayed
    lose_connection(hubs, proxy)
    for _ in range(3):
        assert all(isinstance(outcome, RankFailureError) for outcome in both(hubs))
    proxy.open.set()
    until(lambda: not hubs[0].links.lost and not hubs[1].links.lost, PATIENCE, "a new connection")
    assert both(hubs) == [b"0", b"1"]


def test_a_call_that_failed_without_a_connection_may_end_when_there_is_one_again(relayed: Relayed) -> None:
    """It is no call that this rank makes too late: its next one is the others' next."""
    hubs, proxy = relayed
    lose_connection(hubs, proxy)
    with pytest.raises(RankFailureError):
        one_round(hubs[0])
    table = hubs[0].table
    assert table is not None
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RankFailureError), hubs[1].session("save", LONG) as session:
            proxy.open.set()
            until(lambda: not hubs[0].links.lost and not hubs[1].links.lost, PATIENCE, "a new connection")
            following = pool.submit(one_round, hubs[0])
            until(lambda: 2 in table.sessions or following.done(), PATIENCE, "the next call")
            session.check()
        assert one_round(hubs[1]) == b"1"
        assert following.result(PATIENCE) == b"0"


def test_an_attempt_to_connect_that_nobody_answers_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_port, "_ATTEMPT_SECONDS", 0.2)
    coordinator = make(0, store)
    found = store.rendezvous()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts, nobody greets
        address = ("127.0.0.1", int(silent.getsockname()[1]))
        store.set("k", msgspec.msgpack.encode(msgspec.structs.replace(found, endpoint=f"tcp://127.0.0.1:{address[1]}")))
        member = make(1, store)
        port = member._port
        assert isinstance(port, member_port.MemberPort)
        attempts = [silent.accept()[0] for _ in range(2)]  # a second one, since the first was given up
        port._address = address_of(found)
        assert both([coordinator, member]) == [b"0", b"1"]
    for hub in (member, coordinator):
        hub.close()
    for attempt in attempts:
        attempt.close()


def test_appointments_survive_a_connection_that_breaks(relayed: Relayed) -> None:
    hubs, proxy = relayed
    cuts = iter(range(3))

    def walk(hub: TcpHub) -> list[int]:
        appointments = hub.appointments("t", LONG)
        kept: list[int] = []
        step = 0
        while len(kept) < 3:
            if not appointments.leads and step % 100 == 50 and next(cuts, None) is not None:
                proxy.cut()
            try:
                if appointments.reach(step, wish=step % 100 == (20 if appointments.leads else 49)):
                    kept.append(step)
                step += 1
            except RankFailureError:  # until it is connected again
                pass
            time.sleep(0.001)
        appointments.close()
        return kept

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(walk, hubs)
    assert first == second


def test_a_rank_that_connects_after_the_session_failed_is_told_why(store: Store) -> None:
    coordinator = make(0, store)
    with pytest.raises(CheckpointTimeoutError):
        one_round(coordinator, timeout=0.2)
    late = make(1, store)
    begun = time.monotonic()
    with pytest.raises(CheckpointTimeoutError, match="rank 1 arrived late"):
        one_round(late)
    assert time.monotonic() - begun < 5
    assert both([coordinator, late]) == [b"0", b"1"]
    late.close()
    coordinator.close()
