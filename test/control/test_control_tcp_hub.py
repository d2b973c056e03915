"""What only the hub over TCP can get wrong: strangers, bootstrap, broken connections, forks, shutdown."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import msgspec
import pytest

from paddle_dist_ckpt.control import TcpHub, keys, member_port, wire
from paddle_dist_ckpt.control.bootstrap import Rendezvous, address_of, local_address
from paddle_dist_ckpt.control.coordinator import CoordinatorSession, Links
from paddle_dist_ckpt.control.gate import Gate
from paddle_dist_ckpt.control.introduction import Introduction, differ
from paddle_dist_ckpt.control.keys import PROTOCOL
from paddle_dist_ckpt.control.member import MemberSession
from paddle_dist_ckpt.control.session import Ending
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError, RankFailureError, StateDictMismatchError
from paddle_dist_ckpt.testing.hub_conformance.cases import AT_ONCE, LONG, SHORT, in_background, own_number
from paddle_dist_ckpt.version import __version__
from test.waiting import PATIENCE, until


class Store:
    """A BootstrapStore whose entries are there before they are asked for, or never."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str, timeout: float) -> bytes:
        if key not in self.values:
            time.sleep(timeout)
            raise TimeoutError(key)
        return self.values[key]

    def rendezvous(self) -> Rendezvous:
        return msgspec.msgpack.decode(self.values["k"], type=Rendezvous)


def make(rank: int, store: Store, ranks: int = 2, **options: Any) -> TcpHub:
    return TcpHub(rank, range(ranks), 0, store, "k", bind_host="127.0.0.1", **options)


def one_round(hub: TcpHub, timeout: float = LONG) -> bytes:
    with hub.session("save", timeout) as session:
        return session.gather_scatter("r", lambda: b"%d" % session.rank, lambda parts: parts)


def both(hubs: list[TcpHub]) -> list[Any]:
    """One round on each hub at the same time; what it returned or raised."""

    def outcome(hub: TcpHub) -> Any:
        try:
            return one_round(hub)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(len(hubs)) as pool:
        return list(pool.map(outcome, hubs))


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def hubs(store: Store) -> Iterator[list[TcpHub]]:
    made = [make(0, store), make(1, store)]
    yield made
    for hub in reversed(made):
        hub.close()


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


def test_a_frame_altered_on_the_way_ends_the_connection(relayed: Relayed, caplog: pytest.LogCaptureFixture) -> None:
    hubs, proxy = relayed
    assert both(hubs) == [b"0", b"1"]
    proxy.altered = True
    assert all(isinstance(outcome, (RankFailureError, CheckpointTimeoutError)) for outcome in both(hubs))
    assert any("a frame with a wrong signature" in line for line in caplog.messages)
    proxy.altered = False
    until(lambda: both(hubs) == [b"0", b"1"], PATIENCE, "a round over a new connection")


@pytest.mark.parametrize("relayed", [1], indirect=True)
def test_a_rank_whose_first_handshake_is_altered_on_the_way_is_not_turned_away_for_good(relayed: Relayed) -> None:
    hubs, _ = relayed
    assert both(hubs) == [b"0", b"1"]
    assert hubs[0].links.unproven == set()


@pytest.mark.parametrize("secrets", [(b"one", b"another"), (b"one", b""), (b"", b"another")])
def test_a_rank_with_another_secret_is_turned_away_and_all_are_told(store: Store, secrets: tuple[bytes, bytes]) -> None:
    hubs = [make(rank, store, secret=secret) for rank, secret in enumerate(secrets)]
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match="rank 0, the coordinator, turned rank 1 away, which has another control"):
        one_round(hubs[1])
    assert time.monotonic() - begun < AT_ONCE
    with pytest.raises(CheckpointTimeoutError, match="who said to be rank 1 had another control secret") as caught:
        one_round(hubs[0], timeout=SHORT)
    assert caught.value.missing_ranks == (1,)
    for hub in reversed(hubs):
        hub.close()


def test_ranks_with_the_same_secret_meet(store: Store) -> None:
    hubs = [make(rank, store, secret=b"the same") for rank in range(2)]
    assert both(hubs) == [b"0", b"1"]
    for hub in reversed(hubs):
        hub.close()


