"""The bytes that a data file gets, a window at a time: from the tensors themselves, or from a copy made earlier.

Windows start at multiples of a page, which lets a storage bypass the page cache. What is in them is hashed on its way,
while it is in the processor's cache. What comes from a device is copied ahead: while some windows are hashed and
written, the next ones are on their way.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..core.buffers import Buffers
from ..core.columns import IntArray, Mask
from ..core.device_memory import Copies, DeviceArray, Mark, NoCopies, Request, Scattered, read_scattered
from ..core.memory import Bytes1D, address_of, copy_bytes, copy_various, gather
from .block_hashes import BlockHashes
from .datafile import FileTable

__all__ = ["AHEAD", "WINDOW_BYTES", "Contents", "SnapshotContents", "Source", "TensorContents", "Window"]

WINDOW_BYTES = 2 << 20
AHEAD = 2  # windows that are copied from a device while others are hashed and written
_SMALL = 4096  # entries of at most so many bytes, as the smallest block has, are one block each and need less care
_NOWHERE = -1  # stands for the address of what has none
_NO_ENTRIES = np.zeros(0, np.int64)
_SNAPSHOT_WINDOW_BYTES = 4 * WINDOW_BYTES  # needs no memory, and interrupts training less often

Source = int | npt.NDArray[Any] | DeviceArray
"""Where an entry's bytes are: the address of contiguous host memory, or an array of raw items."""


Window = AbstractContextManager[tuple[int, Bytes1D]]
"""Bytes of a file's data section: which is the first, and the bytes. Inside the context they are there, and hashed."""


class Contents(Protocol):
    """The data section of a file."""

    def windows(self, span: range, hashes: BlockHashes) -> Generator[Window, None, None]:
        """See :meth:`TensorContents.windows`."""
        ...


@dataclass(slots=True, eq=False)
class _Filling:
    """A window that is being filled: copies from devices are under way, and what lies scattered there is still left."""

    start: int
    stop: int
    buffer: Bytes1D
    mark: Mark | None = None
    scattered: list[Scattered] = field(default_factory=list)


class TensorContents:
    """Contents that are gathered from the tensors' memory, which must stay alive and as it is.

    Args:
        table: The file's entries.
        sources: Where the bytes of each are.
        buffers: For the windows: one for each thread that enters any, and ``AHEAD`` more if sources are on a device.
        copies: Brings bytes from devices; None if no source is on one.
    """

    window_bytes = WINDOW_BYTES

    def __init__(self, table: FileTable, sources: Sequence[Source], buffers: Buffers, copies: Copies | None) -> None:
        self._table, self._sources, self._buffers = table, sources, buffers
        self._copies, self._ahead = (copies, AHEAD) if copies is not None else (NoCopies(), 0)
        self._addresses = np.array([source if type(source) is int else _NOWHERE for source in sources], np.int64)
        # Which entries are small and can be copied together, or have come from a device before their window is entered.
        self._small = _are_small(table)
        for i in np.flatnonzero(self._small & (self._addresses == _NOWHERE)).tolist():
            self._small[i] = isinstance(sources[i], DeviceArray)

    def windows(self, span: range, hashes: BlockHashes) -> Generator[Window, None, None]:
        """A part of the data section in windows, each of which must be entered, once, by whatever thread.

        Args:
            span: Which bytes; it starts at a multiple of ``WINDOW_BYTES`` and ends at one or at the end.
            hashes: Where the bytes are hashed.
        """
        begun: deque[_Filling] = deque()
        try:
            for start in range(span.start, span.stop, self.window_bytes):
                stop = min(start + self.window_bytes, span.stop)
                begun.append(_Filling(start, stop, self._buffers.take(stop - start)))
                begun[-1].scattered = self._queue(start, stop, begun[-1].buffer)
                begun[-1].mark = self._copies.mark()
                if len(begun) > self._ahead:
                    yield self._filled(begun.popleft(), hashes)
            while begun:
                yield self._filled(begun.popleft(), hashes)
        finally:
            for filling in begun:  # nobody will enter them, but their memory must not be used while it is being filled
                self._give_back(filling)

    def _queue(self, start: int, stop: int, buffer: Bytes1D) -> list[Scattered]:
        """Queue the copies from devices of bytes ``start:stop`` to a buffer; returns what lies scattered there."""
        requests, scattered = list[Request](), list[Scattered]()
        base = address_of(buffer) - start
        for i, at, first, last in _parts_of(self._table, start, stop) if self._ahead else ():
            source = self._sources[i]
            if isinstance(source, DeviceArray):
                source.add_pieces(first - at, last - at, base + first, requests, scattered)
        self._copies.read(requests, buffer)
        return scattered

    def _give_back(self, filling: _Filling) -> None:
        try:
            (filling.mark or self._copies.mark()).wait()
        finally:
            self._buffers.give_back(filling.buffer)

    @contextmanager
    def _filled(self, filling: _Filling, hashes: BlockHashes) -> Iterator[tuple[int, Bytes1D]]:
        try:
            if filling.mark is not None:
                filling.mark.wait()
            read_scattered(filling.scattered, self._copies)
            start, window = filling.start, filling.buffer[: filling.stop - filling.start]
            base, view = address_of(window) - start, window.data
            small = self._copy_small(start, filling.stop, base)
            for i, at, first, last in _parts_of(self._table, start, filling.stop, left_out=small):
                part = view[first - start : last - start]
                self._fill(i, first - at, last - at, base + first, part)
                hashes.add(i, first - at, part)
            hashes.add_small(small, view, start)
            yield start, window
        finally:
            self._give_back(filling)

    def _copy_small(self, start: int, stop: int, base: int) -> IntArray:
        """Copy what is small, and lies in bytes ``start:stop`` as a whole, to its place behind an address.

        Returns:
            Which entries these are, and those of them that have come from a device.
        """
        small = _within(self._table, self._small, start, stop)
        on_host = small[self._addresses[small] != _NOWHERE]
        copy_various(self._table.starts[on_host] + base, self._addresses[on_host], self._table.sizes[on_host])
        return small

    def _fill(self, i: int, low: int, high: int, address: int, part: memoryview) -> None:
        """Copy bytes ``low:high`` of an entry to their place in a window, unless they have come from a device."""
        source = self._sources[i]
        if isinstance(source, int):
            copy_bytes(address, source + low, high - low)
        elif not isinstance(source, DeviceArray):
            gather(source, low, high, np.frombuffer(part, np.uint8))

    def copy_to(self, memory: Bytes1D, start: int) -> None:
        """Copy the data section from byte ``start`` on to ``memory``, as much as that takes, and hash nothing."""
        stop = min(start + len(memory), self._table.nbytes)
        scattered: list[Scattered] = []
        try:
            scattered = self._queue(start, stop, memory)
            base, view = address_of(memory) - start, memory.data
            small = self._copy_small(start, stop, base)
            for i, at, first, last in _parts_of(self._table, start, stop, left_out=small):
                self._fill(i, first - at, last - at, base + first, view[first - start : last - start])
        finally:
            self._copies.mark().wait()
        read_scattered(scattered, self._copies)


