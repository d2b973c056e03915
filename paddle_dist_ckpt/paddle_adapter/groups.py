"""Paddle's process groups as the engine sees them: a control hub made once per group, and a transport over it."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base import core
from paddle.base.framework import _current_expected_place as _current_place
from paddle.base.framework import _dygraph_place_guard as _place_guard
from paddle.distributed.communication.group import Group

from ..control import SoloHub, ZmqHub
from ..control.no_transport import NoTransport
from ..core.memory import address_of, copy_bytes
from ..core.ports import Bytes1D, ControlHub, Transport
from ..errors import CheckpointError
from .device import TensorBytes, host_tensor

__all__ = ["PaddleTransport", "Ranks", "connect"]

_logger = logging.getLogger("paddle_dist_ckpt")
_ATTRIBUTE = "_paddle_dist_ckpt"
_SCATTER_BYTES = 64 << 20  # of all ranks' parts together, padded to one size, in one operation
_STAGED_BYTES = 32 << 20  # on the device
_LEAST_SCATTER = 256 << 10  # of one rank's part


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who takes part, and how they talk.

    Attributes:
        rank: This process's global rank.
        hub: For control messages.
        transport: For bulk data.
        memory: Whatever the caller wants to keep with the connection.
    """

    rank: int
    hub: ControlHub
    transport: Transport
    memory: dict[str, Any] = field(default_factory=dict)


def connect(process_group: Any, coordinator_rank: int, no_dist: bool, timeout: float) -> Ranks:
    """The ranks of a process group, connected.

    Args:
        process_group: A Paddle group, or None for the default one.
        coordinator_rank: Global rank of the coordinator; 0 becomes the group's first rank if 0 is not in the group.
        no_dist: Act alone.
        timeout: How long to wait for the coordinator, in seconds.

    Raises:
        ValueError: this rank, or the coordinator, is not in the group.
        CheckpointTimeoutError: the coordinator did not show up.
    """
    if type(coordinator_rank) is not int or coordinator_rank < 0:
        raise ValueError(f"coordinator_rank must be a rank, not {coordinator_rank!r}")
    if process_group is not None and not isinstance(process_group, Group):
        raise TypeError(f"process_group must be a paddle.distributed group, not {type(process_group).__name__}")
    rank = dist.get_rank()
    if no_dist:
        return _alone(os.getpid(), rank)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if coordinator_rank != 0:
            raise ValueError(f"coordinator_rank is {coordinator_rank}, but this process works alone")
        _warn_if_launched()
        return _alone(os.getpid(), rank)
    group = process_group if process_group is not None else dist.get_group(0)
    members = tuple(sorted(group.ranks))
    if rank not in members:
        raise ValueError(f"rank {rank} is not in the process group {list(members)}, and so must not make this call")
    if coordinator_rank not in members:
        if coordinator_rank != 0:
            raise ValueError(f"coordinator_rank {coordinator_rank} is not in the process group {list(members)}")
        coordinator_rank = members[0]
    return _connection(group, members, rank, coordinator_rank, timeout)


@functools.lru_cache(maxsize=1)
def _warn_if_launched() -> None:
    """Warn, once, of a job of several ranks of which each would act for itself."""
    ranks = os.environ.get("PADDLE_TRAINERS_NUM", "1")
    if not dist.is_initialized() and ranks.isdecimal() and int(ranks) > 1:
        _logger.warning(
            "this job was launched with %s ranks, but paddle.distributed.init_parallel_env() was not called; each rank "
            "saves and loads alone, and overwrites what the others save to the same place",
            ranks,
        )


@functools.lru_cache(maxsize=1)
def _alone(pid: int, rank: int) -> Ranks:
    """A rank that works alone. A process that was forked from another begins anew."""
    return Ranks(rank, SoloHub(rank), NoTransport())


@dataclass(slots=True)
class _Kept:
    """What is kept with a group: its transport, and for each coordinator the connection and the attempts at it."""

    transport: PaddleTransport
    connections: dict[int, Ranks] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)


def _connection(group: Any, members: tuple[int, ...], rank: int, coordinator: int, timeout: float) -> Ranks:
    """The group's connection, made when it is first used and kept with the group."""
    if len(members) == 1:
        return _alone(os.getpid(), rank)
    kept: _Kept | None = group.__dict__.get(_ATTRIBUTE)
    if kept is None:
        kept = group.__dict__[_ATTRIBUTE] = _Kept(PaddleTransport(group))
    if coordinator not in kept.connections:
        attempts = kept.attempts.get(coordinator, 0)
        kept.attempts[coordinator] = attempts + 1  # a call that fails here counts, or this rank would be a call behind
        hub = ZmqHub(
            rank,
            members,
            coordinator,
            _PaddleStore(),
            f"{_ATTRIBUTE}/{group.id}/{'-'.join(map(str, members))}/{coordinator}",
            bind_host=_own_host(),
            bootstrap_timeout=timeout,
            opened=attempts,
            on_abandon=kept.transport.abandon,
        )
        kept.connections[coordinator] = Ranks(rank, hub, kept.transport)
    return kept.connections[coordinator]


def _own_host() -> str | None:
    """The address under which Paddle itself knows this host, if it was told one."""
    host = str(dist.ParallelEnv().current_endpoint).rpartition(":")[0]
    return host or None


