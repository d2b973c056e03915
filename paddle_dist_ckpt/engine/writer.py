"""Writes data files: every entry hashed block by block in the pass that writes it, then the header, then fsync."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..core.box import cut_flat_range
from ..core.metadata import FileInfo
from ..core.ports import Bytes1D
from ..formats.datafile import Entry, FileLayout, header_digest
from ..storage.base import Storage, WritableFile
from .threads import run_all

__all__ = ["write_file"]

_CHUNK_BYTES = 8 << 20
_SMALL_BYTES = 256 << 10
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
        progress: Told how many bytes were written, as they are.

    Returns:
        The file's record for `.metadata`.

    Raises:
        OSError: a write or sync failed, a full disk included.
    """
    file = storage.create(name)
    try:
        hashes = np.zeros(layout.first_block[-1], np.uint64)
        writing = _Writing(file, layout, hashes, threads, progress)
        run_all(writing.tasks(), threads, check)
        header = layout.header(hashes)
        file.write(np.frombuffer(header, np.uint8), 0)
        # IMPORTANT: the file is durable before this rank reports it, and so before it can be committed.
        file.sync()
        progress(len(header))
    finally:
        file.close()
    return FileInfo(name, layout.size, header_digest(header))


class _Writing:
    """The tasks that write one file's entries. Each fills its own part of ``hashes``."""

    def __init__(
        self, file: WritableFile, layout: FileLayout, hashes: Array, threads: int, progress: Callable[[int], None]
    ) -> None:
        self._file, self._layout, self._hashes, self._progress = file, layout, hashes, progress
        self._buffers: queue.SimpleQueue[Bytes1D | None] = queue.SimpleQueue()
        for _ in range(threads):
            self._buffers.put(None)  # a buffer is made when it is first needed
        self._chunk = max(_CHUNK_BYTES, layout.block_bytes)

    def tasks(self) -> Iterator[Callable[[], None]]:
        """Large entries chunk by chunk, small neighbours together."""
        run: list[int] = []
        run_bytes = 0
        for i, entry in enumerate(self._layout.entries):
            small = entry.nbytes <= _SMALL_BYTES
            if run and (not small or run_bytes + entry.nbytes > self._chunk):
                yield functools.partial(self._write_small, run)
                run, run_bytes = [], 0
            if small:
                run.append(i)
                run_bytes += entry.nbytes
                continue
            write = self._write_contiguous if entry.array.flags.c_contiguous else self._write_strided
            for start in range(0, entry.nbytes, self._chunk):
                yield functools.partial(write, i, start, min(start + self._chunk, entry.nbytes))
        if run:
            yield functools.partial(self._write_small, run)

    def _borrow(self) -> Bytes1D:
        buffer = self._buffers.get()
        return np.empty(self._chunk, np.uint8) if buffer is None else buffer

    def _write_small(self, run: Sequence[int]) -> None:
        entries, starts, first_block = self._layout.entries, self._layout.starts, self._layout.first_block
        base = starts[run[0]]
        buffer = self._borrow()
        try:
            for i in run:
                entry = entries[i]
                place = buffer[starts[i] - base : starts[i] - base + entry.nbytes]
                place.view(entry.dtype.raw).reshape(entry.shape)[...] = entry.array
                self._hash(place, first_block[i])
            used = starts[run[-1]] + entries[run[-1]].nbytes - base
            self._file.write(buffer[:used], base)
        finally:
            self._buffers.put(buffer)
        self._progress(used)

    def _write_contiguous(self, i: int, start: int, stop: int) -> None:
        data = _as_bytes(self._layout.entries[i].array)[start:stop]
        self._finish_chunk(i, start, data)

    def _write_strided(self, i: int, start: int, stop: int) -> None:
        entry = self._layout.entries[i]
        buffer = self._borrow()
        try:
            gather(entry, start, stop, buffer)
            self._finish_chunk(i, start, buffer[: stop - start])
        finally:
            self._buffers.put(buffer)

    def _finish_chunk(self, i: int, start: int, data: Bytes1D) -> None:
        self._hash(data, self._layout.first_block[i] + start // self._layout.block_bytes)
        self._file.write(data, self._layout.starts[i] + start)
        self._progress(len(data))

    def _hash(self, data: Bytes1D, block: int) -> None:
        size = self._layout.block_bytes
        for start in range(0, len(data), size):
            self._hashes[block] = xxhash.xxh3_64_intdigest(data[start : start + size].data)
            block += 1


def gather(entry: Entry, start: int, stop: int, buffer: Bytes1D) -> None:
    """Copy bytes ``start:stop`` (of whole items) of an entry that is not contiguous into a buffer."""
    size, at = entry.dtype.itemsize, 0
    for box in cut_flat_range(entry.shape, start // size, stop // size):
        nbytes = box.size * size
        buffer[at : at + nbytes].view(entry.dtype.raw).reshape(box.shape)[...] = entry.array[box.slices]
        at += nbytes


def _as_bytes(array: Array) -> Bytes1D:
    return array.reshape(-1).view(np.uint8)
