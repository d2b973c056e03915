"""The hub between processes: one I/O thread, which owns the sockets and outlives sessions.

zmq sockets may be used by one thread at a time: the hub's lock guards them. The thread sleeps on their descriptors,
without the lock. User threads send directly, which saves a thread switch.
"""

from __future__ import annotations

import atexit
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
        self._port = self._open_port(store, key, bind_host, bootstrap_timeout)
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

    def _open_port(
        self, store: BootstrapStore, key: str, bind_host: str | None, timeout: float
    ) -> RouterPort | DealerPort:
        if self.rank != self.coordinator:
            return DealerPort(self.rank, self.coordinator, bootstrap.fetch(store, key, timeout, self.coordinator))
        token = bootstrap.new_token()
        port = RouterPort(self.rank, self.ranks, token, bind_host)
        bootstrap.publish(store, key, port.endpoint, token)
        return port

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
            try:
                self._wake.send(b"\0")
            except BlockingIOError:
                return  # the buffer is full of earlier wake-ups, which will do

    def _run(self) -> None:
        try:
            due = math.inf
            while not self._closing:
                self._sleep(due)
                with self.changed:
                    due = self._step()
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

    def _sleep(self, due: float) -> None:
        sleep = None if math.isinf(due) else min(max(0.0, due - time.monotonic()), LONGEST_WAIT)
        for key, _ in self._selector.select(sleep):
            if key.fd == self._woken.fileno():
                self._woken.recv(4096)

    def _step(self) -> float:
        """Do what there is to do; returns when to do it again."""
        self._port.receive(self)
        for event in self._port.events():
            self._port.on_event(event, self)
        due = min(self.tick(), self._port.tick())
        return 0.0 if self._port.pending() else due
