"""Arrays in a device's memory, of which the engine copies parts to the host and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .box import Box, cut_flat_range, whole
from .memory import Bytes1D

__all__ = [
    "Copies",
    "DeviceAccess",
    "DeviceArray",
    "Mark",
    "NoCopies",
    "Request",
    "Scattered",
    "contiguous_strides",
    "write_all",
]

_SPAN_BYTES = 4 << 20  # of a part that a device cannot make contiguous, this much around it is copied at once
_STRIDED_BYTES = 2 << 20  # of others it makes so much contiguous at a time


class DeviceBytes(Protocol):
    """A row of items in a device's memory, which starts at the address ``base`` there."""

    @property
    def base(self) -> int: ...

    def strided(self, start: int, shape: Sequence[int], strides: Sequence[int]) -> DeviceBytes | None:
        """Items that do not stand together, as a row of memory that exists while it is copied only: the device makes it
        of them, or spreads it over them. None if it cannot.

        Args:
            start: The byte at which the first of them starts.
            shape: How many there are.
            strides: Bytes from one to the next, one a dimension.
        """
        ...


Request = tuple[DeviceBytes, int, Bytes1D]
"""A copy: the memory of a device, the byte there at which it starts, and the bytes on the host. All of whole items, and
of what :meth:`DeviceBytes.strided` returned all of it."""


class Mark(Protocol):
    """A point in a queue of copies."""

    def wait(self) -> None:
        """Wait until all copies that were queued before it are done. Other threads run meanwhile."""
        ...


class Copies(Protocol):
    """A queue of copies between host memory and that of devices.

    They are made beside what a device computes, but after all that had been queued there when the first of them was,
    and after those of earlier calls. Small ones of one call may be made together. Host memory belongs to its copy until
    a mark behind that is reached. Any thread may use it.
    """

    def read(self, requests: Sequence[Request]) -> None:
        """Copy from devices to the host."""
        ...

    def write(self, requests: Sequence[Request]) -> None:
        """Copy from the host to devices."""
        ...

    def mark(self) -> Mark:
        """The point behind all that was queued so far."""
        ...


class NoCopies:
    """The queue of copies where there is no device: nothing is ever put into it. Implements :class:`Copies`."""

    def read(self, requests: Sequence[Request]) -> None:
        """See :class:`Copies`."""
        assert not requests, "there is no device"

    write = read

    def mark(self) -> NoCopies:
        """See :class:`Copies`."""
        return self

    def wait(self) -> None:
        """See :class:`Mark`."""


class DeviceAccess(Protocol):
    """Reaches the memory of the devices that a framework drives."""

    def memory_of(self, tensor: Any) -> DeviceBytes:
        """The memory of a tensor on a device (of the ``owner`` of its view), from its first element to its last one."""
        ...

    def copies(self) -> Copies:
        """A new queue of copies between host memory and that of devices."""
        ...

    def host_memory(self, nbytes: int) -> Bytes1D:
        """Host memory that copies from and to devices are fast with; its content is arbitrary. It starts at a page.

        Raises:
            MemoryError: there is not so much.
        """
        ...


