"""This library, with its default options, and a state on the test device. See `test/device_plugin`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

from benchmark.peers.ours import load, save, versions
from benchmark.states import Array, TensorSpec
from test.device_plugin.build import NAME

__all__ = ["build", "copied_to_host", "load", "local_arrays", "save", "setup", "versions", "zero"]


def setup(rank: int, world_size: int) -> None:
    """Join the ranks over the device's own collectives."""
    paddle.set_device(f"{NAME}:{rank}")
    dist.init_parallel_env()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)


def build(specs: Sequence[TensorSpec], rank: int, world_size: int) -> dict[str, Any]:
    """DistTensors on the device, on a mesh of all ranks."""
    mesh = dist.ProcessMesh(list(range(world_size)), dim_names=["x"])
    place = paddle.framework._current_expected_place()
    state = {}
    for spec in specs:
        placement = dist.Replicate() if spec.shard_dim is None else dist.Shard(spec.shard_dim)
        host = paddle.to_tensor(spec.local_part(rank, world_size), place=paddle.CPUPlace())
        state[spec.name] = dtensor_from_local(host._copy_to(place, True), mesh, [placement])
    return state


def copied_to_host(state: dict[str, Any]) -> dict[str, Any]:
    """The same state in host memory."""
    return {
        name: dtensor_from_local(tensor._local_value().cpu(), tensor.process_mesh, tensor.placements)
        for name, tensor in state.items()
    }


def local_arrays(state: dict[str, Any]) -> dict[str, Array]:
    """Copies of this rank's parts."""
    return {name: np.asarray(tensor._local_value().cpu().numpy()) for name, tensor in state.items()}


def zero(state: dict[str, Any]) -> None:
    """Set all of it to zero, where it is."""
    for tensor in state.values():
        local = tensor._local_value()
        zeros = paddle.to_tensor(np.zeros(local.shape, np.float32), place=paddle.CPUPlace())
        local.copy_(zeros, True)
