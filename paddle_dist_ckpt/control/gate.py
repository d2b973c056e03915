"""Where the coordinator listens, and who may come in.

The port is open to whoever reaches the host, so what strangers cost is bounded before anything is known of them:

- Of those that have not proved to know the hub's key (see :mod:`.keys`) there are 64 at most, or 256 and one for each
  missing rank while some are not connected; then the one that came first must go. So there is always a file descriptor
  left for the job.
- Each of them is read 80 bytes of, and no more; one whose first bytes are of something else is out at once. It
  has 10 seconds.
- All of them together get a turn 50 times a second, or 10 times where somebody was turned away, in which at most 16
  more are let in. The rest waits in the system's own queue, where a few KiB are kept of what each has sent. (With
  usual buffers, 4000 of them took 650 MiB.) So neither many connections nor many small packets take the processor
  from the job, nor the board's lock from a save. While ranks are missing there is no save to disturb: then there are
  50 turns, of 64 newcomers or an eighth of the missing ranks; and for 10 ms of each those do not count who have gone
  again. Else strangers who fill that queue would keep the ranks from coming at all: who comes and goes can do so 60,000
  times a second.
- What was turned away is told in one warning a minute.

A rank that is connected keeps its place: a newcomer takes it only if it is the same process again, which may know of a
broken connection before the coordinator does.

Why this is not left to a messaging library: libzmq takes in frames of the handshake itself up to the limit for all
frames, and accepts connections without a bound, whatever the mechanism (CURVE too). One client without keys made a
server grow by 800 MiB; 400 idle ones took its last file descriptor, after which the job could open no files.

What this does not do is encrypt. Messages have paths, shapes and small values of a checkpoint; tensors, between ranks
and on the disk, are not encrypted either. Who may listen on the network learns these. Who can also read the
store of the job's ranks knows its token, and may take part, unless the job has a secret.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable

from . import keys
from .connection import Connection, tune
from .keys import Handshake, Hello, Status
from .telling import OnceAMinute

__all__ = ["Gate"]

_REST = 0.02
_LONG_REST = 0.1
_MOST_WAITING = 64
_ENTRANTS = 16
_TIMES_WHILE_MISSING = 4  # as many of both
_FOR_THE_GONE = 0.01  # seconds of a turn, while ranks are missing
_PATIENCE = 10.0
_UNREAD_BYTES = 1 << 12
_SO_BUF_LOCK, _TCP_WINDOW_CLAMP = 72, 10  # of Linux
_WIDEST_WINDOW = 1 << 30
_WHY = {
    Status.UNPROVEN: "that did not prove to know the hub's key",
    Status.NOT_A_MEMBER: "of a rank that is not in its group",
    Status.TAKEN: "of a rank that is connected already",
}
_OTHER = "that spoke something else, or another version"
_logger = logging.getLogger("paddle_dist_ckpt")


class _LimitedWarnings:
    """Warnings about one kind of thing that strangers can bring about as often as they like.

    Args:
        text: What to warn of, with a place for the reasons.
    """

    def __init__(self, text: str) -> None:
        self._text, self._telling = text, OnceAMinute()
        self._reasons: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        """Note one more; warn of all since the last warning, if that was long ago."""
        self._reasons[reason] += 1
        if self._telling.due() is not None:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._reasons.most_common())
            self._reasons.clear()
            _logger.warning(self._text, reasons)


def _take_in(sock: socket.socket, nbytes: int, window: int = 0) -> None:
    """Let the system take in as much that is not read yet, and more as it is read; and send the other side as large a
    window, if it is given. Not before Linux 5.14, where the size would stay as it is."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)  # raises where it is not known
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)
        sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
        if window:  # which has been made for the small buffer
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_WINDOW_CLAMP, window)


class _Newcomer:
    """Somebody that is connected and has not said, or not proved, who it is.

    Raises:
        OSError: it has gone again.
    """

    def __init__(self, sock: socket.socket, now: float) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.until = now + _PATIENCE
        self.greeting = keys.greeting()
        self.hello = b""
        sock.send(self.greeting)
        with contextlib.suppress(BlockingIOError):
            if not sock.recv(1, socket.MSG_PEEK):
                raise ConnectionError("it has gone")
        tune(sock)

    def listen(self) -> bool:
        """Take what has come of the hello; returns whether it is whole.

        Raises:
            OSError: it has gone, or speaks something else.
        """
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(keys.HELLO_BYTES - len(self.hello))
            if not data:
                raise ConnectionError("that left without a word")
            self.hello += data
        if not keys.spoken_in_any_version(self.hello):
            raise ConnectionError(_OTHER)
        return len(self.hello) == keys.HELLO_BYTES


