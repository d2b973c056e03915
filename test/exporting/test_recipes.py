"""Exports of what recipes make of a checkpoint."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_dist_ckpt import (
    CheckpointNotFoundError,
    LoadOptions,
    PerRank,
    StateDictMismatchError,
    UnsupportedValueError,
    concat,
    export,
    stored,
    verify,
)
from paddle_dist_ckpt.core.box import whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.parts import Part
from paddle_dist_ckpt.exporting import stream
from paddle_dist_ckpt.exporting.formats import ExportRequest
from paddle_dist_ckpt.exporting.plan import ExportFile, ExportTensor, StoredPart, cut_in_windows
from paddle_dist_ckpt.recipes import Recipe
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from paddle_dist_ckpt.wiring import export_with
from test.jobs import (
    CountingStorage,
    all_ok,
    data_reads,
    errors_of,
    load_whole,
    make_array,
    same_bits,
    save_alone,
    save_on,
    split_all,
)
from test.recipe_cases import MADE, SAVED, expected

RECIPES = {f"made.{name}": recipe for name, (recipe, _) in MADE.items()}


def saved(folder: Path) -> Path:
    """What two ranks have saved, each some rows of each tensor."""
    save_on([{**arrays, "step": 7} for arrays in split_all(SAVED)], folder)
    return folder


def options(recipes: Any, **kwargs: Any) -> LoadOptions:
    return LoadOptions(recipes=recipes, progress=False, timeout=60, **kwargs)


def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of some hundred bytes are cut in several windows, and converted in pieces of a few items."""
    monkeypatch.setattr(stream, "cut_in_windows", functools.partial(cut_in_windows, most=64, most_turned=200))
    monkeypatch.setattr("paddle_dist_ckpt.exporting.plan.CONVERTED_BYTES", 24)
    monkeypatch.setattr("paddle_dist_ckpt.exporting.plan._PAGE", 16)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("format", ["safetensors", "native", "paddle", "pdparams"])
def test_every_recipe_in_every_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, small: bool
) -> None:
    source = saved(tmp_path / "ckpt")
    if small:
        small_windows(monkeypatch)
    out = tmp_path / ("out.pdparams" if format == "pdparams" else "out")
    report = export(source, out, format, options=options(RECIPES))
    assert report.tensors == len(MADE) + len({"half"})  # which no recipe uses
    assert report.left_out == (() if format in ("native", "pdparams") else ("step",))
    found = load_whole(out, flat=True)
    assert found.pop("step", 7) == 7
    assert set(found) == {*RECIPES, "half"}
    for name in MADE:
        assert same_bits(found[f"made.{name}"], expected(name)), name
    if format == "native":
        assert verify(out).ok


def test_several_ranks_share_the_files(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "ckpt"), tmp_path / "out"
    request = ExportRequest(str(out), "safetensors", None, None, None, None, 100)

    def work(rank: SimulatedRank) -> Any:
        return export_with(rank.connection, str(source), request, options(RECIPES))

    reports = all_ok(run_ranks(3, work))
    assert len(reports[0].files) > 10
    found = load_whole(out, flat=True)
    assert all(same_bits(found[f"made.{name}"], expected(name)) for name in MADE)


@pytest.mark.parametrize(
    "recipes",
    [
        [stored("q"), stored("q").T],
        [concat([stored("q")] * 8000 + [stored(last)]) for last in "kv"],  # written out they begin alike
    ],
)
def test_ranks_that_ask_for_different_recipes_are_told(tmp_path: Path, recipes: list[Recipe]) -> None:
    source, out = saved(tmp_path / "ckpt"), tmp_path / "out"
    request = ExportRequest(str(out), "safetensors", None, None, None, None, 100)

    def work(rank: SimulatedRank) -> Any:
        return export_with(rank.connection, str(source), request, options({"x": recipes[rank.rank]}))

    for error in errors_of(run_ranks(2, work), Exception):
        assert "ask for different exports" in str(error)
    assert not out.exists()


