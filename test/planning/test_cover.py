"""Exact cover against painted arrays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, intersect, whole
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.planning import cover
from paddle_dist_ckpt.planning.cover import covers_exactly, first_gap
from test.strategies import boxes_in, examples, paint, shapes, tilings


@pytest.fixture(scope="module", autouse=True, params=[1, 1 << 30], ids=["grids are looked for", "no grids"])
def grids(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds however many boxes a tensor must have to be looked at as a grid."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cover, "_MANY", request.param)
        yield


@pytest.fixture(scope="module", autouse=True, params=[2, cover.MANY], ids=["in pieces", "all together"])
def pieces(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cover, "MANY", request.param)
        yield


def check(shapes_and_boxes: list[tuple[tuple[int, ...], list[Box]]], dimensions: int = 4) -> list[bool]:
    """``covers_exactly`` for tensors and their boxes, the way the plans call it; or if they start anywhere else."""
    groups = np.array([g for g, (_, boxes) in enumerate(shapes_and_boxes) for _ in boxes], np.int64)
    boxes = Boxes.of([box for _, boxes in shapes_and_boxes for box in boxes], dimensions)
    regions = Boxes.of([whole(shape) for shape, _ in shapes_and_boxes], dimensions)
    found: list[bool] = covers_exactly(groups, boxes, regions).tolist()
    start = np.arange(len(regions))[:, None] * 7 - 3
    moved = Boxes(boxes.offset + start[groups], boxes.shape), Boxes(regions.offset + start, regions.shape)
    assert covers_exactly(groups, *moved).tolist() == found
    return found


@examples(35)
@given(st.data())
def test_tilings_cover_and_anything_else_does_not(data: st.DataObject) -> None:
    """Tilings with a box added, left out, moved or doubled, several tensors at a time."""
    cases, expected = [], []
    for _ in range(data.draw(st.integers(0, 4))):
        shape = data.draw(shapes())
        boxes = list(data.draw(tilings(shape)))
        change = data.draw(st.sampled_from(["none", "leave out", "double", "replace", "add"]))
        if boxes and change in ("leave out", "replace"):
            boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        if boxes and change == "double":
            boxes.append(data.draw(st.sampled_from(boxes)))
        if min(shape, default=1) and change in ("replace", "add"):
            boxes.append(data.draw(boxes_in(shape, least=1)))
        cases.append((shape, data.draw(st.permutations(boxes))))
        expected.append(bool((paint(shape, boxes) == 1).all()))
    assert check(cases) == expected


@examples(35)
@given(st.data())
def test_random_heaps_of_boxes(data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1, most=3, dimensions=3))
    boxes = data.draw(st.lists(boxes_in(shape, least=1), max_size=6))
    assert check([(shape, boxes)]) == [bool((paint(shape, boxes) == 1).all())]


def test_overlaps_that_make_up_for_gaps_are_found() -> None:
    # The numbers of elements add up; the regions do not.
    assert check([((4,), [Box((0,), (2,)), Box((1,), (2,))])]) == [False]
    assert check([((2, 2), [Box((0, 0), (1, 2)), Box((0, 0), (1, 2))])]) == [False]


@pytest.mark.parametrize("box", [Box((-1,), (5,)), Box((0,), (5,)), Box((2,), (3,)), Box((-4,), (4,))])
def test_boxes_outside_do_not_cover(box: Box) -> None:
    assert check([((4,), [box]), ((4,), [whole((4,))])]) == [False, True]


def test_regions_of_no_elements_need_no_boxes() -> None:
    assert check([((0,), []), ((3, 0, 2), []), ((), []), ((), [Box((), ())])]) == [True, True, False, True]
    assert check([((), []), ((), [Box((), ())]), ((), [Box((), ())] * 2)], dimensions=0) == [False, True, False]
    assert check([]) == []


def test_regions_need_not_start_at_zero() -> None:
    region = Boxes.of([Box((2**40, 7), (4, 2))], 2)
    halves = Boxes.of([Box((2**40, 7), (2, 2)), Box((2**40 + 2, 7), (2, 2))], 2)
    assert covers_exactly(np.zeros(2, np.int64), halves, region).tolist() == [True]
    assert covers_exactly(np.zeros(1, np.int64), halves.take(slice(1)), region).tolist() == [False]


@examples(35)
@given(st.data())
def test_first_gap_is_a_region_that_no_box_has(data: st.DataObject) -> None:
    shape = data.draw(shapes(most=4, dimensions=3))
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    gap = first_gap(whole(shape), boxes)
    assert (gap is None) == bool((paint(shape, boxes) > 0).all())
    if gap is not None:
        assert gap.size
        assert paint(shape, [gap]).sum() == gap.size
        assert all(intersect(gap, box) is None for box in boxes)


def test_the_numbers_are_made_from_all_that_is_given() -> None:
    """So the answer is the same everywhere, and no boxes can be made to fit numbers that are known before."""
    boxes = Boxes.of([Box((0, 0), (2, 4)), Box((2, 0), (2, 4))], 2)
    groups, regions = np.zeros(2, np.int64), Boxes.of([whole((4, 4))], 2)
    seeds = cover._seeds(groups, boxes, regions)
    assert seeds.shape == (3, 2)
    assert np.array_equal(cover._seeds(groups, boxes, regions), seeds)
    for change in range(5):
        columns = [groups, boxes.offset, boxes.shape, regions.offset, regions.shape]
        columns[change] = columns[change].copy()
        columns[change].flat[0] += 1
        group, offset, shape, low, size = columns
        assert not np.isin(cover._seeds(group, Boxes(offset, shape), Boxes(low, size)), seeds).any()
