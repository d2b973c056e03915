"""Regions of tensors: slices as they are typed, and windows in which a region is read in bounded memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from ..core.box import Box
from ..core.layouts import Layout

__all__ = ["WINDOW_BYTES", "best_along", "edge_items", "edges", "parse_slice", "windows"]

WINDOW_BYTES = 16 << 20
_SEVERAL = 4  # shards in a window, from which on it is better cut along them
_RANGE = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")
_INDEX = re.compile(r"\s*-?\d+\s*")


def parse_slice(text: str, shape: Sequence[int]) -> tuple[Box, tuple[int, ...]]:
    """The region that a slice as in numpy means, and its dimensions without those that an index takes away.

    Args:
        text: Such as ``0:4,:,-1``; dimensions that are not named are whole; ``...`` stands for as many as are left.
        shape: The tensor's shape.

    Raises:
        ValueError: it is no slice of such a tensor.
    """
    parts = text.strip().removeprefix("[").removesuffix("]").split(",") if text.strip(" []") else []
    dots = [i for i, part in enumerate(parts) if part.strip() == "..."]
    if dots:
        parts[dots[0] : dots[0] + 1] = [":"] * (len(shape) - len(parts) + 1)
    if len(parts) > len(shape) or len(dots) > 1:
        raise ValueError(f"the slice {text!r} has more dimensions than the tensor of shape {tuple(shape)}")
    parts += [":"] * (len(shape) - len(parts))
    offset, lengths, kept = [], [], []
    for dimension, (part, size) in enumerate(zip(parts, shape, strict=True)):
        found = _RANGE.fullmatch(part)
        if found is not None:
            start, stop, _ = slice(*(int(each) if each else None for each in found.groups())).indices(size)
            offset.append(start)
            lengths.append(max(0, stop - start))
            kept.append(dimension)
        elif _INDEX.fullmatch(part):
            index = int(part)
            if not -size <= index < size:
                raise ValueError(f"the index {index} is out of bounds of the tensor of shape {tuple(shape)}")
            offset.append(index % size)
            lengths.append(1)
        else:
            raise ValueError(f"{part.strip()!r} in the slice {text!r} is neither an index nor a range such as 0:4")
    return Box(tuple(offset), tuple(lengths)), tuple(kept)


def windows(box: Box, itemsize: int, most: int = WINDOW_BYTES, along: int = 0) -> Iterator[Box]:
    """Cut a region in parts of so many bytes at the most, in order along the dimensions; at least one item each.

    Args:
        box: The region.
        itemsize: Bytes of an item.
        most: How many bytes.
        along: The dimension that is cut first, and then the others in order.
    """
    if not box.size:
        return
    if box.size * itemsize <= most:
        yield box
        return
    dimension = along if box.shape[along] > 1 else next(d for d, n in enumerate(box.shape) if n > 1)
    row = box.size // box.shape[dimension] * itemsize
    step = max(1, most // row)
    for start in range(0, box.shape[dimension], step):
        offset, shape = list(box.offset), list(box.shape)
        offset[dimension] += start
        shape[dimension] = min(step, box.shape[dimension] - start)
        yield from windows(Box(tuple(offset), tuple(shape)), itemsize, most, along)


def best_along(layout: Layout, itemsize: int, most: int) -> int:
    """The dimension along which a tensor is best cut in windows of at most ``most`` bytes.

    That is the dimension in which most of its shards lie side by side, if a window holds several of them: windows of
    rows would have a bit of each shard. Otherwise it is the first.
    """
    nbytes = math.prod(layout.shape) * itemsize
    if nbytes <= most:
        return 0
    starts = layout.starts()
    counts = [len(np.unique(of)) for of in (layout.boxes.offset.T if starts is None else starts)]
    along = counts.index(max(counts))
    return along if counts[along] * most >= _SEVERAL * nbytes else 0


def edge_items(box: Box, most: int) -> tuple[Box, int]:
    """How many items of each dimension :func:`edges` may take at each end, so that not more are shown in all.

    Returns:
        The region, of which leading dimensions are cut to their first item where even one at each end would be too
        many, and how many.
    """
    for dimension in range(len(box.shape) + 1):
        shape = (1,) * dimension + box.shape[dimension:]
        for items in (3, 2, 1):
            if math.prod(min(n, 2 * items + 1) for n in shape) <= most:
                return Box(box.offset, shape), items
    raise AssertionError("one item is not too many")


def edges(box: Box, items: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """The corners of a region: of each dimension the first and the last few items.

    They are what is seen of a small array whose dimensions have ``2 * items + 1`` items at the most, the middle one
    standing for all that are left out.

    Args:
        box: The region.
        items: How many at each end.

    Yields:
        A part of the region, and where in the small array it goes.
    """

    def cut(dimension: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        if dimension == len(box.shape):
            yield (), (), ()
            return
        start, size = box.offset[dimension], box.shape[dimension]
        known = [(start, size, 0)]
        if size > 2 * items + 1:
            known = [(start, items, 0), (start + size - items, items, items + 1)]
        for offset, shape, place in cut(dimension + 1):
            for low, length, at in known:
                yield (low, *offset), (length, *shape), (at, *place)

    for offset, shape, place in cut(0):
        yield Box(offset, shape), place