class DeviceArray:
    """An array in a device's memory.

    Args:
        memory: The memory.
        start: Where in it the array begins, in bytes.
        shape: The array's shape.
        strides: Bytes from one element to the next, one a dimension, none negative; None if it is contiguous.
        dtype: Its type of raw items.
    """

    __slots__ = ("_given_strides", "_is_contiguous", "_memory", "_start", "dtype", "shape")

    def __init__(
        self,
        memory: DeviceBytes,
        start: int,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        dtype: np.dtype[np.generic],
    ) -> None:
        self._memory, self._start, self.shape, self.dtype = memory, start, tuple(shape), dtype
        self._is_contiguous = True if strides is None else None
        self._given_strides = None if strides is None else tuple(strides)

    @property
    def _strides(self) -> tuple[int, ...]:
        if self._given_strides is None:
            self._given_strides = contiguous_strides(self.shape, self.itemsize)
        return self._given_strides

    @property
    def itemsize(self) -> int:
        """Bytes of an item."""
        return int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return whole(self.shape).size * self.itemsize

    def part(self, box: Box) -> DeviceArray:
        """A box of it."""
        start = self._start + sum(o * stride for o, stride in zip(box.offset, self._strides, strict=True))
        return DeviceArray(self._memory, start, box.shape, self._strides, self.dtype)

    def pieces(self, start: int, stop: int, into: Bytes1D) -> tuple[list[Request], list[Scattered]]:
        """What has to be done to copy bytes ``start:stop``, of whole items in row-major order, to the host.

        Args:
            start: The first byte.
            stop: The one behind the last.
            into: The bytes go to its beginning.

        Returns:
            The copies that are needed; and parts that do not stand together on the device, each with where it goes, to
            be read by :meth:`read_scattered`.
        """
        if self.is_contiguous():
            return [(self._memory, self._start + start, into[: stop - start])] if start < stop else [], []
        size, at = self.itemsize, 0
        requests, scattered = list[Request](), list[Scattered]()
        for box in cut_flat_range(self.shape, start // size, stop // size):
            part = self.part(box)
            piece = into[at : at + part.nbytes]
            whole_part = part._requests(piece)
            if whole_part is None:
                scattered.append((part, piece))
            else:
                requests += whole_part
            at += part.nbytes
        return requests, scattered

    def _requests(self, data: Bytes1D) -> list[Request] | None:
        """The copies between all of it and contiguous host memory; None if the device cannot make it contiguous."""
        if self.is_contiguous():
            return [(self._memory, self._start, data)]
        size, at, found = self.itemsize, 0, list[Request]()
        rows = max(1, _STRIDED_BYTES // size)
        for start in range(0, whole(self.shape).size, rows):
            for box in cut_flat_range(self.shape, start, min(start + rows, whole(self.shape).size)):
                part = self.part(box)
                piece = data[at : at + part.nbytes]
                at += part.nbytes
                if part.is_contiguous():
                    found.append((self._memory, part._start, piece))
                    continue
                memory = self._memory.strided(part._start, part.shape, part._strides)
                if memory is None:
                    return None
                found.append((memory, 0, piece))
        return found

    def read(self, start: int, stop: int, into: Bytes1D, copies: Copies) -> None:
        """Copy bytes ``start:stop`` to the beginning of ``into``; returns when they are there."""
        requests, scattered = self.pieces(start, stop, into)
        copies.read(requests)
        copies.mark().wait()
        for part, piece in scattered:
            part.read_scattered(piece, copies)

    def to_host(self, copies: Copies) -> npt.NDArray[Any]:
        """A copy in host memory."""
        data = np.empty(self.nbytes, np.uint8)
        self.read(0, self.nbytes, data, copies)
        return data.view(self.dtype).reshape(self.shape)

    def clear(self, copies: Copies) -> None:
        """Fill it with zeros; returns when that is done."""
        rows = max(1, _SPAN_BYTES // max(1, self.itemsize))
        size = whole(self.shape).size
        for start in range(0, size, rows):
            for box in cut_flat_range(self.shape, start, min(start + rows, size)):
                write_all([(self.part(box), np.zeros(box.size * self.itemsize, np.uint8))], copies)
            copies.mark().wait()

    def is_contiguous(self) -> bool:
        """Whether its elements stand one behind the other."""
        if self._is_contiguous is None:
            expected = contiguous_strides(self.shape, self.itemsize)
            columns = zip(self.shape, self._strides, expected, strict=True)
            self._is_contiguous = all(n == 1 or a == b for n, a, b in columns)
        return self._is_contiguous

    def _span(self, box: Box) -> int:
        """Bytes from the first element of a box to behind its last one."""
        return self.itemsize + sum((n - 1) * stride for n, stride in zip(box.shape, self._strides, strict=True))

    def _reachable(self, box: Box) -> Iterator[Box]:
        """A box in parts whose surroundings are small: cut where that makes them smallest."""
        if self._span(box) <= _SPAN_BYTES or box.size == 1:
            yield box
            return
        longest = max(range(len(box.shape)), key=lambda d: (box.shape[d] - 1) * self._strides[d])
        half = box.shape[longest] // 2
        for low, length in ((0, half), (half, box.shape[longest] - half)):
            offset, shape = list(box.offset), list(box.shape)
            offset[longest] += low
            shape[longest] = length
            yield from self._reachable(Box(tuple(offset), tuple(shape)))

    def _surroundings(self, copies: Copies) -> Iterator[tuple[Any, Request, npt.NDArray[Any]]]:
        """It in parts, each by way of a copy of the memory from its first element to its last one: where in the array
        the part is, the copy that was made, and the part in that copy."""
        for box in self._reachable(whole(self.shape)):
            around = np.empty(self._span(box), np.uint8)
            request = self._memory, self.part(box)._start, around
            copies.read([request])
            copies.mark().wait()
            yield (*box.slices, ...), request, np.ndarray(box.shape, self.dtype, around.data, 0, self._strides)

    def read_scattered(self, into: Bytes1D, copies: Copies) -> None:
        """Copy all of it, with what lies between its elements, and pick them; returns when they are in ``into``."""
        items = into.view(self.dtype).reshape(self.shape)
        for index, _, view in self._surroundings(copies):
            items[index] = view


Scattered = tuple[DeviceArray, Bytes1D]
"""A part of an array that is not contiguous, and where it goes."""


def write_all(pairs: Iterable[tuple[DeviceArray, Bytes1D]], copies: Copies) -> None:
    """Queue copies that fill arrays.

    Where one is not contiguous and the device cannot spread items, it is filled by way of a copy that has what lies
    between its elements, which must not be written meanwhile, and this waits.

    Args:
        pairs: Each array, and the bytes of its items in host memory, which must stay as they are until a mark behind
            the copies is reached.
        copies: The queue.
    """
    together, scattered = list[Request](), []
    for array, data in pairs:
        requests = array._requests(data)
        if requests is None:
            scattered.append((array, data))
        else:
            together += requests
    copies.write(together)
    for array, data in scattered:
        for index, request, view in array._surroundings(copies):
            view[...] = data.view(array.dtype).reshape(array.shape)[index]
            copies.write([request])
            copies.mark().wait()


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element to the next, one a dimension, of a contiguous array."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
