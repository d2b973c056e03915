"""Which parts of which stored shards fill the boxes that a rank wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..core.columns import IntArray, places_within
from ..core.grouping import group_rows
from ..core.shards import ShardTable
from .cover import covers_exactly
from .overlap import overlapping_pairs

__all__ = ["ReadItems", "WantedBoxes", "plan_load"]

_MANY = 300  # pairs of wanted box and box of a layout, from which on it is worth to look whether the latter are a grid
_FEW_PAIRS = 4  # per wanted box and stored shard: compare them all rather than search


@dataclass(frozen=True, slots=True, eq=False)
class WantedBoxes:
    """Boxes to be filled, a row each: the tensor's place in the table, offset and shape padded with 0 and 1."""

    tensor: IntArray
    offset: IntArray
    shape: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class ReadItems:
    """What to read: a row for each overlap of a wanted box with a stored shard, by wanted box, then shard.

    Attributes:
        wanted: Row of the wanted box.
        shard: The shard's place in the table.
        like: Items with one number have equal boxes in equally shaped wanted boxes and shards, ``[n]``.
        offset: Where the overlap starts in the global tensor, by ``like``, ``[different, d]``.
        shape: Its shape, by ``like``.
        stored_offset: Where the shard starts, by ``like``.
        stored_shape: The shard's shape, by ``like``.
        uncovered: Rows of wanted boxes of which some element is in no shard, or in several.
    """

    wanted: IntArray
    shard: IntArray
    like: IntArray
    offset: IntArray
    shape: IntArray
    stored_offset: IntArray
    stored_shape: IntArray
    uncovered: IntArray


def plan_load(table: ShardTable, wanted: WantedBoxes) -> ReadItems:
    """Find the overlaps between the wanted boxes and the table's shards.

    Wanted boxes that are equal, of tensors that are cut alike, are planned once. For n wanted boxes, of which k are
    different, and m boxes in the different layouts it takes time in O(n + items + (k + m) log(k + m)). Layouts that
    are grids and of which much is wanted are not even searched.
    """
    keys = np.column_stack([table.layout_of[wanted.tensor], wanted.offset, wanted.shape])
    first, alike = group_rows(keys)
    layout, low, shape = keys[first, 0], wanted.offset[first], wanted.shape[first]
    high = low + shape
    counts = table.layout_counts
    base = np.cumsum(counts) - counts
    stored_low, stored_shape = table.layout_boxes(wanted.offset.shape[1])
    stored_high = stored_low + stored_shape
    rows, boxes, in_grid = _candidates(table, layout, base, counts, low, high, stored_low, stored_high)
    rows, boxes = _overlapping(rows, boxes, low, high, stored_low, stored_high)
    common_low, common_high = np.maximum(low[rows], stored_low[boxes]), np.minimum(high[rows], stored_high[boxes])
    uncovered = np.asarray((shape > 0).all(axis=1))
    uncovered[in_grid] = False
    if uncovered.any():
        unsure, some = np.flatnonzero(uncovered), uncovered[rows]
        groups = np.searchsorted(unsure, rows[some])
        uncovered[unsure] = ~covers_exactly(groups, common_low[some], common_high[some], low[unsure], high[unsure])
    each = np.bincount(rows, minlength=len(first))
    per_wanted = each[alike]
    place = np.repeat((np.cumsum(each) - each)[alike], per_wanted) + places_within(per_wanted)
    start = table.first_shard[wanted.tensor] - base[table.layout_of[wanted.tensor]]
    return ReadItems(
        wanted=np.repeat(np.arange(len(alike)), per_wanted),
        shard=boxes[place] + np.repeat(start, per_wanted),
        like=place,
        offset=common_low,
        shape=common_high - common_low,
        stored_offset=stored_low[boxes],
        stored_shape=stored_shape[boxes],
        uncovered=np.flatnonzero(uncovered[alike]),
    )


