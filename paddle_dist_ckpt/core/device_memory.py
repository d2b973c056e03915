"""Arrays in a device's memory, of which the engine copies parts to the host and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .box import Box, cut_flat_range, flat_range, whole

__all__ = ["DeviceArray", "DeviceBytes"]

_SPAN_BYTES = 4 << 20  # of a part that is not contiguous, this much around it is copied at once

Bytes1D = npt.NDArray[np.uint8]


class DeviceBytes(Protocol):
    """A contiguous row of items in a device's memory, which starts at the address ``base`` there.

    Places and lengths are in bytes, and of whole items.
    """

    @property
    def base(self) -> int: ...

    def read(self, start: int, into: Bytes1D) -> None:
        """Copy from byte ``start`` on; returns when the data are there. All work queued before is done first."""
        ...

    def write(self, start: int, data: Bytes1D) -> None:
        """Copy to byte ``start`` on; returns when ``data`` is not needed any more."""
        ...


class DeviceArray:
    """A box of an array that lies contiguously in a device's memory.

    Args:
        memory: The memory.
        start: Where in it the array begins, in bytes.
        shape: The array's shape.
        dtype: Its type of raw items.
        box: Which part of the array it is; all of it by default.
    """

    __slots__ = ("_box", "_memory", "_outer", "_start", "dtype")

    def __init__(
        self,
        memory: DeviceBytes,
        start: int,
        shape: Sequence[int],
        dtype: np.dtype[np.generic],
        box: Box | None = None,
    ) -> None:
        self._memory, self._start, self._outer = memory, start, tuple(shape)
        self._box = whole(self._outer) if box is None else box
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._box.shape

    @property
    def itemsize(self) -> int:
        """Bytes of an item."""
        return int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self._box.size * self.itemsize

    def part(self, box: Box) -> DeviceArray:
        """A box of it, counted from its own corner."""
        moved = tuple(map(sum, zip(self._box.offset, box.offset, strict=True)))
        return DeviceArray(self._memory, self._start, self._outer, self.dtype, Box(moved, box.shape))

    def read(self, start: int, stop: int, into: Bytes1D) -> None:
        """Copy bytes ``start:stop``, of whole items in row-major order, to the beginning of ``into``."""
        size, at = self.itemsize, 0
        for box in cut_flat_range(self.shape, start // size, stop // size):
            moved = tuple(map(sum, zip(self._box.offset, box.offset, strict=True)))
            for inner in self._reachable(Box(moved, box.shape)):
                nbytes = inner.size * size
                self._read_box(inner, into[at : at + nbytes])
                at += nbytes

    def to_host(self) -> npt.NDArray[Any]:
        """A copy in host memory."""
        data = np.empty(self.nbytes, np.uint8)
        self.read(0, self.nbytes, data)
        return data.view(self.dtype).reshape(self.shape)

    def write(self, data: npt.NDArray[Any]) -> None:
        """Fill it. It must be contiguous."""
        flat = flat_range(self._box, self._outer)
        assert flat is not None
        self._memory.write(self._start + flat[0] * self.itemsize, data.reshape(-1).view(np.uint8))

    def clear(self) -> None:
        """Fill it with zeros."""
        flat = flat_range(self._box, self._outer)
        assert flat is not None
        zeros = np.zeros(min(self.nbytes, _SPAN_BYTES), np.uint8)
        for start in range(0, self.nbytes, _SPAN_BYTES):
            at = self._start + flat[0] * self.itemsize + start
            self._memory.write(at, zeros[: min(_SPAN_BYTES, self.nbytes - start)])

    def _strides(self) -> list[int]:
        """Items from one to the next in the array, one number a dimension."""
        return [math.prod(self._outer[d + 1 :]) for d in range(len(self._outer))]

    def _reachable(self, box: Box) -> Iterator[Box]:
        """A box of the array in parts, in order, that are contiguous or whose surroundings are small."""
        if flat_range(box, self._outer) is not None or self._span(box) * self.itemsize <= _SPAN_BYTES:
            yield box
            return
        first = next(d for d, n in enumerate(box.shape) if n > 1)
        half = box.shape[first] // 2
        for low, length in ((0, half), (half, box.shape[first] - half)):
            offset, shape = list(box.offset), list(box.shape)
            offset[first] += low
            shape[first] = length
            yield from self._reachable(Box(tuple(offset), tuple(shape)))

    def _span(self, box: Box) -> int:
        """Items from the first one of a box to its last one."""
        return 1 + sum((n - 1) * stride for n, stride in zip(box.shape, self._strides(), strict=True))

    def _read_box(self, box: Box, into: Bytes1D) -> None:
        strides, size = self._strides(), self.itemsize
        start = self._start + sum(o * stride for o, stride in zip(box.offset, strides, strict=True)) * size
        if flat_range(box, self._outer) is not None:
            self._memory.read(start, into)
            return
        around = np.empty(self._span(box) * size, np.uint8)
        self._memory.read(start, around)
        steps = [stride * size for stride in strides]
        part = np.ndarray(box.shape, self.dtype, around.data, 0, steps)
        into.view(self.dtype).reshape(box.shape)[...] = part
