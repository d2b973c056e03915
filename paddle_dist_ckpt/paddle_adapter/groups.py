"""Paddle's process groups as the engine sees them: a control hub made once per group, and transports over it.

The collectives of a device's group do not take host memory; for what is to stay there, a group of the same ranks does.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import paddle
import paddle.distributed as dist
from paddle.base import core
from paddle.distributed.communication.group import Group, _GroupManager

from ..arguments import as_integer
from ..control import AgreedHub, RefusingHub, TcpHub
from ..control.bootstrap import StoreLostError, StoreSilentError, not_set_up, refuse, unreachable
from ..control.ranks import Ranks
from ..control.session import SHORTEST_TIMEOUT
from ..core.protocols import ControlHub
from ..errors import CheckpointError, RankFailureError
from .job_secret import NoSecretAtFirstError, agreed_secret, has_secret
from .transport import PaddleTransport, takes_host_memory

__all__ = ["connect"]

T = TypeVar("T")
_logger = logging.getLogger("paddle_dist_ckpt")
_ATTRIBUTE = "_paddle_dist_ckpt"
_STORE_RANK = 0  # which keeps the job's store
_STORE_SECONDS = 300
_POLL_SECONDS = 0.02
_STORE_GRACE = 1.0  # within which a store that answers says itself that the time is over
_GROUP_ID = 1 << 20  # far above those that Paddle counts up
_made: list[Any] = []  # must live as long as the process
_initialising = threading.Lock()
_asking = threading.Lock()
"""Held while the store is asked something: all threads of a process use one connection, and would mix their answers."""


def connect(process_group: Any, coordinator_rank: int, no_dist: bool, timeout: float) -> Ranks:
    """The ranks of a process group, connected.

    Args:
        process_group: A Paddle group, or None for the default one.
        coordinator_rank: Global rank of the coordinator; 0 becomes the group's first rank if 0 is not in the group.
        no_dist: Act alone.
        timeout: How long to wait for the coordinator, in seconds.

    Returns:
        The ranks. If the coordinator is not in the group, or if ranks name different ones, the first session that any
        of them opens raises that as a ValueError on all.

    Raises:
        ValueError: this rank is not in the group; or it works alone, and the coordinator is another.
        CheckpointError: there is no default group, although the job has several ranks.
        RankFailureError: it cannot be initialised.
        CheckpointTimeoutError: the group's first rank did not show up.
    """
    if process_group is not None and not isinstance(process_group, Group):
        raise TypeError(f"process_group must be a paddle.distributed group, not {type(process_group).__name__}")
    rank = dist.get_rank()
    if no_dist:
        _checked_rank(coordinator_rank)
        return _alone(os.getpid(), rank)
    if dist.get_world_size() == 1:
        if _checked_rank(coordinator_rank) != 0:
            raise ValueError(f"coordinator_rank is {coordinator_rank}, but this process works alone")
        return _alone(os.getpid(), rank)
    group = process_group if process_group is not None else _default_group()
    members = tuple(sorted(group.ranks))
    if rank not in members:
        raise ValueError(f"rank {rank} is not in the process group {list(members)}, and so must not make this call")
    try:
        coordinator = _checked_rank(coordinator_rank)
        if coordinator not in (0, *members):
            raise ValueError(f"coordinator_rank {coordinator} is not in the process group {list(members)}")
    except ValueError as error:
        known = _connection(group, members, rank, members[0], timeout)
        return dataclasses.replace(known, hub=RefusingHub(known.hub, error, coordinator_rank))
    return _connection(group, members, rank, coordinator if coordinator in members else members[0], timeout)


def _checked_rank(coordinator_rank: Any) -> int:
    number = as_integer(coordinator_rank)
    if number is None or number < 0:
        raise ValueError(f"coordinator_rank must be a rank, not {coordinator_rank!r}")
    return number


def _default_group() -> Any:
    """The group of all ranks of a launched job, initialised here if it has not been, as Paddle's functions do.

    Else each rank would act for itself, and overwrite what the others save to the same place.

    Raises:
        RankFailureError: it cannot be initialised, as when rank 0 is gone.
        CheckpointError: it was destroyed, and Paddle initialises a process only once.
    """
    with _initialising:
        if not dist.is_initialized():
            _logger.info(
                "paddle.distributed is not initialised in this job of several ranks: init_parallel_env() is called"
            )
            try:
                with paddle.base.dygraph.guard():  # also where the program makes static graphs
                    dist.init_parallel_env()
            except (ValueError, RuntimeError, OSError) as error:
                text = (
                    f"init_parallel_env() failed on rank {dist.get_rank()}; the ranks meet at a store of rank 0's, so "
                    f"see whether that is alive: {error}"
                )
                raise RankFailureError(text, {dist.get_rank(): error}) from error
    if not dist.is_initialized():
        raise CheckpointError(
            f"this job has {dist.get_world_size()} ranks, but no default process group, and init_parallel_env() makes "
            "none: was destroy_process_group() called? Make this call before that, or pass process_group; "
            "no_dist=True in the options lets each rank act alone"
        )
    return dist.get_group(0)


@functools.lru_cache(maxsize=1)
def _alone(pid: int, rank: int) -> Ranks:
    """A rank that works alone. A process that was forked from another begins anew."""
    return Ranks.alone(rank)


class _HubMaker:
    """Makes the hub of one coordinator, if there is none yet; a call that fails may be followed by another.

    ``unshared`` says why this rank can only tell the others that it has a secret.
    """

    def __init__(self, group: Any, members: tuple[int, ...], rank: int, coordinator: int) -> None:
        self._group, self._members, self._rank, self._coordinator = group, members, rank, coordinator
        self._calls = 0
        self._hub: TcpHub | None = None
        self._making = threading.Lock()
        self.unshared: ValueError | None = None

    def hub(self, timeout: float, check: Callable[[], None] = lambda: None) -> TcpHub:
        """The hub. ``check`` is called while it is waited for, and may raise to stop.

        It is made on a thread, which no interrupt reaches. An interrupted rank that made it anew would leave the others
        with the address of one that is gone, or find its own place taken.
        """
        timeout = max(timeout, SHORTEST_TIMEOUT)
        number = self._calls
        self._calls = number + 1  # a call that fails here counts, or this rank would be a call behind
        made = _started(functools.partial(self._get, number, timeout), "paddle_dist_ckpt connection")
        while not made.done():
            check()
            wait([made], _POLL_SECONDS)
        return made.result()

    def _get(self, number: int, timeout: float) -> TcpHub:
        if not self._making.acquire(timeout=timeout):  # a call that was interrupted waits longer for the coordinator
            raise not_set_up(self._coordinator, timeout)
        try:
            if self._hub is None:
                self._hub = self._made(number, timeout)
            self._hub.pass_over(number)
            self._hub.announce()  # if that failed before, others may have come to this one all the same
            return self._hub
        finally:
            self._making.release()

    def _made(self, number: int, timeout: float) -> TcpHub:
        members, coordinator = self._members, self._coordinator
        key = f"{_ATTRIBUTE}/{self._group.id}/{'-'.join(map(str, members))}/{coordinator}"
        try:
            store = _PaddleStore(timeout)
            secret = agreed_secret(store, f"{key}/secret", self._rank, members, timeout, number)
        except NoSecretAtFirstError as error:
            if coordinator != members[0]:
                raise
            self.unshared, secret = ValueError(str(error)), b""
        except ValueError as error:
            if self._rank == coordinator:
                refuse(store, key, number, error)  # ranks that have no secret wait for the hub
            raise
        except OSError as error:
            raise unreachable(coordinator, "was lost before its control hub was known", error) from error
        return TcpHub(
            self._rank,
            members,
            coordinator,
            store,
            key,
            bind_host=_own_host(),
            bootstrap_timeout=timeout,
            secret=secret,
            opened=number,
            announced=False,
        )


class _Kept:
    """What is kept with a group: its transports, what is remembered from one save to the next, and the connection for
    each coordinator."""

    def __init__(self, group: Any, members: tuple[int, ...], rank: int) -> None:
        self.transport = self._host_transport = PaddleTransport(lambda: group, takes_host_memory(group))
        if not takes_host_memory(group):
            self._host_transport = PaddleTransport(lambda: _host_group(group))
        self._rank, self._members = rank, members
        self._memory: dict[str, Any] = {}
        self._make = functools.cache(functools.partial(_HubMaker, group, members, rank))  # by coordinator
        self._connections: dict[int, Ranks] = {}
        # Held while a connection is made. It is the group's own: on another rank the groups' turns may differ.
        self._lock = threading.RLock()

    def connection(self, coordinator: int, timeout: float) -> Ranks:
        """The connection for a coordinator, made when it is first used."""
        first = self._members[0]
        with self._lock:
            if coordinator not in self._connections:
                hub: ControlHub
                if coordinator == first:
                    maker = self._make(first)
                    hub = maker.hub(timeout)
                    hub = hub if maker.unshared is None else RefusingHub(hub, maker.unshared, stands=has_secret)
                else:
                    hub = AgreedHub(self.connection(first, timeout).hub, coordinator, self._make(coordinator).hub)
                self._connections[coordinator] = Ranks(
                    self._rank, hub, self.transport, self._host_transport, self._memory, len(self._members)
                )
            return self._connections[coordinator]


def _connection(group: Any, members: tuple[int, ...], rank: int, coordinator: int, timeout: float) -> Ranks:
    """The group's connection, kept with the group."""
    if len(members) == 1:
        return _alone(os.getpid(), rank)
    kept: _Kept = group.__dict__.get(_ATTRIBUTE) or group.__dict__.setdefault(_ATTRIBUTE, _Kept(group, members, rank))
    return kept.connection(coordinator, timeout)


