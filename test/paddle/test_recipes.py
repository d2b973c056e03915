"""Recipes for Paddle's tensors: DistTensors and ShardedWeights of any layout, by ranks that are threads."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import paddle.distributed as dist
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt import LoadOptions, concat, split, stored
from paddle_dist_ckpt.wiring import load_with, paddles
from test.paddle import cases_recipes as cases
from test.paddle.tensors import NUMPY_DTYPES
from test.paddle.test_sharded_weight import States, assert_same, layouts, on_ranks, raise_first, saved
from test.paddle.versions import lacks
from test.ranks.pool import RankPool
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
