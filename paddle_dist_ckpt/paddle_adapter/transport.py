"""Bulk data over a Paddle process group, from host memory to host memory, by whatever operations the group has."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base.framework import _current_expected_place as _current_place

from ..control.verified import ADVICE, WITHOUT
from ..core.cached import cached_property
from ..core.memory import Bytes1D, address_of, copy_bytes
from ..core.text import ranks_text
from ..errors import CheckpointError, CollectiveError
from .device import at_device, host_tensor, is_gpu_build, name_of
from .device_copies import DeviceCopies
from .device_memory import TensorBytes
from .device_streams import current_stream

__all__ = ["PaddleTransport", "takes_host_memory"]

_SCATTER_BYTES = 16 << 20  # of all ranks' parts together, padded to one size, in one scatter from host memory
_ALL_TO_ALL_BYTES = 64 << 20  # the same in one all-to-all
_DEVICE_BYTES = 32 << 20  # the same by way of a device
_LEAST_PART = 256 << 10  # of one rank's part
_PROBE_BYTES = 16
_OTHER = "other bytes than were sent"
_NOTHING: Bytes1D = np.zeros(0, np.uint8)


def takes_host_memory(group: Any) -> bool:
    """Whether a group's collectives take tensors in host memory. To try one that do not may end the process."""
    return "gloo" in str(getattr(group, "backend", "gloo")).lower()