def _candidates(
    table: ShardTable,
    layout: IntArray,
    base: IntArray,
    counts: IntArray,
    low: IntArray,
    high: IntArray,
    stored_low: IntArray,
    stored_high: IntArray,
) -> tuple[IntArray, IntArray, IntArray]:
    """Pairs of wanted box and box of its layout that may overlap, ordered by wanted box, then the other.

    Also which wanted boxes lie in a layout that is a whole grid, and so are covered exactly.
    """
    order = np.argsort(layout, kind="stable")
    edges = np.searchsorted(layout[order], np.arange(len(counts) + 1))
    parts, in_grid = [], [order[:0]]
    unsure = np.ones(len(layout), bool)
    for number in np.flatnonzero(counts * np.diff(edges) >= _MANY).tolist():
        one = table.layouts[number]
        cuts = one.cuts()
        if cuts is not None:
            wanted = order[edges[number] : edges[number + 1]]
            rows, boxes = _in_grid(cuts, low[wanted], high[wanted])
            parts.append((wanted[rows], base[number] + boxes))
            in_grid.append(wanted[_is_inside(one.shape, low[wanted], high[wanted])])
            unsure[wanted] = False
    rest = np.flatnonzero(unsure)
    rows, boxes = _pairs(layout[rest], base, counts, low[rest], high[rest], stored_low, stored_high)
    rows = np.concatenate([rest[rows], *(found for found, _ in parts)])
    boxes = np.concatenate([boxes, *(found for _, found in parts)])
    by_row = np.argsort(rows, kind="stable") if parts else slice(None)
    return rows[by_row], boxes[by_row], np.concatenate(in_grid)


def _is_inside(shape: Sequence[int], low: IntArray, high: IntArray) -> npt.NDArray[np.bool_]:
    ndim = len(shape)
    fits = (low[:, :ndim] >= 0) & (high[:, :ndim] <= np.array(shape, np.int64))
    return np.asarray(fits.all(axis=1) & (low < high).all(axis=1))


def _in_grid(cuts: Sequence[Sequence[int]], low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
    """Pairs of some boxes and the boxes of a grid that they reach into, ordered by the former, then the latter."""
    rows, boxes = np.arange(len(low)), np.zeros(len(low), np.int64)
    for d, places in enumerate(cuts):
        starts = np.array([0, *places], np.int64)
        first = np.maximum(0, np.searchsorted(starts, low[:, d], side="right") - 1)
        each = np.maximum(0, np.searchsorted(starts, high[:, d], side="left") - first)[rows]
        boxes = np.repeat(boxes * len(starts) + first[rows], each) + places_within(each)
        rows = np.repeat(rows, each)
    return rows, boxes


def _overlapping(
    rows: IntArray, boxes: IntArray, low: IntArray, high: IntArray, stored_low: IntArray, stored_high: IntArray
) -> tuple[IntArray, IntArray]:
    """Those of the pairs that have an element in common."""
    for d in range(low.shape[1]):
        real = np.maximum(low[rows, d], stored_low[boxes, d]) < np.minimum(high[rows, d], stored_high[boxes, d])
        if not real.all():
            rows, boxes = rows[real], boxes[real]
    return rows, boxes


def _pairs(
    layout: IntArray,
    base: IntArray,
    counts: IntArray,
    low: IntArray,
    high: IntArray,
    stored_low: IntArray,
    stored_high: IntArray,
) -> tuple[IntArray, IntArray]:
    """The same for layouts of any kind: all pairs if they are few, else by search."""
    each = counts[layout]
    pairs = int(each.sum())
    if pairs <= _FEW_PAIRS * (len(layout) + len(stored_low)):
        return np.repeat(np.arange(len(each)), each), np.repeat(base[layout], each) + places_within(each)
    column, stored = layout[:, None], np.repeat(np.arange(len(counts)), counts)[:, None]
    return overlapping_pairs(
        np.hstack([column, low]),
        np.hstack([column + 1, high]),
        np.hstack([stored, stored_low]),
        np.hstack([stored + 1, stored_high]),
    )
