"""Functions that test_training.py sends to ranks: a small model trained by Paddle's semi-automatic parallelism."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import load_state_dict, save_state_dict
from test.ranks.groups import group_of

MESHES: dict[str, Any] = {"mp1": [0], "mp2": [0, 1], "dp2_mp2": [[0, 1], [2, 3]]}


class _Net(paddle.nn.Layer):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        lead = [dist.Replicate()] * (mesh.ndim - 1)
        self.up, self.down = paddle.nn.Linear(6, 16), paddle.nn.Linear(16, 2)
        self.up.weight = dist.shard_tensor(self.up.weight, mesh, [*lead, dist.Shard(1)])
        self.up.bias = dist.shard_tensor(self.up.bias, mesh, [*lead, dist.Shard(0)])
        self.down.weight = dist.shard_tensor(self.down.weight, mesh, [*lead, dist.Shard(0)])
        self.down.bias = dist.shard_tensor(self.down.bias, mesh, [*lead, dist.Replicate()])

    def forward(self, x: Any) -> Any:
        return self.down(paddle.nn.functional.relu(self.up(x)))


def train(
    layout: str, ranks: int, seed: int, before: int, load_from: str | None, after: int, save_to: str | None
) -> list[float]:
    """Train ``before`` steps, load, train ``after`` more, save; returns the losses of the last ones."""
    mesh_ids = MESHES[layout]
    mesh = dist.ProcessMesh(mesh_ids, dim_names=["dp", "mp"][-np.array(mesh_ids).ndim :])
    paddle.seed(seed)
    with paddle.utils.unique_name.guard():  # accumulators get their names in the first step
        net = _Net(mesh)
        schedule = paddle.optimizer.lr.StepDecay(0.05, step_size=2)
        optimizer = dist.shard_optimizer(paddle.optimizer.AdamW(schedule, parameters=net.parameters()))
        _run(net, optimizer, schedule, mesh, range(before))
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        if load_from is not None:
            load_state_dict(state, load_from, group_of(ranks))
            optimizer.set_state_dict(state["optimizer"])
        losses = _run(net, optimizer, schedule, mesh, range(10, 10 + after))
    if save_to is not None:
        save_state_dict({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, save_to, group_of(ranks))
    return losses


def _run(net: Any, optimizer: Any, schedule: Any, mesh: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        numbers = np.random.default_rng(step)
        replicated = [dist.Replicate()] * mesh.ndim
        x = dist.shard_tensor(paddle.to_tensor(numbers.standard_normal((8, 6), np.float32)), mesh, replicated)
        y = dist.shard_tensor(paddle.to_tensor(numbers.standard_normal((8, 2), np.float32)), mesh, replicated)
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        schedule.step()
        losses.append(float(loss.numpy()))
    return losses
