"""The sockets of a hub: a ROUTER on the coordinator, a DEALER on every other rank.

A message is the frames ``token, header, payload``. zmq sockets may be used by one thread at a time; the board's lock
sees to that.

Who notices what, and why it is not left to another:

- A broken connection is noticed by zmq, on both sides, and told through the monitors; the DEALER connects again. A
  ROUTER's monitor does not say whose connection it was, so the ROUTER sends to each rank in turn, and zmq refuses where
  there is nobody (ROUTER_MANDATORY).
- A host that has vanished without a word, or a firewall that has forgotten a quiet connection, is noticed by TCP's own
  keepalive, between sessions. ZMTP's heartbeats would do the same with a timeout of their own, in which a process that
  was frozen for a while is given up even if its session has a longer one.
- Silence within a session is noticed by the beats of the hub's thread (see :mod:`.member`), which carry more than life:
  that the rank still takes part in it, and that its collectives move. zmq answers heartbeats on its own thread, even
  if no thread of Python's ever runs again.
- What was sent before a socket is closed is sent on by zmq (LINGER).
- A rank is known by what its messages say, not by a ROUTING_ID of its choice: with ROUTER_HANDOVER, a stranger who
  chose a rank's would take its place before any token is seen.
"""

from __future__ import annotations

import hmac
import logging
import math
import secrets
import socket
import time
from collections.abc import Iterator

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from . import bootstrap, wire
from .board import Board
from .bootstrap import Rendezvous
from .wire import Message

__all__ = ["DealerPort", "RouterPort"]

_logger = logging.getLogger("paddle_dist_ckpt")
_COPY_BELOW = 1 << 16
_PROBE_AFTER = (0.0, 0.002, 0.01, 0.05, 0.2)
_LINGER_MS = 5000
_EVENTS = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED
_ANYWHERE = ("0.0.0.0", "::")


