"""What a load says of keys that the checkpoint does not have: which stored one may be meant, and when to be silent."""

from __future__ import annotations

import ast
import logging
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import LoadOptions, StateDictMismatchError, stored
from paddle_dist_ckpt.loading.messages import WantedPaths
from paddle_dist_ckpt.loading.together import keys_of
from test.jobs import errors_of, load_alone, load_on, save_alone, try_load
from test.pace import slowness

LAYER = {"weight": (3, 2), "bias": (2,)}


def state(prefix: str = "", shapes: Any = None) -> dict[str, Any]:
    """A flat state_dict of zeros."""
    return {prefix + key: np.zeros(shape, "f4") for key, shape in (shapes or LAYER).items()}


def blocks(prefix: str = "", count: int = 3, start: int = 0) -> dict[str, Any]:
    """Layers that have all the same."""
    return {key: array for i in range(start, count) for key, array in state(f"{prefix}layers.{i}.fc.").items()}


def moments(prefix: str = "") -> dict[str, Any]:
    """What an optimizer has of such layers."""
    return state(prefix, {f"{key}.moment1": shape for key, shape in LAYER.items()})


def message(saved: dict[Any, Any], target: dict[Any, Any], folder: Path, **options: Any) -> str:
    save_alone(saved, folder)
    with pytest.raises(StateDictMismatchError) as caught:
        load_alone(target, folder, options=LoadOptions(**options))
    assert len(caught.value.problems) == str(caught.value).count("\n") - 1
    return str(caught.value)


CONTAINERS: dict[str, tuple[dict[Any, Any], dict[Any, Any], str, str]] = {
    "forgotten": ({"model": state()}, state(), "weight: * is 'model.weight' meant?", "has 'model' before such keys"),
    "forgotten, of layers": (
        {"model": blocks(), "ema": {"x": np.zeros(3)}},
        blocks(),
        "layers.1.fc.bias: * is 'model.layers.1.fc.bias' meant?",
        "key_map=lambda key: 'model.' + key)",
    ),
    "too much": (state(), {"model": state()}, "model.bias: * is 'bias' meant?", "no 'model' in such keys"),
    "of a wrapper": (
        blocks(),
        blocks("_layers."),
        "_layers.layers.2.fc.bias: * is 'layers.2.fc.bias' meant?",
        "key.replace('_layers.', '', 1)",
    ),
    "of a wrapper, inside": (
        {"model": blocks("_layers.")},
        {"model": blocks()},
        "model.layers.0.fc.bias: * is 'model._layers.layers.0.fc.bias' meant?",
        "has '_layers' within such keys: pass LoadOptions(key_map={'model': 'model._layers'})",
    ),
    "of wrappers, inside": (
        {"a": blocks("_layers."), "b": {"c": blocks("_layers.")}, "d": state()},
        {"a": blocks(), "b": {"c": blocks()}, "d": state()},
        "b.c.layers.0.fc.bias: * is 'b.c._layers.layers.0.fc.bias' meant?",
        "key_map={'a': 'a._layers', 'b.c': 'b.c._layers'})",
    ),
    "of a wrapper, with an optimizer": (
        {"model": state("_layers."), "optimizer": {**moments("_layers."), "lr": 1}},
        {"model": state(), "optimizer": {**moments(), "lr": 0}},
        "optimizer.weight.moment1: * is 'optimizer._layers.weight.moment1' meant?",
        "key_map={'model': 'model._layers'})",
    ),
    "two": ({"a": {"b": state()}}, state(), "weight: * is 'a.b.weight' meant?", "has 'a.b' before"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_that_was_forgotten_is_found(name: str, tmp_path: Path) -> None:
    saved, target, line, advice = CONTAINERS[name]
    text = message(saved, target, tmp_path)
    assert line.replace("*", "the state_dict has a tensor, in the checkpoint it is missing;") in text.splitlines()
    assert advice in text.splitlines()[-1]


def test_what_a_recipe_lacks_is_none_of_a_container(tmp_path: Path) -> None:
    options: dict[str, Any] = {"recipes": {"weight": stored("model.wieght")}, "key_map": lambda key: f"model.{key}"}
    text = message({"model": state()}, state(), tmp_path, **options)
    assert "it is made of model.wieght, which in the checkpoint is missing; is 'model.weight' meant?" in text
    assert text.endswith("(LoadOptions(strict=False) loads what fits)")


def test_the_advice_on_containers_works(tmp_path: Path) -> None:
    save_alone({"model": blocks()}, tmp_path / "a")
    report = load_alone(blocks(), tmp_path / "a", options=LoadOptions(key_map=lambda key: "model." + key))
    assert report.unused_keys == ()
    save_alone(blocks(), tmp_path / "b")
    options = LoadOptions(key_map=lambda key: key.replace("_layers.", "", 1))
    assert load_alone(blocks("_layers."), tmp_path / "b", options=options).unused_keys == ()


@pytest.mark.parametrize("name", ["of a wrapper, inside", "of wrappers, inside", "of a wrapper, with an optimizer"])
def test_the_advice_on_what_is_within_keys_works(name: str, tmp_path: Path) -> None:
    saved, target, *_ = CONTAINERS[name]
    advised = re.search(r"key_map=(.*)\)\)$", message(saved, target, tmp_path))
    assert advised is not None
    options = LoadOptions(key_map=ast.literal_eval(advised[1]))
    assert load_alone(target, tmp_path, options=options).unused_keys == ()


RENAMED: dict[str, tuple[dict[Any, Any], dict[Any, Any], dict[str, str]]] = {
    "model": ({"net": state(), "x": {"y": 1}}, {"model": state()}, {"model": "net"}),
    "files": (
        {
            "m.pdparams": state(),
            "m.pdopt": state("", {"linear_0.w_0_moment1_0": (3, 2), "linear_0.b_0_moment1_0": (2,)}),
        },
        {"model": state(), "optimizer": state("", {"weight.moment1": (3, 2), "bias.moment1": (2,)})},
        {"model": "m.pdparams", "optimizer": "m.pdopt"},
    ),
    "of layers": ({"net": blocks(), "ema": blocks(count=2)}, {"model": blocks()}, {"model": "net"}),
}


@pytest.mark.parametrize("name", RENAMED)
def test_containers_of_other_names_are_found(name: str, tmp_path: Path) -> None:
    saved, target, key_map = RENAMED[name]
    assert message(saved, target, tmp_path).endswith(f"pass LoadOptions(key_map={key_map}))")
    load_alone({"model": target["model"]}, tmp_path, options=LoadOptions(key_map={"model": key_map["model"]}))


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        ({"a": state(), "b": state()}, {"model": state()}),
        ({"a": state()}, {"model": state(), "ema": state()}),
        ({"a": state("c.")}, {"model": state()}),
        ({"a": {**state(), "more": np.zeros(1)}}, {"model": state()}),
        ({"a": state()}, {"a": state(), "model": state()}),
        (state("a."), state("model.")),
        ({"a": {"w": np.zeros(1)}}, {"model": {"w": np.zeros(1)}}),
    ],
)
def test_a_container_of_which_it_is_unsure_that_it_is_meant_is_not_offered(
    saved: Any, target: Any, tmp_path: Path
) -> None:
    assert "is stored below" not in message(saved, target, tmp_path)


