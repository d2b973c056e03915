"""Tensors made of numpy arrays: what a framework's plain and distributed tensors are to the engine, without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box
from ..core.dtypes import DTYPES, DType, arithmetic_dtype
from ..core.shards import Kind
from ..core.tensors import LocalShard, Reduction, TensorView, is_native_array, view_of_array

__all__ = ["NumpyAdapter", "ShardedArray", "shard_array"]


@dataclass(slots=True, eq=False)
class ShardedArray:
    """Some boxes of a global array, as one rank holds them.

    Attributes:
        shape: The global shape.
        dtype: Element type.
        boxes: Where the pieces lie.
        pieces: Their data.
        plain: Whether it stands for a plain tensor.
        reduction: What the pieces are, if the tensor is partial.
    """

    shape: tuple[int, ...]
    dtype: DType
    boxes: list[Box]
    pieces: list[npt.NDArray[Any]]
    plain: bool = False
    reduction: Reduction | None = None


def shard_array(array: npt.NDArray[Any], boxes: Sequence[Box], fill: bool = True) -> ShardedArray:
    """The boxes of a global array as a distributed tensor: with the array's data, or with zeros to be filled."""
    pieces = [np.array(array[box.slices]) if fill else np.zeros(box.shape, array.dtype) for box in boxes]
    return ShardedArray(array.shape, DTYPES[array.dtype.name], list(boxes), pieces)


class NumpyAdapter:
    """Makes :class:`ShardedArray` and numpy arrays accessible to the engine."""

    version: str | None = None

    def is_tensor(self, value: Any) -> bool:
        """See :class:`..core.tensors.TensorAdapter`."""
        return isinstance(value, ShardedArray) or is_native_array(value)

    def view(self, value: Any, key: str) -> TensorView:
        """See :class:`..core.tensors.TensorAdapter`."""
        if not isinstance(value, ShardedArray):
            return view_of_array(value)
        shards = tuple(
            LocalShard(box.offset, piece.view(value.dtype.raw))
            for box, piece in zip(value.boxes, value.pieces, strict=True)
        )
        return TensorView(Kind.TENSOR, value.dtype, value.shape, value.plain, shards, None, value.reduction)

    def empty(self, shape: tuple[int, ...], dtype: DType, on_host: bool) -> Any:
        """See :class:`..core.tensors.TensorAdapter`."""
        return np.empty(shape, arithmetic_dtype(dtype))
