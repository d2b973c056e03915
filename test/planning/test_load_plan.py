"""Load plans, painted: what is read is what is wanted, from the shards that have it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, intersect, whole
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.layouts import Layout
from paddle_dist_ckpt.core.shards import ShardTable
from paddle_dist_ckpt.planning import load_plan
from paddle_dist_ckpt.planning.load_plan import Overlaps, WantedBoxes, plan_load
from test.strategies import boxes_in, examples, paint, shapes, tilings

DIMENSIONS = 4
Stored = Sequence[tuple[tuple[int, ...], list[Box]]]
Wanted = Sequence[tuple[int, Box]]


@pytest.fixture(scope="module", autouse=True, params=[1, 1 << 30], ids=["grids are looked for", "no grids"])
def grids(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds however many boxes a layout must have for its grid to be used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_plan, "_MANY", request.param)
        yield


def make_table(stored: Stored) -> ShardTable:
    layouts = [Layout(shape, Boxes.of(sorted(boxes), len(shape))) for shape, boxes in stored]
    count = len(stored)
    shards = sum(len(layout.boxes) for layout in layouts)
    zeros = np.zeros(count, np.int64)
    return ShardTable(
        [f"/t{i}" for i in range(count)],
        [DTYPES["float32"]] * count,
        zeros,
        layouts,
        np.arange(count),
        np.zeros(shards, np.int64),
        [None] * count,
    )


def plan(stored: Stored, wanted: Wanted) -> Overlaps:
    boxes = Boxes.of([box for _, box in wanted], DIMENSIONS)
    return plan_load(make_table(stored), WantedBoxes(np.array([t for t, _ in wanted], np.int64), boxes))


def items_of(items: Overlaps, row: int, ndim: int) -> list[tuple[int, Box]]:
    """The shards and boxes that are read for one wanted box."""
    found = []
    for i in np.flatnonzero(items.wanted == row).tolist():
        offset, shape = items.alike.take(items.like[i : i + 1])[0].box(0)
        assert offset[ndim:] == (0,) * (DIMENSIONS - ndim)
        assert shape[ndim:] == (1,) * (DIMENSIONS - ndim)
        found.append((int(items.shard[i]), Box(offset[:ndim], shape[:ndim])))
    return found


def check(stored: Stored, wanted: Wanted) -> None:
    """Items are the overlaps; uncovered are the wanted boxes of which an element is in no shard, or in several."""
    items, table = plan(stored, wanted), make_table(stored)
    uncovered = []
    for row, (t, box) in enumerate(wanted):
        shape, boxes = stored[t]
        found = items_of(items, row, len(shape))
        for shard, part in found:
            tensor, stored_box = table.shard_place(shard)
            assert tensor == t
            assert part == intersect(box, stored_box)
        assert len(found) == sum(intersect(box, other) is not None for other in boxes)
        covered = paint(shape, boxes)[box.slices]
        assert np.array_equal(paint(shape, [part for _, part in found])[box.slices], covered)
        if (covered != 1).any():
            uncovered.append(row)
    assert items.uncovered.tolist() == uncovered
    assert items.wanted.tolist() == sorted(items.wanted.tolist())


@st.composite
def problems(draw: st.DrawFn, exact: bool) -> tuple[Stored, Wanted]:
    stored, wanted = [], []
    for t in range(draw(st.integers(0, 4))):
        shape = draw(shapes(most=5))
        boxes = draw(tilings(shape))
        if not exact and draw(st.booleans()):
            boxes = draw(st.lists(st.sampled_from(boxes), unique=True)) if boxes else boxes
            boxes = boxes + draw(st.lists(boxes_in(shape, least=1), max_size=2)) if min(shape, default=1) else boxes
        stored.append((shape, list(boxes)))
        wanted += [(t, box) for box in draw(tilings(shape))] if draw(st.booleans()) else []
        wanted += [(t, box) for box in draw(st.lists(boxes_in(shape), max_size=3))]
    return stored, draw(st.permutations(wanted))


@pytest.mark.parametrize("few", [0, 4])
@examples(25)
@given(problems(exact=True))
def test_from_any_layout_to_any_other(few: int, problem: tuple[Stored, Wanted]) -> None:
    """With both ways to find the overlaps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_plan, "_FEW_PAIRS", few)
        check(*problem)


@examples(30)
@given(problems(exact=False))
def test_gaps_and_doubles_in_what_is_stored_are_reported(problem: tuple[Stored, Wanted]) -> None:
    check(*problem)


def test_only_the_boxes_that_touch_a_gap_are_reported() -> None:
    stored = [((6,), [Box((0,), (2,)), Box((3,), (2,)), Box((4,), (2,))])]
    wanted = [(0, Box((i,), (1,))) for i in range(6)]
    assert plan(stored, wanted).uncovered.tolist() == [2, 4]


def test_boxes_outside_of_the_tensor_are_reported() -> None:
    assert plan([((4,), [whole((4,))])], [(0, Box((2,), (3,))), (0, Box((-1,), (2,)))]).uncovered.tolist() == [0, 1]


def test_wanted_boxes_of_no_elements_need_nothing() -> None:
    items = plan(
        [((0, 3), []), ((4,), [whole((4,))])], [(0, whole((0, 3))), (1, Box((2,), (0,))), (1, Box((4,), (0,)))]
    )
    assert len(items.wanted) == 0
    assert len(items.uncovered) == 0


def test_a_job_of_many_ranks_takes_no_pair_of_all_shards() -> None:
    """2,000 tensors of 64 shards each, of which a rank wants a 96th: about two shards a tensor."""
    side, cuts = 64 * 96, list(range(96, 64 * 96, 96))
    tensors = 2_000
    layout = Layout.from_cuts((side,), [cuts])
    shards = 64 * tensors
    zeros = np.zeros(tensors, np.int64)
    table = ShardTable(
        [f"/{i:04}" for i in range(tensors)],
        [DTYPES["float32"]] * tensors,
        zeros,
        [layout],
        zeros,
        np.zeros(shards, np.int64),
        [None] * tensors,
    )
    items = plan_load(table, WantedBoxes(np.arange(tensors), Boxes.of([Box((64 * 7,), (64,))] * tensors, 1)))
    assert len(items.uncovered) == 0
    assert int(items.alike.take(items.like)[0].volumes.sum()) == 64 * tensors
    assert len(items.wanted) == math.ceil(64 * 8 / 96) * tensors - 64 * 7 // 96 * tensors