class Port:
    """What both kinds of socket have in common.

    Attributes:
        socket: Carries the messages.
        monitor: Tells about its connections.
    """

    _linger = _LINGER_MS

    def __init__(self, kind: int, rank: int, token: bytes) -> None:
        self._context = zmq.Context(io_threads=1)
        self.socket = self._context.socket(kind)
        # Deadlines bound a queue's growth, since a silent rank ends the session; a full one would block the thread.
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_PAYLOAD)
        # Firewalls forget connections that are quiet between two checkpoints.
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self._rank = rank
        self._token = token

    def _send(self, route: tuple[bytes, ...], message: Message, payload: bytes) -> None:
        frames = (*route, self._token, wire.encode(self._rank, message), payload)
        self.socket.send_multipart(frames, zmq.DONTWAIT, copy=len(payload) < _COPY_BELOW)

    def _incoming(self, route_frames: int) -> Iterator[tuple[list[bytes], int, Message, bytes]]:
        """The route, the sender's rank, the message and the payload of all that has arrived from ranks.

        What is from others is dropped, with a warning.
        """
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            route, content = frames[:route_frames], frames[route_frames:]
            if len(content) != 3 or not hmac.compare_digest(content[0], self._token):
                _logger.warning("rank %d dropped a message without the hub's token", self._rank)
                continue
            try:
                source, message = wire.decode(content[1])
            except (msgspec.DecodeError, RecursionError) as error:
                _logger.warning("rank %d dropped a message that it does not understand: %s", self._rank, error)
                continue
            yield route, source, message, content[2]

    def _events(self) -> Iterator[int]:
        """What has happened to connections since the last call."""
        while int(self.monitor.events) & zmq.POLLIN:
            yield recv_monitor_message(self.monitor)["event"]

    def pending(self) -> bool:
        """Whether there is something to receive. After any use of the socket, its file descriptor may not tell."""
        return bool(int(self.socket.events) & zmq.POLLIN)

    def close(self) -> None:
        """Let what was sent go out, to those who still read, and close."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=self._linger)
        self._context.term()


class RouterPort(Port):
    """The coordinator's socket.

    zmq names each connection; which rank's it is follows from the messages that come through it.

    Attributes:
        rendezvous: What the other ranks must know to connect.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], bind_host: str | None) -> None:
        super().__init__(zmq.ROUTER, rank, secrets.token_bytes(bootstrap.TOKEN_BYTES))
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._others = frozenset(ranks) - {rank}
        self._routes: dict[int, bytes] = {}
        self._unreachable: dict[int, bytes] = {}
        self._probes: list[float] = []
        self.rendezvous = Rendezvous(bootstrap.PROTOCOL, self._bind(bind_host), self._token)

    def _bind(self, host: str | None) -> str:
        family, *_, name = socket.getaddrinfo(host or bootstrap.local_address(), None, type=socket.SOCK_STREAM)[0]
        address = str(name[0])
        if family == socket.AF_INET6:
            self.socket.setsockopt(zmq.IPV6, 1)
        bound = f"[{address}]" if family == socket.AF_INET6 else address
        port = self.socket.bind_to_random_port(f"tcp://{bound}")
        return f"tcp://{bootstrap.local_address() if address in _ANYWHERE else bound}:{port}"

    def send(self, destination: int, message: Message, payload: bytes) -> None:
        """Send to a rank, if it is connected; else it will hear what it missed when it is, or opens the session."""
        route = self._routes.get(destination)
        if route is None:
            return
        try:
            self._send((route,), message, payload)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._unreachable[destination] = route

    def pending(self) -> bool:
        """Whether there is something to receive, or a lost connection to tell about."""
        return bool(self._unreachable) or super().pending()

    def receive(self, board: Board) -> float:
        """Deliver all that has arrived, then say whose connection is lost; returns when to call again."""
        self._deliver(board)
        if self._unreachable:
            # IMPORTANT: what a rank sent before its connection ended counts, a farewell above all.
            self._deliver(board)
            gone, self._unreachable = self._unreachable, {}
            for rank, route in gone.items():
                if self._routes.get(rank) == route:
                    del self._routes[rank]
                    board.lose(rank)
        now = time.monotonic()
        if zmq.Event.DISCONNECTED in list(self._events()):
            # zmq does not say whose connection has ended, and may not know yet. So probe, repeatedly.
            self._probes = [now + after for after in _PROBE_AFTER]
        if self._probes and now >= self._probes[0]:
            self._probes.pop(0)
            for rank in self._routes:
                self.send(rank, wire.Hello(), b"")
        return self._probes[0] if self._probes else math.inf

    def _deliver(self, board: Board) -> None:
        for (route,), source, message, payload in self._incoming(1):
            if source not in self._others:
                _logger.warning("rank %d dropped a message from rank %d, which is not in its group", self._rank, source)
                continue
            if self._routes.get(source) != route:
                if source in self._routes:
                    # What was under way on the old connection may be lost, so the open sessions cannot go on.
                    board.lose(source)
                self._routes[source] = route
                board.regain(source)
            board.deliver(source, message, payload)


class DealerPort(Port):
    """The socket of a rank that is not the coordinator. It connects again when the connection ends."""

    _linger = 0

    def __init__(self, rank: int, coordinator: int, rendezvous: Rendezvous) -> None:
        super().__init__(zmq.DEALER, rank, rendezvous.token)
        self._coordinator = coordinator
        self.socket.setsockopt(zmq.IPV6, int("[" in rendezvous.endpoint))
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        self.socket.connect(rendezvous.endpoint)

    def send(self, destination: int, message: Message, payload: bytes) -> None:
        """Send to the coordinator; until the connection stands, zmq keeps it."""
        self._send((), message, payload)

    def receive(self, board: Board) -> float:
        """Deliver all that has arrived, and say whether the connection stands; returns when to call again: never."""
        self._deliver(board)
        for event in self._events():
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._linger = _LINGER_MS
                # The coordinator must know this connection, to notice its end, before the first session.
                self._send((), wire.Hello(), b"")
                board.regain(self._coordinator)
            else:
                self._linger = 0
                self._deliver(board)
                board.lose(self._coordinator)
        return math.inf

    def _deliver(self, board: Board) -> None:
        for _, _, message, payload in self._incoming(0):
            board.deliver(self._coordinator, message, payload)
