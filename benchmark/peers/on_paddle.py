"""States of Paddle's tensors, and what saves them: this library, and what Paddle itself has."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.auto_parallel.api import dtensor_from_local

import paddle_dist_ckpt
from benchmark.peers.base import (
    TRAINING_BATCH,
    TRAINING_FLAGS,
    TRAINING_WIDTH,
    Checkpointer,
    Numbers,
    Pending,
    huge_pages,
    training,
)
from benchmark.states import Array, TensorSpec
from paddle_dist_ckpt import SaveOptions
from paddle_dist_ckpt.control import verified
from paddle_dist_ckpt.core.memory import bytes_at
from paddle_dist_ckpt.loading import exchange
from paddle_dist_ckpt.paddle_adapter.device import host_tensor

__all__ = ["Ours", "OursAndPaddle", "OursComparing", "OursInBackground", "OursOnHosts", "PaddleBuiltin"]

State = dict[str, Any]
_BROADCAST_BYTES = 64 << 20
_MESSAGE_BYTES = 32 << 20  # of a load's messages to all
_EXPORTED_BYTES = 200_000_000  # of tensors in one file, so that there are several


class _PaddleStates(Checkpointer):
    """DistTensors on the CPU; the ranks are joined over gloo."""

    device = "cpu"

    def setup(self, rank: int, world_size: int) -> None:
        paddle.set_device(self.device)
        dist.init_parallel_env()
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)

    def versions(self) -> dict[str, str]:
        """Of Paddle."""
        return {"paddle": paddle.__version__}

    def build(self, specs: Sequence[TensorSpec], rank: int, world_size: int) -> State:
        """DistTensors on a mesh of all ranks."""
        mesh = dist.ProcessMesh(list(range(world_size)), dim_names=["x"])
        state = {}
        for spec in specs:
            placement = dist.Replicate() if spec.shard_dim is None else dist.Shard(spec.shard_dim)
            local = self.local_tensor(spec.local_part(rank, world_size))
            state[spec.name] = dtensor_from_local(local, mesh, [placement])
        return state

    def local_tensor(self, array: Array) -> paddle.Tensor:
        """A rank's part as a tensor where it belongs."""
        return paddle.to_tensor(array)

    def local_arrays(self, state: State) -> dict[str, Array]:
        """Copies of this rank's parts."""
        return {name: np.asarray(tensor._local_value().numpy()) for name, tensor in state.items()}

    def zero(self, state: State) -> None:
        for tensor in state.values():
            tensor._local_value().zero_()


class Ours(_PaddleStates):
    """This library, with its default options: a checksum for every block, and fsync."""

    def versions(self) -> dict[str, str]:
        """Of the library and of Paddle."""
        return {"paddle_dist_ckpt": paddle_dist_ckpt.__version__, **super().versions()}

    def save(self, state: State, path: Path) -> Numbers:
        return {"plan": paddle_dist_ckpt.save_state_dict(state, path).seconds["plan"]}

    def load(self, state: State, path: Path) -> Numbers:
        return {"plan": paddle_dist_ckpt.load_state_dict(state, path).seconds["plan"]}

    def start_save(self, state: State, path: Path) -> Pending:
        return paddle_dist_ckpt.save_state_dict(state, path, async_save=True)


class OursComparing(Ours):
    """This library, told how to compare copies; ``save`` itself leaves that as it is by default."""

    def save_off(self, state: State, path: Path) -> None:
        """Compare nothing."""
        paddle_dist_ckpt.save_state_dict(state, path, options=SaveOptions(check_replicas="off"))

    def save_sampled(self, state: State, path: Path) -> None:
        """Compare a tenth."""
        paddle_dist_ckpt.save_state_dict(state, path, options=SaveOptions(check_replicas="sampled"))


class OursInBackground(Ours):
    """This library beside a training."""

    _manager: paddle_dist_ckpt.CheckpointManager | None = None

    def setup(self, rank: int, world_size: int) -> None:
        # Paddle's MKL takes its slow path on AMD, up to eight times as slow as torch's, unless told not to.
        os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")
        super().setup(rank, world_size)

    def manage(self, state: State, path: Path) -> None:
        """Have a manager prepare for the saves, and make them."""
        self._manager = paddle_dist_ckpt.CheckpointManager(path)
        self._manager.prepare(state)

    def save_before(self, state: State, path: Path) -> None:
        """Save, and wait until that has ended."""
        paddle_dist_ckpt.save_state_dict(state, path)

    def start_save(self, state: State, path: Path) -> Pending:
        return super().start_save(state, path) if self._manager is None else self._manager.save(1, state)

    def copier(self, state: State) -> Callable[[], None]:
        """By address, into huge pages."""
        tensors = [tensor._local_value() for tensor in state.values()]
        parts = [(tensor.data_ptr(), tensor.numel().item() * tensor.element_size()) for tensor in tensors]
        buffer = huge_pages(sum(nbytes for _, nbytes in parts))

        def copy() -> None:
            target = buffer.ctypes.data
            for source, nbytes in parts:
                ctypes.memmove(target, source, nbytes)
                target += nbytes

        return copy

    def trainer(self) -> Callable[[bool], bool]:
        batch, flags = paddle.randn([TRAINING_BATCH, TRAINING_WIDTH]), paddle.zeros([TRAINING_FLAGS])
        return training(nn, dist, lambda parameters: paddle.optimizer.SGD(1e-3, parameters=parameters), batch, flags)


