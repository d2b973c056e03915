"""Tensors in a device's memory, whatever device Paddle drives: copies of parts of them to the host and back.

Copies go on a stream of their own, which first waits for what the stream of computations has to do. A part of a tensor
is a view of it, which needs no kernel, and Paddle copies a view into host memory that is given, without any other
memory. To wait for a stream by its own functions would hold Python's lock meanwhile, so events are asked instead.

All devices are treated alike, but for pinned host memory, which GPUs reach by themselves: copies from and to it go at
the link's full speed and beside all else; those of other host memory go through a small pinned buffer of the driver's,
and hold up the thread that asks for them.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import paddle
from paddle.base import core
from paddle.base.framework import _current_expected_place as _current_place
from paddle.base.framework import _dygraph_place_guard as _place_guard

from ..core.memory import Bytes1D, array_at, fresh_pages

__all__ = [
    "DeviceCopies",
    "PaddleDevices",
    "TensorBytes",
    "at_device",
    "has_devices",
    "host_tensor",
    "is_gpu_build",
    "is_on_device",
    "name_of",
    "pinned_memory",
]

_logger = logging.getLogger("paddle_dist_ckpt")
_PAGE = 4096
_LEAST_WAIT, _MOST_WAIT = 20e-6, 500e-6
_TOGETHER = 64


def has_devices() -> bool:
    """Whether this Paddle can have tensors elsewhere than in host memory."""
    builds = ("is_compiled_with_cuda", "is_compiled_with_rocm", "is_compiled_with_xpu", "is_compiled_with_ipu")
    if any(getattr(paddle, name)() for name in builds if hasattr(paddle, name)):
        return True
    custom = getattr(paddle.device, "get_all_custom_device_type", None)
    return bool(custom()) if custom is not None else True


def is_gpu_build() -> bool:
    """Whether this Paddle drives GPUs."""
    return bool(paddle.is_compiled_with_cuda() or paddle.is_compiled_with_rocm())


def is_on_device(tensor: Any) -> bool:
    """Whether the host cannot access a tensor's memory. One without memory is nowhere."""
    if not tensor._is_initialized():
        return False
    place = tensor.place
    pinned = place.is_cuda_pinned_place() or getattr(place, "is_xpu_pinned_place", bool)()
    return not (place.is_cpu_place() or pinned)


