"""Layers and optimizers as they stand: their state without a step, and given back."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.amp.auto_cast import StateDictHook, amp_global_state
from paddle.base.layer_helper import LayerHelper

from paddle_dist_ckpt import (
    CheckpointError,
    LoadOptions,
    StateDictMismatchError,
    UnsupportedValueError,
    load_merged_state_dict,
    load_state_dict,
    save,
    save_state_dict,
    stored,
)
from paddle_dist_ckpt.paddle_adapter import objects, optimizers
from paddle_dist_ckpt.paddle_adapter.static_program import program_state
from paddle_dist_ckpt.paddle_adapter.tensors import PaddleAdapter
from paddle_dist_ckpt.tree.canonical import canonical_paths
from test.paddle.optimizers import flat, named_state, scaler_of
from test.paddle.versions import FROM_LOCAL, LATER_THAN_3_0, SHARDING_STAGES, lacks

ALONE = dist.ProcessMesh([0], dim_names=["x"])
ELSEWHERE = dist.ProcessMesh([1], dim_names=["x"])
SHARD, REPLICATE = dist.Shard(0), dist.Replicate()
CLASSES = {
    **{name: {} for name in ("Adam", "AdamW", "SGD", "Momentum", "Lamb", "Adagrad", "RMSProp", "Adadelta", "Adamax")},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {"batch_num": 2},
    "Rprop": {},
}
CLASSES = {name: more for name, more in CLASSES.items() if hasattr(paddle.optimizer, name)}
STAGES = {
    "no function": lambda: None,
    "stage 1": lambda: dist.ShardingStage1("x", ALONE),
    "stage 2": lambda: dist.ShardingStage2("x", ALONE),
    "stage 3": lambda: dist.ShardingStage3("x", ALONE),
}
STAGED = [stage for stage in STAGES if stage != "no function"]

computes_with_shards = lacks(LATER_THAN_3_0, "needs communicators to compute with shards, even if they are on one rank")
has_stages = lacks(SHARDING_STAGES, "has no sharding stages")


def layer_of(placement: Any = None, dtype: str = "float32", mesh: Any = ALONE) -> Any:
    """A layer with always the same values; all its parameters are distributed if a placement is given."""
    layer = paddle.nn.Linear(4, 3)
    for parameter in layer.parameters():
        count = int(np.prod(parameter.shape))
        parameter.set_value(np.linspace(-1, 1, count, dtype="float32").reshape(parameter.shape))
    if dtype != "float32":
        layer.to(dtype=dtype)
    for name, parameter in list(layer._parameters.items()):
        if placement is not None:
            layer._parameters[name] = dist.shard_tensor(parameter, mesh, [placement])
    return layer


def optimizer_for(layer: Any, kind: str = "AdamW", **more: Any) -> Any:
    if kind == "Adagrad" and layer.weight.is_dist() and not FROM_LOCAL:
        pytest.skip(f"Paddle {paddle.__version__} has no Adagrad for DistTensors")
    more = {"learning_rate": 0.1, "parameters": layer.parameters(), **CLASSES[kind], **more}
    return getattr(paddle.optimizer, kind)(**more)


def step(layer: Any, optimizer: Any, number: int = 0) -> None:
    inputs = paddle.to_tensor(np.arange(8, dtype="float32").reshape(2, 4) + number)
    if layer.weight.is_dist():
        inputs = dist.shard_tensor(inputs, ALONE, [REPLICATE])
    (layer(inputs) ** 2).mean().backward()
    optimizer.step()
    optimizer.clear_grad()


def structured(layer: Any) -> dict[str, str]:
    return {tensor.name: key for key, tensor in layer.named_parameters()}


def array(tensor: Any) -> Any:
    return (tensor._local_value() if tensor.is_dist() else tensor).cast("float64").numpy()


def values(tensors: dict[str, Any]) -> dict[str, Any]:
    return {key: array(tensor) for key, tensor in tensors.items() if isinstance(tensor, paddle.Tensor)}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key in expected:
        assert np.array_equal(found[key], expected[key]), key


def layout(optimizer: Any) -> dict[str, Any]:
    """Shape and distribution of all tensors of an optimizer, by Paddle's own names."""
    state = optimizers.inner_optimizer(optimizer).state_dict()
    return {
        key: (tensor.shape, tensor.dtype, tensor.is_dist() and (tensor.placements, tensor.process_mesh))
        for key, tensor in flat(state)
        if isinstance(tensor, paddle.Tensor)
    }


# -- which is one


def test_what_is_an_optimizer() -> None:
    layer = layer_of(REPLICATE)
    optimizer = optimizer_for(layer)
    assert optimizers.is_optimizer(optimizer)
    assert optimizers.is_optimizer(dist.shard_optimizer(optimizer))
    assert optimizers.is_optimizer(paddle.optimizer.LBFGS(parameters=layer.parameters()))
    for other in (layer, paddle.optimizer.lr.StepDecay(0.1, 2), paddle.optimizer.Adam, {}, None):
        assert not optimizers.is_optimizer(other)


# -- accumulators


@pytest.mark.parametrize("placement", [None, REPLICATE, pytest.param(SHARD, marks=computes_with_shards)])
@pytest.mark.parametrize("kind", CLASSES)
def test_they_are_those_of_the_first_step(kind: str, placement: Any) -> None:
    """The same names, values before, and results after; the parameters stay as they are."""
    layer, other = layer_of(placement), layer_of(placement)
    optimizer, stepped = optimizer_for(layer, kind), optimizer_for(other, kind)
    before = values(layer.state_dict())
    optimizers.make_accumulators(optimizer)
    assert_equal(values(layer.state_dict()), before)
    made = values(named_state(optimizer, structured(layer)))
    step(other, stepped)
    assert made.keys() == values(named_state(stepped, structured(other))).keys()
    assert bool(made) == (kind != "SGD")
    step(layer, optimizer)
    for number in (1, 2):
        step(layer, optimizer, number)
        step(other, stepped, number)
    assert_equal(values(layer.state_dict()), values(other.state_dict()))
    states = (named_state(each, structured(of)) for each, of in ((optimizer, layer), (stepped, other)))
    assert_equal(*map(values, states))


@pytest.mark.parametrize("kind", CLASSES)
def test_they_are_made_once(kind: str) -> None:
    layer = layer_of()
    optimizer = optimizer_for(layer, kind)
    optimizers.make_accumulators(optimizer)
    step(layer, optimizer)
    first = optimizers.optimizer_state(optimizer)
    before = values(first)
    optimizers.make_accumulators(optimizer)
    second = optimizers.optimizer_state(optimizer)
    assert first.keys() == second.keys()
    assert all(first[key] is second[key] for key in first)
    assert_equal(values(second), before)


@computes_with_shards
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_they_are_distributed_as_the_first_step_does_it(kind: str) -> None:
    """For Adam. Others' are distributed like the parameter, too; Paddle leaves these whole on every rank."""
    layer, other = layer_of(SHARD), layer_of(SHARD)
    optimizer, stepped = optimizer_for(layer, kind), optimizer_for(other, kind)
    optimizers.make_accumulators(optimizer)
    step(other, stepped)
    made, expected = layout(optimizer), layout(stepped)
    assert [*made.values()] == [*expected.values()]
    weight = layer.weight.name
    assert made[f"{weight}_moment1_0"][2] == ([SHARD], ALONE)
    assert made[f"{weight}_beta1_pow_acc_0"][2] == ([REPLICATE], ALONE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=[has_stages] * (stage in STAGED)) for stage in STAGES])
