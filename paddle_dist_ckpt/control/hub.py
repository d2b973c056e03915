"""The hub between processes: one I/O thread, which owns the sockets and outlives sessions.

zmq sockets may be used by one thread at a time: the hub's lock guards them. The thread sleeps on their descriptors,
without the lock. User threads send directly, which saves a thread switch.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from . import bootstrap, failures
from .board import Board
from .bootstrap import BootstrapStore
from .session import LONGEST_WAIT
from .wire import Message
from .zmq_ports import DealerPort, RouterPort

__all__ = ["ZmqHub"]

_logger = logging.getLogger("paddle_dist_ckpt")
_CLOSE_SECONDS = 15.0  # more than zmq lingers


class ZmqHub(Board):
    """Implements :class:`paddle_dist_ckpt.core.protocols.ControlHub` over TCP.

    Every rank makes one. It does not wait for the others, except for the coordinator's address. It must be closed;
    at the latest that is done at exit. A process forked from this one cannot use it.

    Args:
        rank: This rank.
        ranks: All ranks of the group.
        coordinator: The one of them that all others connect to.
        store: Where the coordinator leaves its address and a secret.
        key: Under which; it must be new for every hub.
        bind_host: On the coordinator, address or name of the interface to listen on; by default the one behind the
            default route.
        bootstrap_timeout: Seconds to wait for the coordinator's address.
        opened: How many sessions this rank has opened before, or has tried to, without a hub.
        on_abandon: See :class:`Board`.

    Raises:
        CheckpointTimeoutError: the coordinator did not leave its address in time.
        ValueError: ``rank`` or ``coordinator`` is not one of ``ranks``.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        coordinator: int,
        store: BootstrapStore,
        key: str,
        *,
        bind_host: str | None = None,
        bootstrap_timeout: float = 300.0,
        opened: int = 0,
        on_abandon: Callable[[], None] | None = None,
    ) -> None:
        for member, name in ((rank, "rank"), (coordinator, "coordinator")):
            if member not in ranks:
                raise ValueError(f"{name} {member} is not one of the group's ranks {sorted(ranks)}")
        super().__init__(rank, tuple(ranks), coordinator, opened=opened, on_abandon=on_abandon)
        self._port: RouterPort | DealerPort
        if rank == coordinator:
            self._port = RouterPort(rank, self.ranks, bind_host)
            bootstrap.publish(store, key, self._port.rendezvous)
        else:
            self._port = DealerPort(rank, coordinator, bootstrap.fetch(store, key, bootstrap_timeout, coordinator))
        self._closing = False
        self._closed = False
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for readable in (self._port.socket.FD, self._port.monitor.FD, self._woken.fileno()):
            self._selector.register(readable, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="paddle_dist_ckpt control hub", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """End the connection, and the thread, which closes the sockets. Sessions that are open fail, on all ranks."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return
        super().close()
        with self.changed:
            self._closing = True
            self._flush(sooner=True)
        # One that does not end is left behind: nobody may wait for ever.
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            _logger.warning("the control hub's thread has not ended within %d s and is left behind", _CLOSE_SECONDS)

    def _carry(self, destination: int, message: Message, payload: bytes) -> None:
        if not self._closed:
            self._port.send(destination, message, payload)

    def _flush(self, sooner: bool) -> None:
        # The thread itself looks at the time anyway before it sleeps again.
        if self._closed or threading.current_thread() is self._thread:
            return
        # Sending may have taken the sign that something has arrived, for which the thread sleeps.
        if sooner or self._port.pending():
            with contextlib.suppress(BlockingIOError):  # the buffer is full of earlier wake-ups, which will do
                self._wake.send(b"\0")

    def _run(self) -> None:
        try:
            due = math.inf
            while not self._closing:
                for key, _ in self._selector.select(min(max(0.0, due - time.monotonic()), LONGEST_WAIT)):
                    if key.fd == self._woken.fileno():
                        self._woken.recv(4096)
                with self.changed:
                    due = min(self._port.receive(self), self.tick())
                    if self._port.pending():
                        due = 0.0
        except Exception as error:
            _logger.exception("the control hub's thread failed")
            self.shut(failures.record(f"the control hub's thread failed: {type(error).__name__}: {error}"))
        finally:
            with self.changed:
                self._closed = True
            self._port.close()
            self._selector.close()
            self._woken.close()
            self._wake.close()
