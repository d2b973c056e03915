"""Every optimizer and wrapper that Paddle ships: training goes on bit for bit after a load, or it is refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.distributed import fleet
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionOptimizer, MixPrecisionScaler

from paddle_dist_ckpt import (
    StateDictMismatchError,
    UnsupportedValueError,
    load,
    load_state_dict,
    read_metadata,
    save,
    save_state_dict,
)
from paddle_dist_ckpt.paddle_adapter.wrappers import refusal
from test.paddle import cases_optimizers as cases
from test.paddle.versions import SHARD_ORDER, lacks
from test.ranks.pool import RankPool

Make = Callable[[Any], Any]
paddles, incubate = paddle.optimizer, paddle.incubate.optimizer
on_fleet = lacks(SHARD_ORDER, "has other names and arguments in fleet")


def _plain(kind: str, /, **more: Any) -> Make:
    return lambda model: getattr(paddles, kind)(learning_rate=0.05, parameters=model.parameters(), **more)


def _scheduled(model: Any) -> Any:
    rate = paddles.lr.StepDecay(0.1, 2)
    return paddles.AdamW(rate, parameters=model.parameters(), grad_clip=paddle.nn.ClipGradByGlobalNorm(0.5))


MADE: dict[str, Make] = {
    **{name: _plain(name) for name in ("Adam", "AdamW", "SGD", "Momentum", "Lamb", "Adagrad", "RMSProp", "Adadelta")},
    **{name: _plain(name) for name in ("Adamax", "NAdam", "RAdam", "Rprop") if hasattr(paddles, name)},
    **{name: _plain(name, batch_num=2) for name in ("ASGD",) if hasattr(paddles, name)},
    "AdamW of a name": _plain("AdamW", name="mine"),
    "Adam, many tensors at once": _plain("Adam", use_multi_tensor=True),
    "Momentum, many tensors at once": _plain("Momentum", use_multi_tensor=True),
    "RMSProp, centered": _plain("RMSProp", centered=True, momentum=0.9),
    "AdamW with a scheduler and clipping": _scheduled,
    "LarsMomentumOptimizer": lambda model: incubate.LarsMomentumOptimizer(0.1, 0.9, parameter_list=model.parameters()),
    "LookAhead": lambda model: incubate.LookAhead(_plain("AdamW")(model), alpha=0.3, k=3),
    "LookAhead of SGD": lambda model: incubate.LookAhead(_plain("SGD")(model), k=4),
    "LookAhead with a scheduler": lambda model: incubate.LookAhead(_scheduled(model), k=3),
    "MixPrecisionOptimizer": lambda model: MixPrecisionOptimizer(_plain("AdamW")(_with_main_grads(model))),
    "HeterParallelOptimizer": lambda model: _fleets("HeterParallelOptimizer")(_plain("AdamW")(model), None),
    "HybridParallelOptimizer": lambda model: _hybrid(_plain("AdamW")(model)),
    "HybridParallelOptimizer of LookAhead": lambda model: _hybrid(incubate.LookAhead(_plain("Adam")(model), k=3)),
}
if "amsgrad" in inspect.signature(paddles.AdamW).parameters:
    MADE["AdamW, amsgrad"] = _plain("AdamW", amsgrad=True)
MARKS = {name: [on_fleet] for name in MADE if "Parallel" in name or "Mix" in name}
ALL = [pytest.param(make, marks=MARKS.get(name, []), id=name.replace(" ", "_")) for name, make in MADE.items()]
ON_RANKS = {"DygraphShardingOptimizer"}  # proved in test_sharded_training_goes_on
AVERAGES = {"ModelAverage"}  # proved in test_a_model_average_goes_on
WRAPPED_LATER = {"_ShardOptimizer"}  # proved in test_objects_on_ranks.py


def _fleets(name: str) -> Any:
    return getattr(fleet.meta_optimizers.dygraph_optimizer, name)


def _hybrid(optimizer: Any) -> Any:
    """As ``fleet.distributed_optimizer()`` makes it, for one rank."""

    class One(int):
        """A degree, or a group of that."""

        nranks = 1

    class Alone:
        """A topology of one rank."""

        def __getattr__(self, name: str) -> Any:
            return lambda: One(1)

    return _fleets("HybridParallelOptimizer")(optimizer, Alone(), fleet.DistributedStrategy())


def _with_main_grads(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.main_grad = None
    return model


# -- going on


def _model(reverse: bool = False) -> Any:
    """Always the same values; Paddle's names for the layers follow from the order in which they are made."""
    made = {width: paddle.nn.Linear(*width) for width in sorted([(4, 5), (5, 3)], reverse=reverse)}
    model = paddle.nn.Sequential(made[4, 5], made[5, 3])
    for i, parameter in enumerate(model.parameters(), 1):
        count = int(np.prod(parameter.shape))
        parameter.set_value(np.linspace(-i, i, count, dtype=np.float32).reshape(parameter.shape) / 3)
    return model


