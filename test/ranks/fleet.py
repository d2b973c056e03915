"""Fleet's hybrid parallelism on CPU ranks.

Fleet takes most of what it needs from gloo. What it does not find there is put in its place while a `topology` is
entered, or the `stand_ins` alone are, and taken away afterwards; nothing of the layers and optimizers themselves is
changed:

- a topology makes dozens of process groups, many of them of the same ranks: each is made once in a rank's life;
- gloo has no reduce-scatter: the sum of everything is cut;
- the fused buffers of sharding are aligned as on GPUs;
- a CPU has no device's number, which a pipeline asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.base import topology as fleet_topology
from paddle.distributed.fleet.utils import tensor_fusion_helper

__all__ = ["stand_ins", "topology"]

_DEGREES = ("dp_degree", "mp_degree", "pp_degree", "sharding_degree")
_groups: dict[tuple[int, ...], Any] = {}  # state of the worker process: the groups that topologies have made
_new_group = dist.new_group


@contextmanager
def topology(*, split_param: bool = False, **configs: Any) -> Iterator[Any]:
    """Let fleet work with a topology of all ranks of the world, all of which enter it together.

    Args:
        split_param: Whether sharding cuts parameters within (its version 2) instead of giving each to a rank.
        configs: Entries of fleet's ``hybrid_configs``; degrees that are not named are 1.

    Yields:
        Fleet's ``HybridCommunicateGroup``.
    """
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {**dict.fromkeys(_DEGREES, 1), **configs}
    strategy.hybrid_configs["sharding_configs"].split_param = split_param
    strategy.hybrid_configs["sharding_configs"].comm_buffer_size_MB = 0  # a buffer for each parameter: all are cut
    with stand_ins():
        fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
        yield fleet.get_hybrid_communicate_group()


@contextmanager
def stand_ins() -> Iterator[None]:
    """Put in its place what fleet does not find in gloo, and forget the topology that was there until the end."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "new_group", _same_group))
        stack.enter_context(patch.object(dist, "reduce_scatter", _reduce_scatter))
        stack.enter_context(patch.object(tensor_fusion_helper, "get_current_device_type", lambda: "gpu"))
        stack.enter_context(patch.object(dist.ParallelEnv, "_device_id", 0, create=True))
        stack.enter_context(patch.object(fleet_topology, "_HYBRID_PARALLEL_GROUP", None))
        yield


def _same_group(ranks: list[int], *_: Any, **__: Any) -> Any:
    """Stand in for ``dist.new_group``."""
    key = tuple(sorted(ranks))
    if key not in _groups:
        _groups[key] = _new_group(list(key), backend="gloo")
    return _groups[key]


def _reduce_scatter(output: Any, whole: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **_: Any) -> Any:
    """Stand in for ``dist.reduce_scatter``, where ``output`` may be a part of ``whole``."""
    total = whole.clone()
    task = dist.all_reduce(total, op=op, group=group, sync_op=False)
    task.wait()
    size = output.shape[0]
    output.copy_(total[group.rank * size : (group.rank + 1) * size], True)
    return task