def test_of_shard_optimizer(stage: str, kind: str, dtype: str) -> None:
    if stage == "stage 3" and dtype == "bfloat16" and not LATER_THAN_3_0:
        pytest.skip(f"Paddle {paddle.__version__} cannot cut bfloat16 on CPU")
    layer = layer_of(REPLICATE, dtype)
    optimizer = dist.shard_optimizer(optimizer_for(layer, kind, multi_precision=True), STAGES[stage]())
    before = values(layer.state_dict())
    optimizers.make_accumulators(optimizer)
    assert_equal(values(layer.state_dict()), before)
    expected = [SHARD] if stage != "no function" else [REPLICATE]
    state = named_state(optimizer, structured(layer))
    kinds = {"moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"} if kind == "AdamW" else set()
    masters = {"master_weight"} if dtype == "bfloat16" else set()
    assert state.keys() == {f"{name}.{each}" for name in ("weight", "bias") for each in kinds | masters}
    for key, tensor in state.items():
        assert tensor.placements == ([REPLICATE] if "beta" in key else expected), key
        assert tensor.dtype == paddle.float32
    again = named_state(optimizer, structured(layer))
    assert all(again[key] is state[key] for key in state)


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=[has_stages, computes_with_shards] * (stage in STAGED)) for stage in STAGES]
)
def test_of_shard_optimizer_a_step_goes_on_from_them(stage: str) -> None:
    layer, other = layer_of(REPLICATE), layer_of(REPLICATE)
    optimizer, stepped = (dist.shard_optimizer(optimizer_for(each), STAGES[stage]()) for each in (layer, other))
    optimizers.make_accumulators(optimizer)
    for number in range(3):
        step(layer, optimizer, number)
        step(other, stepped, number)
    assert_equal(values(layer.state_dict()), values(other.state_dict()))
    assert [*layout(optimizer).values()] == [*layout(stepped).values()]


def test_names_of_shard_optimizer_are_those_of_every_run(tmp_path: Path) -> None:
    """In Paddle 2.6 it has only numbers in their place. These are refused, or replaced when the optimizer is saved."""
    layer = layer_of(REPLICATE)
    optimizer = dist.shard_optimizer(optimizer_for(layer))
    step(layer, optimizer)
    if not FROM_LOCAL:
        with pytest.raises(UnsupportedValueError, match="save and load the optimizer itself"):
            save_state_dict({"optimizer": optimizer.state_dict()}, tmp_path)
    kinds = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
    expected = {f"{name}.{kind}" for name in ("weight", "bias") for kind in kinds}
    assert named_state(optimizer, structured(layer)).keys() == expected
    save_state_dict({"optimizer": optimizer.state_dict()}, tmp_path)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_the_state_of_shard_optimizer_needs_no_step(kind: str) -> None:
    """Paddle's own state_dict() steps, and under weight decay this changes the parameters."""
    layer, other = layer_of(REPLICATE), layer_of(REPLICATE)
    optimizer, paddles = (dist.shard_optimizer(optimizer_for(each, kind, weight_decay=0.5)) for each in (layer, other))
    before = values(layer.state_dict())
    paddles.state_dict()
    assert not np.array_equal(array(other.weight), before["weight"]), "or this test shows nothing"
    for _ in range(2):
        named_state(optimizer, structured(layer))
        assert_equal(values(layer.state_dict()), before)


def test_parameter_groups() -> None:
    layer, other = layer_of(), layer_of()

    def grouped(of: Any) -> Any:
        groups = [{"params": [of.weight], "beta1": 0.5}, {"params": [of.bias], "learning_rate": 0.1}]
        return paddle.optimizer.Adam(0.1, parameters=groups)

    optimizer, stepped = grouped(layer), grouped(other)
    state = named_state(optimizer, structured(layer))
    assert float(state["weight.beta1_pow_acc"]) == pytest.approx(0.5)
    assert float(state["bias.beta1_pow_acc"]) == pytest.approx(0.9)
    for number in range(2):
        step(layer, optimizer, number)
        step(other, stepped, number)
    assert_equal(values(layer.state_dict()), values(other.state_dict()))


def test_parameter_groups_of_shard_optimizer() -> None:
    layer = layer_of(REPLICATE)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias]}]
    optimizer = dist.shard_optimizer(paddle.optimizer.AdamW(0.1, parameters=groups))
    state = named_state(optimizer, structured(layer))
    assert len(state) == 8
    assert all(tensor.is_dist() for tensor in state.values())


def test_only_parameters_that_are_trained_and_are_here() -> None:
    layer = layer_of()
    layer.bias.stop_gradient = True
    assert {key.partition(".")[0] for key in named_state(optimizer_for(layer), structured(layer))} == {"weight"}
    far = layer_of(REPLICATE, mesh=ELSEWHERE)
    assert named_state(optimizer_for(far), structured(far)) == {}


