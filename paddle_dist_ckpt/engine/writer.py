"""Writes data files: windows of the file are filled from the entries, hashed and written; then the header, then fsync.

Windows start at multiples of a page, which lets a storage bypass the page cache. A checkpoint is written once and read
much later, if ever, so the cache is of no use to it; and filling fresh pages of it is slower than most disks.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..core.box import cut_flat_range
from ..core.metadata import FileInfo
from ..core.ports import Bytes1D
from ..formats.datafile import Entry, FileLayout, header_digest
from ..storage.base import Storage, WritableFile
from .buffers import Buffers
from .threads import run_all

__all__ = ["gather", "write_file"]

_WINDOW_BYTES = 2 << 20
Array = npt.NDArray[Any]


def write_file(
    storage: Storage,
    name: str,
    layout: FileLayout,
    threads: int,
    check: Callable[[], None],
    progress: Callable[[int], None],
) -> FileInfo:
    """Write one data file and make it durable.

    Args:
        storage: Where to.
        name: The file's name; it must be new.
        layout: What it holds.
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
        hashes = np.zeros(layout.first_block[-1], np.uint64)
        run_all(_Writing(file, layout, hashes, buffers, progress).tasks(), threads, check)
        header = layout.header(hashes)
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
        hashes: Array,
        buffers: Buffers,
        progress: Callable[[int], None],
    ) -> None:
        self._file, self._layout, self._hashes = file, layout, hashes
        self._buffers, self._progress = buffers, progress

    def tasks(self) -> Iterator[Callable[[], None]]:
        """A task for each window."""
        layout = self._layout
        for start in range(layout.data_start, layout.size, _WINDOW_BYTES):
            yield functools.partial(self._write_window, start, min(start + _WINDOW_BYTES, layout.size))

    def _write_window(self, start: int, stop: int) -> None:
        starts, entries = self._layout.starts, self._layout.entries
        with self._buffers.borrow(stop - start) as window:
            i = bisect.bisect_right(starts, start) - 1
            while i < len(entries) and starts[i] < stop:
                low, high = max(start, starts[i]), min(stop, starts[i] + entries[i].nbytes)
                if low < high:
                    self._fill(i, low - starts[i], high - starts[i], window[low - start : high - start])
                i += 1
            self._file.write(window, start)
        self._progress(stop - start)

    def _fill(self, i: int, low: int, high: int, part: Bytes1D) -> None:
        """Copy bytes ``low:high`` of an entry, and hash the blocks that start in them, while they are in the cache."""
        entry, size = self._layout.entries[i], self._layout.block_bytes
        _copy(entry, low, high, part)
        for start in range(-(-low // size) * size, high, size):
            stop = min(start + size, entry.nbytes)
            data = part[start - low : stop - low] if stop <= high else _bytes_of(entry, start, stop)
            self._hashes[self._layout.first_block[i] + start // size] = xxhash.xxh3_64_intdigest(data.data)


def _copy(entry: Entry, start: int, stop: int, part: Bytes1D) -> None:
    if entry.array.flags.c_contiguous:
        part[:] = entry.array.reshape(-1).view(np.uint8)[start:stop]
    else:
        gather(entry, start, stop, part)


def _bytes_of(entry: Entry, start: int, stop: int) -> Bytes1D:
    """Bytes ``start:stop`` of an entry: its own memory if that is contiguous."""
    if entry.array.flags.c_contiguous:
        return entry.array.reshape(-1).view(np.uint8)[start:stop]
    data: Bytes1D = np.empty(stop - start, np.uint8)
    gather(entry, start, stop, data)
    return data


def gather(entry: Entry, start: int, stop: int, buffer: Bytes1D) -> None:
    """Copy bytes ``start:stop`` (of whole items) of an entry that is not contiguous into a buffer."""
    size, at = entry.dtype.itemsize, 0
    for box in cut_flat_range(entry.shape, start // size, stop // size):
        nbytes = box.size * size
        buffer[at : at + nbytes].view(entry.dtype.raw).reshape(box.shape)[...] = entry.array[box.slices]
        at += nbytes