@pytest.mark.parametrize("small", [False, True])
def test_dtype_converts_what_no_recipe_casts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool) -> None:
    source = saved(tmp_path / "ckpt")
    if small:
        small_windows(monkeypatch)
    recipes = {
        "turned": stored("w").T,
        "joined": concat(stored("k").T, stored("v").T, axis=1),
        "cast": stored("half").cast("float32").T,
        "both": concat(stored("half").cast("float32"), stored("k")),
    }
    export(source, tmp_path / "out", "safetensors", keys=list(recipes), dtype="float64", options=options(recipes))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert same_bits(found["turned"], SAVED["w"].T.astype("float64"))
    assert same_bits(found["joined"], np.hstack([SAVED["k"].T, SAVED["v"].T]).astype("float64"))
    assert same_bits(found["cast"], SAVED["half"].T.astype("float32"))
    assert same_bits(found["both"], np.concatenate([SAVED["half"].astype("float32"), SAVED["k"]]))


@pytest.mark.parametrize("dtype", [None, "float64"])
def test_a_cast_of_what_has_no_elements_counts_as_any_other(tmp_path: Path, dtype: str | None) -> None:
    save_alone({"none": np.zeros((0, 3), "float32"), "some": make_array((2, 3))}, tmp_path / "ckpt")
    recipes = {
        "cast": stored("none").cast("float16"),
        "further": concat(stored("none").cast("float16")[:0].T, stored("none").T.cast("float16"), axis=1).unsqueeze(0),
        "cut": stored("some").cast("float16")[1:1],
        "joined": concat(stored("none").cast("float32"), stored("some")),  # all that is in it is as it was stored
        "plain": stored("none").T,
    }
    export(tmp_path / "ckpt", tmp_path / "out", keys=list(recipes), dtype=dtype, options=options(recipes))
    found = load_file(tmp_path / "out" / "model.safetensors")
    plain = dtype or "float32"
    assert {key: (array.dtype.name, array.shape) for key, array in found.items()} == {
        "cast": ("float16", (0, 3)),
        "further": ("float16", (1, 3, 0)),
        "cut": ("float16", (0, 3)),
        "joined": (plain, (2, 3)),
        "plain": (plain, (3, 0)),
    }


def test_a_value_that_a_cast_cannot_hold_is_an_error(tmp_path: Path) -> None:
    save_alone({"x": np.full((2, 3), 1e30, "float32")}, tmp_path / "ckpt")
    with pytest.raises(UnsupportedValueError, match="y: a finite float32 value is too large for float16"):
        export(tmp_path / "ckpt", tmp_path / "out", options=options({"y": stored("x").T.cast("float16")}))
    assert not (tmp_path / "out").exists()


def test_a_prefix_and_keys_are_those_of_what_is_made(tmp_path: Path) -> None:
    state = {"model": {"a": make_array((3, 4)), "b": make_array((3,))}, "rest": make_array((2,)), "own": PerRank(1)}
    save_alone(state, tmp_path / "ckpt")
    recipes = options({"model.a": stored("model.a").T, "model.c": stored("rest")})
    export(tmp_path / "ckpt", tmp_path / "all", prefix="model", options=recipes)
    found = load_file(tmp_path / "all" / "model.safetensors")
    assert set(found) == {"a", "b", "c"}
    assert same_bits(found["a"], state["model"]["a"].T)  # type: ignore[index]
    export(tmp_path / "ckpt", tmp_path / "some", keys=["model.a"], options=recipes)
    assert set(load_file(tmp_path / "some" / "model.safetensors")) == {"model.a"}
    with pytest.raises(CheckpointNotFoundError, match="no key matches"):
        export(tmp_path / "ckpt", tmp_path / "none", keys=["rest"], options=recipes)  # of which something else is made


def test_recipes_that_do_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, recipes = saved(tmp_path / "ckpt"), {"x": stored("q")[9:], "y": stored("k").T}
    with pytest.raises(StateDictMismatchError, match="does not fit the recipes") as caught:
        export(source, tmp_path / "out", options=options(recipes))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["x"]
    assert not (tmp_path / "out").exists()
    with caplog.at_level(logging.WARNING):
        report = export(source, tmp_path / "out", options=options(recipes, strict=False))
    assert "left out: x: " in caplog.text
    assert "x" in report.left_out
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert "x" not in found
    assert same_bits(found["y"], SAVED["k"].T)


