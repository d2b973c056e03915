"""Touched blocks against listing every element's bytes."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.planning.blocks import touched_blocks
from test.strategies import boxes_in, examples, shapes


def blocks_of(shape: tuple[int, ...], itemsize: int, boxes: list[Box], block_bytes: int) -> set[int]:
    """The blocks that hold a byte of an element of the boxes."""
    first = np.arange(math.prod(shape)).reshape(shape) * itemsize
    return {
        block
        for box in boxes
        for start in first[box.slices].reshape(-1).tolist()
        for block in range(start // block_bytes, (start + itemsize - 1) // block_bytes + 1)
    }


@examples(40)
@given(st.data())
def test_the_blocks_are_those_with_an_element(data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1, most=7))
    boxes = data.draw(st.lists(boxes_in(shape), min_size=1, max_size=3))
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    block_bytes = data.draw(st.sampled_from([16, 32, 64, 256]))
    ranges = touched_blocks(shape, itemsize, boxes, block_bytes)
    found = [block for start, stop in ranges for block in range(start, stop)]
    assert found == sorted(blocks_of(shape, itemsize, boxes, block_bytes))
    assert all(start < stop for start, stop in ranges)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "neighbours are one range"


def test_a_column_of_a_wide_tensor_is_read_block_by_block() -> None:
    # Rows of 64 KiB: one block of 4 KiB in each.
    assert touched_blocks((3, 16384), 4, [Box((0, 5), (3, 1))], 4096) == [(0, 1), (16, 17), (32, 33)]
    # Rows of 4 KiB: every block.
    assert touched_blocks((100, 1024), 4, [Box((0, 5), (100, 1))], 4096) == [(0, 100)]


def test_a_huge_tensor_costs_no_more_than_its_ranges() -> None:
    side = 1 << 24
    assert touched_blocks((side, side), 4, [whole((side, side))], 1 << 20) == [(0, side * side * 4 >> 20)]


def test_empty_boxes_touch_nothing() -> None:
    assert touched_blocks((4,), 4, [Box((2,), (0,))], 4096) == []
    assert touched_blocks((0, 4), 4, [whole((0, 4))], 4096) == []
    assert touched_blocks((4,), 4, [], 4096) == []
    assert touched_blocks((), 8, [Box((), ())], 4096) == [(0, 1)]