def test_who_exchanges_what_hubs_have_left_in_the_store_brings_no_rank_into_another_hub(store: Store) -> None:
    def of_key(key: str, rank: int) -> TcpHub:
        return TcpHub(rank, range(2), 0, store, key, bind_host="127.0.0.1", secret=b"the same")

    coordinators = [of_key(key, 0) for key in ("k", "another")]
    store.values["k"], store.values["another"] = store.values["another"], store.values["k"]
    members = [of_key(key, 1) for key in ("k", "another")]
    for member in members:
        with pytest.raises(CheckpointError, match="turned rank 1 away"):
            one_round(member)
    for hub in (*members, *coordinators):
        hub.close()


def test_a_rank_that_the_coordinator_does_not_know_is_told_so(store: Store) -> None:
    coordinator = make(0, store)
    stranger = make(2, store, ranks=3)
    with pytest.raises(CheckpointError, match="does not know rank 2"):
        one_round(stranger)
    stranger.close()
    coordinator.close()


def test_another_process_cannot_take_the_place_of_a_connected_rank(hubs: list[TcpHub], store: Store) -> None:
    assert both(hubs) == [b"0", b"1"]
    another = make(1, store)
    with pytest.raises(CheckpointError, match="another process takes part as rank 1"):
        one_round(another)
    another.close()
    assert both(hubs) == [b"0", b"1"]


def test_a_store_that_is_gone_is_an_error_that_names_the_coordinator() -> None:
    class Gone:
        def set(self, key: str, value: bytes) -> None:
            raise ConnectionError("Connection reset by peer")

        def get(self, key: str, timeout: float) -> bytes:
            raise ConnectionError("Connection reset by peer")

    for rank in (0, 1):
        with pytest.raises(RankFailureError, match="rank 0, the coordinator, .* store .* is gone") as caught:
            TcpHub(rank, [0, 1], 0, Gone(), "k", bind_host="127.0.0.1")
        assert list(caught.value.failures) == [0]


def test_a_rank_that_never_connects_is_told_from_one_that_falls_silent(store: Store) -> None:
    hubs = [make(rank, store, ranks=3) for rank in (0, 1)]
    try:
        with ThreadPoolExecutor(2) as pool:
            errors = [pool.submit(pytest.raises, CheckpointTimeoutError, one_round, hub, 1.0) for hub in hubs]
        for error in errors:
            assert "timed out: rank 2 has never connected, not within 1 s; see" in str(error.result().value)
    finally:
        for hub in hubs:
            hub.close()


def test_the_coordinator_never_arrives_at_bootstrap(store: Store) -> None:
    begun = time.monotonic()
    with pytest.raises(CheckpointTimeoutError, match="rank 0, the coordinator") as caught:
        make(1, store, bootstrap_timeout=0.2)
    assert caught.value.missing_ranks == (0,)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        msgspec.msgpack.encode([PROTOCOL, "tcp://x:1", b"short"]),
        msgspec.msgpack.encode([PROTOCOL, "tcp://x:99999", b"t" * 16]),
        msgspec.msgpack.encode([PROTOCOL, "ipc:///tmp/x", b"t" * 16]),
        msgspec.msgpack.encode([PROTOCOL, "tcp://a.name.that.is.looked.up.invalid:1", b"t" * 16]),
    ],
)
def test_a_foreign_bootstrap_entry_is_refused(store: Store, value: bytes) -> None:
    store.set("k", value)
    with pytest.raises(CheckpointError, match="not a control hub's address"):
        make(1, store)


def test_another_protocol_version_is_refused(store: Store) -> None:
    store.set("k", msgspec.msgpack.encode([1, "tcp://127.0.0.1:1", b"t" * 16]))
    with pytest.raises(CheckpointError, match="version 1 of the control messages"):
        make(1, store)


