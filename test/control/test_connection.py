"""The connection between two processes: messages as bytes, frames as they were signed, and those that were altered."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import msgspec
import pytest

from paddle_dist_ckpt.control import keys, wire
from paddle_dist_ckpt.control.connection import Connection
from test.interrupts import interrupted

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


def test_a_connection_that_has_broken_takes_no_more(ends: tuple[Connection, Connection]) -> None:
    member, coordinator = ends
    coordinator.socket.close()
    member.send(b"message", b"payload")
    member.send(b"another", b"payload")
    assert not member.blocked
    assert member.delivered  # nobody waits for it
    member.receive()
    assert member.ended


@pytest.mark.parametrize("payload", [b"", b"x" * 300])
def test_an_interrupted_frame_is_sent_whole_or_not_at_all(ends: tuple[Connection, Connection], payload: bytes) -> None:
    member, coordinator = ends
    number = 0
    while interrupted(number, partial(member.send, b"%d" % number, payload)):
        number += 1
        coordinator.receive()
    assert number > 3
    came = [int(message) for message, _ in coordinator.inbox]
    assert came == sorted(set(came))
    assert {got for _, got in coordinator.inbox} <= {payload}
    member.send(b"last", b"")
    coordinator.receive()
    assert coordinator.inbox[-1] == (b"last", b"")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError, InterruptedError])
def test_signals_while_frames_are_sent_break_no_connection(
    ends: tuple[Connection, Connection], kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come right after a system call for the most part, before anything can be noted of what that has done."""
    member, coordinator = ends
    sends, times, heard = False, 0, 0
    swallowed = list[object]()  # by Python, where it comes in a callback of the search for garbage
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)

    def handle(*_: object) -> None:
        nonlocal times
        if sends:
            times += 1
            raise kind

    before = signal.signal(signal.SIGALRM, handle)
    try:
        for number in range(3000):
            signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 60))
            try:
                sends = True
                member.send(b"%d" % number, b"x" * (number % 7) * 100)
                sends = False
            except kind:
                sends = False
                heard += 1
            coordinator.receive()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert times > 30
    assert heard + len(swallowed) == times
    member.send(b"3000", b"")
    coordinator.receive()
    came = [int(message) for message, _ in coordinator.inbox]
    assert came == sorted(set(came))
    assert came[-1] == 3000
    assert not member.blocked
