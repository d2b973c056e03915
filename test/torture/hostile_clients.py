"""Clients that do a control port harm, if it lets them: raw sockets, as fast as they can."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import msgspec

from paddle_dist_ckpt.control import keys
from paddle_dist_ckpt.control.bootstrap import Rendezvous, address_of
from test.control.file_store import FileStore

__all__ = ["KINDS", "attack"]

_MANY = 400
_SECONDS = 5.0


@dataclass(frozen=True)
class Target:
    """The port, and all that can be known of it by somebody who reads the store.

    Attributes:
        address: Host and port.
        key: The hub's key.
        draw: For whatever is random.
    """

    address: tuple[str, int]
    key: bytes
    draw: random.Random

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, _SECONDS)

    def hello(self, sock: socket.socket, rank: int, key: bytes) -> bytes:
        """A hello upon the greeting that comes."""
        greeting = b""
        while len(greeting) < keys.GREETING_BYTES:
            data = sock.recv(keys.GREETING_BYTES - len(greeting))
            if not data:
                raise ConnectionError
            greeting += data
        return keys.Handshake(key, greeting, keys.open_hello(rank, self.draw.randbytes(16))).hello()


def garbage(target: Target) -> None:
    """Something else than the protocol."""
    words = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f\x03\x00NULL",
        b"\x16\x03\x01\x02\x00\x01",
    ]
    with target.connect() as sock:
        sock.sendall(target.draw.choice([*words, target.draw.randbytes(4096)]))
        while sock.recv(4096):
            pass


def idle(target: Target) -> None:
    """Very many connections that say nothing, each made anew when it is closed."""
    socks = [target.connect() for _ in range(_MANY)]
    time.sleep(0.5)
    for sock in socks:
        sock.close()


def slow(target: Target) -> None:
    """Many connections on which a right hello comes byte by byte."""
    socks = [target.connect() for _ in range(100)]
    for byte in keys.open_hello(1, bytes(16)) + bytes(24):
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.send(bytes([byte]))
        time.sleep(0.02)
    for sock in socks:
        sock.close()


def endless(target: Target) -> None:
    """A message that has no end, in as large pieces as there are."""
    with target.connect() as sock:
        sock.sendall(target.hello(sock, 1, bytes(64)) + struct.pack(">II", 100, 1 << 30))
        for _ in range(2000):
            sock.sendall(bytes(1 << 20))


def flood(target: Target) -> None:
    """Whole messages of somebody who does not know the key, as many as possible."""
    socks = [target.connect() for _ in range(32)]
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.sendall(target.hello(sock, 1, target.draw.randbytes(64)) * 50)
        sock.close()


def replayed(target: Target) -> None:
    """What a rank has said in another connection."""
    with target.connect() as sock:
        recorded = target.hello(sock, 1, target.key)
    with target.connect() as sock:
        sock.sendall(recorded + target.draw.randbytes(200))
        while sock.recv(4096):
            pass


def wrong_version(target: Target) -> None:
    """A hello in a version before or after this one."""
    with target.connect() as sock:
        hello = target.hello(sock, 1, target.key)
        version = struct.pack(">H", target.draw.choice([1, keys.PROTOCOL + 1]))
        sock.sendall(hello[:6] + version + hello[8:])
        while sock.recv(4096):
            pass


def wrong_rank(target: Target) -> None:
    """Somebody who knows the key, and says to be no rank, the coordinator, or one that is connected."""
    with target.connect() as sock:
        sock.sendall(target.hello(sock, target.draw.choice([7, 1 << 60, 0, 1]), target.key))
        answer = sock.recv(keys.ANSWER_BYTES)
        assert not answer or answer[0] != keys.Status.WELCOME


KINDS: dict[str, Callable[[Target], None]] = {
    "garbage": garbage,
    "idle connections": idle,
    "slow bytes": slow,
    "endless parts": endless,
    "flood": flood,
    "replayed": replayed,
    "wrong version": wrong_version,
    "right token, wrong rank": wrong_rank,
}


def attack(kind: str, seed: int, store: Path, done: Synchronized[int]) -> None:
    """Do harm until killed; counts in ``done``. At the lowest priority: a stranger brings a processor of its own."""
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    found = msgspec.msgpack.decode(FileStore(store).get("k", _SECONDS), type=Rendezvous)
    target = Target(address_of(found), keys.hub_key(found.token, b"", "k"), random.Random(seed))
    while True:
        with contextlib.suppress(OSError):
            KINDS[kind](target)
        with done.get_lock():
            done.value += 1