def speak_another_version(store: Store, monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    """Have the next members run a version with another protocol. Returns where the coordinator is."""
    here = store.rendezvous()
    store.set("k", msgspec.msgpack.encode(msgspec.structs.replace(here, protocol=PROTOCOL + 4)))
    hello = keys.open_hello
    magic = struct.pack(">6sH", b"PDCKPT", PROTOCOL + 4)
    monkeypatch.setattr(keys, "open_hello", lambda *args: magic + hello(*args)[len(magic) :])
    return here


def test_all_ranks_are_told_at_once_of_one_that_cannot_connect_for_its_version(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hubs = [make(rank, store, ranks=3) for rank in (0, 1)]
    text = (
        f"ranks run different versions of paddle_dist_ckpt (ranks 0, 1: {__version__}, "
        f"rank 2: one with version {PROTOCOL + 4} of the control messages); install the same one on every rank"
    )
    try:
        with ThreadPoolExecutor(2) as pool:
            early = [pool.submit(pytest.raises, CheckpointError, one_round, hub) for hub in hubs]
            speak_another_version(store, monkeypatch)
            with pytest.raises(CheckpointError, match=f"speaks version {PROTOCOL + 4} of the .* version {PROTOCOL};"):
                make(2, store, ranks=3)
            assert {str(error.result().value) for error in early} == {text}
        assert [str(error) for error in both(hubs)] == [text, text]
        monkeypatch.undo()
    finally:
        for hub in hubs:
            hub.close()


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


def test_a_rank_that_comes_back_with_the_right_version_takes_part(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hubs = [make(0, store)]
    try:
        here = store.get("k", 0.0)
        speak_another_version(store, monkeypatch)
        with pytest.raises(CheckpointError, match="install the same"):
            make(1, store)
        with pytest.raises(CheckpointError, match="ranks run different versions"):
            one_round(hubs[0])
        monkeypatch.undo()
        store.set("k", here)
        hubs.append(make(1, store, opened=1))
        until(lambda: not hubs[0].links.absent)
        assert both(hubs) == [b"0", b"1"]
        speak_another_version(store, monkeypatch)
        with pytest.raises(CheckpointError, match="install the same"):
            make(1, store)  # beside the one that is connected
        assert both(hubs) == [b"0", b"1"]
    finally:
        for hub in hubs:
            hub.close()


def test_a_rank_outside_the_group_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="rank 5"):
        TcpHub(5, [0, 1], 0, store, "k")
    with pytest.raises(ValueError, match="coordinator 5"):
        TcpHub(0, [0, 1], 5, store, "k")


@pytest.mark.parametrize("bind_host", [None, "0.0.0.0", "localhost"])
def test_the_published_address_is_one_to_connect_to(store: Store, bind_host: str | None) -> None:
    hubs = [TcpHub(rank, [0, 1], 0, store, "k", bind_host=bind_host) for rank in (0, 1)]
    assert "0.0.0.0" not in store.rendezvous().endpoint
    assert both(hubs) == [b"0", b"1"]
    for hub in hubs:
        hub.close()


class Proxy:
    """A TCP relay whose connections can be cut, as a network does."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self.altered = False
        self.altered_connections = 0
        self.tells_ends = True
        self.open = threading.Event()
        self.open.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            altered, self.altered_connections = self.altered_connections > 0, self.altered_connections - 1
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._relay, args=(*pair, altered), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket, altered: bool) -> None:
        try:
            while data := source.recv(65536):
                self.open.wait()
                target.sendall(data[:-1] + bytes([data[-1] ^ 1]) if altered or self.altered else data)
            if self.tells_ends:
                target.shutdown(socket.SHUT_WR)  # as a network passes on that one side has nothing more to say
        except OSError:
            return

    def cut(self) -> None:
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
            finally:
                connection.close()
        self._open.clear()

    def cut_from_the_member(self) -> None:
        """End the member's side of the only connection; the coordinator hears nothing of it."""
        self.tells_ends = False
        near, _ = self._open
        near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()


Relayed = tuple[list[TcpHub], Proxy]


@pytest.fixture
def relayed(store: Store, request: pytest.FixtureRequest) -> Iterator[Relayed]:
    """Two hubs, and the relay between them, which alters what goes over the first connections: as many as are asked."""
    coordinator = make(0, store)
    found = store.rendezvous()
    proxy = Proxy(found.endpoint)
    proxy.altered_connections = getattr(request, "param", 0)
    store.set("k", msgspec.msgpack.encode(msgspec.structs.replace(found, endpoint=proxy.endpoint)))
    hubs = [coordinator, make(1, store)]
    yield hubs, proxy
    for hub in reversed(hubs):
        hub.close()
    proxy.close()


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


def test_calls_that_failed_without_a_connection_do_not_make_the_next_one_fail(relayed: Relayed) -> None:
    hubs, proxy = relayed
    assert both(hubs) == [b"0", b"1"]
    proxy.open.clear()  # who connects anew hears nothing for now
    proxy.cut()
    until(lambda: hubs[0].links.lost and hubs[1].links.lost, PATIENCE, "the end of the connection")
    for _ in range(3):
        assert all(isinstance(outcome, RankFailureError) for outcome in both(hubs))
    proxy.open.set()
    until(lambda: not hubs[0].links.lost and not hubs[1].links.lost, PATIENCE, "a new connection")
    assert both(hubs) == [b"0", b"1"]


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_hold_the_connections_open(hubs: list[TcpHub]) -> None:
    assert both(hubs) == [b"0", b"1"]
    (connection,) = hubs[1]._port.connections
    descriptor = connection.socket.fileno()
    child = os.fork()
    if child == 0:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert both(hubs) == [b"0", b"1"]


def test_closing_wakes_a_rank_that_waits(hubs: list[TcpHub]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one_round, hubs[1])
        time.sleep(0.1)
        hubs[1].close()
        with pytest.raises(CheckpointError, match="hub was closed"):
            waiting.result(5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("call", ["session", "appointments"])
def test_a_forked_process_is_refused_and_harms_nothing(hubs: list[TcpHub], call: str) -> None:
    child = os.fork()
    if child == 0:
        try:
            getattr(hubs[0], call)("save", LONG)
        except CheckpointError:
            hubs[0].close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert both(hubs) == [b"0", b"1"]


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("kind", [wire.Open, wire.Fail, wire.Bye])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupt_of_opening_or_closing_makes_no_other_rank_wait(
    hubs: list[TcpHub], victim: int, kind: type[wire.Message], sent: bool
) -> None:
    hub, post, left = hubs[victim], hubs[victim].post, [1]

    def interrupted(message: Any, payload: bytes = b"") -> None:
        interrupts = isinstance(message, kind) and left and left.pop()
        if sent or not interrupts:
            post(message, payload)
        if interrupts:
            raise KeyboardInterrupt

    def fail() -> bytes:
        if kind is wire.Fail:
            raise OSError
        return b""

    hub.post = interrupted  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(both, [hubs[1 - victim]])
        with pytest.raises(KeyboardInterrupt), Ending(hub.session("save", LONG)) as made, made as session:
            session.gather_scatter("r", fail, lambda parts: dict.fromkeys(parts, b"x"))
        (outcome,) = other.result(AT_ONCE)
    assert isinstance(outcome, RankFailureError) or kind is wire.Bye
    assert not hub._sessions
    assert both(hubs) == [b"0", b"1"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_connection_in_whose_sending_an_interrupt_came_is_made_anew_before_it_is_needed(
    hubs: list[TcpHub], monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    assert both(hubs) == [b"0", b"1"]
    (connection,) = hubs[victim]._port.connections
    tag = keys.Seal.tag

    def interrupted(seal: keys.Seal, *parts: bytes) -> bytes:
        tag(seal, *parts)
        monkeypatch.undo()
        raise KeyboardInterrupt

    with hubs[victim].lock:
        monkeypatch.setattr(keys.Seal, "tag", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connection.send(wire.encode(wire.Bye(99)), b"")
    until(lambda: hubs[victim].links.lost or connection not in hubs[victim]._port.connections, PATIENCE)
    until(lambda: all(hub._port.connections and not hub.links.lost for hub in hubs), PATIENCE)
    assert both(hubs) == [b"0", b"1"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_session_that_an_interrupt_kept_from_being_opened_is_the_next_one(
    hubs: list[TcpHub], monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """Otherwise one rank would come to a session that the others have left."""

    def interrupted(hub: TcpHub, session: MemberSession) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(both, [hubs[1 - victim]])
        until(lambda: bool(hubs[1 - victim]._sessions), PATIENCE)
        monkeypatch.setattr(TcpHub, "open", interrupted)
        made = hubs[victim].session("save", LONG)
        with pytest.raises(KeyboardInterrupt), Ending(made), made:
            pass
        mine = both([hubs[victim]])
        assert sorted([*mine, *others.result(PATIENCE)]) == [b"0", b"1"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("victim", [0, 1])
def test_no_interrupt_keeps_the_lock_or_leaves_a_session_open(hubs: list[TcpHub], victim: int) -> None:
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            both([hubs[1 - victim]])

    def interrupt_at(call: int) -> Any:
        calls = itertools.count(1)

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            frame.f_trace_lines = False
            if event != "exception" and next(calls) == call:
                raise KeyboardInterrupt
            return trace

        return trace

    other = threading.Thread(target=go_on, daemon=True)
    other.start()
    previous = sys.gettrace()
    for call in itertools.count(1):
        try:
            sys.settrace(
                interrupt_at(call)
            )  # at the n-th beginning or end of a function: there Python looks for signals
            with Ending(hubs[victim].session("save", LONG)) as made, made as session:
                session.gather_scatter("r", lambda: b"", lambda parts: parts)
        except (KeyboardInterrupt, CheckpointError):
            pass
        else:
            break
        finally:
            sys.settrace(previous)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(hubs[victim].lock.acquire, timeout=AT_ONCE).result(), call
            pool.submit(hubs[victim].lock.release).result()
        assert not hubs[victim]._sessions, call
    assert call > 25  # how many there are depends on what has come by then
    over.set()
    hubs[1 - victim].close()
    other.join(AT_ONCE)


def test_a_failure_of_the_thread_is_not_a_hang(hubs: list[TcpHub], monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*arguments: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(hubs[0]._port, "turn", explode)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="RuntimeError: boom"):
            one_round(hubs[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_of_the_thread_of_which_nobody_can_be_told_is_not_a_hang(
    hubs: list[TcpHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*arguments: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(hubs[0].table, "close", explode)
    monkeypatch.setattr(hubs[0]._port, "turn", explode)
    with pytest.raises(CheckpointError, match="RuntimeError: boom"):
        one_round(hubs[0])
    monkeypatch.undo()


@pytest.mark.parametrize("address", ["192.0.2.1", "nowhere.invalid"])
def test_a_coordinator_that_cannot_listen_says_where(store: Store, address: str) -> None:
    with pytest.raises(CheckpointError, match=f"rank 0, the coordinator, cannot listen on {address}, the address"):
        TcpHub(0, range(2), 0, store, "k", bind_host=address)


def test_all_ranks_hear_at_once_why_the_coordinator_has_no_hub(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the attempt that they make as well; what has become of an earlier one they know, and wait for the next."""

    def refused(self: object) -> None:
        raise RuntimeError("can't start new thread")

    why = "the control hub of rank 0 has no thread: can't start new thread"
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(CheckpointError, match=why):
            make(0, store, opened=1)
    for attempt in (0, 1):
        with pytest.raises(RankFailureError, match=f"^{why}") as caught:
            make(1, store, opened=attempt)
        assert list(caught.value.failures) == [0]
    with pytest.raises(CheckpointTimeoutError, match="did not set up its control hub within 0.2 s"):
        make(1, store, opened=2, bootstrap_timeout=0.2)
    with ThreadPoolExecutor(2) as pool:
        hubs = [each.result() for each in [pool.submit(make, rank, store, opened=2) for rank in (1, 0)]]
        try:
            assert list(pool.map(one_round, hubs)) == [b"1", b"0"]
        finally:
            for hub in hubs:
                hub.close()


def test_a_rank_without_descriptors_for_a_hub_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", refused)
    with pytest.raises(CheckpointError, match="the control hub of rank 0 cannot be set up: .*Too many open files"):
        make(0, store)


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


def test_a_rank_that_reaches_no_network_at_first_connects_later(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_port, "_FIRST_PAUSE", 0.01)
    unreachable = iter([OSError(errno.ENETUNREACH, "Network is unreachable")] * 2)
    connect = socket.socket.connect
    refused = []

    def refuse_first(sock: socket.socket, address: Any) -> None:
        for error in unreachable:
            refused.append(sock)
            raise error
        connect(sock, address)

    coordinator = make(0, store)
    monkeypatch.setattr(socket.socket, "connect", refuse_first)
    member = make(1, store)
    assert both([coordinator, member]) == [b"0", b"1"]
    assert [sock.fileno() for sock in refused] == [-1, -1]  # closed
    for hub in (member, coordinator):
        hub.close()


def test_a_thread_that_does_not_end_is_left_behind(
    hubs: list[TcpHub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.control.hub._CLOSE_SECONDS", 0.05)
    hang, port = threading.Event(), hubs[1]._port
    linger = port.linger
    monkeypatch.setattr(port, "linger", lambda board: hang.wait(PATIENCE) and linger(board))
    hubs[1].close()
    assert "the control hub's thread has not ended within 0 s and is left behind" in caplog.text
    hang.set()
    hubs[1]._thread.join(PATIENCE)
    assert not hubs[1]._thread.is_alive()


@pytest.mark.parametrize(
    ("named", "address"), [(True, "198.51.100.7"), (False, "127.0.0.1")], ids=["named", "nameless"]
)
def test_a_host_without_a_route_goes_by_its_name(named: bool, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    def found(name: str) -> str:
        if named and name == "a-host":
            return "198.51.100.7"
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host")
    monkeypatch.setattr(socket, "gethostbyname", found)
    assert local_address() == address
