"""Jobs for test_one_call.py, and functions that test_one_call_on_ranks.py sends to ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import PerRank, SaveOptions, load, save, save_state_dict
from test.paddle.layouts import Spread
from test.paddle.optimizers import named_state
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import dist_tensor, local_array
from test.ranks.groups import group_of

ROWS, COLUMNS = 256, 1024


class Net(paddle.nn.Layer):
    """A large weight, a normalisation with buffers, a small layer whose bias another one shares."""

    def __init__(self) -> None:
        super().__init__()
        self.large = paddle.nn.Linear(ROWS, COLUMNS)
        self.norm = paddle.nn.BatchNorm1D(COLUMNS)
        self.small, self.tied = paddle.nn.Linear(COLUMNS, 3), paddle.nn.Linear(COLUMNS, 3)
        self.tied.bias = self.small.bias

    def forward(self, x: Any) -> Any:
        x = self.norm(self.large(x))
        return self.small(x) + self.tied(x)


def job(seed: int) -> tuple[Any, Any, Any]:
    """A model, its optimizer and its scheduler; one seed gives the same on every rank."""
    paddle.seed(seed)
    net = Net()
    schedule = paddle.optimizer.lr.StepDecay(0.05, step_size=2)
    return net, paddle.optimizer.AdamW(schedule, parameters=net.parameters(), weight_decay=0.1), schedule


def train(model: Any, optimizer: Any, schedule: Any, steps: int, first: int = 0) -> list[float]:
    """The same steps on every rank, whose data depend on their numbers; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        numbers = np.random.default_rng(step)
        loss = (model(paddle.to_tensor(numbers.standard_normal((8, ROWS)).astype(np.float32))) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        schedule.step()
        losses.append(float(loss))
    return losses


def arrays(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """All that they have, by names that do not depend on the run."""
    structured = {tensor.name: name for name, tensor in model.named_parameters()}
    state = named_state(optimizer, structured) if optimizer is not None else {}
    tensors = {**model.state_dict(), **state}
    return {key: value.numpy().copy() for key, value in tensors.items() if isinstance(value, paddle.Tensor)}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Both have the same arrays, bit for bit."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(found[key], value), key


def numpy_of(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a state as arrays."""
    return {key: value.numpy() for key, value in state.items() if isinstance(value, paddle.Tensor)}


def train_and_save(path: str, ranks: int, wrap: bool) -> dict[str, Any]:
    """Train alike, let buffers differ, save; returns what there is and how it goes on.

    ``wrap`` needs all ranks of the job.
    """
    model, optimizer, schedule = job(7)
    outer = paddle.DataParallel(model) if wrap else model
    train(outer, optimizer, schedule, 2)
    model.norm._mean.set_value(paddle.full([COLUMNS], float(dist.get_rank())))
    others = {"epoch": 3, "ema": paddle.full([3], float(dist.get_rank())), "rank": PerRank(dist.get_rank())}
    report = save(path, outer, optimizer, others, group_of(ranks))
    found = arrays(model, optimizer)
    return {
        "arrays": found,
        "warnings": report.warnings,
        "id": report.unique_id,
        "written": (report.bytes_written, report.total_bytes),
        "losses": train(outer, optimizer, schedule, 2, first=2),
    }


def load_and_train(path: str, wrap: bool) -> dict[str, Any]:
    """Load into a job that was never stepped; returns what it then has and how it goes on."""
    model, optimizer, schedule = job(8)
    before = arrays(model)
    outer = paddle.DataParallel(model) if wrap else model
    state = load(path, outer, optimizer)
    found = arrays(model, optimizer)
    others = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
    return {
        "before": before,
        "arrays": found,
        "others": {**others, "ema": others["ema"].numpy()},
        "epoch": schedule.last_epoch,
        "losses": train(outer, optimizer, schedule, 2, first=2),
    }


def save_in_turn(path: str, ranks: int) -> None:
    """The same objects saved by either function, by turns, in folders of their own; one call alone divides them."""
    model, optimizer, _ = job(1)
    group = group_of(ranks)
    for number in range(2):
        options = SaveOptions(check_replicas="off")
        save_state_dict({"model": model, "optimizer": optimizer}, f"{path}/together{number}", group, options=options)
        save(f"{path}/one_call{number}", model, optimizer, group=group)


def save_in_lower_precision(path: str, ranks: int) -> dict[str, Any]:
    """Save parameters in bfloat16 whose master weights the optimizer has; returns these."""
    paddle.seed(3)
    model = paddle.nn.Linear(ROWS, COLUMNS)
    model.to(dtype="bfloat16")
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), multi_precision=True)
    save(path, model, optimizer, group=group_of(ranks))
    return {key: value.numpy() for key, value in optimizer.state_dict()["master_weights"].items()}


def save_frozen(path: str, ranks: int) -> int:
    """Save a layer that is not trained, and has what differs among the ranks; returns the bytes that this one wrote."""
    paddle.seed(3)
    layer = paddle.nn.Linear(ROWS, COLUMNS)
    layer.bias.set_value(paddle.full([COLUMNS], float(dist.get_rank())))
    layer.statistic = layer.create_parameter(
        [ROWS], default_initializer=paddle.nn.initializer.Constant(dist.get_rank())
    )
    layer.register_buffer("buffer", paddle.full([2, 2], dist.get_rank()))
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    return save(path, layer, group=group_of(ranks)).bytes_written


def save_models_that_differ(path: str, ranks: int) -> str | None:
    """Save layers of which a few, and of which most differ among the ranks; returns the error of the latter."""
    group, value = group_of(ranks), float(dist.get_rank())
    layers = [paddle.nn.Linear(ROWS, COLUMNS), paddle.nn.Linear(2 * ROWS, COLUMNS)]
    for layer, fill in zip(layers, (value, 5.0), strict=True):
        layer.weight.set_value(paddle.full(layer.weight.shape, fill))
    save(f"{path}/a few", paddle.nn.Sequential(*layers), group=group)
    return outcome_of(lambda: save(f"{path}/most", layers[0], group=group)).error


def save_in_group_of_last(path: str, members: list[int]) -> list[float] | None:
    """Save in a new group; returns the buffer of the rank that is the group's first one. All ranks of the pool call."""
    group = dist.new_group(members, backend="gloo")
    if dist.get_rank() not in members:
        return None
    layer = paddle.nn.BatchNorm1D(2)
    layer._mean.set_value(paddle.full([2], float(dist.get_rank())))
    save(path, layer, group=group)
    return layer._mean.tolist() if group.rank == 0 else None


def save_outside_of_group(path: str, ranks: int) -> Outcome:
    """A rank that is not in the group makes the call."""
    return outcome_of(lambda: save(path, paddle.nn.Linear(2, 2), group=group_of(ranks)))


def save_wrongly(path: str, ranks: int, wrong: list[int], how: str) -> Outcome:
    """Some ranks pass what cannot be saved."""
    layer = paddle.nn.Linear(2, 2)
    arguments: dict[str, Any] = {"path": path, "model": layer, "group": group_of(ranks)}
    if dist.get_rank() in wrong:
        arguments |= {
            "model": {"model": layer.state_dict()},
            "optimizer": {"optimizer": paddle.optimizer.AdamW},
            "others": {"others": [1]},
            "reserved": {"others": {"optimizer": 1}},
            "path": {"path": 5},
            "value": {"others": {"callback": print}},
        }[how]
    return outcome_of(lambda: save(**arguments))


def _sharded(ranks: int, number: float | None) -> Any:
    """A layer whose weight is cut over the ranks; its numbers in order, or all the same one."""
    layer = paddle.nn.Linear(13, 8)
    array = np.arange(104, dtype=np.float32).reshape(13, 8)
    if number is not None:
        array[...] = number
    layer._parameters["weight"] = dist_tensor(array, Spread(list(range(ranks)), (0,)))
    layer.bias.set_value(array[0])
    return layer


def save_sharded(path: str, ranks: int) -> tuple[int, int]:
    """Save a layer of DistTensors; returns the bytes that this rank wrote, and all."""
    report = save(path, _sharded(ranks, None), group=group_of(ranks))
    return report.bytes_written, report.total_bytes


def load_sharded(path: str, ranks: int) -> tuple[Any, Any]:
    """Load this rank's part of a layer of DistTensors; returns it, and the plain bias."""
    layer = _sharded(ranks, -1.0)
    load(path, layer)
    return local_array(layer.weight), layer.bias.numpy()


def load_whole(path: str) -> Any:
    """Load everything, without objects."""
    return load(path)["model"]["weight"].numpy()