def _train(model: Any, optimizer: Any, steps: range) -> None:
    for number in steps:
        inputs = np.random.default_rng(number).standard_normal((6, 4)).astype(np.float32)
        (model(paddle.to_tensor(inputs)) ** 2).mean().backward()
        for parameter in model.parameters():
            if hasattr(parameter, "main_grad"):
                parameter.main_grad = parameter.grad.cast("float32")
        optimizer.step()
        optimizer.clear_grad()
        for parameter in model.parameters():
            parameter.clear_gradient(False)  # some clear the main gradients only
        rate = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
        if not isinstance(rate, float):
            rate.step()


def _values(model: Any) -> dict[str, Any]:
    return {key: value.numpy().copy() for key, value in model.state_dict().items()}


def _assert_same(model: Any, other: Any) -> None:
    found, expected = _values(model), _values(other)
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


def _save_state(path: Path, model: Any, optimizer: Any) -> None:
    save_state_dict({"model": model, "optimizer": optimizer}, path)


def _load_state(path: Path, model: Any, optimizer: Any) -> None:
    load_state_dict({"model": model, "optimizer": optimizer}, path)


@pytest.mark.parametrize("make", ALL)
def test_training_goes_on_bit_for_bit(tmp_path: Path, make: Make) -> None:
    _check_that_training_goes_on(tmp_path, make, 5, _save_state, _load_state)


@pytest.mark.parametrize("kind", ["AdamW", "LookAhead"])
def test_training_begins_from_what_was_saved_before_the_first_step(tmp_path: Path, kind: str) -> None:
    _check_that_training_goes_on(tmp_path, MADE[kind], 0, _save_state, _load_state)


@on_fleet
@pytest.mark.parametrize("kind", ["LookAhead with a scheduler", "HybridParallelOptimizer"])
def test_training_goes_on_by_one_call(tmp_path: Path, kind: str) -> None:
    _check_that_training_goes_on(tmp_path, MADE[kind], 5, save, load)


def _check_that_training_goes_on(
    path: Path, make: Make, steps: int, save_job: Callable[..., Any], load_job: Callable[..., Any]
) -> None:
    """Into an optimizer that never took a step, of a model that has other variable names."""
    model = _model()
    optimizer = make(model)
    _train(model, optimizer, range(steps))
    save_job(path, model, optimizer)
    before = _values(model)
    _train(model, optimizer, range(steps, steps + 7))
    resumed = _model(reverse=True)
    fresh = make(resumed)
    load_job(path, resumed, fresh)
    assert all(np.array_equal(value, before[key]) for key, value in _values(resumed).items())
    _train(resumed, fresh, range(steps, steps + 7))
    _assert_same(resumed, model)


@pytest.mark.parametrize("make", [MADE["LookAhead"], MADE["AdamW"]], ids=["LookAhead", "AdamW"])
def test_an_optimizer_that_has_trained_goes_back(tmp_path: Path, make: Make) -> None:
    model = _model()
    optimizer = make(model)
    _train(model, optimizer, range(4))
    _save_state(tmp_path, model, optimizer)
    _train(model, optimizer, range(4, 9))
    expected = _values(model)
    _load_state(tmp_path, model, optimizer)
    _train(model, optimizer, range(4, 9))
    assert all(np.array_equal(value, expected[key]) for key, value in _values(model).items())


def test_a_model_average_goes_on(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any, Any]:
        model = _model()
        windows = {"min_average_window": 2, "max_average_window": 4}
        average = incubate.ModelAverage(0.15, parameters=model.parameters(), **windows)
        return model, _plain("SGD")(model), average

    def train(job: tuple[Any, Any, Any], steps: range) -> None:
        model, optimizer, average = job
        for number in steps:
            (model(paddle.full([2, 4], number / 3)) ** 2).mean().backward()
            optimizer.step()
            average.step()
            optimizer.clear_grad()

    first, second = make(), make()
    train(first, range(5))
    save_state_dict(dict(zip("mos", first, strict=True)), tmp_path)
    load_state_dict(dict(zip("mos", second, strict=True)), tmp_path)
    for job in (first, second):
        train(job, range(5, 11))
    with first[2].apply(), second[2].apply():
        _assert_same(second[0], first[0])
    _assert_same(second[0], first[0])


