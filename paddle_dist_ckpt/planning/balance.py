"""Dividing replicated boxes among the ranks that hold them, so that every rank writes about the same number of bytes.

Two steps. :func:`balanced_shares` decides how many bytes of each replica set each of its ranks takes, as if they were a
liquid. :func:`deal` then lays the set's boxes end to end and cuts that line into the shares: at most one box is cut
per rank, along rows, and every other box stays whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.box import Box, cut_flat_range
from ..core.columns import IntArray

__all__ = ["Dealt", "ReplicaSet", "balanced_shares", "deal"]

_MIN_SPLIT_BYTES = 64 << 10
_MAX_SWEEPS = 50


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaSet:
    """Ranks (their positions, ascending) that hold the same boxes, and how many bytes those are together."""

    members: IntArray
    nbytes: int


def balanced_shares(fixed: IntArray, sets: Sequence[ReplicaSet]) -> list[IntArray]:
    """How many bytes each member of each set takes, beside what each rank must write anyway.

    Every set in turn is poured over its members' loads like water into vessels, again and again until nothing moves.
    That is block coordinate descent on the sum of squared loads, whose minimum also has the smallest possible maximum.

    Args:
        fixed: Bytes that only one rank has, by rank position, ``[ranks]``.
        sets: The replica sets.

    Returns:
        For each set an array like its ``members``, which adds up to its ``nbytes``.
    """
    loads = fixed.astype(np.int64).copy()
    shares = [np.zeros(len(s.members), np.int64) for s in sets]
    order = sorted(range(len(sets)), key=lambda i: len(sets[i].members))
    settled = max(1, (int(fixed.sum()) + sum(s.nbytes for s in sets)) // max(1, len(fixed)) // 1000)
    for _ in range(_MAX_SWEEPS):
        moved = 0
        for i in order:
            members = sets[i].members
            others = loads[members] - shares[i]
            poured = _pour(others, sets[i].nbytes)
            moved = max(moved, int(np.abs(poured - shares[i]).max(initial=0)))
            shares[i] = poured
            loads[members] = others + poured
        if moved <= settled or len(sets) == 1:
            break
    return shares


def _pour(loads: IntArray, amount: int) -> IntArray:
    """Add ``amount`` so that the highest of the loads that get any is as low as can be."""
    order = np.argsort(loads, kind="stable")
    level = loads[order]
    before = np.concatenate([[0], np.cumsum(level)[:-1]])
    vessels = int(np.searchsorted(level * np.arange(len(level)) - before, amount, side="right"))
    vessels = max(1, min(vessels, len(level)))
    surface, rest = divmod(amount + int(level[:vessels].sum()), vessels)
    poured = np.zeros(len(loads), np.int64)
    poured[order[:vessels]] = surface - level[:vessels] + (np.arange(vessels) < rest)
    return poured


@dataclass(frozen=True, slots=True, eq=False)
class Dealt:
    """What :func:`deal` decided: item ``item[i]`` goes whole to member ``member[i]``; cut ones are in ``pieces``."""

    item: IntArray
    member: IntArray
    pieces: list[tuple[int, int, Box]]


def deal(shares: IntArray, nbytes: IntArray, boxes: Sequence[Box], itemsizes: IntArray, tolerance: int) -> Dealt:
    """Cut the line of a set's boxes into its members' shares.

    Args:
        shares: Bytes for each member, ``[members]``; they add up to the sum of ``nbytes``.
        nbytes: Size of each item, ``[items]``.
        boxes: The items' boxes, in order.
        itemsizes: The items' element sizes.
        tolerance: How many bytes a cut may be away from the exact place, for the sake of whole rows.

    Returns:
        Items that stay whole with the member of each, and for the others (item, member, box within the item).
    """
    ends = np.cumsum(nbytes)
    starts = ends - nbytes
    marks = _snapped(np.cumsum(shares)[:-1], starts, ends, boxes, itemsizes, tolerance)
    first = np.searchsorted(marks, starts, side="right")  # the member on whose stretch an item starts ...
    last = np.searchsorted(marks, ends, side="left")  # ... and the one on whose stretch it ends
    last = np.maximum(first, last)
    is_whole = first == last
    pieces: list[tuple[int, int, Box]] = []
    for i in np.flatnonzero(~is_whole).tolist():
        edges = [int(starts[i]), *marks[first[i] : last[i]].tolist(), int(ends[i])]
        for member, (a, b) in enumerate(itertools.pairwise(edges), start=int(first[i])):
            size = int(itemsizes[i])
            part = cut_flat_range(boxes[i].shape, (a - edges[0]) // size, (b - edges[0]) // size)
            pieces += [(i, member, box) for box in part]
    whole = np.flatnonzero(is_whole)
    return Dealt(whole, first[whole], pieces)


def _snapped(
    marks: IntArray, starts: IntArray, ends: IntArray, boxes: Sequence[Box], itemsizes: IntArray, tolerance: int
) -> IntArray:
    """Move each mark to the nearest place where a cut is wanted: between items, or between rows of a large one."""
    result = marks.copy()
    inside = np.searchsorted(ends, marks, side="right")
    for k, (mark, i) in enumerate(zip(marks.tolist(), inside.tolist(), strict=True)):
        if i >= len(starts):
            continue
        start, size = int(starts[i]), int(ends[i] - starts[i])
        unit = size if size <= _MIN_SPLIT_BYTES else _row_bytes(boxes[i].shape, int(itemsizes[i]), tolerance)
        result[k] = min(start + round((mark - start) / unit) * unit, int(ends[i]))
    return np.maximum.accumulate(result)


def _row_bytes(shape: Sequence[int], itemsize: int, tolerance: int) -> int:
    """Bytes of the largest rows that are not above the tolerance (or above the smallest split)."""
    limit = max(tolerance, _MIN_SPLIT_BYTES)
    for d in range(1, len(shape) + 1):
        row = math.prod(shape[d:]) * itemsize
        if row <= limit:
            return row
    return itemsize
