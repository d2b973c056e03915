"""Bulk data over a Paddle process group, from host memory to host memory, by whatever operations the group has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base.framework import _current_expected_place as _current_place
from paddle.base.framework import _dygraph_place_guard as _place_guard

from ..core.memory import address_of, copy_bytes
from ..core.ports import Bytes1D
from ..errors import CheckpointError
from .device import DeviceCopies, TensorBytes, host_tensor

__all__ = ["PaddleTransport", "takes_host_memory"]

_TOGETHER_BYTES = 64 << 20  # of all ranks' parts together, padded to one size, in one operation
_BROADCAST_BYTES = 32 << 20  # by way of a device
_LEAST_PART = 256 << 10  # of one rank's part


def takes_host_memory(group: Any) -> bool:
    """Whether a group's collectives take tensors in host memory. To try one that do not may end the process."""
    return "gloo" in str(getattr(group, "backend", "gloo")).lower()


class PaddleTransport:
    """Implements :class:`..core.ports.Transport`.

    To a CPU group's collectives numpy memory is handed as it is. Those of other backends take tensors on their device
    only: the data go there and back in parts of bounded size.

    Args:
        make_group: Gives the group. It is called when the transport is first used, on all ranks of the group.
    """

    def __init__(self, make_group: Callable[[], Any]) -> None:
        self._make_group = make_group
        self._broken = False
        self._place = _current_place()  # helper threads have another one

    @cached_property
    def _group(self) -> Any:
        return self._make_group()

    @cached_property
    def _memory(self) -> _HostMemory | _DeviceMemory:
        return _HostMemory() if takes_host_memory(self._group) else _DeviceMemory(self._place)

    @property
    def _ranks(self) -> list[int]:
        ranks: list[int] = self._group.ranks
        return ranks

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

    def broadcast(self, data: Bytes1D, source: int, most: int) -> None:
        """See :class:`..core.ports.Transport`."""
        with self._operation():
            step = min(most, _BROADCAST_BYTES) if self._memory.is_device else max(1, data.size)
            is_source = self._group.rank == self._group.get_group_rank(source)
            for start in range(0, data.size, step):
                part = data[start : start + step]
                tensor = self._memory.tensor(part, is_source)
                dist.broadcast(tensor, source, self._group)
                if not is_source:
                    self._memory.fetch(tensor, part)

    def exchange(
        self,
        outgoing: Mapping[int, Bytes1D],
        incoming: Mapping[int, Bytes1D],
        senders: Sequence[tuple[int, int]],
        most: int,
    ) -> None:
        """See :class:`..core.ports.Transport`."""
        count, largest = len(self._ranks), max((size for _, size in senders), default=0)
        with self._operation():
            if self._has_all_to_all:
                step = max(1, (most if self._memory.is_device else 2 * _TOGETHER_BYTES) // (2 * count))
                for start in range(0, largest, step):
                    self._all_to_all(_cut(outgoing, start, step), _cut(incoming, start, step))
                return
            bound = min(most // 2, _TOGETHER_BYTES) if self._memory.is_device else _TOGETHER_BYTES
            step = max(1 if self._memory.is_device else _LEAST_PART, bound // count)
            nothing = np.zeros(0, np.uint8)
            for source, size in senders:
                for start in range(0, size, step):
                    into = incoming.get(source, nothing)[start : start + step]
                    self._scatter(_cut(outgoing, start, step), into, min(step, size - start), source)

    @cached_property
    def _has_all_to_all(self) -> bool:
        """Whether the group's backend can do this, by asking it to. One that cannot says so on each rank by itself."""
        ones = {rank: np.ones(1, np.uint8) for rank in self._ranks}
        got = {rank: np.zeros(1, np.uint8) for rank in self._ranks}
        try:
            self._all_to_all(ones, got)
        except (RuntimeError, NotImplementedError, ValueError, OSError):
            return False
        return all(part.all() for part in got.values())

    def _all_to_all(self, outgoing: Mapping[int, Bytes1D], incoming: Mapping[int, Bytes1D]) -> None:
        """Send and receive one message for each pair of ranks, and a byte to itself, since none may be without any."""
        me = dist.get_rank()
        extra = [int(rank == me) for rank in self._ranks]
        sent = [_size(outgoing, rank) + more for rank, more in zip(self._ranks, extra, strict=True)]
        received = [_size(incoming, rank) + more for rank, more in zip(self._ranks, extra, strict=True)]
        packed, into = np.zeros(sum(sent), np.uint8), np.zeros(sum(received), np.uint8)
        for start, rank in zip(np.cumsum([0, *sent]).tolist(), self._ranks, strict=False):
            if rank in outgoing:
                packed[start : start + outgoing[rank].size] = outgoing[rank]
        tensor = self._memory.tensor(into, False)
        dist.alltoall_single(
            in_tensor=self._memory.tensor(packed, True),
            out_tensor=tensor,
            in_split_sizes=sent,
            out_split_sizes=received,
            group=self._group,
        )
        self._memory.fetch(tensor, into)
        for start, rank in zip(np.cumsum([0, *received]).tolist(), self._ranks, strict=False):
            if rank in incoming:
                incoming[rank][:] = into[start : start + incoming[rank].size]

    def _scatter(self, outgoing: Mapping[int, Bytes1D], into: Bytes1D, size: int, source: int) -> None:
        """Send to each rank its own part, padded to ``size`` bytes."""
        is_source = self._group.rank == self._group.get_group_rank(source)
        packed = None
        if is_source:
            data = np.zeros(size * len(self._ranks), np.uint8)
            for rank, part in outgoing.items():
                start = self._group.get_group_rank(rank) * size
                data[start : start + part.size] = part
            packed = self._memory.tensor(data, True)
        received = into if into.size == size else np.empty(size, np.uint8)
        tensor = self._memory.tensor(received, False)
        dist.scatter(tensor, packed, source, self._group)
        if not is_source:
            self._memory.fetch(tensor, received)
            if received is not into:
                into[:] = received[: into.size]


class _HostMemory:
    """How data get to collectives that take host memory, and from there: they are there."""

    is_device = False

    @staticmethod
    def tensor(data: Bytes1D, filled: bool) -> Any:
        """A tensor for a collective, with this content if it shall be ``filled``."""
        return host_tensor(data if data.flags.writeable else data.copy())

    @staticmethod
    def fetch(tensor: Any, into: Bytes1D) -> None:
        """Get what a collective has put into a tensor. (Paddle 2.6 has made that over a copy of the memory.)"""
        if into.size and tensor.data_ptr() != address_of(into):
            copy_bytes(address_of(into), tensor.data_ptr(), into.size)


class _DeviceMemory:
    """How data get to collectives that take a device's memory, and from there: by copies.

    Args:
        place: The device.
    """

    is_device = True

    def __init__(self, place: Any) -> None:
        self._place = place

    def tensor(self, data: Bytes1D, filled: bool) -> Any:
        """See :class:`_HostMemory`."""
        with _place_guard(self._place):
            tensor = paddle.empty([data.size], dtype="uint8")
        if filled:
            copies = DeviceCopies()
            copies.write(TensorBytes(tensor), 0, data if data.flags.writeable else data.copy())
            copies.mark().wait()
        return tensor

    @staticmethod
    def fetch(tensor: Any, into: Bytes1D) -> None:
        """See :class:`_HostMemory`. The copies wait for the collective, for which the computations have to wait."""
        copies = DeviceCopies()
        copies.read(TensorBytes(tensor), 0, into)
        copies.mark().wait()


def _cut(parts: Mapping[int, Bytes1D], start: int, size: int) -> dict[int, Bytes1D]:
    return {rank: part[start : start + size] for rank, part in parts.items()}


def _size(parts: Mapping[int, Bytes1D], rank: int) -> int:
    return int(parts[rank].size) if rank in parts else 0
