"""Which parts of which stored shards fill the boxes that a rank wants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.shards import IntArray, ShardTable
from .cover import covers_exactly
from .overlap import overlapping_pairs

__all__ = ["ReadItems", "WantedBoxes", "plan_load"]

_FEW_PAIRS = 4  # per wanted box and stored shard: compare them all rather than search


@dataclass(frozen=True, slots=True, eq=False)
class WantedBoxes:
    """Boxes to be filled, a row each: the tensor's place in the table, offset and shape padded with 0 and 1."""

    tensor: IntArray
    offset: IntArray
    shape: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class ReadItems:
    """What to read: a row for each overlap of a wanted box with a stored shard.

    Attributes:
        wanted: Row of the wanted box.
        shard: The shard's place in the table.
        offset: Where the overlap starts in the global tensor, ``[n, d]``.
        shape: Its shape, ``[n, d]``.
        uncovered: Rows of wanted boxes of which some element is in no shard, or in several.
    """

    wanted: IntArray
    shard: IntArray
    offset: IntArray
    shape: IntArray
    uncovered: IntArray


def plan_load(table: ShardTable, wanted: WantedBoxes) -> ReadItems:
    """Find the overlaps between the wanted boxes and the table's shards.

    Takes time in O((n + m) log(n + m) + overlaps) for n wanted boxes and m shards of the same tensors.
    """
    dimensions = wanted.offset.shape[1]
    stored_low, stored_shape = table.box_columns(dimensions)
    stored_high = stored_low + stored_shape
    rows, shards = _candidates(table, wanted, stored_low, stored_high)
    low = np.maximum(wanted.offset[rows], stored_low[shards])
    high = np.minimum((wanted.offset + wanted.shape)[rows], stored_high[shards])
    real = (low < high).all(axis=1)
    rows, shards, low, high = rows[real], shards[real], low[real], high[real]
    nonempty = (wanted.shape > 0).all(axis=1)
    exact = covers_exactly(rows, low, high, wanted.offset, wanted.offset + wanted.shape)
    return ReadItems(rows, shards, low, high - low, np.flatnonzero(nonempty & ~exact))


def _candidates(
    table: ShardTable, wanted: WantedBoxes, stored_low: IntArray, stored_high: IntArray
) -> tuple[IntArray, IntArray]:
    """Pairs of wanted box and shard of one tensor that may overlap, ordered by wanted box, then shard."""
    first = table.first_shard[wanted.tensor]
    counts = table.first_shard[wanted.tensor + 1] - first
    pairs = int(counts.sum())
    if pairs <= _FEW_PAIRS * (len(wanted.tensor) + len(stored_low)):
        rows = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(pairs) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows, first[rows] + within
    column, stored = wanted.tensor[:, None], table.shard_tensor[:, None]
    return overlapping_pairs(
        np.hstack([column, wanted.offset]),
        np.hstack([column + 1, wanted.offset + wanted.shape]),
        np.hstack([stored, stored_low]),
        np.hstack([stored + 1, stored_high]),
    )
