"""Giving each box to one of the ranks that hold it, or in pieces to several of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.boxes import Boxes
from ..core.columns import IntArray, edges_of, places_within, sums_by
from ..core.grouping import group_rows
from .balance import ReplicaSet, balanced_shares, deal

__all__ = ["HeldBoxes", "divide"]


@dataclass(frozen=True, slots=True, eq=False)
class HeldBoxes:
    """Different boxes, and the local shards that hold each.

    Attributes:
        boxes: The boxes, ``n`` of them.
        first: Where the holders of each begin in ``shard`` and ``rank``, ``[n]``. Boxes cut from one box share them.
        count: How many they are, ``[n]``.
        shard: The local shards that hold a box, each of another rank, ascending for each box, ``[holders]``.
        rank: Positions of the ranks that have these, ``[holders]``.
    """

    boxes: Boxes
    first: IntArray
    count: IntArray
    shard: IntArray
    rank: IntArray


def divide(held: HeldBoxes, nbytes: IntArray, itemsize: IntArray, fixed: IntArray) -> list[tuple[IntArray, Boxes]]:
    """Let every rank write about the same number of bytes.

    Takes time in O(n log n + holders) for n boxes, beside that of :func:`.balance.balanced_shares`.

    Args:
        held: Boxes that do not overlap, and who holds them.
        nbytes: Their bytes, ``[boxes]``.
        itemsize: Their tensors' item sizes, ``[boxes]``.
        fixed: Bytes that each rank writes beside these boxes, ``[ranks]``.

    Returns:
        What is written, in several parts: the local shard that each box is cut from, and the boxes.
    """
    single = np.flatnonzero(held.count == 1)
    parts = [_written(held, single, np.zeros_like(single))]
    tolerance = (int(nbytes.sum()) + int(fixed.sum())) // len(fixed) // 128
    loads = fixed + sums_by(held.rank[held.first[single]], nbytes[single], len(fixed))
    sets, rows = _replica_sets(held, nbytes)
    if not sets:
        return parts
    shares = np.concatenate(balanced_shares(loads, sets))
    dealt = deal(shares, nbytes[rows], held.boxes.shape[rows], itemsize[rows], tolerance)
    number = places_within(np.array([len(s.members) for s in sets], np.int64))  # of a member, in its set
    parts.append(_written(held, rows[dealt.item], number[dealt.member]))
    if dealt.pieces:
        item, member, pieces = zip(*dealt.pieces, strict=True)
        shard, around = _written(held, rows[list(item)], number[list(member)])
        inner = Boxes.of(pieces, around.dimensions)
        parts.append((shard, Boxes(around.offset + inner.offset, inner.shape)))
    return parts


def _written(held: HeldBoxes, rows: IntArray, number: IntArray) -> tuple[IntArray, Boxes]:
    """These boxes, each written by one of its holders, given by its number among them."""
    return held.shard[held.first[rows] + number], held.boxes.take(rows)


def _replica_sets(held: HeldBoxes, nbytes: IntArray) -> tuple[list[ReplicaSet], IntArray]:
    """The different sets of several ranks that hold boxes, small ones first; and the boxes of one after the other."""
    sets: list[ReplicaSet] = []
    parts = [np.zeros(0, np.int64)]
    for count in np.unique(held.count[held.count > 1]).tolist():
        rows = np.flatnonzero(held.count == count)
        members = held.rank[held.first[rows][:, None] + np.arange(count)]
        first, which = group_rows(members)
        different = members[first]
        ascending = sorted(range(len(first)), key=different.tolist().__getitem__)
        place = np.empty_like(first)
        place[ascending] = np.arange(len(first))
        rows = rows[np.argsort(place[which], kind="stable")]
        starts = edges_of(np.bincount(place[which]))[:-1]
        sizes = np.add.reduceat(nbytes[rows], starts).tolist()
        sets += map(ReplicaSet, different[ascending], sizes)
        parts.append(rows)
    return sets, np.concatenate(parts)
