"""What is done faster where boxes form a grid, or have one number each, gives what the general way gives."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import IntArray
from paddle_dist_ckpt.core.layouts import Layout, grid_starts
from paddle_dist_ckpt.planning import cover, order
from paddle_dist_ckpt.planning.cover import tensors_covered
from paddle_dist_ckpt.planning.load_plan import WantedBoxes, plan_load
from paddle_dist_ckpt.planning.order import box_order, file_order, shard_order
from test.pace import slowness
from test.planning.test_load_plan import table_of
from test.strategies import boxes_in, examples, grids, paint, shapes, tilings

NEVER = 1 << 60
DIMENSIONS = 3


# -- grids


@st.composite
def cuts_of(draw: st.DrawFn, shape: Sequence[int]) -> list[list[int]]:
    """Where a tensor is cut in each dimension."""
    return [sorted(draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else [] for n in shape]


def is_grid(boxes: Boxes, region: Box) -> list[list[int]] | None:
    """The definition: the starts in each dimension, if the boxes are their product in row-major order; else None."""
    offsets, extents, low = boxes.offset, boxes.shape, region.offset
    high = [o + n for o, n in zip(*region, strict=True)]
    if not len(boxes):
        return None
    starts = [sorted(set(column)) for column in offsets.T.tolist()]
    if any(s[0] != first for s, first in zip(starts, low, strict=True)):
        return None
    lengths = [dict(zip(s, np.diff([*s, stop]).tolist(), strict=True)) for s, stop in zip(starts, high, strict=True)]
    product = list(itertools.product(*starts))
    if [tuple(offset) for offset in offsets.tolist()] != product:
        return None
    expected = [[known[at] for known, at in zip(lengths, place, strict=True)] for place in product]
    return starts if extents.tolist() == expected else None


def found_grid(boxes: Boxes, region: Box) -> list[list[int]] | None:
    starts = grid_starts(boxes, region)
    return None if starts is None else [places.tolist() for places in starts]


@examples(25)
@given(st.data())
def test_a_grid_is_found_wherever_its_region_starts(data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1))
    cuts = data.draw(cuts_of(shape))
    layout = Layout.from_cuts(shape, cuts)
    assert layout.cuts() == cuts
    low = data.draw(st.lists(st.integers(-3, 2**40), min_size=len(shape), max_size=len(shape)))
    moved = Boxes(layout.boxes.offset + np.array(low, np.int64), layout.boxes.shape)
    expected = [[a, *(a + c for c in places)] for a, places in zip(low, cuts, strict=True)]
    assert found_grid(moved, Box(tuple(low), shape)) == expected
    assert len(layout.boxes) == math.prod(len(c) + 1 for c in cuts)
    assert (paint(shape, layout.boxes.to_list()) == 1).all()


CHANGES = ("none", "missing", "twice", "moved", "resized", "permuted", "region", "two permuted")


@examples(25)
@given(st.data())
def test_what_is_no_grid_is_not_taken_for_one(data: st.DataObject) -> None:
    """A grid with one thing changed, against the definition: some changes leave a grid (a box cut off at the end)."""
    shape = data.draw(shapes(least=1, most=5))
    layout = Layout.from_cuts(shape, data.draw(cuts_of(shape)))
    count = len(layout.boxes)
    offsets, extents = layout.boxes.offset.copy(), layout.boxes.shape.copy()
    low, high = [0] * len(shape), list(shape)
    change, row = data.draw(st.sampled_from(CHANGES)), data.draw(st.integers(0, count - 1))
    d = data.draw(st.integers(0, len(shape) - 1)) if shape else None
    step = data.draw(st.sampled_from([-1, 1]))
    if change == "missing":
        offsets, extents = np.delete(offsets, row, 0), np.delete(extents, row, 0)
    elif change == "twice":
        offsets, extents = np.insert(offsets, row, offsets[row], 0), np.insert(extents, row, extents[row], 0)
    elif change in ("permuted", "two permuted"):
        order = list(range(count))
        if change == "permuted":
            order = data.draw(st.permutations(order))
        else:
            other = data.draw(st.integers(0, count - 1))
            order[row], order[other] = order[other], order[row]
        offsets, extents = offsets[order], extents[order]
    elif d is not None and change == "moved":
        offsets[row, d] += step
    elif d is not None and change == "resized":
        extents[row, d] += step
    elif d is not None and change == "region":
        (low if data.draw(st.booleans()) else high)[d] += step
    if not len(offsets):
        return
    boxes, region = Boxes(offsets, extents), Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
    assert found_grid(boxes, region) == is_grid(boxes, region)


@examples(25)
@given(st.data())
def test_heaps_and_tilings_are_grids_by_the_definition_only(data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1, most=3, dimensions=3))
    heap = data.draw(st.one_of(tilings(shape), st.lists(boxes_in(shape, least=1), min_size=1, max_size=9)))
    boxes = Boxes.of(data.draw(st.sampled_from([heap, sorted(heap)])), len(shape))
    assert found_grid(boxes, whole(shape)) == is_grid(boxes, whole(shape))


def test_every_set_of_boxes_of_a_small_tensor() -> None:
    """All sequences of up to four of the boxes of a 2 x 2 tensor."""
    boxes = [Box((a, b), (m, n)) for a, b in np.ndindex(2, 2) for m in range(1, 3 - a) for n in range(1, 3 - b)]
    grids_found = 0
    for count in range(1, 5):
        for chosen in itertools.product(boxes, repeat=count):
            found = found_grid(Boxes.of(chosen, 2), whole((2, 2)))
            assert found == is_grid(Boxes.of(chosen, 2), whole((2, 2))), chosen
            grids_found += found is not None
    assert grids_found == 4


def test_one_box_is_found_in_little_time() -> None:
    """As it is for most tensors of other formats, of which a stranger's file may have tens of thousands."""
    shape = (2,) * 32
    layout, part = Layout(shape, Boxes.of([whole(shape)], 32)), Boxes.of([Box((0,) * 32, (1,) * 32)], 32)
    before = time.process_time()
    for _ in range(2000):
        assert layout.cuts() == [[]] * 32
        assert grid_starts(part, whole(shape)) is None
    assert time.process_time() - before < 0.5 * slowness()