class PaddleTransport:
    """Implements :class:`..core.protocols.Transport`.

    To a CPU group's collectives numpy memory is handed as it is. Those of other backends take tensors on their device
    only: the data go there and back in parts of bounded size.

    Args:
        make_group: Gives the group. It is called when the transport is first used, on all ranks of the group.
        on_host: Whether that group takes host memory.
    """

    def __init__(self, make_group: Callable[[], Any], on_host: bool = True) -> None:
        self._make_group, self._on_host = make_group, on_host
        self.tried = self._broken = self._has_all_to_all = False
        self._current = name_of(_current_place())  # helper threads have another one

    @cached_property
    def _group(self) -> Any:
        return self._make_group()

    @cached_property
    def _memory(self) -> _HostMemory | _DeviceMemory:
        if self._on_host:
            return _HostMemory()
        return _DeviceMemory(_device_of_rank() if self._current == "cpu" else self._current)

    def abandon(self) -> None:
        """See :class:`..core.protocols.Transport`."""
        self._broken = True

    @contextmanager
    def _operation(self) -> Iterator[None]:
        if self._broken:
            raise CollectiveError(f"an earlier collective failed, hung, or delivered {_OTHER}; {ADVICE}")
        try:
            yield
        except BaseException as error:
            self._broken = True
            if isinstance(error, CollectiveError) or not isinstance(error, Exception):
                raise
            raise CollectiveError(f"a collective failed: {type(error).__name__}: {error}; {ADVICE}") from error

    def broadcast(self, data: Bytes1D, source: int, most: int) -> None:
        """See :class:`..core.protocols.Transport`."""
        with self._operation():
            self._broadcast(data, source, most)

    def _broadcast(self, data: Bytes1D, source: int, most: int) -> None:
        step = min(most, _DEVICE_BYTES) if self._memory.is_device else max(1, data.size)
        is_source = self._group.rank == self._group.get_group_rank(source)
        for start in range(0, data.size, step):
            part = [data[start : start + step]]
            tensor = self._memory.filled(part) if is_source else self._memory.empty(part)
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
        """See :class:`..core.protocols.Transport`."""
        with self._operation():
            count, device_bytes = len(self._group.ranks), min(most // 2, _DEVICE_BYTES)
            if self._has_all_to_all:
                step = max(1, (device_bytes if self._memory.is_device else _ALL_TO_ALL_BYTES) // count)
                for start in range(0, max((size for _, size in senders), default=0), step):
                    self._all_to_all(_cut(outgoing, start, step), _cut(incoming, start, step))
                return
            if count == 2:  # a broadcast takes a message from where it is to where it goes
                for source, size in senders:
                    (data,) = outgoing.values() if source == dist.get_rank() else [incoming[source]]
                    assert data.size == size, "there is one message"
                    self._broadcast(data, source, most)
                return
            least, together = (1, device_bytes) if self._memory.is_device else (_LEAST_PART, _SCATTER_BYTES)
            step = max(least, together // count)
            packed = np.empty(min(step, dict(senders).get(dist.get_rank(), 0)) * count, np.uint8)
            for source, size in senders:
                for start in range(0, size, step):
                    into = incoming.get(source, _NOTHING)[start : start + step]
                    self._scatter(_cut(outgoing, start, step), into, min(step, size - start), source, packed)

    def get_ready(self) -> None:
        """See :class:`..core.protocols.Transport`. A rank that waits for another in a device's first collective keeps
        Paddle's store to itself, and so no group on the host could be made in its place."""
        if not self._on_host:
            parts = [_blank() for _ in self._group.ranks]
            try:
                _ = self._memory.filled(parts), self._memory.empty(parts)
            except (RuntimeError, MemoryError, OSError) as error:
                raise CheckpointError(
                    f"no memory on the device for a collective ({type(error).__name__}: {error}): free some; {WITHOUT}"
                ) from error

    def try_out(self) -> list[str]:
        """See :class:`..core.protocols.Operations`. A backend that has no all-to-all says so on each rank by itself."""
        attempts = {"all_to_all": self._try_all_to_all, "broadcast": self._try_broadcast, "scatter": self._try_scatter}
        with self._operation():
            return [name for name, attempt in attempts.items() if not attempt()]

    def rely_on_others(self, failing: Mapping[str, Sequence[int]]) -> None:
        """See :class:`..core.protocols.Transport`."""
        self._has_all_to_all = "all_to_all" not in failing
        scatters = not self._has_all_to_all and len(self._group.ranks) > 2
        needed = ["broadcast", "scatter"] if scatters else ["broadcast"]
        lacking = {name: failing[name] for name in needed if name in failing}
        if lacking:
            said = [f"a {name} on {ranks_text(ranks)}" for name, ranks in lacking.items()]
            text = f"what was tried failed, or delivered {_OTHER}: {'; '.join(said)}; {ADVICE}"
            blamed = {rank for ranks in lacking.values() for rank in ranks}
            raise CollectiveError(text, {rank: CollectiveError(text) for rank in sorted(blamed)})
        self.tried = True

    def _try_all_to_all(self) -> bool:
        ranks, me = self._group.ranks, dist.get_rank()
        sent, received = [self._token(me, rank) for rank in ranks], [_blank() for _ in ranks]
        try:
            tensor = self._memory.empty(received)
            self._call_all_to_all(self._memory.filled(sent), tensor, sent, received)
            self._memory.fetch(tensor, received)
        except (RuntimeError, NotImplementedError, ValueError, OSError):
            return False
        return all(np.array_equal(part, self._token(rank, me)) for rank, part in zip(ranks, received, strict=True))

    def _try_broadcast(self) -> bool:
        first, into = self._group.ranks[0], _blank()
        if dist.get_rank() == first:
            into[:] = self._token(first, first)
        self._broadcast(into, first, _DEVICE_BYTES)
        return np.array_equal(into, self._token(first, first))

    def _try_scatter(self) -> bool:
        first, me, into = self._group.ranks[0], dist.get_rank(), _blank()
        parts = {rank: self._token(first, rank) for rank in self._group.ranks} if me == first else {}
        self._scatter(parts, into, _PROBE_BYTES, first, np.zeros(_PROBE_BYTES * len(self._group.ranks), np.uint8))
        return me == first or np.array_equal(into, self._token(first, me))

    def _token(self, source: int, destination: int) -> Bytes1D:
        """Bytes to try an operation with, other ones for any other pair, or group."""
        digest = hashlib.sha256(repr((self._group.id, self._group.ranks, source, destination)).encode()).digest()
        return np.frombuffer(digest[:_PROBE_BYTES], np.uint8)

    def _all_to_all(self, outgoing: Mapping[int, Bytes1D], incoming: Mapping[int, Bytes1D]) -> None:
        """Send and receive one message for each pair of ranks, of a byte where there is none: before 3.3 Paddle may
        refuse to cut nothing out of a tensor, on some ranks only, while the others wait."""
        extra = np.zeros(1, np.uint8)
        sent, received = (
            [part if (part := parts.get(rank, _NOTHING)).size else extra for rank in self._group.ranks]
            for parts in (outgoing, incoming)
        )
        tensor = self._memory.empty(received)
        self._call_all_to_all(self._memory.filled(sent), tensor, sent, received)
        self._memory.fetch(tensor, received)

    def _call_all_to_all(
        self, outgoing: Any, incoming: Any, sent: Sequence[Bytes1D], received: Sequence[Bytes1D]
    ) -> None:
        dist.alltoall_single(
            in_tensor=outgoing,
            out_tensor=incoming,
            in_split_sizes=[int(part.size) for part in sent],
            out_split_sizes=[int(part.size) for part in received],
            group=self._group,
        )

    def _scatter(self, outgoing: Mapping[int, Bytes1D], into: Bytes1D, size: int, source: int, packed: Bytes1D) -> None:
        """Send to each rank its own part, padded to ``size`` bytes; ``packed`` has room for those of all ranks."""
        received = [into if into.size == size else np.empty(size, np.uint8)]
        tensor = self._memory.empty(received)
        if self._group.rank == self._group.get_group_rank(source):
            packed = packed[: size * len(self._group.ranks)]
            for rank, part in outgoing.items():
                start = self._group.get_group_rank(rank) * size
                packed[start : start + part.size] = part
            dist.scatter(tensor, self._memory.filled([packed]), source, self._group)
            return
        dist.scatter(tensor, None, source, self._group)
        self._memory.fetch(tensor, received)
        if received[0] is not into:
            into[:] = received[0][: into.size]


class _HostMemory:
    """Tensors for collectives that take host memory: over the bytes themselves if they stand together."""

    is_device = False

    @staticmethod
    def filled(parts: Sequence[Bytes1D]) -> Any:
        """A tensor with these bytes, one part behind the other."""
        alone = parts[0] if len(parts) == 1 and parts[0].flags.writeable else None
        return host_tensor(np.concatenate(parts) if alone is None else alone)

    @staticmethod
    def empty(parts: Sequence[Bytes1D]) -> Any:
        """A tensor to be filled with as many bytes."""
        return host_tensor(parts[0] if len(parts) == 1 else np.empty(sum(part.size for part in parts), np.uint8))

    @staticmethod
    def fetch(tensor: Any, parts: Sequence[Bytes1D]) -> None:
        """Get the bytes that a collective has put into a tensor."""
        start = int(tensor.data_ptr())
        for part in parts:  # Paddle 2.6 makes tensors over copies of the memory
            if part.size and address_of(part) != start:
                copy_bytes(address_of(part), start, part.size)
            start += part.size


class _DeviceMemory:
    """Tensors for collectives that take a device's memory. What it holds goes there and comes back by copies.

    Args:
        device: The device.
    """

    is_device = True

    def __init__(self, device: str) -> None:
        self._device = device

    def filled(self, parts: Sequence[Bytes1D]) -> Any:
        """See :class:`_HostMemory`."""
        tensor, copies = self.empty(parts), DeviceCopies()
        memory = TensorBytes.of(tensor)
        copies.write([(memory, start, address_of(part), part.size) for start, part in _places(parts)], parts)
        copies.mark().wait()
        return tensor

    def empty(self, parts: Sequence[Bytes1D]) -> Any:
        """See :class:`_HostMemory`."""
        with current_stream, at_device(self._device):
            return paddle.empty([sum(part.size for part in parts)], dtype="uint8")

    @staticmethod
    def fetch(tensor: Any, parts: Sequence[Bytes1D]) -> None:
        """See :class:`_HostMemory`. The copies wait for the computations, which wait for the collective."""
        copies = DeviceCopies()
        memory = TensorBytes.of(tensor)
        copies.read([(memory, start, address_of(part), part.size) for start, part in _places(parts)], parts)
        copies.mark().wait()


def _blank() -> Bytes1D:
    return np.zeros(_PROBE_BYTES, np.uint8)


def _device_of_rank() -> str:
    """The device that the launcher gave this rank."""
    env = dist.ParallelEnv()
    return f"{'gpu' if is_gpu_build() else env.device_type}:{env.device_id}"


def _places(parts: Sequence[Bytes1D]) -> Iterator[tuple[int, Bytes1D]]:
    """Where each part that is not empty starts in all of them."""
    starts = itertools.accumulate((part.size for part in parts), initial=0)
    return ((start, part) for start, part in zip(starts, parts, strict=False) if part.size)


def _cut(parts: Mapping[int, Bytes1D], start: int, size: int) -> dict[int, Bytes1D]:
    return {rank: part[start : start + size] for rank, part in parts.items()}
