"""Objects of a user's own whose tensors appear later: what is stored for them is not left unseen by a load."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dist_ckpt import (
    LoadOptions,
    StateDictMismatchError,
    gather_state_dict,
    load,
    load_state_dict,
    save,
    save_state_dict,
    scatter_state_dict,
    stored,
)


class Average(paddle.nn.Layer):
    """A layer of a user's own, which has averages from its first update on."""

    def __init__(self, average: Any = None) -> None:
        super().__init__()
        self.averages = {} if average is None else {"w": average}

    def state_dict(self, *args: Any, **more: Any) -> dict[str, Any]:
        return dict(self.averages)

    def set_state_dict(self, state: dict[str, Any], *args: Any, **more: Any) -> Any:
        self.averages = dict(state)


class Other:
    """The same, but no layer."""

    def __init__(self, average: Any = None) -> None:
        self.averages = {} if average is None else {"w": average}
        self.given: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"count": len(self.averages), "averages": self.averages}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state


class Counting(paddle.optimizer.Adam):
    """An optimizer of a user's own with an entry that appears later."""

    count: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({} if self.count is None else {"count": self.count})}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state.get("count")
        super().set_state_dict(state)


def _counting(count: Any = None) -> dict[str, Any]:
    layer = paddle.nn.Linear(2, 2)
    optimizer = Counting(parameters=layer.parameters())
    optimizer.count = count
    return {"model": layer, "own": optimizer}


@pytest.mark.parametrize("make", [lambda *one: {"own": Average(*one)}, lambda *one: {"own": Other(*one)}, _counting])
def test_entries_that_a_users_object_makes_later_are_not_left_unseen(tmp_path: Path, make: Any) -> None:
    save_state_dict(make(paddle.full([2], 3.0)), tmp_path)
    fresh = make()
    with pytest.raises(StateDictMismatchError, match="must be made before the load") as caught:
        load_state_dict(fresh, tmp_path)
    assert len(caught.value.problems) == 1, caught.value.problems
    assert caught.value.problems[0].startswith("own.")
    report = load_state_dict(fresh, tmp_path, options=LoadOptions(strict=False))
    assert any(key.startswith("own.") for key in report.unused_keys)
    ready = make(paddle.zeros([2]))
    load_state_dict(ready, tmp_path)
    state = ready["own"].state_dict()
    tensor = state["averages"]["w"] if "averages" in state else state["w" if "w" in state else "count"]
    assert tensor.tolist() == [3, 3]


def test_what_else_may_be_left(tmp_path: Path) -> None:
    """A layer as Paddle makes it takes its part of what is stored; one of a user's own does if that is said."""
    save_state_dict({"own": Average(paddle.ones([2])), "other": paddle.nn.Linear(2, 2)}, tmp_path)
    report = load_state_dict({"own": Average()}, tmp_path, options=LoadOptions(allow_unused=["own.*"]))
    assert set(report.unused_keys) == {"own.w", "other.weight", "other.bias"}
    load_state_dict({"other": paddle.nn.Linear(2, 2, bias_attr=False)}, tmp_path)


# -- what a job has changed on purpose


class Own(paddle.nn.Layer):
    """A model whose class has both methods, and passes them on."""

    def __init__(self, head: bool = True) -> None:
        super().__init__()
        self.body, self.head = paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 2) if head else None

    def state_dict(self, *args: Any, **more: Any) -> Any:
        return super().state_dict(*args, **more)

    def set_state_dict(self, *args: Any, **more: Any) -> Any:
        return super().set_state_dict(*args, **more)


class OwnAdam(paddle.optimizer.AdamW):
    """The same of an optimizer."""

    def state_dict(self) -> Any:
        return super().state_dict()

    def set_state_dict(self, state: Any) -> Any:
        return super().set_state_dict(state)


def _job(head: bool = True, frozen: bool = False, rate: Any = 0.1, **more: Any) -> dict[str, Any]:
    model = Own(head)
    model.body.weight.stop_gradient = frozen
    return {"model": model, "opt": OwnAdam(rate, parameters=model.parameters(), **more)}


