"""Copies a range of an array's bytes, in row-major order, whatever its strides."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ..core.box import cut_flat_range
from ..core.ports import Bytes1D

__all__ = ["gather"]


def gather(array: npt.NDArray[Any], start: int, stop: int, buffer: Bytes1D) -> None:
    """Copy bytes ``start:stop`` (of whole items) of an array into the beginning of a buffer."""
    size, at = array.itemsize, 0
    for box in cut_flat_range(array.shape, start // size, stop // size):
        nbytes = box.size * size
        buffer[at : at + nbytes].view(array.dtype).reshape(box.shape)[...] = array[box.slices]
        at += nbytes