def test_what_a_look_ahead_stores(tmp_path: Path) -> None:
    model = _model()
    optimizer = MADE["LookAhead with a scheduler"](model)
    _train(model, optimizer, range(2))
    _save_state(tmp_path, model, optimizer)
    stored = read_metadata(tmp_path)
    assert {"optimizer.0.weight.slow", "optimizer.inner_optimizer.1.bias.moment2"} <= stored.state_dict_metadata.keys()
    assert stored.values["optimizer.steps"] == 2
    assert stored.values["optimizer.inner_optimizer.LR_Scheduler.last_epoch"] == 2


def test_the_state_of_another_optimizer_is_no_look_aheads(tmp_path: Path) -> None:
    """Nor is what was saved of a LookAhead without the optimizer in it."""
    model = _model()
    _save_state(tmp_path, model, _plain("AdamW")(model))
    optimizer = MADE["LookAhead"](model)
    _train(model, optimizer, range(1))
    before = _values(model)
    with pytest.raises(StateDictMismatchError, match=r"optimizer\.inner_optimizer\.0\.weight\.moment1: .* missing"):
        _load_state(tmp_path, model, optimizer)
    assert all(np.array_equal(value, before[key]) for key, value in _values(model).items())


@on_fleet
def test_sharded_training_goes_on(pool: RankPool, tmp_path: Path) -> None:
    """Fleet's sharding that gives each rank whole parameters, into another degree of it and into one process.

    Others sum gradients in another order; a lost moment would make a difference of 0.1.
    """
    results = pool.run(cases.save_and_go_on, str(tmp_path))
    expected = results[0][0]
    assert len({tuple(stepped) for _, _, stepped in results}) > 1, "ranks keep state of different parameters"
    for _, found, _ in results:
        assert all(np.array_equal(found[key], value) for key, value in expected.items())
    alone = cases.make(None)
    load_state_dict(dict(zip(("model", "optimizer"), alone, strict=True)), tmp_path)
    cases.steps(*alone, 4, 4)
    other = pool.run(cases.resume, str(tmp_path), 8)[0]
    for found in (other, _values(alone[0])):
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-6)


def test_a_vocabulary_that_was_padded_for_other_ranks(pool: RankPool, tmp_path: Path) -> None:
    """With its moments; of four ranks the last one has padding alone."""
    saved = pool.run(cases.resized, 10, 2, 1, None, str(tmp_path), ranks=2)
    before = pool.run(cases.resized, 16, 4, 2, None, None, ranks=4)
    loaded = pool.run(cases.resized, 16, 4, 2, str(tmp_path), None, ranks=4)
    for key in ("weight", "moment2"):
        stored, kept, found = (np.concatenate([rank[key] for rank in ranks]) for ranks in (saved, before, loaded))
        assert np.array_equal(found[:10], stored)
        assert np.array_equal(found[10:], kept[10:])
        assert not np.array_equal(kept[:10], stored)


@on_fleet
def test_a_wrapped_scaler_is_the_scaler(tmp_path: Path) -> None:
    """Paddle's own has no state where it is not enabled, as on a CPU."""

    class Scaler:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def state_dict(self) -> dict[str, Any]:
            return {"scale": self.scale}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.scale = state["scale"]

    save_state_dict({"scaler": MixPrecisionScaler(Scaler(512.0))}, tmp_path)
    first, second = Scaler(8.0), Scaler(8.0)
    load_state_dict({"scaler": MixPrecisionScaler(first)}, tmp_path)
    load_state_dict({"scaler": second}, tmp_path)
    assert first.scale == second.scale == 512.0


# -- refused


def _shipped() -> dict[str, type]:
    """All of Paddle's optimizers and what wraps them, by name, as its modules have them."""
    import paddle.distributed.auto_parallel.sharding
    import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_fully_shard
    import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2

    assert paddle.distributed.auto_parallel.sharding is not None
    found = {"ExponentialMovingAverage": paddle.static.ExponentialMovingAverage}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("paddle.") and not name.startswith(("paddle.incubate.distributed", "paddle.jit")):
            for kind in vars(module).values():
                known = isinstance(kind, type) and str(getattr(kind, "__module__", "")).startswith("paddle.")
                if known and (
                    issubclass(kind, paddles.Optimizer) or kind.__name__.endswith(("Optimizer", "OptimizerV2"))
                ):
                    found[kind.__name__] = kind
    return found


