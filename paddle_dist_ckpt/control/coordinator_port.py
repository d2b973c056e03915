"""The coordinator's connections, one to every other rank."""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Collection

from ..errors import CheckpointError
from . import bootstrap, keys
from .board import Board
from .bootstrap import Rendezvous
from .connection import Connection
from .coordinator import Links
from .gate import Gate
from .keys import Hello
from .port import Port
from .wire import Message

__all__ = ["CoordinatorPort"]

_ANYWHERE = ("0.0.0.0", "::")


class CoordinatorPort(Port):
    """The coordinator's.

    Args:
        rank: The coordinator.
        ranks: All ranks of the group.
        bind_host: Where to listen.
        secret: The job's.
        name: The hub's.
        links: Is told what the gate learns of ranks.

    Attributes:
        rendezvous: What the other ranks must know to connect.

    Raises:
        CheckpointError: it cannot listen there.
    """

    def __init__(
        self, rank: int, ranks: tuple[int, ...], bind_host: str | None, secret: bytes, name: str, links: Links
    ) -> None:
        super().__init__()
        token = secrets.token_bytes(keys.TOKEN_BYTES)
        self._others = frozenset(ranks) - {rank}
        self._by_rank: dict[int, Connection] = {}
        key, wanted = keys.hub_key(token, secret, name), bind_host or bootstrap.local_address()
        try:
            family, *_, found = socket.getaddrinfo(wanted, None, type=socket.SOCK_STREAM)[0]
            address = str(found[0])
            self._gate = Gate(rank, (family, address), key, self._others, self._is_taken, links.unproven)
        except OSError as error:
            super().close()
            raise CheckpointError(
                f"rank {rank}, the coordinator, cannot listen on {wanted}, the address that it was given: {error}"
            ) from error
        self._gate_opens = 0.0
        self._gate_rests = True
        host = bootstrap.local_address() if address in _ANYWHERE else address
        endpoint = f"tcp://{f'[{host}]' if ':' in host else host}:{self._gate.port}"
        self.rendezvous = Rendezvous(keys.PROTOCOL, endpoint, token)

    @property
    def connections(self) -> Collection[Connection]:
        return self._by_rank.values()

    def _is_taken(self, hello: Hello) -> bool:
        connection = self._by_rank.get(hello.rank)
        return connection is not None and connection.process != hello.process

    def send(self, destination: int, message: Message, payload: bytes) -> None:
        """Send to a rank, if it is connected; else it will hear what it missed when it is, or opens the session."""
        connection = self._by_rank.get(destination)
        if connection is not None:
            self._send_over(connection, message, payload)

    def _drop(self, connection: Connection) -> None:
        super()._drop(connection)
        del self._by_rank[connection.rank]

    def _come_and_go(self, board: Board) -> float:
        now = time.monotonic()
        if self._gate_rests:
            if now < self._gate_opens:
                return self._gate_opens
            self._gate_rests = False
            self._selector.register(self._gate, selectors.EVENT_READ)
        elif self._knocked or now >= self._gate.due:
            self._knocked = False
            for connection in self._gate.serve(len(self._others) - len(self._by_rank)):
                self._welcome(connection, board)
            while self._gate.differing:
                rank, protocol = self._gate.differing.popitem()
                if rank not in self._by_rank:
                    board.differ(rank, protocol)
            self._selector.unregister(self._gate)
            self._gate_rests, self._gate_opens = True, now + self._gate.rest
            return self._gate_opens
        return self._gate.due

    def _welcome(self, connection: Connection, board: Board) -> None:
        before = self._by_rank.get(connection.rank)
        if before is not None:
            # What was under way on the old connection may be lost, so the open sessions cannot go on.
            self._drop(before)
            board.lose(connection.rank)
        self._by_rank[connection.rank] = connection
        self._add(connection)
        board.regain(connection.rank)

    def close(self) -> None:
        super().close()
        self._gate.close()