SILENT: dict[str, tuple[dict[Any, Any], dict[Any, Any]]] = {
    "another shape": ({"model": state()}, {"weight": np.zeros((9, 9), "f4")}),
    "another layer, which is asked for": (blocks("m.", 2), blocks("m.", 3)),
    "another layer, which nobody asks for": (blocks("m.", 1), blocks("m.", 2, start=1)),
    "another layer of like name": (state("q_proj."), state("v_head.")),
    "another parameter's moment": (
        {"optimizer": state("head.", {"weight.moment1": (3, 2)})},
        {"optimizer": state("body.", {"weight.moment1": (3, 2)})},
    ),
    "a moment of what may be another parameter": (
        {"optimizer": state("", {"weight.moment1": (3, 2)})},
        {"model": state(), "optimizer": state("body.", {"weight.moment1": (3, 2)})},
    ),
    "a moment of what is a part of another": (
        {"optimizer": state("", {"weight.moment1": (3, 2), "bias.moment1": (2,)})},
        {"optimizer": state("body.", {"weight.moment1": (3, 2), "bias.moment1": (2,)})},
    ),
    "the only moment": (
        {"optimizer": state("", {"weight.moment1": (3, 2)})},
        {"optimizer": state("body.", {"weight.moment1": (3, 2)})},
    ),
    "a name of a run": (
        {"optimizer": state("", {"linear_0.w_0_moment1_0": (3, 2)})},
        state("", {"linear_1.w_0_moment1_0": (3, 2), "linear_0.w_0_moment1_0": (3, 2)}),
    ),
    "a value for a tensor": ({"model": {"weight": 3}}, {"weight": np.zeros(3)}),
    "too many": ({name: state() for name in "abc"}, state()),
}


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_offered_that_is_another_thing(name: str, tmp_path: Path) -> None:
    text = message(*SILENT[name], tmp_path)
    assert "meant?" not in text
    assert "such keys" not in text


