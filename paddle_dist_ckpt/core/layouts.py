"""How tensors are cut into boxes: as grids, which are kept by their edges alone, or box by box."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from ..errors import CheckpointCorruptedError, UnsupportedValueError
from .box import Box, whole
from .boxes import Boxes
from .cached import cached_property
from .columns import MANY, Column, IntArray, edges_of, narrow, pack_column, unpack_column

__all__ = [
    "MOST_DIMENSIONS",
    "Grid",
    "Layout",
    "LayoutBoxes",
    "LayoutRecord",
    "grid_starts",
    "is_storable",
    "shared_layouts",
]

_MOST_EMPTY = 1024  # boxes of a tensor without elements: they need no bytes in any file
MOST_DIMENSIONS = 32
_MOST_ITEMS = 2**58  # so that bytes can be counted in int64
_FIRST: IntArray = np.zeros(1, np.int64)  # where the first box starts along a dimension
_FIRST.flags.writeable = False
_NO_CUTS: list[int] = []  # of a dimension that is not cut, as most are not; of very many it would take much memory


def is_storable(shape: Sequence[int]) -> bool:
    """Whether a tensor of a checkpoint can have this shape."""
    return len(shape) <= MOST_DIMENSIONS and all(0 <= n < _MOST_ITEMS for n in (*shape, math.prod(shape)))


class LayoutRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A layout as it is stored: by the cuts of each dimension where the boxes form a grid, else box by box.

    ``offsets`` and ``extents`` have one column a dimension. Most dimensions are not cut, and to have tuples for that
    takes no memory.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...] | None = None
    count: int = 0
    offsets: list[Column] = []
    extents: list[Column] = []


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Boxes that are a grid over all of a tensor, in row-major order, in memory of its edges alone.

    Attributes:
        starts: For each dimension where the boxes start along it; very many in narrow columns.
        lengths: And how far each of those reaches.
    """

    starts: list[IntArray]
    lengths: list[IntArray]

    def __len__(self) -> int:
        return math.prod(map(len, self.starts))

    @property
    def volumes(self) -> IntArray:
        """Elements of each box, ``[boxes]``."""
        volumes = np.array([math.prod(int(lengths[0]) for lengths in self.lengths if len(lengths) == 1)], np.int64)
        for lengths in self.lengths:
            if len(lengths) > 1:
                volumes = np.multiply.outer(volumes, lengths).reshape(-1)
        return volumes

    def boxes(self) -> Boxes:
        """The boxes one by one."""
        return Boxes(_row_major(self.starts), _row_major(self.lengths))

    def take(self, rows: IntArray) -> Boxes:
        """Some of them."""
        places = np.unravel_index(rows, [len(starts) for starts in self.starts])
        columns = [[part[at] for part, at in zip(s, places, strict=True)] for s in (self.starts, self.lengths)]
        return Boxes(*(np.stack(column, axis=1).astype(np.int64, copy=False) for column in columns))


_POINT = Grid([], [])  # of a tensor without dimensions


