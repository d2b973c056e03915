"""Boxes: axis-aligned regions of a tensor, given by an offset and a shape, and the little geometry they need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Box", "cut_flat_range", "flat_range", "intersect", "join", "subtract", "whole"]


class Box(NamedTuple):
    """A region: where it starts in its tensor and how far it reaches, one integer a dimension each."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The region as an index into an array of its tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same region, counted from ``origin`` instead of from the tensor's corner."""
        return Box(tuple(o - p for o, p in zip(self.offset, origin, strict=True)), self.shape)

    def __str__(self) -> str:
        """numpy-like: ``[0:4,8:16]``."""
        return "[" + ",".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.shape, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box that is a whole tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The region that both have, or None if they have none (a box of no elements has no region)."""
    offset = tuple(map(max, a.offset, b.offset))
    shape = tuple(
        min(ao + an, bo + bn) - o
        for ao, an, bo, bn, o in zip(a.offset, a.shape, b.offset, b.shape, offset, strict=True)
    )
    return Box(offset, shape) if all(n > 0 for n in shape) else None


def join(a: Box, b: Box) -> Box | None:
    """The box that both are together, where ``b`` begins along one dimension behind ``a``, and is as ``a`` along all
    others; else None."""
    other = [d for d in range(len(a.shape)) if (a.offset[d], a.shape[d]) != (b.offset[d], b.shape[d])]
    if len(other) != 1 or b.offset[d := other[0]] != a.offset[d] + a.shape[d]:
        return None
    return Box(a.offset, (*a.shape[:d], a.shape[d] + b.shape[d], *a.shape[d + 1 :]))


def subtract(a: Box, b: Box) -> list[Box]:
    """``a`` without ``b``, as at most 2*ndim boxes that do not overlap."""
    common = intersect(a, b)
    if common is None:
        return [a] if a.size else []
    pieces: list[Box] = []
    offset, shape = list(a.offset), list(a.shape)
    for d, (lo, n) in enumerate(zip(common.offset, common.shape, strict=True)):
        before, after = lo - offset[d], offset[d] + shape[d] - (lo + n)
        if before:
            pieces.append(Box(tuple(offset), (*shape[:d], before, *shape[d + 1 :])))
        if after:
            pieces.append(Box((*offset[:d], lo + n, *offset[d + 1 :]), (*shape[:d], after, *shape[d + 1 :])))
        offset[d], shape[d] = lo, n
    return pieces


def flat_range(box: Box, shape: Sequence[int]) -> tuple[int, int] | None:
    """The range of elements, in row-major order, that a box is in a tensor of ``shape``; None if it is several."""
    start, stride, open_dimension = 0, 1, False
    for d in range(len(shape) - 1, -1, -1):
        if open_dimension and box.shape[d] != 1:
            return None
        open_dimension = open_dimension or box.shape[d] != shape[d]
        start += box.offset[d] * stride
        stride *= shape[d]
    return start, start + box.size


def cut_flat_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """A row-major range of a tensor's elements as boxes, in that order: at most 2*ndim-1 of them.

    Each box is itself a contiguous range, so the boxes' data stand one behind the other. To cut a flattened shard into
    boxes instead of gathering it is an idea of ByteCheckpoint (NSDI'25).
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    inner = tuple(shape[1:])
    row = math.prod(inner)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _under(first, cut_flat_range(inner, head, tail))
    boxes: list[Box] = []
    if head:
        boxes += _under(first, cut_flat_range(inner, head, row))
        first += 1
    if first < last:
        boxes.append(Box((first,) + (0,) * len(inner), (last - first, *inner)))
    if tail:
        boxes += _under(last, cut_flat_range(inner, 0, tail))
    return boxes


def _under(index: int, boxes: list[Box]) -> list[Box]:
    return [Box((index, *box.offset), (1, *box.shape)) for box in boxes]