def test_of_two_that_may_be_meant_the_shape_decides(tmp_path: Path) -> None:
    saved = {"model": state(), "other": {"weight": np.zeros((5, 5)), "bias": np.zeros(5)}}
    text = message(saved, state(), tmp_path)
    assert "is 'model.weight' meant?" in text
    assert "other" not in text


def test_a_container_of_an_optimizers_entries_is_found_with_all_of_them(tmp_path: Path) -> None:
    shapes = {"weight.moment1": (3, 2), "bias.moment1": (2,)}
    assert "is 'optimizer.bias.moment1' meant?" in message(
        {"optimizer": state("", shapes)}, state("", shapes), tmp_path
    )


def test_a_wrapper_is_found_in_the_model_and_its_optimizer(tmp_path: Path) -> None:
    shapes = {"weight.moment1": (3, 2), "bias.moment1": (2,)}
    saved = {"model": state(), "optimizer": state("", shapes)}
    text = message(saved, {"model": state("_layers."), "optimizer": state("_layers.", shapes)}, tmp_path)
    assert "is 'model.weight' meant?" in text
    assert "is 'optimizer.bias.moment1' meant?" in text


RUN = {"linear_0.w_0_moment1_0": np.zeros((3, 2), "f4")}
OTHER_RUN = {"linear_7.w_0_moment1_0": np.zeros((3, 2), "f4")}


@pytest.mark.parametrize(("stored", "calls"), [(RUN, "save and load"), (state("", {"weight.moment1": (3, 2)}), "load")])
def test_names_of_a_run_need_the_model_in_the_calls_that_lack_it(tmp_path: Path, stored: Any, calls: str) -> None:
    text = message({"optimizer": stored}, {"optimizer": OTHER_RUN}, tmp_path)
    assert f"told by its parameters: {calls} the model in the same call)" in text


def test_a_cast_is_not_advised_where_it_was_asked_for(tmp_path: Path) -> None:
    text = message({"w": np.zeros(3, "f4")}, {"w": np.zeros(3, "i4")}, tmp_path, cast=True)
    assert "a cast that is not done" in text
    assert "LoadOptions(cast=True)" not in text


@pytest.mark.parametrize("recipes", [None, {"w": stored("w")}], ids=["as it is", "recipe"])
def test_a_cast_is_advised_only_where_it_is_done(tmp_path: Path, recipes: Any) -> None:
    advice = "LoadOptions(cast=True) converts dtypes"
    assert advice in message({"w": np.zeros(3, "f4")}, {"w": np.zeros(3, "f2")}, tmp_path / "a", recipes=recipes)
    assert advice not in message({"w": np.zeros(3, "f4")}, {"w": np.zeros(3, "i4")}, tmp_path / "b", recipes=recipes)


def test_a_matrix_that_is_stored_transposed_is_told_with_its_recipe(tmp_path: Path) -> None:
    layer, other = state("fc."), {"fc.weight": np.zeros((2, 3), "f4")}
    text = message({"net": layer}, {"model": other}, tmp_path / "a", key_map={"model": "net"})
    recipes = {"model.fc.weight": stored("net.fc.weight").T}
    assert "; LoadOptions(recipes={'model.fc.weight': stored('net.fc.weight').T}) transposes what is stored; " in text
    assert text.endswith("square matrices may need it too, which fit either way)")
    load_alone({"model": other}, tmp_path / "a", options=LoadOptions(recipes=recipes))
    for shape in ((2, 4), (3, 2, 1), (2, 3, 1)):
        assert "recipes" not in message(layer, {"fc.weight": np.zeros(shape, "f4")}, tmp_path / str(shape))


def warnings_of(saved: dict[Any, Any], target: dict[Any, Any], folder: Path, caplog: Any, **options: Any) -> list[str]:
    save_alone(saved, folder)
    with caplog.at_level(logging.WARNING, "paddle_dist_ckpt"):
        load_alone(target, folder, options=LoadOptions(**options))
    return [record.getMessage() for record in caplog.records]