class _PaddleStore:
    """The store that Paddle's ranks share, for the bootstrap of the hub."""

    _POLL_SECONDS = 0.02

    def __init__(self) -> None:
        self._store = core.create_or_get_global_tcp_store()

    def set(self, key: str, value: bytes) -> None:
        """See :class:`..control.BootstrapStore`."""
        self._store.set(key, value.hex())
        self._store.add(f"{key}/set", 1)

    def get(self, key: str, timeout: float) -> bytes:
        """See :class:`..control.BootstrapStore`. Polls a counter, for Paddle's own wait cannot be bounded."""
        deadline = time.monotonic() + timeout
        while self._store.add(f"{key}/set", 0) == 0:
            if time.monotonic() > deadline:
                raise TimeoutError(key)
            time.sleep(self._POLL_SECONDS)
        return bytes.fromhex(self._store.get(key).decode())


class PaddleTransport:
    """Bulk data over a Paddle process group. See :class:`..core.ports.Transport`.

    To a CPU group's collectives numpy memory is handed as it is. Those of other backends take tensors on their device
    only: the data go there and back in parts of bounded size.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._broken = False
        self._on_host = _takes_host_memory(group)
        self._place = _current_place()

    def abandon(self) -> None:
        """A collective was given up while it hung: the communicator cannot be used any more."""
        self._broken = True

    @contextmanager
    def _operation(self) -> Iterator[None]:
        if self._broken:
            raise CheckpointError(
                "an earlier collective of this process group failed or hung, so its ranks are out of step and its "
                "communicator cannot be used any more; restart the job"
            )
        try:
            yield
        except BaseException:
            self._broken = True
            raise

    def broadcast(self, data: Bytes1D, source: int) -> None:
        """See :class:`..core.ports.Transport`."""
        with self._operation():
            if self._on_host:
                with _receiving(data if data.flags.writeable else data.copy()) as tensor:
                    dist.broadcast(tensor, source, self._group)
                return
            for start in range(0, data.size, _STAGED_BYTES):
                part = data[start : start + _STAGED_BYTES]
                staged = self._device_tensor(part.size)
                if self._group.rank == self._group.get_group_rank(source):
                    TensorBytes(staged).write(0, part if part.flags.writeable else part.copy())
                dist.broadcast(staged, source, self._group)
                if self._group.rank != self._group.get_group_rank(source):
                    TensorBytes(staged).read(0, part)

    def scatter(self, parts: Mapping[int, Bytes1D], into: Bytes1D, size: int, source: int) -> None:
        """See :class:`..core.ports.Transport`."""
        step = max(_LEAST_SCATTER, _SCATTER_BYTES // self._group.nranks)
        scatter = self._scatter if self._on_host else self._send
        with self._operation():
            for start in range(0, size, step):
                stop = min(start + step, size)
                window = {rank: part[start:stop] for rank, part in parts.items()}
                scatter(window, into[start:stop], stop - start, source)

    def _device_tensor(self, nbytes: int) -> Any:
        """New memory on the device that this rank had chosen when the group was first used."""
        with _place_guard(self._place):
            return paddle.empty([nbytes], dtype="uint8")

    def _send(self, parts: Mapping[int, Bytes1D], into: Bytes1D, size: int, source: int) -> None:
        """Send each part by itself, for a device's group."""
        me, root = self._group.rank, self._group.get_group_rank(source)
        operations = []
        staged = self._device_tensor(max(1, into.size))
        if me == root:
            for destination, part in sorted(parts.items()):
                if not part.size:
                    continue
                outgoing = self._device_tensor(part.size)
                TensorBytes(outgoing).write(0, np.ascontiguousarray(part) if part.flags.writeable else part.copy())
                if self._group.get_group_rank(destination) == me:
                    into[: part.size] = part
                else:
                    operations.append(dist.P2POp(dist.isend, outgoing, destination, self._group))
        elif into.size:
            operations.append(dist.P2POp(dist.irecv, staged, source, self._group))
        for task in dist.batch_isend_irecv(operations) if operations else ():
            task.wait()
        if me != root and into.size:
            TensorBytes(staged).read(0, into)

    def _scatter(self, parts: Mapping[int, Bytes1D], into: Bytes1D, size: int, source: int) -> None:
        received = into if into.size == size else np.empty(size, np.uint8)
        with _receiving(received) as tensor:
            dist.scatter(tensor, self._outgoing(parts, size, source), source, self._group)
        if received is not into:
            into[:] = received[: into.size]

    def _outgoing(self, parts: Mapping[int, Bytes1D], size: int, source: int) -> Any:
        """On the source, all parts behind each other in the group's order, each in ``size`` bytes."""
        if self._group.rank != self._group.get_group_rank(source):
            return None
        data = np.empty(size * self._group.nranks, np.uint8)
        for destination, part in parts.items():
            start = self._group.get_group_rank(destination) * size
            data[start : start + part.size] = part
        return host_tensor(data)


@contextmanager
def _receiving(data: Bytes1D) -> Iterator[Any]:
    """A tensor over numpy memory, or over a copy, as Paddle 2.6 makes one; then what it received is written back."""
    tensor = host_tensor(data)
    yield tensor
    if data.size and tensor.data_ptr() != address_of(data):
        copy_bytes(address_of(data), tensor.data_ptr(), data.size)


def _takes_host_memory(group: Any) -> bool:
    """Whether a group's collectives take tensors in host memory."""
    return "gloo" in str(getattr(group, "backend", "gloo")).lower()