class SnapshotContents:
    """Contents that were copied before.

    Args:
        table: The file's entries.
        memory: The data section from byte ``start`` on; it begins at a page.
        start: A multiple of ``WINDOW_BYTES``.
    """

    window_bytes = _SNAPSHOT_WINDOW_BYTES

    def __init__(self, table: FileTable, memory: Bytes1D, start: int) -> None:
        self._table, self._memory, self._start = table, memory, start
        self._small = _are_small(table)

    def windows(self, span: range, hashes: BlockHashes) -> Generator[Window, None, None]:
        """See :meth:`TensorContents.windows`."""
        for start in range(span.start, span.stop, self.window_bytes):
            stop = min(start + self.window_bytes, span.stop)
            yield self._hashed(start, stop, hashes)

    @contextmanager
    def _hashed(self, start: int, stop: int, hashes: BlockHashes) -> Iterator[tuple[int, Bytes1D]]:
        window = self._memory[start - self._start : stop - self._start]
        view = window.data
        small = _within(self._table, self._small, start, stop)
        for i, at, first, last in _parts_of(self._table, start, stop, left_out=small):
            hashes.add(i, first - at, view[first - start : last - start])
        hashes.add_small(small, view, start)
        yield start, window


def _are_small(table: FileTable) -> Mask:
    """Which entries are, and have any bytes."""
    return (table.sizes > 0) & (table.sizes <= _SMALL)


def _within(table: FileTable, those: Mask, start: int, stop: int) -> IntArray:
    """Which of those entries lie in bytes ``start:stop`` of the data section as a whole."""
    first, last = np.searchsorted(table.starts, start), np.searchsorted(table.starts, stop, "right") - 1
    return first + np.flatnonzero(those[first:last])


def _parts_of(
    table: FileTable, start: int, stop: int, left_out: IntArray = _NO_ENTRIES
) -> Iterator[tuple[int, int, int, int]]:
    """What is in bytes ``start:stop`` of the data section, but for some entries that have a part there.

    Yields:
        The entry, where it starts, and where its part starts and ends, all in the data section.
    """
    offsets = table.offsets
    first, last = bisect.bisect_right(offsets, start) - 1, bisect.bisect_left(offsets, stop)
    for i in np.delete(np.arange(first, last), left_out - first).tolist():
        low, high = max(start, offsets[i]), min(stop, offsets[i + 1])
        if low < high:
            yield i, offsets[i], low, high
