"""Writes data files: windows of the file are filled from the entries, hashed and written; then the header, then fsync.

Windows start at multiples of a page, which lets a storage bypass the page cache. A checkpoint is written once and read
much later, if ever, so the cache is of no use to it; and filling fresh pages of it is slower than most disks.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..core.memory import address_of, bytes_at, copy_bytes
from ..core.metadata import FileInfo
from ..core.ports import Bytes1D
from ..formats.datafile import FileLayout, header_digest
from ..storage.base import Storage, WritableFile
from .buffers import Buffers
from .gather import gather
from .part import Source
from .threads import run_all

__all__ = ["write_file"]

_WINDOW_BYTES = 2 << 20


def write_file(
    storage: Storage,
    name: str,
    layout: FileLayout,
    sources: Sequence[Source],
    threads: int,
    check: Callable[[], None],
    progress: Callable[[int], None],
) -> FileInfo:
    """Write one data file and make it durable.

    Args:
        storage: Where to.
        name: The file's name; it must be new.
        layout: What it holds.
        sources: Where the bytes of each entry are. The memory must stay alive.
        threads: How many threads write.
        check: Called now and then; may raise to stop.
        progress: Told how many bytes of data were written, as they are.

    Returns:
        The file's record for `.metadata`.

    Raises:
        OSError: a write or sync failed, a full disk included.
    """
    file = storage.create(name)
    try:
        buffers = Buffers(threads)
        writing = _Writing(file, layout, sources, buffers, progress)
        run_all(writing.tasks(), threads, check)
        header = layout.header(writing.hashes)
        with buffers.borrow(len(header)) as buffer:
            buffer[:] = np.frombuffer(header, np.uint8)
            file.write(buffer, 0)
        # IMPORTANT: the file is durable before this rank reports it, and so before it can be committed.
        file.sync()
    finally:
        file.close()
    return FileInfo(name, layout.size, header_digest(header))


class _Writing:
    """The tasks that write one file's entries. Each fills its own part of ``hashes``."""

    def __init__(
        self,
        file: WritableFile,
        layout: FileLayout,
        sources: Sequence[Source],
        buffers: Buffers,
        progress: Callable[[int], None],
    ) -> None:
        self._file, self._layout, self._sources = file, layout, sources
        self._buffers, self._progress = buffers, progress
        self._offsets, self._first_block = layout.table.offsets, layout.table.first_block
        self._block_bytes = layout.table.block_bytes
        self.hashes: npt.NDArray[np.uint64] = np.zeros(self._first_block[-1], np.uint64)

    def tasks(self) -> Iterator[Callable[[], None]]:
        """A task for each window of the data section."""
        size = self._layout.table.nbytes
        for start in range(0, size, _WINDOW_BYTES):
            yield functools.partial(self._write_window, start, min(start + _WINDOW_BYTES, size))

    def _write_window(self, start: int, stop: int) -> None:
        first = bisect.bisect_right(self._offsets, start) - 1
        last = bisect.bisect_left(self._offsets, stop)
        with self._buffers.borrow(stop - start) as window:
            base, view = address_of(window) - start, window.data
            for i in range(first, last):
                low, high = self._offsets[i], self._offsets[i + 1]
                if start <= low and high <= stop and high - low <= self._block_bytes:
                    if low < high:
                        self._fill_whole(i, base + low, view[low - start : high - start])
                else:
                    self._fill(i, max(start, low) - low, min(stop, high) - low, window, low - start)
            self._file.write(window, self._layout.data_start + start)
        self._progress(stop - start)

    def _fill_whole(self, i: int, address: int, part: memoryview) -> None:
        """Copy an entry of one block, and hash it while it is in the cache."""
        source = self._sources[i]
        if isinstance(source, int):
            copy_bytes(address, source, len(part))
        else:
            gather(source, 0, len(part), np.frombuffer(part, np.uint8))
        self.hashes[self._first_block[i]] = xxhash.xxh3_64_intdigest(part)

    def _fill(self, i: int, low: int, high: int, window: Bytes1D, at: int) -> None:
        """Copy bytes ``low:high`` of an entry to ``at + low`` of the window, and hash the blocks that start in them.

        A block that ends behind the window is hashed from where it comes from.
        """
        source, size, nbytes = self._sources[i], self._block_bytes, self._offsets[i + 1] - self._offsets[i]
        part = window[at + low : at + high]
        if isinstance(source, int):
            copy_bytes(address_of(part), source + low, high - low)
        else:
            gather(source, low, high, part)
        for start in range(-(-low // size) * size, high, size):
            stop = min(start + size, nbytes)
            data = part[start - low : stop - low] if stop <= high else _bytes_of(source, start, stop)
            self.hashes[self._first_block[i] + start // size] = xxhash.xxh3_64_intdigest(data.data)


def _bytes_of(source: Source, start: int, stop: int) -> Any:
    """Bytes ``start:stop`` of an entry: its own memory if that is contiguous."""
    if isinstance(source, int):
        return bytes_at(source + start, stop - start)
    data: Bytes1D = np.empty(stop - start, np.uint8)
    gather(source, start, stop, data)
    return data
