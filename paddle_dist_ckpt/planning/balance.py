"""Dividing replicated boxes among the ranks that hold them, so that every rank writes about the same number of bytes.

Two steps. :func:`balanced_shares` decides how many bytes of each replica set each of its ranks takes, as if they were a
liquid. :func:`deal` then lays the set's boxes end to end and cuts that line into the shares: at most one box is cut
per rank, along rows, and every other box stays whole. It may be given all sets one behind the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.box import Box, cut_flat_range
from ..core.columns import IntArray

__all__ = ["ReplicaSet", "balanced_shares", "deal"]

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
    Sets that follow each other and share no rank are poured at once, which changes nothing. A sweep over all sets
    takes time in O(members of all sets), and at most 50 are made.

    Args:
        fixed: Bytes that only one rank has, by rank position, ``[ranks]``.
        sets: The replica sets.

    Returns:
        For each set an array like its ``members``, which adds up to its ``nbytes``.
    """
    loads = fixed.astype(np.int64).copy()
    batches = _batches(sets, len(loads))
    poured = [np.zeros(batch.members.shape, np.int64) for batch in batches]
    settled = max(1, (int(fixed.sum()) + sum(s.nbytes for s in sets)) // max(1, len(fixed)) // 1000)
    for _ in range(_MAX_SWEEPS):
        moved = 0
        for i, batch in enumerate(batches):
            others = loads[batch.members] - poured[i]
            before, poured[i] = poured[i], _pour(others, batch.nbytes)
            moved = max(moved, int(np.abs(poured[i] - before).max(initial=0)))
            loads[batch.members] = others + poured[i]
        if moved <= settled or len(sets) == 1:
            break
    shares: list[IntArray] = [loads[:0]] * len(sets)
    for batch, rows in zip(batches, poured, strict=True):
        for number, row in zip(batch.numbers, rows, strict=True):
            shares[number] = row
    return shares


@dataclass(frozen=True, slots=True, eq=False)
class _DisjointSets:
    """Replica sets of equally many ranks, of which none is in two of them: their numbers, members ``[n, m]``, bytes."""

    numbers: list[int]
    members: IntArray
    nbytes: IntArray


def _batches(sets: Sequence[ReplicaSet], ranks: int) -> list[_DisjointSets]:
    """The sets, smaller ones first, in batches. Each is in the first that is behind all earlier sets with its ranks."""
    batches: dict[tuple[int, int], list[int]] = {}
    last = [-1] * ranks  # the level of the last set so far that has the rank
    for i in sorted(range(len(sets)), key=lambda i: len(sets[i].members)):
        members = sets[i].members.tolist()
        level = max([last[rank] for rank in members], default=-1) + 1
        for rank in members:
            last[rank] = level
        batches.setdefault((level, len(members)), []).append(i)
    return [
        _DisjointSets(
            numbers, np.stack([sets[i].members for i in numbers]), np.array([sets[i].nbytes for i in numbers])
        )
        for _, numbers in sorted(batches.items())
    ]


def _pour(loads: IntArray, amounts: IntArray) -> IntArray:
    """Add ``amounts[i]`` to row i so that the highest of the loads that get any is as low as can be, ``[n, m]``."""
    count, members = loads.shape
    if count == 1:  # several times faster alone
        return _pour_one(loads[0], int(amounts[0]))[None]
    place = np.arange(members)
    order = np.argsort(loads, axis=1, kind="stable") + np.arange(count)[:, None] * members
    level = loads.reshape(-1)[order]
    filled = np.cumsum(level, axis=1)
    vessels = np.maximum(1, (level * place - (filled - level) <= amounts[:, None]).sum(axis=1))
    total = filled.reshape(-1)[np.arange(count) * members + vessels - 1] + amounts
    surface, rest = np.divmod(total, vessels)
    poured = np.empty_like(loads)
    poured.reshape(-1)[order] = np.where(
        place < vessels[:, None], surface[:, None] - level + (place < rest[:, None]), 0
    )
    return poured


def _pour_one(loads: IntArray, amount: int) -> IntArray:
    order = loads.argsort(kind="stable")
    level = loads[order]
    filled = level.cumsum()
    place = np.arange(len(level))
    vessels = max(1, int((level * place - (filled - level)).searchsorted(amount, side="right")))
    surface, rest = divmod(amount + int(filled[vessels - 1]), vessels)
    added = surface - level[:vessels]
    added[:rest] += 1
    poured = np.zeros_like(loads)
    poured[order[:vessels]] = added
    return poured


@dataclass(frozen=True, slots=True, eq=False)
class Dealt:
    """What :func:`deal` decided: item ``item[i]`` goes whole to member ``member[i]``; cut ones are in ``pieces``."""

    item: IntArray
    member: IntArray
    pieces: list[tuple[int, int, Box]]


def deal(shares: IntArray, nbytes: IntArray, shapes: IntArray, itemsizes: IntArray, tolerance: int) -> Dealt:
    """Cut the line of a set's boxes into its members' shares.

    The lines of several sets may be cut as one: their items one behind the other, and their shares and members too.
    No cut is ever moved across the border of two sets, as it is one between items. Time is in
    O(m log n + n log m) for n items and m members, beside what it takes to cut.

    Args:
        shares: Bytes for each member, ``[members]``; they add up to the sum of ``nbytes``.
        nbytes: Size of each item, none of which is 0, ``[items]``.
        shapes: The items' shapes, ``[items, d]``. Only those of items above 64 KiB or that are cut are looked at.
        itemsizes: The items' element sizes, ``[items]``.
        tolerance: How many bytes a cut may be away from the exact place, for the sake of whole rows.

    Returns:
        Items that stay whole with the member of each, and for the others (item, member, box within the item).
    """
    ends = np.cumsum(nbytes)
    starts = ends - nbytes
    marks = _snapped(np.cumsum(shares)[:-1], starts, ends, shapes, itemsizes, tolerance)
    first = np.searchsorted(marks, starts, side="right")  # the member on whose stretch an item starts ...
    last = np.searchsorted(marks, ends, side="left")  # ... and the one on whose stretch it ends
    last = np.maximum(first, last)
    is_whole = first == last
    pieces: list[tuple[int, int, Box]] = []
    for i in np.flatnonzero(~is_whole).tolist():
        edges = [int(starts[i]), *marks[first[i] : last[i]].tolist(), int(ends[i])]
        for member, (a, b) in enumerate(itertools.pairwise(edges), start=int(first[i])):
            size = int(itemsizes[i])
            part = cut_flat_range(shapes[i].tolist(), (a - edges[0]) // size, (b - edges[0]) // size)
            pieces += [(i, member, box) for box in part]
    whole = np.flatnonzero(is_whole)
    return Dealt(whole, first[whole], pieces)


def _snapped(
    marks: IntArray, starts: IntArray, ends: IntArray, shapes: IntArray, itemsizes: IntArray, tolerance: int
) -> IntArray:
    """Move each mark to the nearest place where a cut is wanted: between items, or between rows of a large one."""
    result = marks.copy()
    inside = np.searchsorted(ends, marks, side="right")
    moved = np.flatnonzero(inside < len(starts))
    mark, item = marks[moved], inside[moved]
    start, unit = starts[item], (ends - starts)[item]
    for i in np.unique(item[unit > _MIN_SPLIT_BYTES]).tolist():
        unit[slice(*np.searchsorted(item, [i, i + 1]).tolist())] = _row_bytes(
            shapes[i].tolist(), int(itemsizes[i]), tolerance
        )
    result[moved] = np.minimum(start + np.rint((mark - start) / unit).astype(np.int64) * unit, ends[item])
    return np.maximum.accumulate(result)


def _row_bytes(shape: Sequence[int], itemsize: int, tolerance: int) -> int:
    """Bytes of the largest rows that are not above the tolerance (or above the smallest split)."""
    limit = max(tolerance, _MIN_SPLIT_BYTES)
    rows = (math.prod(shape[d:]) * itemsize for d in range(1, len(shape) + 1))
    return next(row for row in rows if row <= limit)
