"""Boxes in columns against the same boxes one by one."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, intersect
from paddle_dist_ckpt.core.boxes import Boxes
from test.strategies import boxes_in, examples, shapes

DIMENSIONS = 4


@st.composite
def lists(draw: st.DrawFn) -> list[Box]:
    """Boxes of 0 to 4 dimensions, some without elements."""
    return [draw(boxes_in(draw(shapes()))) for _ in range(draw(st.integers(0, 6)))]


def padded(box: Box) -> Box:
    pad = DIMENSIONS - len(box.shape)
    return Box(box.offset + (0,) * pad, box.shape + (1,) * pad)


@examples(35)
@given(lists())
def test_columns_are_those_of_the_boxes(boxes: list[Box]) -> None:
    columns = Boxes.of(boxes, DIMENSIONS)
    assert len(columns) == len(boxes)
    assert columns.to_list() == list(map(padded, boxes))
    assert [columns.box(i, len(box.shape)) for i, box in enumerate(boxes)] == boxes
    assert columns.volumes.tolist() == [box.size for box in boxes]
    assert columns.filled.tolist() == [box.size > 0 for box in boxes]
    assert columns.table.tolist() == [[*offset, *shape] for offset, shape in map(padded, boxes)]
    stops = [[o + n for o, n in zip(*padded(box), strict=True)] for box in boxes]
    assert columns.high.tolist() == stops
    assert columns.same_as_before().tolist() == [padded(a) == padded(b) for a, b in itertools.pairwise(boxes)]
    assert columns.offset.dtype == columns.shape.dtype == np.int64


@examples(35)
@given(lists(), lists())
def test_joined_boxes_stand_one_behind_the_other(some: list[Box], others: list[Box]) -> None:
    parts = [Boxes.of([box], len(box.shape)) for box in some] + [Boxes.of(others, DIMENSIONS)]
    joined = Boxes.joined(parts, DIMENSIONS)
    assert joined.to_list() == list(map(padded, some + others))
    assert Boxes.joined([joined, joined]).to_list() == joined.to_list() * 2
    assert len(Boxes.joined([], DIMENSIONS)) == 0
    rows = np.arange(len(joined))[::-1]
    assert joined.take(rows).to_list() == joined.to_list()[::-1]
    assert joined.first(2).to_list() == [Box(box.offset[:2], box.shape[:2]) for box in joined.to_list()]


@examples(35)
@given(st.data())
def test_what_two_boxes_have_in_common(data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1))
    pairs = data.draw(st.lists(st.tuples(boxes_in(shape), boxes_in(shape)), max_size=6))
    pairs = [pair for pair in pairs if intersect(*pair) is not None]
    a, b = (Boxes.of([pair[i] for pair in pairs], len(shape)) for i in range(2))
    assert a.common(b).to_list() == [intersect(*pair) for pair in pairs]
    layers = np.arange(len(pairs))
    assert a.layered(layers).to_list() == [Box((i, *o), (1, *n)) for i, (o, n) in enumerate(a.to_list())]
    assert Boxes.wholes(a.shape).to_list() == [Box((0,) * len(shape), n) for _, n in a.to_list()]


def test_tensors_without_elements_share_their_boxes() -> None:
    nothing = Boxes.of([], 3)
    assert Boxes.of(iter([]), 3) is nothing
    assert nothing.offset.shape == nothing.shape.shape == (0, 3)
    assert Boxes.of([], 2).offset.shape == (0, 2)
