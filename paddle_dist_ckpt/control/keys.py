"""What proves that a peer belongs to the job, and a message to its connection. No I/O.

Everything is HMAC with SHA-256. The hub's key is made of the token that the coordinator leaves in the store, of the
job's secret, if it has one, so that whoever reads the store alone does not know it, and of the hub's name, so that
whoever exchanges what two hubs have left there brings no rank of one into the other. The key itself is never sent:

    coordinator -> member    greeting: magic, protocol, a nonce
    member -> coordinator    hello: magic, protocol, a nonce, the process's id, its rank; and a proof over both
    coordinator -> member    a status, and a proof over both

Greeting and hello are the same in every version, but for the number of the protocol: so ranks of different ones find
out that they are. All else may change with that number.

What was recorded cannot be replayed, for the other side's nonce is another one. From both nonces follows a key for each
direction of the connection, by which every frame is signed, with its number. So a frame cannot be forged, altered, left
out or repeated. Nothing is encrypted: see :mod:`.gate` for what that means and why CURVE is not the answer.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "ANSWER_BYTES",
    "GREETING_BYTES",
    "HELLO_BYTES",
    "ID_BYTES",
    "PROTOCOL",
    "TAG_BYTES",
    "TOKEN_BYTES",
    "Handshake",
    "Hello",
    "Seal",
    "Status",
    "greeting",
    "hub_key",
    "open_hello",
    "protocol_of",
    "read_hello",
    "spoken",
    "spoken_in_any_version",
]

PROTOCOL = 3
TOKEN_BYTES = 16
ID_BYTES = 16
TAG_BYTES = 16
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_NAME = b"PDCKPT"
_MAGIC = struct.pack(">6sH", _NAME, PROTOCOL)
_HELLO = struct.Struct(f">8s{_NONCE_BYTES}s{ID_BYTES}sQ")
GREETING_BYTES = len(_MAGIC) + _NONCE_BYTES
HELLO_BYTES = _HELLO.size + _PROOF_BYTES
ANSWER_BYTES = 1 + _PROOF_BYTES


class Status(IntEnum):
    """What the coordinator says to a hello."""

    WELCOME = 0
    UNPROVEN = 1
    NOT_A_MEMBER = 2
    TAKEN = 3


class Hello(NamedTuple):
    """Who somebody says to be."""

    rank: int
    process: bytes


class Seal:
    """Signs the frames of one direction of a connection, or finds out whether they were signed."""

    def __init__(self, key: bytes) -> None:
        self._begun = hmac.new(key, digestmod="sha256")

    def tag(self, number: int, *parts: bytes) -> bytes:
        """The signature of the frame of this number."""
        digest = self._begun.copy()
        digest.update(struct.pack(">Q", number))
        for part in parts:
            digest.update(part)
        return digest.digest()[:TAG_BYTES]


class Handshake:
    """What both sides of a connection have said, once they have.

    Args:
        key: The hub's.
        greeting: The coordinator's.
        hello: The member's, with or without its proof.
    """

    def __init__(self, key: bytes, greeting: bytes, hello: bytes) -> None:
        self._key = key
        self._said = greeting + hello[: _HELLO.size]

    def hello(self) -> bytes:
        """The member's hello with its proof."""
        return self._said[GREETING_BYTES:] + self._derive(b"member          ")

    def proves(self, hello: bytes) -> bool:
        """Whether the member knows the key."""
        return hmac.compare_digest(hello[_HELLO.size :], self._derive(b"member          "))

    def answer(self, status: Status) -> bytes:
        """The coordinator's answer; it proves itself to those only that have."""
        proof = self._derive(b"coordinator     ") if status == Status.WELCOME else bytes(_PROOF_BYTES)
        return bytes([status]) + proof

    def status(self, answer: bytes) -> Status:
        """What the coordinator has answered.

        Raises:
            ConnectionError: it was not the coordinator.
        """
        if answer[0] not in tuple(Status):
            raise ConnectionError("an answer of no known kind")
        if answer[0] == Status.WELCOME and not hmac.compare_digest(answer[1:], self._derive(b"coordinator     ")):
            raise ConnectionError("an answer of somebody who does not know the hub's key")
        return Status(answer[0])

    def seals(self) -> tuple[Seal, Seal]:
        """For what goes to the coordinator, and for what comes from it."""
        return Seal(self._derive(b"to coordinator  ")), Seal(self._derive(b"from coordinator"))

    def _derive(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, purpose + self._said, "sha256")


def hub_key(token: bytes, secret: bytes, name: str) -> bytes:
    """The hub's key.

    Args:
        token: What the coordinator has left in the store.
        secret: The job's own; empty if it has none.
        name: The hub's, which its ranks know without being told.
    """
    return hmac.digest(hmac.digest(token, secret, "sha256"), name.encode(), "sha256")


def greeting() -> bytes:
    """What the coordinator says first."""
    return _MAGIC + secrets.token_bytes(_NONCE_BYTES)


def spoken(data: bytes) -> bool:
    """Whether ``data``, all that has come, may be the beginning of a greeting or hello in this version."""
    return data[: len(_MAGIC)] == _MAGIC[: len(data)]


def spoken_in_any_version(data: bytes) -> bool:
    """Whether ``data``, all that has come, may be the beginning of a greeting or hello in some version."""
    return data[: len(_NAME)] == _NAME[: len(data)]


def protocol_of(hello: bytes) -> int:
    """The number of the protocol that a greeting or hello is of."""
    return int.from_bytes(hello[len(_NAME) : len(_MAGIC)], "big")


def open_hello(rank: int, process: bytes) -> bytes:
    """A member's hello, yet without proof."""
    return _HELLO.pack(_MAGIC, secrets.token_bytes(_NONCE_BYTES), process, rank)


def read_hello(hello: bytes) -> Hello:
    """Who says to be there."""
    _, _, process, rank = _HELLO.unpack_from(hello)
    return Hello(rank, process)
