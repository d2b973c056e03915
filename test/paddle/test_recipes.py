"""Recipes for Paddle's tensors: DistTensors and ShardedWeights of any layout, by ranks that are threads."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt import (
    LoadOptions,
    concat,
    export,
    load_merged_state_dict,
    load_state_dict,
    save_state_dict,
    split,
    stored,
)
from paddle_dist_ckpt.wiring import load_with, paddles
from test.jobs import CountingStorage
from test.paddle import cases_recipes as cases
from test.paddle.tensors import NUMPY_DTYPES, to_array
from test.paddle.test_sharded_weight import (
    ShardedWeight,
    States,
    assert_same,
    layouts,
    on_ranks,
    raise_first,
    saved,
    tensor_of,
)
from test.paddle.versions import lacks
from test.ranks.pool import RankPool
from test.readers.golden import GOLDEN, expected_arrays
from test.strategies import examples

has_aoa = lacks("aoa_config" in inspect.signature(dist.load_state_dict).parameters, "has no aoa_config")


@given(data=st.data())
@examples(25)
def test_every_layout_to_every_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("any")
    rows, columns = data.draw(st.integers(1, 6)), 2 * data.draw(st.integers(1, 4))
    dtype = NUMPY_DTYPES[data.draw(st.sampled_from(["float32", "bfloat16", "int8"]))]
    first = (np.arange(rows * columns) % 100).reshape(rows, columns).astype(dtype)
    second = (np.arange(3 * columns) % 100 - 100).reshape(3, columns).astype(dtype)
    sources = [data.draw(layouts(array.shape)) for array in (first, second)]
    states: States = [{} for _ in range(max(source.ranks for source in sources))]
    for name, array, source in zip("ab", (first, second), sources, strict=True):
        for state, value in zip(states, source.values(array), strict=False):
            state[name] = value
    raise_first(saved(path, *states))
    halves = split(stored("b").T, 2)
    recipe = concat(stored("a").T, concat(halves[1], halves[0]), axis=1)
    expected = np.hstack([first.T, np.roll(second.T, columns // 2, axis=0)]).copy()
    target = data.draw(layouts(expected.shape))
    values = target.values(np.zeros_like(expected))
    options = LoadOptions(timeout=60, recipes={"x": recipe}, exchange=data.draw(st.sampled_from(["never", "always"])))

    def load(ranks: Any, state: dict[str, Any]) -> Any:
        return load_with(ranks, paddles(ranks, state), path, None, options)

    raise_first(on_ranks([{"x": value} for value in values], load))
    for found, part in zip(target.found(values), target.expected(expected), strict=True):
        assert_same(found, part)


@pytest.mark.parametrize("aoa", [False, pytest.param(True, marks=has_aoa)])
@pytest.mark.parametrize(("dimension", "exchange"), [(0, "always"), (1, "auto")])
def test_on_ranks(pool: RankPool, tmp_path: Path, dimension: int, exchange: str, aoa: bool) -> None:
    results = pool.run(cases.load_what_is_made, str(tmp_path), 2, dimension, exchange, aoa, ranks=2)
    assert results == [[], []]


WRONG = {
    "shape": "t1: the target has shape [48, 40], its recipe makes [40, 48]",
    "dtype": "t1: the target has dtype float64, its recipe makes float32",
    "not stored": "t1: it is made of gone, which in the checkpoint is missing",
    "nothing makes it": "b: the state_dict has a tensor, in the checkpoint it is missing",
}


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("aoa", [False, pytest.param(True, marks=has_aoa)])
def test_what_one_rank_asks_wrongly_is_said_on_all(pool: RankPool, tmp_path: Path, how: str, aoa: bool) -> None:
    results = pool.run(cases.load_where_one_rank_asks_wrongly, str(tmp_path), 3, 1, how, aoa, ranks=3)
    for first, untouched, second, filled in results:
        if aoa and how == "not stored":
            assert (first.error, "aoa_config: gone should be assigned" in first.message) == ("ValueError", True)
        else:
            assert (first.error, f"{WRONG[how]}" in first.message) == ("StateDictMismatchError", True), first
            assert "(rank 1)" in first.message
        assert untouched
        assert first.seconds < 30
        assert (second.error, filled) == (None, True)


@has_aoa
def test_merges_with_an_aoa_config_on_ranks(pool: RankPool, tmp_path: Path) -> None:
    for merged, gone in pool.run(cases.merge_with_aoa, str(tmp_path), 3, ranks=3):
        assert merged.result == 4, merged
        assert (gone.error, "gone should be assigned before" in gone.message) == ("ValueError", True)
    array = np.arange(cases.ROWS**2, dtype=np.float32).reshape(cases.ROWS, cases.ROWS)
    expected = {"w0": array + 1, "w1": array.T, "w2": array + 2, "w3": array + 3}
    found = load_merged_state_dict(tmp_path / "merged")
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert_same(to_array(found[key]), np.ascontiguousarray(tensor))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "saved"]


@has_aoa
def test_an_engine_that_is_not_known_is_refused_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    for outcome in pool.run(cases.with_another_engine, str(tmp_path), 2, ranks=2):
        assert outcome.error == "UnsupportedValueError"
        assert f"the engine of Paddle {paddle.__version__} is not as this library knows it" in outcome.message


# -- formats -----------------------------------------------------------------------------------------------------------


def flat_weights(arrays: dict[str, Any], rank: int) -> dict[str, Any]:
    """What the first or second of two ranks has of tensors of which each has a range of the elements."""
    found = {}
    for key, array in arrays.items():
        cut = array.size // 3 + 1
        start, stop = ((0, cut), (cut, array.size))[rank]
        local = tensor_of(array.reshape(-1)[start:stop])
        zeros = (0,) * array.ndim
        found[key] = ShardedWeight(key, local, array.shape, array.shape, zeros, True, slice(start, stop))
    return found


def filled_flat(path: Any, expected: dict[str, Any], options: LoadOptions) -> None:
    """Load into such weights on two ranks, and compare."""
    states = [flat_weights({key: np.zeros_like(array) for key, array in expected.items()}, rank) for rank in range(2)]
    load = functools.partial(load_with, path=path, unique_id=None, options=options)
    raise_first(on_ranks(states, lambda ranks, state: load(ranks, paddles(ranks, state))))
    for rank, state in enumerate(states):
        for key, weight in flat_weights(expected, rank).items():
            assert_same(to_array(state[key].local_tensor), to_array(weight.local_tensor))


def rules(key: str, made: str, aoa: bool) -> LoadOptions:
    """The transposed tensor of a key, one way or the other."""
    if aoa:
        return LoadOptions(timeout=60, aoa_config={"aoa_statements": [f"{key}^T -> {made}"]})
    return LoadOptions(timeout=60, recipes={made: stored(key).T})


@pytest.mark.parametrize("aoa", [False, pytest.param(True, marks=has_aoa)])
@pytest.mark.parametrize("name", sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz")))
def test_every_format(name: str, aoa: bool) -> None:
    arrays = expected_arrays(name)
    key = next(key for key, array in arrays.items() if array.ndim == 2 and array.dtype == np.float32)
    # To Paddle's engine a name that ends as this does is that of a state, which follows its parameter.
    state = ".w_0" if aoa and key.endswith(".w_0") else ""
    expected = {f"made{state}": np.ascontiguousarray(arrays[key].T)}
    filled_flat(GOLDEN / name, expected, rules(key.removesuffix(state), "made", aoa))


@pytest.mark.parametrize("aoa", [False, pytest.param(True, marks=has_aoa)])
@pytest.mark.parametrize("kind", ["native", "safetensors", "paddle", "pdparams"])
def test_optimizer_states_and_no_more_than_is_needed(tmp_path: Path, kind: str, aoa: bool) -> None:
    states = ("", ".w_0", ".moment1_0", ".moment2_0")
    arrays = {f"{name}{state}": np.random.default_rng(i).normal(size=(512, 2048)).astype(np.float32)
              for i, (name, state) in enumerate(itertools.product("ab", states))}  # fmt: skip
    save_state_dict({key: tensor_of(array) for key, array in arrays.items()}, tmp_path / "saved")
    path: Path = tmp_path / "saved"
    if kind != "native":
        path = tmp_path / "other" / "state.pdparams" if kind == "pdparams" else tmp_path / "other"
        export(tmp_path / "saved", path, format=kind)
    log: list[tuple[str, int, int]] = []
    storage = CountingStorage(path.parent if kind == "pdparams" else path, log)
    expected = {f"a{state}": np.ascontiguousarray(arrays[f"a{state}"][:128].T) for state in states}  # 1 MiB each
    if aoa:
        statements = ["a^T -> t", "t -> x, r1, r2, r3, axis=1", "x -> a"]
        options = LoadOptions(timeout=60, exchange="never", aoa_config={"aoa_statements": statements})
    else:
        recipes = {f"a{state}": stored(f"a{state}")[:128].T for state in states}
        options = LoadOptions(timeout=60, exchange="never", recipes=recipes)
    filled_flat(storage, expected, options)
    needed = sum(array.nbytes for array in expected.values())
    # Of each MiB both ranks have something, so each reads it; what else is read are blocks at edges, and headers.
    assert (
        2 * needed <= sum(stop - start for _, start, stop in log) <= 2 * (needed + len(states) * (1 << 20)) + (1 << 20)
    )
    alone = load_state_dict({"a": tensor_of(np.zeros((2048, 128), "float32"))}, storage, options=_of_one(options))
    assert alone.bytes_read <= 2 << 20


def _of_one(options: LoadOptions) -> LoadOptions:
    recipes = None if options.recipes is None else {"a": options.recipes["a"]}
    return dataclasses.replace(options, recipes=recipes)
