"""Does a set of boxes cover a region exactly, each element once? Without comparing boxes pair by pair."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from ..core.box import Box, intersect, subtract
from ..core.boxes import Boxes
from ..core.columns import MANY, IntArray, Mask, all_in_row, pieces_of, places_within
from ..core.grouping import group_blocks, mixed
from ..core.layouts import grid_starts

__all__ = ["covers_exactly", "first_gap", "tensors_covered"]

_PRIME = np.uint64(2**31 - 1)
_ROUNDS = 3
_MANY = 64  # boxes of one region, from which on it is worth to look whether they are a grid
_U64 = npt.NDArray[np.uint64]


def covers_exactly(groups: IntArray, boxes: Boxes, regions: Boxes) -> Mask:
    """For each region, whether its boxes tile it: inside it, no overlap, no gap.

    Give every coordinate of every dimension a number r of 31 bits. Modulo the prime 2**31 - 1, the product over the
    dimensions of r(high) - r(low) is a measure: it adds up over any exact tiling, so a tiling is always taken for one.
    If boxes overlap or leave a gap, both sides are different polynomials in the numbers, which agree for random numbers
    with a chance of at most ndim/2**30 (Schwartz-Zippel). There are three rounds with numbers of their own: a wrong
    answer has a chance below 1e-22 for any tensor. The numbers are not drawn but made from a cryptographic hash of all
    that is given, so the answer is the same on every rank and in every run, and who wants to deceive can do no better
    than to try about 1e22 sets of boxes.

    Time is linear in the number of boxes. Slices along one dimension and whole grids, which nearly all tensors are cut
    into, are recognised without it.

    Args:
        groups: Which region each box belongs to, ascending, ``[n]``.
        boxes: The boxes, ``n`` of them. None may be empty.
        regions: The regions, ``g`` of them.

    Returns:
        ``[g]``. A region of no elements is covered by no boxes.
    """
    exact: Mask = np.zeros(len(regions), bool)
    judges = (_are_slices, _are_grids, _measures_agree)
    for judge in judges[len(regions) == 1 :]:  # slices of one region are recognised as a grid as fast
        if not exact.any():
            exact = judge(groups, boxes, regions)
        elif not exact.all():
            rest, rows = np.flatnonzero(~exact), np.flatnonzero(~exact[groups])
            exact[rest] = judge(np.searchsorted(rest, groups[rows]), boxes.take(rows), regions.take(rest))
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
    rows = places_within(counts, bounds[first])
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


def _are_grids(groups: IntArray, boxes: Boxes, regions: Boxes) -> Mask:
    """For each region whether its boxes, if they are many, are a grid over it, in row-major order."""
    bounds = np.searchsorted(groups, np.arange(len(regions) + 1))
    found: Mask = np.zeros(len(regions), bool)
    for g in np.flatnonzero(np.diff(bounds) >= _MANY).tolist():
        found[g] = grid_starts(boxes.take(slice(bounds[g], bounds[g + 1])), regions.box(g)) is not None
    return found


def _measures_agree(groups: IntArray, boxes: Boxes, regions: Boxes) -> Mask:
    """:func:`covers_exactly` for tilings of any kind."""
    region_low, region_high = regions.offset, regions.high
    exact: Mask = np.ones(len(regions), bool)
    for piece in pieces_of(len(groups), MANY):
        some, of = boxes.take(piece), groups[piece]
        inside = all_in_row(some.offset >= region_low.take(of, axis=0))
        inside &= all_in_row(some.high <= region_high.take(of, axis=0))
        exact[of[~inside]] = False
    bounds = np.searchsorted(groups, np.arange(len(regions) + 1))
    sums = np.zeros(len(groups) + 1, np.uint64)
    for seeds in _seeds(groups, boxes, regions):
        sums[1:] = _measures(boxes, seeds)
        np.cumsum(sums, out=sums)  # which may wrap around: so do differences, back again
        exact &= np.diff(sums[bounds]) % _PRIME == _measures(regions, seeds) % _PRIME
    return exact


def _seeds(groups: IntArray, boxes: Boxes, regions: Boxes) -> _U64:
    """What the numbers of each round and dimension are made from, ``[rounds, d]``: a hash of all that is given."""
    sizes = np.array([len(boxes), len(regions), boxes.dimensions], np.int64)
    digest = hashlib.blake2b()
    for column in (sizes, groups, boxes.offset, boxes.shape, regions.offset, regions.shape):
        for piece in pieces_of(len(column), MANY):
            digest.update(np.ascontiguousarray(column[piece], "<i8").reshape(-1).data)
    expanded = hashlib.shake_256(digest.digest()).digest(8 * _ROUNDS * boxes.dimensions)
    return np.frombuffer(expanded, "<u8").reshape(_ROUNDS, boxes.dimensions)


def _measures(boxes: Boxes, seeds: _U64) -> _U64:
    """The measure of each box, or a number little above 2**31 that equals it modulo the prime."""
    measures = np.empty(len(boxes), np.uint64)
    for piece in pieces_of(len(boxes), max(1, MANY // max(1, boxes.dimensions))):
        low, high = _numbers(boxes.offset[piece], seeds), _numbers(boxes.take(piece).high, seeds)
        product = np.ones(low.shape[1], np.uint64)
        for side in high + _PRIME - low:  # each below 2**32
            product *= side
            for _ in range(2):  # modulo the prime by folding, which is several times faster than division
                product = (product & _PRIME) + (product >> np.uint64(31))
        measures[piece] = product
    return measures


def _numbers(coordinates: IntArray, seeds: _U64) -> _U64:
    """A number of 31 bits for each coordinate, ``[d, n]``."""
    return mixed(coordinates.T.astype(np.uint64, order="C") + seeds[:, None]) >> np.uint64(33)


def first_gap(region: Box, boxes: list[Box]) -> Box | None:
    """A part of ``region`` that no box covers, or None. Compares pair by pair: for error messages."""
    left = [region] if region.size else []
    for box in boxes:
        left = [piece for part in left for piece in (subtract(part, box) if intersect(part, box) else [part])]
        if not left:
            return None
    return left[0] if left else None
