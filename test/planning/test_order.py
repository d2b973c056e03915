"""Orders by one integer are the orders by all columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import IntArray
from paddle_dist_ckpt.planning import order
from paddle_dist_ckpt.planning.order import box_order, file_order, shard_order
from test.strategies import examples

Columns = tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray]


@st.composite
def columns(draw: st.DrawFn) -> Columns:
    """Shapes and item sizes of tensors; tensor, offset, shape and rank of boxes, some outside, some twice."""
    tensors, dimensions, count = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 30))
    outside = draw(st.sampled_from([0, 0, 2]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shapes = rng.integers(0, 5, (tensors, dimensions))
    tensor = rng.integers(0, tensors, count)
    offset = rng.integers(-outside, np.maximum(shapes[tensor], 1) + outside)
    itemsize = rng.choice([1, 2, 4, 8, 16], tensors)
    return shapes, itemsize, tensor, offset, rng.integers(1, 3, offset.shape), rng.integers(0, 3, count)


@examples(40)
@given(columns())
def test_they_are_those_of_lexsort(drawn: Columns) -> None:
    shapes, itemsize, tensor, offset, shape, rank = drawn
    boxes = Boxes(offset, shape)
    by_offset = [offset[:, d] for d in reversed(range(offset.shape[1]))]
    by_shape = [shape[:, d] for d in reversed(range(offset.shape[1]))]
    assert np.array_equal(box_order(shapes, tensor, boxes), np.lexsort([*by_offset, tensor]))
    expected = np.lexsort([*by_offset, tensor, -itemsize[tensor], rank])
    assert np.array_equal(file_order(shapes, itemsize, tensor, boxes, rank), expected)
    expected = np.lexsort([*by_shape, *by_offset, tensor])
    assert np.array_equal(shard_order(shapes, tensor, boxes), expected)


def test_tensors_too_large_to_be_counted_together() -> None:
    shapes = np.array([[2**40, 2**21], [2**40, 2**21], [4, 4]])
    tensor, offset = np.array([2, 1, 0, 1]), np.array([[0, 1], [2**39, 5], [2**39, 6], [2**39, 4]])
    assert order._places(shapes, tensor, offset) is None
    assert box_order(shapes, tensor, Boxes(offset, offset)).tolist() == [2, 3, 1, 0]


@pytest.mark.parametrize("dimensions", [1, 3])
def test_no_boxes(dimensions: int) -> None:
    none, empty = np.zeros(0, np.int64), Boxes.of([], dimensions)
    assert len(box_order(np.ones((2, dimensions), np.int64), none, empty)) == 0
    assert len(shard_order(np.ones((2, dimensions), np.int64), none, empty)) == 0
