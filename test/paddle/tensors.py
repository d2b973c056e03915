"""Between numpy arrays and Paddle's tensors, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import paddle
import paddle.distributed as dist

from test.paddle.layouts import Array, Spread, part_of

__all__ = ["NUMPY_DTYPES", "dist_tensor", "local_array", "mesh_of", "paddle_tensor", "placements_of", "to_array"]

_BY_BYTES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
_PLAIN = (
    "float16",
    "float32",
    "float64",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
    "complex64",
    "complex128",
)
NUMPY_DTYPES: dict[str, Any] = {**{name: np.dtype(name) for name in _PLAIN}, **_BY_BYTES}


def paddle_tensor(array: Array) -> Any:
    """A plain tensor with an array's content."""
    name = array.dtype.name
    if 0 in array.shape:
        return paddle.empty(list(array.shape), dtype=name)
    if name in ("float8_e4m3fn", "float8_e5m2"):
        return paddle.to_tensor(array.view(np.uint8)).view(name)
    # Paddle takes uint16 for the bits of bfloat16.
    return paddle.to_tensor(array.view(np.uint16) if name == "bfloat16" else array)


def to_array(tensor: Any) -> Array:
    """A plain tensor's content."""
    array: Array = np.asarray(tensor.numpy())
    name = str(tensor.dtype).rpartition(".")[2]
    return array.view(_BY_BYTES[name]) if name in _BY_BYTES else array


def mesh_of(spread: Spread) -> Any:
    """The spread's mesh."""
    names = [f"d{i}" for i in range(np.array(spread.mesh).ndim)]
    return dist.ProcessMesh(spread.mesh, dim_names=names)


def placements_of(spread: Spread) -> list[Any]:
    """The spread's placements."""
    return [dist.Replicate() if dim is None else dist.Shard(dim) for dim in spread.dims]


def dist_tensor(array: Array, spread: Spread) -> Any:
    """The DistTensor of a global array, as this rank sees it; made without any communication.

    It is the constructor that ``dtensor_from_local`` calls, which would take every rank's part to be as large as this
    one's.
    """
    local = part_of(array, spread, dist.get_rank())
    tensor = paddle_tensor(np.zeros(array.shape, array.dtype) if local is None else np.ascontiguousarray(local))
    if array.ndim == 0:
        tensor = tensor.reshape([])
    return paddle.Tensor(tensor, dims=list(array.shape), process_mesh=mesh_of(spread), placements=placements_of(spread))


def local_array(tensor: Any) -> Array:
    """The content of a DistTensor's part on this rank."""
    local = tensor._local_value()
    if 0 in local.shape:
        name = str(local.dtype).rpartition(".")[2]
        return np.empty(tuple(local.shape), NUMPY_DTYPES[name])
    return to_array(local)
