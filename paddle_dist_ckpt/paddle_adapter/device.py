"""The devices that Paddle drives: which there are, what they can do, and host memory that they reach.

All devices are treated alike, but for pinned host memory, which GPUs reach by themselves: copies from and to it go at
the link's full speed and beside all else; those of other host memory go through a small pinned buffer of the driver's,
and hold up the thread that asks for them.
"""

from __future__ import annotations

import ctypes
import logging
import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle.base import core
from paddle.base.framework import _current_expected_place as _current_place
from paddle.base.framework import _dygraph_place_guard as _place_guard

from ..core.memory import Bytes1D, array_at

__all__ = [
    "at_device",
    "device_of",
    "devices_of",
    "has_devices",
    "has_kernels",
    "host_tensor",
    "is_gpu_build",
    "name_of",
    "pinned_memory",
]

_logger = logging.getLogger("paddle_dist_ckpt")
_PAGE = 4096
_current_device = threading.RLock()


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


def device_of(tensor: Any) -> str | None:
    """The device that a tensor is on; None if the host can access its memory, or it has none."""
    try:
        return _device_at(tensor.place)
    except RuntimeError:
        return None


def devices_of(tensors: Sequence[Any]) -> list[str | None]:
    """The same of many. Where there are no devices they are not even looked at.

    Raises:
        RuntimeError: there are, and one has no memory.
    """
    if not has_devices():
        return [None] * len(tensors)
    places = list(map(operator.attrgetter("place"), tensors))
    if places and all(map(places[0]._equals, places)):  # mostly all are at one place
        return [_device_at(places[0])] * len(places)
    return list(map(_device_at, places))


def _device_at(place: Any) -> str | None:
    if place.is_cpu_place() or place.is_cuda_pinned_place() or getattr(place, "is_xpu_pinned_place", bool)():
        return None
    return name_of(place)


@cache
def has_kernels(device: str, dtype: Any, *names: str) -> bool:
    """Whether a device runs these operations itself for a type. Others Paddle runs on the host, and what they are given
    to fill may become a tensor there."""
    kind, type_name = device.partition(":")[0].lower(), str(dtype).rpartition(".")[2]
    return set(names) <= _kernels().get((kind, type_name), set())


@cache
def _kernels() -> dict[tuple[str, str], set[str]]:
    """The operations by the kind of device and the type of elements; Paddle lists "(GPU, Undefined(AnyLayout), bool)"
    and the like for each."""
    listed: dict[str, list[str]] = getattr(core, "_get_registered_phi_kernels", dict)()
    found: dict[tuple[str, str], set[str]] = {}
    for operation in ("concat", "split", "contiguous", "strided_copy"):
        for key in listed.get(operation, ()):
            kind, _, rest = key.strip("() ").partition(",")
            found.setdefault((kind.strip().lower(), rest.rpartition(",")[2].strip()), set()).add(operation)
    return found


@contextmanager
def at_device(device: str) -> Iterator[None]:
    """Make a device the current one. By two threads at once Paddle's own guard could leave a wrong one."""
    if name_of(_current_place()) == device:
        _make_current_in_cuda(device)
        yield
        return
    with _current_device:
        before = name_of(_current_place())  # now that no other thread has made another one current for a while
        try:
            with _place_guard(paddle.device._convert_to_place(device)):
                _make_current_in_cuda(device)
                yield
        finally:
            _make_current_in_cuda(before)


def _make_current_in_cuda(device: str) -> None:
    """CUDA has a current device for each thread besides Paddle's, 0 to begin with. Paddle's operations set it, but it
    makes events and pinned memory where it is: events of another device than a stream's cannot be recorded on that."""
    kind, _, number = device.partition(":")
    if kind == "gpu" and hasattr(core, "set_cuda_current_device_id"):
        core.set_cuda_current_device_id(int(number))


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


def host_tensor(data: npt.NDArray[Any]) -> Any:
    """Host memory as a tensor of the same type, without a copy. It must be writable."""
    return paddle.utils.dlpack.from_dlpack(data.__dlpack__())


def pinned_memory(nbytes: int) -> Bytes1D | None:
    """Pinned memory from the beginning of a page; None where this Paddle has none, or no more of it."""
    place = _pinned_place()
    if place is None or nbytes == 0:
        return None
    try:
        with at_device(name_of(_current_place())):  # what CUDA keeps for a device, it would make for device 0 as well
            owner, address = _allocate(place, nbytes + _PAGE)
    except (RuntimeError, MemoryError, OSError) as error:
        _logger.warning("%d bytes of pinned memory cannot be had, so other memory is used: %s", nbytes, error)
        return None
    return array_at(address + -address % _PAGE, (nbytes,), None, np.dtype(np.uint8), owner)


def _allocate(place: Any, nbytes: int) -> tuple[Any, int]:
    """Memory at a place: what owns it, and its address.

    Raises:
        MemoryError: Paddle has no more of it. For pinned memory of GPUs it raises nothing then: it gives address 0, and
            the process ends where it writes there, or gives that back.
    """
    if hasattr(core, "XPUPinnedPlace") and isinstance(place, core.XPUPinnedPlace):
        tensor = paddle.to_tensor(np.empty(nbytes, np.uint8), place=place)
        return tensor, int(tensor.data_ptr())
    owner = (core.DenseTensor if hasattr(core, "DenseTensor") else core.LoDTensor)()
    owner._set_dims([nbytes])
    address = int(owner._mutable_data(place, core.VarDesc.VarType.UINT8))
    if not address:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))  # so it is never given back
        raise MemoryError("Paddle has no more of it")
    return owner, address


def _pinned_place() -> Any:
    """The place of pinned memory, if this Paddle knows one."""
    if is_gpu_build():
        return paddle.CUDAPinnedPlace()
    if paddle.is_compiled_with_xpu() and hasattr(core, "XPUPinnedPlace"):
        return core.XPUPinnedPlace()
    return None
