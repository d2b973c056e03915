"""torch.distributed.checkpoint with its default writer and reader: fsync, no checksums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmark.peers.base import TRAINING_BATCH, TRAINING_FLAGS, TRAINING_WIDTH, Checkpointer, Pending, training
from benchmark.states import Array, TensorSpec

__all__ = ["AsyncTorchDcp", "CachedAsyncTorchDcp", "ProcessAsyncTorchDcp", "TorchDcp"]

State = dict[str, DTensor]


class TorchDcp(Checkpointer):
    """Its ``save`` and ``load``."""

    def setup(self, rank: int, world_size: int) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)

    def versions(self) -> dict[str, str]:
        """Of torch."""
        return {"torch": torch.__version__}

    def build(self, specs: Sequence[TensorSpec], rank: int, world_size: int) -> State:
        mesh = init_device_mesh("cpu", (world_size,))
        state = {}
        for spec in specs:
            placement = Replicate() if spec.shard_dim is None else Shard(spec.shard_dim)
            local = torch.from_numpy(spec.local_part(rank, world_size))
            state[spec.name] = DTensor.from_local(local, mesh, [placement], run_check=False)
        return state

    def local_arrays(self, state: State) -> dict[str, Array]:
        return {name: tensor.to_local().numpy() for name, tensor in state.items()}

    def zero(self, state: State) -> None:
        for tensor in state.values():
            tensor.to_local().zero_()

    def save(self, state: State, path: Path) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))

    def load(self, state: State, path: Path) -> None:
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))


class AsyncTorchDcp(TorchDcp):
    """Its ``async_save`` as it comes: staged in fresh memory, saved by a thread."""

    def setup(self, rank: int, world_size: int) -> None:
        super().setup(rank, world_size)
        # For saves alone: the thread's messages must not mix with the training's.
        self._group = dist.new_group(backend="gloo")

    @cached_property
    def options(self) -> dict[str, Any]:
        """What is given to ``async_save``; made with the first save and used in all."""
        return {}

    def start_save(self, state: State, path: Path) -> Pending:
        return dcp.async_save(state, checkpoint_id=path, process_group=self._group, **self.options)

    def copier(self, state: State) -> Callable[[], None]:
        pairs = [(tensor.to_local().clone(), tensor.to_local()) for tensor in state.values()]

        def copy() -> None:
            for target, source in pairs:
                target.copy_(source)

        return copy

    def trainer(self) -> Callable[[bool], bool]:
        batch, flags = torch.randn(TRAINING_BATCH, TRAINING_WIDTH), torch.zeros(TRAINING_FLAGS)
        return training(nn, dist, lambda parameters: torch.optim.SGD(parameters, lr=1e-3), batch, flags)


class CachedAsyncTorchDcp(AsyncTorchDcp):
    """Its ``async_save`` with a stager that keeps its memory for the next save."""

    @cached_property
    def options(self) -> dict[str, Any]:
        """What the stager offers but for this is for GPUs, or for another process."""
        return {"async_stager": _stager(shared=False)}


class ProcessAsyncTorchDcp(AsyncTorchDcp):
    """Its ``async_save`` by another process, through shared memory that is kept."""

    @cached_property
    def options(self) -> dict[str, Any]:
        """The process, and what shares memory with it."""
        return {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": _stager(shared=True)}


def _stager(shared: bool) -> DefaultStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=shared, use_async_staging=False, use_non_blocking_copy=False
        )
    )