def test_parameters_that_are_trained_later_get_theirs_later() -> None:
    layer = layer_of()
    layer.bias.stop_gradient = True
    optimizer = optimizer_for(layer)
    step(layer, optimizer)
    before = values(named_state(optimizer, structured(layer)))
    layer.bias.stop_gradient = False
    after = values(named_state(optimizer, structured(layer)))
    assert len(after) == 8
    assert_equal({key: after[key] for key in before}, before)
    step(layer, optimizer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("placement", [None, REPLICATE])
def test_making_them_goes_on_where_it_failed(placement: Any, dtype: str) -> None:
    """As where a device has no more memory, or at Ctrl-C: those that are there already are not all of a parameter's."""
    more = {} if dtype == "float32" else {"multi_precision": True}
    layer = layer_of(placement, dtype)
    state = named_state(optimizer_for(layer, **more), structured(layer))
    expected, spread = values(state), {key: _is_spread(one) for key, one in state.items()}
    for made in range(8):
        optimizer, left = optimizer_for(layer, **more), iter(range(made))
        add = optimizer._add_accumulator

        def add_some(*args: Any, left: Any = left, add: Any = add, **named: Any) -> Any:
            if next(left, None) is None:
                raise MemoryError
            return add(*args, **named)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(optimizer, "_add_accumulator", add_some)
            optimizers.optimizer_state(optimizer)
        state = named_state(optimizer, structured(layer))
        assert_equal(values(state), expected)
        assert {key: _is_spread(one) for key, one in state.items()} == spread


def _is_spread(value: Any) -> bool:
    return isinstance(value, paddle.Tensor) and value.is_dist()


@pytest.mark.parametrize("twice", [False, True])
def test_a_state_that_was_set_before_the_first_step_is_kept(twice: bool) -> None:
    """Paddle holds it back until the accumulators are made. It takes a parameter that it is given twice for one."""
    layer = layer_of()
    trained = optimizer_for(layer)
    step(layer, trained)
    held = {key: tensor.clone() for key, tensor in trained.state_dict().items()}
    fresh = optimizer_for(layer, parameters=layer.parameters() * (1 + twice))
    fresh.set_state_dict({key[:-1] + "1": tensor for key, tensor in held.items()})
    state = optimizers.optimizer_state(fresh)
    assert_equal({key[:-1] + "0": value for key, value in values(state).items()}, values(held))


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_that_was_set_is_kept_where_making_them_failed(dtype: str, taken: bool) -> None:
    """Paddle has numbered the next one before it fails, or taken what was set for it, too."""
    layer, more = layer_of(None, dtype), {} if dtype == "float32" else {"multi_precision": True}

    def fresh() -> Any:
        return optimizer_for(layer, **more)

    with paddle.utils.unique_name.guard():
        held = {key: one.clone() for key, one in optimizers.optimizer_state(fresh()).items() if key != "master_weights"}
    for number, tensor in enumerate(held.values()):
        tensor.set_value(paddle.full_like(tensor, number + 2))
    for made in range(8):
        with paddle.utils.unique_name.guard():
            optimizer, left = fresh(), iter(range(made))
            optimizer.set_state_dict({key: tensor.clone() for key, tensor in held.items()})
            name = "set_value" if taken else "create_global_variable"
            whose: Any = paddle.Tensor if taken else LayerHelper
            make = getattr(whose, name)

            def make_some(*args: Any, left: Any = left, make: Any = make, **named: Any) -> Any:
                if next(left, None) is None:
                    raise MemoryError
                return make(*args, **named)

            with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(whose, name, make_some)
                optimizers.optimizer_state(optimizer)
            state = optimizers.optimizer_state(optimizer)
            assert_equal(values({key: state[key] for key in held}), values(held))


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_state_that_was_set_may_lack_a_parameter_that_was_never_used(grouped: bool, stepped: bool) -> None:
    """Paddle goes on with it, as the parameter still has no gradient."""

    def job(steps: int) -> tuple[Any, Any]:
        model = paddle.nn.Sequential(*(layer_of() for _ in range(3)))
        rates = [{"params": layer.parameters(), "learning_rate": 0.5} for layer in model]
        optimizer = optimizer_for(model, **({"parameters": rates} if grouped else {}))
        for _ in range(steps):
            step(model[0], optimizer)
            step(model[2], optimizer)
        return model, optimizer

    with paddle.utils.unique_name.guard():
        trained = job(1)[1].state_dict()
    with paddle.utils.unique_name.guard():
        model, optimizer = job(2 if stepped else 0)
        optimizer.set_state_dict({key: tensor.clone() for key, tensor in trained.items()})
        state = values(optimizers.optimizer_state(optimizer))
        names = [parameter.name for parameter in model[1].parameters()]
        unused = {key for key in state if key.startswith(tuple(names))}
        assert len(unused) == 8
        assert not any(state[key].any() for key in unused if "moment" in key)
        assert_equal({key: state[key] for key in state.keys() - unused}, values(trained))
        step(model[2], optimizer)


def test_a_state_that_was_set_may_have_what_nobody_takes_yet() -> None:
    """Of a frozen parameter, and of what is none; a parameter that was never used has a name that others begin with."""

    class Named(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            for name in ("scale", "scale_2", "scale_3"):
                setattr(self, name, self.create_parameter([4], attr=paddle.ParamAttr(name=name)))

    def job() -> tuple[Any, Any]:
        model = Named()
        return model, optimizer_for(model)

    def used(model: Any, optimizer: Any) -> dict[str, Any]:
        (model.scale_2 * model.scale_3).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        return {key: tensor.clone() for key, tensor in optimizer.state_dict().items()}

    with paddle.utils.unique_name.guard():
        trained = used(*job())
    with paddle.utils.unique_name.guard():
        model, optimizer = job()
        model.scale_3.stop_gradient = True
        optimizer.set_state_dict({**trained, "other_0.w_0_moment1_0": paddle.ones([4])})
        state = values(optimizers.optimizer_state(optimizer))
        assert {key.partition("_moment1")[0] for key in state if "_moment1" in key} == {"scale", "scale_2"}
        model.scale_3.stop_gradient = False
        optimizers.make_accumulators(optimizer)
        state = values(optimizer.state_dict())
        assert_equal({key: state[key] for key in trained}, values(trained))


@has_stages
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_master_weights_that_were_set_before_the_first_step_are_kept(kind: str) -> None:
    layer = layer_of(REPLICATE, "bfloat16")
    optimizer = dist.shard_optimizer(optimizer_for(layer, kind, multi_precision=True), STAGES["stage 1"]())
    masters = {each.name: each.detach().cast("float32") for each in layer.parameters()}
    optimizer.set_state_dict({"master_weights": dict(masters)})
    state = optimizers.optimizer_state(optimizer)
    assert state["master_weights"].keys() == masters.keys()
    assert all(state["master_weights"][name] is masters[name] for name in masters)


def test_multi_tensor_optimizers() -> None:
    layer, other = layer_of(), layer_of()
    optimizer, stepped = (optimizer_for(each, "Adam", use_multi_tensor=True) for each in (layer, other))
    optimizers.make_accumulators(optimizer)
    for number in range(2):
        step(layer, optimizer, number)
        step(other, stepped, number)
    assert_equal(values(layer.state_dict()), values(other.state_dict()))


def test_optimizers_without_such_accumulators() -> None:
    layer = layer_of()
    before = values(layer.state_dict())
    optimizer = paddle.optimizer.LBFGS(parameters=layer.parameters())
    assert named_state(optimizer, structured(layer)) == {"state": {}}
    optimizers.make_accumulators(object())
    optimizers.make_accumulators(paddle.incubate.optimizer.LookAhead(optimizer_for(layer, "SGD")))
    assert_equal(values(layer.state_dict()), before)


# -- state


def test_the_state_has_the_tensors_themselves() -> None:
    layer = layer_of(dtype="bfloat16")
    scheduler = paddle.optimizer.lr.StepDecay(0.1, 2)
    optimizer = optimizer_for(layer, learning_rate=scheduler, multi_precision=True)
    state = named_state(optimizer, structured(layer))
    paddles = optimizer.state_dict()
    masters = paddles["master_weights"]
    assert state["weight.master_weight"] is masters[layer.weight.name]
    assert state["bias.moment2"] is paddles[f"{masters[layer.bias.name].name}_moment2_0"]
    assert state["LR_Scheduler"] == scheduler.state_dict()
    assert len(state) == 11
    own = optimizers.optimizer_state(optimizer)
    assert own.keys() == paddles.keys()
    assert all(own[key] is paddles[key] for key in own if key not in ("master_weights", "LR_Scheduler"))
    assert own["master_weights"] == masters
    own["master_weights"].clear()
    assert masters, "the dict is another one"


def test_two_optimizers_of_one_layer() -> None:
    layer = layer_of()
    first, second = optimizer_for(layer), optimizer_for(layer)
    states = [named_state(each, structured(layer)) for each in (first, second)]
    assert states[0].keys() == states[1].keys()
    assert {"weight.moment1", "bias.beta2_pow_acc"} < states[0].keys()
    assert {tensor.name[-2:] for tensor in states[1].values()} == {"_1"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("placement", [None, REPLICATE])
def test_canonical_paths_know_what_paddle_makes(placement: Any, dtype: str) -> None:
    layer = layer_of(placement, dtype)
    optimizer = optimizer_for(layer, multi_precision=True)
    entries = {f"/model/{key}": tensor for key, tensor in layer.state_dict().items()}
    entries |= {f"/optimizer/{key}": tensor for key, tensor in flat(optimizers.optimizer_state(optimizer))}
    found = canonical_paths(list(entries), [tensor.name for tensor in entries.values()])
    kinds = ["moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc", *["master_weight"] * (dtype == "bfloat16")]
    assert set(found.values()) == {f"/optimizer/{key}.{kind}" for key in ("weight", "bias") for kind in kinds}
    for old, new in found.items():
        key, _, kind = new.removeprefix("/optimizer/").partition(".")
        held = optimizer._master_weights if kind == "master_weight" else optimizer._accumulators[kind]
        assert any(entries[old] is tensor for name, tensor in held.items() if name.startswith(getattr(layer, key).name))


def test_a_copied_layer_is_not_taken_for_the_first() -> None:
    layer = layer_of()
    copied = copy.deepcopy(layer)
    optimizer = optimizer_for(copied)
    assert named_state(optimizer, structured(layer)).keys() == optimizers.optimizer_state(optimizer).keys()
    assert "weight.moment1" in named_state(optimizer, structured(copied))


# -- given back


@pytest.mark.parametrize("placement", [None, REPLICATE, pytest.param(SHARD, marks=computes_with_shards)])
@pytest.mark.parametrize("kind", CLASSES)
def test_moments_come_back_exactly(kind: str, placement: Any) -> None:
    """Into a layer and an optimizer of other variable names that never took a step."""

    def make() -> tuple[Any, Any, Any]:
        layer = layer_of(placement)
        scheduler = paddle.optimizer.lr.ExponentialDecay(0.1, 0.5)
        optimizer = optimizer_for(layer, kind, learning_rate=0.1 if kind == "Rprop" else scheduler)
        return layer, optimizer, scheduler

    layer, optimizer, scheduler = make()
    for number in range(3):
        step(layer, optimizer, number)
        scheduler.step()
    fresh, empty, behind = make()
    assert fresh.weight.name != layer.weight.name
    source = {**layer.state_dict(), **named_state(optimizer, structured(layer))}
    state = named_state(empty, structured(fresh))
    target = {**fresh.state_dict(), **state}
    assert source.keys() == target.keys()
    for key, tensor in target.items():
        if isinstance(tensor, paddle.Tensor):
            inner, stored = (each._local_value() if each.is_dist() else each for each in (tensor, source[key]))
            with paddle.no_grad():
                inner.set_value(stored.numpy())
    if kind != "Rprop":  # which takes no scheduler
        state["LR_Scheduler"] = dict(source["LR_Scheduler"])
    objects.restore(fresh, fresh.state_dict())
    objects.restore(empty, state)
    assert empty.get_lr() == optimizer.get_lr()
    assert behind.last_epoch == (0 if kind == "Rprop" else 3)
    for number in (4, 5):
        step(layer, optimizer, number)
        step(fresh, empty, number)
    assert_equal(values(fresh.state_dict()), values(layer.state_dict()))
    states = (named_state(each, structured(of)) for each, of in ((empty, fresh), (optimizer, layer)))
    assert_equal(*map(values, states))


@pytest.mark.parametrize("mult", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 4, 11])
@pytest.mark.parametrize("alone", [True, False])
def test_warm_restarts_go_on_where_they_were(tmp_path: Path, alone: bool, steps: int, mult: int) -> None:
    def make() -> tuple[Any, Any]:
        scheduler = paddle.optimizer.lr.CosineAnnealingWarmRestarts(0.5, T_0=2, T_mult=mult)
        layer = layer_of()
        optimizer = optimizer_for(layer, learning_rate=scheduler)
        return scheduler, {"lr": scheduler} if alone else {"model": layer, "optimizer": optimizer}

    scheduler, state = make()
    for _ in range(steps):
        scheduler.step()
    save_state_dict(state, tmp_path)
    other, target = make()
    load_state_dict(target, tmp_path)
    for _ in range(10):
        assert other.get_lr() == scheduler.get_lr()
        scheduler.step()
        other.step()


class InTurn(paddle.optimizer.lr.LRScheduler):  # type: ignore[misc]
    """A warm-up of so many steps, and then warm restarts, each of which counts its own steps."""

    def __init__(self, steps: int) -> None:
        rates = paddle.optimizer.lr
        self.steps, self.both = steps, [rates.LinearLR(0.5, 4), rates.CosineAnnealingWarmRestarts(0.5, T_0=2, T_mult=2)]
        super().__init__(0.5)

    def get_lr(self) -> float:
        scheduler = self.both[self.last_epoch >= self.steps]
        scheduler.step()
        return float(scheduler())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "both": [one.state_dict() for one in self.both]}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        super().set_state_dict(state)
        for one, its_state in zip(self.both, state["both"], strict=True):
            one.set_state_dict(its_state)


@pytest.mark.parametrize("steps", [2, 5, 8])
@pytest.mark.parametrize("alone", [True, False])
def test_warm_restarts_within_a_users_scheduler_go_on_where_they_were(tmp_path: Path, alone: bool, steps: int) -> None:
    """Paddle's own state of them leaves out where that is, and their setter too."""
    jobs = []
    for _ in range(2):
        scheduler, layer = InTurn(3), layer_of()
        optimizer = optimizer_for(layer, learning_rate=scheduler)
        jobs.append((scheduler, {"lr": scheduler} if alone else {"model": layer, "optimizer": optimizer}))
    (scheduler, state), (other, target) = jobs
    for _ in range(steps):
        scheduler.step()
    save_state_dict(state, tmp_path)
    load_state_dict(target, tmp_path)
    for _ in range(10):
        assert other.get_lr() == scheduler.get_lr()
        scheduler.step()
        other.step()


class ByParts(paddle.optimizer.lr.LRScheduler):  # type: ignore[misc]
    """Warm restarts that are stepped by parts of epochs, and stored with where they are; and what else it has."""

    def __init__(self, others: list[Any]) -> None:
        self.inner = paddle.optimizer.lr.CosineAnnealingWarmRestarts(0.5, T_0=3, T_mult=2)
        self.others = others
        super().__init__(0.5)

    def get_lr(self) -> float:
        self.inner.step(self.last_epoch * 0.7)
        return float(self.inner())

    def state_dict(self) -> dict[str, Any]:
        inner = {**self.inner.state_dict(), "T_cur": self.inner.T_cur, "T_i": self.inner.T_i}
        return {**super().state_dict(), "inner": inner}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        super().set_state_dict(state)
        inner = dict(state["inner"])
        self.inner.T_cur, self.inner.T_i = inner.pop("T_cur"), inner.pop("T_i")
        self.inner.set_state_dict(inner)


def test_warm_restarts_that_a_user_stores_whole_stay_as_they_were_set(tmp_path: Path) -> None:
    """Whatever else the scheduler has: here it is in itself, deep in lists."""
    others: list[Any] = []
    scheduler, other = ByParts([]), ByParts(others)
    for _ in range(5000):
        others.append([])
        others = others[0]
    others.append(other)
    for _ in range(8):
        scheduler.step()
    save_state_dict({"lr": scheduler}, tmp_path)
    load_state_dict({"lr": other}, tmp_path)
    assert scheduler.inner.T_cur % 1
    assert (other.inner.T_cur, other.inner.T_i) == (scheduler.inner.T_cur, scheduler.inner.T_i)


def test_an_optimizer_without_its_model_says_what_to_do(tmp_path: Path) -> None:
    save_state_dict({"optimizer": optimizer_for(layer_of())}, tmp_path)
    with pytest.raises(StateDictMismatchError, match="save and load the model in the same call"):
        load_state_dict({"optimizer": optimizer_for(layer_of())}, tmp_path)


@pytest.mark.parametrize("make", [lambda: paddle.nn.MSELoss(), lambda: paddle.optimizer.SGD(0.1, parameters=[])])
def test_objects_without_any_state(tmp_path: Path, make: Any) -> None:
    weight = paddle.ones([2])
    save_state_dict({"a": {"none": make()}, "w": weight}, tmp_path)
    target = {"a": {"none": make()}, "w": paddle.zeros([2])}
    load_state_dict(target, tmp_path)
    assert target["w"].tolist() == [1, 1]


def test_an_optimizer_without_any_state_asks_for_nothing(tmp_path: Path) -> None:
    layer, scheduler = layer_of(), paddle.optimizer.lr.StepDecay(0.1, 2)
    save_state_dict({"o": paddle.optimizer.SGD(scheduler, parameters=layer.parameters())}, tmp_path)
    plain = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    assert plain.state_dict() == {}
    with mock.patch.object(plain, "set_state_dict") as given:
        report = load_state_dict({"o": plain}, tmp_path)
    assert report.unused_keys == ("o.LR_Scheduler.last_epoch", "o.LR_Scheduler.last_lr")
    assert [call.args for call in given.call_args_list] in ([], [({},)])


def test_shard_optimizer_gets_its_scheduler_back() -> None:
    layer, scheduler = layer_of(REPLICATE), paddle.optimizer.lr.StepDecay(0.1, 2)
    optimizer = dist.shard_optimizer(optimizer_for(layer, learning_rate=scheduler))
    state = optimizers.optimizer_state(optimizer)
    state["LR_Scheduler"]["last_epoch"] = 9
    assert scheduler.last_epoch == 0
    objects.restore(optimizer, state)
    assert scheduler.last_epoch == 9


def test_optimizers_without_a_scheduler_or_without_its_state() -> None:
    layer = layer_of()
    objects.restore(optimizer_for(layer), {"LR_Scheduler": {"last_epoch": 9}})
    scheduler = paddle.optimizer.lr.LambdaDecay(0.1, lambda epoch: 0.5**epoch)
    optimizer = optimizer_for(layer, learning_rate=scheduler)
    objects.restore(optimizer, {"LR_Scheduler": {}})
    objects.restore(optimizer, {})
    assert scheduler.last_epoch == 0


def test_an_optimizer_with_its_own_setter_gets_everything() -> None:
    class Counting(paddle.optimizer.AdamW):
        count, given = 0, None

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "count": self.count}

        def set_state_dict(self, state: dict[str, Any]) -> None:
            self.given = dict(state)
            self.count = state.pop("count")
            super().set_state_dict(state)

    layer = layer_of(dtype="bfloat16")
    scheduler = paddle.optimizer.lr.StepDecay(0.1, 2)
    optimizer = Counting(scheduler, parameters=layer.parameters(), multi_precision=True)
    state = optimizers.optimizer_state(optimizer)
    own = optimizers.optimizer_state(optimizer)
    for _, tensor in flat(own):
        if isinstance(tensor, paddle.Tensor):
            tensor.fill_(0.25)
    state["count"], state["LR_Scheduler"] = 7, {**state["LR_Scheduler"], "last_epoch": 4}
    objects.restore(optimizer, state)
    assert optimizer.given is not None
    assert optimizer.given.keys() == own.keys()
    assert (optimizer.count, scheduler.last_epoch) == (7, 4)
    after = named_state(optimizer, structured(layer))
    assert len(after) == 12
    assert all((array(after[key]) == 0.25).all() for key in after if key not in ("count", "LR_Scheduler"))


