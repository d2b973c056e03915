"""The memory of tensors on a device, as views of them: such a view needs no kernel, and Paddle copies into and from it
without any other memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import paddle

from ..core.memory import Bytes1D
from .device import at_device, has_kernels, host_tensor, name_of

__all__ = ["StridedBytes", "TensorBytes"]

_view_shape = getattr(paddle._C_ops, "view_shape", paddle.Tensor.view)  # what Tensor.view calls, without its questions
_names: dict[str, str] = {}  # of devices, as name_of says them, by how Paddle writes them


class TensorBytes:
    """The memory of a plain tensor, from its first element to its last one.

    Implements :class:`..core.device_memory.DeviceBytes`.

    Args:
        tensor: The tensor; its strides are not negative.
    """

    def __init__(self, tensor: Any) -> None:
        self.base = int(tensor.data_ptr())
        place = tensor._place_str  # which is to be had faster
        self.device = _names.get(place) or _names.setdefault(place, name_of(tensor.place))
        self.tensor, self.dtype, self._itemsize = tensor, tensor.dtype, int(tensor.element_size())

    @cached_property
    def _items(self) -> Any:
        """All of it as a tensor of one dimension. Not as bytes: of a view that does not start where its memory does,
        Paddle errs there."""
        tensor = self.tensor
        with paddle.no_grad(), at_device(self.device):
            if not tensor.is_contiguous():
                span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
                return paddle.as_strided(tensor.detach(), [span], [1], tensor.offset)
            return tensor.detach().view([-1]) if tensor.shape else tensor.detach().unsqueeze(0)

    def part(self, start: int, nbytes: int) -> Any:
        """The items in these bytes, as a tensor over the same memory, of one dimension."""
        with at_device(self.device):  # where another device is the current one, this would be a copy there
            return self._items._slice(start // self._itemsize, (start + nbytes) // self._itemsize)

    def small_part(self, start: int, nbytes: int, view: bool) -> Any:
        """The same, made faster if it is all of it; then maybe the tensor itself, unless it has to be a view. Gradients
        must be off, and the device the current one."""
        tensor, count = self.tensor, nbytes // self._itemsize
        shape = tensor.shape
        if start or not shape or math.prod(shape) != count or not tensor.is_contiguous():
            return self.part(start, nbytes)
        return tensor if len(shape) == 1 and not view else _view_shape(tensor, [count])

    def strided(self, start: int, shape: Sequence[int], strides: Sequence[int]) -> StridedBytes | None:
        """See :class:`..core.device_memory.DeviceBytes`."""
        if not has_kernels(self.device, self.dtype, "contiguous", "strided_copy"):
            return None
        steps = [stride // self._itemsize for stride in strides]
        return StridedBytes(self, start, shape, steps)

    def alike(self, data: Bytes1D) -> Any:
        """Host memory as a tensor of the same type, without a copy. It must be writable."""
        return host_tensor(data).view(self.dtype)


class StridedBytes:
    """Items of a tensor that do not stand together; see :meth:`..core.device_memory.DeviceBytes.strided`.

    Args:
        memory: That of the tensor.
        start: The byte there at which the first of them starts.
        shape: How many there are.
        steps: Items from one to the next, one a dimension.
    """

    def __init__(self, memory: TensorBytes, start: int, shape: Sequence[int], steps: Sequence[int]) -> None:
        self.device, self.base, self.dtype = memory.device, memory.base + start, memory.dtype
        self._memory, self._start, self._shape, self._steps = memory, start, list(shape), list(steps)

    def view(self) -> Any:
        """They as a tensor, over the tensor's own memory. A new one: Paddle's ``contiguous`` moves it elsewhere."""
        tensor = self._memory.tensor.detach()
        return paddle.as_strided(tensor, self._shape, self._steps, tensor.offset + self._start)

    def strided(self, start: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        """See :class:`..core.device_memory.DeviceBytes`; it is not memory that has parts."""
        raise NotImplementedError

    def alike(self, data: Bytes1D) -> Any:
        """Contiguous host memory as a tensor of the same type and shape, without a copy. It must be writable."""
        return host_tensor(data).view(self.dtype).reshape(self._shape)
