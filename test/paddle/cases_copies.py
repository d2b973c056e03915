"""Functions that test_copies.py sends to ranks: states whose copies are the same on all of them, but for one bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import SaveOptions, save, save_state_dict
from test.paddle.layouts import Spread
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import dist_tensor
from test.ranks.groups import group_of

SPREADS = {
    "replicate": lambda ranks: Spread(list(range(ranks)), (None,)),
    "grid": lambda ranks: Spread([[0, 1], [2, 3]], (0, None)),
    "other grid": lambda ranks: Spread([[0, 1], [2, 3]], (None, 1)),
}


def array_of(bad: int) -> np.ndarray:
    """The same numbers on every rank, with another bit in each row on one."""
    array = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    if dist.get_rank() == bad:
        array.view(np.uint32)[:, ::512] ^= 1
    return array


def save_copies(path: str, ranks: int, how: str, bad: int, check: str = "auto", in_background: bool = False) -> Outcome:
    """Save tensors of which several ranks have copies; returns the report's warnings."""
    array = array_of(bad)
    state = {"w": weight_of(array) if how == "weight" else dist_tensor(array, SPREADS[how](ranks))}
    options = SaveOptions(timeout=60, check_replicas=check, block_bytes=4096)

    def call() -> tuple[str, ...]:
        made = save_state_dict(state, path, group_of(ranks), async_save=in_background, options=options)
        return made.result().warnings if in_background else made.warnings

    return outcome_of(call)


def weight_of(array: np.ndarray) -> Any:
    """All of a tensor, as fleet's layers give what is not cut."""
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    return ShardedWeight("w", paddle.to_tensor(array), array.shape, array.shape, (0, 0))


def save_model(path: str, ranks: int, bad: int) -> Outcome:
    """Save a model by one call; returns the report's warnings."""
    paddle.seed(0)
    model = paddle.nn.Sequential(*(paddle.nn.Linear(64, 64) for _ in range(3)))
    if dist.get_rank() == bad:
        weight = model[0].weight.numpy()
        weight.view(np.uint32)[3, 5] ^= 1
        model[0].weight.set_value(weight)
    return outcome_of(lambda: save(path, model, group=group_of(ranks)).warnings)
