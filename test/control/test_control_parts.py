"""The parts of the hubs on their own: messages, errors on their way, the hub of one rank, the in-process transport."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest

from paddle_dist_ckpt.control import NoTransport, SoloHub, failures, keys, verified, wire
from paddle_dist_ckpt.control import session as control_session
from paddle_dist_ckpt.control.connection import Connection
from paddle_dist_ckpt.control.coordinator import GRACE, CoordinatorSession, Links
from paddle_dist_ckpt.control.coordinator_table import CoordinatorTable
from paddle_dist_ckpt.control.member import MemberSession
from paddle_dist_ckpt.control.session import _Collectives, check_payload
from paddle_dist_ckpt.core.memory import Bytes1D
from paddle_dist_ckpt.core.protocols import Appointments, ControlHub, Transfers, Transport
from paddle_dist_ckpt.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    DurabilityUnknownError,
    RankFailureError,
    StateDictMismatchError,
    UnsupportedValueError,
)
from paddle_dist_ckpt.testing.in_process import InProcessWorld
from paddle_dist_ckpt.version import __version__
from test.rooms import PACKAGE
from test.waiting import PATIENCE

RECORD = wire.ErrorRecord("OSError", "x", True, ("p",), (1,), ((2, wire.ErrorRecord("A", "b")),))


@pytest.mark.parametrize(
    "message",
    [
        wire.Open(3, "save", 0.5, "0.1.0"),
        wire.Answer(3, 1, "plan"),
        wire.Fail(3, "plan", RECORD, 1),
        wire.Beat(3),
        wire.Bye(3),
        wire.Received(3),
        wire.Reply(3, 1),
        wire.Verdict(3, RECORD, 5),
        wire.Whereabouts(("steps", 2), 1, 7, -1),
        wire.Appointed(("steps", 2), 1, True, 1, 7, 9),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_come_back_equal(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode(["Unknown"]),
        msgspec.msgpack.encode(["Beat", -1]),
        msgspec.msgpack.encode(["Beat", "1"]),
        msgspec.msgpack.encode(["Appointed", ["x" * (wire.MAX_TOPIC + 1), 0]]),
        msgspec.msgpack.encode(["Answer", 0, 0, "x" * (wire.MAX_TEXT + 1)]),
        # A list that claims four billion problems and has none.
        msgspec.msgpack.encode(["Fail", 0, "", ["A", "b", False]])[:-5] + b"\xa1A\xa1b\xc2\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
)
def test_hostile_frames_are_refused(frame: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        wire.decode(frame)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    """The member's end of a connection, and the coordinator's."""
    handshake = keys.Handshake(b"key", keys.greeting(), keys.open_hello(1, bytes(keys.ID_BYTES)))
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        to_coordinator, from_coordinator = handshake.seals()
        member = Connection(near, to_coordinator, from_coordinator, 0)
        to_coordinator, from_coordinator = handshake.seals()
        yield member, Connection(far, from_coordinator, to_coordinator, 1)


@pytest.mark.parametrize(
    ("come", "taken"),
    [(lambda frame: frame, 1), (lambda frame: frame * 2, 1), (lambda frame: frame[:-1] + b"x", 0)],
    ids=["as it was", "twice", "with another payload"],
)
def test_a_frame_is_taken_once_and_as_it_was_sent(
    ends: tuple[Connection, Connection], come: Callable[[bytes], bytes], taken: int
) -> None:
    member, coordinator = ends
    member.send(b"message", b"payload")
    frame = coordinator.socket.recv(1 << 12)
    member.socket.sendall(come(frame))
    with nullcontext() if come(frame) == frame else pytest.raises(ConnectionError, match="a wrong signature"):
        coordinator.receive()
    assert coordinator.inbox == [(b"message", b"payload")] * taken


@pytest.mark.parametrize("bit", range(96))
def test_damaged_lengths_are_seen_at_once(ends: tuple[Connection, Connection], bit: int) -> None:
    """Otherwise as much may be waited for as they say, and nothing be heard from the peer meanwhile."""
    member, coordinator = ends
    member.send(b"message", b"payload")
    frame = bytearray(coordinator.socket.recv(1 << 12))
    frame[bit // 8] ^= 1 << bit % 8
    member.socket.sendall(frame[:40])  # the message is still to come
    with pytest.raises(ConnectionError, match="a frame"):
        coordinator.receive()
    assert not coordinator.inbox


def test_a_connection_over_which_a_message_could_not_be_sent_ends_after_what_has_come(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system says nothing of it to those who receive: nothing would ever be sent again."""

    class Failing:
        def __init__(self, sock: socket.socket) -> None:
            self.recv, self.shutdown = sock.recv, sock.shutdown

        def sendmsg(self, *_: object) -> int:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    member, coordinator = ends
    coordinator.send(b"message", b"")
    monkeypatch.setattr(member, "socket", Failing(member.socket))
    member.send(b"another", b"")
    member.receive()
    coordinator.receive()
    assert member.inbox == [(b"message", b"")]
    assert member.ended
    assert coordinator.ended


