"""Elements that lie in another order than C's: a transposed array is many parts, each of which is in C order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..core.box import Box
from ..core.dtypes import DType
from ..errors import UnsupportedValueError
from .budget import Budget
from .catalog import Piece

__all__ = ["ArrayPart", "LyingArray", "Scattered", "dense_axes", "fortran_axes", "parts_in_order"]

_STEPS, _STEPS_OF_ALL = 24, 44  # of making a part, and of all that is done with it
_STEPS_OF_FEW, _STEPS_OF_MANY = 64, 1 << 11  # of an array: many parts are compared with more effort
_FEW = 16
_RESERVE = 1 << 21  # steps that others must leave for what comes after them


class LyingArray(NamedTuple):
    """An array of a file.

    Attributes:
        dtype: Its element type.
        shape: Its shape.
        position: Where its elements begin.
        axes: Its dimensions as the elements lie, the one that changes fastest last; None for C order.
    """

    dtype: DType
    shape: tuple[int, ...]
    position: int
    axes: tuple[int, ...] | None = None


class ArrayPart(NamedTuple):
    """A part of a tensor that an array of a file is.

    Attributes:
        box: Which part of the global tensor it is.
        file: The file's number in the catalog.
        array: The array, of the box's shape; its element type has as many bytes as the tensor's.
    """

    box: Box
    file: int
    array: LyingArray


class Scattered(UnsupportedValueError):
    """The elements of a tensor lie in more parts than there is room for."""


def fortran_axes(shape: Sequence[int]) -> tuple[int, ...] | None:
    """The axes of an array in Fortran's order; None where that is C order too."""
    return tuple(reversed(range(len(shape)))) if sum(n > 1 for n in shape) > 1 and 0 not in shape else None


def dense_axes(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The dimensions by their strides, in elements, the largest first; None if elements have gaps, or share a place."""
    axes = sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis))
    due = 1
    for axis in reversed(axes):
        if shape[axis] == 1:
            continue
        if strides[axis] != due:
            return None
        due *= shape[axis]
    return tuple(axes)


def parts_in_order(where: object, part: ArrayPart, budget: Budget) -> Iterator[Piece]:
    """The pieces that an array is, in whatever order its elements lie.

    Args:
        where: What messages begin with.
        part: The array, and which part of its tensor it is.
        budget: What may be done to read the checkpoint.

    Raises:
        Scattered: there are too many.
    """
    box, file, array = part
    if array.axes is None:
        yield Piece(box, file, array.position)
        return
    axes = [axis for axis in array.axes if box.shape[axis] != 1]
    first = len(axes) - 1
    while first > 0 and axes[first - 1] < axes[first]:
        first -= 1
    outer, inner = axes[:first], {*axes[first:]}
    shape = tuple(n if axis in inner else 1 for axis, n in enumerate(box.shape))
    count, nbytes = math.prod(box.shape[axis] for axis in outer), math.prod(shape) * array.dtype.itemsize
    fixed = _STEPS_OF_FEW if count <= _FEW else _STEPS_OF_MANY
    steps = fixed + count * (_STEPS_OF_ALL + 2 * len(shape))
    if not budget.has(steps + _RESERVE):
        budget.spend(_STEPS_OF_FEW, where)
        raise Scattered(
            f"{where} has its elements in another order than C's, in {count} parts of {nbytes} bytes, for which there "
            "is no room; load it with what wrote it and save it again as a contiguous copy"
        )
    budget.spend(fixed + _STEPS * count, where)
    offset, position = list(box.offset), array.position
    for places in itertools.product(*(range(box.shape[axis]) for axis in outer)):
        for axis, place in zip(outer, places, strict=True):
            offset[axis] = box.offset[axis] + place
        yield Piece(Box(tuple(offset), shape), file, position)
        position += nbytes
