"""Copies between host memory and that of devices.

They go on a stream of their own, which first waits for what the stream of computations has to do.

To ask Paddle for a copy takes as long as to copy a megabyte. So small tensors of one type are packed on the device
(concat), and the pack is copied; or it is copied there, and split into the tensors' own memory. Items with strides are
copied by way of contiguous memory of the device likewise. All this takes little memory there at a time, and kernels;
where a device has none, copies are made one by one, and of strided items with what lies between them.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from ..core.columns import IntArray
from ..core.device_memory import Scattered, read_scattered, write_scattered
from ..core.memory import Bytes1D, address_of, bytes_at, copy_various, fresh_pages
from ..core.packs import PACK_BYTES, SMALL_BYTES, packs_of, stand_together
from . import device as device_module
from .device import at_device, has_kernels
from .device_memory import MemoryKind, StridedBytes, TensorBytes, memories_of
from .device_streams import current_stream, forget_reached, recorded, stream_for_copies, wait_for

__all__ = ["DeviceCopies", "PaddleDevices"]

_logger = logging.getLogger("paddle_dist_ckpt")
_TOGETHER = 64  # while they are queued, other threads had better not queue any
_SPLIT_COUNT = 256  # Paddle's split takes twice as long for each of 1,024 parts, five times of 4,000
_MOST_UNDER_WAY = 4 * PACK_BYTES  # of the device's memory, and of the host's, beside what is copied
_REFUSALS = (RuntimeError, NotImplementedError, ValueError, TypeError, OSError, MemoryError)

_Request = tuple[Any, int, int, int]
_Queued = tuple[int, Sequence[Callable[[], None]]]
"""Bytes of the device's memory that are in use until copies are done, and what to do then."""
_CopyScattered = Callable[[Sequence[Scattered], Any], None]
"""As :func:`..core.device_memory.read_scattered`: it needs no other memory of the device."""
_Work = Callable[[list[Any]], _Queued]
"""Queues copies. It may fail after some, so before each it appends to the list what is in use until that is done."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """Copies by way of other memory: an event behind them, the bytes of that memory, and what is left to do then."""

    number: int
    event: Any
    nbytes: int
    finishes: Sequence[Callable[[], None]]


class DeviceCopies:
    """A queue of copies, on a stream of its own for each device. Implements :class:`..core.device_memory.Copies`.

    Its memory is that of :class:`TensorBytes`. A device for which Paddle has no streams makes each copy at once.
    """

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}
        self._last: dict[str, Any] = {}  # for each device the event behind the last copy
        self._under_way: deque[_UnderWay] = deque()
        self._settling = threading.Lock()
        self._numbers = itertools.count(1)
        self._number = 0  # of the last that was put under way
        self._buffers: list[Bytes1D] = []  # of a pack's size each, that are free

    def read(self, requests: Sequence[_Request], host: Any) -> None:
        """See :class:`..core.device_memory.Copies`."""
        self._queue(requests, host, self._read_pack, _read_one, read_scattered)

    def write(self, requests: Sequence[_Request], host: Any) -> None:
        """See :class:`..core.device_memory.Copies`."""
        self._queue(requests, host, self._write_pack, _write_one, write_scattered)

    def mark(self) -> _Marks:
        """See :class:`..core.device_memory.Copies`."""
        return _Marks(list(self._last.values()), self.settle, self._number)

    def settle(self, number: int, most: int = 0) -> None:
        """Finish copies by way of other memory, the first ones first: those up to a number, and then so many that no
        more than ``most`` bytes of it are in use."""
        with self._settling:
            while self._under_way and (
                self._under_way[0].number <= number
                or (most and sum(one.nbytes for one in tuple(self._under_way)) > most)
            ):
                wait_for(self._under_way[0].event)
                for finish in self._under_way[0].finishes:
                    finish()
                self._under_way.popleft()

    def _queue(
        self,
        requests: Sequence[_Request],
        host: Any,
        copy_pack: Callable[[_PackedCopies], _Work],
        copy_one: Callable[[_Request, list[Any]], _Queued],
        copy_scattered: _CopyScattered,
    ) -> None:
        """Queue copies, the small ones together."""
        by_kind: dict[MemoryKind, list[_Request]] = {}
        for request in requests:
            by_kind.setdefault(request[0].kind, []).append(request)
        for kind, here in by_kind.items():
            device, (packs, alone) = kind.device, _packed(kind, here)
            for pack in packs:
                if device not in _without_packs:
                    try:
                        with paddle.no_grad(), current_stream, at_device(device):
                            copy = copy_pack(_PackedCopies(kind, pack))
                        self._run(device, [copy], host)
                        continue
                    except _REFUSALS as error:
                        _without_packs.add(device)
                        _logger.warning("%s: small tensors are copied one by one from now on: %s", device, error)
                self._run_each(device, pack, copy_one, copy_scattered, host)
            self._run_each(device, alone, copy_one, copy_scattered, host)

    def _run_each(
        self,
        device: str,
        requests: Sequence[_Request],
        copy: Callable[[_Request, list[Any]], _Queued],
        copy_scattered: _CopyScattered,
        host: Any,
    ) -> None:
        for first in range(0, len(requests), _TOGETHER):
            some = requests[first : first + _TOGETHER]
            strided = [request for request in some if isinstance(request[0], StridedBytes)]
            others = [functools.partial(copy, request) for request in some if not isinstance(request[0], StridedBytes)]
            self._run(device, others, host)
            for request in strided:
                try:
                    self._run(device, [functools.partial(copy, request)], host)
                except _REFUSALS:  # as where the device has no room for them as contiguous items
                    copy_scattered([(request[0].scattered(), request[2])], self)

    def _run(self, device: str, works: Sequence[_Work], host: Any) -> None:
        """Queue works, and remember what is in use until they are done."""
        if not works:
            return
        self.settle(0, _MOST_UNDER_WAY)
        kept: list[Any] = [host]
        finishes: list[Callable[[], None]] = []
        nbytes, event = 0, None
        with paddle.no_grad(), current_stream, at_device(device):  # all threads have the same current stream
            stream = self._stream(device)
            with paddle.device.stream_guard(stream) if stream is not None else nullcontext():
                try:
                    for work in works:
                        size, more = work(kept)
                        nbytes += size
                        finishes += more
                finally:
                    if stream is not None:
                        self._last[device] = event = recorded(stream, device, kept)
                    else:
                        paddle.device.synchronize(device)
            if nbytes:
                self._number = next(self._numbers)
                self._under_way.append(_UnderWay(self._number, event, nbytes, finishes))

    def _stream(self, device: str) -> Any:
        if device not in self._streams:
            stream = stream_for_copies(device)
            if stream is not None:
                stream.wait_event(recorded(paddle.device.current_stream(device), device, ()))
            self._streams[device] = stream  # now that it waits, which may fail
        return self._streams[device]

    def _read_pack(self, pack: _PackedCopies) -> _Work:
        """Copy from a device to the host; straight to where it goes, if that stands together there."""
        data, scratch = self._host_side(pack)
        parts, inner = pack.tensors()

        def finish() -> None:
            if scratch is not None:
                copy_various(pack.addresses, pack.starts + address_of(scratch), pack.sizes)
                self._buffers.append(scratch)

        def work(kept: list[Any]) -> _Queued:
            packed, target = paddle.concat(parts), pack.alike(data, inner)
            kept += [parts, packed, target]
            target.copy_(packed, False)
            return len(data), [finish]

        return work

    def _write_pack(self, pack: _PackedCopies) -> _Work:
        """Copy from the host to a device; what does not stand together on the host is put together there."""
        parts, lengths = pack.to_fill(), (pack.sizes // pack.kind.itemsize).tolist()
        data, scratch = self._host_side(pack)
        if scratch is not None:
            copy_various(pack.starts + address_of(scratch), pack.addresses, pack.sizes)

        def finish() -> None:
            if scratch is not None:
                self._buffers.append(scratch)

        def work(kept: list[Any]) -> _Queued:
            source = pack.alike(data, [])
            packed = paddle.empty(source.shape, source.dtype)
            kept += [parts, packed, source]
            packed.copy_(source, False)
            at = 0
            for first in range(0, len(parts), _SPLIT_COUNT):
                some, here = parts[first : first + _SPLIT_COUNT], lengths[first : first + _SPLIT_COUNT]
                start, at = at, at + sum(here)
                paddle._legacy_C_ops.split(packed._slice(start, at), some, "sections", here, "axis", 0)
            if [part.data_ptr() for part in parts] != pack.expected:
                raise RuntimeError("Paddle has split a tensor into other memory than it was given")
            return len(data), [finish]

        return work

    def _host_side(self, pack: _PackedCopies) -> tuple[Bytes1D, Bytes1D | None]:
        """A pack's bytes on the host: where they are if they stand together, else a part of a buffer, and that."""
        nbytes = int(pack.sizes.sum())
        if stand_together(pack.addresses, pack.sizes):
            return bytes_at(int(pack.addresses[0]), nbytes), None
        scratch = self._buffer()
        return scratch[:nbytes], scratch

    def _buffer(self) -> Bytes1D:
        try:
            return self._buffers.pop()
        except IndexError:
            return PaddleDevices().host_memory(PACK_BYTES)


