"""The orders in which boxes stand: in the table of a checkpoint, in files, and next to their replicas.

All tensors' elements, one tensor behind the other, make a line, and where a box begins in it is one integer. To sort
these is several times faster than to sort by tensor and then by each dimension.
"""

from __future__ import annotations

import numpy as np

from ..core.boxes import Boxes
from ..core.columns import IntArray
from ..core.shards import by_file

__all__ = ["box_order", "file_order", "shard_order"]

_LONGEST_LINE = 2**62


def box_order(shapes: IntArray, tensor: IntArray, boxes: Boxes) -> IntArray:
    """The order of boxes by tensor, then by offset.

    Args:
        shapes: The global shapes of all tensors, ``[tensors, d]``, padded with 1.
        tensor: The tensor of each box, ``[n]``.
        boxes: The boxes.
    """
    place = _places(shapes, tensor, boxes.offset)
    if place is not None:
        return np.argsort(place, kind="stable")
    return np.lexsort([*reversed(boxes.offset.T), tensor])


def file_order(shapes: IntArray, itemsize: IntArray, tensor: IntArray, boxes: Boxes, rank: IntArray) -> IntArray:
    """The order of boxes by rank, item size (largest first), tensor, offset.

    Args:
        shapes, tensor, boxes: See :func:`box_order`.
        itemsize: Bytes of an element of each tensor, ``[tensors]``.
        rank: Who writes each box, ``[n]``.
    """
    order = box_order(shapes, tensor, boxes)
    return order[by_file(rank[order], itemsize[tensor[order]])]


def shard_order(shapes: IntArray, tensor: IntArray, boxes: Boxes) -> IntArray:
    """The order of shards by tensor, offset, shape; equal ones stay as they stand.

    Args:
        shapes, tensor, boxes: See :func:`box_order`.
    """
    place = _places(shapes, tensor, boxes.offset)
    if place is not None:
        order = np.argsort(place, kind="stable")
        again = np.flatnonzero(np.diff(place[order]) == 0)
        if (boxes.shape.take(order[again], axis=0) == boxes.shape.take(order[again + 1], axis=0)).all():
            return order
    return np.lexsort([*reversed(boxes.shape.T), *reversed(boxes.offset.T), tensor])


def _places(shapes: IntArray, tensor: IntArray, offset: IntArray) -> IntArray | None:
    """Where each box begins in the line; None if a box begins outside of its tensor, or the line is too long."""
    shapes = np.maximum(shapes, 1)
    outside = (offset < 0).any() or (offset >= shapes.take(tensor, axis=0)).any()
    if outside or np.prod(shapes, axis=1, dtype=np.float64).sum() >= _LONGEST_LINE:
        return None
    elements = np.prod(shapes, axis=1, dtype=np.int64)
    place = offset[:, 0].copy()
    for d in range(1, offset.shape[1]):
        place *= shapes[tensor, d]
        place += offset[:, d]
    place += (np.cumsum(elements) - elements)[tensor]
    return place
