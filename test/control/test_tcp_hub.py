"""What the hub over TCP does when all is well, to the end: errors with any text, rest, closing."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from paddle_dist_ckpt.control import TcpHub, wire
from paddle_dist_ckpt.control.keys import PROTOCOL
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError, RankFailureError, StateDictMismatchError
from paddle_dist_ckpt.testing.hub_conformance.cases import AT_ONCE, LONG, SHORT, in_background, own_number
from test.control.tcp import Relayed, Store, both, make, one_round
from test.waiting import until


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_with_text_that_is_no_unicode_is_told_and_the_hubs_go_on(hubs: list[TcpHub], failing: int) -> None:
    def fail(hub: TcpHub) -> object:
        def local() -> bytes:
            if hub.rank == failing:
                raise LookupError("caf\udce9")
            return b""

        told = pytest.raises(RankFailureError, match=rf"on rank {failing}: LookupError: caf\\udce9")
        with told, hub.session("save", LONG) as session:
            session.gather_scatter("r", local, lambda parts: parts)
        appointments = hub.appointments("steps of caf\udce9", LONG)
        return next(step for step in itertools.count() if appointments.reach(step, wish=step == 3))

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(fail, hubs))) == 1
    assert both(hubs) == [b"0", b"1"]


def test_errors_that_are_too_much_for_a_message_are_told_by_their_text(
    hubs: list[TcpHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of very many ranks, each with very many problems."""
    monkeypatch.setattr(wire, "MAX_PAYLOAD", 1 << 20)
    errors = [
        StateDictMismatchError("it does not fit", ["x" * 1000] * 800),
        OSError("it cannot be read" + 300_000 * "y"),
    ]

    def call(hub: TcpHub) -> CheckpointError:
        def fail() -> bytes:
            raise errors[hub.rank]

        with pytest.raises(RankFailureError) as caught, hub.session("load", LONG) as session:
            session.gather_scatter("r", fail, lambda parts: parts)
        return caught.value

    with ThreadPoolExecutor(2) as pool:
        told = [str(error) for error in pool.map(call, hubs)]
    assert all("it does not fit" in text and "it cannot be read" in text for text in told)
    assert both(hubs) == [b"0", b"1"]


def test_hubs_that_have_nothing_to_do_rest(hubs: list[TcpHub], monkeypatch: pytest.MonkeyPatch) -> None:
    """They were woken, and have sent more than the system takes at once; or the coordinator has ended."""

    def work(hub: TcpHub) -> None:
        with hub.session("save", LONG) as session:
            session.gather_scatter("r", lambda: bytes(1 << 24), lambda parts: dict.fromkeys(parts, b""))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, hubs))
    turns: list[int] = []
    for hub in hubs:
        wait = hub._port.wait
        monkeypatch.setattr(
            hub._port, "wait", lambda seconds, hub=hub, wait=wait: (turns.append(hub.rank), wait(seconds))
        )
        hub._port.wake()
    time.sleep(0.1)
    assert len(turns) < 20, "training needs the processor now"
    hubs[0].close()
    turns.clear()
    time.sleep(0.1)
    assert len(turns) < 20


def test_what_was_sent_is_not_kept(hubs: list[TcpHub]) -> None:
    """Only what waits for a connection is, or a job's memory would grow with each call."""
    assert both(hubs) == [b"0", b"1"]
    assert not hubs[1]._port._waiting
    hubs[0].close()
    until(lambda: not hubs[1]._port.connections, what="an end of the connection")
    with pytest.raises(RankFailureError):
        one_round(hubs[1])
    assert [type(message) for message, _ in hubs[1]._port._waiting] == [wire.Bye]


def test_closing_is_quick_final_and_can_be_repeated(store: Store) -> None:
    before = threading.active_count()
    hubs = [make(0, store), make(1, store)]
    assert both(hubs) == [b"0", b"1"]
    begun = time.monotonic()
    for hub in hubs * 2:
        hub.close()
    assert time.monotonic() - begun < 3
    assert threading.active_count() <= before


def test_closing_without_the_other_side_is_quick(store: Store) -> None:
    store.set("k", msgspec.msgpack.encode([PROTOCOL, "tcp://127.0.0.1:9", b"t" * 16]))
    hub = make(1, store)
    with pytest.raises(RankFailureError) as caught:  # where the coordinator has listened nobody does any more
        one_round(hub)
    assert {rank: str(error) for rank, error in caught.value.failures.items()} == {0: "connection lost"}
    begun = time.monotonic()
    hub.close()
    assert time.monotonic() - begun < 2


def test_what_was_sent_last_arrives_although_the_hub_closes(store: Store) -> None:
    large = b"x" * (16 << 20)

    def work(hub: TcpHub) -> bytes:
        with hub.session("save", LONG) as session:
            reply = session.gather_scatter("r", lambda: b"", lambda parts: dict.fromkeys(parts, large))
        hub.close()
        return reply

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, [make(0, store), make(1, store)])) == [large, large]


def test_an_error_told_last_arrives_although_the_hub_closes(hubs: list[TcpHub]) -> None:
    problems = tuple(str(number) * (1 << 19) for number in range(32))

    def fail() -> None:
        with pytest.raises(StateDictMismatchError), hubs[1].session("save", LONG):
            raise StateDictMismatchError("m", problems)
        hubs[1].close()

    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(fail)
        with pytest.raises(StateDictMismatchError) as caught:
            one_round(hubs[0])
        failing.result()
    assert caught.value.problems == problems


def test_a_rank_that_is_late_for_two_sessions_is_told_in_both(store: Store) -> None:
    # A rank that connects only now has missed what the others were told of both.
    coordinator = make(0, store)
    first, second = (
        in_background(coordinator, own_number, timeout=SHORT),
        in_background(coordinator, own_number, 1, SHORT),
    )
    assert isinstance(first.exception(10), CheckpointTimeoutError)
    assert isinstance(second.exception(10), CheckpointTimeoutError)
    late = make(1, store)
    begun = time.monotonic()
    for each in [in_background(late, own_number), in_background(late, own_number)]:
        assert "arrived late" in str(each.exception(10))
    assert time.monotonic() - begun < AT_ONCE
    after = [in_background(hub, own_number) for hub in (coordinator, late)]
    assert [each.result(10) for each in after] == [b"0", b"1"]
    late.close()
    coordinator.close()


def test_the_coordinator_does_not_leave_before_its_last_reply_has_come(relayed: Relayed) -> None:
    """Its process may end by then, without any warning."""
    (coordinator, member), proxy = relayed

    def work(hub: TcpHub) -> bytes:
        def combine(parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
            proxy.open.clear()
            return parts

        with hub.session("save", LONG) as session:
            return session.gather_scatter("r", lambda: b"", combine)

    with ThreadPoolExecutor(2) as pool:
        leaving, waiting = pool.submit(work, coordinator), pool.submit(work, member)
        time.sleep(0.3)
        left = leaving.done()
        proxy.open.set()
        assert not left
        assert (leaving.result(AT_ONCE), waiting.result(AT_ONCE)) == (b"", b"")


def test_closing_wakes_a_rank_that_waits(hubs: list[TcpHub]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one_round, hubs[1])
        time.sleep(0.1)
        hubs[1].close()
        with pytest.raises(CheckpointError, match="hub was closed"):
            waiting.result(5)