def test_a_frame_is_not_taken_by_its_sender(ends: tuple[Connection, Connection]) -> None:
    member, coordinator = ends
    member.send(b"message", b"payload")
    coordinator.socket.sendall(coordinator.socket.recv(1 << 12))
    with pytest.raises(ConnectionError, match="a wrong signature"):
        member.receive()
    assert not member.inbox


def there_and_back(error: BaseException) -> CheckpointError:
    sent = wire.Fail(0, "r", failures.record_of(error, failures.SHARED_IN_LOCAL))
    received = wire.decode(wire.encode(sent))
    assert isinstance(received, wire.Fail)
    return failures.copy_of(received.error)


def test_our_errors_are_rebuilt_with_their_attributes() -> None:
    mismatch = there_and_back(StateDictMismatchError("m", ["a", "b"]))
    assert isinstance(mismatch, StateDictMismatchError)
    assert (str(mismatch), mismatch.problems) == ("m", ("a", "b"))
    timeout = there_and_back(CheckpointTimeoutError("t", [3, 1]))
    assert isinstance(timeout, CheckpointTimeoutError)
    assert (str(timeout), timeout.missing_ranks) == ("t", (1, 3))
    inner = RankFailureError("i", {0: OSError("deep")})
    failure = there_and_back(RankFailureError("f", {2: OSError("no"), 3: inner}))
    assert isinstance(failure, RankFailureError)
    assert {rank: (type(e), str(e)) for rank, e in failure.failures.items()} == {
        2: (CheckpointError, "OSError: no"),
        3: (RankFailureError, "i"),
    }
    assert type(there_and_back(CheckpointCorruptedError("c"))) is CheckpointCorruptedError


class OurOwn(UnsupportedValueError):
    """Unknown to other ranks."""


def test_other_errors_are_named_in_a_checkpoint_error() -> None:
    found = there_and_back(OSError(28, "No space left on device"))
    assert (type(found), str(found)) == (CheckpointError, "OSError: [Errno 28] No space left on device")
    # A name that looks like ours but is not in the registry must not be looked up anywhere else.
    assert type(failures.copy_of(wire.ErrorRecord("annotations", "x"))) is CheckpointError
    derived = there_and_back(OurOwn("x"))
    assert (type(derived), str(derived)) == (UnsupportedValueError, "OurOwn: x")


def test_endless_errors_are_cut_to_what_can_be_sent() -> None:
    long = there_and_back(OSError("x" * (2 * wire.MAX_TEXT)))
    assert str(long).endswith("more characters)")
    many = there_and_back(StateDictMismatchError("m", map(str, range(wire.MAX_PROBLEMS + 5))))
    assert isinstance(many, StateDictMismatchError)
    assert many.problems[-2:] == (str(wire.MAX_PROBLEMS - 2), "... and 6 more")


class Shy(Exception):
    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


HALF = "caf\udce9"  # half of a surrogate pair, as in the name of a file that is not UTF-8
UNFIT = [
    (LookupError(HALF), "LookupError: caf\\udce9"),
    (StateDictMismatchError("x", [HALF, 5]), "x"),  # type: ignore[list-item]
    (CheckpointTimeoutError("x", [-1]), "x"),
    (CheckpointTimeoutError("x", ["a"]), "x"),  # type: ignore[list-item]
    (DurabilityUnknownError("x", HALF, -3), "DurabilityUnknownError: x"),
    (RankFailureError("x", {-1: OSError("y")}), "RankFailureError: x"),
    (Shy(), "Shy: (no text: str() of Shy raised RuntimeError)"),
    (KeyError(Shy()), "str() of KeyError raised"),
]