def _host_group(group: Any) -> Any:
    """A group of the same ranks that takes host memory: the group itself, one that the job has made, or a new one.

    Every rank of the group calls it at the same time.
    """
    for known in (group, *(_GroupManager.group_map_by_id[i] for i in sorted(_GroupManager.group_map_by_id))):
        if sorted(known.ranks) == sorted(group.ranks) and known.process_group is not None and takes_host_memory(known):
            return known
    # Not by new_group: that counts groups, which have to be counted alike on ranks that are not in this one.
    number = _GROUP_ID + group.id
    store = _own_store(f"paddle_dist_ckpt/host_group/{number}/{'-'.join(map(str, group.ranks))}", group.rank)
    process_group = core.ProcessGroupGloo.create(store, group.rank, group.nranks, number)
    made = Group(group.rank, number, group.ranks, process_group, f"paddle_dist_ckpt_{number}")
    _made.append((store, made))
    return made


def _own_store(key: str, rank_in_group: int) -> Any:
    """A store for one group, at its first rank. In the job's own store ranks could meet those of other groups: Paddle's
    gloo groups all use some of the same keys there."""
    job = _PaddleStore(_STORE_SECONDS)
    if rank_in_group == 0:
        host = _own_host() or "127.0.0.1"
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        store = core.TCPStore(host, port, True, 1, _STORE_SECONDS)  # 1: it does not wait here for the others
        job.set(key, f"{host}:{port}".encode())
        return store
    try:
        host, _, port = job.get(key, _STORE_SECONDS).decode().rpartition(":")
    except TimeoutError:
        raise TimeoutError(f"rank 0 of the group has made no store within {_STORE_SECONDS} s") from None
    return core.TCPStore(host, int(port), False, 1, _STORE_SECONDS)


