"""Giving each box to one of the ranks that hold it, or in pieces to several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.boxes import Boxes
from ..core.columns import IntArray, places_within
from ..core.grouping import group_rows
from .balance import ReplicaSet, balanced_shares, deal

__all__ = ["HeldBoxes", "WrittenBoxes", "divide"]


@dataclass(frozen=True, slots=True, eq=False)
class HeldBoxes:
    """Different boxes, and the ranks that hold each.

    Attributes:
        tensor: The tensor of each box, ``[n]``.
        boxes: The boxes.
        source: Which entry of ``first`` names the holders of each, ``[n]``: boxes cut from one box share them.
        first: Where the holders begin among the members, and behind the last the end, ``[sources + 1]``.
        member_rank: Positions of the ranks that hold them, ascending for each source, ``[members]``.
        member_row: Which of that rank's local shards it is, ``[members]``.
    """

    tensor: IntArray
    boxes: Boxes
    source: IntArray
    first: IntArray
    member_rank: IntArray
    member_row: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class WrittenBoxes:
    """Boxes that are written.

    Attributes:
        tensor: The tensor of each, ``[n]``.
        rank: Position of the rank that writes it, ``[n]``.
        row: Which of that rank's local shards it is cut from, ``[n]``.
        boxes: The boxes.
    """

    tensor: IntArray
    rank: IntArray
    row: IntArray
    boxes: Boxes

    def take(self, rows: IntArray) -> WrittenBoxes:
        """Some of them."""
        return WrittenBoxes(self.tensor[rows], self.rank[rows], self.row[rows], self.boxes.take(rows))

    @classmethod
    def joined(cls, parts: Sequence[WrittenBoxes]) -> WrittenBoxes:
        """Several, one behind the other."""
        tensor, rank, row = (np.concatenate([getattr(p, name) for p in parts]) for name in ("tensor", "rank", "row"))
        return cls(tensor, rank, row, Boxes.joined([part.boxes for part in parts]))


def divide(boxes: HeldBoxes, nbytes: IntArray, itemsize: IntArray, fixed: IntArray) -> list[WrittenBoxes]:
    """Let every rank write about the same number of bytes.

    Takes time in O(n log n + members) for n boxes, beside that of :func:`.balance.balanced_shares`.

    Args:
        boxes: Boxes that do not overlap, and who holds them.
        nbytes: Their bytes, ``[boxes]``.
        itemsize: Their tensors' item sizes, ``[boxes]``.
        fixed: Bytes that each rank writes beside these boxes, ``[ranks]``.

    Returns:
        What is written, in several parts.
    """
    holders = np.diff(boxes.first)[boxes.source]
    single = np.flatnonzero(holders == 1)
    parts = [_written(boxes, single, np.zeros_like(single))]
    tolerance = (int(nbytes.sum()) + int(fixed.sum())) // len(fixed) // 128
    loads = fixed.copy()
    np.add.at(loads, parts[0].rank, nbytes[single])
    sets, rows = _replica_sets(boxes, nbytes, holders)
    if not sets:
        return parts
    shares = np.concatenate(balanced_shares(loads, sets))
    dealt = deal(shares, nbytes[rows], boxes.boxes.shape[rows], itemsize[rows], tolerance)
    counts = np.array([len(s.members) for s in sets], np.int64)
    number = places_within(counts)  # of a member, in its set
    parts.append(_written(boxes, rows[dealt.item], number[dealt.member]))
    if dealt.pieces:
        item, member, pieces = zip(*dealt.pieces, strict=True)
        cut = _written(boxes, rows[list(item)], number[list(member)])
        inner = Boxes.of(pieces, cut.boxes.dimensions)
        parts.append(replace(cut, boxes=Boxes(cut.boxes.offset + inner.offset, inner.shape)))
    return parts


def _written(boxes: HeldBoxes, rows: IntArray, number: IntArray) -> WrittenBoxes:
    """These boxes, each written by one of its holders, given by its number among them."""
    place = boxes.first[boxes.source[rows]] + number
    return WrittenBoxes(boxes.tensor[rows], boxes.member_rank[place], boxes.member_row[place], boxes.boxes.take(rows))


def _replica_sets(boxes: HeldBoxes, nbytes: IntArray, holders: IntArray) -> tuple[list[ReplicaSet], IntArray]:
    """The different sets of several ranks that hold boxes, small ones first; and the boxes of one after the other."""
    sets: list[ReplicaSet] = []
    parts = [np.zeros(0, np.int64)]
    for count in np.unique(holders[holders > 1]).tolist():
        rows = np.flatnonzero(holders == count)
        members = boxes.member_rank[boxes.first[boxes.source[rows]][:, None] + np.arange(count)]
        first, which = group_rows(members)
        different = members[first]
        ascending = _row_order(different)
        place = np.empty_like(ascending)
        place[ascending] = np.arange(len(ascending))
        rows = rows[np.argsort(place[which], kind="stable")]
        counts = np.bincount(place[which])
        starts = np.cumsum(counts) - counts
        sizes = np.add.reduceat(nbytes[rows], starts).tolist()
        sets += map(ReplicaSet, different[ascending], sizes)
        parts.append(rows)
    return sets, np.concatenate(parts)


def _row_order(rows: IntArray) -> IntArray:
    """The order of rows by their first number, then the second, and so on. No number is negative."""
    base = int(rows.max(initial=0)) + 1
    step = max(1, 62 // base.bit_length())  # so many columns make one key
    keys = []
    for start in range(0, rows.shape[1], step):
        key = rows[:, start].copy()
        for column in rows.T[start + 1 : start + step]:
            key = key * base + column
        keys.append(key)
    return np.lexsort(keys[::-1]).astype(np.int64)