@pytest.mark.parametrize("dimensions", [0, 1, 2, 3])
def test_no_boxes_are_no_grid(dimensions: int) -> None:
    shape = (0,) * min(dimensions, 1) + (4,) * (dimensions - 1)
    none = Boxes.of([], dimensions)
    assert grid_starts(none, whole(shape)) is None
    assert Layout(shape, none).to_record().count == 0


def test_a_grid_of_one_box() -> None:
    for shape in [(), (0,), (3,), (0, 3), (3, 0), (2, 1, 2)]:
        assert Layout(shape, Boxes.of([whole(shape)], len(shape))).cuts() == [[] for _ in shape]


# -- plans of loads


@pytest.mark.parametrize("change", ["none", "missing", "doubled"])
def test_a_large_grid_by_the_default_threshold(change: str) -> None:
    """100 boxes, so that what is tested above happens with nothing patched."""
    layout = Layout.from_cuts((100, 100), [list(range(10, 100, 10))] * 2)
    times = np.ones(100, np.int64)
    times[55] = {"none": 1, "missing": 0, "doubled": 2}[change]
    table = table_of([Layout((100, 100), layout.boxes.take(np.repeat(np.arange(100), times)))], [0, 0])
    boxes = [Box((0, 0), (100, 100)), Box((45, 45), (20, 20)), Box((0, 0), (7, 100)), Box((55, 55), (1, 1))]
    items = plan_load(table, WantedBoxes(np.repeat([0, 1], len(boxes)), Boxes.of(boxes * 2, DIMENSIONS)))
    expected = [] if change == "none" else [0, 1, 3, 4, 5, 7]
    assert items.uncovered.tolist() == expected
    less = {"none": 0, "missing": 1, "doubled": -1}[change]
    found = np.bincount(items.wanted, minlength=2 * len(boxes)).tolist()
    assert found == [100 - less, 9 - less, 10, 1 - less] * 2


