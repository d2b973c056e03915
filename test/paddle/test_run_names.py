"""Loaded states given to Paddle's own setters, in runs that have other names for the same variables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.utils import unique_name

from paddle_dist_ckpt import (
    StateDictMismatchError,
    UnsupportedValueError,
    gather_state_dict,
    load,
    load_merged_state_dict,
    model_state_dict,
    optimizer_state_dict,
    save,
    save_state_dict,
)
from test.paddle.optimizers import named_state

KINDS = ("AdamW", "Momentum", "RMSProp", "Lamb", "Adadelta", "SGD")


class Net(paddle.nn.Layer):
    """Two layers, made after others and in either order: Paddle numbers its variables as it makes them."""

    def __init__(self, spare: int = 0, reverse: bool = False, dtype: str = "float32") -> None:
        super().__init__()
        _ = [paddle.nn.Linear(2, 2) for _ in range(spare)]
        made = {name: paddle.nn.Linear(4, 4) for name in sorted(("up", "down"), reverse=reverse)}
        self.up, self.norm, self.down = made["up"], paddle.nn.BatchNorm1D(4), made["down"]
        self.to(dtype=dtype)
        for i, parameter in enumerate(self.parameters(), 1):
            count = int(np.prod(parameter.shape))
            numbers = np.linspace(-i, i, count, dtype=np.float32).reshape(parameter.shape) / 5
            parameter.set_value(paddle.to_tensor(numbers).cast(parameter.dtype))

    def forward(self, inputs: Any) -> Any:
        return self.down(self.norm(self.up(inputs)))


def job(kind: str = "AdamW", dtype: str = "float32", **names: Any) -> tuple[Any, Any]:
    model = Net(dtype=dtype, **names)
    more = {"multi_precision": True} if dtype != "float32" else {}
    rate = paddle.optimizer.lr.StepDecay(0.1, 2)
    return model, getattr(paddle.optimizer, kind)(learning_rate=rate, parameters=model.parameters(), **more)


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    for number in range(first, last):
        inputs = np.random.default_rng(number).standard_normal((6, 4)).astype(np.float32)
        (model(paddle.to_tensor(inputs)) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        optimizer._learning_rate.step()


def values(model: Any) -> dict[str, Any]:
    return {key: value.cast("float32").numpy().copy() for key, value in model.state_dict().items()}


def assert_same(model: Any, other: Any) -> None:
    found, expected = values(model), values(other)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


def resume(path: Any, model: Any, optimizer: Any) -> None:
    state = load(path)
    model.set_state_dict(state["model"])
    optimizer.set_state_dict(optimizer_state_dict(state["optimizer"], model, optimizer))


@pytest.mark.parametrize("stepped", [0, 2], ids=["fresh", "stepped"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, kind: str, stepped: int) -> None:
    model, optimizer = job(kind)
    train(model, optimizer, 0, 4)
    save(tmp_path, model, optimizer)
    train(model, optimizer, 4, 8)
    other, its = job(kind, spare=3, reverse=True)
    train(other, its, 20, 20 + stepped)
    resume(tmp_path, other, its)
    assert its._learning_rate.last_epoch == 4
    train(other, its, 4, 8)
    assert_same(other, model)


@pytest.mark.parametrize("stepped", [0, 2], ids=["fresh", "stepped"])
def test_what_is_kept_for_parameters_that_are_frozen_now_is_given_too(tmp_path: Path, stepped: int) -> None:
    """As a load gives it; Paddle's own setter would raise once they are trained again."""
    model, optimizer = job()
    train(model, optimizer, 0, 4)
    save(tmp_path, model, optimizer)
    train(model, optimizer, 4, 8)
    other, its = job(spare=3, reverse=True)
    other.up.weight.stop_gradient = other.down.bias.stop_gradient = True
    train(other, its, 20, 20 + stepped)
    resume(tmp_path, other, its)
    other.up.weight.stop_gradient = other.down.bias.stop_gradient = False
    train(other, its, 4, 8)
    assert_same(other, model)


def test_master_weights_and_what_is_found_by_their_names(tmp_path: Path) -> None:
    """Without a step, of which a CPU has no arithmetic for bfloat16."""
    model, optimizer = job(dtype="bfloat16")
    structured = {parameter.name: key for key, parameter in model.named_parameters()}
    saved = named_state(optimizer, structured)
    tensors = [tensor for tensor in saved.values() if isinstance(tensor, paddle.Tensor)]
    for number, tensor in enumerate(tensors, 1):
        tensor.set_value(paddle.full(tensor.shape, number / 7, tensor.dtype))
    save(tmp_path, model, optimizer)
    other, its = job(dtype="bfloat16", spare=2, reverse=True)
    state = load(tmp_path)
    its.set_state_dict(optimizer_state_dict(state["optimizer"], other, its))
    loaded = named_state(its, {parameter.name: key for key, parameter in other.named_parameters()})
    assert loaded.keys() == saved.keys()
    assert len(tensors) == 5 * 6
    for key, tensor in saved.items():
        if isinstance(tensor, paddle.Tensor):
            assert np.array_equal(loaded[key].numpy(), tensor.numpy()), key
    for key, parameter in other.named_parameters():
        if not parameter.stop_gradient:  # as a step finds it
            assert its._get_accumulator_master("moment1", parameter) is loaded[f"{key}.moment1"]
    loaded["up.weight.master_weight"].set_value(paddle.zeros([4, 4]))
    assert (state["optimizer"]["up.weight.master_weight"] != 0).all()


