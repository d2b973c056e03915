"""The connections of a hub: on the coordinator one to every other rank, on every other rank one to the coordinator.

Who notices what, and why it is not left to another:

- A connection that was ended is noticed when the system says so, on both sides. The member connects again.
- A host that has vanished without a word, or a firewall that has forgotten a quiet connection, is noticed by TCP's own
  keepalive, between sessions.
- A connection on which nothing gets through any more is ended by the system, a little later than a session fails for
  that (see :meth:`Port.tolerate`). Else it would stay, and every later session would fail for it too: the system sends
  again ever more seldom, every two minutes at last, and gives up after a quarter of an hour; if the peer's host is
  there, but takes nothing, never.
- Silence within a session is noticed by the beats of the hub's thread (see :mod:`.member`), which carry more than life:
  that the rank still takes part in it, and that its collectives move. Beats wait behind a large message on a slow
  network, so the parts of that are news of the rank as well.
- What was sent before a hub is closed is waited for until the peers' systems have it. A process that ends without that
  may take it along; so what must not get lost is acknowledged (see :meth:`.board.Board.leave`).
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection

import msgspec

from . import wire
from .board import Board
from .connection import Connection
from .telling import OnceAMinute
from .wire import Message

__all__ = ["LINGER_SECONDS", "Port"]

_logger = logging.getLogger("paddle_dist_ckpt")
LINGER_SECONDS = 5.0
_LINGER_STEP = 0.005
_LATER = 1.0


class Port(ABC):
    """What both sides have in common. One thread waits and receives; all send, under the board's lock."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._ready: list[tuple[Connection, int]] = []
        self._blocked: set[Connection] = set()
        self._knocked = False  # somebody who is no connection yet
        self._tolerated: float | None = None
        self._telling: defaultdict[int, OnceAMinute] = defaultdict(OnceAMinute)  # of closed connections, by rank

    @property
    @abstractmethod
    def connections(self) -> Collection[Connection]:
        """Those that stand."""

    @abstractmethod
    def send(self, destination: int, message: Message, payload: bytes) -> None:
        """Send to a rank. Called under the board's lock."""

    @abstractmethod
    def _come_and_go(self, board: Board) -> float:
        """See to new connections; returns when to do so again at the latest."""

    def wake(self) -> None:
        """Let the thread take a turn now."""
        with contextlib.suppress(BlockingIOError):  # it is full of earlier wake-ups, which will do
            self._wake.send(b"\0")

    @property
    def blocked(self) -> bool:
        """Whether something was sent that the system has not taken, and the thread does not know of it."""
        return bool(self._blocked)

    def tolerate(self, seconds: float) -> None:
        """From now on end connections on which nothing has got through for so long, and a little longer, so that those
        who wait for the peer find out by themselves. Called under the board's lock."""
        if seconds + _LATER != self._tolerated:
            self._tolerated = seconds + _LATER
            for connection in self.connections:
                connection.tolerate(self._tolerated)

    def wait(self, seconds: float) -> None:
        """Sleep until something comes, and read it. Called by the thread, without the lock."""
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._woken:
                self._woken.recv(4096)
            elif isinstance(key.data, Connection):
                self._ready.append((key.data, events))
                if events & selectors.EVENT_READ:
                    try:
                        key.data.receive()
                    except ConnectionError as error:
                        self._warn(key.data, error)
            else:
                self._knocked = True

    def turn(self, board: Board) -> float:
        """Deliver what has come. Called by the thread, with the lock.

        Returns:
            When to call again at the latest, as monotonic time.
        """
        ready, self._ready = self._ready, []
        for connection, events in ready:
            if events & selectors.EVENT_WRITE:
                connection.flush()
                if not connection.blocked:
                    self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
            self._deliver(connection, board)
            if connection.amid_frame and events & selectors.EVENT_READ:
                board.hear(connection.rank)
            if connection.ended:
                # IMPORTANT: what a rank sent before its connection ended counts, a farewell above all.
                self._drop(connection)
                board.lose(connection.rank)
        return self._come_and_go(board)

    def _deliver(self, connection: Connection, board: Board) -> None:
        arrived, connection.inbox = connection.inbox, []
        for frame, payload in arrived:
            try:
                message = wire.decode(frame)
            except (msgspec.DecodeError, RecursionError) as error:
                self._warn(connection, error)
                return
            board.deliver(connection.rank, message, payload)

    def _warn(self, connection: Connection, error: Exception) -> None:
        """What a rank has sent makes no sense: end the connection, lest something be missed. It may connect again at
        once, and send as little sense."""
        connection.ended = True
        untold = self._telling[connection.rank].due()
        if untold is not None:
            more = f" (and was {untold} times since the last such warning)" if untold else ""
            _logger.warning("the control connection to rank %d is closed: %s%s", connection.rank, error, more)

    def _send_over(self, connection: Connection, message: Message, payload: bytes) -> None:
        self._blocked.add(connection)  # and not after that: it may be interrupted
        connection.send(wire.encode(message), payload)
        if not connection.blocked:
            self._blocked.discard(connection)

    def _add(self, connection: Connection) -> None:
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        if self._tolerated is not None:
            connection.tolerate(self._tolerated)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        self._blocked.discard(connection)
        connection.socket.close()

    def arm(self) -> None:
        """See that what the system has not taken is sent on. Called by the thread, with the lock, before it waits."""
        for connection in self._blocked:
            self._selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        self._blocked.clear()

    def linger(self, board: Board) -> None:
        """Wait until what was sent has come to those who still read, for a bounded time."""
        until = time.monotonic() + LINGER_SECONDS
        waiting = [*self.connections]
        while waiting and time.monotonic() < until:
            for connection in waiting:
                connection.drain()
            waiting = [connection for connection in waiting if not connection.delivered]
            if waiting:
                time.sleep(_LINGER_STEP)

    def close(self) -> None:
        """Close all sockets of this process. Where it was forked from the hub's, that is nothing to that one."""
        for connection in self.connections:
            connection.socket.close()
        self._selector.close()
        self._woken.close()
        self._wake.close()