def test_a_job_of_many_ranks_takes_no_pair_of_all_shards() -> None:
    """2,000 tensors of 64 shards each, of which a rank wants a 96th: about two shards a tensor."""
    side, cuts = 64 * 96, list(range(96, 64 * 96, 96))
    tensors = 2_000
    layout = Layout.from_cuts((side,), [cuts])
    table = table_of([layout], [0] * tensors)
    items = plan_load(table, WantedBoxes(np.arange(tensors), Boxes.of([Box((64 * 7,), (64,))] * tensors, 1)))
    assert len(items.uncovered) == 0
    assert int(items.alike.take(items.like)[0].volumes.sum()) == 64 * tensors
    assert len(items.wanted) == math.ceil(64 * 8 / 96) * tensors - 64 * 7 // 96 * tensors


# -- exact covers


@st.composite
def around(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """A box that may reach outside of a tensor, or lie there, or have no elements."""
    offset = [draw(st.integers(-2, n + 2)) for n in shape]
    return Box(tuple(offset), tuple(draw(st.integers(0, n + 3)) for n in shape))


@st.composite
def covers(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[list[Box]]]:
    """Regions' shapes, and boxes for each."""
    all_shapes, heaps = [], []
    for _ in range(draw(st.integers(0, 5))):
        shape = draw(shapes(most=4, dimensions=DIMENSIONS))
        boxes = list(draw(st.one_of(grids(shape), tilings(shape)))) if math.prod(shape) else []
        if boxes and draw(st.booleans()):
            change, i = draw(st.integers(0, 3)), draw(st.integers(0, len(boxes) - 1))
            if change == 0:
                boxes.pop(i)
            elif change == 1:
                boxes.append(boxes[i])
            else:
                boxes[i] = draw(around(shape))
                boxes[i] = Box(boxes[i].offset, tuple(max(1, n) for n in boxes[i].shape))
        all_shapes.append(shape)
        heaps.append(boxes)
    return all_shapes, heaps


def covered(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """By painting; nothing may lie outside."""
    inside = all(o >= 0 and o + e <= n for box in boxes for o, e, n in zip(box.offset, box.shape, shape, strict=True))
    return inside and bool((paint(shape, boxes) == 1).all())


@pytest.mark.parametrize("collide", [False, True])
@examples(25)
@given(st.data())
def test_tensors_are_covered_as_painting_says(collide: bool, data: st.DataObject) -> None:
    """Tensors of a few kinds, many of them alike, some but for the shape or one box; also if all hashes collide."""
    all_shapes, heaps = data.draw(covers())
    kinds = [(shape, sorted(boxes)) for shape, boxes in zip(all_shapes, heaps, strict=True)]
    for shape, boxes in list(kinds):
        if shape and data.draw(st.booleans()):
            kinds.append(((shape[0] + 1, *shape[1:]), boxes))
    tensors = data.draw(st.lists(st.sampled_from(kinds), max_size=10)) if kinds else []
    tensor = np.array([t for t, (_, boxes) in enumerate(tensors) for _ in boxes], np.int64)
    all_boxes = Boxes.of([box for _, boxes in tensors for box in boxes], DIMENSIONS)
    global_shape = Boxes.of([whole(s) for s, _ in tensors], DIMENSIONS).shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cover, "_MANY", data.draw(st.sampled_from([1, NEVER])))
        if collide:
            patch.setattr("paddle_dist_ckpt.core.grouping._row_hashes", lambda rows: np.zeros(len(rows), np.uint64))
        found = tensors_covered(tensor, all_boxes, global_shape)
    assert found.tolist() == [covered(*pair) for pair in tensors]


# -- the order of boxes


@st.composite
def unordered(draw: st.DrawFn, outside: bool) -> dict[str, Any]:
    """Shards of a few tensors in any order, many of them equal; some where they should not be."""
    all_shapes = draw(st.lists(shapes(most=3, dimensions=DIMENSIONS), min_size=1, max_size=4))
    itemsizes = draw(st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=len(all_shapes), max_size=len(all_shapes)))
    held: list[tuple[int, int, Box]] = []
    for _ in range(draw(st.integers(0, 14))):
        t = draw(st.integers(0, len(all_shapes) - 1))
        box = draw(around(all_shapes[t]) if outside else boxes_in(all_shapes[t]))
        held.append((t, draw(st.integers(0, 3)), box))
    held += held[: draw(st.integers(0, 3))]
    boxes = Boxes.of([box for *_, box in held], DIMENSIONS)
    sizes = Boxes.of([whole(shape) for shape in all_shapes], DIMENSIONS).shape
    tensor, rank = (np.array([row[i] for row in held], np.int64) for i in range(2))
    itemsize = np.array(itemsizes, np.int64)
    return {"shapes": sizes, "itemsize": itemsize, "tensor": tensor, "rank": rank, "boxes": boxes}


