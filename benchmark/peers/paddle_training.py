"""A training on the CPU with Paddle, whose ranks agree in every step."""

from __future__ import annotations

import os
from collections.abc import Callable

import paddle
import paddle.distributed as dist
from paddle import nn

from benchmark.peers import TRAINING_BATCH, TRAINING_WIDTH

__all__ = ["trainer"]

_FLAGS = 256

# The MKL that Paddle comes with takes its slow path on AMD, up to eight times as slow as torch's, unless told not to.
os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")


def trainer() -> Callable[[bool], bool]:
    """See :class:`benchmark.peers.AsyncPeer`."""
    width = TRAINING_WIDTH
    model = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
    )
    optimizer = paddle.optimizer.SGD(1e-3, parameters=model.parameters())
    batch, flags = paddle.randn([TRAINING_BATCH, width]), paddle.zeros([_FLAGS])

    def step(flag: bool) -> bool:
        loss = model(batch).square().mean()
        optimizer.clear_grad()
        loss.backward()
        optimizer.step()
        flags.fill_(float(flag))
        dist.all_reduce(flags)
        return float(flags[0]) == dist.get_world_size()

    return step