class Gate:
    """Lets in those that prove to be ranks of the group.

    Args:
        rank: The coordinator, whose gate it is.
        address: Where to listen: a family, and an address of it.
        key: The hub's.
        others: The ranks that may come.
        taken: Whether the place of one that has proved who it is belongs to another process.
        unproven: Is filled with the ranks that somebody without the key has said to be, until they have come.

    Attributes:
        port: The port on which it listens.
        differing: The protocols of ranks that have proved who they are, and speak another one.
        rest: How many seconds to leave those at the gate alone after a turn.
    """

    def __init__(
        self,
        rank: int,
        address: tuple[socket.AddressFamily, str],
        key: bytes,
        others: frozenset[int],
        taken: Callable[[Hello], bool],
        unproven: set[int],
    ) -> None:
        self._key = key
        self._others = others
        self._taken = taken
        self._warnings = _LimitedWarnings(f"rank {rank}'s control port turned away connections: %s")
        self.rest = _REST
        self._newcomers: dict[int, _Newcomer] = {}  # by descriptor, the oldest first
        self._unproven = unproven
        self.differing: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((address[1], 0), family=address[0], backlog=4096)
        self._admitted_bytes = self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2  # it is doubled
        _take_in(self._listener, _UNREAD_BYTES)  # who connects inherits it
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._selector.register(self._listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """A descriptor that is readable when somebody is at the gate."""
        return self._selector.fileno()

    def serve(self, missing: int) -> list[Connection]:
        """A turn: let in those that have proved who they are.

        Args:
            missing: How many ranks are not connected.
        """
        admitted = []
        self.rest = _REST
        now = time.monotonic()
        ready = [key.fd for key, _ in self._selector.select(0)]
        for newcomer in [self._newcomers[fd] for fd in ready if fd in self._newcomers]:
            admitted += self._hear(newcomer)  # before others come, for whom one who has spoken would have to go
        if self._listener.fileno() in ready:
            times = _TIMES_WHILE_MISSING if missing else 1
            until = now + _FOR_THE_GONE if missing else now
            self._accept(max(times * _ENTRANTS, missing // 8), times * _MOST_WAITING + missing, now, until)
        while self._newcomers and (first := next(iter(self._newcomers.values()))).until < now:
            self._dismiss(first, "that had nothing to say")
        if missing:
            self.rest = _REST
        return admitted

    @property
    def due(self) -> float:
        """When the next turn must be, as monotonic time, though nobody comes: somebody will have to go."""
        return next(iter(self._newcomers.values())).until if self._newcomers else math.inf

    def _accept(self, entrants: int, most: int, now: float, until: float) -> None:
        """Let in so many at most, and ``most`` be there. Until some time, those who have gone again are not counted."""
        while entrants > 0:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody more, or one who has left again, or there are too many open files
                return
            try:
                newcomer = _Newcomer(sock, now)
            except OSError:
                self._turn_away(sock, "that left without a word")
                if time.monotonic() >= until:
                    entrants -= 1
                continue
            entrants -= 1
            self._newcomers[sock.fileno()] = newcomer
            self._selector.register(sock, selectors.EVENT_READ)
            if len(self._newcomers) > most:
                self._dismiss(next(iter(self._newcomers.values())), "that had nothing to say while others came")

    def _hear(self, newcomer: _Newcomer) -> list[Connection]:
        try:
            if not newcomer.listen():
                return []
            hello = keys.read_hello(newcomer.hello)
            handshake = Handshake(self._key, newcomer.greeting, newcomer.hello)
            if not keys.spoken(newcomer.hello):
                if hello.rank in self._others and handshake.proves(newcomer.hello):
                    self.differing[hello.rank] = keys.protocol_of(newcomer.hello)
                raise ConnectionError(_OTHER)
            status = self._judge(hello, handshake.proves(newcomer.hello))
            newcomer.socket.send(handshake.answer(status))
        except OSError as error:
            self._dismiss(newcomer, str(error) if type(error) is ConnectionError else "that broke")
            return []
        if status != Status.WELCOME:
            self._dismiss(newcomer, _WHY[status])
            return []
        self._forget(newcomer)
        _take_in(newcomer.socket, self._admitted_bytes, _WIDEST_WINDOW)
        receiving, sending = handshake.seals()
        return [Connection(newcomer.socket, sending, receiving, hello.rank, hello.process)]

    def _judge(self, hello: Hello, proven: bool) -> Status:
        if hello.rank not in self._others:
            return Status.NOT_A_MEMBER if proven else Status.UNPROVEN
        if not proven:
            self._unproven.add(hello.rank)
            return Status.UNPROVEN
        if self._taken(hello):
            return Status.TAKEN
        self._unproven.discard(hello.rank)
        return Status.WELCOME

    def _dismiss(self, newcomer: _Newcomer, reason: str) -> None:
        self._forget(newcomer)
        self._turn_away(newcomer.socket, reason)

    def _turn_away(self, sock: socket.socket, reason: str) -> None:
        sock.close()
        self.rest = _LONG_REST
        self._warnings.count(reason)

    def _forget(self, newcomer: _Newcomer) -> None:
        self._selector.unregister(newcomer.socket)
        del self._newcomers[newcomer.socket.fileno()]

    def close(self) -> None:
        """Close all sockets here. In a process that was forked from the hub's, that is nothing to that one."""
        for newcomer in self._newcomers.values():
            newcomer.socket.close()
        self._listener.close()
        self._selector.close()
