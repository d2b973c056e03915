"""Which parts of which stored shards fill the boxes that a rank wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.boxes import Boxes
from ..core.columns import MANY, IntArray, Mask, all_in_row, edges_of, narrow, pieces_of, places_within
from ..core.grouping import group_rows
from ..core.layouts import LayoutBoxes
from ..core.shards import ShardTable
from .cover import covers_exactly
from .overlap import overlapping_pairs

__all__ = ["Overlaps", "WantedBoxes", "plan_load"]

_MANY = 300  # pairs of wanted box and box of a layout, from which on it is worth to look whether the latter are a grid
_TOGETHER = 1 << 14  # pairs of which there are boxes at a time, and boxes that are searched
_FEW_PAIRS = 4  # per wanted box and stored shard: compare them all rather than search


@dataclass(frozen=True, slots=True, eq=False)
class WantedBoxes:
    """Boxes to be filled: the place of each one's tensor in the table, ``[n]``, and where it lies in the tensor."""

    tensor: IntArray
    boxes: Boxes


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """What to read: a row for each overlap of a wanted box with a stored shard, by wanted box, then shard.

    Attributes:
        wanted: Row of the wanted box, ``[n]``.
        shard: The shard's place in the table, ``[n]``.
        like: Overlaps with one number have equal boxes in equally shaped wanted boxes and shards, ``[n]``.
        alike: Those boxes, by ``like``.
        uncovered: Rows of wanted boxes of which some element is in no shard, or in several.
    """

    wanted: IntArray
    shard: IntArray
    like: IntArray
    alike: Alike
    uncovered: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """The boxes of overlaps, those that are alike once. They are made when they are asked for: each takes more memory
    than a tiny shard.

    Attributes:
        asked: The different wanted boxes.
        stored: The boxes of all layouts.
        rows: Which of ``asked`` each is of, ``[alike]``.
        places: Which of ``stored``, ``[alike]``.
    """

    asked: Boxes
    stored: LayoutBoxes
    rows: IntArray
    places: IntArray

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, some: IntArray | slice) -> tuple[Boxes, Boxes, Boxes]:
        """Of some of them: what they have in common, in the global tensor; the shard's box; the wanted box."""
        asked, stored = self.asked.take(self.rows[some]), self.stored.take(self.places[some])
        return asked.common(stored), stored, asked


def plan_load(table: ShardTable, wanted: WantedBoxes) -> Overlaps:
    """Find the overlaps between the wanted boxes and the table's shards.

    Wanted boxes that are equal, of tensors that are cut alike, are planned once. For n wanted boxes, of which k are
    different, and m boxes in the different layouts it takes time in O(n + items + (k + m) log(k + m)). Layouts that
    are grids and of which much is wanted are not even searched.
    """
    first, alike = group_rows(
        np.column_stack([table.layout_of[wanted.tensor], wanted.boxes.offset, wanted.boxes.shape])
    )
    layout, asked = table.layout_of[wanted.tensor[first]], wanted.boxes.take(first)  # the different ones
    stored = table.layout_boxes(wanted.boxes.dimensions)
    rows, places, in_grid = _candidates(table, layout, asked, stored)
    pairs = _overlapping(Alike(asked, stored, narrow(rows), narrow(places)))
    del rows, places
    uncovered = asked.filled
    uncovered[in_grid] = False
    if uncovered.any():
        unsure, some = np.flatnonzero(uncovered), np.flatnonzero(uncovered[pairs.rows])
        groups = narrow(np.searchsorted(unsure, pairs.rows[some]))
        uncovered[unsure] = ~covers_exactly(groups, _common(pairs, some), asked.take(unsure))
    each = np.bincount(pairs.rows, minlength=len(first))
    per_wanted = each[alike]
    like = narrow(places_within(per_wanted, edges_of(each)[alike]))
    start = table.first_shard[wanted.tensor] - table.first_layout_row[table.layout_of[wanted.tensor]]
    return Overlaps(
        wanted=narrow(np.repeat(np.arange(len(alike)), per_wanted)),
        shard=narrow(pairs.places[like] + np.repeat(start, per_wanted)),
        like=like,
        alike=pairs,
        uncovered=np.flatnonzero(uncovered[alike]),
    )


