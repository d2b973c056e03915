"""torch.distributed.checkpoint with its default writer and reader: fsync, no checksums."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmark.states import Array, TensorSpec

__all__ = ["build", "load", "local_arrays", "save", "setup", "versions", "zero"]


def setup(rank: int, world_size: int) -> None:
    """See :class:`benchmark.peers.Peer`."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def versions() -> dict[str, str]:
    """Of torch."""
    return {"torch": torch.__version__}


def build(specs: Sequence[TensorSpec], rank: int, world_size: int) -> dict[str, Any]:
    """See :class:`benchmark.peers.Peer`."""
    mesh = init_device_mesh("cpu", (world_size,))
    state = {}
    for spec in specs:
        placement = Replicate() if spec.shard_dim is None else Shard(spec.shard_dim)
        local = torch.from_numpy(spec.local_part(rank, world_size))
        state[spec.name] = DTensor.from_local(local, mesh, [placement], run_check=False)
    return state


def local_arrays(state: dict[str, Any]) -> dict[str, Array]:
    """See :class:`benchmark.peers.Peer`."""
    return {name: tensor.to_local().numpy() for name, tensor in state.items()}


def zero(state: dict[str, Any]) -> None:
    """See :class:`benchmark.peers.Peer`."""
    for tensor in state.values():
        tensor.to_local().zero_()


def save(state: dict[str, Any], path: Path) -> None:
    """See :class:`benchmark.peers.Peer`."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))


def load(state: dict[str, Any], path: Path) -> None:
    """See :class:`benchmark.peers.Peer`."""
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