def test_in_runs_whose_names_begin_anew_and_are_those_of_other_parameters(tmp_path: Path) -> None:
    """As in fresh processes: in each, Paddle counts its variables from the beginning."""
    with unique_name.guard():
        model, optimizer = job()
        train(model, optimizer, 0, 4)
        save(tmp_path, model, optimizer)
    with unique_name.guard():
        other, its = job(reverse=True)
        resume(tmp_path, other, its)
    names = [(one.up.weight.name, one.down.weight.name) for one in (model, other)]
    assert names == [("linear_1.w_0", "linear_0.w_0"), ("linear_0.w_0", "linear_1.w_0")]
    train(model, optimizer, 4, 8)
    train(other, its, 4, 8)
    assert_same(other, model)


def test_of_a_merged_load_and_of_several_models(tmp_path: Path) -> None:
    """Which share structured names, so that theirs go before."""

    def make(spare: int) -> tuple[list[Any], Any]:
        models = [Net(spare=spare), Net()]
        return models, paddle.optimizer.Adam(0.1, parameters=[one for each in models for one in each.parameters()])

    def both(models: list[Any], optimizer: Any, first: int, last: int) -> None:
        for number in range(first, last):
            inputs = paddle.full([2, 4], float(number))
            inputs[0] = 0.5
            (models[1](models[0](inputs)) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()

    models, optimizer = make(0)
    both(models, optimizer, 0, 3)
    save_state_dict({"model": models, "optimizer": optimizer}, tmp_path)
    both(models, optimizer, 3, 6)
    others, its = make(2)
    state = load_merged_state_dict(tmp_path)
    for one, loaded in zip(others, state["model"], strict=True):
        one.set_state_dict(model_state_dict(loaded, one))
    its.set_state_dict(optimizer_state_dict(state["optimizer"], others, its))
    both(others, its, 3, 6)
    for one, other in zip(models, others, strict=True):
        assert_same(other, one)


# -- of models


def test_a_models_state_by_keys_or_by_this_runs_variables(tmp_path: Path) -> None:
    model, _ = job()
    save(tmp_path, model)
    loaded = load(tmp_path)["model"]
    other, _ = job(spare=2)
    for parameter in other.parameters():
        parameter.set_value(paddle.zeros_like(parameter))
    by_key = model_state_dict({**loaded, "more": paddle.ones([1])}, paddle.DataParallel(other))
    assert by_key.keys() == other.state_dict().keys()
    assert all(by_key[key] is loaded[key] for key in by_key)
    by_name = model_state_dict(loaded, other, variable_names=True)
    assert by_name.keys() == {tensor.name for tensor in other.state_dict().values()}
    other.set_state_dict(by_name, use_structured_name=False)
    assert_same(other, model)


@pytest.mark.parametrize("variable_names", [False, True])
def test_a_model_whose_state_has_copies_of_another_dtype(variable_names: bool) -> None:
    """As that of ``amp.decorate(save_dtype=...)``."""

    def as_float32(entries: dict[str, Any]) -> None:
        for key, tensor in entries.items():
            name, entries[key] = tensor.name, tensor.cast("float32")
            entries[key].name = name

    model = paddle.nn.Linear(2, 2)
    model.to(dtype="bfloat16")
    model.register_state_dict_hook(as_float32)
    loaded = {"weight": paddle.full([2, 2], 3.0), "bias": paddle.full([2], 4.0)}
    state = model_state_dict(loaded, model, variable_names=variable_names)
    model.set_state_dict(state, use_structured_name=not variable_names)
    assert [float(one.cast("float32").max()) for one in (model.weight, model.bias)] == [3.0, 4.0]


def test_without_what_is_not_trained(tmp_path: Path) -> None:
    model, _ = job()
    model.up.weight.stop_gradient = True
    state = model_state_dict(dict(model.state_dict()), model, frozen=False)
    statistics = {"norm._mean", "norm._variance"}
    assert model.state_dict().keys() - state.keys() <= {"up.weight", *statistics}
    assert "up.weight" not in state
    assert "down.weight" in state


# -- what does not fit


def test_everything_that_does_not_fit_is_listed() -> None:
    model, optimizer = job()
    state = dict(model.state_dict())
    del state["up.bias"]
    state["up.weight"], state["down.bias"] = paddle.zeros([2]), state["down.bias"].cast("float64")
    state["down.weight"] = 5
    with pytest.raises(StateDictMismatchError) as caught:
        model_state_dict(state, model)
    assert {line.partition(":")[0] for line in caught.value.problems} == {
        "up.bias",
        "up.weight",
        "down.bias",
        "down.weight",
    }
    with pytest.raises(StateDictMismatchError) as caught:
        optimizer_state_dict({}, model, optimizer)
    assert {"up.weight.moment1: missing", "LR_Scheduler: missing"} < set(caught.value.problems)
    assert len(caught.value.problems) == 4 * 6 + 1


def test_paddles_names_of_another_run_are_not_taken(tmp_path: Path) -> None:
    """They may be those of other parameters here."""
    model, optimizer = job()
    train(model, optimizer, 0, 1)
    with pytest.raises(StateDictMismatchError, match=r"up\.weight\.moment1: missing"):
        optimizer_state_dict(optimizer.state_dict(), model, optimizer)


def test_what_paddles_setter_does_not_take() -> None:
    model, optimizer = job()
    ahead = paddle.incubate.optimizer.LookAhead(optimizer)
    for refused in (ahead, paddle.optimizer.LBFGS(parameters=model.parameters())):
        with pytest.raises(UnsupportedValueError, match="optimizer: .*(LookAhead|LBFGS)"):
            optimizer_state_dict({}, model, refused)
    weight = dist.shard_tensor(model.up.weight, dist.ProcessMesh([0], dim_names=["x"]), [dist.Replicate()])
    model.up.weight = weight
    with pytest.raises(StateDictMismatchError, match=r"up\.weight: is distributed in this run"):
        model_state_dict(dict(model.state_dict()), model)


def test_arguments() -> None:
    model, optimizer = job()
    for wrong in (lambda: model_state_dict([], model), lambda: optimizer_state_dict(None, model, optimizer)):
        with pytest.raises(TypeError, match="loaded must be a mapping"):
            wrong()
    for wrong in (lambda: model_state_dict({}, [model]), lambda: model_state_dict({}, 5)):
        with pytest.raises(TypeError, match=r"model must be a paddle\.nn\.Layer"):
            wrong()
    for wrong in (lambda: optimizer_state_dict({}, model, [optimizer]), lambda: optimizer_state_dict({}, model, model)):
        with pytest.raises(TypeError, match="optimizer must be"):
            wrong()


class CountingNet(Net):
    """A model with a value and an array in its state."""

    count, order = 0, np.arange(3)

    def state_dict(self, *args: Any, **more: Any) -> dict[str, Any]:
        return {**super().state_dict(*args, **more), "count": self.count, "order": self.order}

    def set_state_dict(self, state: dict[str, Any], *args: Any, **more: Any) -> Any:
        state = dict(state)
        self.count, self.order = state.pop("count"), state.pop("order")
        return super().set_state_dict(state, *args, **more)


class CountingAdam(paddle.optimizer.Adam):
    """An optimizer with a value in its state."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.count = state.pop("count")
        super().set_state_dict(state)


def test_values_of_users_classes_come_along(tmp_path: Path) -> None:
    model, other = CountingNet(), CountingNet(spare=1, reverse=True)
    optimizer, fresh = (CountingAdam(parameters=each.parameters()) for each in (model, other))
    model.count, model.order, optimizer.count = 5, np.array([2, 0, 1]), 7
    save(tmp_path, model, optimizer)
    state = load(tmp_path)
    other.set_state_dict(model_state_dict(state["model"], other))
    fresh.set_state_dict(optimizer_state_dict(state["optimizer"], other, fresh))
    assert (other.count, other.order.tolist(), fresh.count) == (5, [2, 0, 1], 7)
    assert model_state_dict(state["model"], other, variable_names=True)["count"] == 5
    del state["model"]["count"], state["optimizer"]["count"]
    with pytest.raises(StateDictMismatchError, match="count: missing"):
        model_state_dict(state["model"], other)
    with pytest.raises(StateDictMismatchError, match="count: missing"):
        optimizer_state_dict(state["optimizer"], other, fresh)


def test_a_large_state_is_sorted_out_in_linear_time() -> None:
    def seconds(count: int) -> float:
        model = paddle.nn.ParameterList([paddle.create_parameter([1], "float32") for _ in range(count)])
        optimizer = paddle.optimizer.Adam(parameters=model.parameters())
        loaded = gather_state_dict({"model": model, "optimizer": optimizer})["optimizer"]
        start = time.process_time()
        assert len(optimizer_state_dict(loaded, model, optimizer)) == 4 * count
        return time.process_time() - start

    assert seconds(4000) < 16 * max(seconds(500), seconds(500))  # each with each took 40 times as long