def _instance(kind: type) -> Any:
    """One that was not initialised, since most cannot be outside of what they are for."""
    made = kind.__new__(kind)
    vars(made).update(dict.fromkeys(("_inner_opt", "inner_optimizer"), _plain("AdamW")(_model())))
    return made


@on_fleet
def test_every_optimizer_resumes_or_is_refused() -> None:
    shipped = _shipped()
    proved = {*MADE, *ON_RANKS, *AVERAGES, *WRAPPED_LATER}
    refused = {name for name, kind in shipped.items() if refusal(_instance(kind)) is not None}
    assert not refused & proved
    # A base class, and one of a module that turns parameters into DistTensors and keeps no state.
    assert shipped.keys() - refused - proved == {"Optimizer", "ParallelOptimizer"}
    assert {"LBFGS", "LookAhead", "LocalSGDOptimizer", "DistributedFusedLamb", "ExponentialMovingAverage"} <= set(
        shipped
    )
    assert len(refused) > 20


@on_fleet
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("LBFGS", "save what you need of its state_dict"),
        ("ExponentialMovingAverage", "save the DistModel"),
        ("GradientMergeOptimizer", "save the DistModel"),
        ("LocalSGDOptimizer", "save the DistModel"),
        ("DistributedFusedLamb", "save the DistModel"),
        ("DygraphShardingOptimizerV2", r"save its sharded_state_dict\(\); to load it, take a step first"),
        ("GroupShardedOptimizerStage2", r"save its sharded_state_dict\(\)"),
    ],
)
def test_what_is_refused_says_what_to_do(tmp_path: Path, name: str, advice: str) -> None:
    kind = _shipped()[name]
    with pytest.raises(UnsupportedValueError, match=rf"a\.b: .*{name}.*{advice}"):
        save_state_dict({"a": {"b": _instance(kind)}}, tmp_path)
    with pytest.raises(UnsupportedValueError, match=rf"a\.b: .*{name}.*{advice}"):
        load_state_dict({"a": {"b": _instance(kind)}}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_masks_by_names_of_a_run_are_refused(tmp_path: Path) -> None:
    """Those of layers of one shape would be mixed if a run makes the layers in another order."""
    optimizer = paddle.incubate.asp.asp.OptimizerWithSparsityGuarantee(_plain("AdamW")(_model()))
    with pytest.raises(UnsupportedValueError, match=r"o: .*OptimizerWithSparsityGuarantee has masks.*prune_model"):
        save_state_dict({"o": optimizer}, tmp_path)
    assert not list(tmp_path.iterdir())
    save_state_dict({"o": optimizer._optimizer}, tmp_path)


def test_both_that_are_called_lbfgs_are_refused(tmp_path: Path) -> None:
    for module in (paddles, incubate):
        if hasattr(module, "LBFGS"):
            with pytest.raises(UnsupportedValueError, match="LBFGS"):
                save_state_dict({"o": module.LBFGS(parameters=_model().parameters())}, tmp_path)
    with pytest.raises(UnsupportedValueError, match="LBFGS"):
        inner = paddles.LBFGS(parameters=_model().parameters())
        save_state_dict({"o": incubate.LookAhead(inner)}, tmp_path)


@on_fleet
@pytest.mark.parametrize("switch", ["tensor_fusion", "comm_overlap"])
def test_fused_parameters_are_refused(tmp_path: Path, switch: str) -> None:
    kind = _fleets("DygraphShardingOptimizer")
    optimizer = _instance(kind)
    vars(optimizer).update(tensor_fusion=False, comm_overlap=False)
    save_state_dict({"o": optimizer}, tmp_path / "whole")
    vars(optimizer)[switch] = True
    with pytest.raises(UnsupportedValueError, match=r"o: DygraphShardingOptimizer with tensor_fusion"):
        save_state_dict({"o": optimizer}, tmp_path / "fused")


def test_a_users_own_classes_of_such_names_are_no_concern(tmp_path: Path) -> None:
    class LBFGS:
        count = 3

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def set_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    save_state_dict({"o": LBFGS(), "d": dist.ReduceOp.SUM}, tmp_path)
    other = LBFGS()
    other.count = 0
    load_state_dict({"o": other}, tmp_path)
    assert other.count == 3