def _common(pairs: Alike, some: IntArray) -> Boxes:
    """What some pairs have in common; of very many in narrow columns."""
    most = max(1, int(pairs.asked.high.max()), -int(pairs.asked.offset.min()))
    kind = narrow(np.broadcast_to(np.int64(0), len(some)), most).dtype
    found = Boxes(*(np.empty((len(some), pairs.asked.dimensions), kind) for _ in range(2)))
    for piece in pieces_of(len(some), _TOGETHER):
        part, _, _ = pairs.take(some[piece])
        found.offset[piece], found.shape[piece] = part.offset, part.shape
    return found


def _candidates(
    table: ShardTable, layout: IntArray, asked: Boxes, stored: LayoutBoxes
) -> tuple[IntArray, IntArray, IntArray]:
    """Pairs of asked box and box of its layout that may overlap, ordered by asked box, then the other.

    Also which asked boxes lie in a layout that is a whole grid, and so are covered exactly.

    Args:
        table: The table.
        layout: The layout of each asked box's tensor.
        asked: The boxes.
        stored: The boxes of all layouts.
    """
    order = np.argsort(layout, kind="stable")
    edges = np.searchsorted(layout[order], np.arange(len(table.layouts) + 1))
    parts, in_grid = [], [order[:0]]
    unsure = np.ones(len(layout), bool)
    for number in np.flatnonzero(table.layout_counts * np.diff(edges) >= _MANY).tolist():
        one = table.layouts[number]
        starts = one.starts()
        if starts is not None:
            mine = order[edges[number] : edges[number + 1]]
            rows, places = _in_grid(starts, asked.take(mine))
            parts.append((mine[rows], table.first_layout_row[number] + places))
            in_grid.append(mine[_are_inside(one.shape, asked.take(mine))])
            unsure[mine] = False
    rest = np.flatnonzero(unsure)
    rows, places = _pairs(table, layout[rest], asked.take(rest), stored)
    rows = np.concatenate([rest[rows], *(found for found, _ in parts)])
    places = np.concatenate([places, *(found for _, found in parts)])
    by_row = np.argsort(rows, kind="stable") if parts else slice(None)
    return rows[by_row], places[by_row], np.concatenate(in_grid)


def _are_inside(shape: Sequence[int], boxes: Boxes) -> Mask:
    ndim = len(shape)
    fits = (boxes.offset[:, :ndim] >= 0) & (boxes.high[:, :ndim] <= np.array(shape, np.int64))
    return all_in_row(fits) & boxes.filled


def _in_grid(grid: Sequence[IntArray], asked: Boxes) -> tuple[IntArray, IntArray]:
    """Pairs of some boxes and the boxes of a grid that they reach into, ordered by the former, then the latter."""
    rows, places = np.arange(len(asked)), np.zeros(len(asked), np.int64)
    high = asked.high
    for d, starts in enumerate(grid):
        first = np.maximum(0, np.searchsorted(starts, asked.offset[:, d], side="right") - 1)
        each = np.maximum(0, np.searchsorted(starts, high[:, d], side="left") - first)[rows]
        places = places_within(each, places * len(starts) + first[rows])
        rows = np.repeat(rows, each)
    return rows, places


def _overlapping(pairs: Alike) -> Alike:
    """Those of the pairs that have an element in common."""
    real = np.zeros(len(pairs), bool)
    for piece in pieces_of(len(pairs), _TOGETHER):
        real[piece] = pairs.take(piece)[0].filled
    return pairs if real.all() else Alike(pairs.asked, pairs.stored, pairs.rows[real], pairs.places[real])


def _pairs(table: ShardTable, layout: IntArray, asked: Boxes, stored: LayoutBoxes) -> tuple[IntArray, IntArray]:
    """The same for layouts of any kind: all pairs if they are few, else by search, in some of the layouts' boxes after
    others."""
    each = table.layout_counts[layout]
    most = len(stored) if len(stored) >= MANY else _FEW_PAIRS * (len(layout) + len(stored))
    if int(each.sum()) <= most:
        return np.repeat(np.arange(len(each)), each), places_within(each, table.first_layout_row[layout])
    found = []
    for piece in pieces_of(len(stored), _TOGETHER):
        places = np.arange(len(stored))[piece]
        layouts = np.searchsorted(table.first_layout_row, places, side="right") - 1
        mine = np.flatnonzero((layout >= layouts[0]) & (layout <= layouts[-1]))
        i, j = overlapping_pairs(asked.take(mine).layered(layout[mine]), stored.take(places).layered(layouts))
        found.append((mine[i], places[j]))
    rows, places = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((places, rows)) if len(found) > 1 else slice(None)
    return rows[order], places[order]
