"""Equal rows are found, also where hashes deceive."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core import grouping
from paddle_dist_ckpt.core.box import whole
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import IntArray
from paddle_dist_ckpt.core.grouping import group_blocks, group_rows
from paddle_dist_ckpt.core.layouts import Layout, grid_starts
from test.strategies import examples


def no_hashes(rows: IntArray) -> np.ndarray:
    """All rows collide."""
    return np.zeros(len(rows), np.uint64)


@pytest.fixture(scope="module", autouse=True, params=["hashes", "collisions"])
def hashes(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "collisions":
            patch.setattr(grouping, "_row_hashes", no_hashes)
        yield request.param


bits = st.integers(0, 1)
small_rows = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 1)), max_size=20)


def matrix(rows: list[tuple[int, int]]) -> IntArray:
    return np.array(rows, np.int64).reshape(-1, 2)


@examples(35)
@given(small_rows)
def test_rows_are_grouped_in_the_order_in_which_they_stand(rows: list[tuple[int, int]]) -> None:
    first, group = group_rows(matrix(rows))
    different = list(dict.fromkeys(rows))
    assert [rows[i] for i in first.tolist()] == different
    assert first.tolist() == [rows.index(row) for row in different]
    assert [different[g] for g in group.tolist()] == rows


@examples(35)
@given(st.lists(st.tuples(bits, st.lists(st.tuples(bits, bits), max_size=3)), max_size=12))
def test_runs_of_one_group_are_equal(hashes: str, runs: list[tuple[int, list[tuple[int, int]]]]) -> None:
    starts = np.cumsum([0, *(len(run) for _, run in runs)])
    heads = np.array([head for head, _ in runs], np.int64).reshape(-1, 1)
    first, group = group_blocks(starts, matrix([row for _, run in runs for row in run]), heads)
    assert [runs[first[g]] for g in group.tolist()] == runs
    if hashes == "hashes":  # otherwise equal runs may be told apart, which costs time and nothing else
        assert len(first) == len({(head, tuple(run)) for head, run in runs})


@examples(35)
@given(st.data())
def test_only_whole_grids_are_taken_for_grids(data: st.DataObject) -> None:
    some = st.lists(st.integers(1, 3), min_size=1, max_size=4)
    lengths = [data.draw(some) for _ in range(data.draw(st.integers(0, 3)))]
    shape = tuple(map(sum, lengths))
    cuts = [np.cumsum(length)[:-1].tolist() for length in lengths]
    grid = Layout.from_cuts(shape, cuts)
    boxes, count = grid.boxes, len(grid.boxes)
    found = grid_starts(boxes, whole(shape))
    assert found is not None
    assert [starts[1:].tolist() for starts in found] == cuts
    if count > 1:
        gone = data.draw(st.integers(0, count - 1))
        rest = np.delete(np.arange(count), gone)
        assert grid_starts(boxes.take(rest), whole(shape)) is None
        swapped = np.arange(count)
        swapped[[0, gone]] = swapped[[gone, 0]]
        if gone:
            assert grid_starts(boxes.take(swapped), whole(shape)) is None
    if shape:
        d = data.draw(st.integers(0, len(shape) - 1))
        for column in range(2):
            changed = [boxes.offset.copy(), boxes.shape.copy()]
            changed[column][data.draw(st.integers(0, count - 1)), d] += 1
            assert grid_starts(Boxes(*changed), whole(shape)) is None
