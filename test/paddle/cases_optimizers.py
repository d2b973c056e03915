"""Functions that test_resume_of_optimizers.py sends to ranks: training with an optimizer that fleet shards; padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

from paddle_dist_ckpt import LoadOptions, load_state_dict, save_state_dict
from paddle_dist_ckpt.paddle_adapter.optimizers import make_accumulators
from test.ranks.fleet import topology
from test.ranks.groups import group_of

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


def save_and_go_on(folder: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Train with an optimizer that two ranks share, save after four of eight steps, and go on from there once more.

    Returns:
        The parameters after eight steps; those after the steps that others have loaded and done; and the keys of those
        that this rank steps.
    """
    with topology(sharding_degree=2, dp_degree=_WORLD // 2) as hcg:
        model, optimizer = make(hcg)
        steps(model, optimizer, 0, 4)
        save_state_dict({"model": model, "optimizer": optimizer}, folder)
        steps(model, optimizer, 4, 4)
        keys = {parameter.name: key for key, parameter in model.named_parameters()}
        stepped = [keys[parameter.name] for parameter in optimizer._inner_opt._inner_opt._parameter_list]
        return values(model), _resumed(hcg, folder), stepped


def resume(folder: str, degree: int) -> dict[str, Any]:
    """Load what was saved after four steps, with an optimizer that so many ranks share; four more; the parameters."""
    with topology(sharding_degree=degree, dp_degree=_WORLD // degree) as hcg:
        return _resumed(hcg, folder)


def _resumed(hcg: Any, folder: str) -> dict[str, Any]:
    model, optimizer = make(hcg)
    load_state_dict({"model": model, "optimizer": optimizer}, folder)
    steps(model, optimizer, 4, 4)
    return values(model)


def values(model: Any) -> dict[str, Any]:
    """The model's parameters."""
    return {key: value.numpy().copy() for key, value in model.state_dict().items()}


def embedding(rows: int, ranks: int, seed: int) -> tuple[Any, Any]:
    """An embedding whose rows are divided among ranks, and an optimizer that has its accumulators."""
    mesh = dist.ProcessMesh(list(range(ranks)), dim_names=["mp"])
    paddle.seed(seed)
    model = paddle.nn.Embedding(rows, 3)
    model.weight = dist.shard_tensor(model.weight, mesh, [dist.Shard(0)])
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    make_accumulators(optimizer)
    return model, optimizer


def resized(rows: int, ranks: int, seed: int, load: str | None, save: str | None) -> dict[str, Any]:
    """Load with another vocabulary, or save; returns this rank's rows of the weight and its second moment."""
    model, optimizer = embedding(rows, ranks, seed)
    tensors = {"weight": model.weight, "moment2": optimizer._accumulators["moment2"][model.weight.name]}
    tensors["moment2"]._local_value().set_value(model.weight._local_value() * 2)
    state = {"model": model, "optimizer": optimizer}
    if load is not None:
        options = LoadOptions(resize={"*weight*": 0})
        load_state_dict(state, load, group_of(ranks), options=options)
    if save is not None:
        save_state_dict(state, save, group_of(ranks))
    return {key: tensor._local_value().numpy().copy() for key, tensor in tensors.items()}
