"""Reads many small entries in one go, without an object for each.

What is contiguous in its entry and in its target is copied by address. Other items of one kind, that is with equal
boxes in entries and targets of equal shapes, are cut out of all entries of a run in one numpy operation. What has to be
cast is cast in one operation for all items of a run that are alike in their types.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box, flat_range, join
from ..core.columns import IntArray, edges_of, places_of_equals
from ..core.dtypes import DType, cast_array
from ..core.memory import Bytes1D, address_of, array_at, copy_each, copy_various
from ..errors import CheckpointError
from .reader import clear, view_at
from .runs import CHUNK_BYTES, Segments

__all__ = ["Batch", "ItemKind", "Kinds", "hand_out"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class ItemKind:
    """What items that are alike have in common.

    Attributes:
        dtype: Element type of the entry.
        wanted: Element type of the target.
        entry_shape: Shape of the stored shard.
        entry_box: The item, counted from the shard's corner.
        target_shape: Shape of the target.
        target_box: The item, counted from the target's corner.
        strides: The target's, in bytes; None if it is contiguous.
    """

    dtype: DType
    wanted: DType
    entry_shape: tuple[int, ...]
    entry_box: Box
    target_shape: tuple[int, ...]
    target_box: Box
    strides: tuple[int, ...] | None

    @property
    def entry_bytes(self) -> int:
        """Size of the entry."""
        return Box((), self.entry_shape).size * self.dtype.itemsize


class Kinds:
    """Different kinds of items, in columns. There may be a kind for each item, so objects are made of few of them.

    Attributes:
        one: Makes an object of one of the kinds.
        pairs: The different types of entry and target. Items of kinds that are in one piece in both are moved together
            if they have the same, whatever their shapes.
        columns: Of each kind: which of ``pairs`` it has, or a number behind them, its own, if it is not in one piece;
            where it starts in entry and target, in bytes, and how many elements it has, ``[kinds, 4]``.
        entry_bytes: The size of its entry, ``[kinds]``.
    """

    def __init__(
        self,
        one: Callable[[int], ItemKind],
        pairs: Sequence[tuple[DType, DType]],
        columns: IntArray,
        entry_bytes: IntArray,
    ) -> None:
        self.one, self.pairs, self.columns, self.entry_bytes = one, list(pairs), columns, entry_bytes

    def __len__(self) -> int:
        return len(self.columns)

    @classmethod
    def of(cls, each: Sequence[ItemKind]) -> Kinds:
        """These kinds."""
        numbers: dict[tuple[DType, DType], int] = {}
        pair = [numbers.setdefault((kind.dtype, kind.wanted), len(numbers)) for kind in each]
        rows = [
            (
                _start_in(kind.entry_box, kind.entry_shape),
                _start_in(kind.target_box, kind.target_shape) if kind.strides is None else -1,
                kind.entry_box.size,
                kind.entry_bytes,
            )
            for kind in each
        ]
        columns = np.array(rows, np.int64).reshape(-1, 4).T
        return cls.of_columns(each.__getitem__, list(numbers), np.array(pair, np.int64), *columns)

    @classmethod
    def of_columns(
        cls,
        one: Callable[[int], ItemKind],
        pairs: Sequence[tuple[DType, DType]],
        pair: IntArray,
        source: IntArray,
        target: IntArray,
        size: IntArray,
        entry_bytes: IntArray,
    ) -> Kinds:
        """Kinds of which each has one of ``pairs``; ``source`` and ``target`` say which element of its entry and its
        target it starts with, -1 if it is not in one piece there, all ``[kinds]``."""
        pieces = (source < 0) | (target < 0)
        stored, wanted = np.array([[a.itemsize, b.itemsize] for a, b in pairs], np.int64).reshape(-1, 2)[pair].T
        columns = np.empty((len(pair), 4), np.int64)
        columns[:, 0] = np.where(pieces, len(pairs) + np.arange(len(pair)), pair)
        columns[:, 1] = np.where(pieces, 0, source * stored)
        columns[:, 2] = np.where(pieces, 0, target * wanted)
        columns[:, 3] = size
        return cls(one, pairs, columns, entry_bytes)

    @classmethod
    def joined(cls, parts: Sequence[Kinds]) -> Kinds:
        """All of these, one behind the other."""
        if len(parts) == 1:
            return parts[0]
        first = edges_of(np.array([len(part) for part in parts], np.int64)).tolist()
        numbers: dict[tuple[DType, DType], int] = {}
        for pair in (pair for part in parts for pair in part.pairs):
            numbers.setdefault(pair, len(numbers))
        columns = np.concatenate([part.columns for part in parts])
        for part, start in zip(parts, first[:-1], strict=True):
            mine, group = columns[start : start + len(part)], part.columns[:, 0]
            own = len(numbers) + start + group - len(part.pairs)
            known = np.array([*(numbers[pair] for pair in part.pairs), 0], np.int64)
            mine[:, 0] = np.where(group < len(part.pairs), known[np.minimum(group, len(part.pairs))], own)

        def one(number: int) -> ItemKind:
            part = bisect.bisect_right(first, number) - 1
            return parts[part].one(number - first[part])

        return cls(one, list(numbers), columns, np.concatenate([part.entry_bytes for part in parts]))


def _start_in(box: Box, shape: Sequence[int]) -> int:
    """The first element of a box in a tensor of this shape, -1 if it is not in one piece there."""
    found = flat_range(box, shape)
    return -1 if found is None else found[0]


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Segments):
    """Items of one file, in the order of their entries.

    The segments are the items' entries, of one block each; one of which several items are wanted is there repeatedly.

    Attributes:
        kind: Which of ``kinds`` each item is, ``[items]``.
        addresses: Where each item's target starts in memory, ``[items]``. The memory must stay alive.
        kinds: The kinds.
        name: What to call an item's target in errors.
    """

    kind: IntArray
    addresses: IntArray
    kinds: Kinds
    name: Callable[[int], str]

    def take(self, first: int, last: int, data: Bytes1D) -> None:
        starts, addresses = self.starts[first:last] - self.starts[first], self.addresses[first:last]
        hand_out(self.kinds, self.kind[first:last], starts, addresses, data, lambda i: self.name(first + i))

    def take_zeros(self, first: int, last: int) -> None:
        # Neighbours in a target are one: each column by itself would take far more time.
        boxes: list[tuple[tuple[Any, ...], Box]] = []
        for number, address in zip(self.kind[first:last].tolist(), self.addresses[first:last].tolist(), strict=True):
            kind = self.kinds.one(number)
            target = address, kind.target_shape, kind.strides, kind.wanted.raw
            together = join(boxes[-1][1], kind.target_box) if boxes and boxes[-1][0] == target else None
            if together is not None:
                boxes.pop()
            boxes.append((target, together or kind.target_box))
        for target, box in boxes:
            clear(view_at(array_at(*target, None), box.slices))


def hand_out(
    kinds: Kinds,
    kind: IntArray,
    starts: IntArray,
    targets: IntArray,
    buffer: Bytes1D,
    name: Callable[[int], str],
) -> None:
    """Copy items from a buffer to their targets, many together, cast where the kind says so.

    Args:
        kinds: The kinds.
        kind: Which of them each item is, ``[items]``.
        starts: Where each item's entry starts in the buffer, ``[items]``.
        targets: Where each item's target starts in memory, ``[items]``.
        buffer: What was read, or received.
        name: What to call an item in errors.

    Raises:
        CheckpointError: a finite value would become infinite.
    """
    group, source, target, size = kinds.columns[kind].T
    for alike in places_of_equals(group):
        number = int(group[alike[0]])
        one = None if number < len(kinds.pairs) else kinds.one(number - len(kinds.pairs))
        stored, wanted = dtypes = kinds.pairs[number] if one is None else (one.dtype, one.wanted)
        for items in _in_chunks(alike, size[alike] * max(stored.itemsize, wanted.itemsize)):
            if one is None:
                sources, places = starts[items] + source[items], targets[items] + target[items]
                too_large = _hand_out_rows(dtypes, sources + address_of(buffer), places, size[items])
            else:
                too_large = _hand_out_boxes(one, starts[items], targets[items], buffer)
            if too_large is not None:
                key = name(int(items[too_large]))
                raise CheckpointError(f"{key}: a finite {stored.name} value is too large for {wanted.name}")


def _in_chunks(items: IntArray, sizes: IntArray) -> list[IntArray]:
    """Items of so many bytes each, cut so that what is between buffer and targets takes bounded memory."""
    chunk = (np.cumsum(sizes) - 1) // CHUNK_BYTES
    return np.split(items, np.flatnonzero(np.diff(chunk)) + 1)


def _hand_out_rows(dtypes: tuple[DType, DType], sources: IntArray, targets: IntArray, sizes: IntArray) -> int | None:
    """Copy items that are so many elements in a row here and there; returns the first of which a value is too large."""
    stored, wanted = dtypes
    if stored is wanted:
        copy_various(targets, sources, sizes * stored.itemsize)
        return None
    edges = edges_of(sizes)
    raw, cast = np.empty(int(edges[-1]), stored.raw), np.empty(int(edges[-1]), wanted.raw)
    copy_various(address_of(raw) + edges[:-1] * stored.itemsize, sources, sizes * stored.itemsize)
    fits = cast_array(raw, stored, cast, wanted)
    copy_various(targets, address_of(cast) + edges[:-1] * wanted.itemsize, sizes * wanted.itemsize)
    return None if fits else _too_large([raw[a:b] for a, b in itertools.pairwise(edges.tolist())], stored, wanted)


def _hand_out_boxes(kind: ItemKind, starts: IntArray, targets: IntArray, buffer: Bytes1D) -> int | None:
    """Copy items of one kind, of any strides; returns the first of which a value is too large."""
    parts, too_large = _cut_out(kind, starts, buffer), None
    if kind.dtype is not kind.wanted:
        raw, parts = parts, np.empty(parts.shape, kind.wanted.raw)
        if not cast_array(raw, kind.dtype, parts, kind.wanted):
            too_large = _too_large(raw, kind.dtype, kind.wanted)
    target = flat_range(kind.target_box, kind.target_shape) if kind.strides is None else None
    if target is not None:
        nbytes = kind.target_box.size * kind.wanted.itemsize
        places = targets + target[0] * kind.wanted.itemsize
        copy_each(places, address_of(parts) + np.arange(len(places)) * nbytes, nbytes)
        return too_large
    for i, address in enumerate(targets.tolist()):
        array = array_at(address, kind.target_shape, kind.strides, kind.wanted.raw, None)
        view_at(array, kind.target_box.slices)[...] = parts[i]
    return too_large


def _too_large(parts: Iterable[Array], stored: DType, wanted: DType) -> int:
    """The first of some parts, not all of which can be cast, that cannot."""
    parts = map(np.atleast_1d, parts)
    return next(
        i for i, part in enumerate(parts) if not cast_array(part, stored, np.empty(part.shape, wanted.raw), wanted)
    )


def _cut_out(kind: ItemKind, starts: IntArray, buffer: Bytes1D) -> Array:
    """The items of some entries as one contiguous array, ``[items, *box]``.

    The buffer is looked at as an array that has an entry at each of its bytes.
    """
    raw, shape = kind.dtype.raw, kind.entry_shape
    size = Box((), shape).size * kind.dtype.itemsize
    inner = np.empty(shape, raw).strides
    entries: Array = np.ndarray((len(buffer) - size + 1, *shape), raw, buffer.data, 0, (1, *inner))
    return np.ascontiguousarray(view_at(entries, (slice(None), *kind.entry_box.slices))[starts])
