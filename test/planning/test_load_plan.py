"""Load plans, column by column, against comparing every wanted box with every shard of its tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core import columns, layouts
from paddle_dist_ckpt.core.box import Box, intersect, whole
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import MANY
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.layouts import Layout
from paddle_dist_ckpt.core.shards import ShardTable
from paddle_dist_ckpt.planning import cover, load_plan
from paddle_dist_ckpt.planning.load_plan import Overlaps, WantedBoxes, plan_load
from test.strategies import boxes_in, examples, grids, paint, shapes, tilings

DIMENSIONS = 4
Problem = tuple[ShardTable, list[tuple[int, Box]]]


def table_of(layouts: list[Layout], layout_of: Sequence[int]) -> ShardTable:
    count = len(layout_of)
    zeros = np.zeros(sum(len(layouts[i].boxes) for i in layout_of), np.int64)
    paths, numbers = [f"/{i:04}" for i in range(count)], np.array(layout_of, np.int64)
    return ShardTable(paths, [DTYPES["float32"]] * count, zeros[:0], layouts, numbers, zeros, [None] * count)


def plan(table: ShardTable, wanted: Sequence[tuple[int, Box]]) -> Overlaps:
    boxes = Boxes.of([box for _, box in wanted], DIMENSIONS)
    return plan_load(table, WantedBoxes(np.array([t for t, _ in wanted], np.int64), boxes))


def check(table: ShardTable, wanted: Sequence[tuple[int, Box]]) -> None:
    expected = []
    uncovered = []
    places = [(t, box) for t, i in enumerate(table.layout_of.tolist()) for box in table.layouts[i].boxes.to_list()]
    for row, (t, box) in enumerate(wanted):
        overlaps = []
        for shard, (tensor, stored) in enumerate(places):
            part = intersect(box, stored) if tensor == t else None
            if part is not None:
                overlaps.append(part)
                expected.append((row, shard, part, stored))
        inside = [part.relative_to(box.offset) for part in overlaps]
        if box.size and not (paint(box.shape, inside) == 1).all():
            uncovered.append(row)
    items = plan(table, wanted)
    assert items.wanted.tolist() == [row for row, *_ in expected]
    assert items.shard.tolist() == [shard for _, shard, *_ in expected]
    columns = (
        [part for *_, part, _ in expected],
        [stored for *_, stored in expected],
        [wanted[row][1] for row, *_ in expected],
    )
    for found, boxes in zip(items.alike.take(items.like), columns, strict=True):
        assert found.table.tolist() == Boxes.of(boxes, DIMENSIONS).table.tolist()
    assert items.uncovered.tolist() == uncovered


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Tensors of a few layouts: grids, other tilings, gaps, doubles, nothing; boxes wanted, outside and empty ones."""
    layouts = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(shapes(most=6))
        boxes = list(draw(st.one_of(grids(shape), tilings(shape, 12)))) if min(shape, default=1) else [whole(shape)]
        if len(shape) < 2 or len(boxes) > 1:  # a layout of several dimensions has a box
            more = draw(st.lists(boxes_in(shape, least=1), max_size=2)) if min(shape, default=1) else []
            boxes = draw(st.sampled_from([boxes, boxes, boxes[1:], [*boxes, *boxes[:1]], [*boxes, *more]]))
        layouts.append(Layout(shape, Boxes.of(sorted(boxes), len(shape))))
    layout_of = draw(st.lists(st.integers(0, len(layouts) - 1), min_size=1, max_size=8))
    wanted = []
    for t in draw(st.lists(st.integers(0, len(layout_of) - 1), max_size=12)):
        shape = layouts[layout_of[t]].shape
        box = draw(st.one_of(boxes_in(shape), st.just(whole(shape))))
        if shape and draw(st.integers(0, 5)) == 0:
            step = draw(st.sampled_from([-2, 1, 3]))
            box = Box((box.offset[0] + step, *box.offset[1:]), box.shape)
        wanted.append((t, box))
    return table_of(layouts, layout_of), wanted


@pytest.fixture(scope="module", autouse=True, params=[1, 12, 1 << 40], ids=["grids", "some grids", "no grids"])
def thresholds(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_plan, "_MANY", request.param)
        yield


@pytest.fixture(scope="module", autouse=True, params=[3, MANY], ids=["in pieces", "all together"])
def pieces(request: pytest.FixtureRequest) -> Iterator[None]:
    """However few boxes there are of which the columns are narrow, and which are looked at together."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (columns, layouts, cover, load_plan):
            patch.setattr(module, "MANY", request.param)
        patch.setattr(load_plan, "_TOGETHER", request.param)
        yield


@examples(25)
@given(problems())
def test_items_are_all_overlaps_in_order(problem: Problem) -> None:
    check(*problem)


@examples(25)
@given(problems())
def test_items_found_by_search_are_all_overlaps_in_order(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_plan, "_FEW_PAIRS", 0)
        check(*problem)


def test_many_different_boxes_of_one_grid() -> None:
    layout = Layout.from_cuts((30, 20), [[3, 4, 11, 29], [1, 10]])
    random = np.random.default_rng(0)
    wanted = []
    for _ in range(60):
        low = random.integers(-1, [30, 20]).tolist()
        wanted.append((int(random.integers(3)), Box(tuple(low), tuple(random.integers(0, 12, 2).tolist()))))
    check(table_of([layout], [0, 0, 0]), wanted)


def test_only_the_boxes_that_touch_a_gap_are_reported() -> None:
    layout = Layout((6,), Boxes.of([Box((0,), (2,)), Box((3,), (2,)), Box((4,), (2,))], 1))
    wanted = [(0, Box((i,), (1,))) for i in range(6)]
    assert plan(table_of([layout], [0]), wanted).uncovered.tolist() == [2, 4]


def test_boxes_outside_of_the_tensor_are_reported() -> None:
    table = table_of([Layout((4,), Boxes.of([whole((4,))], 1))], [0])
    assert plan(table, [(0, Box((2,), (3,))), (0, Box((-1,), (2,)))]).uncovered.tolist() == [0, 1]


def test_wanted_boxes_of_no_elements_need_nothing() -> None:
    table = table_of([Layout((0, 3), Boxes.of([], 2)), Layout((4,), Boxes.of([whole((4,))], 1))], [0, 1])
    items = plan(table, [(0, whole((0, 3))), (1, Box((2,), (0,))), (1, Box((4,), (0,)))])
    assert len(items.wanted) == 0
    assert len(items.uncovered) == 0


def test_a_wanted_box_outside_of_a_grid_is_uncovered() -> None:
    table = table_of([Layout.from_cuts((4, 6), [[2], [2, 4]])], [0])
    boxes = [
        Box((0, 0), (4, 6)),
        Box((0, 0), (5, 6)),
        Box((-1, 0), (2, 2)),
        Box((0, 6), (1, 1)),
        Box((9, 9), (1, 1)),
        Box((-5, 0), (2, 2)),
        Box((1, 1), (2, 4)),
        Box((4, 0), (0, 6)),
        Box((2, 2), (0, 2)),
    ]
    items = plan(table, [(0, box) for box in boxes])
    assert items.uncovered.tolist() == [1, 2, 3, 4, 5]
    assert np.bincount(items.wanted, minlength=len(boxes)).tolist() == [6, 6, 1, 0, 0, 0, 6, 0, 0]
