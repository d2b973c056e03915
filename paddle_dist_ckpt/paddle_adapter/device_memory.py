"""The memory of tensors on a device, as views of them: such a view needs no kernel, and Paddle copies into and from it
without any other memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import paddle

from ..core.device_memory import ArrayForm, DeviceArray
from ..core.memory import Bytes1D, address_of
from ..errors import UnsupportedValueError
from .device import at_device, has_kernels, host_tensor, name_of
from .device_streams import current_stream

__all__ = ["MemoryKind", "StridedBytes", "TensorBytes", "memories_of", "strided_writer"]

# Paddle 3.0.0 ends the process where a tensor is viewed as one of wider items.
_AS_WIDE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}
_view_shape = getattr(paddle._C_ops, "view_shape", paddle.Tensor.view)  # what Tensor.view calls, without its questions


@cache
def strided_writer(device: str) -> Callable[[Any, Any], object] | None:
    """What writes a tensor of a device to one whose items do not stand together; None if nothing does.

    It is tried out: before 3.2, Paddle's ``copy_`` writes them as if they stood together, over what is between them.
    """
    with current_stream, at_device(device), paddle.no_grad():
        for write in (lambda target, source: target.copy_(source, False), _assign):
            memory = paddle.zeros([3, 2])
            write(paddle.as_strided(memory.detach(), [3], [2]), paddle.ones([3]))
            if memory.tolist() == [[1, 0]] * 3:
                return write
    return None


def _assign(target: Any, source: Any) -> None:
    paddle._C_ops.assign_out_(source, target)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryKind:
    """What items of a device's memory have in common that can be copied together: where they are, and their type."""

    device: str
    dtype: Any
    itemsize: int

    def on_host(self, data: Bytes1D) -> Any:
        """Host memory as a tensor of this type, without a copy. It must be writable.

        Raises:
            UnsupportedValueError: this Paddle makes a copy.
        """
        tensor = host_tensor(data.view(_AS_WIDE[self.itemsize])).view(self.dtype)
        if tensor.data_ptr() != address_of(data):
            raise UnsupportedValueError(
                "tensors on a device need Paddle 3.0 or newer: this one copies host memory where it should use it"
            )
        return tensor


_kinds: dict[tuple[str, str], MemoryKind] = {}


def memories_of(tensors: Sequence[Any], numbers: Sequence[int]) -> list[TensorBytes]:
    """The memory of plain tensors. Those of one number are of the same kind, which is found once: it takes long."""
    kinds = {number: _kind_of(tensor) for number, tensor in dict(zip(numbers, tensors, strict=True)).items()}
    bases = [int(tensor.data_ptr()) for tensor in tensors]
    return list(map(TensorBytes, tensors, map(kinds.__getitem__, numbers), bases))


def _kind_of(tensor: Any) -> MemoryKind:
    """The same object for all tensors of a kind."""
    device, dtype = name_of(tensor.place), tensor.dtype
    return _kinds.setdefault((device, str(dtype)), MemoryKind(device, dtype, int(tensor.element_size())))