class _Marks:
    """A point on each of some streams. Implements :class:`..core.device_memory.Mark`."""

    def __init__(self, events: Sequence[Any], settle: Callable[[int], None], number: int) -> None:
        self._events, self._settle, self._number = events, settle, number

    def wait(self) -> None:
        """See :class:`..core.device_memory.Mark`."""
        for event in self._events:
            wait_for(event)
        self._events = ()
        self._settle(self._number)
        with current_stream:
            forget_reached()


_without_packs: set[str] = set()  # devices that have failed to make one


class _PackedCopies:
    """Small copies of one kind that are made as one: of each the address on the host, its bytes, and where these start
    among all of them, ``[copies]``."""

    def __init__(self, kind: MemoryKind, requests: Sequence[_Request]) -> None:
        self.kind, self._requests = kind, requests
        self.addresses: IntArray = np.array([request[2] for request in requests], np.int64)
        self.sizes: IntArray = np.array([request[3] for request in requests], np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes

    @property
    def expected(self) -> list[int]:
        """Where each begins on the device."""
        return [memory.base + start for memory, start, _, _ in self._requests]

    def tensors(self) -> tuple[list[Any], list[int]]:
        """The items on the device as tensors, and their shape but for the first dimension, in which alone they differ.

        They are the tensors themselves where these are whole and alike: to make views takes longer than to copy.
        """
        shapes = [memory.tensor.shape for memory, _, _, _ in self._requests]
        rows, inner = list(zip(self._requests, shapes, strict=True)), shapes[0][1:]
        if all(shape and shape[1:] == inner and memory.is_all(at, n, shape) for (memory, at, _, n), shape in rows):
            return [memory.tensor for memory, _, _, _ in self._requests], inner
        return [
            memory.tensor if len(shape) == 1 and memory.is_all(at, n, shape) else memory.small_part(at, n)
            for (memory, at, _, n), shape in rows
        ], []

    def to_fill(self) -> list[Any]:
        """Tensors over the memory of the items on the device, which are to be filled."""
        return [memory.to_fill(start, nbytes) for memory, start, _, nbytes in self._requests]

    def alike(self, data: Bytes1D, inner: Sequence[int]) -> Any:
        """Host memory as a tensor of the same type and of such a shape, without a copy."""
        tensor = self.kind.on_host(data)
        return tensor.reshape([-1, *inner]) if inner else tensor


def _packed(kind: MemoryKind, requests: Sequence[_Request]) -> tuple[list[list[_Request]], list[_Request]]:
    """Divide copies of a kind: packs, and those that are made by themselves."""
    if kind.device in _without_packs or not has_kernels(kind.device, kind.dtype, "concat", "split"):
        return [], list(requests)
    sizes = [nbytes if type(memory) is TensorBytes else SMALL_BYTES + 1 for memory, _, _, nbytes in requests]
    packs, alone = packs_of(np.array(sizes, np.int64))
    return [[requests[i] for i in pack] for pack in packs], [requests[i] for i in alone]


def _read_one(request: _Request, kept: list[Any]) -> _Queued:
    memory, start, address, nbytes = request
    target, is_strided = memory.alike(bytes_at(address, nbytes)), isinstance(memory, StridedBytes)
    source = memory.view().contiguous() if is_strided else memory.part(start, nbytes)
    kept += (memory, source, target)
    target.copy_(source, False)
    return nbytes if is_strided else 0, ()


def _write_one(request: _Request, kept: list[Any]) -> _Queued:
    memory, start, address, nbytes = request
    source, is_strided = memory.alike(bytes_at(address, nbytes)), isinstance(memory, StridedBytes)
    target = paddle.empty(source.shape, source.dtype) if is_strided else memory.part(start, nbytes)
    kept += (memory, source, target)
    target.copy_(source, False)
    if is_strided:
        memory.write(target)
    return nbytes if is_strided else 0, ()


class PaddleDevices:
    """The devices that Paddle drives. Implements :class:`..core.device_memory.DeviceAccess`."""

    def memories_of(self, tensors: Sequence[Any], numbers: Sequence[int]) -> list[TensorBytes]:
        """See :class:`..core.device_memory.DeviceAccess`; of a ShardedWeight it is given a tuple."""
        local = [one[0] if isinstance(one, tuple) else one for one in tensors]
        if any(map(paddle.Tensor.is_dist, local)):
            local = [one._local_value() if one.is_dist() else one for one in local]
        return memories_of(local, numbers)

    copies = DeviceCopies

    def host_memory(self, nbytes: int) -> Bytes1D:
        """See :class:`..core.device_memory.DeviceAccess`; pinned where the device has that."""
        pinned = device_module.pinned_memory(nbytes)
        return fresh_pages(nbytes, inherited=False) if pinned is None else pinned