MOMENTS = {"model": state(), "optimizer": {**state("", {"weight.moment1": (3, 2)}), "LR_Scheduler": {"last_epoch": 3}}}


@pytest.mark.parametrize("optimizer", [{}, {"LR_Scheduler": {"last_epoch": 0}}], ids=["empty", "scheduler"])
def test_an_optimizer_that_has_not_stepped_is_told(optimizer: Any, tmp_path: Path, caplog: Any) -> None:
    (text,) = warnings_of(MOMENTS, {"model": state(), "optimizer": optimizer}, tmp_path, caplog)
    assert f"{tmp_path}: optimizer has no tensors, so none of the 1 that are stored there are loaded" in text
    assert "pass the optimizer itself, beside its model; or, for its sharded_state_dict(), take a step first" in text


def test_an_optimizer_is_not_called_empty_if_its_entries_are_called_otherwise_in_the_checkpoint(tmp_path: Path) -> None:
    save_alone({"optimizer": state("", {"weight/moment1_0": (3, 2)})}, tmp_path)
    scheduler = {"LR_Scheduler": {"last_epoch": 0}}
    full = {"optimizer": {**state("", {"weight.moment1": (3, 2)}), **scheduler}}
    for ranks in ([full], [full, {"optimizer": scheduler}]):
        for error in errors_of(try_load(ranks, tmp_path), StateDictMismatchError):
            assert "has no tensors" not in str(error)


@pytest.mark.parametrize("target", [{}, {"optimizer": {}}])
def test_a_state_that_asks_for_nothing_is_told(target: Any, tmp_path: Path, caplog: Any) -> None:
    assert len(warnings_of(MOMENTS, target, tmp_path, caplog)) == 1


def test_an_empty_dict_is_no_mistake_where_nothing_is_stored_or_something_is_asked_for(
    tmp_path: Path, caplog: Any
) -> None:
    for i, (saved, target) in enumerate(
        [
            ({"model": state(), "optimizer": {}}, {"model": state(), "optimizer": {}}),
            ({"model": state(), "config": {"a": 1}}, {"model": state(), "config": {}}),
            (MOMENTS, MOMENTS),
            (MOMENTS, {"model": state()}),
            ({}, {}),
        ]
    ):
        assert warnings_of(saved, target, tmp_path / str(i), caplog) == []
    save_alone(MOMENTS, tmp_path / "c")
    load_on([{"model": state(), "optimizer": {}}, MOMENTS], tmp_path / "c")  # a rank that has none of its own
    load_on([{}, MOMENTS], tmp_path / "c")
    assert caplog.records == []


def test_very_many_empty_dicts_beside_many_tensors_take_no_time(tmp_path: Path) -> None:
    tensors = state("", {str(i): (1,) for i in range(10_000)})
    save_alone(tensors, tmp_path)
    start = time.process_time()
    load_alone({**tensors, "none": {str(i): {} for i in range(5000)}}, tmp_path)
    assert time.process_time() - start < 4 * slowness()


def test_strict_all_says_why_an_optimizers_entries_are_not_asked_for(tmp_path: Path) -> None:
    text = message(MOMENTS, {"model": state(), "optimizer": {}}, tmp_path, strict="all")
    assert "optimizer has no tensors" in text.splitlines()[-1]


def test_hints_are_the_same_on_every_rank(tmp_path: Path) -> None:
    save_alone({"model": blocks()}, tmp_path)
    first, second = errors_of(try_load([blocks(), blocks()], tmp_path), StateDictMismatchError)
    assert str(first) == str(second)
    assert "is 'model.layers.1.fc.weight' meant?" in str(first)


def test_very_many_missing_keys_of_a_large_dict_take_no_longer(tmp_path: Path) -> None:
    count = 60_000
    save_alone({"model": {f"a{i}": 0 for i in range(count)}}, tmp_path)
    target = {"model": {f"b{i}": 0 for i in range(count)}}
    start = time.process_time()
    load_alone(target, tmp_path, options=LoadOptions(strict=False))
    assert time.process_time() - start < 5 * slowness()  # each with each took 15 s


def test_what_very_many_ranks_want_is_looked_at_once() -> None:
    wanted = [WantedPaths([f"/layers/~l{i}/w" for i in range(2000)], moved={"/layers/~l0/w": "x"})] * 500
    start = time.process_time()
    assert keys_of(wanted) == {"x", *(f"layers.{i}.w" for i in range(1, 2000))}
    assert time.process_time() - start < 2 * slowness()  # each of each rank took 9 s
