"""Reads parts of entries to where they are wanted, of any shape and strides.

What is wanted of an entry is a list of :class:`Consumer`. From their boxes follow the blocks to read. A part that is
contiguous both in its entry and in its target is read straight into the target; everything else goes through a buffer
of bounded size. Of many small entries :mod:`.batches` makes less work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box, cut_flat_range, flat_range, intersect
from ..core.buffers import Buffers
from ..core.dtypes import DType
from ..core.memory import Bytes1D, address_of, bytes_at
from ..planning.blocks import touched_blocks
from .runs import CHUNK_BYTES, OpenFile, Segments

__all__ = [
    "Consumer",
    "StoredEntry",
    "are_holes",
    "clear",
    "entry_tasks",
    "view_at",
]

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
        target: Where it goes: raw items of the entry's type, or of the one that it is converted to, of the box's shape,
            contiguous or not.
        convert: Instead of a plain copy: called with the raw items of a part and with where that part lies in the box.
            Zeros that are nowhere on the disk become zeros without it.
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


def are_holes(wanted: Iterable[tuple[StoredEntry, Sequence[Consumer]]], block_bytes: int) -> bool:
    """Whether all of it is known to be zeros without being read."""
    for entry, consumers in wanted:
        segments = _segments(entry, consumers, block_bytes)
        parts = _Parts.of(segments, block_bytes) if segments else None
        if parts is not None and not parts.are_zeros():
            return False
    return True


def entry_tasks(
    wanted: Iterable[tuple[StoredEntry, Sequence[Consumer]]],
    block_bytes: int,
    buffers: Buffers,
    progress: Callable[[int], None],
    joined: bool = True,
) -> Iterator[Callable[[], None]]:
    """Tasks that read what the consumers want; see :meth:`.runs.Segments.tasks`.

    Args:
        wanted: Each entry once, with its consumers.
        block_bytes: Bytes of a block.
        buffers, progress, joined: See there.
    """
    by_file: dict[int, list[_Segment]] = {}
    for entry, consumers in wanted:
        by_file.setdefault(id(entry.file), []).extend(_segments(entry, consumers, block_bytes))
    for parts in by_file.values():
        if parts:
            yield from _Parts.of(parts, block_bytes).tasks(buffers, progress, joined)


def _segments(entry: StoredEntry, consumers: Sequence[Consumer], block_bytes: int) -> list[_Segment]:
    nbytes = entry.nbytes
    if nbytes <= block_bytes:
        return [_Segment(entry, 0, nbytes, consumers)] if nbytes else []
    straight = len(consumers) == 1 and _bytes_in_a_row(consumers[0], entry) is not None
    chunk = max(1, (entry.file.chunk_bytes if straight else CHUNK_BYTES) // block_bytes)
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


def _bytes_in_a_row(consumer: Consumer, entry: StoredEntry) -> tuple[int, int] | None:
    """Which bytes of an entry a consumer wants, if it wants them as they are and in a row: the first, the end."""
    elements, size = flat_range(consumer.box, entry.shape), entry.dtype.itemsize
    if consumer.convert is not None or elements is None or not consumer.target.flags.c_contiguous:
        return None
    return elements[0] * size, elements[1] * size


@dataclass(frozen=True, slots=True, eq=False)
class _Parts(Segments):
    """The segments of one file, with their consumers."""

    parts: Sequence[_Segment]

    @classmethod
    def of(cls, parts: Sequence[_Segment], block_bytes: int) -> _Parts:
        """These segments, in whatever order."""
        parts = sorted(parts, key=lambda part: part.entry.start + part.start)
        rows = [
            (p.entry.start + p.start, p.entry.start + p.stop, p.entry.first_block + p.start // block_bytes)
            for p in parts
        ]
        starts, stops, blocks = np.array(rows, np.int64).T
        return cls(parts[0].entry.file, block_bytes, starts, stops, blocks, lambda i: parts[i].entry.key, parts)

    def straight(self, segment: int) -> tuple[Bytes1D, int] | None:
        part = self.parts[segment]
        spans = []  # the first byte, the one behind the last, and where they go
        for consumer in part.consumers:
            span = _bytes_in_a_row(consumer, part.entry)
            if span is None:
                return None
            start, stop = span
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                spans.append((low, high, address_of(consumer.target) + low - start))
        spans.sort()
        if not spans or any(b[0] != a[1] or b[2] - a[2] != b[0] - a[0] for a, b in itertools.pairwise(spans)):
            return None
        first, _, address = spans[0]
        return bytes_at(address, spans[-1][1] - first), first - part.start

    def take(self, first: int, last: int, data: Bytes1D) -> None:
        for i in range(first, last):
            part, at = self.parts[i], int(self.starts[i] - self.starts[first])
            size = part.entry.dtype.itemsize
            for box in cut_flat_range(part.entry.shape, part.start // size, part.stop // size):
                stop = at + box.size * size
                items = data[at:stop].view(part.entry.dtype.raw).reshape(box.shape)
                for consumer in part.consumers:
                    _hand_over(consumer, box, items)
                at = stop

    def take_zeros(self, first: int, last: int) -> None:
        for part in self.parts[first:last]:
            dtype = part.entry.dtype
            for box in cut_flat_range(part.entry.shape, part.start // dtype.itemsize, part.stop // dtype.itemsize):
                items = np.broadcast_to(np.zeros((), dtype.raw), box.shape)
                for consumer in part.consumers:
                    _hand_over(consumer, box, items, True)


def view_at(array: Array, place: tuple[slice | int, ...]) -> Array:
    """A part of an array, as a view even if the array has no dimensions (plain indexing would make a scalar)."""
    index: Any = (*place, ...)
    view: Array = array[index]
    return view


def _hand_over(consumer: Consumer, box: Box, items: Array, zeros: bool = False) -> None:
    common = intersect(box, consumer.box)
    if common is None:
        return
    source = view_at(items, common.relative_to(box.offset).slices)
    place = common.relative_to(consumer.box.offset).slices
    if zeros:  # in any type
        clear(view_at(consumer.target, place))
    elif consumer.convert is not None:
        consumer.convert(source, place)
    else:
        consumer.target[place] = source


def clear(target: Array) -> None:
    """Make it zeros, without touching the memory where it is that already."""
    if target.dtype.kind == "c" or target.any():  # a complex -0 would be taken for zero
        target[...] = 0
