"""A member's attempt to connect to the coordinator, without ever blocking; and its farewell to one that it does not
understand."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket

from . import keys
from .connection import Connection, tune
from .keys import Handshake, Status

__all__ = ["Introduction", "differ"]

_FAREWELL_SECONDS = 5.0


class Introduction:
    """The attempt.

    Args:
        address: The coordinator's host and port.
        key: The hub's.
        rank: This rank.
        process: This process's id; the same in each of its attempts.
        coordinator: The other side's rank.

    Attributes:
        socket: What it goes over.
        interest: The events upon which to advance.
        status: What the coordinator has answered, once it has.

    Raises:
        OSError: nobody can be reached there.
    """

    def __init__(self, address: tuple[str, int], key: bytes, rank: int, process: bytes, coordinator: int) -> None:
        self.socket = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        self.interest = selectors.EVENT_WRITE
        self.status: Status | None = None
        self._key = key
        self._hello = keys.open_hello(rank, process)
        self._coordinator = coordinator
        self._heard = b""
        try:
            tune(self.socket)
            with contextlib.suppress(BlockingIOError):
                self.socket.connect(address)
        except OSError:
            self.socket.close()
            raise

    def advance(self) -> None:
        """Go on as far as possible.

        Raises:
            ConnectionRefusedError: nobody listens there.
            OSError: the connection could not be made, or has ended, or is not with the coordinator.
        """
        if self.interest == selectors.EVENT_WRITE:
            error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            self.interest = selectors.EVENT_READ
        if len(self._heard) < keys.GREETING_BYTES and self._listen(keys.GREETING_BYTES):
            self.socket.send(self._handshake().hello())
        if len(self._heard) >= keys.GREETING_BYTES and self._listen(keys.GREETING_BYTES + keys.ANSWER_BYTES):
            self.status = self._handshake().status(self._heard[keys.GREETING_BYTES :])

    def _listen(self, until: int) -> bool:
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(until - len(self._heard))
            if not data:
                raise ConnectionError("the connection has ended")
            self._heard += data
        if not keys.spoken(self._heard):
            raise ConnectionError("somebody who is not the coordinator")
        return len(self._heard) == until

    def _handshake(self) -> Handshake:
        return Handshake(self._key, self._heard[: keys.GREETING_BYTES], self._hello)

    def connection(self) -> Connection:
        """The connection, once the coordinator has welcomed this rank."""
        sending, receiving = self._handshake().seals()
        return Connection(self.socket, sending, receiving, self._coordinator)


def differ(address: tuple[str, int], key: bytes, rank: int) -> None:
    """Let a coordinator that runs another version know that this rank runs this one, if it can be reached.

    It hears the hello of a member that knows the hub's key, and ends the connection, for the two would not understand
    each other.
    """
    with contextlib.suppress(OSError), socket.create_connection(address, _FAREWELL_SECONDS) as connection:
        greeting = b""
        while len(greeting) < keys.GREETING_BYTES:
            data = connection.recv(keys.GREETING_BYTES - len(greeting))
            if not data:
                return
            greeting += data
        hello = keys.open_hello(rank, secrets.token_bytes(keys.ID_BYTES))
        connection.sendall(Handshake(key, greeting, hello).hello())
        connection.recv(1)
