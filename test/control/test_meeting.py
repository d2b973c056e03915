"""How ranks find the coordinator, and are let in: bootstrap, secrets, versions, addresses."""

from __future__ import annotations

import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from paddle_dist_ckpt.control import TcpHub, member_port
from paddle_dist_ckpt.control.bootstrap import local_address
from paddle_dist_ckpt.control.keys import PROTOCOL
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError, RankFailureError
from paddle_dist_ckpt.testing.hub_conformance.cases import AT_ONCE, SHORT
from paddle_dist_ckpt.version import __version__
from test.control.tcp import Relayed, Store, both, make, one_round, speak_another_version
from test.waiting import until


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


def test_all_ranks_are_told_at_once_of_one_that_cannot_connect_for_its_version(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hubs = [make(rank, store, ranks=3) for rank in (0, 1)]
    text = (
        f"ranks run different versions of paddle_dist_ckpt (ranks 0, 1: {__version__}, "
        f"rank 2: one with version {PROTOCOL + 4} of the control messages); install the same one on every rank"
    )
    try:
        until(lambda: hubs[0].links.absent == {2})  # or it would speak the other version, too
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
