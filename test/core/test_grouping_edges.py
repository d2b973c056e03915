"""Equal rows and runs against brute force, at the edges: no rows, no columns, large numbers, runs of any heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core import grouping
from paddle_dist_ckpt.core.columns import IntArray
from paddle_dist_ckpt.core.grouping import group_blocks, group_rows
from test.strategies import examples

Row = tuple[int, ...]
Run = tuple[Row, tuple[Row, ...]]
EDGES = (0, 1, -1, 2**62, -(2**63), 2**63 - 1, 2**32)
row_hashes = grouping._row_hashes


def collide(rows: IntArray) -> np.ndarray:
    return np.zeros(len(rows), np.uint64)


def collide_often(rows: IntArray) -> np.ndarray:
    """Some rows collide and others do not."""
    return row_hashes(rows) & np.uint64(1)


HASHES = {"hashes": row_hashes, "collisions": collide, "some collisions": collide_often}


def matrix(rows: Sequence[Row], width: int) -> IntArray:
    return np.array(rows, np.int64).reshape(len(rows), width)


def grouped(rows: Sequence[object]) -> tuple[list[int], list[int]]:
    """First of each group, and the group of each, by a dict."""
    known: dict[object, int] = {}
    group = [known.setdefault(row, len(known)) for row in rows]
    return [rows.index(row) for row in known], group


@pytest.mark.parametrize("how", HASHES)
@examples(40)
@given(st.data())
def test_rows_are_grouped_as_a_dict_does(how: str, data: st.DataObject) -> None:
    width = data.draw(st.integers(0, 5))
    values = data.draw(st.sampled_from([st.integers(0, 1), st.integers(-2, 2), st.sampled_from(EDGES)]))
    rows = data.draw(st.lists(st.tuples(*[values] * width), max_size=24))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "_row_hashes", HASHES[how])
        first, group = group_rows(matrix(rows, width))
    assert (first.tolist(), group.tolist()) == grouped(rows)
    assert (first.dtype, group.dtype) == (np.int64, np.int64)


@pytest.mark.parametrize("how", HASHES)
@examples(40)
@given(st.data())
def test_runs_are_grouped_by_their_rows_and_heads(how: str, data: st.DataObject) -> None:
    """Few different runs, some empty, some a beginning or a permutation of another. No two different ones are ever in
    one group; equal ones are, unless hashes collide, when every run may stand for itself."""
    width, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    row = st.tuples(*[st.integers(0, 1)] * width)
    kinds = data.draw(st.lists(st.lists(row, max_size=4), min_size=1, max_size=3))
    kinds += [kinds[0][::-1], kinds[0][:-1], kinds[0] * 2]
    run = st.tuples(st.tuples(*[st.integers(0, 1)] * heads), st.sampled_from(kinds).map(tuple))
    runs: list[Run] = data.draw(st.lists(run, max_size=12))
    starts = np.cumsum([0, *(len(rows) for _, rows in runs)])
    table = matrix([row for _, rows in runs for row in rows], width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "_row_hashes", HASHES[how])
        first, group = group_blocks(starts, table, matrix([head for head, _ in runs], heads))
    found = first.tolist(), group.tolist()
    if how == "hashes":
        assert found == grouped(runs)
    assert found in (grouped(runs), (list(range(len(runs))), list(range(len(runs)))))


def test_many_rows_of_few_kinds() -> None:
    rows = np.random.default_rng(0).integers(0, 7, (50_000, 6)) // 5
    first, group = group_rows(rows)
    assert (rows[first][group] == rows).all()
    assert len(first) == len(np.unique(rows, axis=0))
    assert (np.diff(first) > 0).all()
    assert (group[first] == np.arange(len(first))).all()


def test_rows_that_differ_in_the_last_column_or_bit_alone() -> None:
    rows = np.zeros((64, 40), np.int64)
    rows[np.arange(1, 64), 39] = 1 << np.arange(63)
    first, group = group_rows(np.vstack([rows, rows]))
    assert first.tolist() == list(range(64))
    assert group.tolist() == [*range(64)] * 2


def test_columns_are_not_taken_for_each_other() -> None:
    """Permutations of one row, and of the rows of one run."""
    rows = matrix([(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1)], 3)
    assert group_rows(rows)[1].tolist() == [0, 1, 2, 3, 4, 5]
    twice = np.vstack([rows[:3], rows[[1, 0, 2]], rows[:3]])
    first, group = group_blocks(np.array([0, 3, 6, 9]), twice, np.zeros((3, 0), np.int64))
    assert (first.tolist(), group.tolist()) == ([0, 1], [0, 1, 0])
