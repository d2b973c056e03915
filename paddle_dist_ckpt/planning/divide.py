"""Giving each box to one of the ranks that hold it, or in pieces to several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from ..core.box import Box
from ..core.columns import IntArray, places_within
from ..core.grouping import group_rows
from .balance import ReplicaSet, balanced_shares, deal

__all__ = ["HeldBoxes", "divide"]

Columns = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]  # tensor, rank, row, offset, shape


@dataclass(frozen=True, slots=True, eq=False)
class HeldBoxes:
    """Different boxes, and the ranks that hold each: members ``first[i]:first[i + 1]`` of the columns behind.

    ``source`` names, for a box that was cut from another, the box whose members hold it.
    """

    tensor: IntArray
    offset: IntArray
    shape: IntArray
    source: IntArray
    first: IntArray
    member_rank: IntArray
    member_row: IntArray


def divide(boxes: HeldBoxes, nbytes: IntArray, itemsize: IntArray, fixed: IntArray) -> list[Columns]:
    """Let every rank write about the same number of bytes.

    Takes time in O(n log n + members) for n boxes, beside that of :func:`.balance.balanced_shares`.

    Args:
        boxes: Boxes that do not overlap, and who holds them.
        nbytes: Their bytes, ``[boxes]``.
        itemsize: Their tensors' item sizes, ``[boxes]``.
        fixed: Bytes that each rank writes beside these boxes, ``[ranks]``.

    Returns:
        Columns (tensor, rank, row of its local shards, offset, shape) of what is written, in several parts.
    """
    holders = np.diff(boxes.first)[boxes.source]
    single = np.flatnonzero(holders == 1)
    parts = [_columns(boxes, single, np.zeros_like(single))]
    tolerance = (int(nbytes.sum()) + int(fixed.sum())) // len(fixed) // 128
    loads = fixed.copy()
    np.add.at(loads, parts[0][1], nbytes[single])
    sets, rows = _replica_sets(boxes, nbytes, holders)
    if not sets:
        return parts
    shares = np.concatenate(balanced_shares(loads, sets))
    dealt = deal(shares, nbytes[rows], _Extents(boxes.shape[rows]), itemsize[rows], tolerance)
    counts = np.array([len(s.members) for s in sets], np.int64)
    number = places_within(counts)  # of a member, in its set
    parts.append(_columns(boxes, rows[dealt.item], number[dealt.member]))
    if dealt.pieces:
        item, member, pieces = zip(*dealt.pieces, strict=True)
        tensor, rank, row, offset, _ = _columns(boxes, rows[list(item)], number[list(member)])
        offset = offset + np.array([box.offset for box in pieces], np.int64)
        parts.append((tensor, rank, row, offset, np.array([box.shape for box in pieces], np.int64)))
    return parts


def _columns(boxes: HeldBoxes, rows: IntArray, number: IntArray) -> Columns:
    """The columns of these boxes, each written by one of its holders, given by its number among them."""
    place = boxes.first[boxes.source[rows]] + number
    return boxes.tensor[rows], boxes.member_rank[place], boxes.member_row[place], boxes.offset[rows], boxes.shape[rows]


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


class _Extents(Sequence[Box]):
    """Shapes as boxes, which are made when they are asked for."""

    def __init__(self, shapes: IntArray) -> None:
        self._shapes = shapes

    def __len__(self) -> int:
        return len(self._shapes)

    @overload
    def __getitem__(self, index: int) -> Box: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Box]: ...
    def __getitem__(self, index: int | slice) -> Box | Sequence[Box]:
        if isinstance(index, slice):
            return _Extents(self._shapes[index])
        return Box((), tuple(self._shapes[index].tolist()))
