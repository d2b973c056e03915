"""Reads parts of entries, verifies every block that it touches, and puts the parts where they are wanted.

What is wanted of an entry is a list of :class:`Consumer`. From their boxes follow the blocks to read; blocks that stand
next to each other in a file are read together, whatever entries they belong to. A part that is contiguous both in its
entry and in its target is read straight into the target; everything else goes through a buffer of bounded size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import xxhash

from ..core.box import Box, cut_flat_range, flat_range, intersect
from ..core.buffers import Buffers
from ..core.dtypes import DType
from ..core.memory import Bytes1D, address_of, bytes_at
from ..core.threads import run_all
from ..errors import CheckpointCorruptedError
from ..planning.blocks import touched_blocks
from ..storage.base import ReadableFile
from .datafile import Hashes

__all__ = ["CHUNK_BYTES", "GAP_BYTES", "Consumer", "OpenFile", "StoredEntry", "entry_tasks", "read_entries", "view_at"]

CHUNK_BYTES = 2 << 20  # so that a block is hashed while it is still in the cache
GAP_BYTES = 4096  # a page: what lies between closer ranges is read from the disk anyway
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class OpenFile:
    """A data file whose size and header have been checked.

    Attributes:
        name: For messages.
        file: To read from.
        data_start: Where the data section starts.
        hashes: Digest of each block.
        once: Whether the page cache lacks it, and no other rank of this host wants much of the same data.
    """

    name: str
    file: ReadableFile
    data_start: int
    hashes: Hashes
    once: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class StoredEntry:
    """A stored shard: in which file, where in its data section, with which first block, of which tensor."""

    file: OpenFile
    start: int
    first_block: int
    shape: tuple[int, ...]
    dtype: DType
    key: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return Box((), self.shape).size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Consumer:
    """Somebody who wants a box of an entry.

    Attributes:
        box: The box, counted from the entry's own corner.
        target: Where it goes: raw items of the entry's type, of the box's shape, contiguous or not.
        convert: Instead of a plain copy: called with the raw items of a part and with where that part lies in the box.
    """

    box: Box
    target: Array
    convert: Callable[[Array, tuple[slice, ...]], None] | None = None


@dataclass(frozen=True, slots=True)
class _Segment:
    """Bytes ``start:stop`` of an entry, which begin with a block's first byte and end with a block's last."""

    entry: StoredEntry
    start: int
    stop: int
    consumers: Sequence[Consumer]

    @property
    def place(self) -> int:
        return self.entry.file.data_start + self.entry.start + self.start


def read_entries(
    wanted: Iterable[tuple[StoredEntry, Sequence[Consumer]]],
    block_bytes: int,
    threads: int,
    check: Callable[[], None],
    progress: Callable[[int], None],
    gap: int = GAP_BYTES,
) -> None:
    """Read what the consumers want.

    Args:
        wanted: Each entry once, with its consumers.
        block_bytes: Bytes of a block.
        threads: How many threads read.
        check: Called now and then; may raise to stop.
        progress: Told how many bytes were read, as they are.
        gap: Ranges that are not further apart are read as one.

    Raises:
        CheckpointCorruptedError: a block is not what was written; names the tensor and the file.
        OSError: reading failed.
    """
    run_all(entry_tasks(wanted, block_bytes, Buffers(threads), progress, gap), threads, check)


def entry_tasks(
    wanted: Iterable[tuple[StoredEntry, Sequence[Consumer]]],
    block_bytes: int,
    buffers: Buffers,
    progress: Callable[[int], None],
    gap: int = GAP_BYTES,
) -> list[Callable[[], None]]:
    """What :func:`read_entries` runs: tasks that use one of the buffers each."""
    by_file: dict[int, list[_Segment]] = {}
    for entry, consumers in wanted:
        segments = _segments(entry, consumers, block_bytes)
        by_file.setdefault(id(entry.file), []).extend(segments)
    reading = _Reading(block_bytes, buffers, progress, gap)
    return [task for segments in by_file.values() for task in reading.tasks(segments)]


def _segments(entry: StoredEntry, consumers: Sequence[Consumer], block_bytes: int) -> list[_Segment]:
    nbytes = entry.nbytes
    if nbytes <= block_bytes:
        return [_Segment(entry, 0, nbytes, consumers)] if nbytes else []
    chunk = max(1, CHUNK_BYTES // block_bytes)
    ranges = touched_blocks(entry.shape, entry.dtype.itemsize, (c.box for c in consumers), block_bytes)
    bounds = [(*_bounds(entry, consumer.box), consumer) for consumer in consumers]
    segments = []
    for first, last in ranges:
        for block in range(first, last, chunk):
            start, stop = block * block_bytes, min(min(block + chunk, last) * block_bytes, nbytes)
            here = [consumer for low, high, consumer in bounds if low < stop and high > start]
            segments.append(_Segment(entry, start, stop, here))
    return segments


def _bounds(entry: StoredEntry, box: Box) -> tuple[int, int]:
    """Where in an entry the first byte of a box is, and the one behind its last."""
    first = last = 0
    for n, offset, extent in zip(entry.shape, box.offset, box.shape, strict=True):
        first, last = first * n + offset, last * n + offset + extent - 1
    return first * entry.dtype.itemsize, (last + 1) * entry.dtype.itemsize


class _Reading:
    """The tasks that read segments of files."""

    def __init__(self, block_bytes: int, buffers: Buffers, progress: Callable[[int], None], gap: int) -> None:
        self._block_bytes, self._buffers, self._progress, self._gap = block_bytes, buffers, progress, gap

    def tasks(self, segments: list[_Segment]) -> Iterator[Callable[[], None]]:
        """Segments of one file, neighbours together up to the size of a chunk."""
        segments.sort(key=lambda segment: segment.place)
        run: list[_Segment] = []
        for segment in segments:
            if run:
                end = run[-1].place + run[-1].stop - run[-1].start
                far = segment.place - end > self._gap
                if far or segment.place + segment.stop - segment.start - run[0].place > CHUNK_BYTES:
                    yield functools.partial(self._read_run, run)
                    run = []
            run.append(segment)
        if run:
            yield functools.partial(self._read_run, run)

    def _read_run(self, run: Sequence[_Segment]) -> None:
        first, last = run[0], run[-1]
        size = last.place + last.stop - last.start - first.place
        direct = _direct_target(first, self._block_bytes) if len(run) == 1 else None
        with self._buffers.borrow(size) as buffer:
            if direct is not None:
                self._read_direct(first, direct, buffer)
            else:
                self._read_buffered(run, buffer)
        self._progress(size)

    def _read_buffered(self, run: Sequence[_Segment], data: Bytes1D) -> None:
        base = run[0].place
        _read_into(run[0].entry, [data], base)
        for segment in run:
            part = data[segment.place - base : segment.place - base + segment.stop - segment.start]
            self._verify(segment.entry, segment.start, part)
            _scatter(segment, part)

    def _read_direct(self, segment: _Segment, direct: _Direct, buffer: Bytes1D) -> None:
        """Read the blocks that the target wants whole straight into it, those at its edges by the buffer."""
        target, size = direct.target, segment.stop - segment.start
        before = direct.skip - direct.lead  # bytes of the target that stand in the first, partly wanted block
        head, tail = buffer[: direct.skip], buffer[direct.skip : size - direct.inner]
        body = target[before : before + direct.inner]
        _read_into(segment.entry, [head, body, tail], segment.place)
        for start, part in ((0, head), (direct.skip, body), (direct.skip + direct.inner, tail)):
            self._verify(segment.entry, segment.start + start, part)
        target[:before] = head[direct.lead :]
        target[before + direct.inner :] = tail[: len(target) - before - direct.inner]

    def _verify(self, entry: StoredEntry, start: int, data: Bytes1D) -> None:
        block = entry.first_block + start // self._block_bytes
        for at in range(0, len(data), self._block_bytes):
            if xxhash.xxh3_64_intdigest(data[at : at + self._block_bytes].data) != entry.file.hashes[block]:
                place = entry.file.data_start + entry.start + start + at
                raise CheckpointCorruptedError(
                    f"{entry.key}: the checksum of {min(self._block_bytes, len(data) - at)} bytes at {place} of "
                    f"{entry.file.name} does not match; the file was damaged after it was written"
                )
            block += 1


def _read_into(entry: StoredEntry, buffers: Sequence[Bytes1D], place: int) -> None:
    try:
        entry.file.file.read_into(buffers, place, entry.file.once)
    except EOFError as error:
        raise CheckpointCorruptedError(f"{entry.key}: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class _Direct:
    """How a segment is read without a buffer: ``target`` starts at its byte ``lead``; the blocks that are wanted whole
    are its bytes ``skip : skip + inner``."""

    target: Bytes1D
    lead: int
    skip: int
    inner: int


def _direct_target(segment: _Segment, block_bytes: int) -> _Direct | None:
    """How to read a segment without a buffer; None if what is wanted of it is not one stretch of memory, or small."""
    spans = _spans(segment)
    if not spans:
        return None
    low, high, address = spans[0]
    for start, stop, place in spans[1:]:
        if start != high or place != address + high - low:
            return None
        high = stop
    entry = segment.entry
    lead = low - segment.start
    skip = -(-lead // block_bytes) * block_bytes
    end = high - segment.start
    inner = end - skip if high == entry.nbytes else (end - skip) // block_bytes * block_bytes
    if inner <= 0:
        return None
    return _Direct(bytes_at(address, high - low), lead, skip, inner)


def _spans(segment: _Segment) -> list[tuple[int, int, int]]:
    """The bytes of an entry that the consumers want of a segment, with the addresses where they go; ascending.

    Empty if some consumer's part is in pieces, in the entry or in its target, or is converted.
    """
    entry, spans = segment.entry, []
    for consumer in segment.consumers:
        elements = flat_range(consumer.box, entry.shape)
        if consumer.convert is not None or elements is None or not consumer.target.flags.c_contiguous:
            return []
        start, stop = elements[0] * entry.dtype.itemsize, elements[1] * entry.dtype.itemsize
        low, high = max(start, segment.start), min(stop, segment.stop)
        if low < high:
            spans.append((low, high, address_of(consumer.target) + low - start))
    return sorted(spans)


def _scatter(segment: _Segment, data: Bytes1D) -> None:
    """Copy what the consumers want from the segment's bytes."""
    entry = segment.entry
    size = entry.dtype.itemsize
    if segment.stop - segment.start == entry.nbytes:
        parts = [(Box((0,) * len(entry.shape), entry.shape), data)]
    else:
        parts = []
        at = 0
        for box in cut_flat_range(entry.shape, segment.start // size, segment.stop // size):
            parts.append((box, data[at : at + box.size * size]))
            at += box.size * size
    for box, piece in parts:
        items = piece.view(entry.dtype.raw).reshape(box.shape)
        for consumer in segment.consumers:
            _hand_over(consumer, box, items)


def view_at(array: Array, place: tuple[slice, ...]) -> Array:
    """A part of an array, as a view even if the array has no dimensions (plain indexing would make a scalar)."""
    index: Any = (*place, ...)
    view: Array = array[index]
    return view


def _hand_over(consumer: Consumer, box: Box, items: Array) -> None:
    common = intersect(box, consumer.box)
    if common is None:
        return
    source = view_at(items, common.relative_to(box.offset).slices)
    place = common.relative_to(consumer.box.offset).slices
    if consumer.convert is not None:
        consumer.convert(source, place)
    else:
        consumer.target[place] = source
