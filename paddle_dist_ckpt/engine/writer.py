"""Writes data files: windows of the file are filled, hashed and written; then the header, then fsync.

Windows start at multiples of a page, which lets a storage bypass the page cache. A checkpoint is written once and read
much later, if ever, so the cache is of no use to it; and filling fresh pages of it is slower than most disks.

What is in the windows comes from the tensors themselves (:class:`Tensors`) or from a copy of the file's data section
that was made earlier (:class:`Snapshot`), which needs no further copy on its way to the disk.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ..core.memory import address_of, bytes_at, copy_bytes
from ..core.metadata import FileInfo
from ..core.ports import Bytes1D
from ..formats.datafile import FileLayout, FileTable, header_digest
from ..storage.base import Storage
from .buffers import Buffers
from .gather import gather
from .part import Source
from .threads import run_all

__all__ = ["WINDOW_BYTES", "DataFileWriter", "Snapshot", "Tensors"]

WINDOW_BYTES = 2 << 20
_SNAPSHOT_WINDOW_BYTES = 4 * WINDOW_BYTES  # needs no memory, and interrupts training less often


class Contents(Protocol):
    """The data section of a file, a window at a time.

    Attributes:
        window_bytes: The size of a window; a multiple of ``WINDOW_BYTES``.
    """

    window_bytes: int

    def window(self, start: int, stop: int, hashes: npt.NDArray[np.uint64]) -> AbstractContextManager[Bytes1D]:
        """Bytes ``start:stop``. The digests of the blocks that begin in them are put into ``hashes``."""
        ...


class DataFileWriter:
    """Writes one data file and makes it durable. It must be closed.

    Args:
        storage: Where to.
        name: The file's name; it must be new.
        table: Its entries.

    Raises:
        OSError: the file cannot be made. The methods raise it when a write or sync fails, a full disk included.
    """

    def __init__(self, storage: Storage, name: str, table: FileTable) -> None:
        self._name, self._table = name, table
        self._hashes: npt.NDArray[np.uint64] = np.zeros(table.first_block[-1], np.uint64)
        self._file = storage.create(name)

    def write(
        self,
        layout: FileLayout,
        contents: Contents,
        span: range,
        threads: int,
        check: Callable[[], None],
        progress: Callable[[int], None],
    ) -> None:
        """Write a part of the data section.

        Args:
            layout: Where everything goes.
            contents: What is to be written.
            span: Which bytes; it starts at a multiple of ``WINDOW_BYTES`` and ends at one or at the end.
            threads: How many threads write.
            check: Called now and then; may raise to stop.
            progress: Told how many bytes of data were written, as they are.
        """

        def write_window(start: int) -> None:
            stop = min(start + contents.window_bytes, span.stop)
            with contents.window(start, stop, self._hashes) as window:
                self._file.write(window, layout.data_start + start)
            progress(stop - start)

        starts = range(span.start, span.stop, contents.window_bytes)
        run_all((functools.partial(write_window, start) for start in starts), threads, check)

    def finish(self, layout: FileLayout) -> FileInfo:
        """After all data, write the header and make the file durable; returns its record for `.metadata`."""
        header = layout.header(self._hashes)
        with Buffers(1).borrow(len(header)) as buffer:
            buffer[:] = np.frombuffer(header, np.uint8)
            self._file.write(buffer, 0)
        # IMPORTANT: the file is durable before this rank reports it, and so before it can be committed.
        self._file.sync()
        return FileInfo(self._name, layout.size, header_digest(header))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _entries_of(table: FileTable, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The entries that bytes ``start:stop`` of the data section have a part of, with where each lies in it."""
    offsets = table.offsets
    first, last = bisect.bisect_right(offsets, start) - 1, bisect.bisect_left(offsets, stop)
    return zip(range(first, last), offsets[first:last], offsets[first + 1 : last + 1], strict=True)