def watched(layer: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    setter = paddle.nn.Layer.set_state_dict

    def set_state_dict(self: Any, state: Any, *more: Any, **named: Any) -> Any:
        calls.append(state)
        return setter(self, state, *more, **named)

    monkeypatch.setattr(paddle.nn.Layer, "set_state_dict", set_state_dict)
    return calls


@pytest.mark.parametrize("placement", [None, SHARD])
def test_a_layers_own_tensors_need_nothing_more(placement: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = paddle.nn.Sequential(layer_of(placement), paddle.nn.BatchNorm1D(3))
    calls = watched(layer, monkeypatch)
    objects.restore(layer, layer.state_dict())
    assert calls == []
    objects.restore(layer, {**layer.state_dict(), "0.bias": paddle.ones([3])} if placement is None else {})
    assert len(calls) == (placement is None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_hook_that_made_copies_of_another_dtype(dtype: str) -> None:
    """As ``amp.decorate(save_dtype=...)`` does it; Paddle's own set_state_dict would raise."""
    layer = paddle.nn.Sequential(layer_of(dtype=dtype), layer_of())

    def as_float32(state: dict[str, Any]) -> None:
        for key, tensor in state.items():
            name, state[key] = tensor.name, tensor.cast("float32")
            state[key].name = name

    layer.register_state_dict_hook(as_float32)
    state = layer.state_dict()
    assert state["0.weight"] is not layer[0].weight
    for number, tensor in enumerate(state.values()):
        tensor.set_value(paddle.full(tensor.shape, number + 0.5))
    objects.restore(layer, state)
    own = (layer[0].weight, layer[0].bias, layer[1].weight, layer[1].bias)
    assert [float(tensor.flatten()[0].cast("float32")) for tensor in own] == [0.5, 1.5, 2.5, 3.5]
    assert [str(tensor.dtype) for tensor in own] == [f"paddle.{dtype}"] * 2 + ["paddle.float32"] * 2


def test_a_layer_with_its_own_setter() -> None:
    class Own(paddle.nn.Linear):
        given: Any = None

        def set_state_dict(self, state: dict[str, Any], use_structured_name: bool = True) -> Any:
            self.given = state

    layer = Own(2, 2)
    state = layer.state_dict()
    objects.restore(layer, state)
    assert layer.given is state


@pytest.mark.filterwarnings("ignore:Skip loading")
@pytest.mark.parametrize("takes", [True, False])
def test_a_setter_that_takes_the_state_apart_is_judged_by_what_it_was_given(takes: bool) -> None:
    class Own(paddle.nn.Linear):
        def state_dict(self, *args: Any, **more: Any) -> dict[str, Any]:
            return {"mine": self.weight.T.contiguous() if takes else self.weight.clone(), "bias": self.bias}

        def set_state_dict(self, state: dict[str, Any], *args: Any, **more: Any) -> Any:
            said = super().set_state_dict(dict(state), *args, **more)
            if takes:
                self.weight.set_value(state["mine"].T)
            state.clear()
            return said

    layer = Own(2, 3)
    state = layer.state_dict()
    state["mine"].set_value(paddle.full(state["mine"].shape, 7.0))
    if takes:
        assert objects.restore(layer, state) == []
        assert layer.weight.tolist() == [[7.0] * 3] * 2
    else:
        with pytest.raises(UnsupportedValueError, match="passes over: mine"):
            objects.restore(layer, state)


def test_other_objects() -> None:
    class Old:
        given: Any = None

        def load_state_dict(self, state: Any) -> None:
            self.given = "load", state

    class New(Old):
        def set_state_dict(self, state: Any) -> None:
            self.given = "set", state

    for make, how in ((Old, "load"), (New, "set")):
        value = make()
        objects.restore(value, {"a": 1})
        assert value.given == (how, {"a": 1})
    scheduler = paddle.optimizer.lr.StepDecay(0.1, 2)
    objects.restore(scheduler, {**scheduler.state_dict(), "last_epoch": 5})
    assert scheduler.last_epoch == 5


class Trainer:
    """An object that has objects in its state."""

    def __init__(self, epochs: int, rate: float) -> None:
        self.scheduler = paddle.optimizer.lr.StepDecay(rate, 1)
        self.layer = layer_of()
        self.optimizer = optimizer_for(self.layer, learning_rate=self.scheduler)
        for _ in range(epochs):
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.layer, "optimizer": self.optimizer}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        assert state == self.state_dict()


@pytest.mark.parametrize(
    ("key_map", "epoch", "rate"),
    [
        ({}, 2, 0.1),
        ({"trainer.optimizer": None}, 0, 0.3),
        ({"trainer.optimizer.LR_Scheduler": None}, 0, 0.3),
        ({"trainer.optimizer.LR_Scheduler": "scheduler"}, 5, 0.7),
    ],
)
def test_a_key_map_about_an_optimizer_in_an_object(tmp_path: Path, key_map: Any, epoch: int, rate: float) -> None:
    save_state_dict({"trainer": Trainer(2, 0.1), "scheduler": Trainer(5, 0.7).scheduler}, tmp_path)
    trainer = Trainer(0, 0.3)
    load_state_dict({"trainer": trainer}, tmp_path, options=LoadOptions(key_map=key_map))
    assert trainer.scheduler.last_epoch == epoch
    assert np.isclose(trainer.scheduler.last_lr, rate * 0.1**epoch)


def test_a_layer_without_entries_in_an_object_misses_what_is_stored_for_it(tmp_path: Path) -> None:
    save_state_dict({"trainer": Trainer(0, 0.1)}, tmp_path)
    trainer = Trainer(0, 0.1)
    trainer.layer = paddle.nn.ReLU()
    with pytest.raises(StateDictMismatchError, match=r"trainer.model.weight: the state_dict has no such entry"):
        load_state_dict({"trainer": trainer}, tmp_path)


def test_an_object_in_another_is_left_whatever_is_stored_for_it(tmp_path: Path) -> None:
    saved, trainer = Trainer(2, 0.1), Trainer(0, 0.3)
    save_state_dict({"trainer": saved}, tmp_path)
    trainer.optimizer = paddle.optimizer.SGD(trainer.scheduler, parameters=trainer.layer.parameters())
    with pytest.raises(StateDictMismatchError, match=r"trainer.optimizer.weight.moment1: the state_dict has no such"):
        load_state_dict({"trainer": trainer}, tmp_path)
    options = LoadOptions(key_map={"trainer.optimizer": None})
    report = load_state_dict({"trainer": trainer}, tmp_path, options=options)
    assert trainer.scheduler.last_epoch == 0
    assert "trainer.optimizer.weight.moment1" in report.unused_keys
    recipes = {"trainer.model.weight": stored("trainer.model.weight")}
    with mock.patch.object(PaddleAdapter, "restore", return_value=[]) as restore:
        options = LoadOptions(key_map={"trainer.optimizer": None, "trainer.model": None}, recipes=recipes)
        load_state_dict({"trainer": trainer}, tmp_path, options=options)
    assert [call.args[0] for call in restore.call_args_list] == [trainer.layer, trainer]
    moved = LoadOptions(key_map={"trainer.optimizer": None, "trainer.optimizer.LR_Scheduler": "trainer.gone"})
    with pytest.raises(StateDictMismatchError, match=r"looked up as 'trainer.gone.last_epoch'"):
        load_state_dict({"trainer": trainer}, tmp_path, options=moved)


def test_an_optimizer_of_one_ranks_parts_is_refused(tmp_path: Path) -> None:
    layer = layer_of()
    optimizer = optimizer_for(layer)
    layer.weight.is_distributed = True
    with pytest.raises(
        UnsupportedValueError, match=r"optimizer: this optimizer steps parameters .* sharded_state_dict"
    ):
        save_state_dict({"optimizer": optimizer}, tmp_path)


def test_models_made_under_names_of_their_own_are_told_apart(tmp_path: Path) -> None:
    def make(order: list[str]) -> Any:
        with paddle.utils.unique_name.guard():
            made = {name: paddle.nn.Linear(4, 4) for name in order}
        layer = paddle.nn.Layer()
        for name in sorted(made):
            layer.add_sublayer(name, made[name])
        return layer

    def moments(layer: Any, optimizer: Any) -> dict[str, Any]:
        found = optimizer._accumulators["moment1"]
        return {key: found[parameter.name].numpy().copy() for key, parameter in layer.named_parameters()}

    def job(order: list[str], number: int) -> dict[str, Any]:
        first, second = make(["a", "b"]), make(order)
        optimizer = optimizer_for(second)
        loss = sum((second.a(second.b(paddle.full([1, 4], float(n)))) ** 2).sum() for n in range(1, number))
        loss.backward()
        optimizer.step()
        return {"d": first, "g": second, "o": optimizer}

    saved, loaded = job(["a", "b"], 3), job(["b", "a"], 5)
    save_state_dict(saved, tmp_path)
    load_state_dict(loaded, tmp_path)
    expected = moments(saved["g"], saved["o"])
    assert not np.array_equal(expected["a.weight"], expected["b.weight"])
    for key, value in moments(loaded["g"], loaded["o"]).items():
        assert np.array_equal(value, expected[key]), key


def test_a_model_of_hapi_is_refused_with_what_to_pass(tmp_path: Path) -> None:
    model = paddle.Model(layer_of())
    for pass_it, error in (
        (lambda: save_state_dict({"model": model}, str(tmp_path)), UnsupportedValueError),
        (lambda: save(str(tmp_path), model), TypeError),
    ):
        with pytest.raises(error, match="pass what it holds: its network"):
            pass_it()
    save_state_dict({"model": model.network}, str(tmp_path))


def test_a_program_with_parts_of_fused_buffers_is_refused(tmp_path: Path) -> None:
    """As ``sharding.enable_tensor_fusion`` makes them: each rank has its own part under one name."""
    state = {"fc.weight": paddle.ones([4]), "slice@linear_0.w_0.dist_moment1_0": paddle.ones([2])}
    program = SimpleNamespace(_mode="train", _engine=None, state_dict=lambda: state)
    with pytest.raises(UnsupportedValueError, match="model: this DistModel has 'slice@linear_0.*enable_tensor_fusion"):
        program_state(program, "model")
    with pytest.raises(UnsupportedValueError, match=r"model.slice@linear_0.*a rank's slice of parameters"):
        save_state_dict({"model": state}, str(tmp_path))
    with pytest.raises(UnsupportedValueError, match=r"w: this is a rank's slice .* \(slice@linear_0.w_0_moment1_0\)"):
        state["slice@linear_0.w_0.dist_moment1_0"].name = "slice@linear_0.w_0_moment1_0"
        save_state_dict({"w": state["slice@linear_0.w_0.dist_moment1_0"]}, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    del state["slice@linear_0.w_0.dist_moment1_0"]
    assert program_state(program, "model") == state


def test_a_slice_among_tensors_that_are_known_is_refused(tmp_path: Path) -> None:
    """Those of a save again are looked at together."""
    tensors = {f"w{i}": paddle.full([4], float(i)) for i in range(20)}
    save_state_dict(tensors, str(tmp_path), unique_id=0)
    tensors["w7"] = paddle.full([4], 8.0)
    tensors["w7"].name = "slice@linear_0.w_0_moment1_0"
    with pytest.raises(UnsupportedValueError, match="w7: this is a rank's slice"):
        save_state_dict(tensors, str(tmp_path), unique_id=0)
    assert load_merged_state_dict(str(tmp_path))["w7"].numpy().tolist() == [7.0] * 4


@pytest.mark.parametrize("by", ["key", "name"])
def test_a_slice_among_very_many_tensors_is_refused(tmp_path: Path, by: str) -> None:
    """All but the first few hundred are looked at together."""
    tensors = {f"w{i}": paddle.full([4], float(i)) for i in range(600)}
    part = paddle.ones([4])
    tensors["part" if by == "name" else "slice@linear_0.w_0_moment1_0"] = part
    if by == "name":
        part.name = "slice@linear_0.w_0_moment1_0"
    with pytest.raises(UnsupportedValueError, match="this is a rank's slice of parameters"):
        save_state_dict(tensors, str(tmp_path))


def test_only_what_is_called_a_slice_is_one(tmp_path: Path) -> None:
    state = {"time-slice@10ms": {"w": paddle.ones([2])}, "slice@": {"w": paddle.ones([3])}}
    save_state_dict(state, str(tmp_path))
    assert load_merged_state_dict(str(tmp_path))["slice@"]["w"].shape == [3]


@has_stages
def test_a_sharded_optimizer_that_fuses_tensors_is_refused(tmp_path: Path) -> None:
    """Each rank has moments of its own piece of the buffers; here they would be made of whole parameters."""
    optimizer = dist.shard_optimizer(optimizer_for(layer_of(REPLICATE)), STAGES["stage 1"]())
    if not hasattr(optimizer, "_enable_tensor_fusion"):
        pytest.skip(f"Paddle {paddle.__version__} fuses in static-graph programs only")
    with mock.patch.dict(os.environ):
        optimizer._enable_tensor_fusion()
    with pytest.raises(UnsupportedValueError, match=r"optimizer: .* joins parameters in buffers.*tensor_fusion\(\)"):
        save_state_dict({"optimizer": optimizer}, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert not any(optimizer._inner_opt._accumulators.values()), "none were made"


@pytest.mark.parametrize("kept", ["accumulators", "masters", "parameters"])
def test_an_optimizer_of_group_shardings_stage_3_is_refused(tmp_path: Path, kept: str) -> None:
    """Each rank has slices of its own, and by what it calls them the whole ones are missing, and would be made."""
    optimizer = paddle.optimizer.AdamW(parameters=layer_of().parameters())
    (first, *_), part = optimizers.parameters_of(optimizer), paddle.ones([4])
    if kept == "accumulators":
        optimizer._accumulators["moment1"] = {f"slice@{first.name}": part}
    elif kept == "masters":
        optimizer._master_weights = {f"slice@{first.name}": part}
    else:
        first.fw_storage = part
    with pytest.raises(UnsupportedValueError, match="optimizer: this optimizer has slices of parameters"):
        save_state_dict({"optimizer": optimizer}, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert set(optimizer._accumulators) <= {"moment1"}, "none were made"


def test_what_fully_shard_has_joined_is_refused(tmp_path: Path) -> None:
    """Its optimizer steps a rank's pieces of buffers, and the parameters have no memory of their own."""
    layer = layer_of()
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters())
    optimizer._accumulators["moment1"] = {"fuse_params_0": paddle.ones([4])}
    with pytest.raises(UnsupportedValueError, match=r"optimizer: .* fully_shard\(\) joins .*_overlap=False"):
        save_state_dict({"optimizer": optimizer}, str(tmp_path))
    layer.weight._fusion_buffer = None
    layer.weight._clear_data()
    with pytest.raises(
        UnsupportedValueError, match=r"model.weight: .* no memory; fully_shard\(\) has .*_overlap=False"
    ):
        save_state_dict({"model": layer}, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


RATES = paddle.optimizer.lr
REFUSED = {
    "nothing, a scheduler": (dict, lambda: RATES.StepDecay(0.1, 2), "last_epoch, last_lr"),
    "another scheduler": (lambda: RATES.StepDecay(0.1, 2), lambda: RATES.ReduceOnPlateau(0.1), "cooldown_counter"),
    "a warm-up before it": (
        lambda: RATES.StepDecay(0.1, 2),
        lambda: RATES.LinearWarmup(RATES.StepDecay(0.1, 2), 2, 0.0, 0.1),
        "LinearWarmup_LR",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_object_that_would_refuse_its_state_is_a_mismatch_before_anything_is_touched(
    tmp_path: Path, case: str
) -> None:
    make, make_other, lacking = REFUSED[case]
    model, other = layer_of(), make_other()
    for parameter in model.parameters():
        parameter.set_value(parameter + 1.0)
    before, expected = [one.numpy().copy() for one in model.parameters()], copy.deepcopy(other.state_dict())
    save_state_dict({"model": layer_of(), "x": make()}, tmp_path)
    state = {"model": model, "x": other}
    with pytest.raises(
        StateDictMismatchError, match=rf"(?s)x: what is stored lacks {lacking}.*key_map={{'x': None}}"
    ) as no:
        load_state_dict(state, tmp_path, options=LoadOptions(strict="all"))
    assert len(no.value.problems) == 1
    assert all((a == b.numpy()).all() for a, b in zip(before, model.parameters(), strict=True))
    for options in (LoadOptions(strict=False), LoadOptions(allow_missing=["x"]), LoadOptions(allow_missing=["x.*"])):
        assert load_state_dict(state, tmp_path, options=options).skipped_keys == ("x",)
        assert str(other.state_dict()) == str(expected)
    assert not all((a == b.numpy()).all() for a, b in zip(before, model.parameters(), strict=True))
    assert load_state_dict(state, tmp_path, options=LoadOptions(key_map={"x": None})).skipped == ()


@pytest.mark.parametrize(("saved", "loaded"), [(True, True), (True, False), (False, False)])
def test_a_scaler_is_restored_if_it_takes_what_is_stored(tmp_path: Path, saved: bool, loaded: bool) -> None:
    save_state_dict({"scaler": scaler_of(saved, 64.0)}, tmp_path)
    scaler = scaler_of(loaded)
    assert load_state_dict({"scaler": scaler}, tmp_path).skipped == ()
    assert not loaded or scaler.state_dict()["scale"].tolist() == [64.0]


def test_a_job_in_bfloat16_resumes_with_its_scaler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paddle disables it in the first step, and then it has no state; a fresh one is enabled until its first step."""
    monkeypatch.setattr(amp_global_state(), "amp_dtype", "bfloat16")  # else that of the last auto_cast, which stays
    scaler, fresh = scaler_of(True), scaler_of(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Paddle's, of that
        scaler.scale(paddle.ones([1]))
    assert scaler.state_dict() == {}
    paddle.save({"scaler": {}, "w": paddle.ones([3])}, str(tmp_path / "job.pdparams"))
    save_state_dict({"scaler": scaler, "w": paddle.ones([3])}, tmp_path / "job")
    expected = str(fresh.state_dict())
    for path in (tmp_path / "job", tmp_path / "job.pdparams"):
        w = paddle.zeros([3])
        options = LoadOptions(strict="all")
        report = load_state_dict({"scaler": fresh, "w": w}, path, options=options)
        assert report.skipped == ("scaler: left as it is, for the checkpoint has an empty state for it",)
        assert (str(fresh.state_dict()), w.tolist()) == (expected, [1.0, 1.0, 1.0])


def test_a_scaler_is_loaded_from_what_paddle_saved(tmp_path: Path) -> None:
    """Its numpy arrays are tensors to whoever reads such a file, beside others that are tensors indeed."""
    saved = scaler_of(True, 64.0).state_dict()
    paddle.save({"scaler": saved, "w": paddle.ones([3])}, str(tmp_path / "nested.pdparams"))
    paddle.save(saved, str(tmp_path / "flat.pdparams"))
    scaler, w = scaler_of(True), paddle.zeros([3])
    assert load_state_dict({"scaler": scaler, "w": w}, tmp_path / "nested.pdparams").skipped == ()
    assert (scaler.state_dict()["scale"].tolist(), w.tolist()) == ([64.0], [1.0, 1.0, 1.0])
    scaler = scaler_of(True)
    load_state_dict({"scaler": scaler}, tmp_path, options=LoadOptions(key_map={"scaler": "flat.pdparams"}))
    assert isinstance(scaler.state_dict()["scale"], np.ndarray)
    assert scaler.state_dict()["scale"].tolist() == [64.0]


class Renaming(paddle.nn.Layer):
    """One whose state_dict() has copies, under names that Paddle's set_state_dict() does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = paddle.nn.Linear(2, 2)

    def state_dict(self, *args: Any, **more: Any) -> Any:
        return {f"net.{key}": value.clone() for key, value in super().state_dict(*args, **more).items()}


class Passing(paddle.nn.Layer):
    """A wrapper that passes its state on."""

    def __init__(self, layer: paddle.nn.Layer) -> None:
        super().__init__()
        self.held = layer

    def state_dict(self, *args: Any, **more: Any) -> Any:
        return self.held.state_dict(*args, **more)

    def set_state_dict(self, state: Any, *args: Any, **more: Any) -> Any:
        return self.held.set_state_dict(state, *args, **more)


def transposing() -> paddle.nn.Layer:
    """One whose state_dict() has copies of other shapes."""
    layer = paddle.nn.Sequential(paddle.nn.Linear(2, 3))
    layer.register_state_dict_hook(lambda state: {key: value.T.contiguous() for key, value in state.items()})
    return layer


@pytest.mark.filterwarnings("ignore:Skip loading")
@pytest.mark.parametrize("wrap", [lambda layer: layer, paddle.DataParallel, Passing], ids=["bare", "parallel", "own"])
@pytest.mark.parametrize(("make", "key"), [(Renaming, "net.fc.weig"), (transposing, "0.weight")])
def test_copies_that_a_layer_does_not_take_back_are_not_called_loaded(
    tmp_path: Path, make: Any, key: str, wrap: Any
) -> None:
    save_state_dict({"model": wrap(make())}, tmp_path)
    with pytest.raises(CheckpointError, match=rf"model: the \w+ did not take its state: .*passes over: {key}"):
        load_state_dict({"model": wrap(make())}, tmp_path)


class Adding(paddle.nn.Layer):
    """One that adds a value and a tensor to its state_dict()."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = paddle.nn.Linear(2, 2)
        self.count, self.mean = 0, paddle.zeros([2])

    def state_dict(self, *args: Any, **more: Any) -> Any:
        return {**super().state_dict(*args, **more), "count": self.count, "mean": self.mean.clone()}


class AddingAdam(paddle.optimizer.Adam):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": 3}


@pytest.mark.parametrize("wrap", [lambda layer: layer, paddle.DataParallel], ids=["bare", "parallel"])
def test_what_an_object_adds_to_its_state_and_does_not_take_back_is_said_to_be_left(
    tmp_path: Path, wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    saved, loaded = Adding(), Adding()
    states = [
        {"model": wrap(model), "optimizer": AddingAdam(parameters=model.parameters())} for model in (saved, loaded)
    ]
    save_state_dict(states[0], tmp_path)
    report = load_state_dict(states[1], tmp_path, options=LoadOptions(strict="all"))
    assert sorted(report.skipped_keys) == ["model.count", "model.mean", "optimizer.count"]
    assert "optimizer.count: left as it is, for the AddingAdam adds it to its state_dict()" in caplog.text
    assert bool((saved.fc.weight == loaded.fc.weight).all())


@pytest.mark.parametrize("wrap", [lambda layer: layer, paddle.DataParallel], ids=["bare", "parallel"])
@pytest.mark.parametrize("names", [True, False])
def test_copies_of_another_dtype_are_taken_back(tmp_path: Path, wrap: Any, names: bool) -> None:
    def make() -> paddle.nn.Layer:
        first, second = paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 2)
        second.weight = first.weight  # which has two keys then
        model = paddle.nn.Sequential(first, second)
        model.to(dtype="bfloat16")
        hook = StateDictHook("float32") if names else lambda state: {k: v.cast("float32") for k, v in state.items()}
        model.register_state_dict_hook(hook)
        return model

    saved, loaded = make(), make()
    save_state_dict({"model": wrap(saved)}, tmp_path)
    assert load_state_dict({"model": wrap(loaded)}, tmp_path).skipped == ()
    for a, b in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert b.dtype == paddle.bfloat16
        assert bool((a == b).all())


def test_no_tensor_is_made_in_static_mode(tmp_path: Path) -> None:
    save_state_dict({"w": paddle.ones([2])}, tmp_path)
    paddle.enable_static()
    try:
        with pytest.raises(UnsupportedValueError, match="call paddle.disable_static"):
            load_merged_state_dict(tmp_path)
    finally:
        paddle.disable_static()


class NoModule:
    """As classes of other languages may be."""

    __module__ = None  # type: ignore[assignment]


class OddModule:
    __module__ = property(lambda self: "odd")  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [NoModule, OddModule])
def test_a_value_of_a_class_without_a_module_is_refused_as_any_other(kind: type, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=rf"deep\.x: an? {kind.__name__} cannot be stored"):
        save_state_dict({"deep": {"x": kind()}}, tmp_path)


class Failing(paddle.optimizer.SGD):
    def state_dict(self) -> Any:
        raise KeyError("lost")


class Stateless(paddle.optimizer.SGD):
    def state_dict(self) -> Any:
        return None


@pytest.mark.parametrize(("kind", "text"), [(Failing, "failed: KeyError: 'lost'"), (Stateless, "returned a NoneType")])
def test_an_optimizer_that_gives_no_state_is_named(kind: Any, text: str, tmp_path: Path) -> None:
    """As a layer is that gives none."""
    optimizer = kind(parameters=layer_of().parameters())
    with pytest.raises(CheckpointError, match=rf"job.o: state_dict\(\) of this {kind.__name__} {text}"):
        save_state_dict({"job": {"o": optimizer}}, tmp_path)
