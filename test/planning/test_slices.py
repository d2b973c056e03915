"""Slices along one dimension are recognised, and nothing else is taken for them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.planning import cover
from paddle_dist_ckpt.planning.cover import covers_exactly
from test.strategies import boxes_in, examples, paint, shapes, tilings

DIMENSIONS = 3
Region = tuple[tuple[int, ...], list[Box]]


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    d = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.sets(st.integers(1, shape[d] - 1)))) if shape[d] > 1 else []
    edges = [0, *cuts, shape[d]]
    corner = (0,) * len(shape)
    return [
        Box((*corner[:d], a, *corner[d + 1 :]), (*shape[:d], b - a, *shape[d + 1 :]))
        for a, b in itertools.pairwise(edges)
    ]


@st.composite
def regions(draw: st.DrawFn) -> list[Region]:
    """Slices, some of them with one box gone, there twice, changed or out of order; other tilings; no boxes."""
    found = []
    for _ in range(draw(st.integers(0, 5))):
        shape = draw(shapes(least=1, most=5, dimensions=DIMENSIONS))
        boxes = draw(st.one_of(slices(shape), tilings(shape))) if shape else [Box((), ())]
        i, change = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, 7))
        if change == 0:
            boxes = boxes[:i] + boxes[i + 1 :]
        elif change == 1:
            boxes = [*boxes[:i], boxes[i], *boxes[i:]]
        elif change == 2:
            boxes = [*boxes[:i], draw(boxes_in(shape, least=1)), *boxes[i + 1 :]]
        elif change == 3:
            boxes = draw(st.permutations(boxes))
        found.append((shape, list(boxes)))
    return found


@examples(75)
@given(regions(), st.integers(-3, 2**40))
def test_covers_are_those_of_painting(found: list[Region], start: int) -> None:
    groups = np.array([g for g, (_, boxes) in enumerate(found) for _ in boxes], np.int64)
    boxes = Boxes.of([box for _, boxes in found for box in boxes], DIMENSIONS)
    size = Boxes.of([whole(shape) for shape, _ in found], DIMENSIONS).shape
    regions = Boxes(np.full_like(size, start) * np.arange(1, DIMENSIONS + 1), size)
    boxes = Boxes(boxes.offset + regions.offset[groups], boxes.shape)
    expected = [bool((paint(shape, boxes) == 1).all()) for shape, boxes in found]
    covered = covers_exactly(groups, boxes, regions)
    assert covered.tolist() == expected
    sliced = cover._are_slices(groups, boxes, regions)
    assert (covered | ~sliced).all()


@examples(35)
@given(st.data())
def test_slices_are_recognised(data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1, most=6, dimensions=DIMENSIONS).filter(len))
    boxes, region = Boxes.of(data.draw(slices(shape)), len(shape)), Boxes.of([whole(shape)], len(shape))
    assert cover._are_slices(np.zeros(len(boxes), np.int64), boxes, region).tolist() == [True]
