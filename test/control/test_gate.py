"""Who comes to the coordinator's port: strangers, and ranks among them."""

from __future__ import annotations

import logging
import socket
import struct
import time

import pytest

from paddle_dist_ckpt.control import TcpHub, keys, member_port
from paddle_dist_ckpt.control.bootstrap import address_of
from paddle_dist_ckpt.control.gate import Gate
from paddle_dist_ckpt.control.introduction import Introduction, differ
from paddle_dist_ckpt.errors import CheckpointError
from paddle_dist_ckpt.testing.hub_conformance.cases import AT_ONCE
from test.control.tcp import Store, both, make, one_round, speak_another_version
from test.waiting import PATIENCE, until


def test_another_process_cannot_take_the_place_of_a_connected_rank(hubs: list[TcpHub], store: Store) -> None:
    assert both(hubs) == [b"0", b"1"]
    another = make(1, store)
    with pytest.raises(CheckpointError, match="another process takes part as rank 1"):
        one_round(another)
    another.close()
    assert both(hubs) == [b"0", b"1"]


def test_a_stranger_who_speaks_another_version_disturbs_nobody(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hubs = [make(0, store)]
    try:
        here = store.get("k", 0.0)
        known = speak_another_version(store, monkeypatch)
        for key, rank in ((b"guessed", 1), (keys.hub_key(known.token, b"", "k"), 7)):
            differ(address_of(known), key, rank)
        monkeypatch.undo()
        store.set("k", here)
        hubs.append(make(1, store))
        assert both(hubs) == [b"0", b"1"]
    finally:
        for hub in hubs:
            hub.close()


def was_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while sock.recv(100):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_what_another_connection_has_said_proves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.control.gate._PATIENCE", PATIENCE)
    coordinator = make(0, store)
    found = store.rendezvous()
    key = keys.hub_key(found.token, b"", "k")
    hello = b""
    for status in (keys.Status.WELCOME, keys.Status.UNPROVEN):
        with socket.create_connection(address_of(found), AT_ONCE) as sock:
            greeting = sock.recv(keys.GREETING_BYTES, socket.MSG_WAITALL)
            hello = hello or keys.Handshake(key, greeting, keys.open_hello(1, bytes(keys.ID_BYTES))).hello()
            sock.sendall(hello)
            answer = sock.recv(keys.ANSWER_BYTES, socket.MSG_WAITALL)
            assert answer[0] == status
            if status == keys.Status.UNPROVEN:  # who is turned away is told nothing, and keeps no place at the gate
                assert not any(answer[1:])
                until(lambda sock=sock: was_closed(sock), AT_ONCE, "an end of its connection")
        until(lambda: not coordinator._port.connections, what="an end of the connection")
    coordinator.close()


@pytest.mark.parametrize(
    ("status", "text"),
    [(keys.Status.WELCOME, "somebody who does not know the hub's key"), (99, "an answer of no known kind")],
)
def test_who_does_not_know_the_key_is_not_taken_for_the_coordinator(status: int, text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        rank = Introduction(stranger.getsockname(), b"key", 1, bytes(keys.ID_BYTES), 0)
        sock, _ = stranger.accept()

        def has_heard(nbytes: int) -> bool:
            rank.advance()
            return len(rank._heard) == nbytes

        with rank.socket, sock:
            greeting = keys.greeting()
            sock.sendall(greeting)
            until(lambda: has_heard(keys.GREETING_BYTES))
            hello = sock.recv(keys.HELLO_BYTES, socket.MSG_WAITALL)
            answer = keys.Handshake(b"another key", greeting, hello).answer(keys.Status.WELCOME)
            sock.sendall(bytes([status]) + answer[1:])
            with pytest.raises(ConnectionError, match=text):
                until(lambda: has_heard(keys.GREETING_BYTES + keys.ANSWER_BYTES))


def test_a_stranger_who_says_nothing_has_to_go_though_nobody_else_comes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.control.gate._PATIENCE", 0.1)
    coordinator = make(0, store)
    with socket.create_connection(address_of(store.rendezvous()), AT_ONCE) as stranger:
        assert stranger.recv(keys.GREETING_BYTES, socket.MSG_WAITALL)
        until(lambda: was_closed(stranger), what="an end of the connection")
    coordinator.close()


def test_a_stranger_who_leaves_keeps_no_place_at_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.control.gate._PATIENCE", PATIENCE)
    gate = Gate(0, (socket.AF_INET, "127.0.0.1"), b"key", frozenset({1}), lambda hello: False, set())
    with socket.create_connection(("127.0.0.1", gate.port), AT_ONCE) as stranger:
        until(lambda: gate.serve(0) or gate._newcomers, what="a newcomer")
        assert stranger.recv(keys.GREETING_BYTES, socket.MSG_WAITALL)  # or its end would be a reset
    until(lambda: gate.serve(0) or not gate._newcomers, AT_ONCE, "its end")
    gate.close()


def test_of_many_strangers_those_who_came_last_stay() -> None:
    gate = Gate(0, (socket.AF_INET, "127.0.0.1"), b"key", frozenset({1}), lambda hello: False, set())
    strangers = [socket.create_connection(("127.0.0.1", gate.port), AT_ONCE) for _ in range(100)]
    gate.serve(0)
    assert len(gate._newcomers) == 16  # a turn is short, whoever comes
    until(lambda: gate.serve(0) or was_closed(strangers[35]), what="an end of the connection that came first")
    assert [was_closed(sock) for sock in strangers] == [True] * 36 + [False] * 64
    gate.close()
    for sock in strangers:
        sock.close()


def test_a_rank_gets_in_behind_thousands_of_strangers() -> None:
    """Those that fill the system's queue are out before the rank takes its attempt for failed."""
    gate = Gate(0, (socket.AF_INET, "127.0.0.1"), b"key", frozenset({1}), lambda hello: False, set())
    for _ in range(2000):
        socket.create_connection(("127.0.0.1", gate.port), AT_ONCE).close()
    rank, turns = Introduction(("127.0.0.1", gate.port), b"key", 1, bytes(keys.ID_BYTES), 0), 0
    silent = [socket.create_connection(("127.0.0.1", gate.port), AT_ONCE) for _ in range(200)]
    seconds = 0.0
    while not (admitted := gate.serve(1)):
        seconds, turns = seconds + gate.rest, turns + 1
        assert seconds < member_port._ATTEMPT_SECONDS / 2, f"{turns} turns"
        rank.advance()
    assert [connection.rank for connection in admitted] == [1]
    for sock in (rank.socket, admitted[0].socket, *silent):
        sock.close()
    gate.close()


def test_strangers_who_have_gone_again_do_not_keep_a_rank_waiting() -> None:
    gate = Gate(0, (socket.AF_INET, "127.0.0.1"), b"key", frozenset({1}), lambda hello: False, set())
    for _ in range(3000):
        with socket.create_connection(("127.0.0.1", gate.port), AT_ONCE) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it is reset
    rank, turns = Introduction(("127.0.0.1", gate.port), b"key", 1, bytes(keys.ID_BYTES), 0), 0
    while not (admitted := gate.serve(1)):
        turns += 1
        assert turns < 3000 // 64, "each of them took the place of a newcomer"
        rank.advance()
    for sock in (rank.socket, admitted[0].socket):
        sock.close()
    gate.close()


def test_strangers_who_have_gone_again_make_no_turn_longer_when_all_ranks_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(0, (socket.AF_INET, "127.0.0.1"), b"key", frozenset({1}), lambda hello: False, set())
    turned_away: list[str] = []
    monkeypatch.setattr(gate, "_turn_away", lambda sock, reason: (turned_away.append(reason), sock.close()))
    for _ in range(20):
        socket.create_connection(("127.0.0.1", gate.port), AT_ONCE).close()
    gate.serve(0)
    assert len(turned_away) == 16
    gate.close()


def test_little_is_kept_of_what_strangers_send_and_more_of_what_ranks_do(hubs: list[TcpHub], store: Store) -> None:
    assert both(hubs) == [b"0", b"1"]
    (admitted,) = hubs[0]._port.connections
    with socket.create_server(("127.0.0.1", 0)) as usual:
        assert admitted.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= usual.getsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF
        )
    with hubs[0].lock, socket.socket() as stranger:  # nobody is served while the lock is held
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        stranger.connect(address_of(store.rendezvous()))
        stranger.settimeout(0.5)
        taken = 0
        with pytest.raises(TimeoutError):
            while True:
                taken += stranger.send(b"x" * 1024)
        assert taken < 32 << 10


def test_ranks_meet_although_strangers_came_before(store: Store) -> None:
    coordinator = make(0, store)
    address = address_of(store.rendezvous())
    strangers = [socket.create_connection(address, AT_ONCE) for _ in range(200)]
    for sock in strangers[100:]:
        sock.sendall(b"GET / HTTP/1.1")
    member = make(1, store)
    begun = time.monotonic()
    assert both([coordinator, member]) == [b"0", b"1"]
    assert time.monotonic() - begun < AT_ONCE
    for sock in strangers:
        sock.close()
    member.close()
    coordinator.close()


def test_what_strangers_do_is_told_once(hubs: list[TcpHub], store: Store, caplog: pytest.LogCaptureFixture) -> None:
    assert both(hubs) == [b"0", b"1"]
    with caplog.at_level(logging.WARNING, "paddle_dist_ckpt"):
        for _ in range(20):
            with socket.create_connection(address_of(store.rendezvous()), AT_ONCE) as sock:
                sock.sendall(b"GET / HTTP/1.1")
                while sock.recv(100):
                    pass
    assert sum("turned away" in line for line in caplog.messages) == 1


def test_a_rank_that_greets_in_pieces_gets_in() -> None:
    gate = Gate(0, (socket.AF_INET, "127.0.0.1"), b"key", frozenset({1}), lambda hello: False, set())
    with socket.create_connection(("127.0.0.1", gate.port), AT_ONCE) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until(lambda: gate.serve(1) or gate._newcomers)
        greeting = sock.recv(keys.GREETING_BYTES, socket.MSG_WAITALL)
        hello = keys.Handshake(b"key", greeting, keys.open_hello(1, bytes(keys.ID_BYTES))).hello()
        (newcomer,) = gate._newcomers.values()
        sock.sendall(hello[:50])
        until(lambda: gate.serve(1) or len(newcomer.hello) == 50)
        sock.sendall(hello[50:])
        admitted = []
        until(lambda: admitted.extend(gate.serve(1)) or admitted)
        assert [connection.rank for connection in admitted] == [1]
        assert sock.recv(keys.ANSWER_BYTES, socket.MSG_WAITALL)[0] == keys.Status.WELCOME
        admitted[0].socket.close()
    gate.close()


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "somebody who is not the coordinator"),
        (keys.greeting() + b"\xff" * keys.ANSWER_BYTES, "an answer of no known kind"),
    ],
    ids=["greeting", "answer"],
)
def test_who_speaks_something_else_is_not_taken_for_the_coordinator(said: bytes, error: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        rank = Introduction(stranger.getsockname(), b"key", 1, bytes(keys.ID_BYTES), 0)
        sock, _ = stranger.accept()
        with rank.socket, sock:
            sock.sendall(said)
            with pytest.raises(ConnectionError, match=error):
                until(rank.advance)
            assert rank.status is None
