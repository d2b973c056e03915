"""Reads parts of entries to where they are wanted, of any shape and strides.

What is wanted of an entry is a list of :class:`Consumer`. From their boxes follow the blocks to read. A part that is
contiguous both in its entry and in its target is read straight into the target; everything else goes through a buffer
of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box, cut_flat_range, flat_range, intersect, whole
from ..core.buffers import Buffers
from ..core.dtypes import DType
from ..core.memory import Bytes1D, address_of, bytes_at
from ..core.threads import run_all
from ..planning.blocks import touched_blocks
from .runs import CHUNK_BYTES, OpenFile, Segments, Straight, segment_tasks

__all__ = ["Consumer", "StoredEntry", "entry_tasks", "read_entries", "view_at"]

Array = npt.NDArray[Any]


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


def read_entries(
    wanted: Iterable[tuple[StoredEntry, Sequence[Consumer]]],
    block_bytes: int,
    threads: int,
    check: Callable[[], None],
    progress: Callable[[int], None],
    joined: bool = True,
) -> None:
    """Read what the consumers want.

    Args:
        wanted: Each entry once, with its consumers.
        block_bytes: Bytes of a block.
        threads: How many threads read.
        check: Called now and then; may raise to stop.
        progress: Told how many bytes were read, as they are.
        joined: Whether what lies between ranges that are close to each other may be read too.

    Raises:
        CheckpointCorruptedError: a block is not what was written; names the tensor and the file.
        OSError: reading failed.
    """
    run_all(entry_tasks(wanted, block_bytes, Buffers(threads), progress, joined), threads, check)


def entry_tasks(
    wanted: Iterable[tuple[StoredEntry, Sequence[Consumer]]],
    block_bytes: int,
    buffers: Buffers,
    progress: Callable[[int], None],
    joined: bool = True,
) -> Iterator[Callable[[], None]]:
    """What :func:`read_entries` runs: tasks that use one of the buffers each."""
    by_file: dict[int, list[_Segment]] = {}
    for entry, consumers in wanted:
        by_file.setdefault(id(entry.file), []).extend(_segments(entry, consumers, block_bytes))
    for parts in by_file.values():
        if parts:
            parts.sort(key=lambda part: part.entry.start + part.start)
            receiver = _Parts(parts, block_bytes)
            yield from segment_tasks(receiver.segments(), receiver, block_bytes, buffers, progress, joined)


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


class _Parts:
    """The segments of one file with their consumers: a :class:`.runs.Receiver`."""

    def __init__(self, parts: Sequence[_Segment], block_bytes: int) -> None:
        self._parts, self._block_bytes = parts, block_bytes

    def segments(self) -> Segments:
        """The segments in columns."""
        rows = [
            (p.entry.start + p.start, p.entry.start + p.stop, p.entry.first_block + p.start // self._block_bytes)
            for p in self._parts
        ]
        starts, stops, blocks = np.array(rows, np.int64).T
        return Segments(self._parts[0].entry.file, starts, stops, blocks, lambda i: self._parts[i].entry.key)

    def straight(self, segment: int) -> Straight | None:
        """See :class:`.runs.Receiver`."""
        return _straight(self._parts[segment], self._block_bytes)

    def take(self, first: int, last: int, data: Bytes1D) -> None:
        """See :class:`.runs.Receiver`."""
        base = self._parts[first].entry.start + self._parts[first].start
        for part in self._parts[first:last]:
            start = part.entry.start - base
            _scatter(part, data[start + part.start : start + part.stop])


def _straight(segment: _Segment, block_bytes: int) -> Straight | None:
    """Where to read a segment without a buffer; None if what is wanted of it is not one stretch of memory, or small."""
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
    return Straight(bytes_at(address, high - low), lead, skip, inner)


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
        parts = [(whole(entry.shape), data)]
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
