"""A relay between a rank and the coordinator, which harms what it passes on when it is told to."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from paddle_dist_ckpt.control import keys
from paddle_dist_ckpt.control.bootstrap import BootstrapStore, Rendezvous, address_of

__all__ = ["HANDSHAKE_BYTES", "HARMS", "Relay", "RelayedStore"]

HARMS = (
    *("cut", "cut one way", "reset", "refused", "changed", "trickle"),
    *("reset again and again", "all reset", "handshake changed"),
)
"""What is done: nothing is passed on any more, in both directions or in one; connections are ended, once or as long as
it lasts; a byte is changed; bytes come one by one; connections are ended whenever some more bytes have passed, or those
of all ranks at once, or once, and a byte is changed in the handshake of the next."""
HANDSHAKE_BYTES = keys.GREETING_BYTES + keys.HELLO_BYTES + keys.ANSWER_BYTES
_ONCE = ("reset", "changed", "all reset", "handshake changed")
_EVERY = 300  # bytes between resets: enough for a handshake and some messages
_PIECE = 1 << 16
_TRICKLE = 0.002  # seconds from byte to byte


class Relay:
    """Passes on what comes, both ways, over connections that it does not know the meaning of.

    Args:
        target: Where to.

    Attributes:
        passed: How many bytes it has passed on.
        begun: Is set when harm has been done.
        others: The other ranks' relays.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()
        self.passed = 0
        self.begun = threading.Event()
        self.others: Sequence[Relay] = ()
        self._harm: str | None = None
        self._left = 0  # bytes until it begins
        self._way = 0
        self._next: tuple[str, int] | None = None  # harm after this, and after how many bytes
        self._whole = threading.Event()  # no harm is being done
        self._whole.set()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def harm(self, kind: str, after: int, way: int = 0, after_that: int = 0) -> None:
        """Do harm, when so many bytes more have been passed on.

        Args:
            kind: One of `HARMS`.
            after: How many bytes, in both directions together.
            way: In which direction, of a cut one way: 0 is to the coordinator, 1 from there.
            after_that: Which byte of the handshake is changed, if one is.
        """
        with self._lock:
            self._harm, self._left, self._way = kind, after, way
            self._next = ("changed", after_that) if kind == "handshake changed" else None
            self.begun.clear()

    def heal(self) -> None:
        """Pass on everything again."""
        with self._lock:
            self._harm = self._next = None
            self._whole.set()

    def close(self) -> None:
        """End all connections."""
        self._listening.shutdown(socket.SHUT_RDWR)  # closing alone leaves a thread that accepts
        self._listening.close()
        self.heal()
        self._end_all()

    def _end_all(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if self.begun.is_set() and self._harm == "refused":
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                with self._lock:
                    self._sockets += [near, far]
                for number, pair in enumerate([(near, far), (far, near)]):
                    threading.Thread(target=self._pass_on, args=(*pair, number), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, way: int) -> None:
        try:
            while data := source.recv(_PIECE):
                self._send(target, bytearray(data), way)
        except OSError:
            pass
        finally:
            for one in (source, target):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _send(self, target: socket.socket, data: bytearray, way: int) -> None:
        with self._lock:
            self.passed += len(data)
            harm, before = self._harm, min(len(data), self._left)
            self._left -= before
            if before == len(data):
                harm = None
            first = not self.begun.is_set()
            if harm is not None:
                self._whole.clear()
                self.begun.set()
            if harm in _ONCE:
                (self._harm, self._left), self._next = self._next or (None, 0), None
            elif harm == "reset again and again":
                self._left = _EVERY
        target.sendall(data[:before])
        del data[:before]
        if harm == "cut" or (harm == "cut one way" and way == self._way):
            self._whole.wait()
        elif harm == "trickle":
            while data and not self._whole.wait(_TRICKLE):
                target.sendall(data[:1])
                del data[:1]
        elif harm == "changed":
            data[0] ^= 1
        elif harm in ("reset", "reset again and again", "all reset", "handshake changed") or (
            harm == "refused" and first
        ):
            self._end_all()
        if harm == "all reset":
            for other in self.others:
                other._end_all()
        target.sendall(data)


class RelayedStore:
    """A store from which a rank learns the address of a relay in the coordinator's place.

    Args:
        store: The one that the ranks share.
        changed: Which byte of the first handshake the relay changes, if any.

    Attributes:
        relay: The relay; None until the rank has asked.
    """

    def __init__(self, store: BootstrapStore, changed: int | None = None) -> None:
        self._store = store
        self._changed = changed
        self.relay: Relay | None = None

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        found = msgspec.msgpack.decode(self._store.get(key, timeout), type=Rendezvous)
        self.relay = Relay(address_of(found))
        if self._changed is not None:
            self.relay.harm("changed", self._changed)
        host, port = self.relay.address
        return msgspec.msgpack.encode(msgspec.structs.replace(found, endpoint=f"tcp://{host}:{port}"))
