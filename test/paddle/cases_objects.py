"""Functions that test_objects_on_ranks.py sends to ranks: training whose objects are saved and loaded as they stand."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import LoadOptions, PerRank, load_state_dict, rng_state, save_state_dict, set_rng_state
from paddle_dist_ckpt.paddle_adapter.optimizers import make_accumulators
from paddle_dist_ckpt.paddle_adapter.placement import layout_of
from test.paddle.versions import RNG_STATE
from test.ranks.groups import group_of

MESHES: dict[str, Any] = {"plain": None, "mp1": [0], "mp2": [0, 1], "dp2_mp2": [[0, 1], [2, 3]]}


class _Net(paddle.nn.Layer):
    """Two linear layers. They may be made in either order, after others, which changes Paddle's names for them."""

    def __init__(self, mesh: Any, reverse: bool, others: int) -> None:
        super().__init__()
        self.spare = [paddle.nn.Linear(2, 2) for _ in range(others)]  # in a list: not a part of the model
        shapes = {"up": (6, 6), "down": (6, 6)}
        made = {name: paddle.nn.Linear(*shapes[name]) for name in sorted(shapes, reverse=reverse)}
        self.up, self.down = made["up"], made["down"]
        if mesh is not None:
            lead = [dist.Replicate()] * (mesh.ndim - 1)
            self.up.weight = dist.shard_tensor(self.up.weight, mesh, [*lead, dist.Shard(1)])
            self.up.bias = dist.shard_tensor(self.up.bias, mesh, [*lead, dist.Shard(0)])
            self.down.weight = dist.shard_tensor(self.down.weight, mesh, [*lead, dist.Shard(0)])
            self.down.bias = dist.shard_tensor(self.down.bias, mesh, [*lead, dist.Replicate()])

    def forward(self, x: Any) -> Any:
        return self.down(paddle.nn.functional.relu(self.up(x)))


class Counter:
    """An object of a user's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def train(
    layout: str,
    ranks: int,
    seed: int,
    load: tuple[str, str] | None,
    steps: int,
    save: tuple[str, str] | None,
    sharded_optimizer: bool = False,
    frozen: bool = False,
) -> dict[str, Any]:
    """Load, train, save; returns losses, whole parameters and moments.

    Args:
        layout: A key of MESHES.
        ranks: Of how many ranks that is.
        seed: For the first parameters; odd seeds make layers in another order, after others.
        load: From which folder, ``"objects"`` or ``"state_dicts"``.
        steps: How many; data follow from the counter that is loaded.
        save: To which folder, and as what.
        sharded_optimizer: Whether the optimizer is one of ``dist.shard_optimizer``.
        frozen: Whether a layer is not trained until after the load.
    """
    mesh_ids = MESHES[layout]
    mesh = None
    if mesh_ids is not None:
        mesh = dist.ProcessMesh(mesh_ids, dim_names=["dp", "mp"][-np.array(mesh_ids).ndim :])
    paddle.seed(seed)
    net = _Net(mesh, bool(seed % 2), seed % 5)
    schedule = paddle.optimizer.lr.StepDecay(0.05, step_size=2)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=net.parameters(), weight_decay=0.3)
    if sharded_optimizer:
        optimizer = dist.shard_optimizer(optimizer)
    counter = Counter()
    for parameter in net.up.parameters():
        parameter.stop_gradient = frozen
    before = {name: _whole(value) for name, value in net.state_dict().items()}
    if load is not None:
        state = _state(net, optimizer, schedule, counter, load[1])
        load_state_dict(state, load[0], group_of(ranks), options=LoadOptions(per_rank="by_rank"))
        if load[1] == "state_dicts":
            schedule.set_state_dict(state["lr"])
            counter.load_state_dict(state["counter"])
        if RNG_STATE:
            set_rng_state(state["rng"].value)
    for parameter in net.up.parameters():
        parameter.stop_gradient = False
    losses = [_step(net, optimizer, schedule, mesh, counter) for _ in range(steps)]
    if save is not None:
        save_state_dict(_state(net, optimizer, schedule, counter, save[1]), save[0], group_of(ranks))
    return {
        "before": before,
        "losses": losses,
        "parameters": {name: _whole(value) for name, value in net.state_dict().items()},
        "count": counter.count,
        "random": float(np.random.random()) + float(paddle.rand([1])),
        "placements": [_placements(value) for value in _accumulators(optimizer) if value.is_dist()],
    }


def load_weights(path: str, stage: str, as_dicts: bool) -> list[tuple[Any, Any]]:
    """Load a model without its master weights on two ranks; gives the local values of each parameter and its master."""
    mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])

    def make(seed: int) -> tuple[Any, Any]:
        paddle.seed(seed)
        layer = paddle.nn.Linear(6, 4)
        layer.to(dtype="bfloat16")
        for name, parameter in list(layer._parameters.items()):
            layer._parameters[name] = dist.shard_tensor(parameter, mesh, [dist.Replicate()])
        made = paddle.optimizer.AdamW(0.1, parameters=layer.parameters(), multi_precision=True)
        function = getattr(dist, stage)("dp", mesh) if stage else None
        return layer, dist.shard_optimizer(made, function)

    save_state_dict({"model": make(1)[0]}, path, group_of(2))
    layer, optimizer = make(2)
    state = {"model": layer, "optimizer": optimizer}
    options = LoadOptions(allow_missing=["optimizer.*"])
    if as_dicts:
        make_accumulators(optimizer)
        state = {name: value.state_dict() for name, value in state.items()}
    load_state_dict(state, path, group_of(2), options=options)
    masters = optimizer._inner_opt._master_weights
    pairs = [(parameter, masters[parameter.name]) for parameter in layer.parameters()]
    assert all(_placements(master) == ["Shard(dim=0)" if stage else "Replicate()"] for _, master in pairs)
    return [tuple(one._local_value().cast("float32").numpy() for one in pair) for pair in pairs]


def _state(net: Any, optimizer: Any, schedule: Any, counter: Counter, how: str) -> dict[str, Any]:
    state = {"model": net, "optimizer": optimizer, "lr": schedule, "counter": counter}
    if how == "state_dicts":
        state = {name: value.state_dict() for name, value in state.items()}
    return {**state, "rng": PerRank(rng_state() if RNG_STATE else 0)}


def _step(net: Any, optimizer: Any, schedule: Any, mesh: Any, counter: Counter) -> float:
    numbers = np.random.default_rng(counter.count)
    counter.count += 1
    x, y = (paddle.to_tensor(numbers.standard_normal((8, 6)).astype(np.float32)) for _ in range(2))
    if mesh is not None:
        x, y = (dist.shard_tensor(each, mesh, [dist.Replicate()] * mesh.ndim) for each in (x, y))
    loss = ((net(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    schedule.step()
    return float(loss.numpy())


def _accumulators(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "_inner_opt", optimizer)
    return [value for by_name in inner._accumulators.values() for value in by_name.values()]


def _placements(tensor: Any) -> list[str]:
    return [str(placement) for placement in layout_of(tensor, "")[1]]


def _whole(tensor: Any) -> Any:
    if tensor.is_dist():
        mesh = tensor.process_mesh
        tensor = dist.reshard(tensor, mesh, [dist.Replicate()] * mesh.ndim)._local_value()
    return tensor.numpy().copy()
