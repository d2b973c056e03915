"""Arrays in a device's memory, of which the engine copies parts to the host and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .box import Box, cut_flat_range, whole
from .cached import cached_property
from .memory import Bytes1D, address_of, bytes_at

__all__ = [
    "ArrayForm",
    "Copies",
    "DeviceAccess",
    "DeviceArray",
    "Mark",
    "NoCopies",
    "Request",
    "Scattered",
    "contiguous_strides",
    "read_scattered",
    "write_all",
    "write_scattered",
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


Request = tuple[DeviceBytes, int, int, int]
"""A copy: the memory of a device, the byte there at which it starts, the address on the host, and how many bytes. It is
of whole items, and of what :meth:`DeviceBytes.strided` returned all of it."""


class Mark(Protocol):
    """A point in a queue of copies."""

    def wait(self) -> None:
        """Wait until all copies that were queued before it are done. Other threads run meanwhile."""
        ...


class Copies(Protocol):
    """A queue of copies between host memory and that of devices.

    They are made beside what a device computes, but after all that had been queued there when the first of them was,
    and after those of earlier calls. Small ones of one call may be made together. Host memory belongs to its copy until
    a mark behind that is reached; until then ``host``, which keeps it alive, is kept. Any thread may use it.
    """

    def read(self, requests: Sequence[Request], host: Any) -> None:
        """Copy from devices to the host."""
        ...

    def write(self, requests: Sequence[Request], host: Any) -> None:
        """Copy from the host to devices."""
        ...

    def mark(self) -> Mark:
        """The point behind all that was queued so far."""
        ...


class NoCopies:
    """The queue of copies where there is no device: nothing is ever put into it. Implements :class:`Copies`."""

    def read(self, requests: Sequence[Request], host: Any) -> None:
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

    def memories_of(self, tensors: Sequence[Any], numbers: Sequence[int]) -> Sequence[DeviceBytes]:
        """The memory of tensors on devices (of the ``owner`` of the view of each), from its first element to its last
        one. Tensors of one number are on the same device, and of the same type."""
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


class ArrayForm:
    """What an array in memory is like: many have the same.

    Args:
        shape: The array's shape.
        strides: Bytes from one element to the next, one a dimension, none negative; None if it is contiguous.
        dtype: Its type of raw items.
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int] | None, dtype: np.dtype[np.generic]) -> None:
        self.shape, self.dtype, self.itemsize = tuple(shape), dtype, int(dtype.itemsize)
        self.nbytes = math.prod(self.shape) * self.itemsize
        self._given_strides = strides

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next, one a dimension."""
        given = self._given_strides
        return contiguous_strides(self.shape, self.itemsize) if given is None else tuple(given)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the elements stand one behind the other."""
        if self._given_strides is None:
            return True
        expected = contiguous_strides(self.shape, self.itemsize)
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, expected, strict=True))