class TensorBytes:
    """The memory of a plain tensor, from its first element to its last one.

    Implements :class:`..core.device_memory.DeviceBytes`.

    Args:
        tensor: The tensor; its strides are not negative.
    """

    def __init__(self, tensor: Any) -> None:
        self.base = int(tensor.data_ptr())
        self.device = name_of(tensor.place)
        self._itemsize, self._dtype = int(tensor.element_size()), tensor.dtype
        # Not as bytes: of a view that does not start where its memory does, Paddle errs there.
        with paddle.no_grad(), at_device(self.device):
            tensor = tensor.detach()
            if not tensor.is_contiguous():
                span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
                self._items = paddle.as_strided(tensor, [span], [1], tensor.offset)
            else:
                self._items = tensor.view([-1]) if tensor.shape else tensor.unsqueeze(0)

    def part(self, start: int, nbytes: int) -> Any:
        """The items in these bytes, as a tensor over the same memory."""
        with at_device(self.device):  # where another device is the current one, this would be a copy there
            return self._items._slice(start // self._itemsize, (start + nbytes) // self._itemsize)

    def alike(self, data: Bytes1D) -> Any:
        """Host memory as a tensor of the same type, without a copy. It must be writable."""
        return host_tensor(data).view(self._dtype)


class DeviceCopies:
    """A queue of copies, on a stream of its own for each device. Implements :class:`..core.device_memory.Copies`.

    Its memory is that of :class:`TensorBytes`. A device for which Paddle has no streams makes each copy at once.
    """

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}
        self._last: dict[str, Any] = {}  # for each device the event behind the last copy

    def read(self, requests: Sequence[tuple[Any, int, Bytes1D]]) -> None:
        """See :class:`..core.device_memory.Copies`."""
        for device, alike in _by_device(requests):
            self._copy(device, [(m.alike(into), m.part(start, len(into))) for m, start, into in alike])

    def write(self, requests: Sequence[tuple[Any, int, Bytes1D]]) -> None:
        """See :class:`..core.device_memory.Copies`."""
        for device, alike in _by_device(requests):
            self._copy(device, [(m.part(start, len(data)), m.alike(data)) for m, start, data in alike])

    def mark(self) -> _Marks:
        """See :class:`..core.device_memory.Copies`."""
        return _Marks(list(self._last.values()))

    def _copy(self, device: str, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Queue copies to the first of each pair from the second."""
        with paddle.no_grad(), _current_stream:  # all threads have the same current stream
            if device not in self._streams:
                self._streams[device] = stream = _stream_for_copies(device)
                if stream is not None:
                    stream.wait_event(_recorded(paddle.device.current_stream(device), device, ()))
            stream = self._streams[device]
            with paddle.device.stream_guard(stream) if stream is not None else nullcontext():
                try:
                    for target, source in pairs:
                        target.copy_(source, stream is None)
                finally:
                    if stream is not None:
                        self._last[device] = _recorded(stream, device, pairs)


class _Marks:
    """A point on each of some streams. Implements :class:`..core.device_memory.Mark`."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events

    def wait(self) -> None:
        """See :class:`..core.device_memory.Mark`."""
        pause = _LEAST_WAIT
        for event in self._events:
            while not event.query():
                time.sleep(pause)
                pause = min(2 * pause, _MOST_WAIT)
        self._events = ()
        with _current_stream:
            _forget_reached()


_current_stream = threading.Lock()
_current_device = threading.RLock()
# Events that are not reached yet, with the tensors that are copied until then. To drop such an event would wait for it,
# with Python's lock held; and memory that a copy is under way to must not be used for anything else, whatever happens.
_pending: deque[tuple[Any, Sequence[tuple[Any, Any]]]] = deque()


@cache
def _stream_for_copies(device: str) -> Any:
    """A stream that nothing but copies of this library goes on; None for a device that has no streams."""
    try:
        return paddle.device.Stream(device)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None


def _recorded(stream: Any, device: str, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """A new event at the end of what a stream has to do; until it is reached, the tensors in ``pairs`` are in use."""
    with at_device(device):  # events belong to the current one
        event = paddle.device.Event()
    event.record(stream)
    _forget_reached()
    _pending.append((event, pairs))
    return event


def _forget_reached() -> None:
    while _pending and _pending[0][0].query():
        _pending.popleft()


@contextmanager
def at_device(device: str) -> Iterator[None]:
    """Make a device the current one. By two threads at once Paddle's own guard could leave a wrong one."""
    if name_of(_current_place()) == device:
        yield
        return
    with _current_device, _place_guard(paddle.device._convert_to_place(device)):
        yield


def _by_device(requests: Sequence[tuple[Any, int, Bytes1D]]) -> Iterator[tuple[str, list[tuple[Any, int, Bytes1D]]]]:
    """Requests of the same device, a few at a time: while they are queued, other threads had better not queue any."""
    for device, alike in itertools.groupby(requests, lambda request: request[0].device):
        while some := list(itertools.islice(alike, _TOGETHER)):
            yield str(device), some


def name_of(place: Any) -> str:
    """A place as Paddle's functions take it."""
    if type(place) is not core.Place:
        place, typed = core.Place(), place
        place.set_place(typed)
    if place.is_cpu_place():
        return "cpu"
    if place.is_custom_place():
        return f"{place.custom_device_type()}:{place.custom_device_id()}"
    return f"gpu:{place.gpu_device_id()}" if place.is_gpu_place() else f"xpu:{place.xpu_device_id()}"


def host_tensor(data: Bytes1D) -> Any:
    """Host memory as a tensor, without a copy. It must be writable."""
    return paddle.utils.dlpack.from_dlpack(data.__dlpack__())


def pinned_memory(nbytes: int) -> Bytes1D | None:
    """Pinned memory from the beginning of a page; None where this Paddle has none, or no more of it."""
    place = _pinned_place()
    if place is None or nbytes == 0:
        return None
    try:
        tensor = paddle.to_tensor(np.empty(nbytes + _PAGE, np.uint8), place=place)
    except (RuntimeError, MemoryError, OSError) as error:
        _logger.warning("%d bytes of pinned memory cannot be had, so other memory is used: %s", nbytes, error)
        return None
    address = int(tensor.data_ptr())
    return array_at(address + -address % _PAGE, (nbytes,), None, np.dtype(np.uint8), tensor)


def _pinned_place() -> Any:
    """The place of pinned memory, if this Paddle knows one."""
    if is_gpu_build():
        return paddle.CUDAPinnedPlace()
    if paddle.is_compiled_with_xpu() and hasattr(core, "XPUPinnedPlace"):
        return core.XPUPinnedPlace()
    return None


class PaddleDevices:
    """The devices that Paddle drives. Implements :class:`..core.device_memory.DeviceAccess`."""

    def memory_of(self, tensor: Any) -> TensorBytes:
        """See :class:`..core.device_memory.DeviceAccess`; of a ShardedWeight it is given a tuple."""
        local = tensor[0] if isinstance(tensor, tuple) else tensor
        return TensorBytes(local._local_value() if local.is_dist() else local)

    copies = DeviceCopies

    def host_memory(self, nbytes: int) -> Bytes1D:
        """See :class:`..core.device_memory.DeviceAccess`; pinned where the device has that."""
        pinned = pinned_memory(nbytes)
        return fresh_pages(nbytes, inherited=False) if pinned is None else pinned
