"""A TCP connection between two processes that have proved to each other that they know the hub's key.

A frame is ``length of the message, length of the payload, CRC-32 of both, tag, message, payload``. The tag is looked at
when all has come. The lengths have a check of their own: of a damaged one, as bad hardware makes it now and then in
spite of TCP's checksum, so much might be waited for that nothing would ever be heard from the peer again.

Sending never blocks: what the system does not take at once waits, and is sent on by the hub's thread. Receiving takes a
bounded amount a turn, so that no peer, however fast, keeps the thread from the others and from the clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import itertools
import socket
import struct
import termios
import zlib
from collections import deque
from typing import NamedTuple

from . import wire
from .keys import TAG_BYTES, Seal

__all__ = ["Connection", "tune"]

_LENGTHS = struct.Struct(">II")
_CHECK = struct.Struct(">I")
_COUNT = struct.Struct("i")
_SIZES_BYTES = _LENGTHS.size + _CHECK.size
_PREFIX_BYTES = _SIZES_BYTES + TAG_BYTES
_TURN_BYTES = 1 << 22
_TURN_READS = 256
_READ_BYTES = 1 << 18
_BUFFERS = 64  # the system takes up to 1024 at once
_LONGEST_SILENCE = (1 << 31) - 1  # in milliseconds, as the system takes it


def tune(sock: socket.socket) -> None:
    """Set what every connection needs."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Firewalls forget connections that are quiet between two checkpoints; a host may vanish without a word.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)


def _sizes(message: int, payload: int) -> bytes:
    """How a frame begins."""
    lengths = _LENGTHS.pack(message, payload)
    return lengths + _CHECK.pack(zlib.crc32(lengths))


class _Unsent(NamedTuple):
    """Bytes that are to be sent.

    Attributes:
        number: Of the frame that they are of.
        end: Where they end in all that is sent.
        data: The bytes.
    """

    number: int
    end: int
    data: memoryview