@pytest.mark.parametrize(("written_as", "left"), [("safetensors", ["step", "x"]), ("native", ["x"])])
def test_a_value_of_whose_key_no_tensor_can_be_made_is_left_out_once_or_written(
    tmp_path: Path, written_as: str, left: list[str]
) -> None:
    recipes = options({"step": stored("gone"), "x": stored("gone")}, allow_missing=["*"])
    report = export(saved(tmp_path / "ckpt"), tmp_path / "out", format=written_as, options=recipes)
    assert sorted(report.left_out) == left


def test_a_transposed_tensor_is_read_once(tmp_path: Path) -> None:
    array = np.arange(6_144_000, dtype="float32").reshape(1024, 6000)  # 25 MB, more than an ordinary window
    save_alone({"x": array}, tmp_path / "ckpt")
    log: list[tuple[str, int, int]] = []
    storage = CountingStorage(tmp_path / "ckpt", log)
    export(storage, tmp_path / "out", options=options({"y": stored("x").T}), dtype="float64")
    assert same_bits(load_file(tmp_path / "out" / "model.safetensors")["y"], array.T.astype("float64"))
    read = sum(stop - start for _, start, stop in data_reads(tmp_path / "ckpt", log))
    assert read < 1.5 * array.nbytes  # blocks at the edges of what is converted at a time are read twice


def test_what_stands_behind_a_transposed_tensor_is_in_windows_of_its_own() -> None:
    def tensor(key: str, turned: bool) -> ExportTensor:
        shape, dtype = (100, 100), DTYPES["uint8"]
        part = Part(key, whole(shape), (1, 0), whole(shape)) if turned else None
        return ExportTensor(f"/{key}", key, shape, dtype, [StoredPart(0, dtype, part)])

    file = ExportFile("file", [tensor("a", False), tensor("b", True), tensor("c", False), tensor("d", True)])
    windows = cut_in_windows(file, 4096, 1 << 20)
    assert [{piece.tensor.key for piece in window.pieces} for window in windows] == [
        *[{"a"}] * 3,
        {"b"},
        *[{"c"}] * 4,  # of which the first one ends at a page
        {"d"},
    ]
    assert sum(window.nbytes for window in windows) == file.nbytes


ESCAPED = {
    "a.b": make_array([2], "float32", 1),
    "a": {"b": make_array([2], "float32", 2)},
    "c": make_array([2], "float32", 3),
}


def test_what_is_stored_under_an_escaped_key_keeps_it_beside_what_recipes_make(tmp_path: Path) -> None:
    save_alone(ESCAPED, tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out", options=options({"d": stored("c")}))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"a.b", "a\\.b", "d"}


@pytest.mark.parametrize("key", ["a.b", "a\\.b", "new\\"])
def test_nothing_is_made_for_a_key_in_whose_place_another_tensor_would_be_lost(tmp_path: Path, key: str) -> None:
    save_alone(ESCAPED, tmp_path / "saved")
    with pytest.raises(
        UnsupportedValueError, match="nothing is made for a key that is escaped, or another one for its"
    ):
        export(tmp_path / "saved", tmp_path / "out", options=options({key: stored("c")}))
    export(tmp_path / "saved", tmp_path / "out", keys="a*b", options=options({"d": stored("c")}))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"a.b", "a\\.b"}


def test_nothing_is_made_for_a_key_that_cannot_be_stored(tmp_path: Path) -> None:
    recipes = options({"\ud800": stored("a")})
    save_alone({"a": np.ones(2)}, tmp_path / "c")
    with pytest.raises(UnsupportedValueError, match="a key with a lone surrogate cannot be stored"):
        export(tmp_path / "c", tmp_path / "out", options=recipes)
    assert not (tmp_path / "out").exists()
