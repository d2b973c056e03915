"""Between numpy arrays and Paddle's tensors, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import paddle.distributed as dist

from test.paddle.layouts import Array, Spread, part_of
from test.paddle.versions import FLOAT8, FROM_LOCAL

__all__ = [
    "NUMPY_DTYPES",
    "dist_tensor",
    "from_local",
    "local_array",
    "mesh_of",
    "paddle_tensor",
    "placements_of",
    "to_array",
]

_BY_BYTES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16}
if FLOAT8:
    _BY_BYTES |= {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
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


def from_local(local: Any, shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Any:
    """The DistTensor of which a plain tensor is this rank's part, made without any communication.

    It is the constructor that ``dtensor_from_local`` calls, which would take every rank's part to be as large as this
    one's.
    """
    if FROM_LOCAL:
        return paddle.Tensor(local, dims=list(shape), process_mesh=mesh, placements=list(placements))
    return _cut_and_filled(local, shape, mesh, placements)


def _cut_and_filled(local: Any, shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Any:
    """In Paddle 2.6 a whole tensor must be cut, whose memory is filled then.

    Only some dtypes can be cut, so others are cast afterwards. But what is cast is no longer partial, and a tensor that
    is not on this rank cannot be cast.
    """
    zeros = paddle.zeros(list(shape))
    if any(each.is_partial() for each in placements) or dist.get_rank() not in mesh.process_ids:
        zeros = zeros.astype(local.dtype)
    tensor = dist.shard_tensor(zeros, mesh, list(placements))
    if tensor.dtype != local.dtype:
        tensor = tensor.astype(local.dtype)
    part = tensor._local_value()
    if part._is_initialized():
        assert part.shape == local.shape
        ctypes.memmove(part.data_ptr(), local.data_ptr(), int(np.prod(local.shape)) * local.element_size())
    return tensor


def dist_tensor(array: Array, spread: Spread) -> Any:
    """The DistTensor of a global array, as this rank sees it."""
    local = part_of(array, spread, dist.get_rank())
    tensor = paddle_tensor(np.zeros(array.shape, array.dtype) if local is None else np.ascontiguousarray(local))
    if array.ndim == 0:
        tensor = tensor.reshape([])
    return from_local(tensor, array.shape, mesh_of(spread), placements_of(spread))


def local_array(tensor: Any) -> Array:
    """The content of a DistTensor's part on this rank."""
    local = tensor._local_value()
    if 0 in local.shape:
        name = str(local.dtype).rpartition(".")[2]
        return np.empty(tuple(local.shape), NUMPY_DTYPES[name])
    return to_array(local)
