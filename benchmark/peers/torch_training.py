"""A training on the CPU with torch, whose ranks agree in every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from benchmark.peers import TRAINING_BATCH, TRAINING_WIDTH

__all__ = ["copier", "trainer"]

_FLAGS = 256


def trainer() -> Callable[[bool], bool]:
    """See :class:`benchmark.peers.AsyncPeer`."""
    width = TRAINING_WIDTH
    model = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch, flags = torch.randn(TRAINING_BATCH, width), torch.zeros(_FLAGS)

    def step(flag: bool) -> bool:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        flags.fill_(float(flag))
        dist.all_reduce(flags)
        return float(flags[0]) == dist.get_world_size()

    return step


def copier(state: dict[str, torch.distributed.tensor.DTensor]) -> Callable[[], None]:
    """See :class:`benchmark.peers.AsyncPeer`."""
    pairs = [(tensor.to_local().clone(), tensor.to_local()) for tensor in state.values()]

    def copy() -> None:
        for target, source in pairs:
            target.copy_(source)

    return copy
