"""Paddle tensors as the engine sees them: boxes of memory, without a copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle

from ..core.box import Box
from ..core.dtypes import DType, arithmetic_dtype, dtype_named
from ..core.shards import Kind
from ..core.tensors import LocalShard, Reduction, TensorView, is_native_array, view_of_array
from ..errors import UnsupportedValueError
from .placement import local_box, mesh_coordinate, reduction_of

__all__ = ["PaddleAdapter"]


class _Place(NamedTuple):
    """Where a local value is in its global tensor, and which addend of it."""

    box: Box
    reduction: Reduction | None


class PaddleAdapter:
    """Makes paddle.Tensor (plain and DistTensor) and numpy arrays accessible to the engine.

    Args:
        rank: This process's global rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._dtypes: dict[Any, DType] = {}
        self._last: tuple[tuple[int, ...], Any, Any, _Place | None] | None = None

    @property
    def version(self) -> str | None:
        """Paddle's version."""
        return str(paddle.__version__)

    def is_tensor(self, value: Any) -> bool:
        """See :class:`..core.tensors.TensorAdapter`."""
        return isinstance(value, paddle.Tensor) or is_native_array(value)

    def view(self, value: Any, key: str) -> TensorView:
        """See :class:`..core.tensors.TensorAdapter`."""
        if isinstance(value, np.ndarray):
            return view_of_array(value)
        dtype, shape = self._dtype(value.dtype, key), tuple(value.shape)
        if value.is_dist():
            return self._view_dist(value, key, dtype, shape)
        if getattr(value, "is_distributed", False):
            raise UnsupportedValueError(
                f"{key}: a plain tensor that is marked is_distributed is one rank's part of a larger one, and says not "
                "which. The layer's sharded_state_dict() says it (but is not supported yet); or use a DistTensor"
            )
        shard = LocalShard((0,) * len(shape), _memory(value, dtype, key))
        return TensorView(Kind.TENSOR, dtype, shape, True, (shard,), value.name)

    def _view_dist(self, value: Any, key: str, dtype: DType, shape: tuple[int, ...]) -> TensorView:
        place = self._place(value.process_mesh, value.placements, shape, key)
        if place is None:
            return TensorView(Kind.TENSOR, dtype, shape, False, (), value.name)
        array = _memory(value._local_value(), dtype, key)
        if array.shape != place.box.shape and array.size + place.box.size:
            raise UnsupportedValueError(
                f"{key}: its local value has shape {list(array.shape)}, but by its placements it is {place.box} of "
                f"{list(shape)}; this version of Paddle cuts tensors otherwise than this library knows"
            )
        shard = LocalShard(place.box.offset, array)
        return TensorView(Kind.TENSOR, dtype, shape, False, (shard,), value.name, place.reduction)

    def _place(self, mesh: Any, placements: Any, shape: tuple[int, ...], key: str) -> _Place | None:
        """Where the local value is, if the mesh holds this rank. Often the same as for the tensor before."""
        known = self._last
        if known is not None and known[0] == shape and known[1] == placements and known[2] == mesh:
            return known[3]
        mesh_shape, coordinate = mesh.shape, mesh_coordinate(mesh, self._rank)
        place = None
        if coordinate is not None:
            box = local_box(shape, mesh_shape, coordinate, placements, key)
            place = _Place(box, reduction_of(mesh_shape, coordinate, placements, key))
        self._last = (shape, placements, mesh, place)
        return place

    def _dtype(self, dtype: Any, key: str) -> DType:
        known = self._dtypes.get(dtype)
        if known is None:
            try:
                known = self._dtypes[dtype] = dtype_named(str(dtype).rpartition(".")[2])
            except UnsupportedValueError as error:
                raise UnsupportedValueError(f"{key}: {error}") from None
        return known

    def empty(self, shape: tuple[int, ...], dtype: DType, on_host: bool) -> Any:
        """See :class:`..core.tensors.TensorAdapter`."""
        if dtype.name.startswith("uint") and dtype.itemsize > 1:  # Paddle's own tensors never have these
            return np.empty(shape, arithmetic_dtype(dtype))
        tensor = paddle.empty(list(shape), dtype=dtype.name)
        return tensor.cpu() if on_host and not tensor.place.is_cpu_place() else tensor


class _Memory:
    """A tensor's memory as numpy wants to hear of it; keeps the tensor alive as long as an array looks at it."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Any, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface
        self._tensor = tensor


def _memory(tensor: Any, dtype: DType, key: str) -> npt.NDArray[Any]:
    """A tensor's memory as an array of raw items.

    Raises:
        UnsupportedValueError: it is sparse, or not in host memory.
    """
    if not tensor.is_dense():
        raise UnsupportedValueError(f"{key}: sparse tensors cannot be saved or loaded; use to_dense() first")
    shape = tuple(tensor.shape)
    if 0 in shape:
        return np.empty(shape, dtype.raw)
    if not tensor._is_initialized():
        raise UnsupportedValueError(f"{key}: the tensor has no memory yet; it was never initialized")
    if not tensor.place.is_cpu_place():
        raise UnsupportedValueError(f"{key}: is on {tensor.place}; only tensors in host memory are supported so far")
    interface: dict[str, Any] = {
        "version": 3,
        "typestr": dtype.raw.str,
        "shape": shape,
        "data": (tensor.data_ptr(), False),
    }
    if not tensor.is_contiguous():
        interface["strides"] = tuple(stride * dtype.itemsize for stride in tensor.strides)
    return np.asarray(_Memory(tensor, interface))
