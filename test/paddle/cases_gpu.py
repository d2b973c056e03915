"""The program that test_gpu.py launches on two ranks with a GPU each."""

from __future__ import annotations

import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

from paddle_dist_ckpt import LoadOptions, load_state_dict, save_state_dict


def exchange(path: str) -> bool:
    """Save by rows, load by columns by way of NCCL and of gloo; whether all came back."""
    rank, count = dist.get_rank(), dist.get_world_size()
    array = np.arange(64 * count * 48 * count, dtype="float32").reshape(64 * count, 48 * count)
    mesh = dist.ProcessMesh(list(range(count)), dim_names=["x"])
    rows = array[rank * 64 : rank * 64 + 64]
    save_state_dict({"x": dtensor_from_local(paddle.to_tensor(rows), mesh, [dist.Shard(0)])}, path)
    columns = array[:, rank * 48 : rank * 48 + 48]
    for offload in (False, True):
        target = dtensor_from_local(paddle.zeros(list(columns.shape)), mesh, [dist.Shard(1)])
        load_state_dict({"x": target}, path, offload=offload, options=LoadOptions(exchange="always"))
        if not np.array_equal(target._local_value().numpy(), columns):
            return False
    return True


if __name__ == "__main__":
    dist.init_parallel_env()
    if not exchange(sys.argv[1]):
        raise SystemExit("the ranks did not get back what they had saved")
