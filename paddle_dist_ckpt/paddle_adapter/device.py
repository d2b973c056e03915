"""Tensors in a device's memory, whatever device Paddle drives: copies of parts of them to the host and back.

A part of a contiguous tensor is a view of it, which needs no kernel, and Paddle copies a view into host memory
that is given, without any other memory. Such a copy waits for what was queued on the device's stream, and lets other
threads run meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

__all__ = ["TensorBytes", "has_devices", "host_tensor", "is_on_device"]

Bytes1D = npt.NDArray[np.uint8]


def has_devices() -> bool:
    """Whether this Paddle can have tensors elsewhere than in host memory."""
    builds = ("is_compiled_with_cuda", "is_compiled_with_rocm", "is_compiled_with_xpu", "is_compiled_with_ipu")
    if any(getattr(paddle, name)() for name in builds if hasattr(paddle, name)):
        return True
    custom = getattr(paddle.device, "get_all_custom_device_type", None)
    return bool(custom()) if custom is not None else True


def is_on_device(tensor: Any) -> bool:
    """Whether the host cannot access a tensor's memory. One without memory is nowhere."""
    if not tensor._is_initialized():
        return False
    place = tensor.place
    return not (place.is_cpu_place() or place.is_cuda_pinned_place())


class TensorBytes:
    """The memory of a contiguous plain tensor. Implements :class:`..core.device_memory.DeviceBytes`.

    Args:
        tensor: The tensor.
    """

    def __init__(self, tensor: Any) -> None:
        self.base = int(tensor.data_ptr())
        self._itemsize, self._dtype = int(tensor.element_size()), tensor.dtype
        with paddle.no_grad():  # not as bytes: of a view that does not start where its memory does, Paddle errs there
            self._items = tensor.detach().view([-1]) if tensor.shape else tensor.detach().unsqueeze(0)

    def read(self, start: int, into: Bytes1D) -> None:
        """See :class:`..core.device_memory.DeviceBytes`."""
        with paddle.no_grad():
            host_tensor(into).view(self._dtype).copy_(self._part(start, len(into)), True)

    def write(self, start: int, data: Bytes1D) -> None:
        """See :class:`..core.device_memory.DeviceBytes`."""
        with paddle.no_grad():
            self._part(start, len(data)).copy_(host_tensor(data).view(self._dtype), True)

    def _part(self, start: int, nbytes: int) -> Any:
        return self._items._slice(start // self._itemsize, (start + nbytes) // self._itemsize)


def host_tensor(data: Bytes1D) -> Any:
    """Host memory as a tensor, without a copy. It must be writable."""
    return paddle.utils.dlpack.from_dlpack(data.__dlpack__())