@dataclass(frozen=True, eq=False)
class Layout:
    """How a tensor is cut into boxes; tensors that are cut alike share one.

    Attributes:
        shape: The global shape.
        parts: The boxes, of the tensor's dimensions, in ascending order of their offsets. The columns of very many are
            narrow ones.
    """

    shape: tuple[int, ...]
    parts: Boxes | Grid

    @cached_property
    def boxes(self) -> Boxes:
        """The boxes one by one."""
        return self.parts.boxes() if isinstance(self.parts, Grid) else self.parts

    def starts(self) -> list[IntArray] | None:
        """For each dimension where the grid's boxes start; None if the boxes are not a whole grid."""
        return self.parts.starts if isinstance(self.parts, Grid) else grid_starts(self.parts, whole(self.shape))

    def cuts(self) -> list[list[int]] | None:
        """The same without the first, as numbers."""
        starts = self.starts()
        return [s[1:].tolist() if len(s) > 1 else _NO_CUTS for s in starts] if starts is not None else None

    @classmethod
    def from_cuts(cls, shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> Layout:
        """The grid that these cuts make, its boxes in row-major order."""
        if not shape:
            return cls((), _POINT)
        along = [_cut(n, c) if len(c) else _uncut(n) for n, c in zip(shape, cuts, strict=True)]
        return cls(tuple(shape), Grid([starts for starts, _ in along], [lengths for _, lengths in along]))

    def to_record(self) -> LayoutRecord:
        """The layout as it is stored.

        Raises:
            UnsupportedValueError: it cannot be.
        """
        if not is_storable(self.shape):
            raise UnsupportedValueError(f"a tensor of shape {list(self.shape)} cannot be stored")
        cuts = self.cuts()
        if cuts is not None:
            return LayoutRecord(self.shape, tuple(map(tuple, cuts)))
        if not len(self.parts):  # in less time
            nothing = [pack_column([])] * len(self.shape)
            return LayoutRecord(self.shape, None, 0, nothing, nothing)
        offsets, extents = (list(map(pack_column, rows.T)) for rows in (self.boxes.offset, self.boxes.shape))
        return LayoutRecord(self.shape, None, len(self.boxes), offsets, extents)

    @classmethod
    def from_record(cls, record: LayoutRecord, most: int) -> Layout:
        """The layout that was stored, if it has at most ``most`` boxes.

        Raises:
            CheckpointCorruptedError: too many boxes, or boxes that are not inside the tensor.
        """
        shape = record.shape
        if not is_storable(shape):
            raise CheckpointCorruptedError(f"a layout has the shape {str(shape)[:200]}")
        if record.cuts is not None:
            return _checked_grid(shape, record.cuts, most)
        if not 0 <= record.count <= most or len(record.offsets) != len(shape) or len(record.extents) != len(shape):
            raise CheckpointCorruptedError(f"a layout of shape {shape} has {record.count} boxes")
        if not record.count and not any(column.data for column in (*record.offsets, *record.extents)):
            return cls(shape, Boxes.of([], len(shape)))
        bounds = [n + 1 for n in shape]
        boxes = Boxes(*(_stack(columns, record.count, bounds) for columns in (record.offsets, record.extents)))
        pieces = [slice(start, start + MANY + 1) for start in range(0, len(boxes), MANY)]  # each with the row behind it
        if any(_outside(boxes.take(piece), shape) or _not_ascending(boxes.offset[piece]) for piece in pieces):
            raise CheckpointCorruptedError(f"a layout of shape {shape} has boxes outside of it or out of order")
        return cls(shape, boxes)


def shared_layouts(
    cuts: Iterable[tuple[tuple[int, ...], tuple[Box, ...]]],
) -> tuple[list[Layout], IntArray]:
    """The different layouts of some tensors, and which one each has.

    Args:
        cuts: The shape of each tensor, and its boxes in ascending order.
    """
    # By bytes, whose hashes nobody knows: tuples of integers can be made to have one hash, all of them.
    numbers: dict[bytes, int] = {}
    different: list[tuple[tuple[int, ...], tuple[Box, ...]]] = []
    layout_of = []
    for cut in cuts:
        number = numbers.setdefault(msgspec.msgpack.encode(cut), len(different))
        if number == len(different):
            different.append(cut)
        layout_of.append(number)
    return [Layout(shape, Boxes.of(boxes, len(shape))) for shape, boxes in different], np.array(layout_of, np.int64)


def grid_starts(boxes: Boxes, region: Box) -> list[IntArray] | None:
    """For each dimension where the boxes start, if they are a grid over a whole region, in row-major order; or None.

    Takes time in O(boxes).
    """
    if not len(boxes):
        return None
    if len(boxes) == 1:  # as of most tensors, in much less time
        box = Box(tuple(boxes.offset[0].tolist()), tuple(boxes.shape[0].tolist()))
        return list(boxes.offset[0][:, None]) if box == region else None
    starts: list[IntArray] = []
    inner = 1
    for d in range(boxes.dimensions - 1, -1, -1):
        column = boxes.offset[::inner, d]
        falls = np.flatnonzero(column[1:] <= column[:-1])
        size = int(falls[0]) + 1 if len(falls) else len(column)
        starts.insert(0, column[:size])
        inner *= size
    if inner != len(boxes):
        return None
    sizes = [len(s) for s in starts]
    for d, (places, low, extent) in enumerate(zip(starts, *region, strict=True)):
        lengths = np.diff(places, append=low + extent)
        along = [-1 if e == d else 1 for e in range(boxes.dimensions)]
        if places[0] != low or not (boxes.offset[:, d].reshape(sizes) == places.reshape(along)).all():
            return None
        if not (boxes.shape[:, d].reshape(sizes) == lengths.reshape(along)).all():
            return None
    return starts


def _cut(extent: int, cuts: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Where boxes start along a dimension of this extent that is cut so, and how far each of them reaches."""
    starts = np.concatenate([_FIRST, np.asarray(cuts, np.int64)])
    return narrow(starts, extent), narrow(np.diff(starts, append=extent), extent)


@lru_cache(maxsize=1024)
def _uncut(extent: int) -> tuple[IntArray, IntArray]:
    """The same of a dimension that is not cut, as most are not: layouts share what is said of it."""
    lengths = np.array([extent], np.int64)
    lengths.flags.writeable = False
    return _FIRST, lengths


@lru_cache(maxsize=64)  # no more: they are compared with each shape that a stranger made to have their hash
def _whole_layout(shape: tuple[int, ...]) -> Layout:
    """That of a tensor which is not cut; a file may have it many times."""
    return Layout.from_cuts(shape, [()] * len(shape))


def _row_major(columns: Sequence[IntArray]) -> IntArray:
    """All combinations of the columns' numbers, the last column's changing fastest, ``[product, columns]``."""
    if len(columns) == 1:
        return columns[0][:, None]
    if columns and all(len(column) == 1 for column in columns):  # as of most tensors, in much less time
        return np.concatenate(columns)[None]
    mesh = np.meshgrid(*columns, indexing="ij")
    return np.stack([m.reshape(-1) for m in mesh], axis=1) if mesh else np.zeros((1, 0), np.int64)


class LayoutBoxes:
    """The boxes of some layouts, one layout behind the other. Those of large ones are made when they are asked for.

    Args:
        layouts: The layouts.
        dimensions: How many dimensions the boxes get, as :class:`Boxes` are padded.
    """

    def __init__(self, layouts: Sequence[Layout], dimensions: int) -> None:
        self._dimensions = dimensions
        counts = [len(layout.parts) for layout in layouts]
        self._large = {i: layouts[i] for i, count in enumerate(counts) if count >= MANY}
        small = [layout for i, layout in enumerate(layouts) if i not in self._large]
        self._small = Boxes.joined([layout.boxes for layout in small], dimensions)
        self._edges = edges_of(np.array(counts, np.int64))
        self._before = edges_of(np.array([0 if i in self._large else n for i, n in enumerate(counts)], np.int64))

    def __len__(self) -> int:
        return int(self._edges[-1])

    def take(self, rows: IntArray) -> Boxes:
        """Some of them."""
        if not self._large:
            return self._small.take(rows)
        layout = np.searchsorted(self._edges, rows, side="right") - 1
        place = rows - self._edges[layout]
        found = Boxes(*(np.full((len(rows), self._dimensions), fill, np.int64) for fill in (0, 1)))
        for number, one in self._large.items():
            mine = np.flatnonzero(layout == number)
            if len(mine):
                some, width = one.parts.take(place[mine]), len(one.shape)
                found.offset[mine, :width], found.shape[mine, :width] = some.offset, some.shape
        rest = np.flatnonzero(~np.isin(layout, list(self._large)))
        some = self._small.take(self._before[layout[rest]] + place[rest])
        found.offset[rest], found.shape[rest] = some.offset, some.shape
        return found


def _outside(boxes: Boxes, shape: tuple[int, ...]) -> bool:
    """Whether some box ends outside of a tensor of this shape."""
    high = boxes.offset.astype(np.int64) + boxes.shape
    return bool((high > np.array(shape, np.int64)).any())


def _stack(columns: Sequence[Column], count: int, bounds: Sequence[int]) -> IntArray:
    """Columns of ``count`` integers, each below its bound, side by side, ``[count, columns]``."""
    most = max(bounds, default=1)
    parts = [narrow(unpack_column(c, count, n, "a layout"), most) for c, n in zip(columns, bounds, strict=True)]
    return np.stack(parts, axis=1) if parts else np.zeros((count, 0), np.int64)


def _not_ascending(offsets: IntArray) -> bool:
    """Whether some row does not come after the one before it, by the first column in which they differ."""
    if len(offsets) < 2 or not offsets.shape[1]:
        return len(offsets) >= 2  # rows without columns are equal
    step = np.diff(offsets.astype(np.int64), axis=0)  # [n - 1, ndim]
    first = (step != 0).argmax(axis=1)
    return bool((np.take_along_axis(step, first[:, None], axis=1) <= 0).any())


def _checked_grid(shape: tuple[int, ...], cuts: Sequence[Sequence[int]], most: int) -> Layout:
    most = min(most, _MOST_EMPTY) if 0 in shape else most
    if len(cuts) != len(shape) or math.prod(len(c) + 1 for c in cuts) > most:
        raise CheckpointCorruptedError(f"a layout of shape {shape} is cut in more than {most} boxes")
    if not any(cuts):
        return _whole_layout(shape)
    for n, places in zip(shape, cuts, strict=True):
        if places and any(b <= a for a, b in zip([0, *places], [*places, n], strict=True)):
            raise CheckpointCorruptedError(f"a layout of shape {shape} is cut at {str(places)[:200]}")
    return Layout.from_cuts(shape, cuts)