class _HostFolder(paddle_dist_ckpt.LocalStorage):
    """A folder that no other rank sees, as on a host of its own."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path / f"host{rank}")
        self._host = f"host{rank}"

    def identity(self) -> Any:
        """Of a host with the rank's number."""
        return super().identity()._replace(host=self._host)


class OursOnHosts(Ours):
    """This library, with a folder of its own for each rank, so that ranks have to read for each other."""

    def save(self, state: State, path: Path) -> Numbers:
        return {"plan": paddle_dist_ckpt.save_state_dict(state, _HostFolder(path, dist.get_rank())).seconds["plan"]}

    def load(self, state: State, path: Path) -> Numbers:
        """See :class:`Checkpointer`; returns how many bytes came from files and from other ranks, too."""
        report = paddle_dist_ckpt.load_state_dict(state, _HostFolder(path, dist.get_rank()))
        received = {"bytes_read": report.bytes_read, "bytes_received": report.bytes_received}
        return {"plan": report.seconds["plan"], **received}

    def load_unchecked(self, state: State, path: Path) -> Numbers:
        """As :meth:`load`, but what the collectives deliver is neither hashed nor compared."""
        hashing = [mock.patch.object(module, "digest_of", return_value=0) for module in (verified, exchange)]
        with hashing[0], hashing[1], mock.patch.object(verified.VerifiedTransfers, "_compare", return_value=[]):
            return self.load(state, path)

    def broadcast(self, state: State, path: Path) -> Numbers:
        """Move as many bytes with broadcasts alone: every rank sends its part, in pieces; returns how many in all."""
        total = sum(int(np.prod(tensor.shape)) * tensor.element_size() for tensor in state.values())
        part = -(-total // dist.get_world_size())
        for source in range(dist.get_world_size()):
            for start in range(0, part, _BROADCAST_BYTES):
                dist.broadcast(_broadcast_part(min(_BROADCAST_BYTES, part - start)), src=source)
        return {"total_bytes": total}

    def broadcast_tensors(self, state: State, path: Path) -> Numbers:
        """Broadcast the tensors' memory to where it is on the other ranks, each rank a message in turn."""
        tensors = [bytes_at(int(t.data_ptr()), int(np.prod(t.shape)) * t.element_size()) for t in state.values()]
        starts = [(data, start) for data in tensors for start in range(0, data.size, _MESSAGE_BYTES)]
        for number, (data, start) in enumerate(starts):
            part = host_tensor(data[start : start + _MESSAGE_BYTES])
            dist.broadcast(part, src=number % dist.get_world_size())
        return {}


@functools.cache
def _broadcast_part(nbytes: int) -> paddle.Tensor:
    return paddle.full([nbytes], dist.get_rank(), dtype="uint8")


class PaddleBuiltin(_PaddleStates):
    """What Paddle itself has: no checksums, no fsync.

    On several CPU ranks its load calls ``Tensor.cuda`` and fails. That call is made to do nothing here, in Paddle's
    favour: otherwise there would be nothing to measure.
    """

    def setup(self, rank: int, world_size: int) -> None:
        super().setup(rank, world_size)
        paddle.Tensor.cuda = lambda self, *args, **kwargs: self

    def save(self, state: State, path: Path) -> None:
        dist.save_state_dict(state, str(path))

    def load(self, state: State, path: Path) -> None:
        dist.load_state_dict(state, str(path))


class OursAndPaddle(Ours):
    """This library, with checkpoints in formats of others, and Paddle's own functions in the same processes.

    See :class:`PaddleBuiltin` for what is made to do nothing.
    """

    def setup(self, rank: int, world_size: int) -> None:
        super().setup(rank, world_size)
        paddle.Tensor.cuda = lambda self, *args, **kwargs: self

    def save_paddle(self, state: State, path: Path) -> None:
        """Save as Paddle does."""
        dist.save_state_dict(state, str(path))

    def save_safetensors(self, state: State, path: Path) -> None:
        """Export whole tensors as Hugging Face has them."""
        paddle_dist_ckpt.export_state_dict(state, path, "safetensors", max_shard_bytes=_EXPORTED_BYTES)

    def load_paddle(self, state: State, path: Path) -> None:
        """Load as Paddle does."""
        dist.load_state_dict(state, str(path))

    def read_metadata(self, state: State, path: Path) -> None:
        """Find out what a checkpoint holds, on one rank."""
        if dist.get_rank() == 0:
            paddle_dist_ckpt.read_metadata(path)