@pytest.mark.parametrize(("error", "text"), UNFIT, ids=range(len(UNFIT)))
def test_whatever_an_error_holds_is_made_fit_to_be_sent(error: Exception, text: str) -> None:
    assert text in str(there_and_back(error))
    own = failures.record_of(error, failures.SHARED_IN_LOCAL)
    assert failures.raisable(own, 0, error).__cause__ in (error, None)  # and is raised where it came from


def test_a_failure_that_cannot_be_sent_is_told_as_text() -> None:
    sent = list[bytes]()
    session = CoordinatorSession(0, (0, 1), 0, Links(), lambda rank, message, _: sent.append(wire.encode(message)), 0.0)
    for rank in (0, 1):
        session.handle(rank, wire.Open(0, "save", 10.0, "0.1.0"), b"", 0.0)
    session.handle(0, wire.Fail(0, "", wire.ErrorRecord("ValueError", HALF, missing_ranks=(-1,))), b"", 0.0)
    session.tick(1.0)
    verdicts = [wire.decode(message) for message in sent[-2:]]
    assert [verdict.error.message for verdict in verdicts if isinstance(verdict, wire.Verdict)] == [
        "RankFailureError: save failed on rank 0: ValueError: caf\\udce9"
    ] * 2


def test_solo_calls_straight_through() -> None:
    hub: ControlHub = SoloHub(rank=3)
    with hub.session("save", 1.0) as session:
        assert (session.rank, session.ranks, session.coordinator) == (3, (3,), 3)
        seen: list[Mapping[int, bytes]] = []

        def combine(parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
            seen.append(parts)
            return {3: b"reply"}

        assert session.gather_scatter("r", lambda: b"mine", combine) == b"reply"
        assert seen == [{3: b"mine"}]
        assert session.run_collectives(NoTransport(), lambda transport: threading.get_ident()) == threading.get_ident()
    hub.close()


def test_a_rank_alone_has_the_appointments_that_it_wishes_for() -> None:
    appointments: Appointments = SoloHub(rank=3).appointments("steps", 1.0)
    assert appointments.leads
    assert [appointments.reach(step, wish=step == 2) for step in range(5)] == [False, False, True, False, False]
    appointments.close()
    assert not appointments.reach(6, wish=True)
    with pytest.raises(ValueError, match="1025 characters"):
        SoloHub().appointments("t" * 1025, 1.0)


def test_work_that_fails_ends_when_nothing_is_hashed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may free the memory as soon as it hears of the failure."""
    hashed = list[int]()

    def digest_of(data: Bytes1D, block_bytes: int) -> int:
        time.sleep(0.2)
        hashed.append(data.size)
        return 0

    def work(transfers: Transfers) -> None:
        transfers.broadcast(np.zeros(8, np.uint8), 1, 8, lambda: "x", kept=True)
        raise KeyError("x")

    monkeypatch.setattr(verified, "digest_of", digest_of)
    hub = InProcessWorld(1).hub(0)
    with pytest.raises(KeyError), hub.session("load", 100) as session:
        session.run_collectives(NoTransport(), work)
    assert hashed == [8]


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt(), UnsupportedValueError("x")])
def test_solo_raises_errors_as_they_are(error: BaseException) -> None:
    def fail() -> bytes:
        raise error

    for local, combine in ((fail, dict), (lambda: b"", lambda parts: {0: fail()})):
        with pytest.raises(type(error)) as caught, SoloHub().session("save", 1.0) as session:
            session.gather_scatter("r", local, combine)
        assert caught.value is error


def test_only_bytes_are_sent() -> None:
    with SoloHub().session("save", 1.0) as session, pytest.raises(TypeError, match="must be bytes, not bytearray"):
        session.gather_scatter("r", lambda: bytearray(1), lambda parts: parts)  # type: ignore[arg-type, return-value]


def test_what_is_too_long_for_a_message_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PAYLOAD", 3)
    assert check_payload(bytes(3), "it") == bytes(3)
    with pytest.raises(ValueError, match="it has 4 bytes; a message may have 3"):
        check_payload(bytes(4), "it")


MOST = 1 << 20


def test_transport_keeps_order_and_copies() -> None:
    world = InProcessWorld(3)
    first, second, third = (world.transport(rank) for rank in (0, 1, 2))
    data = np.arange(4, dtype=np.uint8)
    first.exchange({1: data, 2: data[:1]}, {}, [(0, 4)], MOST)
    data[:] = 9
    first.broadcast(data, 0, MOST)
    found = [np.zeros(4, np.uint8), np.zeros(4, np.uint8)]
    receiver: Transport = second
    receiver.exchange({}, {0: found[0]}, [(0, 4)], MOST)
    receiver.broadcast(found[1], 0, MOST)
    assert [list(each) for each in found] == [[0, 1, 2, 3], [9, 9, 9, 9]]
    small = np.full(1, 7, np.uint8)
    third.exchange({}, {0: small}, [(0, 4)], MOST)
    assert list(small) == [0]


def test_transport_checks_sizes() -> None:
    world = InProcessWorld(2)
    world.transport(0).exchange({1: np.zeros(3, np.uint8)}, {}, [(0, 3)], MOST)
    with pytest.raises(CheckpointError, match="rank 1 expected 4 bytes from rank 0, which sent 3"):
        world.transport(1).exchange({}, {0: np.zeros(4, np.uint8)}, [(0, 4)], MOST)
    with pytest.raises(CheckpointError, match="rank 0 sends 3 bytes to rank 1 where 2 were agreed"):
        world.transport(0).exchange({1: np.zeros(3, np.uint8)}, {}, [(0, 2)], MOST)


def test_an_abandoned_transport_raises() -> None:
    transport = InProcessWorld(2).transport(1)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(transport.broadcast, np.zeros(1, np.uint8), 0, MOST)
        transport.abandon()
        with pytest.raises(CheckpointError, match="abandoned"):
            blocked.result(5)
    with pytest.raises(CheckpointError, match="abandoned"):
        transport.broadcast(np.zeros(1, np.uint8), 1, MOST)


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


def test_no_rank_relies_on_a_collective_that_fails_on_another_one() -> None:
    """Which of them work is tried once for a connection."""

    class Stub(NoTransport):
        tried = False

        def __init__(self, *failing: str) -> None:
            self.failing, self.told = list(failing), list[Mapping[str, Sequence[int]]]()

        def try_out(self) -> list[str]:
            assert not self.tried
            return self.failing

        def rely_on_others(self, failing: Mapping[str, Sequence[int]]) -> None:
            self.tried = True
            self.told.append(failing)

    world, stubs = InProcessWorld(2), [Stub(), Stub("all-to-all")]

    def work(rank: int) -> None:
        for _ in range(2):
            with world.hub(rank).session("load", 10.0) as session:
                verified.agree_on_collectives(session, stubs[rank])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert [stub.told for stub in stubs] == [[{"all-to-all": [1]}]] * 2


@pytest.mark.parametrize("untried", [0, 1])
def test_collectives_are_tried_on_all_ranks_or_on_none(untried: int) -> None:
    """A rank may not have heard what all can rely on, which the others did."""
    meeting = threading.Barrier(2)

    class Stub(NoTransport):
        def __init__(self, tried: bool) -> None:
            self.tried = tried

        def try_out(self) -> list[str]:
            meeting.wait(10)
            return []

        def rely_on_others(self, failing: Mapping[str, Sequence[int]]) -> None:
            self.tried = True

    world, stubs = InProcessWorld(2), [Stub(rank != untried) for rank in range(2)]

    def work(rank: int) -> None:
        with world.hub(rank).session("load", 10.0) as session:
            verified.agree_on_collectives(session, stubs[rank])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert all(stub.tried for stub in stubs)
    assert not meeting.broken


def test_collectives_that_hang_keep_no_process_from_ending() -> None:
    before, goes_on = set(threading.enumerate()), threading.Event()
    task = _Collectives(NoTransport())
    result = task.start(verified.VerifiedTransfers(task, 0, ""), lambda _: goes_on.wait(5), threading.Condition())
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    goes_on.set()
    assert result.result(5)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_works_between_two_collectives_is_in_none(fails: bool) -> None:
    """Only in one is it given up if it does not get on for the timeout."""

    class Stub:
        def broadcast(self, data: Any, source: int, most: int) -> None:
            assert not task.moved_since(time.monotonic())
            if fails:
                raise CheckpointError("the network is down")

    task = _Collectives(Stub())  # type: ignore[arg-type]
    assert task.moved_since(time.monotonic())
    with pytest.raises(CheckpointError) if fails else nullcontext():
        task.broadcast(np.zeros(1, np.uint8), 0, MOST)
    assert task.since is None
    assert task.moved_since(time.monotonic())


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
    assert not any(isinstance(message, wire.Verdict) for _, message in sent)
    assert table.sessions[1].kinds.keys() == {0, 1}
    assert not table.sessions[1].failing


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
    assert not any(isinstance(message, wire.Verdict) for _, message in sent)
    assert table.sessions[1].kinds.keys() == {0, 1}
    assert not table.sessions[1].failing


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


def test_ranks_that_have_never_connected_are_told_from_silent_ones() -> None:
    heard = failures.timeout_error("save", [1, 2], 3.0).message
    assert heard.startswith("save timed out: ranks 1, 2 not heard of for 3 s; see whether")
    assert "connected" not in heard
    both = failures.timeout_error("save", [1, 2], 3.0, absent={2, 4}).message
    assert "timed out: rank 1 not heard of for 3 s, rank 2 has never connected, not within 3 s; see" in both
    assert "does not reach the coordinator's port" in both


def test_ranks_next_to_each_other_are_named_by_the_first_and_the_last() -> None:
    one = failures.record("broken")
    for ranks, text in (
        (range(512), "on ranks 0-511: broken"),
        ((0, 1, 2, 3), "on ranks 0, 1, 2, 3: broken"),
        ((0, 2, 3, 4, 5, 6, 9), "on ranks 0, 2-6, 9: broken"),
        ((7,), "on rank 7: broken"),
    ):
        found = failures.failure_of_ranks("save failed", dict.fromkeys(ranks, one), tuple(range(600)))
        assert found.message == f"save failed {text}"


def test_what_no_rank_finds_keeps_its_type() -> None:
    one = failures.record_of(CheckpointNotFoundError("nothing there"), failures.SHARED_IN_LOCAL)
    everywhere = failures.failure_of_ranks("load failed", {0: one, 1: one}, (0, 1))
    assert (everywhere.type_name, everywhere.message) == ("CheckpointNotFoundError", "nothing there")
    assert failures.failure_of_ranks("load failed", {1: one}, (0, 1)).type_name == "RankFailureError"
    file = failures.record_of(FileExistsError("it is a file"), failures.SHARED_IN_LOCAL)
    assert failures.failure_of_ranks("save failed", {0: file, 1: file}, (0, 1)).type_name == "FileExistsError"
    assert failures.failure_of_ranks("save failed", {1: file}, (0, 1)).type_name == "RankFailureError"
    damage = failures.record_of(CheckpointCorruptedError("a byte"), failures.SHARED_IN_LOCAL)
    assert failures.failure_of_ranks("load failed", {0: damage, 1: damage}, (0, 1)).type_name == "RankFailureError"
    inner = failures.record_of(RankFailureError("", {3: CheckpointError("x")}), failures.SHARED_IN_LOCAL)
    assert failures.failure_of_ranks("load failed", {0: inner, 1: inner}, (0, 1)).failures


def test_sessions_are_opened_so_that_they_are_closed_for_sure() -> None:
    """By ``Ranks.session`` everywhere; a save ends its own itself, unless it goes on in the background."""
    parts = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("control", "testing")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in parts}
    assert [name for name, text in texts.items() if "hub.session(" in text] == []
    assert [name for name, text in texts.items() for _ in range(text.count(".make_session("))] == ["wiring.py"]


def test_a_connection_that_has_broken_takes_no_more(ends: tuple[Connection, Connection]) -> None:
    member, coordinator = ends
    coordinator.socket.close()
    member.send(b"message", b"payload")
    member.send(b"another", b"payload")
    assert not member.blocked
    assert member.delivered  # nobody waits for it
    member.receive()
    assert member.ended


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
