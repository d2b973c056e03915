"""Functions that test_resume_of_optimizers.py sends to ranks: training with an optimizer that fleet shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.distributed import fleet

from paddle_dist_ckpt import load_state_dict, save_state_dict
from test.ranks.fleet import topology

_WORLD = 8


def make(hcg: Any) -> tuple[Any, Any]:
    """A model that is always the same and its optimizer, sharded in fleet's topology if there is one."""
    model = paddle.nn.Sequential(*(paddle.nn.Linear(3, 3) for _ in range(3)))
    for i, parameter in enumerate(model.parameters(), 1):
        count = int(np.prod(parameter.shape))
        parameter.set_value(np.linspace(-i, i, count, dtype=np.float32).reshape(parameter.shape) / 6)
    optimizer = paddle.optimizer.AdamW(paddle.optimizer.lr.StepDecay(0.1, 3), parameters=model.parameters())
    return model, optimizer if hcg is None else fleet.distributed_optimizer(optimizer)


def steps(model: Any, optimizer: Any, done: int, count: int) -> None:
    """Train, with the same data on all ranks."""
    for number in range(done, done + count):
        inputs = np.random.default_rng(number).standard_normal((4, 3)).astype(np.float32)
        (model(paddle.to_tensor(inputs)) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        optimizer._learning_rate.step()


def train(degree: int, count: int, load: str | None, save: str | None) -> tuple[dict[str, Any], list[str]]:
    """Load, train, save, on all ranks.

    Args:
        degree: Over how many ranks the optimizer is sharded.
        count: How many steps.
        load: From which folder, what was saved after four steps.
        save: To which folder.

    Returns:
        The parameters, and the keys of those that this rank steps.
    """
    configs = {"sharding_degree": degree, "dp_degree": _WORLD // degree}
    with topology(**configs) as hcg:
        model, optimizer = make(hcg)
        state = {"model": model, "optimizer": optimizer}
        if load is not None:
            load_state_dict(state, load)
        steps(model, optimizer, 4 if load is not None else 0, count)
        if save is not None:
            save_state_dict(state, save)
        keys = {parameter.name: key for key, parameter in model.named_parameters()}
        stepped = [keys[parameter.name] for parameter in optimizer._inner_opt._inner_opt._parameter_list]
        return {key: value.numpy().copy() for key, value in model.state_dict().items()}, stepped
