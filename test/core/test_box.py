"""Boxes against arrays that have the boxes painted in them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, cut_flat_range, flat_range, intersect, join, subtract, whole
from test.strategies import boxes_in, examples, paint, shapes


def test_a_box_says_where_it_is() -> None:
    box = Box((0, 8), (4, 8))
    assert str(box) == "[0:4,8:16]"
    assert str(Box((), ())) == "[]"
    assert box.size == 32
    assert box.slices == (slice(0, 4), slice(8, 16))
    assert box.relative_to((0, 6)) == Box((0, 2), (4, 8))
    assert whole((3, 5)) == Box((0, 0), (3, 5))
    assert whole(()).size == 1


@examples(25)
@given(st.data())
def test_intersect_has_the_common_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = intersect(a, b)
    both = paint(shape, [a, b]) == 2
    assert np.array_equal(paint(shape, [common] if common else []) == 1, both)
    assert (common is None) == (not both.any())
    assert common == intersect(b, a)


@examples(50)
@given(st.data())
def test_what_is_joined_is_one_box(data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1))
    assume(shape)
    box, d = data.draw(boxes_in(shape, least=1)), data.draw(st.integers(0, len(shape) - 1))
    n = data.draw(st.integers(0, box.shape[d]))
    first = Box(box.offset, (*box.shape[:d], n, *box.shape[d + 1 :]))
    offset = (*box.offset[:d], box.offset[d] + n, *box.offset[d + 1 :])
    rest = Box(offset, (*box.shape[:d], box.shape[d] - n, *box.shape[d + 1 :]))
    assert join(first, rest) == box
    other = data.draw(boxes_in(shape, least=1))
    together = join(box, other)
    if together is not None:
        assert np.array_equal(paint(shape, [together]), paint(shape, [box, other]))


@pytest.mark.parametrize("other", [Box((0, 0), (2, 3)), Box((0, 4), (2, 3)), Box((0, 3), (1, 3)), Box((2, 3), (2, 3))])
def test_what_is_not_beside_a_box_is_not_joined_to_it(other: Box) -> None:
    assert join(Box((0, 0), (2, 3)), other) is None


@examples(25)
@given(st.data())
def test_subtract_leaves_the_rest_once(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    pieces = subtract(a, b)
    expected = (paint(shape, [a]) == 1) & (paint(shape, [b]) == 0)
    assert np.array_equal(paint(shape, pieces), expected.astype(np.int64))
    assert len(pieces) <= max(1, 2 * len(shape))
    assert all(piece.size for piece in pieces)


@examples(25)
@given(st.data())
def test_flat_range_is_where_the_elements_stand(data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1))
    box = data.draw(boxes_in(shape, least=1))
    places = np.arange(math.prod(shape)).reshape(shape)[box.slices].reshape(-1)
    contiguous = places[-1] - places[0] + 1 == len(places)
    assert flat_range(box, shape) == ((places[0], places[-1] + 1) if contiguous else None)


@examples(25)
@given(st.data())
def test_cut_flat_range_is_the_range_in_order(data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1))
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = cut_flat_range(shape, start, stop)
    numbers = np.arange(total).reshape(shape)
    found = [n for box in boxes for n in numbers[box.slices].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert all(flat_range(box, shape) is not None for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@examples(25)
@given(shapes())
def test_cut_flat_range_of_everything_is_one_box(shape: tuple[int, ...]) -> None:
    assume(math.prod(shape))
    assert cut_flat_range(shape, 0, math.prod(shape)) == [whole(shape)]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (4,)])
def test_an_empty_range_has_no_boxes(shape: tuple[int, ...]) -> None:
    assert cut_flat_range(shape, 0, 0) == []