class Tensors:
    """Contents that are gathered from the tensors' memory, which must stay alive and as it is.

    Args:
        table: The file's entries.
        sources: Where the bytes of each are.
        threads: How many windows are looked at at once.
    """

    window_bytes = WINDOW_BYTES

    def __init__(self, table: FileTable, sources: Sequence[Source], threads: int) -> None:
        self._table, self._sources, self._buffers = table, sources, Buffers(threads)
        self._first_block, self._block_bytes = table.first_block, table.block_bytes

    @contextmanager
    def window(self, start: int, stop: int, hashes: npt.NDArray[np.uint64]) -> Iterator[Bytes1D]:
        """See :class:`Contents`."""
        with self._buffers.borrow(stop - start) as window:
            base, view = address_of(window) - start, window.data
            for i, low, high in _entries_of(self._table, start, stop):
                if start <= low and high <= stop and high - low <= self._block_bytes:
                    if low < high:
                        hashes[self._first_block[i]] = self._fill_whole(i, base + low, view[low - start : high - start])
                else:
                    self._fill(i, max(start, low) - low, min(stop, high) - low, window, low - start, hashes)
            yield window

    def copy_to(self, memory: Bytes1D, start: int) -> None:
        """Copy the data section from byte ``start`` on to the beginning of ``memory``, and hash nothing."""
        base = address_of(memory) - start
        for i, low, high in _entries_of(self._table, start, self._table.nbytes):
            source, first = self._sources[i], max(start, low)
            if isinstance(source, int):
                copy_bytes(base + first, source + first - low, high - first)
            else:
                gather(source, first - low, high - low, memory[first - start : high - start])

    def _fill_whole(self, i: int, address: int, part: memoryview) -> int:
        """Copy an entry of one block; returns its digest, taken while it is in the cache."""
        source = self._sources[i]
        if isinstance(source, int):
            copy_bytes(address, source, len(part))
        else:
            gather(source, 0, len(part), np.frombuffer(part, np.uint8))
        return xxhash.xxh3_64_intdigest(part)

    def _fill(self, i: int, low: int, high: int, window: Bytes1D, at: int, hashes: npt.NDArray[np.uint64]) -> None:
        """Copy bytes ``low:high`` of an entry to ``at + low`` of the window, and hash the blocks that start in them.

        A block that ends behind the window is hashed from where it comes from.
        """
        source, size = self._sources[i], self._block_bytes
        nbytes = self._table.offsets[i + 1] - self._table.offsets[i]
        part = window[at + low : at + high]
        if isinstance(source, int):
            copy_bytes(address_of(part), source + low, high - low)
        else:
            gather(source, low, high, part)
        for start in range(-(-low // size) * size, high, size):
            stop = min(start + size, nbytes)
            data = part[start - low : stop - low] if stop <= high else _bytes_of(source, start, stop)
            hashes[self._first_block[i] + start // size] = xxhash.xxh3_64_intdigest(data.data)


def _bytes_of(source: Source, start: int, stop: int) -> Any:
    """Bytes ``start:stop`` of an entry: its own memory if that is contiguous."""
    if isinstance(source, int):
        return bytes_at(source + start, stop - start)
    data: Bytes1D = np.empty(stop - start, np.uint8)
    gather(source, start, stop, data)
    return data


class Snapshot:
    """Contents that were copied before.

    Args:
        table: The file's entries.
        memory: The data section from byte ``start`` on; it begins at a page.
        start: A multiple of ``WINDOW_BYTES``.
    """

    window_bytes = _SNAPSHOT_WINDOW_BYTES

    def __init__(self, table: FileTable, memory: Bytes1D, start: int) -> None:
        self._table, self._memory, self._start = table, memory, start

    def window(self, start: int, stop: int, hashes: npt.NDArray[np.uint64]) -> AbstractContextManager[Bytes1D]:
        """See :class:`Contents`."""
        size, first_block, view = self._table.block_bytes, self._table.first_block, self._memory.data
        for i, low, high in _entries_of(self._table, start, stop):
            skipped = max(0, -(-(start - low) // size))
            for block in range(skipped, -(-(min(stop, high) - low) // size)):
                begin = low + block * size - self._start
                end = min(begin + size, high - self._start)
                hashes[first_block[i] + block] = xxhash.xxh3_64_intdigest(view[begin:end])
        return nullcontext(self._memory[start - self._start : stop - self._start])
