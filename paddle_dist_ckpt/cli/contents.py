"""The contents of one tensor or value: items, edges of what is large, statistics in bounded memory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.box import Box
from ..core.decoding import decoding
from ..core.dtypes import DType, arithmetic_dtype
from ..core.layouts import Layout
from ..core.memory import zeros_of
from ..core.shards import Kind
from ..errors import CheckpointCorruptedError, CheckpointNotFoundError
from ..files.metadata import Metadata
from ..folder.boxes import BoxReader
from ..folder.selection import Selection, unread
from ..folder.stored_values import read_values
from ..storage.base import Storage
from ..tree.values import from_jsonable
from ..visible import MOST_KEY, visible
from .regions import WINDOW_BYTES, best_along, edges, windows

__all__ = ["Statistics", "TensorContent", "examples_text", "is_value", "leaf_of", "leaf_values"]

_MOST_WINDOWS = 1 << 10
_ITEMS_AT_ONCE = 1 << 20  # that are there in 64 bits
_MOST_ALIKE = 500
_MOST_PARTS = 50


@dataclass(frozen=True, slots=True)
class Statistics:
    """What is known of the items of a region. Complex items count by their magnitude.

    Attributes:
        elements: How many items there are.
        nan: How many are NaN.
        infinite: How many are infinite.
        zero: How many are zero.
        min: The smallest finite one; None if there is none, as for the others.
        max: The largest finite one.
        mean: The mean of the finite ones.
        norm: The square root of the sum of the finite ones' squares.
    """

    elements: int
    nan: int
    infinite: int
    zero: int
    min: float | None
    max: float | None
    mean: float | None
    norm: float | None


@dataclass(frozen=True, slots=True)
class TensorContent:
    """What is in a tensor of a checkpoint, ``row`` of its table."""

    storage: Storage
    metadata: Metadata
    row: int

    @property
    def key(self) -> str:
        """Its flat key."""
        return self.metadata.key(self.metadata.table.paths[self.row])

    @property
    def layout(self) -> Layout:
        """How it is cut."""
        return self.metadata.table.layouts[self.metadata.table.layout_of[self.row]]

    @property
    def dtype(self) -> DType:
        """Its element type."""
        return self.metadata.table.dtypes[self.row]

    def region(self, box: Box) -> np.ndarray:
        """The items of a region, of the region's shape, as raw items."""
        with self._reader([box]) as reader:
            items = zeros_of(box.shape, self.dtype.raw, self.key)
            reader.read([0], [items])
        return items

    def edges(self, box: Box, items: int) -> np.ndarray:
        """A small array that numpy, if told to leave out the middle of it, prints like the region; see
        :func:`.regions.edges`."""
        small = np.zeros([min(n, 2 * items + 1) for n in box.shape], self.dtype.raw)
        parts = list(edges(box, items))
        targets = [small[Box(place, part.shape).slices] for part, place in parts]
        with self._reader([part for part, _ in parts]) as reader:
            reader.read(range(len(parts)), targets)
        return small

    def statistics(self, box: Box, progress: Callable[[int], None]) -> Statistics:
        """The statistics of a region, read in windows of 16 MiB; nothing is read of what are holes."""
        sums = _Sums()
        for raw, times in self._windows(box):
            items = raw.reshape(-1)
            with np.errstate(over="ignore"):  # a sum that is infinite says so itself
                for start in range(0, items.size, _ITEMS_AT_ONCE):
                    sums.add(items[start : start + _ITEMS_AT_ONCE].view(arithmetic_dtype(self.dtype)), times)
            progress(raw.nbytes * times)
        return sums.statistics(box.size)

    def _windows(self, box: Box) -> Iterator[tuple[np.ndarray, int]]:
        """The raw items of a region, some at a time, and how many times there are these: of a hole one zero so many
        times.

        Of a region of more than 16 GiB windows are larger at first, so that large holes are known by a few looks.
        """
        itemsize = self.dtype.itemsize
        most = max(WINDOW_BYTES, box.size * itemsize // _MOST_WINDOWS)
        parts = list(windows(box, itemsize, most, best_along(self.layout, itemsize, most)))
        with self._reader(parts) as reader:
            for row, part in enumerate(parts):
                if reader.is_hole(row):
                    yield np.zeros(1, self.dtype.raw), part.size
                elif part.size * itemsize > WINDOW_BYTES:
                    yield from self._windows(part)
                else:
                    raw = np.empty(part.shape, self.dtype.raw)
                    reader.read([row], [raw], threads=2)
                    yield raw, 1

    def _reader(self, boxes: Sequence[Box]) -> BoxReader:
        return BoxReader(self.storage, self.metadata, [self.row] * len(boxes), boxes)


def leaf_of(metadata: Metadata, key: str) -> int:
    """The leaf of a flat key. Leaves are numbered as paths are: rows of the table, and then values of `.metadata`.

    Raises:
        CheckpointNotFoundError: there is no such key; says which are like it.
    """
    leaf = next((leaf for leaf, path in enumerate(metadata.paths) if metadata.key(path) == key), None)
    if leaf is not None:
        return leaf
    reason = unread(metadata, Selection(keys=[key])).get(key)
    if reason is not None:
        raise CheckpointNotFoundError(f"{key} of checkpoint {metadata.unique_id} is not read: {reason}")
    raise CheckpointNotFoundError(
        f"checkpoint {metadata.unique_id} has no key '{visible(key)}'; {examples_text(metadata, key)}"
    )


def is_value(metadata: Metadata, leaf: int) -> bool:
    """Whether a leaf is a value, wherever it is stored."""
    return leaf >= len(metadata.table.paths) or bool(metadata.table.kinds[leaf] == Kind.VALUE)


def leaf_values(storage: Storage, metadata: Metadata, leaves: Iterable[int]) -> Iterator[Any]:
    """The values that are these leaves, wherever they are stored, read many at a time.

    Raises:
        CheckpointCorruptedError: one is damaged.
    """
    leaves, rows = list(leaves), len(metadata.table.paths)
    stored = read_values(storage, metadata, [leaf for leaf in leaves if leaf < rows])
    for leaf in leaves:
        if leaf < rows:
            value = next(stored)
            if isinstance(value, CheckpointCorruptedError):
                raise value
            yield value
        else:
            path, tree = metadata.value_records[leaf - rows]
            with decoding(metadata.key(path)):
                value = from_jsonable(tree)
            yield value


def examples_text(metadata: Metadata, wanted: str) -> str:
    """Keys of a checkpoint that are like one that it does not have, or like a pattern, in words."""
    keys = list(map(metadata.key, metadata.paths))
    near = _near(wanted, keys) or keys[:3]
    return f"there are, for example: {', '.join(map(visible, near)) or 'none'}"


def _near(wanted: str, keys: Sequence[str]) -> list[str]:
    """The keys that are most like a text. Only those of the most parts in common with it, and of lengths like its own,
    are looked at closely, since that takes long."""
    import difflib

    parts = set(wanted.split("."))

    def apart(key: str) -> tuple[int, int]:
        return -len(parts.intersection(key.split(".", _MOST_PARTS))), abs(len(key) - len(wanted))

    alike = heapq.nsmallest(_MOST_ALIKE, (key for key in keys if len(key) <= 3 * len(wanted)), key=apart)
    return difflib.get_close_matches(wanted, alike, n=3, cutoff=0.5) if len(wanted) <= MOST_KEY else []


@dataclass(slots=True)
class _Sums:
    """What :class:`Statistics` are made of, of the items so far."""

    nan: int = 0
    infinite: int = 0
    zero: int = 0
    finite: int = 0
    low: list[Any] = field(default_factory=list)
    high: list[Any] = field(default_factory=list)
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: np.ndarray, times: int) -> None:
        """Count items, each of them ``times`` times."""
        if values.dtype.kind == "b":
            values = values.view(np.uint8)
        if values.dtype.kind not in "iufc":  # bfloat16 and float8, which numpy itself does not know
            values = values.astype(np.float32)
        if values.dtype.kind == "c":
            values = np.abs(values.astype(np.complex128, copy=False))  # in 32 bits the magnitude may be too large
        if values.dtype.kind == "f":
            self.nan += times * int(np.isnan(values).sum())
            self.infinite += times * int(np.isinf(values).sum())
            values = values[np.isfinite(values)]
        if not values.size:
            return
        self.zero += times * int(values.size - np.count_nonzero(values))
        self.finite += times * values.size
        self.low = [min([*self.low, values.min().item()])]
        self.high = [max([*self.high, values.max().item()])]
        wide = values.astype(np.float64, copy=False)
        self.total += times * float(wide.sum())
        self.squares += times * float(np.dot(wide, wide))

    def statistics(self, elements: int) -> Statistics:
        """What there is to say of so many items, all of which have been added."""
        if not self.finite:
            return Statistics(elements, self.nan, self.infinite, self.zero, None, None, None, None)
        mean, norm = self.total / self.finite, math.sqrt(self.squares)
        return Statistics(elements, self.nan, self.infinite, self.zero, min(self.low), max(self.high), mean, norm)
