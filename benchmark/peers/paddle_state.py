"""States of Paddle tensors, for the peers that save those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

from benchmark.states import Array, TensorSpec

__all__ = ["build", "local_arrays", "setup", "zero"]


def setup(rank: int, world_size: int) -> None:
    """Join the ranks over gloo."""
    paddle.set_device("cpu")
    dist.init_parallel_env()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)


def build(specs: Sequence[TensorSpec], rank: int, world_size: int) -> dict[str, Any]:
    """DistTensors on a mesh of all ranks."""
    mesh = dist.ProcessMesh(list(range(world_size)), dim_names=["x"])
    state = {}
    for spec in specs:
        placement = dist.Replicate() if spec.shard_dim is None else dist.Shard(spec.shard_dim)
        local = paddle.to_tensor(spec.local_part(rank, world_size))
        state[spec.name] = dtensor_from_local(local, mesh, [placement])
    return state


def local_arrays(state: dict[str, Any]) -> dict[str, Array]:
    """Copies of this rank's parts."""
    return {name: np.asarray(tensor._local_value().numpy()) for name, tensor in state.items()}


def zero(state: dict[str, Any]) -> None:
    """Set all of it to zero, where it is."""
    for tensor in state.values():
        tensor._local_value().zero_()
