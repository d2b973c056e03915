"""Does a set of boxes cover a region exactly, each element once? Without comparing boxes pair by pair."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from ..core.box import Box, intersect, subtract
from ..core.boxes import Boxes, Mask
from ..core.columns import IntArray, places_within
from ..core.grouping import group_blocks
from ..core.shards import grid_starts

__all__ = ["covers_exactly", "first_gap", "tensors_covered"]

_PRIME = np.uint64(2**31 - 1)
_ROUNDS = 3
_MANY = 64  # boxes of one region, from which on it is worth to look whether they are a grid
_U64 = npt.NDArray[np.uint64]


def covers_exactly(groups: IntArray, boxes: Boxes, regions: Boxes) -> Mask:
    """For each region, whether its boxes tile it: inside it, no overlap, no gap.

    Give every coordinate of every dimension a number r modulo the prime 2**31 - 1. The product over the dimensions of
    r(high) - r(low) is a measure: it adds up over any exact tiling, so a tiling is always taken for one. If boxes
    overlap or leave a gap, both sides are different polynomials in the numbers, which agree for random numbers with a
    chance of at most ndim/2**31 (Schwartz-Zippel). There are three rounds with numbers of their own: a wrong answer has
    a chance below 1e-23 for any tensor. The numbers are not drawn but made from a cryptographic hash of all that is
    given, so the answer is the same on every rank and in every run, and who wants to deceive can do no better than to
    try about 1e23 sets of boxes.

    Time is linear in the number of boxes. Slices along one dimension and whole grids, which nearly all tensors are cut
    into, are recognised without it.

    Args:
        groups: Which region each box belongs to, ascending, ``[n]``.
        boxes: The boxes, ``n`` of them. None may be empty.
        regions: The regions, ``g`` of them.

    Returns:
        ``[g]``. A region of no elements is covered by no boxes.
    """
    one = len(regions) == 1  # whose slices are recognised as a grid as fast
    exact = np.zeros(1, bool) if one else _are_slices(groups, boxes, regions)
    if not exact.any():
        return _are_tiled(groups, boxes, regions)
    rest, rows = np.flatnonzero(~exact), np.flatnonzero(~exact[groups])
    if len(rest):
        exact[rest] = _are_tiled(np.searchsorted(rest, groups[rows]), boxes.take(rows), regions.take(rest))
    return exact


def tensors_covered(tensor: IntArray, boxes: Boxes, global_shape: IntArray) -> Mask:
    """For each tensor whether its boxes make it up exactly. Tensors that are cut alike are looked at once.

    Args:
        tensor: The tensor of each box, ascending, ``[n]``.
        boxes: The boxes, ascending within a tensor. None may be empty.
        global_shape: The tensors' shapes, ``[tensors, d]``.
    """
    bounds = np.searchsorted(tensor, np.arange(len(global_shape) + 1))
    first, alike = group_blocks(bounds, boxes.table, global_shape)
    counts = np.diff(bounds)[first]
    rows = np.repeat(bounds[:-1][first], counts) + places_within(counts)
    groups = np.repeat(np.arange(len(first)), counts)
    return covers_exactly(groups, boxes.take(rows), Boxes.wholes(global_shape[first]))[alike]


def _are_slices(groups: IntArray, boxes: Boxes, regions: Boxes) -> Mask:
    """For each region whether its boxes are slices of it along one dimension, each where the one before it ends."""
    found = np.zeros(len(regions), bool)
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    if not len(starts) or not boxes.dimensions:
        return found
    low, high, region_low, region_high = boxes.offset, boxes.high, regions.offset, regions.high
    of, last = groups[starts], np.append(starts[1:], len(groups)) - 1  # the region of each run of boxes; its last box
    sliced: IntArray = np.zeros(len(starts), np.int64)
    valid: Mask = np.ones(len(starts), bool)
    for d in range(boxes.dimensions):
        begin, end = region_low[of, d], region_high[of, d]
        partial = np.add.reduceat((low[:, d] != region_low[groups, d]) | (high[:, d] != region_high[groups, d]), starts)
        breaks = np.append(True, low[1:, d] != high[:-1, d])
        breaks[starts] = low[starts, d] != begin
        in_row = (np.add.reduceat(breaks, starts) == 0) & (high[last, d] == end)
        valid &= in_row | (partial == 0)
        sliced += partial > 0
        if not valid.any():
            return found
    found[of] = valid & ((sliced == 1) | (starts == last))
    return found


def _are_tiled(groups: IntArray, boxes: Boxes, regions: Boxes) -> Mask:
    """:func:`covers_exactly` for tilings of any kind."""
    bounds = np.searchsorted(groups, np.arange(len(regions) + 1))
    exact: Mask = np.zeros(len(regions), bool)
    for g in np.flatnonzero(np.diff(bounds) >= _MANY).tolist():
        exact[g] = grid_starts(boxes.take(slice(bounds[g], bounds[g + 1])), regions.box(g)) is not None
    rest, rows = np.flatnonzero(~exact), np.flatnonzero(~exact[groups])
    exact[rest] = _measures_agree(np.searchsorted(rest, groups[rows]), boxes.take(rows), regions.take(rest))
    return exact


def _measures_agree(groups: IntArray, boxes: Boxes, regions: Boxes) -> Mask:
    low, high, region_low, region_high = boxes.offset, boxes.high, regions.offset, regions.high
    inside = (low >= region_low[groups]).all(axis=1) & (high <= region_high[groups]).all(axis=1)
    exact: Mask = np.bincount(groups[~inside], minlength=len(regions)) == 0
    for seeds in _seeds(groups, boxes, regions):
        totals = _group_sums(_measure(low, high, seeds), groups, len(regions))
        exact &= totals == _measure(region_low, region_high, seeds)
    return exact


def _seeds(groups: IntArray, boxes: Boxes, regions: Boxes) -> _U64:
    """What the numbers of each round and dimension are made from, ``[rounds, d]``: a hash of all that is given."""
    sizes = np.array([len(boxes), len(regions), boxes.dimensions], np.int64)
    digest = hashlib.blake2b()
    for column in (sizes, groups, boxes.offset, boxes.shape, regions.offset, regions.shape):
        digest.update(np.ascontiguousarray(column, "<i8").reshape(-1).data)
    expanded = hashlib.shake_256(digest.digest()).digest(8 * _ROUNDS * boxes.dimensions)
    return np.frombuffer(expanded, "<u8").reshape(_ROUNDS, boxes.dimensions)


def _measure(low: IntArray, high: IntArray, seeds: _U64) -> _U64:
    product = np.ones(len(low), np.uint64)
    for d, seed in enumerate(seeds):
        span = _random_numbers(high[:, d], seed) + _PRIME - _random_numbers(low[:, d], seed)
        product = _reduced(product * _reduced(span))
    return product


def _reduced(x: _U64) -> _U64:
    """``x`` modulo the prime 2**31 - 1, by folding, which is several times faster than division."""
    x = (x & _PRIME) + (x >> np.uint64(31))
    x = (x & _PRIME) + (x >> np.uint64(31))
    return np.where(x >= _PRIME, x - _PRIME, x)


def _random_numbers(coordinates: IntArray, seed: np.uint64) -> _U64:
    """A number below the prime for each coordinate: the finalizer of splitmix64 over coordinate and seed."""
    x = coordinates.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + seed
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return _reduced(x ^ (x >> np.uint64(31)))


def _group_sums(values: _U64, groups: IntArray, count: int) -> _U64:
    sums = np.zeros(count, np.uint64)
    if len(groups):
        starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
        sums[groups[starts]] = np.add.reduceat(values, starts)  # each term is below 2**31, so 2**33 of them fit
    return _reduced(sums)


def first_gap(region: Box, boxes: list[Box]) -> Box | None:
    """A part of ``region`` that no box covers, or None. Compares pair by pair: for error messages."""
    left = [region] if region.size else []
    for box in boxes:
        left = [piece for part in left for piece in (subtract(part, box) if intersect(part, box) else [part])]
        if not left:
            return None
    return left[0] if left else None
