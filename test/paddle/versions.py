"""What the Paddle at hand has. Tests of what it has not are skipped, and say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.distributed.auto_parallel import api

__all__ = [
    "EMPTY_CACHE",
    "FLOAT8",
    "FROM_LOCAL",
    "KEPT_DTYPES",
    "LATER_THAN_3_0",
    "RNG_STATE",
    "SHARDING_STAGES",
    "SHARD_OPTIMIZER",
    "SHARD_ORDER",
    "SHARED_HOST_MEMORY",
    "lacks",
]

_HOST = np.zeros(16, np.uint8)

EMPTY_CACHE = hasattr(paddle.device, "empty_cache")  # of any device
FLOAT8 = hasattr(paddle, "float8_e4m3fn")
FROM_LOCAL = hasattr(api, "dtensor_from_local")  # DistTensors of any local values
KEPT_DTYPES = len({id(one) for one in [paddle.ones([1]).dtype for _ in range(2)]}) == 1  # not one for each that asks
RNG_STATE = len(paddle.get_rng_state("cpu")[0].__getstate__()) > 3  # with the engine, not only its seed
SHARED_HOST_MEMORY = paddle.utils.dlpack.from_dlpack(_HOST.__dlpack__()).data_ptr() == _HOST.ctypes.data
SHARDING_STAGES = hasattr(dist, "ShardingStage1")
SHARD_OPTIMIZER = issubclass(api._ShardOptimizer, paddle.optimizer.Optimizer)  # what shard_optimizer returns is one
SHARD_ORDER = hasattr(dist.Shard, "get_co_shard_order")
LATER_THAN_3_0 = SHARD_ORDER  # stands for what cannot be asked


def lacks(feature: object, what: str) -> Any:
    """A mark: skip the test unless this Paddle has the feature. ``what`` completes the sentence "Paddle 2.6 ..."."""
    return pytest.mark.skipif(not feature, reason=f"Paddle {paddle.__version__} {what}")
