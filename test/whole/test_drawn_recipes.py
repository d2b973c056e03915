"""Recipes drawn at random, loaded on other layouts, merged and exported: each is what numpy makes of the arrays."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt import LoadOptions, Recipe, concat, export, split, stack, stored
from paddle_dist_ckpt.exporting import stream
from paddle_dist_ckpt.exporting.plan import cut_in_windows
from test.jobs import LAYOUTS, check_pieces, load_on, load_whole, make_array, same_bits, sharded
from test.recipe_cases import save_in_rows
from test.strategies import examples, tilings

Pair = tuple[Recipe, np.ndarray]
"""A recipe, and what it stands for."""

STORED = {
    "vector": make_array((7,), seed=1),
    "matrix": make_array((6, 8), seed=2),
    "alike": make_array((6, 8), seed=3),
    "cube": make_array((3, 4, 5), seed=4),
    "thin": make_array((1, 9, 1, 2), seed=5),
    "scalar": make_array((), seed=6),
    "none": make_array((0, 3), seed=7),
}
MOST_ELEMENTS, MOST_DIMENSIONS = 1000, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have saved, each some rows of each tensor."""
    return save_in_rows(STORED, tmp_path_factory.mktemp("saved"))


@st.composite
def made(draw: st.DrawFn) -> Pair:
    """Some operations on stored tensors, one after the other."""
    key = draw(st.sampled_from(sorted(STORED)))
    pair: Pair = stored(key), STORED[key]
    for _ in range(draw(st.integers(1, 6))):
        after = draw(operations(*pair))
        if after[1].size <= MOST_ELEMENTS and after[1].ndim <= MOST_DIMENSIONS:
            pair = after
    return pair


@st.composite
def operations(draw: st.DrawFn, recipe: Recipe, array: np.ndarray) -> Pair:
    """One operation."""
    axis = draw(st.integers(-array.ndim, array.ndim - 1)) if array.ndim else 0
    names = ["transpose", "permute", "unsqueeze", "stack", "concat", "slice", "element", "split", "squeeze"]
    what = draw(st.sampled_from(names if array.ndim else names[:4]))
    if what == "transpose":
        return recipe.T, array.T
    if what == "permute":
        order = draw(st.permutations(range(array.ndim)))
        return recipe.permute(*order), array.transpose(order)
    if what == "unsqueeze":
        place = draw(st.integers(-array.ndim - 1, array.ndim))
        return recipe.unsqueeze(place), np.expand_dims(array, place)
    if what == "stack":
        place = draw(st.integers(-array.ndim - 1, array.ndim))
        others = [pair for key in STORED if (pair := (stored(key), STORED[key]))[1].shape == array.shape]
        pairs = [(recipe, array), *draw(st.lists(st.sampled_from([(recipe, array), *others]), max_size=2))]
        return stack([one for one, _ in pairs], axis=place), np.stack([one for _, one in pairs], place)
    if what == "concat":
        pairs = [(recipe, array)] + [cut(draw, recipe, array, axis) for _ in range(draw(st.integers(0, 2)))]
        pairs = draw(st.permutations(pairs))
        return concat(*(one for one, _ in pairs), axis=axis), np.concatenate([one for _, one in pairs], axis)
    if what == "slice":
        return cut(draw, recipe, array, axis)
    size = array.shape[axis]
    if what == "element" and size:
        place = draw(st.integers(-size, size - 1))
        index = (*[slice(None)] * (axis % array.ndim), place)
        return recipe[index], array[index]
    if what == "split" and size:
        count = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        number = draw(st.integers(0, count - 1))
        return split(recipe, count, axis)[number], np.split(array, count, axis)[number]
    if what == "squeeze" and size == 1:
        return recipe.squeeze(axis), array.squeeze(axis)
    return recipe, array


def cut(draw: st.DrawFn, recipe: Recipe, array: np.ndarray, axis: int) -> Pair:
    """A part of it along an axis, counted from the first one or from the last."""
    size = array.shape[axis]
    ends = sorted([draw(st.integers(0, size)), draw(st.integers(0, size))])
    first, last = ends
    start = draw(st.sampled_from([first, first - size] if first < size else [first]))
    stop = draw(st.sampled_from([last, last - size] if last < size else [last, None]))
    bounds = slice(start or draw(st.sampled_from([0, None])), stop)
    before, behind = axis % array.ndim, array.ndim - 1 - axis % array.ndim
    index = (*[slice(None)] * before, bounds) if axis >= 0 else (..., bounds, *[slice(None)] * behind)
    return recipe[index], array[index]


@given(pairs=st.lists(made(), min_size=1, max_size=4), data=st.data())
@examples(40)
def test_on_other_layouts(folder: Path, pairs: list[Pair], data: st.DataObject) -> None:
    recipes = {f"made{i}": recipe for i, (recipe, _) in enumerate(pairs)}
    states: list[dict[str, Any]] = [{}, {}, {}]
    for i, (_, array) in enumerate(pairs):
        array, how = np.array(array, order="C"), data.draw(st.sampled_from(LAYOUTS))
        boxes = data.draw(tilings(array.shape))
        owners = [data.draw(st.integers(0, 2)) for _ in boxes]
        for rank, state in enumerate(states):
            mine = [box for box, owner in zip(boxes, owners, strict=True) if owner == rank]
            state[f"made{i}"] = sharded(array, mine, how, fill=False) if array.ndim and mine else np.zeros_like(array)
    exchange: Any = data.draw(st.sampled_from(["never", "always"]))
    load_on(states, folder, options=LoadOptions(timeout=60, recipes=recipes, exchange=exchange))
    for state in states:
        for i, (_, array) in enumerate(pairs):
            found = state[f"made{i}"]
            if isinstance(found, np.ndarray):
                assert same_bits(found, np.array(array, order="C"))
            else:
                check_pieces(found, np.array(array, order="C"))


@pytest.mark.parametrize("format", ["native", "safetensors", "paddle", "pdparams"])
@given(pairs=st.lists(made(), min_size=1, max_size=4))
@examples(15)
def test_merged_and_exported(folder: Path, format: Any, pairs: list[Pair]) -> None:
    recipes = {f"made{i}": recipe for i, (recipe, _) in enumerate(pairs)}
    expected = {f"made{i}": np.array(array, order="C") for i, (_, array) in enumerate(pairs)}
    merged = load_whole(folder, flat=True, options=LoadOptions(recipes=recipes))
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "cut_in_windows", functools.partial(cut_in_windows, most=64, most_turned=200))
        out = f"{scratch}/out.{format}"
        export(folder, out, format, options=LoadOptions(recipes=recipes, progress=False))
        exported = load_whole(out, flat=True)
    for key, array in expected.items():
        assert same_bits(merged[key], array), recipes[key]
        assert same_bits(exported[key], array), recipes[key]