class Connection:
    """The connection. It receives on one thread; it sends, and is closed, under the board's lock.

    Args:
        sock: Connected and tuned.
        sending: Signs what is sent.
        receiving: Signs what is received.
        rank: The peer's.
        process: The peer's id, if this is the coordinator's side.

    Attributes:
        inbox: Messages and payloads that have come.
        ended: Nothing more will come.
        amid_frame: A part of a frame has come, and not yet the rest.
    """

    def __init__(self, sock: socket.socket, sending: Seal, receiving: Seal, rank: int, process: bytes = b"") -> None:
        self.socket = sock
        self.rank = rank
        self.process = process
        self.inbox: list[tuple[bytes, bytes]] = []
        self.ended = False
        self._sending = sending
        self._receiving = receiving
        self._unsent: deque[_Unsent] = deque()
        self._last = (-1, 0)  # the number and the end of what was forgotten last of that
        self._taken = [0]  # how much the system has taken, by and by
        self._received = 0  # frames
        self._mute = False
        self._pieces: list[bytes] = []  # of the part of a frame that is coming
        self._parts: list[bytes] = []  # of the frame that is coming
        self._missing = _PREFIX_BYTES

    @property
    def amid_frame(self) -> bool:
        return bool(self._parts or self._pieces)

    def tolerate(self, seconds: float) -> None:
        """Let the system end the connection when the peer's has not taken what was sent for so long."""
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            with contextlib.suppress(OSError):  # it has been closed
                milliseconds = int(min(1000 * seconds, _LONGEST_SILENCE))
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    @property
    def blocked(self) -> bool:
        """Whether something waits until the system takes more."""
        return bool(self._unsent)

    def send(self, message: bytes, payload: bytes) -> None:
        """Send as much as the system takes. To a connection that has broken, nothing is sent: receiving tells."""
        if self._mute:
            return
        number, begin = self._unsent[-1][:2] if self._unsent else self._last
        sizes, number = _sizes(len(message), len(payload)), number + 1
        head = memoryview(sizes + self._sending.tag(number, sizes, message, payload) + message)
        pieces = [_Unsent(number, begin + len(head), head)]
        if payload:
            pieces.append(_Unsent(number, begin + len(head) + len(payload), memoryview(payload)))
        # IMPORTANT: the frame counts by this one step. An interrupt, which may come between any two, finds all of it
        # among what waits, or nothing; else a part might be missing, or come twice.
        self._unsent.extend(pieces)
        self.flush()

    def flush(self) -> None:
        """Send on what waits."""
        try:
            while self._forget_sent():
                buffers = [piece.data for piece in itertools.islice(self._unsent, _BUFFERS)]
                buffers[0] = buffers[0][self._taken[0] - self._unsent[0].end :]  # the rest of it
                # IMPORTANT: one step, too: what the system has taken is noted before an interrupt can come.
                self._taken.extend(map(self.socket.sendmsg, [buffers], [()], [socket.MSG_NOSIGNAL]))
        except OSError as error:
            if error.errno is None:  # not the system's, but what a signal's handler has raised, as a TimeoutError
                raise
            if not isinstance(error, (BlockingIOError, InterruptedError)):  # then the hub's thread sends on later
                self._end()

    def _forget_sent(self) -> bool:
        """Forget what the system has taken; returns whether something waits."""
        self._taken = [sum(self._taken)]
        while self._unsent and self._unsent[0].end <= self._taken[0]:
            self._last = self._unsent[0][:2]
            self._unsent.popleft()
        return bool(self._unsent)

    def _end(self) -> None:
        self._mute = True
        self._unsent.clear()
        with contextlib.suppress(OSError):  # else nothing might tell that it is of no use any more
            self.socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> None:
        """Read what has come, as far as the turn goes, into ``inbox``.

        Raises:
            ConnectionError: what came is not from the peer, or makes no sense; nothing more must be read.
        """
        taken = 0
        for _ in range(_TURN_READS):
            try:
                data = self.socket.recv(min(self._missing, _READ_BYTES))
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self.ended = True
                return
            self._pieces.append(data)
            self._missing -= len(data)
            if self._missing == 0:
                self._on_part(b"".join(self._pieces))
            taken += len(data)
            if taken >= _TURN_BYTES:
                return

    def _on_part(self, part: bytes) -> None:
        """A frame's prefix is there, or its message, or its payload."""
        self._pieces.clear()
        self._parts.append(part)
        prefix = self._parts[0]
        message, payload = _LENGTHS.unpack_from(prefix)
        if message == 0 or message > wire.MAX_PAYLOAD or payload > wire.MAX_PAYLOAD:
            raise ConnectionError(f"a frame of {message} + {payload} bytes")
        if not prefix.startswith(_sizes(message, payload)):
            raise ConnectionError("a frame with damaged lengths")
        if len(self._parts) == 1:
            self._missing = message
        elif len(self._parts) == 2 and payload:
            self._missing = payload
        else:
            self._on_frame(prefix, *self._parts[1:])
            self._parts.clear()
            self._missing = _PREFIX_BYTES

    def _on_frame(self, prefix: bytes, message: bytes, payload: bytes = b"") -> None:
        tag = self._receiving.tag(self._received, prefix[:_SIZES_BYTES], message, payload)
        self._received += 1
        if not hmac.compare_digest(prefix[_SIZES_BYTES:], tag):
            raise ConnectionError("a frame with a wrong signature")
        self.inbox.append((message, payload))

    def drain(self) -> None:
        """Before it is closed: send on, and throw away what has come, or closing would throw away what has not gone."""
        self.flush()
        with contextlib.suppress(OSError):
            self.ended = self.ended or not self.socket.recv(1 << 16)

    @property
    def delivered(self) -> bool:
        """Whether all that was sent has come to the peer's system, or cannot come any more."""
        if self.ended or self._mute:
            return True
        with contextlib.suppress(OSError):
            (unacknowledged,) = _COUNT.unpack(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(_COUNT.size)))
            return not self._unsent and unacknowledged == 0
        return True