class DeviceArray:
    """An array in a device's memory, of which it begins at byte ``start``."""

    __slots__ = ("_memory", "_start", "form")

    def __init__(self, memory: DeviceBytes, start: int, form: ArrayForm) -> None:
        self._memory, self._start, self.form = memory, start, form

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.form.nbytes

    def part(self, box: Box) -> DeviceArray:
        """A box of it."""
        strides = self.form.strides
        start = self._start + sum(o * stride for o, stride in zip(box.offset, strides, strict=True))
        return DeviceArray(self._memory, start, ArrayForm(box.shape, strides, self.form.dtype))

    def add_pieces(
        self, start: int, stop: int, address: int, requests: list[Request], scattered: list[Scattered]
    ) -> None:
        """Find what has to be done to copy bytes ``start:stop``, of whole items in row-major order, to the host.

        Args:
            start: The first byte.
            stop: The one behind the last.
            address: Where they go.
            requests: Gets the copies that are needed.
            scattered: Gets parts that do not stand together on the device, to be read by :func:`read_scattered`.
        """
        if self.form.is_contiguous:
            if start < stop:
                requests.append((self._memory, self._start + start, address, stop - start))
            return
        size = self.form.itemsize
        for box in cut_flat_range(self.form.shape, start // size, stop // size):
            part = self.part(box)
            whole_part = part._requests(address)
            if whole_part is None:
                scattered.append((part, address))
            else:
                requests += whole_part
            address += part.nbytes

    def _requests(self, address: int) -> list[Request] | None:
        """The copies between all of it and contiguous host memory; None if the device cannot make it contiguous."""
        if self.form.is_contiguous:
            return [(self._memory, self._start, address, self.nbytes)]
        found = list[Request]()
        for part in self._parts(_STRIDED_BYTES):
            if part.form.is_contiguous:
                found.append((self._memory, part._start, address, part.nbytes))
            else:
                memory = self._memory.strided(part._start, part.form.shape, part.form.strides)
                if memory is None:
                    return None
                found.append((memory, 0, address, part.nbytes))
            address += part.nbytes
        return found

    def _parts(self, nbytes: int) -> Iterator[DeviceArray]:
        """It in boxes of so many bytes at most, but an element at least, in row-major order."""
        size, step = math.prod(self.form.shape), max(1, nbytes // self.form.itemsize)
        for start in range(0, size, step):
            yield from map(self.part, cut_flat_range(self.form.shape, start, min(start + step, size)))

    def read(self, start: int, stop: int, into: Bytes1D, copies: Copies) -> None:
        """Copy bytes ``start:stop`` to the beginning of ``into``; returns when they are there."""
        requests, scattered = list[Request](), list[Scattered]()
        self.add_pieces(start, stop, address_of(into), requests, scattered)
        copies.read(requests, into)
        copies.mark().wait()
        read_scattered(scattered, copies)

    def to_host(self, copies: Copies) -> npt.NDArray[Any]:
        """A copy in host memory."""
        data = np.empty(self.nbytes, np.uint8)
        self.read(0, self.nbytes, data, copies)
        return data.view(self.form.dtype).reshape(self.form.shape)

    def clear(self, copies: Copies) -> None:
        """Fill it with zeros; returns when that is done."""
        for part in self._parts(_SPAN_BYTES):
            zeros = np.zeros(part.nbytes, np.uint8)
            write_all([(part, address_of(zeros))], zeros, copies)
            copies.mark().wait()

    def _span(self, box: Box) -> int:
        """Bytes from the first element of a box to behind its last one."""
        return self.form.itemsize + sum(
            (n - 1) * stride for n, stride in zip(box.shape, self.form.strides, strict=True)
        )

    def _reachable(self, box: Box) -> Iterator[Box]:
        """A box in parts whose surroundings are small: cut where that makes them smallest."""
        if self._span(box) <= _SPAN_BYTES or box.size == 1:
            yield box
            return
        longest = max(range(len(box.shape)), key=lambda d: (box.shape[d] - 1) * self.form.strides[d])
        half = box.shape[longest] // 2
        for low, length in ((0, half), (half, box.shape[longest] - half)):
            offset, shape = list(box.offset), list(box.shape)
            offset[longest] += low
            shape[longest] = length
            yield from self._reachable(Box(tuple(offset), tuple(shape)))

    def _surroundings(self, copies: Copies) -> Iterator[tuple[Any, Request, npt.NDArray[Any]]]:
        """It in parts, each by way of a copy of the memory from its first element to its last one: where in the array
        the part is, the copy that was made, and the part in that copy, which keeps it alive."""
        for box in self._reachable(whole(self.form.shape)):
            around = np.empty(self._span(box), np.uint8)
            request = self._memory, self.part(box)._start, address_of(around), len(around)
            copies.read([request], around)
            copies.mark().wait()
            yield (*box.slices, ...), request, np.ndarray(box.shape, self.form.dtype, around.data, 0, self.form.strides)

    def _items_at(self, address: int) -> npt.NDArray[Any]:
        """Contiguous host memory as an array of the same shape; nothing keeps it alive."""
        return bytes_at(address, self.nbytes).view(self.form.dtype).reshape(self.form.shape)


Scattered = tuple[DeviceArray, int]
"""A part of an array that is not contiguous, and the address where it goes."""


def read_scattered(parts: Iterable[Scattered], copies: Copies) -> None:
    """Copy parts with what lies between their elements, and pick these; returns when they are where they go."""
    for part, address in parts:
        items = part._items_at(address)
        for index, _, view in part._surroundings(copies):
            items[index] = view


def write_all(pairs: Iterable[tuple[DeviceArray, int]], host: Any, copies: Copies) -> None:
    """Queue copies that fill arrays.

    Where one is not contiguous and the device cannot spread items, it is filled by way of a copy that has what lies
    between its elements, which must not be written meanwhile, and this waits.

    Args:
        pairs: Each array, and the address of its items in host memory, which must stay as they are until a mark behind
            the copies is reached.
        host: What keeps that memory alive.
        copies: The queue.
    """
    together, scattered = list[Request](), list[Scattered]()
    for array, address in pairs:
        form = array.form
        if form.is_contiguous:  # as nearly always, of very many
            together.append((array._memory, array._start, address, form.nbytes))
            continue
        requests = array._requests(address)
        if requests is None:
            scattered.append((array, address))
        else:
            together += requests
    copies.write(together, host)
    write_scattered(scattered, copies)


def write_scattered(parts: Iterable[Scattered], copies: Copies) -> None:
    """Fill parts by way of copies that have what lies between their elements, which must not be written meanwhile;
    returns when they are filled."""
    for part, address in parts:
        items = part._items_at(address)
        for index, request, view in part._surroundings(copies):
            view[...] = items[index]
            copies.write([request], view)
            copies.mark().wait()


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element to the next, one a dimension, of a contiguous array."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
