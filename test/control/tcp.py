"""Hubs over TCP on threads of one process, with a relay between them that can be cut."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from paddle_dist_ckpt.control import TcpHub, keys
from paddle_dist_ckpt.control.bootstrap import Rendezvous
from paddle_dist_ckpt.control.keys import PROTOCOL
from paddle_dist_ckpt.errors import CheckpointError
from paddle_dist_ckpt.testing.hub_conformance.cases import LONG

__all__ = ["Proxy", "Relayed", "Store", "both", "make", "one_round", "speak_another_version"]


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


def speak_another_version(store: Store, monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    """Have the next members run a version with another protocol. Returns where the coordinator is."""
    here = store.rendezvous()
    store.set("k", msgspec.msgpack.encode(msgspec.structs.replace(here, protocol=PROTOCOL + 4)))
    hello = keys.open_hello
    magic = struct.pack(">6sH", b"PDCKPT", PROTOCOL + 4)
    monkeypatch.setattr(keys, "open_hello", lambda *args: magic + hello(*args)[len(magic) :])
    return here


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
        with contextlib.suppress(OSError):  # a side that is closed with something unread resets its connection
            while data := source.recv(65536):
                self.open.wait()
                target.sendall(data[:-1] + bytes([data[-1] ^ 1]) if altered or self.altered else data)
        if self.tells_ends:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)  # as a network passes on that one side has nothing more to say

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
