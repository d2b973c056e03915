"""Which blocks of an entry hold the elements of a box: the coalescing of byte ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..core.box import Box
from ..core.columns import IntArray

__all__ = ["touched_blocks"]


def touched_blocks(
    shape: Sequence[int], itemsize: int, boxes: Iterable[Box], block_bytes: int
) -> list[tuple[int, int]]:
    """The ranges of blocks of an entry that hold some element of the boxes, ascending, as far apart as they are."""
    ranges: list[tuple[int, int]] = []
    for box in boxes:
        if not box.size:
            continue
        starts, length = _byte_runs(shape, itemsize, box, block_bytes)
        ranges += [(start // block_bytes, -(-(start + length) // block_bytes)) for start in starts]
    ranges.sort()
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _byte_runs(shape: Sequence[int], itemsize: int, box: Box, gap: int) -> tuple[list[int], int]:
    """The box as byte ranges of one length, those closer than ``gap`` joined: their starts, and the length."""
    stride, length, first = itemsize, itemsize, 0
    starts: IntArray = np.zeros(1, np.int64)
    joined = True
    for d in range(len(shape) - 1, -1, -1):
        count = box.shape[d]
        first += box.offset[d] * stride
        joined = joined and (count == 1 or stride - length < gap)
        if joined:
            length += (count - 1) * stride
        else:
            starts = (np.arange(count)[:, None] * stride + starts).reshape(-1)
        stride *= shape[d]
    return (starts + first).tolist(), length
