"""Tensors made of numpy arrays: what a framework's plain and distributed tensors are to the engine, without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box, whole
from ..core.device_memory import DeviceAccess
from ..core.dtypes import DTYPES, DType, arithmetic_dtype
from ..core.memory import address_of
from ..core.shards import Kind
from ..core.tensors import Geometry, LocalShard, Reduction, TensorView, is_native_array, view_of_array
from ..tree.state_dict import Adapter

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


@dataclass(frozen=True, slots=True, eq=False)
class ArrayIdentity:
    """Implements :class:`..core.tensors.Identity`. Unlike a framework's it keeps the tensors alive."""

    values: tuple[Any, ...]
    views: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> ArrayIdentity:
        """The identity of these tensors."""
        return cls(tuple(values), tuple(map(_outline, values)))

    def matches(self, values: Sequence[Any]) -> bool:
        """See :class:`..core.tensors.Identity`."""
        same = len(values) == len(self.values) and all(a is b for a, b in zip(values, self.values, strict=True))
        return same and self.views == tuple(map(_outline, values))


def _outline(value: Any) -> tuple[Any, ...]:
    """All of a tensor but its content."""
    arrays = value.pieces if isinstance(value, ShardedArray) else [value]
    memory = [(address_of(a), a.dtype.str, a.shape, a.strides, a.flags.writeable) for a in arrays]
    if not isinstance(value, ShardedArray):
        return tuple(memory)
    return (*memory, value.shape, value.dtype.name, tuple(value.boxes), value.plain, value.reduction)


class NumpyAdapter(Adapter):
    """Makes :class:`ShardedArray` and numpy arrays accessible to the engine."""

    version: str | None = None
    devices: DeviceAccess | None = None
    tensor_types = frozenset([ShardedArray])

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, ShardedArray) or is_native_array(value)

    def names(self, tensors: Sequence[Any]) -> list[str | None]:
        return [None] * len(tensors)

    def view(self, value: Any, path: str) -> TensorView:
        if not isinstance(value, ShardedArray):
            return view_of_array(value)
        pieces, addresses = [], []
        for box, piece in zip(value.boxes, value.pieces, strict=True):
            if piece.size:
                pieces.append(LocalShard(box, None if piece.flags.c_contiguous else piece.strides))
                addresses.append(address_of(piece))
        if 0 in value.shape:
            pieces, addresses = [LocalShard(whole(value.shape))], [0]
        geometry = Geometry(Kind.TENSOR, value.dtype, value.shape, value.plain, tuple(pieces), value.reduction)
        return TensorView(geometry, tuple(addresses), value, None)

    def views(self, values: Sequence[Any], paths: Sequence[str] = ()) -> None:
        return None  # they are looked at one by one

    def identity(self, values: Sequence[Any], addresses: Sequence[int]) -> ArrayIdentity | None:
        return ArrayIdentity.of(values)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        return np.empty(shape, arithmetic_dtype(dtype))