def by_keys(*keys: IntArray) -> list[int]:
    """The order by these keys (matrices by their columns), the first one counting most; stable."""
    flat = [column for key in keys for column in (key.T if key.ndim == 2 else [key])]
    found: list[int] = np.lexsort(flat[::-1]).tolist()
    return found


@pytest.mark.parametrize("outside", [False, True])
@examples(25)
@given(st.data())
def test_orders_are_those_of_sorting_by_columns(outside: bool, data: st.DataObject) -> None:
    s = data.draw(unordered(outside))
    shapes, tensor, boxes, rank = (s[name] for name in ("shapes", "tensor", "boxes", "rank"))
    assert box_order(shapes, tensor, boxes).tolist() == by_keys(tensor, boxes.offset)
    assert shard_order(shapes, tensor, boxes).tolist() == by_keys(tensor, boxes.table)
    by_size = by_keys(rank, -s["itemsize"][tensor], tensor, boxes.offset)
    assert file_order(shapes, s["itemsize"], tensor, boxes, rank).tolist() == by_size


@examples(25)
@given(unordered(outside=False))
def test_each_place_has_a_number_of_its_own(s: dict[str, Any]) -> None:
    offset = s["boxes"].offset
    places = order._places(s["shapes"], s["tensor"], offset)
    inside = (offset < np.maximum(s["shapes"], 1)[s["tensor"]]).all()
    assert (places is None) == (not inside)
    if places is None:
        return
    for i, j in itertools.combinations(range(len(places)), 2):
        a, b = ((int(s["tensor"][k]), *offset[k].tolist()) for k in (i, j))
        assert (places[i] < places[j], places[i] == places[j]) == (a < b, a == b)


def first_and_last(shapes: IntArray) -> tuple[IntArray, IntArray]:
    """The first and the last place of each tensor, in the wrong order."""
    tensor = np.repeat(np.arange(len(shapes)), 2)[::-1].copy()
    offset = np.zeros((len(tensor), shapes.shape[1]), np.int64)
    offset[::2] = np.maximum(shapes[::-1] - 1, 0)
    return tensor, offset


HUGE: dict[str, tuple[bool, list[tuple[int, ...]]]] = {
    "as many places as there are numbers for": (True, [(2**30, 2**30)] * 3),
    "too many together": (False, [(2**30, 2**30)] * 5),
    "too many in one": (False, [(2**40, 2**40), (1, 1)]),
    "so many that they wrap around": (False, [(2**32, 2**32), (3, 3), (2**33, 2**31)]),
    "none, but large in other dimensions": (False, [(2**31, 2**31, 0)] * 3),
    "none, but too large in other dimensions": (False, [(2**40, 2**40, 0), (2, 2, 2)]),
}


@pytest.mark.parametrize("name", HUGE)
def test_large_tensors_are_in_order_too(name: str) -> None:
    numbered, sizes = HUGE[name]
    shapes = np.array(sizes, np.int64)
    tensor, offset = first_and_last(shapes)
    assert (order._places(shapes, tensor, offset) is not None) == numbered
    boxes = Boxes(offset, np.ones_like(offset))
    assert box_order(shapes, tensor, boxes).tolist() == by_keys(tensor, offset)
    assert shard_order(shapes, tensor, boxes).tolist() == by_keys(tensor, boxes.table)
