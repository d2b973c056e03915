"""Notes between ranks, over TCP and in process: order, bounds, and that no order of starting matters."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from paddle_dist_ckpt.control import ZmqHub, wire
from paddle_dist_ckpt.control.bootstrap import Rendezvous
from paddle_dist_ckpt.control.notes import KEPT
from paddle_dist_ckpt.core.protocols import Channel
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError, RankFailureError
from paddle_dist_ckpt.testing.in_process import InProcessWorld
from test.control.groups import AT_ONCE, LONG, RANKS, SHORT, Group, Store, assert_works, one_round, own_number, run
from test.control.test_control_zmq_hub import Proxy

MEMBERS = range(1, RANKS)
Notes = list[tuple[int, bytes]]


def channels(group: Group, topic: str = "t") -> list[Channel]:
    return [group.hub(rank).channel(topic) for rank in range(RANKS)]


def hear(channel: Channel, count: int) -> Notes:
    """The next notes, as they come."""
    notes: Notes = []
    while len(notes) < count:
        channel.wait(AT_ONCE)
        notes += channel.heard()
    assert len(notes) == count
    return notes


def numbered(source: int, count: int) -> Notes:
    return [(source, b"%d" % number) for number in range(count)]


def test_the_coordinator_is_heard_by_all_others_and_in_order(group: Group) -> None:
    talk = channels(group)
    assert [(each.rank, each.ranks, each.coordinator) for each in talk] == [(r, (0, 1, 2, 3), 0) for r in range(RANKS)]
    for number in range(200):
        talk[0].announce(b"%d" % number)
    assert [hear(talk[rank], 200) for rank in MEMBERS] == [numbered(0, 200)] * len(MEMBERS)
    assert [each.heard() for each in talk] == [[]] * RANKS


def test_the_coordinator_hears_each_rank_in_order(group: Group) -> None:
    def work(hub: Any, rank: int) -> Notes:
        channel = hub.channel("t")
        if rank == 0:
            return hear(channel, 100 * len(MEMBERS))
        for number in range(100):
            channel.announce(b"%d" % number)
        return list(channel.heard())

    outcomes = run(group, work)
    for rank in MEMBERS:
        assert [note for note in outcomes[0] if note[0] == rank] == numbered(rank, 100)
        assert outcomes[rank] == []


def test_notes_wait_for_the_channel(group: Group) -> None:
    there = group.hub(0).channel("from coordinator")
    there.announce(b"0")
    for rank in MEMBERS:
        group.hub(rank).channel("to coordinator").announce(b"x")
    time.sleep(0.3)
    there.announce(b"1")
    assert [hear(group.hub(rank).channel("from coordinator"), 2) for rank in MEMBERS] == [numbered(0, 2)] * 3
    assert sorted(hear(group.hub(0).channel("to coordinator"), 3)) == [(rank, b"x") for rank in MEMBERS]


def test_topics_do_not_mix(group: Group) -> None:
    a, b = channels(group, "a"), channels(group, "b")
    a[0].announce(b"a")
    b[0].announce(b"b")
    b[2].announce(b"c")
    assert hear(b[1], 1) == [(0, b"b")]
    assert hear(a[1], 1) == [(0, b"a")]
    assert hear(b[0], 1) == [(2, b"c")]
    assert a[0].heard() == []


def test_the_channels_of_a_topic_are_counted(group: Group) -> None:
    first = group.hub(0).channel("t")
    first.announce(b"of the first")
    second = group.hub(0).channel("t")
    second.announce(b"of the second")
    other_first, other_second = group.hub(1).channel("t"), group.hub(1).channel("t")
    assert hear(other_second, 1) == [(0, b"of the second")]
    assert hear(other_first, 1) == [(0, b"of the first")]
    del other_first
    first.announce(b"to nobody")
    second.announce(b"again")
    assert hear(other_second, 1) == [(0, b"again")]


@pytest.mark.parametrize("made", [True, False], ids=["channel made", "channel not made"])
def test_of_too_many_notes_the_oldest_are_dropped(group: Group, made: bool, caplog: pytest.LogCaptureFixture) -> None:
    done = [group.hub(0).channel("done"), group.hub(1).channel("done")]
    here = group.hub(1).channel("t") if made else None
    there = group.hub(0).channel("t")
    with caplog.at_level(logging.WARNING, "paddle_dist_ckpt"):
        for number in range(KEPT + 10):
            there.announce(b"%d" % number)
        done[0].announce(b"")
        hear(done[1], 1)
    assert hear(here or group.hub(1).channel("t"), KEPT) == numbered(0, KEPT + 10)[10:]
    assert sum("rank 1 drops" in line for line in caplog.messages) == 1


def test_of_too_many_topics_the_oldest_are_dropped(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    talk = [group.hub(0).channel(f"t{number}") for number in range(150)]
    with caplog.at_level(logging.WARNING, "paddle_dist_ckpt"):
        for channel in talk:
            channel.announce(b"x")
        done = group.hub(0).channel("t149 done")
        done.announce(b"")
        hear(group.hub(1).channel("t149 done"), 1)
    assert hear(group.hub(1).channel("t149"), 1) == [(0, b"x")]
    assert group.hub(1).channel("t0").heard() == []
    assert sum("rank 1 drops" in line for line in caplog.messages) == 1


def test_only_short_bytes_are_announced(group: Group) -> None:
    channel = group.hub(0).channel("t")
    with pytest.raises(TypeError, match="must be bytes, not str"):
        channel.announce("x")
    with pytest.raises(ValueError, match="65537 bytes"):
        channel.announce(bytes(wire.MAX_NOTE + 1))
    with pytest.raises(ValueError, match="1025 characters"):
        group.hub(0).channel("t" * 1025)
    channel.announce(bytes(wire.MAX_NOTE))
    assert hear(group.hub(1).channel("t"), 1) == [(0, bytes(wire.MAX_NOTE))]


def test_waiting_in_vain_names_who_is_silent(group: Group) -> None:
    talk = channels(group)
    for rank, missing in ((0, (1, 2, 3)), (2, (0,))):
        begun = time.monotonic()
        with pytest.raises(CheckpointTimeoutError, match="waiting for news of 't' timed out") as caught:
            talk[rank].wait(0.2)
        assert caught.value.missing_ranks == missing
        assert 0.2 <= time.monotonic() - begun < AT_ONCE


def test_a_rank_that_waits_wakes_up(group: Group) -> None:
    def work(hub: Any, rank: int) -> Notes:
        channel = hub.channel("t")
        if rank == 0:
            time.sleep(0.2)
            channel.announce(b"x")
            return []
        return hear(channel, 1)

    assert run(group, work) == {0: []} | {rank: [(0, b"x")] for rank in MEMBERS}


def test_waiting_for_a_lost_coordinator_fails_at_once(group: Group) -> None:
    time.sleep(0.3)  # until the connections stand
    threading.Timer(0.2, group.cut, [0]).start()

    def work(hub: Any, rank: int) -> None:
        hub.channel("t").wait(LONG)

    begun = time.monotonic()
    for error in run(group, work, MEMBERS).values():
        assert type(error) is RankFailureError
        assert {rank: str(failure) for rank, failure in error.failures.items()} == {0: "connection lost"}
    assert time.monotonic() - begun < AT_ONCE


def test_what_was_announced_before_the_end_is_still_heard(group: Group) -> None:
    time.sleep(0.3)
    talk = channels(group)
    for number in range(50):
        talk[0].announce(b"%d" % number)
    group.hub(0).close()
    for channel in talk[1:]:
        assert hear(channel, 50) == numbered(0, 50)
        with pytest.raises(RankFailureError):
            channel.wait(LONG)


def test_that_nobody_hears_is_no_error(group: Group) -> None:
    time.sleep(0.3)
    talk = channels(group)
    group.cut(3)
    time.sleep(0.2)
    talk[0].announce(b"x")
    assert [hear(talk[rank], 1) for rank in (1, 2)] == [[(0, b"x")]] * 2
    group.cut(0)
    for channel in talk:
        channel.announce(b"y")


def test_a_closed_hub_wakes_who_waits(group: Group) -> None:
    threading.Timer(0.2, group.hub(1).close).start()
    with pytest.raises(CheckpointError, match="hub was closed"):
        group.hub(1).channel("t").wait(LONG)


def test_notes_and_sessions_side_by_side(group: Group) -> None:
    def work(hub: Any, rank: int) -> Notes:
        channel = hub.channel("t")
        for number in range(50):
            channel.announce(b"%d" % number)
            assert one_round(own_number)(hub, rank) == own_number(rank)
        return hear(channel, 50 if rank else 150)

    outcomes = run(group, work)
    assert [outcomes[rank] for rank in MEMBERS] == [numbered(0, 50)] * 3
    assert sorted(outcomes[0]) == sorted(note for rank in MEMBERS for note in numbered(rank, 50))


def test_a_failed_session_takes_no_notes_along(group: Group) -> None:
    talk = channels(group)
    talk[0].announce(b"x")
    outcomes = run(group, one_round(own_number, SHORT), [0, 1, 2])
    assert all(type(error) is CheckpointTimeoutError for error in outcomes.values())
    talk[3].announce(b"y")
    assert hear(talk[0], 1) == [(3, b"y")]
    assert hear(talk[3], 1) == [(0, b"x")]


def test_to_find_nothing_costs_next_to_nothing(group: Group) -> None:
    channel = group.hub(0).channel("t")
    best = 1.0
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(1000):
            channel.heard()
        best = min(best, (time.perf_counter() - begun) / 1000)
    assert best < 2e-6


def test_the_twin_repeats_the_last_notes_when_a_connection_is_back() -> None:
    world = InProcessWorld(2)
    talk = [world.hub(rank).channel("t") for rank in range(2)]
    world.disconnect(1)
    talk[1].announce(b"lost")
    talk[1].announce(b"last")
    world.reconnect(1)
    assert talk[0].heard() == [(1, b"last")]


def zmq_hub(rank: int, store: Store) -> ZmqHub:
    return ZmqHub(rank, (0, 1), 0, store, "k", bind_host="127.0.0.1")


def test_notes_wait_for_a_rank_that_connects_later() -> None:
    store = Store()
    coordinator = zmq_hub(0, store)
    there = coordinator.channel("t")
    for number in range(20):
        there.announce(b"%d" % number)
    member = zmq_hub(1, store)
    here = member.channel("t")
    here.announce(b"hello")
    assert hear(here, 20) == numbered(0, 20)
    assert hear(there, 1) == [(1, b"hello")]
    member.close()
    coordinator.close()


@contextmanager
def behind_a_proxy() -> Iterator[tuple[list[ZmqHub], Proxy]]:
    store = Store()
    coordinator = zmq_hub(0, store)
    found = msgspec.msgpack.decode(store.get("k", 1), type=Rendezvous)
    proxy = Proxy(found.endpoint)
    store.set("k", msgspec.msgpack.encode(msgspec.structs.replace(found, endpoint=proxy.endpoint)))
    hubs = [coordinator, zmq_hub(1, store)]
    yield hubs, proxy
    for hub in reversed(hubs):
        hub.close()
    proxy.close()


def test_the_latest_notes_survive_a_connection_that_breaks() -> None:
    with behind_a_proxy() as (hubs, proxy):
        talk = [hub.channel("t") for hub in hubs]
        talk[0].announce(b"before")
        talk[1].announce(b"before")
        assert hear(talk[1], 1) == [(0, b"before")]
        assert hear(talk[0], 1) == [(1, b"before")]
        proxy.cut()
        for number in range(3):
            for channel in talk:
                channel.announce(b"%d" % number)
        until = time.monotonic() + 15
        heard: list[Notes] = [[], []]
        while not all(notes[-1:] == [(1 - rank, b"2")] for rank, notes in enumerate(heard)):
            assert time.monotonic() < until
            time.sleep(0.01)
            for rank, channel in enumerate(talk):
                heard[rank] += channel.heard()


def test_a_note_that_is_too_long_is_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    coordinator = zmq_hub(0, store)
    found = msgspec.msgpack.decode(store.get("k", 1), type=Rendezvous)
    channel = coordinator.channel("t")
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(found.endpoint)
    for size in (wire.MAX_NOTE + 1, 1):
        dealer.send_multipart([found.token, wire.encode(1, wire.Note("t", 0)), bytes(size)])
    with caplog.at_level(logging.WARNING, "paddle_dist_ckpt"):
        assert hear(channel, 1) == [(1, b"\0")]
    assert any("dropped a note of 65537 bytes" in line for line in caplog.messages)
    dealer.close(linger=0)
    context.term()
    coordinator.close()


def test_a_forked_process_makes_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    hub = zmq_hub(0, store)
    with monkeypatch.context() as patched:
        patched.setattr("os.getpid", lambda: -1)
        with pytest.raises(CheckpointError, match="forked"):
            hub.channel("t")
    hub.close()


def test_channels_do_not_disturb_the_numbering_of_sessions(group: Group) -> None:
    group.hub(1).channel("t").announce(b"x")
    assert_works(group)
    group.hub(0).channel("t").announce(b"x")
    assert_works(group)
