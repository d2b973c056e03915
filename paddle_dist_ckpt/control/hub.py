"""The hub between processes: one I/O thread, which outlives sessions, over connections of TCP.

The thread alone waits and receives, without the board's lock; in a bounded turn it delivers what has come and looks at
the time, whatever comes. User threads send directly, which saves a thread switch.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..core.threads import after_fork
from ..errors import CheckpointError
from . import bootstrap, failures, keys
from .board import Board
from .bootstrap import BootstrapStore
from .coordinator_port import CoordinatorPort
from .introduction import differ
from .member import MemberSession
from .member_port import MemberPort
from .port import Port
from .session import LONGEST_WAIT
from .wire import Message

__all__ = ["TcpHub"]

_logger = logging.getLogger("paddle_dist_ckpt")
_CLOSE_SECONDS = 15.0  # more than a port lingers
P = TypeVar("P", bound=Port)


class TcpHub(Board):
    """Implements :class:`paddle_dist_ckpt.core.protocols.ControlHub` over TCP.

    Every rank makes one. It does not wait for the others, except for the coordinator's address. It must be closed;
    at the latest that is done at exit. A process forked from this one cannot use it.

    Args:
        rank: This rank.
        ranks: All ranks of the group.
        coordinator: The one of them that all others connect to.
        store: Where the coordinator leaves its address and a secret.
        key: Under which; it must be new for every hub, whose name it is: ranks of another one are turned away.
        bind_host: On the coordinator, address or name of the interface to listen on; by default the one behind the
            default route.
        bootstrap_timeout: Seconds to wait for the coordinator's address.
        secret: What the job's ranks know and the store does not; the same on all of them. Empty if there is none.
        opened: How many sessions this rank has opened before, or has tried to, without a hub.
        announced: Whether the coordinator leaves its address at once; else :meth:`announce` does.

    Raises:
        CheckpointTimeoutError: the coordinator did not leave its address in time.
        RankFailureError: the store cannot be reached; or the coordinator could not make its hub.
        CheckpointError: this rank cannot make it.
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
        secret: bytes = b"",
        opened: int = 0,
        announced: bool = True,
    ) -> None:
        for member, name in ((rank, "rank"), (coordinator, "coordinator")):
            if member not in ranks:
                raise ValueError(f"{name} {member} is not one of the group's ranks {sorted(ranks)}")
        super().__init__(rank, tuple(ranks), coordinator)
        self.pass_over(opened)
        self._closing = self._closed = False
        self._port: Port
        self._announce: Callable[[], None] | None = None
        if rank == coordinator:
            self._listen(store, bind_host, secret, key)
        else:
            rendezvous = bootstrap.fetch(store, key, bootstrap_timeout, coordinator, opened)
            if rendezvous.protocol != keys.PROTOCOL:
                differ(bootstrap.address_of(rendezvous), keys.hub_key(rendezvous.token, secret, key), rank)
                raise CheckpointError(
                    f"rank {coordinator} speaks version {rendezvous.protocol} of the control messages, this rank "
                    f"version {keys.PROTOCOL}; install the same paddle_dist_ckpt on every rank"
                )
            self._port = _made(rank, functools.partial(MemberPort, rank, coordinator, rendezvous, secret, key))
            self._begin()
        atexit.register(self.close)
        after_fork(self._port.close)  # or its connections would outlive this process, and nobody would notice its end
        if announced:
            try:
                self.announce()
            except BaseException:
                self.close()
                raise

    def announce(self) -> None:
        """On the coordinator: leave the address in the store, unless it has been left there.

        Raises:
            RankFailureError: the store has not said that it has it. It may have it all the same, now or later, so that
                other ranks come to this hub.
        """
        if self._announce is not None:
            self._announce()
            self._announce = None

    def _listen(self, store: BootstrapStore, bind_host: str | None, secret: bytes, key: str) -> None:
        self.links.absent.update({*self.ranks} - {self.rank})
        try:
            make = functools.partial(CoordinatorPort, self.rank, self.ranks, bind_host, secret, key, self.links)
            self._port = port = _made(self.rank, make)
            self._begin()
        except CheckpointError as error:
            bootstrap.refuse(store, key, self._opened, error)  # or the others would wait for what does not come
            raise
        self._announce = functools.partial(bootstrap.publish, store, key, port.rendezvous, self.rank)

    def _begin(self) -> None:
        """Start the thread.

        Raises:
            CheckpointError: there can be no more threads.
        """
        self._thread = threading.Thread(target=self._run, name="paddle_dist_ckpt control hub", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._port.close()
            raise CheckpointError(f"the control hub of rank {self.rank} has no thread: {error}") from error

    def close(self) -> None:
        """End the connection, and the thread, which closes the sockets. Sessions that are open fail, on all ranks."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return
        super().close()
        with self.lock:
            self._closing = True
            self._flush(sooner=True)
        # One that does not end is left behind: nobody may wait for ever.
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            _logger.warning("the control hub's thread has not ended within %d s and is left behind", _CLOSE_SECONDS)

    def open(self, session: MemberSession) -> None:
        super().open(session)
        self._port.tolerate(max(one.timeout for one in self._sessions.values()))

    def _carry(self, destination: int, message: Message, payload: bytes) -> None:
        if not self._closed:
            self._port.send(destination, message, payload)

    def _flush(self, sooner: bool) -> None:
        # The thread itself looks at the time anyway before it sleeps again.
        if self._closed or threading.current_thread() is self._thread:
            return
        if sooner or self._port.blocked:
            self._port.wake()

    def _run(self) -> None:
        try:
            due = 0.0
            while not self._closing:
                self._port.wait(min(max(0.0, due - time.monotonic()), LONGEST_WAIT))
                with self.lock:
                    due = min(self._port.turn(self), self.tick())
                    self._port.arm()
        except Exception as error:
            _logger.exception("the control hub's thread failed")
            self.shut(failures.record(f"the control hub's thread failed: {type(error).__name__}: {error}"))
        finally:
            with self.lock:
                self._closed = True
            self._port.linger(self)
            self._port.close()


def _made(rank: int, make: Callable[[], P]) -> P:
    """A port.

    Raises:
        CheckpointError: it cannot be made, as where too many files are open.
    """
    try:
        return make()
    except OSError as error:
        raise CheckpointError(f"the control hub of rank {rank} cannot be set up: {error}") from error
