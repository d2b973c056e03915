"""Master weights that a checkpoint does not have, of parameters that it has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_dist_ckpt import LoadOptions, load_state_dict, save_state_dict
from paddle_dist_ckpt.paddle_adapter import optimizers
from paddle_dist_ckpt.paddle_adapter.masters import renew_masters
from paddle_dist_ckpt.tree.state_dict import Leaves
from test.paddle.optimizers import flat
from test.paddle.tensors import from_local
from test.paddle.test_objects import ALONE, REPLICATE, SHARD, has_stages, layer_of, optimizer_for
from test.paddle.versions import FROM_LOCAL, LATER_THAN_3_0, lacks

CUTS_HALF = lacks(LATER_THAN_3_0, "cannot cut bfloat16 and float16 on CPU")
WITHOUT_MASTERS = LoadOptions(allow_missing=["*.master_weight"], cast=True)
WEIGHTS_ONLY = LoadOptions(allow_missing=["optimizer.*"])


def job(dtype: str = "bfloat16", fill: float = 1.0, placement: Any = None) -> dict[str, Any]:
    """A layer of equal elements, and a fresh optimizer with master weights."""
    layer = layer_of(placement, dtype)
    for parameter in layer.parameters():
        local = parameter._local_value() if parameter.is_dist() else parameter
        paddle.assign(paddle.full(local.shape, fill, dtype), local)
    return {"model": layer, "optimizer": optimizer_for(layer, multi_precision=True)}


def masters(state: dict[str, Any]) -> list[float]:
    """The different elements of all its master weights."""
    found = optimizers.optimizer_state(state["optimizer"])["master_weights"].values()
    locals_of = [one._local_value() if one.is_dist() else one for one in found]
    return sorted({element for one in locals_of for element in one.numpy().ravel().tolist()})


@pytest.mark.parametrize("placement", [None, REPLICATE, pytest.param(SHARD, marks=CUTS_HALF)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_they_follow_the_parameters_that_are_loaded(tmp_path: Path, dtype: str, placement: Any) -> None:
    save_state_dict({"model": job(dtype, 3.0)["model"]}, str(tmp_path))
    state = job(dtype, placement=placement)
    owned = {id(one) for _, one in flat(optimizers.optimizer_state(state["optimizer"]))}
    report = load_state_dict(state, str(tmp_path), options=WEIGHTS_ONLY)
    assert masters(state) == [3.0]
    said = {
        one.split(":")[0]: one.endswith(": set to its parameter, for the checkpoint does not have it")
        for one in report.skipped
    }
    assert said == {key: key.endswith(".master_weight") for key in report.skipped_keys}
    assert sorted(set(said.values())) == [False, True]
    assert {id(one) for _, one in flat(optimizers.optimizer_state(state["optimizer"]))} == owned


def test_of_a_float32_checkpoint_with_moments(tmp_path: Path) -> None:
    save_state_dict(job("float32", 3.0), str(tmp_path))
    state = job()
    load_state_dict(state, str(tmp_path), options=WITHOUT_MASTERS)
    assert masters(state) == [3.0]


def test_those_that_are_stored_are_what_is_stored(tmp_path: Path) -> None:
    saved = job(fill=3.0)
    for master in optimizers.optimizer_state(saved["optimizer"])["master_weights"].values():
        paddle.assign(paddle.full(master.shape, 3.001), master)
    save_state_dict(saved, str(tmp_path))
    state = job()
    load_state_dict(state, str(tmp_path))
    assert masters(state) == [float(np.float32(3.001))]


def test_those_of_parameters_that_are_left_are_left(tmp_path: Path) -> None:
    save_state_dict({"model": {"weight": job(fill=3.0)["model"].weight}}, str(tmp_path))
    state = job()
    options = LoadOptions(allow_missing=["optimizer.*", "model.bias"])
    load_state_dict(state, str(tmp_path), options=options)
    assert masters(state) == [1.0, 3.0]
    assert state["model"].bias.cast("float32").tolist() == [1.0] * 3


def test_those_that_do_not_fit_follow_and_others_do_not(tmp_path: Path) -> None:
    saved = job(fill=3.0)
    held = optimizers.optimizer_state(saved["optimizer"])["master_weights"]
    weight, bias = (held[getattr(saved["model"], name).name].numpy() + 1 for name in ("weight", "bias"))
    entries = {"weight.master_weight": weight[:2], "bias.master_weight": bias}
    save_state_dict(
        {"model": {"weight": saved["model"].weight, "bias": np.ones(9)}, "optimizer": entries}, str(tmp_path)
    )
    state = job()
    report = load_state_dict(state, str(tmp_path), options=LoadOptions(strict=False))
    (said,) = [line for line in report.skipped if line.startswith("optimizer.weight.master_weight:")]
    assert re.search(r"shape .*; set to its parameter$", said)
    # The stored master of the weight has another shape, so it follows; that of the bias is stored, which is not.
    assert masters(state) == [3.0, 4.0]


def test_of_a_layer_that_gives_copies_of_another_dtype(tmp_path: Path) -> None:
    """As ``amp.decorate(save_dtype=...)`` does it."""
    save_state_dict({"model": job("float32", 3.0)["model"]}, str(tmp_path))
    state = job()

    def as_float32(entries: dict[str, Any]) -> None:
        for key, tensor in entries.items():
            name, entries[key] = tensor.name, tensor.cast("float32")
            entries[key].name = name

    state["model"].register_state_dict_hook(as_float32)
    load_state_dict(state, str(tmp_path), options=WEIGHTS_ONLY)
    assert masters(state) == [3.0]


@has_stages
def test_of_shard_optimizer(tmp_path: Path) -> None:
    save_state_dict({"model": job(fill=3.0)["model"]}, str(tmp_path))
    state = job(placement=REPLICATE)
    state["optimizer"] = dist.shard_optimizer(state["optimizer"], dist.ShardingStage1("x", ALONE))
    load_state_dict(state, str(tmp_path), options=WEIGHTS_ONLY)
    assert masters(state) == [3.0]


def test_of_the_optimizer_in_another_one(tmp_path: Path) -> None:
    save_state_dict({"model": job(fill=3.0)["model"]}, str(tmp_path))
    state = job()
    inner = state["optimizer"]
    state["optimizer"] = paddle.incubate.optimizer.LookAhead(inner)
    load_state_dict(state, str(tmp_path), options=WEIGHTS_ONLY)
    assert masters({"optimizer": inner}) == [3.0]


class Cloning(paddle.optimizer.AdamW):
    """An optimizer whose state_dict has copies of its master weights."""

    def state_dict(self) -> Any:
        state = super().state_dict()
        return {**state, "master_weights": {name: one.clone() for name, one in state["master_weights"].items()}}

    def set_state_dict(self, state: Any) -> None:
        for name, master in state["master_weights"].items():
            paddle.assign(master, self._master_weights[name])


@pytest.mark.parametrize("is_stored", [True, False])
def test_of_an_optimizer_that_gives_copies_of_them(tmp_path: Path, is_stored: bool) -> None:
    saved, state = job(fill=3.0), job()
    for each in (saved, state):
        each["optimizer"] = Cloning(0.1, parameters=each["model"].parameters(), multi_precision=True)
        optimizers.make_accumulators(each["optimizer"])
    for master in saved["optimizer"]._master_weights.values():
        paddle.assign(paddle.full(master.shape, 3.5), master)
    save_state_dict(saved if is_stored else {"model": saved["model"]}, str(tmp_path))
    options = LoadOptions(allow_missing=["more", "optimizer.*"])
    load_state_dict({**state, "more": paddle.ones([1])}, str(tmp_path), options=options)
    assert masters(state) == [3.5 if is_stored else 3.0]


@pytest.mark.parametrize("as_dicts", [False, True])
def test_those_of_another_model_of_the_same_names_are_left(tmp_path: Path, as_dicts: bool) -> None:
    def named(fill: float) -> dict[str, Any]:
        with paddle.utils.unique_name.guard():
            made = job(fill=fill)
            optimizers.make_accumulators(made["optimizer"])
        return made

    save_state_dict({"a": named(3.0)["model"]}, str(tmp_path))
    one, other = named(1.0), named(2.0)
    assert one["model"].weight.name == other["model"].weight.name
    both = {"o": one["optimizer"], "p": other["optimizer"]}
    state = {
        "a": one["model"],
        **({name: each.state_dict() for name, each in both.items()} if as_dicts else both),
    }
    load_state_dict(state, str(tmp_path), options=LoadOptions(allow_missing=["o.*", "p.*"]))
    assert masters(other) == [2.0]
    assert masters(one) == [1.0 if as_dicts else 3.0]


@pytest.mark.parametrize("rest", [("b", "o"), ("o",), ("b", "o", "p")], ids="+".join)
@pytest.mark.parametrize("as_dicts", [False, True])
def test_a_name_that_is_given_twice_tells_no_parameter(tmp_path: Path, as_dicts: bool, rest: tuple[str, ...]) -> None:
    """The model ``a`` is loaded; ``b`` has its names, and the optimizer ``o``; ``p`` is the one of ``a``."""

    def named() -> dict[str, Any]:
        with paddle.utils.unique_name.guard():
            made = job(fill=1.0)
            optimizers.make_accumulators(made["optimizer"])
        return made

    one, other = named(), named()
    for master in other["optimizer"]._master_weights.values():
        paddle.assign(paddle.full(master.shape, 2.0), master)
    save_state_dict({"a": job(fill=3.0)["model"]}, str(tmp_path))
    parts = {"b": other["model"], "o": other["optimizer"], "p": one["optimizer"]}
    if as_dicts:
        parts |= {name: parts[name].state_dict() for name in ("o", "p")}
    state = {"a": one["model"], **{name: parts[name] for name in rest}}
    load_state_dict(state, str(tmp_path), options=LoadOptions(strict=False))
    assert masters(other) == [3.0 if as_dicts and rest == ("o",) else 2.0]
    assert masters(one) == [1.0 if as_dicts or "p" not in rest else 3.0]


def test_what_the_caller_wants_to_be_left_is_left(tmp_path: Path) -> None:
    saved, state = job(fill=3.0), job()
    save_state_dict(saved, str(tmp_path))
    options = LoadOptions(key_map=lambda key: None if key.endswith("master_weight") else key)
    load_state_dict(state, str(tmp_path), options=options)
    assert masters(state) == [1.0]


def test_a_part_of_a_master_weight_that_does_not_say_which_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_state_dict({"model": {"bias": np.arange(3, dtype=np.float32)}}, str(tmp_path))
    layer = job()["model"]
    part = paddle.zeros([2])
    part.name = f"{layer.bias.name}_fp32_master_0"
    state = {"model": {"bias": layer.bias}, "optimizer": {"master_weights": {layer.bias.name: part}}}
    report = load_state_dict(state, str(tmp_path), options=LoadOptions(strict=False, cast=True))
    assert part.tolist() == [0, 0]
    assert not any("set to its parameter" in line for line in report.skipped)
    assert "a master weight is left as it is, though its parameter was loaded" in caplog.text


def test_those_of_parameters_that_share_memory_and_disagree_are_left(tmp_path: Path) -> None:
    stored = {"a": {"weight": np.ones((4, 3), np.float32)}, "b": {"weight": np.zeros((4, 3), np.float32)}}
    save_state_dict(stored, str(tmp_path))
    state = job()
    optimizers.make_accumulators(state["optimizer"])
    for master in state["optimizer"]._master_weights.values():
        paddle.assign(paddle.full(master.shape, 1.25), master)
    two = {"a": {"weight": state["model"].weight}, "b": {"weight": state["model"].weight}}
    options = LoadOptions(strict=False, cast=True)
    load_state_dict({**two, "optimizer": state["optimizer"]}, str(tmp_path), options=options)
    assert masters(state) == [1.25]


def rows_of(first: int, last: int) -> np.ndarray[Any, Any]:
    return np.arange(16, dtype=np.float32).reshape(4, 4)[first:last]


WHOLE, CUT, COLUMNS = (lambda: paddle.to_tensor(rows_of(0, 4))), dist.Shard(0), dist.Shard(1)
HELD = {  # a parameter, its master weight, this rank, and what it has of the master weight then
    "whole to whole": (WHOLE, WHOLE, 0, rows_of(0, 4)),
    "whole to a cut, first rank": (WHOLE, lambda: on_pair(0, 2, CUT), 0, rows_of(0, 2)),
    "whole to a cut, second rank": (WHOLE, lambda: on_pair(2, 4, CUT), 1, rows_of(2, 4)),
    "cut to the same cut": (lambda: on_pair(2, 4, CUT), lambda: on_pair(2, 4, CUT), 1, rows_of(2, 4)),
    "cut to whole": (lambda: on_pair(0, 2, CUT), WHOLE, 0, None),
    "cut to another cut": (lambda: on_pair(0, 2, CUT), lambda: on_pair(0, 4, COLUMNS), 0, None),
    "another shape": (lambda: paddle.zeros([5, 4]), WHOLE, 0, None),
    "parameter elsewhere": (lambda: on_pair(0, 2, CUT), WHOLE, 2, None),
    "master elsewhere": (WHOLE, lambda: on_pair(0, 2, CUT), 2, "nothing"),
}


def on_pair(first: int, last: int, placement: Any) -> Any:
    """These rows of a matrix as what a rank has of a DistTensor on two ranks."""
    local = paddle.to_tensor(rows_of(first, last)[:, : 2 if placement is COLUMNS else 4])
    return from_local(local, [4, 4], dist.ProcessMesh([0, 1], dim_names=["x"]), [placement])


@lacks(FROM_LOCAL, "makes DistTensors of whole tensors only")
@pytest.mark.parametrize("case", HELD)
def test_each_rank_sets_its_own_part_if_it_has_that_of_the_parameter(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_parameter, make_master, rank, expected = HELD[case]
    parameter, master = make_parameter(), make_master()
    parameter.stop_gradient = False
    local = master._local_value() if master.is_dist() else master
    paddle.assign(paddle.full(local.shape, -1.0), local)
    leaves = Leaves(["/w", "/m"], [parameter, master], [], [], [])
    done = renew_masters(leaves, {id(parameter)}, {id(master)}, lambda _: ["w", "w_fp32_master_0"], rank)
    assert done == (set() if expected is None else {id(master)})
    assert np.array_equal(local.numpy(), expected if isinstance(expected, np.ndarray) else np.full(local.shape, -1.0))
    assert local.stop_gradient
    assert ("a master weight is left as it is" in caplog.text) is (expected is None)


@pytest.mark.skipif(not hasattr(paddle.nn.Layer, "sharded_state_dict"), reason="this Paddle has no ShardedWeights")
@pytest.mark.parametrize("form", ["as they are", "a range", "ranges", "another range", "another box"])
def test_those_among_sharded_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str) -> None:
    """Of sharding, a rank has a range of the elements of a master weight."""
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    weight = np.arange(12, dtype=np.float32).reshape(4, 3)
    save_state_dict({"model": {"weight": weight}}, str(tmp_path))
    state = job()
    optimizers.make_accumulators(state["optimizer"])
    model = state["model"].sharded_state_dict()
    rest = state["optimizer"].sharded_state_dict(model)
    expected = weight
    if form != "as they are":
        first, last, box = (0, 6, (2, 3)) if form == "another box" else (5, 11, (4, 3))
        part = paddle.zeros([last - first], "float32")
        place = (box, (4, 3), (0, 0), True, slice(first, last))
        rest["weight.w_0"] = ShardedWeight("weight.w_0", part, *place)
        expected = weight.ravel()[first:last]
        if form == "ranges":
            model["weight"] = ShardedWeight("weight", paddle.zeros([6], "bfloat16"), *place)
        if form == "another range":
            model["weight"] = ShardedWeight("weight", paddle.zeros([6], "bfloat16"), *place[:-1], slice(0, 6))
    master = rest["weight.w_0"].local_tensor
    report = load_state_dict(
        {"model": model, "optimizer": rest}, str(tmp_path), options=LoadOptions(strict=False, cast=True)
    )
    said = next(line for line in report.skipped if line.startswith("optimizer.weight.w_0: "))
    if form.startswith("another"):
        assert "a master weight is left as it is, though its parameter was loaded: weight.w_0" in caplog.text
        assert not said.endswith("; set to its parameter")
        assert not master.numpy().any()
    else:
        assert said.endswith("; set to its parameter")
        assert (master.numpy() == expected).all()
        assert master.stop_gradient


@pytest.mark.skipif(not hasattr(paddle.nn.Layer, "sharded_state_dict"), reason="this Paddle has no ShardedWeights")
@pytest.mark.parametrize("stored", ["model.weight", "optimizer.weight.w_0", "both"])
def test_those_among_sharded_weights_follow_only_what_was_loaded_and_only_if_they_were_not(
    tmp_path: Path, stored: str
) -> None:
    values = {"model.weight": np.full((4, 3), 3, np.float32), "optimizer.weight.w_0": np.full((4, 3), 5, np.float32)}
    save_state_dict({key: value for key, value in values.items() if stored in (key, "both")}, str(tmp_path))
    state = job()
    optimizers.make_accumulators(state["optimizer"])
    model = state["model"].sharded_state_dict()
    rest = state["optimizer"].sharded_state_dict(model)
    held = [rest[f"{name}.w_0"].local_tensor for name in ("weight", "bias")]
    for master in held:
        paddle.assign(paddle.full(master.shape, 7.0), master)
    load_state_dict({"model": model, "optimizer": rest}, str(tmp_path), options=LoadOptions(strict=False, cast=True))
    assert (held[0].numpy() == (3 if stored == "model.weight" else 5)).all()
    assert (held[1].numpy() == 7).all()


@pytest.mark.skipif(not hasattr(paddle.nn.Layer, "sharded_state_dict"), reason="this Paddle has no ShardedWeights")
@pytest.mark.parametrize(
    "other", ["a tensor", "a ShardedWeight", "with an optimizer", "no model, but an optimizer", "a tensor alone"]
)
def test_those_among_sharded_weights_of_a_key_that_two_models_have_are_left(tmp_path: Path, other: str) -> None:
    model = {"weight": np.ones((4, 3), np.float32), "bias": np.ones(3, np.float32)}
    save_state_dict({"teacher": model, "student": model}, str(tmp_path))
    state = job()
    optimizers.make_accumulators(state["optimizer"])
    teacher = job()["model"].sharded_state_dict()
    student = state["model"].sharded_state_dict()
    rest = state["optimizer"].sharded_state_dict(student)
    if other.startswith("a tensor"):
        student = dict(state["model"].state_dict())
    whole = {"teacher": teacher, "student": student, "optimizer": rest}
    masters_of = {key: weight.local_tensor for key, weight in rest.items() if key.endswith(".w_0")}
    if other.endswith("an optimizer"):
        second = job()
        optimizers.make_accumulators(second["optimizer"])
        whole["another"] = second["optimizer"].sharded_state_dict(second["model"].sharded_state_dict())
        masters_of |= {f"another.{key}": one.local_tensor for key, one in whole["another"].items() if ".w_0" in key}
    if other in ("no model, but an optimizer", "a tensor alone"):
        del whole["teacher"]
    for master in masters_of.values():
        paddle.assign(paddle.full(master.shape, 7.0), master)
    load_state_dict(whole, str(tmp_path), options=LoadOptions(strict=False, cast=True))
    assert {"bias.w_0", "weight.w_0"} <= set(masters_of)
    assert all((master.numpy() == 7).all() for master in masters_of.values())