@pytest.mark.parametrize(
    ("saved", "loaded", "left", "warns"),
    [
        ({"rate": lambda: paddle.optimizer.lr.StepDecay(0.1, 1)}, {}, "opt.LR_Scheduler.last_epoch", False),
        ({}, {"frozen": True}, None, False),
        ({"amsgrad": True}, {}, "opt.body.weight.moment2_max", False),
        ({"multi_precision": True}, {}, None, False),
        ({}, {"head": False}, "model.head.weight", True),
    ],
    ids=["scheduler", "frozen", "amsgrad", "same", "head"],
)
def test_a_job_that_was_changed_goes_on(
    tmp_path: Path, saved: Any, loaded: Any, left: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if "amsgrad" in saved and "amsgrad" not in inspect.signature(paddle.optimizer.AdamW.__init__).parameters:
        pytest.skip("this Paddle has no amsgrad")
    rate = saved.pop("rate")() if "rate" in saved else 0.1
    save_state_dict(_job(rate=rate, **saved), tmp_path)
    with caplog.at_level(logging.WARNING):
        report = load_state_dict(_job(**loaded), tmp_path)
    assert bool(report.unused_keys) == (left is not None)
    assert left is None or left in report.unused_keys
    assert ("model.head.weight" in caplog.text) == warns
    assert "opt.head.weight.moment1" not in caplog.text


def test_own_accumulators_that_appear_later_are_not_left_unseen(tmp_path: Path) -> None:
    job = _job()
    parameter = job["model"].body.weight
    job["opt"].state_dict()
    save_state_dict(job, tmp_path / "without")
    job["opt"]._add_accumulator("average", parameter)
    save_state_dict(job, tmp_path / "with")
    load_state_dict(_job(), tmp_path / "without")
    with pytest.raises(StateDictMismatchError) as caught:
        load_state_dict(_job(), tmp_path / "with")
    assert [line.partition(":")[0] for line in caught.value.problems] == ["opt.body.weight.average"]


def _frozen_job(frozen: bool, **more: Any) -> dict[str, Any]:
    model = paddle.nn.Sequential(paddle.nn.Linear(3, 3), paddle.nn.Linear(3, 3))
    for parameter in model[0].parameters():
        parameter.stop_gradient = frozen
    return {"model": model, "opt": paddle.optimizer.AdamW(0.1, parameters=model.parameters(), **more)}


def _steps(job: dict[str, Any], count: int) -> float:
    for number in range(count):
        loss = (job["model"](paddle.ones([2, 3]) * (number + 1)) ** 2).mean()
        loss.backward()
        job["opt"].step()
        job["opt"].clear_grad()
    return float(loss)


@pytest.mark.parametrize("strict", [True, "all"])
def test_what_is_kept_for_parameters_that_are_frozen_now_is_loaded_if_it_is_stored(tmp_path: Path, strict: Any) -> None:
    """Who loads before a schedule thaws layers goes on as if there had been no load."""
    first = _frozen_job(False)
    _steps(first, 3)
    save_state_dict(first, tmp_path)
    expected = _steps(first, 2)
    again = _frozen_job(True)
    report = load_state_dict(again, tmp_path, options=LoadOptions(strict=strict))
    assert report.unused_keys == report.skipped == ()
    assert all(parameter.stop_gradient for parameter in again["model"][0].parameters())
    for parameter in again["model"][0].parameters():
        parameter.stop_gradient = False
    assert _steps(again, 2) == expected


@pytest.mark.parametrize("how", ["state", "one call"])
@pytest.mark.parametrize("shape", ["tied", "LookAhead"])
def test_what_is_kept_for_frozen_parameters_is_loaded_whatever_they_are_called_or_steps_them(
    tmp_path: Path, shape: str, how: str
) -> None:
    """Parameters that a model has under several keys, and those of the optimizer in a LookAhead."""

    def make(frozen: bool) -> dict[str, Any]:
        job = _frozen_job(frozen)
        if shape == "tied":
            job["model"].add_sublayer("again", job["model"][0])
        else:
            job["opt"] = paddle.incubate.LookAhead(job["opt"], k=2)
        return job

    first = make(False)
    _steps(first, 3)
    if how == "state":
        save_state_dict(first, tmp_path)
    else:
        save(tmp_path, first["model"], first["opt"])
    expected = _steps(first, 2)
    again = make(True)
    if how == "state":
        assert load_state_dict(again, tmp_path).unused_keys == ()
    else:
        load(tmp_path, again["model"], again["opt"])
    for parameter in again["model"][0].parameters():
        parameter.stop_gradient = False
    assert _steps(again, 2) == expected


@pytest.mark.parametrize("frozen", [True, False])
def test_what_was_gathered_for_parameters_that_are_frozen_now_is_scattered(frozen: bool) -> None:
    """As by a load; not if parameters that are frozen are to be left as they are."""
    first = _frozen_job(False)
    _steps(first, 3)
    whole = gather_state_dict(first)
    again = _frozen_job(True)
    report = scatter_state_dict(whole, again, frozen=frozen)
    assert ("opt.0.weight.moment1" in report.unused_keys) == (not frozen)
    moments = again["opt"]._accumulators["moment1"]
    names = [parameter.name for parameter in again["model"].parameters()]
    assert (names[0] in moments) == frozen
    assert not frozen or (moments[names[0]] == whole["opt"]["0.weight.moment1"]).all()
    assert (moments[names[2]] == whole["opt"]["1.weight.moment1"]).all()


@pytest.mark.parametrize(
    ("more", "made"),
    [
        ({"key_map": {}}, True),
        ({"key_map": {"step": None}}, True),
        ({"key_map": {"step": "count", "op": "optimizer"}}, True),
        ({"key_map": lambda key: None if key == "step" else key}, True),
        ({"recipes": {"step": stored("count")}}, True),
        ({"key_map": {"opt": None}}, False),
        ({"key_map": {"opt.0.weight": None}}, False),
        ({"key_map": lambda key: None if key.startswith("opt") else key}, False),
    ],
)
def test_options_that_are_about_something_else_leave_nothing_of_what_is_kept_for_frozen_parameters(
    tmp_path: Path, more: dict[str, Any], made: bool
) -> None:
    first = _frozen_job(False)
    _steps(first, 2)
    save_state_dict({**first, "step": paddle.ones([1]), "count": paddle.ones([1])}, tmp_path)
    again = _frozen_job(True)
    report = load_state_dict({**again, "step": paddle.zeros([1])}, tmp_path, options=LoadOptions(**more))
    assert len(again["opt"]._accumulators.get("moment1", ())) == (4 if made else 2)
    assert ("opt.0.weight.moment1" not in report.unused_keys) == made


def test_nothing_is_made_for_frozen_parameters_of_which_nothing_is_stored(tmp_path: Path) -> None:
    first = _frozen_job(True)
    _steps(first, 2)
    save_state_dict(first, tmp_path)
    again = _frozen_job(True)
    assert load_state_dict(again, tmp_path).unused_keys == ()
    moments = again["opt"]._accumulators["moment1"]
    assert len(moments) == 2, "of the layer that is trained"
    plain = {"model": again["model"], "opt": paddle.optimizer.SGD(0.1, parameters=again["model"].parameters())}
    save_state_dict(_frozen_job(False), tmp_path / "adam")
    assert "opt.0.weight.moment1" in load_state_dict(plain, tmp_path / "adam").unused_keys


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_step_back_to_before_parameters_were_trained_says_what_to_do(tmp_path: Path, as_dict: bool) -> None:
    first = _frozen_job(True)
    _steps(first, 2)
    save_state_dict(first, tmp_path)
    again = _frozen_job(False)
    _steps(again, 1)
    state = {**again, "opt": again["opt"].state_dict()} if as_dict else again
    with pytest.raises(StateDictMismatchError, match="as where they were not trained") as caught:
        load_state_dict(state, tmp_path)
    (patterns,) = re.findall(r"LoadOptions\(allow_missing=(\[.*?\])\) keeps what it has", str(caught.value))
    assert as_dict or patterns == "['opt.0.weight.*', 'opt.0.bias.*']"
    missing = [problem.partition(":")[0] for problem in caught.value.problems]
    report = load_state_dict(
        state, tmp_path, options=LoadOptions(allow_missing=missing if as_dict else ast.literal_eval(patterns))
    )
    assert sorted(report.skipped_keys) == sorted(missing)
    whole = {"model": again["model"]}
    save_state_dict(whole, tmp_path / "model")
    with pytest.raises(StateDictMismatchError) as caught:
        load_state_dict(again, tmp_path / "model")
    assert "not trained" not in str(caught.value), "no optimizer is stored at all"


def test_two_optimizers_of_one_frozen_parameter_get_what_is_stored_for_each(tmp_path: Path) -> None:
    def make(frozen: bool) -> dict[str, Any]:
        job = _frozen_job(frozen)
        parameters = job["model"].parameters()
        return {**job, "momentum": paddle.optimizer.Momentum(0.1, parameters=parameters)}

    first = make(False)
    _steps(first, 2)
    save_state_dict(first, tmp_path / "both")
    save_state_dict({name: first[name] for name in ("model", "opt")}, tmp_path / "one")
    again = make(True)
    assert load_state_dict(again, tmp_path / "both").unused_keys == ()
    one = make(True)
    load_state_dict({name: one[name] for name in ("model", "momentum")}, tmp_path / "both")
    assert not one["opt"]._accumulators
    assert len(one["momentum"]._accumulators["velocity"]) == 4
    options = LoadOptions(allow_missing=["momentum.*"])
    assert load_state_dict(make(True), tmp_path / "one", options=options).unused_keys == ()


class Remembering(paddle.optimizer.lr.LRScheduler):
    """A schedule that adds to a dict as it goes."""

    def __init__(self) -> None:
        self.rates: dict[Any, Any] = {}
        self.deep: dict[str, Any] = {"first": {}}
        super().__init__(0.1)

    def state_keys(self) -> None:
        self.keys = ["last_epoch", "last_lr", "rates", "deep"]

    def get_lr(self) -> float:
        self.rates[f"{self.last_epoch}"] = 0.1 / (1 + self.last_epoch)
        if self.last_epoch:
            self.deep[f"of {self.last_epoch}"] = {"best": np.ones([2], np.float32) * self.last_epoch}
        return float(sum(self.rates.values()))


def _scheduled(scheduler: Any) -> dict[str, Any]:
    model = paddle.nn.Linear(2, 2)
    return {"model": model, "optimizer": paddle.optimizer.SGD(scheduler, parameters=model.parameters())}


def test_what_an_optimizers_scheduler_adds_to_its_dicts_is_loaded(tmp_path: Path) -> None:
    first = Remembering()
    for _ in range(3):
        first.step()
    save_state_dict(_scheduled(first), tmp_path)
    for key_map in (None, {"step": None}):
        again = Remembering()
        report = load_state_dict(_scheduled(again), tmp_path, options=LoadOptions(key_map=key_map))
        assert report.unused_keys == ()
        assert (again.rates, again.last_lr) == (first.rates, first.last_lr)
        assert again.deep.keys() == first.deep.keys()
        assert all((again.deep[f"of {i}"]["best"] == i).all() for i in (1, 2, 3))
    left = Remembering()
    left.rates |= {"0": 7.0, "1": 8.0}
    load_state_dict(_scheduled(left), tmp_path, options=LoadOptions(key_map={"optimizer.LR_Scheduler.rates.0": None}))
    assert left.rates == {**first.rates, "0": 7.0}
    first.step()
    first.step()
    again.step()
    again.step()
    assert again.last_lr == first.last_lr
    fewer = load_state_dict(_scheduled(paddle.optimizer.lr.StepDecay(0.1, 2)), tmp_path)
    assert "optimizer.LR_Scheduler.rates.1" in fewer.unused_keys


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_and_values_in_a_scheduler_stay_where_longer_ones_or_dicts_are_stored(tmp_path: Path, kind: Any) -> None:
    """What is in them cannot be added to what is there. A list of arrays was set though it was said to be left."""

    class Trainer:
        """An object that has an optimizer in its state."""

        def __init__(self, scheduler: Any) -> None:
            self.job, self.given = _scheduled(scheduler), dict[str, Any]()

        def state_dict(self) -> dict[str, Any]:
            return self.job

        def set_state_dict(self, state: dict[str, Any]) -> None:
            self.given = state

    def make(count: int, rates: Any, arrays: Any) -> Any:
        scheduler = Remembering()
        scheduler.deep = {"phases": kind({"of": i, "at": np.full([1], i)} for i in range(count)), "arrays": arrays}
        scheduler.rates = rates
        return scheduler

    save_state_dict(_scheduled(make(3, {"0": 0.5, "of": {"1": 0.5}}, [np.zeros(1), 1.0])), tmp_path)
    again = make(1, {"0": 0.1, "of": {"1": 0.1}}, [2.0])
    again.deep["phases"][0]["of"] = 7
    rates = LoadOptions(key_map={"optimizer.LR_Scheduler.deep.arrays": None})
    report = load_state_dict(_scheduled(again), tmp_path, options=rates)
    assert again.deep == {"phases": kind([{"of": 0, "at": np.zeros(1)}]), "arrays": [2.0]}
    assert again.rates == {"0": 0.5, "of": {"1": 0.5}}
    assert "optimizer.LR_Scheduler.deep.phases.2.of" in report.unused_keys
    save_state_dict({"trainer": Trainer(make(3, {"0": 0.5, "1": 2}, [2.0]))}, tmp_path / "in an object")
    again = make(1, {"0": 0.1}, [3.0])
    trainer = Trainer(again)
    load_state_dict({"trainer": trainer}, tmp_path / "in an object")
    assert trainer.given["optimizer"] is trainer.job["optimizer"]
    assert (len(again.deep["phases"]), again.deep["arrays"], again.rates) == (1, [2.0], {"0": 0.5, "1": 2})
    other = make(1, {"0": 0.1, "of": 3}, [2.0])
    report = load_state_dict(_scheduled(other), tmp_path, options=LoadOptions(strict=False))
    assert (other.rates, other.deep["arrays"]) == ({"0": 0.5, "of": 3}, [2.0])
    assert {"optimizer.LR_Scheduler.rates.of", "optimizer.LR_Scheduler.deep.arrays"} <= {*report.skipped_keys}
    save_state_dict(_scheduled(make(1, {"0": 0.5, "of": np.zeros(1)}, [2.0])), tmp_path, unique_id=1)
    other = make(1, {"0": 0.1, "of": {"1": 3}}, [2.0])
    report = load_state_dict(_scheduled(other), tmp_path, unique_id=1, options=LoadOptions(strict=False))
    assert other.rates == {"0": 0.5, "of": {"1": 3}}
    assert report.skipped_keys == ("optimizer.LR_Scheduler.rates.of.1",)
    with pytest.raises(StateDictMismatchError, match="of: the state_dict has a dict, in the checkpoint it is a t"):
        load_state_dict(_scheduled(make(1, {"0": 0.1, "of": {}}, [2.0])), tmp_path, unique_id=1)


def test_an_array_may_be_what_a_plateau_compares_with(tmp_path: Path) -> None:
    """Paddle's scheduler takes metrics that are arrays, and keeps the best one: None at first."""
    plateau = paddle.optimizer.lr.ReduceOnPlateau
    metrics: list[Any] = [None, np.full([1], 3, np.float32), np.full([], 2, np.float32), 1.5]
    trained = plateau(0.1)
    for number, metric in enumerate(metrics):
        if metric is not None:
            trained.step(metric)
        save_state_dict(_scheduled(trained), tmp_path, unique_id=number)
    for scheduler in (trained, plateau(0.1)):
        for number in (2, 1, 0, 3, 1):
            report = load_state_dict(_scheduled(scheduler), tmp_path, unique_id=number)
            assert type(scheduler.best) is type(metrics[number])
            assert (np.shape(scheduler.best), scheduler.best) == (np.shape(metrics[number]), metrics[number])
            assert scheduler.last_epoch == number
            assert report.unused_keys == ()


@pytest.mark.parametrize("has_array", [False, True])
def test_an_array_of_a_scheduler_comes_back_from_a_file_of_paddles(tmp_path: Path, has_array: bool) -> None:
    """There it looks like a tensor."""
    job = _scheduled(paddle.optimizer.lr.ReduceOnPlateau(0.1))
    job["optimizer"]._learning_rate.step(np.full([1], 3, np.float32))
    paddle.save({name: one.state_dict() for name, one in job.items()}, f"{tmp_path}/job.pdparams")
    scheduler = paddle.optimizer.lr.ReduceOnPlateau(0.1)
    if has_array:
        scheduler.step(np.full([1], 2, np.float32))
    load_state_dict(_scheduled(scheduler), tmp_path / "job.pdparams")
    assert (type(scheduler.best), scheduler.best.tolist(), scheduler.last_epoch) == (np.ndarray, [3], 1)