def _own_host() -> str | None:
    """The address under which Paddle itself knows this host, if it was told one."""
    host = str(dist.ParallelEnv().current_endpoint).rpartition(":")[0]
    return host or None


class _PaddleStore:
    """The store that Paddle's ranks share, for what they tell each other to begin with.

    Paddle raises a ValueError or RuntimeError where the rank that keeps it has ended, and waits for ever where that one
    is frozen. So each call is made on a thread, which may be left behind. What a call asks of Paddle's store, it asks
    one by one, and so that the answer does not wait for another rank: see ``_asking``.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._store = self._bounded(lambda: self._ask(core.create_or_get_global_tcp_store), timeout)

    def set(self, key: str, value: bytes) -> None:
        """See :class:`..control.BootstrapStore`."""

        def leave() -> None:
            self._ask(self._store.set, key, value.hex())
            self._ask(self._store.add, f"{key}/set", 1)

        self._bounded(leave, self._timeout)

    def get(self, key: str, timeout: float) -> bytes:
        """See :class:`..control.BootstrapStore`. Polls a counter, for Paddle's own wait cannot be bounded."""
        deadline = time.monotonic() + timeout

        def fetch() -> bytes:
            while self._ask(self._store.add, f"{key}/set", 0) == 0:
                if time.monotonic() > deadline:
                    raise TimeoutError(key)
                time.sleep(_POLL_SECONDS)
            return bytes.fromhex(self._ask(self._store.get, key).decode())

        return self._bounded(fetch, timeout)

    @staticmethod
    def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
        with _asking:
            return call(*arguments)

    @staticmethod
    def _bounded(call: Callable[[], T], timeout: float) -> T:
        try:
            return _started(call, "paddle_dist_ckpt store").result(timeout + _STORE_GRACE)
        except FutureTimeout:
            raise StoreSilentError(_STORE_RANK, f"Paddle's store has not answered within {timeout:g} s") from None
        except (ValueError, RuntimeError) as error:  # Paddle's, for whatever becomes of a connection
            raise StoreLostError(_STORE_RANK, f"Paddle's store: {type(error).__name__}: {error}") from error


def _started(call: Callable[[], T], name: str) -> Future[T]:
    """Begin a call on a thread of its own, which may be left behind.

    Raises:
        CheckpointError: there can be no more threads.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise CheckpointError(f"rank {dist.get_rank()} cannot ask Paddle's store: {error}") from error
    return result
