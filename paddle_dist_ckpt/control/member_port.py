"""A rank's connection to the coordinator."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Collection

from . import bootstrap, failures, keys, wire
from .board import Board
from .bootstrap import Rendezvous
from .connection import Connection
from .introduction import Introduction
from .keys import Status
from .port import LINGER_SECONDS, Port
from .wire import Message

__all__ = ["MemberPort"]

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_ATTEMPT_SECONDS = 10.0
_REFUSALS = 3
"""So often a rank must have been turned away to believe it: a byte damaged on the way looks like a wrong key."""
_REFUSED = {
    Status.UNPROVEN: "rank {coordinator}, the coordinator, turned rank {rank} away, which has another control secret; "
    "all ranks of the job must have the same one",
    Status.NOT_A_MEMBER: "rank {coordinator}, the coordinator, does not know rank {rank} as one of its group",
    Status.TAKEN: "another process takes part as rank {rank} with rank {coordinator}, the coordinator",
}


class MemberPort(Port):
    """That of a rank that is not the coordinator. It connects again when the connection ends.

    Args:
        rank: This rank.
        coordinator: Whom it connects to.
        rendezvous: Where that is.
        secret: The job's.
        name: The hub's.
    """

    def __init__(self, rank: int, coordinator: int, rendezvous: Rendezvous, secret: bytes, name: str) -> None:
        super().__init__()
        self._rank = rank
        self._coordinator = coordinator
        self._address = bootstrap.address_of(rendezvous)
        self._key = keys.hub_key(rendezvous.token, secret, name)
        self._process = secrets.token_bytes(keys.ID_BYTES)
        self._standing: list[Connection] = []  # one or none, as of the next
        self._attempts: list[Introduction] = []
        self._was_welcome = False
        self._refusals = 0
        self._next_attempt = 0.0
        self._attempt_ends = math.inf
        self._pause = _FIRST_PAUSE
        self._waiting: deque[tuple[Message, bytes]] = deque()

    @property
    def connections(self) -> Collection[Connection]:
        return self._standing

    def send(self, destination: int, message: Message, payload: bytes) -> None:
        """Send to the coordinator; until the connection stands, it waits.

        Of a session that has failed meanwhile, not by this rank's error, only the farewell does: an Open that arrives
        when its session is over looks like a call that this rank makes too late, and the next one would fail for it.
        """
        for connection in self._standing:
            self._send_over(connection, message, payload)
        if not self._standing:
            if isinstance(message, wire.Bye):
                self._forget(message.session)
            self._waiting.append((message, payload))

    def _forget(self, session: int) -> None:
        """What was to be sent in a session, unless this rank's own error is among it: that the others have to hear."""
        if not any(isinstance(message, wire.Fail) and message.session == session for message, _ in self._waiting):
            self._waiting = deque(sent for sent in self._waiting if not _is_of(sent[0], session))

    def _drop(self, connection: Connection) -> None:
        super()._drop(connection)
        self._standing.remove(connection)

    def _come_and_go(self, board: Board) -> float:
        if self._standing:
            return math.inf
        if not self._attempts:
            if time.monotonic() < self._next_attempt:
                return self._next_attempt
            try:
                self._begin()
            except OSError as error:
                return self._give_up(error, board)
        elif self._knocked:
            self._knocked = False
            try:
                self._attempts[0].advance()
                self._go_on(self._attempts[0], board)
            except OSError as error:
                return self._give_up(error, board)
        elif time.monotonic() >= self._attempt_ends:
            return self._give_up(TimeoutError("no answer"), board)
        return self._attempt_ends if self._attempts else math.inf

    def _begin(self) -> None:
        attempt = Introduction(self._address, self._key, self._rank, self._process, self._coordinator)
        self._attempts.append(attempt)
        # Else nothing ends it where the coordinator has closed it and no word of that came through.
        self._attempt_ends = time.monotonic() + _ATTEMPT_SECONDS
        self._selector.register(attempt.socket, attempt.interest)

    def _go_on(self, attempt: Introduction, board: Board) -> None:
        if attempt.status is None:
            self._selector.modify(attempt.socket, attempt.interest)
            return
        if attempt.status != Status.WELCOME:
            self._refusals += 1
            if self._was_welcome or self._refusals < _REFUSALS:
                raise ConnectionError("refused: something may have been lost or damaged on the way")
        self._selector.unregister(attempt.socket)
        self._attempts.clear()
        if attempt.status != Status.WELCOME:
            attempt.socket.close()
            text = _REFUSED[attempt.status].format(rank=self._rank, coordinator=self._coordinator)
            self._next_attempt = math.inf
            board.shut(failures.record(text))
            return
        self._pause = _FIRST_PAUSE
        self._was_welcome = True
        connection = attempt.connection()
        self._standing.append(connection)
        self._add(connection)
        waiting, self._waiting = self._waiting, deque()
        for message, payload in waiting:
            self._send_over(connection, message, payload)
        board.regain(self._coordinator)

    def _give_up(self, error: OSError, board: Board) -> float:
        """Begin a new attempt after a while, each time a longer one."""
        for attempt in self._attempts:
            self._selector.unregister(attempt.socket)
            attempt.socket.close()
        self._attempts.clear()
        self._next_attempt = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if isinstance(error, ConnectionRefusedError):  # it listened before its address was known, so it has ended
            board.lose(self._coordinator)
        return self._next_attempt

    def linger(self, board: Board) -> None:
        """Wait also for a connection that is being made, if something was sent."""
        until = time.monotonic() + LINGER_SECONDS
        while self._waiting and self._attempts and (left := until - time.monotonic()) > 0:
            self.wait(left)
            with board.lock:
                self.turn(board)
        super().linger(board)

    def close(self) -> None:
        super().close()
        for attempt in self._attempts:
            attempt.socket.close()


def _is_of(message: Message, session: int) -> bool:
    return not isinstance(message, (wire.Whereabouts, wire.Appointed)) and message.session == session
