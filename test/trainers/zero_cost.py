"""Checkpoints as PaddleFormers' zero-cost saves write them, without the devices that these need.

A zero-cost save has a process of its own, which takes the job's memory from the device and writes the files. Here the
code of both, that prepares in the job and that writes in the process, runs in the job and is given its tensors.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import paddle.distributed as dist
from paddle.distributed import fleet
from paddleformers.trainer.utils.zero_cost_checkpoint import (
    ZeroCostCheckpointCallbackFcBased,
    ZeroCostCheckpointWorkerFcBased,
)


def dump(trainer: Any, folder: str) -> None:
    """Write the model's and the optimizer's state of a trainer, whose sharding is of version 2, into ``folder``."""
    job = object.__new__(ZeroCostCheckpointCallbackFcBased)
    job.args, job.hcg, job.user_file_list = trainer.args, fleet.get_hybrid_communicate_group(), []
    job.optimizer_states_meta = job.model_states_meta = None
    job._cache_meta_for_sharded_save(trainer.model, trainer.optimizer)

    process = object.__new__(ZeroCostCheckpointWorkerFcBased)
    process.version, process.ema_coef, process.use_expert_parallel = SimpleNamespace(), None, False
    process.dp_rank, process.device_id = job.hcg.get_data_parallel_rank(), dist.get_rank()
    with (
        patch.object(process, "build_fusion_storage_helper", create=True),
        patch.object(process, "manage_offload_chunk", create=True),
    ):
        process.process_update_task((1, job._pack_dynamic_objects(), dict.fromkeys(_STATIC)))
    process.optimizer_fusion_storage_helper = SimpleNamespace(state_dict=lambda: _optimizer_state(trainer.optimizer))
    weights = {key: weight.local_tensor for key, weight in job.manipulated_state_dict.items()}
    process.param_fusion_storage_helper = SimpleNamespace(state_dict=lambda: dict(weights))
    process._dump_states(folder)
    dist.barrier()


_STATIC = ("model_config", "training_args", "model_meta", "user_file")


def _optimizer_state(optimizer: Any) -> dict[str, Any]:
    state = dict(optimizer.state_dict())
    state.pop("LR_Scheduler", None)
    return state
