"""Overlapping pairs against comparing all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, intersect
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import IntArray
from paddle_dist_ckpt.planning import overlap
from paddle_dist_ckpt.planning.overlap import overlapping_pairs
from test.strategies import boxes_in, examples


def pairs(a: list[Box], b: list[Box], dimensions: int) -> list[tuple[int, int]]:
    i, j = overlapping_pairs(Boxes.of(a, dimensions), Boxes.of(b, dimensions))
    return list(zip(i.tolist(), j.tolist(), strict=True))


def all_pairs(a: list[Box], b: list[Box]) -> list[tuple[int, int]]:
    return [(i, j) for i, x in enumerate(a) for j, y in enumerate(b) if intersect(x, y) is not None]


@pytest.mark.parametrize("direct", [1 << 14, 4, 1])
@examples(25)
@given(st.data())
def test_pairs_are_those_that_overlap(direct: int, data: st.DataObject) -> None:
    dimensions = data.draw(st.integers(0, 3))
    box = boxes_in((7,) * dimensions)
    a, b = data.draw(st.lists(box, min_size=1, max_size=12)), data.draw(st.lists(box, max_size=12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "_DIRECT", direct)
        assert pairs(a, b, dimensions) == all_pairs(a, b)


def random_tiles(seed: int, count: int) -> tuple[IntArray, IntArray]:
    """A grid with jittered cuts of a (10**6, 10**6) tensor, as columns of lows and highs."""
    random = np.random.default_rng(seed)
    x = np.concatenate([[0], np.sort(random.choice(10**6 - 1, count - 1, replace=False)) + 1, [10**6]])
    low = np.stack(np.meshgrid(x[:-1], x[:-1], indexing="ij"), axis=-1).reshape(-1, 2)
    high = np.stack(np.meshgrid(x[1:], x[1:], indexing="ij"), axis=-1).reshape(-1, 2)
    order = random.permutation(len(low))
    return low[order], high[order]


def test_many_boxes_are_split_and_every_pair_is_found_once() -> None:
    (a_low, a_high), (b_low, b_high) = random_tiles(1, 30), random_tiles(2, 25)
    i, j = overlapping_pairs(Boxes(a_low, a_high - a_low), Boxes(b_low, b_high - b_low))
    hit = (np.maximum(a_low[:, None], b_low) < np.minimum(a_high[:, None], b_high)).all(axis=2)
    expected = np.nonzero(hit)
    assert np.array_equal(i, expected[0])
    assert np.array_equal(j, expected[1])


def test_boxes_that_all_overlap_end() -> None:
    boxes = Boxes.of([Box((0, 0), (5, 5))] * 200, 2)
    i, j = overlapping_pairs(boxes, boxes)
    assert len(i) == len(j) == 200**2


def test_many_tensors_take_no_time_per_pair_of_them() -> None:
    count = 50_000
    boxes = Boxes.of([Box((0,), (8,))] * count, 1).layered(np.arange(count))
    i, j = overlapping_pairs(boxes, boxes)
    assert np.array_equal(i, np.arange(count))
    assert np.array_equal(j, np.arange(count))


@pytest.mark.parametrize("start", [0, 3000, 20_000])
def test_boxes_far_from_each_other_are_not_compared(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut that leaves no pair on one of its sides is as good as any."""
    compared, compare = list[int](), overlap._compare

    def count(a: overlap.Span, b: overlap.Span, cell: overlap.Span) -> tuple[IntArray, IntArray]:
        compared.append(len(a[0]) * len(b[0]))
        return compare(a, b, cell)

    monkeypatch.setattr(overlap, "_compare", count)
    a = Boxes.of([Box((i,), (1,)) for i in range(10_000)], 1)
    b = Boxes.of([Box((i + start,), (1,)) for i in range(10_000)], 1)
    i, j = overlapping_pairs(a, b)
    assert np.array_equal(i, j + start)
    assert len(i) == max(0, 10_000 - start)
    assert sum(compared) < 200 * 10_000