class TensorBytes:
    """The memory of a plain tensor, from its first element to its last one.

    Implements :class:`..core.device_memory.DeviceBytes`.

    Args:
        tensor: The tensor; its strides are not negative.
        kind: Where it is, and its type.
        base: Its address there.
    """

    __slots__ = ("_all_items", "base", "kind", "tensor")

    def __init__(self, tensor: Any, kind: MemoryKind, base: int) -> None:
        self.base, self.kind, self.tensor = base, kind, tensor
        self._all_items: Any = None

    @staticmethod
    def of(tensor: Any) -> TensorBytes:
        """The memory of one tensor."""
        return TensorBytes(tensor, _kind_of(tensor), int(tensor.data_ptr()))

    @property
    def _items(self) -> Any:
        if self._all_items is None:
            self._all_items = self._flat()
        return self._all_items

    def _flat(self) -> Any:
        """All of it as a tensor of one dimension. Not as bytes: of a view that does not start where its memory does,
        Paddle errs there."""
        tensor = self.tensor
        with paddle.no_grad(), at_device(self.kind.device):
            if not tensor.is_contiguous():
                span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
                return paddle.as_strided(tensor.detach(), [span], [1], tensor.offset)
            return tensor.detach().view([-1]) if tensor.shape else tensor.detach().unsqueeze(0)

    def part(self, start: int, nbytes: int) -> Any:
        """The items in these bytes, as a tensor over the same memory, of one dimension."""
        size = self.kind.itemsize
        with at_device(self.kind.device):  # where another device is the current one, this would be a copy there
            return self._items._slice(start // size, (start + nbytes) // size)

    def small_part(self, start: int, nbytes: int) -> Any:
        """The same, made faster if it is all of it. Gradients must be off, and the device the current one."""
        shape = self.tensor.shape
        if shape and self.is_all(start, nbytes, shape):
            return _view_shape(self.tensor, [nbytes // self.kind.itemsize])
        return self.part(start, nbytes)

    def to_fill(self, start: int, nbytes: int) -> Any:
        """A tensor over the memory of these bytes, and maybe what follows them, for an operation that fills them, and
        gives it a shape of its own.

        Never the tensor itself, which Paddle may move elsewhere then. No kernel is run for this.
        """
        return self.part(start, nbytes) if start or not self.tensor.is_contiguous() else self.tensor.detach()

    def is_all(self, start: int, nbytes: int, shape: Sequence[int]) -> bool:
        """Whether these bytes are all of it, one item behind the other. ``shape`` is the tensor's."""
        return not start and math.prod(shape) * self.kind.itemsize == nbytes and self.tensor.is_contiguous()

    def strided(self, start: int, shape: Sequence[int], strides: Sequence[int]) -> StridedBytes | None:
        """See :class:`..core.device_memory.DeviceBytes`."""
        device = self.kind.device
        try:
            if not has_kernels(device, self.kind.dtype, "contiguous", "strided_copy") or strided_writer(device) is None:
                return None
        except (RuntimeError, MemoryError, OSError):  # there is no room to try it out now
            return None
        steps = [stride // self.kind.itemsize for stride in strides]
        return StridedBytes(self, start, shape, steps)

    def alike(self, data: Bytes1D) -> Any:
        """Host memory as a tensor of the same type, without a copy. It must be writable."""
        return self.kind.on_host(data)


class StridedBytes:
    """Items of a tensor that do not stand together; see :meth:`..core.device_memory.DeviceBytes.strided`.

    Args:
        memory: That of the tensor.
        start: The byte there at which the first of them starts.
        shape: How many there are.
        steps: Items from one to the next, one a dimension.
    """

    def __init__(self, memory: TensorBytes, start: int, shape: Sequence[int], steps: Sequence[int]) -> None:
        self.kind, self.base = memory.kind, memory.base + start
        self._memory, self._start, self._shape, self._steps = memory, start, list(shape), list(steps)

    def view(self) -> Any:
        """They as a tensor, over the tensor's own memory. A new one: Paddle's ``contiguous`` moves it elsewhere."""
        tensor = self._memory.tensor.detach()
        return paddle.as_strided(tensor, self._shape, self._steps, tensor.offset + self._start)

    def scattered(self) -> DeviceArray:
        """They as an array for which the device needs no other memory."""
        item = np.dtype(_AS_WIDE[self.kind.itemsize])
        strides = [step * item.itemsize for step in self._steps]
        return DeviceArray(self._memory, self._start, ArrayForm(self._shape, strides, item))

    def write(self, source: Any) -> None:
        """Fill them from a contiguous tensor on the device, of the same shape."""
        writer = strided_writer(self.kind.device)
        assert writer is not None, "there are strided items where they can be written"
        writer(self.view(), source)

    def strided(self, start: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        """See :class:`..core.device_memory.DeviceBytes`; it is not memory that has parts."""
        raise NotImplementedError

    def alike(self, data: Bytes1D) -> Any:
        """Contiguous host memory as a tensor of the same type and shape, without a copy. It must be writable."""
        return self.kind.on_host(data).reshape(self._shape)
