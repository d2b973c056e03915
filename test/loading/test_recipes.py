"""Tensors that are made of boxes of stored ones: LoadOptions.recipes."""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    CheckpointNotFoundError,
    LoadOptions,
    LoadReport,
    PerRank,
    Recipe,
    StateDictMismatchError,
    UnsupportedValueError,
    concat,
    export,
    read_metadata,
    split,
    stack,
    stored,
)
from paddle_dist_ckpt.control import NoTransport, SoloHub
from paddle_dist_ckpt.core.box import Box, cut_flat_range, whole
from paddle_dist_ckpt.core.dtypes import DTYPES, DType, arithmetic_dtype
from paddle_dist_ckpt.core.parts import NEW, Arranged, IdleStatement, Part, WantedTensor
from paddle_dist_ckpt.core.tensors import Reduction
from paddle_dist_ckpt.folder.selection import Selection
from paddle_dist_ckpt.loading import part_targets
from paddle_dist_ckpt.loading.key_map import OWN_KEY
from paddle_dist_ckpt.loading.load import load
from paddle_dist_ckpt.loading.merged import load_merged
from paddle_dist_ckpt.loading.messages import WantedPaths
from paddle_dist_ckpt.loading.reading import LoadContext
from paddle_dist_ckpt.loading.recipes import KeyPattern, idle_hints, match_recipes
from paddle_dist_ckpt.loading.rehearsal import rehearse
from paddle_dist_ckpt.loading.stored_tensors import stored_tensors
from paddle_dist_ckpt.loading.together import check_same_sources
from paddle_dist_ckpt.planning.recipe_parts import make_parts, recipe_of
from paddle_dist_ckpt.recipes import distinct_text
from paddle_dist_ckpt.storage import as_source
from paddle_dist_ckpt.testing import NumpyAdapter, ShardedArray, run_ranks
from test.jobs import (
    LAYOUTS,
    CountingStorage,
    all_ok,
    check_pieces,
    data_files,
    data_reads,
    errors_of,
    little_memory,
    load_alone,
    load_on,
    load_whole,
    make_array,
    rows_of,
    same_bits,
    save_alone,
    save_on,
    sharded,
    split_rows,
    try_load,
)
from test.pace import slowness
from test.recipe_cases import MADE, SAVED, Arrays, expected, save_in_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have saved, each some rows of each tensor."""
    return save_in_rows(SAVED, tmp_path_factory.mktemp("saved"))


def options(recipes: Any, **more: Any) -> LoadOptions:
    return LoadOptions(timeout=60, recipes=recipes, **more)


@pytest.mark.parametrize("exchange", ["never", "always"])
@pytest.mark.parametrize("dimension", [0, 1])
def test_everything_on_every_layout(folder: Path, exchange: str, dimension: int) -> None:
    recipes = {name: recipe for name, (recipe, _) in MADE.items()}
    states: list[dict[str, Any]] = [{}, {}, {}]
    for name in MADE:
        array = expected(name)
        along = min(dimension, array.ndim - 1)
        parts = split_rows(array, 3, False, along) if array.ndim else [np.zeros_like(array) for _ in states]
        for state, part in zip(states, parts, strict=True):
            state[name] = part
    reports = load_on(states, folder, options=options(recipes, exchange=exchange))
    for state in states:
        for name, part in state.items():
            if isinstance(part, ShardedArray):
                check_pieces(part, expected(name))
            else:
                assert part.tobytes() == expected(name).tobytes()
    assert all(report.skipped == () and report.unused_keys == ("half",) for report in reports)


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("name", ["columns", "permuted", "interleaved"])
def test_into_memory_of_any_strides(folder: Path, how: str, name: str) -> None:
    array = expected(name)
    tensor = sharded(array, [rows_of(array.shape, rank, 2, 1) for rank in range(2)], how, fill=False)
    load_on([{"x": tensor}], folder, options=options({"x": MADE[name][0]}))
    check_pieces(tensor, array)


@pytest.mark.parametrize("name", ["columns", "permuted", "interleaved", "slice of a concatenation"])
def test_into_flattened_ranges(folder: Path, name: str) -> None:
    array = expected(name)
    cuts = [0, 1, array.size // 3 + 1, array.size - 2, array.size]
    states = [{"x": sharded(array, cut_flat_range(array.shape, a, b), fill=False)} for a, b in itertools.pairwise(cuts)]
    load_on(states, folder, options=options({"x": MADE[name][0]}))
    for state in states:
        check_pieces(state["x"], array)


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    save_alone({"a": make_array((64, 1024)), "b": make_array((64, 1024), seed=1)}, tmp_path)  # blocks of 4 KiB
    target = {"x": np.zeros((2, 1024), "float32")}
    log: list[tuple[str, int, int]] = []
    recipes = {"x": concat(stored("a")[3:4], stored("b")[9:10])}
    report = load_alone(target, CountingStorage(tmp_path, log), options=options(recipes))
    assert rehearse(read_metadata(tmp_path), recipes).nbytes == report.bytes_read
    assert report.bytes_read == target["x"].nbytes == sum(stop - start for _, start, stop in data_reads(tmp_path, log))
    assert report.unused_keys == ()


def test_patterns(tmp_path: Path) -> None:
    saved = {f"m.{i}.{name}": make_array((2, 3), seed=10 * i + n) for i in (0, 1, 12) for n, name in enumerate("qk")}
    save_alone(saved, tmp_path)
    target = {f"net.{i}.qk": np.zeros((3, 4), "float32") for i in (0, 1, 12)} | {"m.1.q": np.zeros((2, 3), "float32")}
    target["net.1.qk"] = np.zeros((2, 3), "float32")
    recipes = {
        "net.{i}.qk": concat(stored("m.{i}.q").T, stored("m.{i}.k").T, axis=1),
        "net.1.qk": stored("m.0.k"),  # the key itself counts more, wherever it stands
    }
    report = load_alone(target, tmp_path, options=options(recipes))
    for i in (0, 12):
        assert target[f"net.{i}.qk"].tolist() == np.hstack([saved[f"m.{i}.q"].T, saved[f"m.{i}.k"].T]).tolist()
    assert target["net.1.qk"].tolist() == saved["m.0.k"].tolist()
    assert target["m.1.q"].tolist() == saved["m.1.q"].tolist()
    assert report.unused_keys == ("m.1.k",)


@pytest.mark.parametrize(
    ("pattern", "key", "found"),
    [
        ("a.{i}.b", "a.7.b", {"i": "7"}),
        ("a.{i}.b", "a.x_y.b", {"i": "x_y"}),
        ("a.{i}.b", "a.7.8.b", None),
        ("a.{i}.b", "a..b", None),
        ("a.{i}.b", "aa.7.b", None),
        ("a.{i}.b", "a.7.bb", None),
        ("a.{i}.b", "aX7.b", None),
        ("layer{i}.{p}", "layer12.w", {"i": "12", "p": "w"}),
        ("{i}.{i}", "3.3", {"i": "3"}),
        ("{i}.{i}", "3.4", None),
        ("{i", "{i", None),
    ],
)
def test_what_a_pattern_matches(pattern: str, key: str, found: dict[str, str] | None) -> None:
    recipe = stored("/".join(f"{{{name}}}" for name in found or {}))
    matching = match_recipes({pattern: recipe}, {"/path": key})
    if found is None and "}" in pattern:
        assert (matching.recipes, matching.patterns) == ({}, {pattern: False})
    else:
        made = {path: filled.recipe for path, filled in matching.recipes.items()}
        assert made == {"/path": stored("/".join((found or {}).values()))}
        assert matching.patterns == {pattern: True}


def test_nested_state_dicts_have_flat_keys(tmp_path: Path) -> None:
    save_alone({"old": {"a.b": SAVED["q"], "n": [SAVED["k"]]}}, tmp_path)
    target = {"new": {"w": [np.zeros((12, 6), "float32")]}, "old": {"a.b": np.zeros((8, 6), "float32")}}
    load_alone(target, tmp_path, options=options({"new.w.0": concat(stored("old.a.b"), stored("old.n.0"))}))
    assert target["new"]["w"][0].tolist() == np.concatenate([SAVED["q"], SAVED["k"]]).tolist()  # type: ignore[index]
    assert target["old"]["a.b"].tolist() == SAVED["q"].tolist()  # type: ignore[call-overload]


def test_a_key_with_a_recipe_does_not_go_through_the_key_map(folder: Path) -> None:
    asked: list[str] = []

    def key_map(key: str) -> str | None:
        asked.append(key)
        return {"y": "v"}.get(key)

    target = {"x": np.zeros((6, 8), "float32"), "y": np.zeros((4, 6), "float32"), "z": np.ones(1, "float32")}
    load_alone(target, folder, options=options({"x": stored("q").T}, key_map=key_map))
    assert target["x"].tolist() == SAVED["q"].T.tolist()
    assert target["y"].tolist() == SAVED["v"].tolist()
    assert target["z"].tolist() == [1]
    assert sorted(asked) == ["y", "z"]


def test_sums_and_tied_tensors(folder: Path) -> None:
    zero, one = (
        ShardedArray(
            (6, 8), DTYPES["float32"], [Box((0, 0), (6, 8))], [make_array((6, 8))], False, Reduction("sum", i, 2)
        )
        for i in range(2)
    )
    load_on([{"x": zero}, {"x": one}], folder, options=options({"x": stored("q").T}))
    assert zero.pieces[0].tobytes() == SAVED["q"].T.tobytes()
    assert not one.pieces[0].any()
    memory = np.zeros((6, 8), "float32")
    tied = {"x": memory, "y": memory.T}
    load_alone(tied, folder, options=options({"x": stored("q").T, "y": stored("q")}))
    assert memory.tobytes() == SAVED["q"].T.tobytes()
    memory = np.zeros((4, 6), "float32")
    with pytest.raises(StateDictMismatchError, match="shares memory"):
        load_alone({"k": memory, "y": memory}, folder, options=options({"y": stored("v")}))
    assert not memory.any()


@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.parametrize("rows", [(0, 1), (1, 3)])
def test_a_target_whose_parts_share_memory_is_a_mismatch(folder: Path, rows: tuple[int, int], step: int) -> None:
    memory = np.zeros(16, "float32")
    parts = [stored("q")[slice(*rows), 0:3], stored("v")[0:1, 0:3]]
    target = np.lib.stride_tricks.as_strided(memory, (1 + rows[1] - rows[0], 3), (step, 4))
    with pytest.raises(StateDictMismatchError, match="x: elements of the target share memory with each other"):
        load_alone({"x": target}, folder, options=options({"x": concat(*parts)}))
    assert not memory.any()


# -- dtypes


def test_casts(folder: Path, tmp_path: Path) -> None:
    bfloat16 = arithmetic_dtype(DTYPES["bfloat16"])
    values = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
    save_alone({"a": values, "i": np.arange(6, dtype="int16")}, tmp_path)
    target: dict[str, Any] = {
        "x": np.zeros((6, 8), bfloat16),
        "y": np.zeros((4, 6), bfloat16),
        "i": np.zeros(6, "int64"),
    }
    recipes = {
        "x": stored("a").T.cast("bfloat16"),
        "y": stored("a").cast("bfloat16")[2:6],
        "i": stored("i").cast("int64"),
    }
    load_alone(target, tmp_path, options=options(recipes))
    assert target["x"].tobytes() == values.astype(bfloat16).T.tobytes()
    assert target["y"].tobytes() == values.astype(bfloat16)[2:6].tobytes()
    assert target["i"].tolist() == list(range(6))
    wide = {"x": np.zeros((8, 6), "float32")}
    recipe = concat(stored("half").cast("float32"), stored("k"))
    load_alone(wide, folder, options=options({"x": recipe}))
    assert wide["x"].tobytes() == np.concatenate([SAVED["half"].astype("float32"), SAVED["k"]]).tobytes()
    wide["x"][...] = 0
    load_alone({"x": wide["x"][:4]}, folder, options=options({"x": stored("half")}, cast=True))
    assert wide["x"][:4].tobytes() == SAVED["half"].astype("float32").tobytes()


@pytest.mark.parametrize(
    ("recipe", "shape", "dtype", "cast", "texts"),
    [
        (
            stored("half"),
            (4, 6),
            "float32",
            False,
            ["the target has dtype float32", "makes bfloat16", "half", "cast=True"],
        ),
        (stored("k"), (4, 6), "int32", True, ["the target has dtype int32", "makes float32", "not done"]),
        (stored("k").cast("int32"), (4, 6), "int32", False, ["stored('k').cast('int32')", "not done"]),
        (stored("k").cast("float99"), (4, 6), "float32", False, ["no such dtype"]),
        (stored("k").cast("float64"), (4, 6), "float32", True, ["casts to float64, and not to float32"]),
        (stored("none").cast("float64"), (0, 6), "float32", True, ["casts to float64, and not to float32"]),
        (stored("k").cast("float16").cast("float32"), (4, 6), "float32", True, ["by way of float16"]),
        (concat(stored("k"), stored("half")), (8, 6), "float32", True, ["stored('half') has dtype bfloat16"]),
        (stored("gone"), (4, 6), "float32", False, ["x: ", "made of gone", "missing"]),
        (concat(stored("k"), stored("sclar")), (4, 6), "float32", False, ["made of sclar", "is 'scalar' meant?"]),
        (stored("k"), (6, 4), "float32", False, ["the target has shape [6, 4]", "makes [4, 6]", "of k"]),
        (stored("k").permute(1, 0, 2), (4, 6), "float32", False, ["3 axes", "[4, 6]", "stored('k').permute(1, 0, 2)"]),
        (stored("k")[:5], (5, 6), "float32", False, ["stored('k')[:5]", "no such part"]),
        (stored("k")[3:1], (0, 6), "float32", False, ["no such part"]),
        (stored("k")[:, :, :1], (4, 6), "float32", False, ["3 slices"]),
        (stored("k")[:, :, ..., :1], (4, 6), "float32", False, ["3 slices", "stored('k')[:, :, ..., :1]"]),
        (stored("k")[..., 7:], (4, 0), "float32", False, ["no such part", "stored('k')[..., 7:]"]),
        (split(stored("q"), 2, axis=-3)[0], (2, 6), "float32", False, ["no axis -3", "[8, 6]"]),
        (split(stored("q"), 4, axis=-1)[0], (8, 1), "float32", False, ["6 elements along axis 1 make no 4 parts"]),
        (concat(stored("scalar"), axis=-1), (), "float32", False, ["no axis -1"]),
        (split(stored("q"), 3)[0], (2, 6), "float32", False, ["8 elements along axis 0 make no 3 parts"]),
        (split(stored("q"), 2, axis=2)[0], (2, 6), "float32", False, ["no axis 2"]),
        (
            concat(stored("q"), stored("k"), axis=1),
            (8, 12),
            "float32",
            False,
            ["stored('k') has shape [4, 6]", "[8, 6]"],
        ),
        (concat(stored("q"), stored("cube")), (8, 6), "float32", False, ["stored('cube') has shape [3, 4, 5]"]),
        (concat(stored("q"), stored("q").unsqueeze(2)), (16, 6), "float32", False, ["has shape [8, 6, 1]"]),
        (concat(stored("q"), axis=2), (8, 6), "float32", False, ["no axis 2"]),
        (stored("q")[8], (6,), "float32", False, ["no such part", "stored('q')[8:9]"]),
        (stored("q")[-9], (6,), "float32", False, ["no such part"]),
        (stored("q")[0, 0, 0], (), "float32", False, ["3 slices"]),
        (
            stored("q").squeeze(1),
            (8,),
            "float32",
            False,
            ["a tensor of shape [8, 6] has not one element along axis 1"],
        ),
        (stored("q").squeeze(2), (8,), "float32", False, ["no axis 2"]),
        (stored("q").unsqueeze(3), (8, 6, 1), "float32", False, ["no axis 3"]),
        (stack(stored("q"), stored("k")), (2, 8, 6), "float32", False, ["has shape [1, 4, 6]", "[1, 8, 6]"]),
        (concat(*[stored("q")] * 99), (1, 6), "float32", False, ["shape [1, 6], its recipe makes [792, 6]"]),
    ],
)
def test_what_does_not_fit(folder: Path, recipe: Recipe, shape: Any, dtype: str, cast: bool, texts: list[str]) -> None:
    def states() -> list[dict[str, Any]]:
        return [{"x": np.ones(shape, dtype), "q": np.ones((8, 6), "float32")} for _ in range(2)]

    kept = states()
    errors = errors_of(try_load(kept, folder, options=options({"x": recipe}, cast=cast)), StateDictMismatchError)
    for error in errors:
        (problem,) = error.problems
        assert problem.startswith("x: ")
        assert all(text in str(error) for text in texts), error
    assert all((state["x"] == 1).all() and (state["q"] == 1).all() for state in kept)
    relaxed = states()
    for report in load_on(relaxed, folder, options=options({"x": recipe}, cast=cast, strict=False)):
        (skipped,) = report.skipped
        assert skipped == errors[0].problems[0]
    assert all((state["x"] == 1).all() and (state["q"] == SAVED["q"]).all() for state in relaxed)


def test_a_value_is_no_tensor(tmp_path: Path) -> None:
    save_alone({"a": "x" * 10_000, "b": 3, "c": np.ones(2)}, tmp_path)
    for key in ("a", "b"):
        with pytest.raises(StateDictMismatchError, match=f"made of {key}, which in the checkpoint is a value"):
            load_alone({"x": np.zeros(2)}, tmp_path, options=options({"x": stored(key)}))


def test_recipes_that_no_rank_has_a_tensor_for(folder: Path) -> None:
    recipes = {"x": stored("k"), "y": stored("v"), "z.{i}": stored("v"), "n": stored("k")}
    states: list[dict[str, Any]] = [{"x": np.zeros((4, 6), "float32"), "n": None}, {"y": np.zeros((4, 6), "float32")}]
    for error in errors_of(try_load(states, folder, options=options(recipes)), StateDictMismatchError):
        lines = [line for line in error.problems if "no rank has such a tensor" in line]
        assert [line.partition(":")[0] for line in lines] == ["z.{i}", "n"]
    del recipes["z.{i}"], recipes["n"], states[0]["n"]
    load_on(states, folder, options=options(recipes))
    assert states[0]["x"].tolist() == SAVED["k"].tolist()
    assert states[1]["y"].tolist() == SAVED["v"].tolist()


def test_each_rank_has_its_own_recipes(folder: Path) -> None:
    recipes = [{"x": stored("k").T}, {"x": stored("v").T}]
    states = [{"x": np.zeros((6, 4), "float32")} for _ in range(2)]

    def work(rank: Any) -> LoadReport:
        return rank.load(states[rank.rank], folder, None, options(recipes[rank.rank]))  # type: ignore[no-any-return]

    reports = all_ok(run_ranks(2, work))
    assert [state["x"].T.tolist() for state in states] == [SAVED["k"].tolist(), SAVED["v"].tolist()]
    assert not {"k", "v"} & set(reports[0].unused_keys)


def test_an_array_that_an_object_has_too_goes_to_both(tmp_path: Path) -> None:
    class Holder:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return dict(self.state)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    saved = Holder()
    saved.state = {"table": np.arange(6.0).reshape(2, 3)}
    save_alone({"holder": saved}, tmp_path)
    target: dict[str, Any] = {"x": np.zeros((3, 2))}
    load_alone(target, tmp_path, options=options({"x": stored("holder.table").T}))
    assert target["x"].tolist() == saved.state["table"].T.tolist()
    with pytest.raises(StateDictMismatchError):  # what does not fit is not handed to whom it is not for either
        load_alone({"x": np.zeros((2, 2))}, tmp_path, options=options({"x": stored("holder.table")}))


def test_what_every_rank_has_of_its_own_is_no_tensor(tmp_path: Path) -> None:
    states = [{"own": PerRank(np.arange(3.0) + rank), "b": np.ones(3)} for rank in range(2)]
    save_on(states, tmp_path)
    for key in ("own", "own.0", "own.1"):
        target = [{"x": np.zeros(3)} for _ in range(3)]
        for error in errors_of(try_load(target, tmp_path, options=options({"x": stored(key)})), StateDictMismatchError):
            (problem,) = error.problems
            assert problem.startswith(f"x: it is made of {key}, which in the checkpoint is what ")
            assert problem.endswith("rank has saved of its own")
        assert not any(state["x"].any() for state in target)
    whole = load_whole(tmp_path, options=options({"x": stored("b")}))
    assert {r: own.tolist() for r, own in whole["own"].items()} == {0: [0.0, 1.0, 2.0], 1: [1.0, 2.0, 3.0]}
    wanted = [{"own": PerRank(None)} for _ in range(2)]  # a target of a value has no recipe
    for error in errors_of(try_load(wanted, tmp_path, options=options({"own": stored("b")})), StateDictMismatchError):
        assert error.problems == ("own: a recipe, and no rank has such a tensor",)


# -- merged loads, and what a load would do


MANY: Arrays = {f"m.{i}.{name}": make_array((3, 4), seed=10 * i + n) for i in (0, 1, 12) for n, name in enumerate("qk")}
FUSED = {"net.{i}.qk": concat(stored("m.{i}.q").T, stored("m.{i}.k").T, axis=1)}


def nested(arrays: Arrays) -> dict[str, Any]:
    return {"m": {i: {name: arrays[f"m.{i}.{name}"] for name in "qk"} for i in ("0", "1", "12")}}


@pytest.mark.parametrize("flat", [False, True])
def test_a_merged_load_makes_what_stored_keys_tell(tmp_path: Path, flat: bool) -> None:
    other = make_array((5,), seed=9)
    save_alone({**nested(MANY), "more": {"w": other, "step": 7}, "text": "x" * 9000}, tmp_path)
    recipes = FUSED | {
        "half": stored("m.1.q")[1:],
        "net.0.qk": stored("m.0.k").cast("float64"),
        "none": stored("more.w")[:0],
    }
    found = load_whole(tmp_path, flat=flat, options=options(recipes))
    expected = {f"net.{i}.qk": np.hstack([MANY[f"m.{i}.q"].T, MANY[f"m.{i}.k"].T]) for i in (1, 12)}
    expected |= {"half": MANY["m.1.q"][1:], "net.0.qk": MANY["m.0.k"].astype("float64"), "none": other[:0]}
    expected["m.0.q"] = MANY["m.0.q"]  # of which no recipe is, since the key itself counts more than a pattern
    assert set(found) == {*expected, "more.step", "text"}
    assert (found["more.step"], len(found["text"])) == (7, 9000)
    for key, array in expected.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape)
        assert found[key].tobytes() == array.tobytes()
    assert set(load_whole(tmp_path, keys=["net.1*"], options=options(recipes))) == {"net.1.qk", "net.12.qk"}
    assert set(load_whole(tmp_path, prefix="net", options=options(recipes))) == {"0.qk", "1.qk", "12.qk"}
    assert load_whole(tmp_path, prefix="more", options=options(recipes)) == {"step": 7}  # of what is stored as well
    with pytest.raises(CheckpointNotFoundError, match="no key matches"):
        load_whole(tmp_path, keys=["m.1.q"], options=options(recipes))


def test_a_merged_load_reads_what_is_chosen_alone(tmp_path: Path) -> None:
    save_alone({"a": make_array((64, 1024)), "b": make_array((64, 1024), seed=1)}, tmp_path)
    recipes = {"x": concat(stored("a")[3:4], stored("b")[9:10]), "y": stored("a").T}
    log: list[tuple[str, int, int]] = []
    storage = CountingStorage(tmp_path, log)
    found = load_merged(storage, NumpyAdapter(), None, Selection(None, ["x"]), True, options(recipes))
    assert list(found) == ["x"]
    assert sum(stop - start for _, start, stop in data_reads(tmp_path, log)) == 2 * 4096


@pytest.mark.parametrize("key", ["x", "b"])
def test_a_merged_load_of_what_is_not_there_takes_no_memory(tmp_path: Path, key: str) -> None:
    class NoMemory(NumpyAdapter):
        def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
            raise AssertionError("there is nothing to fill it with")

    save_alone({"a": make_array((64, 1024)), "b": make_array((3,))}, tmp_path)
    (file,) = data_files(tmp_path)
    os.truncate(file, 1000)
    recipes = options({"x": stored("a").T})
    with pytest.raises(CheckpointCorruptedError, match="1,?000 bytes"):
        load_merged(as_source(tmp_path), NoMemory(), None, Selection(None, [key]), True, recipes)


@pytest.mark.parametrize(
    ("recipes", "problem"),
    [
        ({"x": stored("m.0.z")}, "x: it is made of m.0.z, which in the checkpoint is missing"),
        ({"n.{i}": concat(stored("m.{i}.q"), stored("m.{i}.z"))}, "n.0: it is made of m.0.z"),
        ({"x": stored("m.0.q")[4:]}, "x: stored('m.0.q')[4:]: no such part"),
        ({"n.{i}.{j}": concat(stored("m.{i}.q"), stored("m.{j}.q"))}, "n.{i}.{j}: no stored key of its recipe has all"),
        ({"n.{i}": stored("z.{i}.q")}, "n.{i}: the checkpoint has no tensor like z.{i}.q"),
        ({"x": stored("step")}, "x: it is made of step, which in the checkpoint is a value"),
        ({"x": stored("m.0")}, "x: it is made of m.0, which in the checkpoint is a container"),
    ],
)
def test_a_merged_load_says_what_does_not_fit(tmp_path: Path, recipes: Any, problem: str) -> None:
    save_alone({**nested(MANY), "step": 1}, tmp_path)
    with pytest.raises(StateDictMismatchError) as caught:
        load_whole(tmp_path, options=options(recipes))
    assert caught.value.problems[0].startswith(problem)
    assert "does not fit the recipes" in str(caught.value)
    left = load_whole(tmp_path, options=options(recipes | {"y": stored("m.1.k")}, strict=False))
    assert left["y"].tobytes() == MANY["m.1.k"].tobytes()
    assert not {"x", "n.0"} & set(left)


@pytest.mark.parametrize("strict", [True, "all"])
def test_a_merged_load_may_lack_what_is_made_of_what_is_not_stored(
    tmp_path: Path, strict: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_alone({**nested(MANY), "step": 1}, tmp_path)
    recipes = {"x": stored("m.0.z"), "y.{i}": stored("z.{i}.q"), "z.{i}": concat(stored("m.{i}.q"), stored("m.9.q"))}
    allowed = {"strict": strict, "allow_missing": ["x", "y.*", "z.*"]}
    found = load_whole(tmp_path, options=options(recipes | {"w": stored("m.1.k")}, **allowed))
    assert set(found) == {"w", "step", "m.0.k", "m.12.k"}
    report = export(tmp_path, tmp_path / "out", options=options(recipes | {"w": stored("m.1.k")}, **allowed))
    assert report.tensors == 3
    assert {*report.left_out} == {"step", "x", "y.{i}", "z.0", "z.1", "z.12"}
    for key in ("x", "y.{i}", "z.0", "z.1", "z.12"):
        assert f"left out: {key}: " in caplog.text
    with pytest.raises(StateDictMismatchError, match="z.1: it is made of m.9.q, which in the checkpoint is missing"):
        load_whole(tmp_path, options=options(recipes, allow_missing=["x", "y.*", "z.0"]))
    for recipe, text in ((stored("m.0.q")[4:], "no such part"), (stored("step"), "is a value")):  # it is stored
        with pytest.raises(StateDictMismatchError, match=text):
            load_whole(tmp_path, options=options({"x": recipe}, **allowed))


@pytest.mark.parametrize(
    ("recipes", "memory"),
    [
        pytest.param({f"new.{i}": stored(f"k{i}") for i in range(6_000)}, 23 << 18, id="each"),
        pytest.param({"new.{i}": stored("k{i}")}, 13 << 19, id="pattern"),
        pytest.param({"all": concat([stored(f"k{i}") for i in range(6_000)])}, 8 << 20, id="all"),
    ],
)
def test_a_rehearsal_of_very_many_tiny_tensors_takes_little_memory(
    tmp_path: Path, recipes: dict[str, Recipe], memory: int
) -> None:
    save_alone({f"k{i}": np.zeros(1, np.uint8) for i in range(6_000)}, tmp_path)
    metadata = read_metadata(tmp_path)
    rehearse(metadata, {"x": stored("k7")})  # imports what it takes
    with little_memory(memory):
        told = rehearse(metadata, recipes)
    assert (len(told.made), told.nbytes) == (1 if "all" in recipes else 6_000, 6_000)


@pytest.mark.parametrize("name", MADE)
def test_a_rehearsal_says_what_the_load_does(folder: Path, name: str) -> None:
    recipe, _ = MADE[name]
    target = np.zeros_like(expected(name))
    outlines = {"x": (target.shape, DTYPES[target.dtype.name])}
    metadata = read_metadata(folder)
    told = rehearse(metadata, {"x": recipe}, None, outlines)
    report = load_alone({"x": target}, folder, options=options({"x": recipe}))
    assert (told.problems, told.left, tuple(told.unused)) == ([], [], report.unused_keys)
    assert told.nbytes <= report.bytes_read <= told.nbytes + 500  # what is between them is read as well, if it is small
    (made,) = map(told.tell, told.made)
    assert (made.key, made.shape, made.dtype.name, made.nbytes) == ("x", target.shape, "float32", told.nbytes)
    assert (made.recipe, sum(part.box.size for part in made.parts)) == (recipe, target.size)
    assert made == rehearse(metadata, {"x": recipe}).tell("x")  # that it is wanted need not be said


@pytest.mark.parametrize("name", MADE)
def test_parts_as_a_recipe(folder: Path, name: str) -> None:
    tensors = stored_tensors(read_metadata(folder))
    made = make_parts(MADE[name][0], tensors.__getitem__)
    again = recipe_of(made.parts, tensors.__getitem__)
    if not made.parts:
        assert again is None
        return
    assert again is not None
    remade = make_parts(again, tensors.__getitem__)
    assert (remade.shape, remade.dtype, sorted(remade.parts)) == (made.shape, made.dtype, sorted(made.parts))


def test_what_does_not_fit_is_what_a_load_would_say(folder: Path) -> None:
    recipes = {"x": stored("k").T, "y": stored("gone"), "z": stored("q"), "w": stored("v").cast("float16")}
    target = {"x": np.zeros((4, 6), "float32"), "y": np.zeros(1), "v": np.zeros((4, 7), "float32"), "no": np.zeros(2)}
    target["w"] = np.zeros((4, 6), "float32")
    with pytest.raises(StateDictMismatchError) as caught:
        load_alone(dict(target), folder, options=options(recipes))
    outlines = {key: (array.shape, DTYPES[array.dtype.name]) for key, array in target.items()}
    told = rehearse(read_metadata(folder), recipes, None, outlines)
    assert sorted(told.problems) == sorted(caught.value.problems)
    assert len(told.problems) == 6


@pytest.mark.parametrize("key", ["a.b", "a\\.b", "\ud800"])
def test_a_rehearsal_tells_of_keys_that_nothing_is_made_for(tmp_path: Path, key: str) -> None:
    save_alone({"a.b": make_array((2,)), "a": {"b": make_array((2,))}, "c": make_array((2,))}, tmp_path)
    with pytest.raises(UnsupportedValueError) as caught:
        load_whole(tmp_path, options=options({key: stored("c")}))
    told = rehearse(read_metadata(tmp_path), {key: stored("c")})
    assert told.problems == [str(caught.value)]


@pytest.mark.parametrize("count", [1 << 60, 1 << 61])
def test_a_rehearsal_refuses_tensors_of_more_bytes_than_have_addresses(tmp_path: Path, count: int) -> None:
    save_alone({"a": make_array((2,)), "b": make_array((2,))}, tmp_path)
    outlines = dict.fromkeys(("a", "b"), ((count,), DTYPES["float32"]))
    with pytest.raises(UnsupportedValueError, match="more bytes than a process can have memory for"):
        rehearse(read_metadata(tmp_path), {}, None, outlines)


# -- expressions


@pytest.mark.parametrize(
    "make",
    [
        lambda: stored(7),  # type: ignore[arg-type]
        lambda: stored("q")[True],
        lambda: stored("q")[0.5],  # type: ignore[index]
        lambda: stored("q").squeeze("0"),  # type: ignore[arg-type]
        lambda: stored("q").unsqueeze(None),  # type: ignore[arg-type]
        lambda: stack("q"),  # type: ignore[arg-type]
        lambda: stored("q")[::2],
        lambda: stored("q")["a":"b"],  # type: ignore[misc]
        lambda: stored("q")[..., :1, ...],
        lambda: stored("q").permute("0"),  # type: ignore[arg-type]
        lambda: stored("q").cast(np.float32),  # type: ignore[arg-type]
        lambda: stored("q").permute(True, False),
        lambda: concat("q", "k"),  # type: ignore[arg-type]
        lambda: concat(stored("q"), axis=None),  # type: ignore[arg-type]
        lambda: concat(stored("q"), axis=True),
        lambda: split("q", 2),  # type: ignore[arg-type]
        lambda: split(stored("q"), 1.5),  # type: ignore[arg-type]
        lambda: list(stored("q")),  # type: ignore[call-overload]
        lambda: LoadOptions(recipes=[("x", stored("q"))]),  # type: ignore[arg-type]
        lambda: LoadOptions(recipes={"x": "q"}),  # type: ignore[dict-item]
        lambda: LoadOptions(recipes={1: stored("q")}),  # type: ignore[dict-item]
    ],
)
def test_bad_expressions(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        make()


@pytest.mark.parametrize("several", [list, tuple])
def test_a_list_may_be_what_is_concatenated(several: Any) -> None:
    parts = [stored("q"), stored("k")]
    assert str(concat(several(parts), axis=1)) == str(concat(*parts, axis=1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: concat(),
        lambda: concat([]),
        lambda: split(stored("q"), 0),
        lambda: stored("q").permute(0, 0),
        lambda: stored("q").permute(1, 2),
        lambda: stored("q").permute(-1, 1),
        lambda: stored("q").permute(0, -3),
        lambda: split(stored("q"), -1),
        lambda: LoadOptions(recipes={"a.{i}": stored("b.{j}")}),
        lambda: LoadOptions(recipes={"a": stored("b.{j}")}),
        lambda: LoadOptions(recipes={"a": functools.reduce(lambda one, _: one.T, range(300), stored("b"))}),
    ],
)
def test_impossible_expressions(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"recipe|concat|split|permute"):
        make()


def test_expressions_are_put_together_and_cut_along_the_first_axis_by_default() -> None:
    q, k = stored("q"), stored("k")
    assert stack(q, k) == stack(q, k, axis=0) != stack(q, k, axis=1)
    assert concat(q, k) == concat(q, k, axis=0) != concat(q, k, axis=1)
    assert split(q, 2) == split(q, 2, axis=0) != split(q, 2, axis=1)
    assert stack(q) == concat(q.unsqueeze(0))
    assert concat(q) == concat([q])


def test_expressions_are_values() -> None:
    def one() -> Recipe:
        cut = stored("b")[1:, ..., :-2]
        return concat(stored("a").T, split(cut, 2, axis=1)[1].cast("float32").permute(1, 0), axis=-1)

    assert one() == one()
    assert hash(one()) == hash(one())
    assert str(one()) == (
        "concat(stored('a').T, split(stored('b')[1:, ..., :-2], 2, axis=1)[1].cast('float32').permute(1, 0), axis=-1)"
    )
    assert str(stored("b")[...]) == "stored('b')[...]"
    assert stored("b")[1:, ..., :2] != stored("b")[1:, :2]


# -- what is arranged by somebody else


class Arranging:
    """Arranges that everything wanted is made of given parts."""

    def __init__(self, arranged: dict[str, Arranged | None]) -> None:
        self.arranged = arranged
        self.wanted: dict[str, WantedTensor] = {}
        self.rules, self.idles = "", False

    def by(self, rules: str) -> Arranging:
        return self

    def corner(self, value: Any) -> tuple[int, ...] | None:
        return None

    def arrange(self, stored: Any, wanted: Any) -> dict[str, Arranged | None]:
        self.wanted = wanted
        return self.arranged

    def idle(self, stored: Any, wanted: Any) -> list[IdleStatement]:
        return []


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((4, 6), [Part("k", Box((0, 0), (2, 6)), (0, 1), Box((0, 0), (2, 6)))]),  # a part is missing
        ((4, 6), [Part("k", Box((0, 0), (4, 6)), (1, 0), Box((0, 0), (4, 6)))]),  # boxes of other shapes
        ((4, 6), [Part("k", Box((0, 0), (4, 6)), (0, 0), Box((0, 0), (4, 6)))]),  # no order of axes
        ((4, 6), [Part("k", Box((1, 0), (4, 6)), (0, 1), Box((0, 0), (4, 6)))]),  # outside of what is stored
        ((4, 6), [Part("q", Box((0, 0, 0), (1, 4, 6)), (1, 2), Box((0, 0), (4, 6)))]),
        ((4, 6), [Part("gone", Box((0, 0), (4, 6)), (0, 1), Box((0, 0), (4, 6)))]),
        ((6, 4), [Part("k", Box((0, 0), (4, 6)), (1, 0), Box((0, 0), (6, 4)))]),  # another shape
    ],
)
def test_parts_that_cannot_be_are_refused(folder: Path, shape: tuple[int, ...], parts: list[Part]) -> None:
    target = np.zeros((4, 6), "float32")
    with pytest.raises(StateDictMismatchError) as caught:
        with_arranger(folder, {"x": target}, {"x": Arranged(shape, parts)})
    assert [line.partition(":")[0] for line in caught.value.problems] == ["x"]
    assert not target.any()


def test_parts_of_an_arranger(folder: Path) -> None:
    target = {"x": np.zeros((6, 4), "float32"), "q": np.ones((8, 6), "float32"), "v": np.zeros((4, 6), "float32")}
    whole_k = Part("k", Box((0, 0), (4, 6)), (1, 0), Box((0, 0), (6, 4)))
    report = with_arranger(folder, target, {"x": Arranged((6, 4), [whole_k]), "q": None})
    assert target["x"].tolist() == SAVED["k"].T.tolist()
    assert target["v"].tolist() == SAVED["v"].tolist()
    assert (target["q"] == 1).all()
    assert [line.partition(":")[0] for line in report.skipped] == ["q"]
    assert not {"k", "v"} & set(report.unused_keys)


def test_an_arranger_is_told_where_boxes_start(folder: Path) -> None:
    arranger = Arranging({"nowhere": None})
    lower, right = Box((4, 0), (4, 6)), Box((0, 3), (4, 3))
    target = {
        "q": sharded(SAVED["q"], [lower], fill=False),
        "k": sharded(SAVED["k"], [right], fill=False),
        "v": np.zeros((4, 6), "float32"),
        "nowhere": ShardedArray((2, 3), DTYPES["float32"], [], []),
    }
    with_arranger(folder, target, arranger)
    assert {key: list(tensor.offsets) for key, tensor in arranger.wanted.items()} == {
        "q": [(4, 0)],
        "k": [(0, 3)],
        "v": [(0, 0)],
        "nowhere": [(0, 0)],  # no rank has a part of it, which counts as one
    }


def with_arranger(folder: Path, target: dict[str, Any], arranged: Arranging | dict[str, Arranged | None]) -> LoadReport:
    loading = LoadOptions(timeout=60)
    with SoloHub().session("load", 60) as session:
        storage, arranger = as_source(folder), arranged if isinstance(arranged, Arranging) else Arranging(arranged)
        context = LoadContext(storage, session, NoTransport(), NumpyAdapter(), loading, arranger=arranger)
        return load(target, context, None)


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("a.12.w", "any"),
        ("a.3.w", "third"),  # the first that names it
        ("a.3.w.moment1_0", "third"),
        ("a.3.w.moment", ""),
        ("a.x.w", ""),
        ("b.1.2.w", "second number"),
        ("b.2.2.w", ""),
        (".".join("1" * 100), ""),
    ],
)
def test_the_first_statement_that_names_a_key_is_told_of(key: str, named: str) -> None:
    endings = (".moment1_0", ".moment2_0")
    names = {"third": "a.3.w", "any": "a.*.w", "second number": "b.1.*.w", "later": "a.*.w"}
    idle = [IdleStatement(text, "no reason", (f"{text}.x", name), endings) for text, name in names.items()]
    assert idle_hints(idle)(key) == (f"; {named!r} names it, but changes nothing: no reason" if named else "")


def test_very_many_keys_are_looked_for_in_very_many_statements_in_linear_time() -> None:
    keys = [f"layers.{i}.experts.{i % 7}.w" for i in range(5000)]
    idle = [IdleStatement(key, "", (key,), (".moment1_0",)) for key in keys]
    start = time.process_time()
    hints = list(map(idle_hints(idle), keys))
    assert time.process_time() - start < slowness()
    assert hints[-1].startswith(f"; '{keys[-1]}' names it")


# -- ranks that say different things


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("w", [{"recipes": {"w": stored("q")}}, {"recipes": {"w": stored("k")}}]),
        ("w", [{"key_map": {"w": "q"}}, {"key_map": {"w": "k"}}]),
        ("q", [{}, {"recipes": {"q": stored("k")}}]),
        ("q", [{"recipes": {"q": stored("q")[0:8]}}, {"recipes": {"q": stored("k")}}]),
    ],
)
def test_parts_of_one_tensor_are_never_of_two(tmp_path: Path, key: str, options: list[dict[str, Any]]) -> None:
    save_on([{"q": make_array((8, 6), seed=1), "k": make_array((8, 6), seed=2)}], tmp_path)
    targets = split_rows(np.zeros((8, 6), np.float32), 2, False)
    loaded = run_ranks(
        2,
        lambda rank: rank.load(
            {key: targets[rank.rank]}, tmp_path, None, LoadOptions(timeout=60, **options[rank.rank])
        ),
    )
    for error in errors_of(loaded, ValueError):
        assert f"{key}: rank 0: " in str(error)
        assert "rank 1: stored('k')" in str(error)
    assert not any(piece.any() for target in targets for piece in target.pieces)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("others", [{}, {"n": "m"}, {"q": "k"}, {"n": None}])
def test_a_part_is_not_left_as_it_is_where_other_ranks_load_theirs(
    tmp_path: Path, rank: int, others: dict[str, str | None]
) -> None:
    state = {"q": make_array((8, 6), seed=1), "k": make_array((8, 6), seed=2), "n": np.ones(2), "m": np.ones(2)}
    save_on([state], tmp_path)
    key_maps: list[dict[str, str | None]] = [others, others]
    key_maps[rank] = {"q": None}
    targets = [{"q": part, "n": np.zeros(2)} for part in split_rows(np.zeros((8, 6), np.float32), 2, False)]
    loaded = run_ranks(
        2,
        lambda one: one.load(
            targets[one.rank], tmp_path, None, LoadOptions(timeout=60, key_map=key_maps[one.rank] or None)
        ),
    )
    for error in errors_of(loaded, ValueError):
        assert f"rank {rank}: nothing, for key_map leaves it as it is" in str(error)
    assert not any(piece.any() for target in targets for piece in target["q"].pieces)


def test_a_tensor_that_all_ranks_leave_as_it_is_stays_whatever_else_they_load(tmp_path: Path) -> None:
    save_on([{"q": make_array((8, 6), seed=1), "k": make_array((8, 6), seed=2)}], tmp_path)
    parts = split_rows(np.zeros((8, 6), np.float32), 2, False)
    targets = [{"q": part, f"own{rank}": np.zeros((8, 6), np.float32)} for rank, part in enumerate(parts)]
    key_maps: list[dict[str, str | None]] = [{"q": None, f"own{rank}": key} for rank, key in enumerate("qk")]
    all_ok(
        run_ranks(2, lambda one: one.load(targets[one.rank], tmp_path, None, LoadOptions(key_map=key_maps[one.rank])))
    )
    assert all(target[f"own{rank}"].any() for rank, target in enumerate(targets))
    assert not any(piece.any() for part in parts for piece in part.pieces)


@pytest.mark.parametrize("kind", [list, lambda pair: dict(enumerate(pair))])
def test_a_tensor_in_a_list_is_called_by_its_key_where_ranks_make_it_of_two(tmp_path: Path, kind: Any) -> None:
    save_on([{"a": kind([make_array((8, 6), seed=1), make_array((8, 6), seed=2)])}], tmp_path)
    parts = split_rows(np.zeros((8, 6), np.float32), 2, False)
    options = [LoadOptions(timeout=60), LoadOptions(timeout=60, key_map={"a.0": "a.1"})]
    loaded = run_ranks(2, lambda one: one.load({"a": kind([parts[one.rank]])}, tmp_path, None, options[one.rank]))
    for error in errors_of(loaded, ValueError):
        assert "\na.0: rank 0: what is stored under its own key; rank 1: stored('a.1')" in str(error)


@pytest.mark.parametrize("stored_as", [None, "a.c"])
def test_parts_of_one_tensor_are_never_of_two_though_ranks_nest_it_otherwise(
    tmp_path: Path, stored_as: str | None
) -> None:
    save_on([{"a": {"b": make_array((8, 6), seed=1), "c": make_array((8, 6), seed=2)}}], tmp_path)
    parts = split_rows(np.zeros((8, 6), np.float32), 2, False)
    targets: list[dict[str, Any]] = [{"a": {"b": parts[0]}}, {"a.b": parts[1]}]
    options = [LoadOptions(timeout=60), LoadOptions(timeout=60, key_map={"a.b": stored_as})]
    loaded = run_ranks(2, lambda one: one.load(targets[one.rank], tmp_path, None, options[one.rank]))
    for error in errors_of(loaded, ValueError):
        assert re.search("a.b: rank 0: what is stored under its own key; rank 1: (nothing|stored)", str(error))
    assert not any(piece.any() for part in parts for piece in part.pieces)


def test_tensors_of_one_key_may_be_of_different_things(tmp_path: Path) -> None:
    state = {"a": {"b": make_array((8, 6), seed=1)}, "a.b": make_array((8, 6), seed=2)}
    save_on([state], tmp_path)
    parts = [split_rows(np.zeros((8, 6), np.float32), 2, False) for _ in range(2)]
    targets = [{"a": {"b": parts[0][rank]}, "a.b": parts[1][rank]} for rank in range(2)]
    load_on(targets, tmp_path, options=LoadOptions(timeout=60, key_map={"a\\.b": "a.b"}))
    for part in (*parts[0], *parts[1]):
        check_pieces(part, state["a"]["b"])


def test_ranks_without_a_key_map_are_compared_with_one_that_has_one_in_linear_time() -> None:
    paths = [f"/model/layers.{i}.weight" for i in range(20_000)]
    moved = dict.fromkeys(paths[::2], "other")
    instead = {path: f"stored({moved[path]!r})" if path in moved else OWN_KEY for path in paths}
    others = dict.fromkeys(range(1, 9), WantedPaths(paths, {}))
    start = time.process_time()
    with pytest.raises(ValueError, match=r"layers\.2\.weight: rank 0: stored\('other'\); rank 1: what is stored"):
        check_same_sources({0: WantedPaths(paths, {}, moved=moved, instead=instead), **others})
    assert time.process_time() - start < 1.5 * slowness()


def test_recipes_of_one_tensor_that_differ_only_at_the_end_of_a_very_long_text_are_not_mixed(tmp_path: Path) -> None:
    save_on([{"q": make_array((8, 6), seed=1), "k": make_array((8, 6), seed=2)}], tmp_path)
    targets, nothing = split_rows(np.zeros((8, 6), np.float32), 2, False), [stored("q")[0:0]] * 6000
    recipes = [{"w": concat(*nothing, stored(key))} for key in "qk"]
    assert len(str(recipes[0]["w"])) > 100_000
    loaded = run_ranks(
        2, lambda rank: rank.load({"w": targets[rank.rank]}, tmp_path, None, options(recipes[rank.rank]))
    )
    for error in errors_of(loaded, ValueError):
        assert re.search(r"w: rank 0: concat\(.*\(SHA-256 \w{64}\); rank 1: concat\(", str(error))
        assert len(str(error)) < 10_000
    assert not any(piece.any() for target in targets for piece in target.pieces)


def test_a_cut_text_tells_expressions_apart_as_a_whole_one_does() -> None:
    def variants(last: str) -> list[Recipe]:
        long = [stored("a" * 40)] * 3
        ends = [stored(last), stored(last).T, stored(last)[0:1], stored(last).cast("float16"), *split(stored(last), 2)]
        return [concat(*long, end, axis=axis) for end in ends for axis in (0, 1)]

    texts = [distinct_text(one, 50) for last in "bc" for one in variants(last)]
    assert len(set(texts)) == len(texts) == 24
    assert texts[:12] == [distinct_text(one, 50) for one in variants("b")]
    assert distinct_text(stored("b").T, 50) == "stored('b').T"


def test_ranks_have_tensors_of_their_own_from_where_they_say(tmp_path: Path) -> None:
    """As the stages of a pipeline, which have equal keys."""
    state = {"q": make_array((8, 6), seed=1), "k": make_array((8, 6), seed=2)}
    save_on([state], tmp_path)
    targets = [{"w": np.zeros((8, 6), np.float32), f"own{rank}": np.zeros((8, 6), np.float32)} for rank in range(2)]
    options = [
        LoadOptions(timeout=60, recipes={"w": stored(key), f"own{rank}": stored("q")}) for rank, key in enumerate("qk")
    ]
    all_ok(run_ranks(2, lambda rank: rank.load(targets[rank.rank], tmp_path, None, options[rank.rank])))
    for rank, key in enumerate("qk"):
        assert same_bits(targets[rank]["w"], state[key])
        assert same_bits(targets[rank][f"own{rank}"], state["q"])


@pytest.mark.parametrize("how", [{"key_map": {"w": "q"}}, {"recipes": {"w": stored("q")}}])
@pytest.mark.parametrize(
    "boxes",
    [
        [[whole((8, 6))], []],  # as on a mesh of one rank
        [[whole((8, 6))], [Box((8, 0), (0, 6))]],
        [[whole((8, 6))], [Box((4, 0), (4, 6))]],
        [[], [whole((8, 6))]],
    ],
)
def test_who_has_nothing_of_a_tensor_says_nothing_of_it(
    tmp_path: Path, how: dict[str, Any], boxes: list[list[Box]]
) -> None:
    array = make_array((8, 6), seed=1)
    save_on([{"q": array, "n": np.zeros(2)}], tmp_path)
    targets = [{"w": sharded(array, own, fill=False), "n": np.ones(2)} for own in boxes]
    load_on(targets, tmp_path, options=LoadOptions(timeout=60, **how))
    for target in targets:
        check_pieces(target["w"], array)


@pytest.mark.parametrize(
    ("shape", "places", "whole_one"),
    [
        ((4, 2), [((0, 0), (4, 2))], True),
        ((4, 2), [((0, 0), (2, 4))], False),
        ((4, 2), [((0, 0), (1, 2)), ((1, 0), (3, 2))], True),
        ((4, 2), [((0, 0), (2, 2)), ((1, 0), (2, 2))], False),
        ((4, 2), [((0, 0), (2, 2)), ((2, 0), (1, 4))], False),
        ((4, 2), [((0,), (4,)), ((4,), (4,))], False),
        ((4,), [((0, 0), (2, 1)), ((2, 0), (2, 1))], False),
        ((4, 1), [((0,), (2,)), ((2,), (2,))], False),
        ((), [((), ())], True),
        ((0, 3), [], True),
        ((1,), [], False),
    ],
)
def test_parts_that_make_up_a_tensor(shape: Any, places: Any, whole_one: bool) -> None:
    assert part_targets._tile(shape, tuple(Box(*place) for place in places)) == whole_one


@pytest.mark.parametrize(
    ("box", "axes", "place", "sound"),
    [
        (((1, 0), (2, 3)), (0, 1), (2, 3), True),
        (((1, 0), (2, 3)), (1, 0), (3, 2), True),
        (((1, 0), (2, 3)), (0, 1), (3, 2), False),
        (((1, 0), (2, 3)), (0, 0), (2, 2), False),
        (((2, 0), (2, 3)), (0, 1), (2, 3), False),
        (((-1, 0), (2, 3)), (0, 1), (2, 3), False),
        (((1, 0), (1, 3)), (1,), (3,), True),
        (((1, 0), (2, 3)), (1,), (3,), False),
        (((1, 0), (2, 3)), (1, NEW, 0), (3, 1, 2), True),
        (((1, 0), (2, 3)), (1, NEW, 0), (3, 2, 2), False),
        (((1, 0), (2, 3)), (1, NEW, 1), (3, 1, 3), False),
        (((1, 0), (2, 3)), (0, 2), (2, 3), False),
    ],
)
def test_parts_of_what_is_stored(box: Any, axes: Any, place: Any, sound: bool) -> None:
    part = Part("a", Box(*box), axes, Box((0,) * len(place), place))
    assert part_targets._is_sound(part, (3, 3)) == sound


def test_what_a_recipe_asks_for_may_be_missing_if_the_caller_says_so(tmp_path: Path) -> None:
    """As experts beyond those that are stored; but not what is there and does not fit."""
    save_on([{"l.0.a": SAVED["q"], "l.0.b": SAVED["k"], "l.1.a": SAVED["q"], "n": 3}], tmp_path)
    recipes = {"m.{i}": concat(stored("l.{i}.a"), stored("l.{i}.b"))}
    whole = np.concatenate([SAVED["q"], SAVED["k"]])
    targets = [{f"m.{i}": np.zeros_like(whole) for i in range(3)} for _ in range(2)]
    with pytest.raises(StateDictMismatchError, match="m.1: it is made of l.1.b, which in the checkpoint is missing"):
        load_on(targets, tmp_path, options=LoadOptions(timeout=60, recipes=recipes))
    with pytest.raises(StateDictMismatchError, match="of_value: it is made of n, which in the checkpoint is a value"):
        load_on(
            [{"of_value": np.zeros(3)}],
            tmp_path,
            options=LoadOptions(timeout=60, recipes={"of_value": stored("n")}, allow_missing=["*"]),
        )
    options = LoadOptions(timeout=60, recipes=recipes, allow_missing=["m.[12]"])
    for report in load_on(targets, tmp_path, options=options):
        assert report.skipped_keys == ("m.1", "m.2")
        assert "m.2: left as it is, for the checkpoint does not have it" in report.skipped
    for target in targets:
        assert (target["m.0"] == whole).all()
        assert not target["m.1"].any()


# -- states of an optimizer


STATES = {key: make_array((4, 4), seed=n) for n, key in enumerate(("q.weight.moment1", "q.weight.moment2"))}
STATES |= {"q.weight.beta1_pow_acc": make_array((1,), seed=5), "k.weight.moment1": make_array((4, 4), seed=6)}
HALVES = split(stored("model.q.weight"), 2)


@pytest.mark.parametrize(
    ("recipe", "is_refused"),
    [
        (stored("model.q.weight").T, True),
        (concat(*reversed(HALVES)), True),  # of several parts
        (concat(*HALVES), False),
        (stored("model.q.weight").cast("float32"), False),
        (stored("model.k.weight"), False),  # such as another average of it
    ],
)
def test_a_state_is_not_loaded_as_it_is_stored_where_a_recipe_moves_its_parameter(
    tmp_path: Path, recipe: Recipe, is_refused: bool
) -> None:
    """Of a square parameter it would fit, and every element would be that of another one."""
    weights = {f"{name}.weight": make_array((4, 4), seed=8) for name in "qk"}
    save_alone({"model": weights, "optimizer": STATES}, tmp_path)

    def blank() -> dict[str, Any]:
        return {
            name: {key: np.zeros_like(array) for key, array in arrays.items()}
            for name, arrays in (("model", weights), ("optimizer", STATES))
        }

    recipes = {"model.q.weight": recipe}
    if not is_refused:
        load_alone(blank(), tmp_path, options=options(recipes))
        return
    with pytest.raises(StateDictMismatchError) as caught:
        load_alone(blank(), tmp_path, options=options(recipes))
    assert caught.value.problems == tuple(
        f"optimizer.q.weight.moment{i}: it needs a recipe as well, since one moves the elements of model.q.weight, its "
        "parameter"
        for i in (1, 2)
    )
    found = blank()
    load_alone(found, tmp_path, options=options(recipes, strict=False))
    loaded = {key for key, array in found["optimizer"].items() if array.any()}
    assert loaded == {"q.weight.beta1_pow_acc", "k.weight.moment1"}
    moments = {"optimizer.q.weight.moment{i}": stored("optimizer.q.weight.moment{i}").T}
    load_alone(found, tmp_path, options=options(recipes | moments))
    assert same_bits(found["optimizer"]["q.weight.moment2"], STATES["q.weight.moment2"].T)


@pytest.mark.parametrize(
    ("pattern", "key", "found"),
    [
        ("{a}_{b}.w", "gate_up_proj.w", {"a": "gate_up", "b": "proj"}),
        ("x{a}{b}y", "xabcy", {"a": "ab", "b": "c"}),
        ("{a}_{b}.{b}", "x_y_z.y_z", {"a": "x", "b": "y_z"}),
        ("{a}_{a}", "x_y_x_y", {"a": "x_y"}),
        ("{a}_{a}_", "x_y_", None),
        ("{a}_{b}_{a}", "x_y_1_x_y", {"a": "x_y", "b": "1"}),
        ("{a}_{b}.{a}_{c}", "x_y_1.x_w", {"a": "x", "b": "y_1", "c": "w"}),
        ("{a}_{b}_{c}", "_x_y", None),
        ("{a}_{b}", "x_.y", None),
        ("a.{b}", "a.", None),
        ("a.{b}", "a.x.y", None),
    ],
)
def test_what_placeholders_of_a_key_stand_for(pattern: str, key: str, found: dict[str, str] | None) -> None:
    assert KeyPattern(pattern).match(key) == found


def test_several_placeholders_between_two_dots_take_no_longer_than_a_key_is_long() -> None:
    pattern, key = KeyPattern("x.{a}_{b}_{c}.w"), f"x.{'_' * 100_000}.v"
    begun = time.process_time()
    assert pattern.match(key) is None
    assert pattern.match(key[:-1] + "w") == {"a": "_" * 99_996, "b": "_", "c": "_"}
    assert time.process_time() - begun < slowness()


@pytest.mark.parametrize(
    "options",
    [{"key_map": {"a": "b\ud800"}}, {"key_map": lambda key: "b\ud800"}, {"recipes": {"a": stored("b\ud800")}}],
)
def test_options_that_name_a_stored_key_with_a_lone_surrogate(tmp_path: Path, options: dict[str, Any]) -> None:
    save_alone({"a": np.ones(2)}, tmp_path)
    with pytest.raises(StateDictMismatchError, match="a key with a lone surrogate cannot be stored") as caught:
        load_alone({"a": np.zeros(2)}, tmp_path, options=LoadOptions(**options))
    str(caught.value).encode()


def test_options_for_a_wanted_key_with_a_lone_surrogate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_alone({"a": np.ones(2)}, tmp_path)
    target: dict[str, Any] = {"a": np.zeros(2), "\ud800": 3}
    load_alone(target, tmp_path, options=LoadOptions(key_map={"\ud800": None}))
    assert same_bits(target["a"], np.ones(2))
    load_alone({"a": target["a"]}, tmp_path, options=LoadOptions(key_map={"\ud800": "a"}))
    assert r"ud800' matches none of the wanted keys" in caplog.text
    with pytest.raises(StateDictMismatchError) as caught:
        load_alone({"a": target["a"]}, tmp_path, options=LoadOptions(recipes={"\ud800": stored("a")}))
    assert caught.value.problems == (r"\ud800: a recipe, and no rank has such a tensor",)
