"""Overlapping boxes are found, however they lie."""

from __future__ import annotations

import random
import time

import pytest

from paddle_dist_ckpt.core.box import Box, intersect
from paddle_dist_ckpt.errors import CheckpointCorruptedError
from paddle_dist_ckpt.readers.checks import first_overlap, shown
from test.pace import slowness


def test_boxes_that_overlap_are_found_as_by_comparing_all_pairs() -> None:
    generator = random.Random(0)
    seen = set()
    for _ in range(400):
        ndim, most = generator.randrange(1, 4), generator.choice((4, 30, 200))
        boxes = {
            Box(
                tuple(generator.randrange(most) for _ in range(ndim)),
                tuple(generator.randrange(0, 2 + most // 30) for _ in range(ndim)),
            )
            for _ in range(generator.randrange(40))
        }
        some = list(boxes)
        overlap = any(intersect(a, b) is not None for i, a in enumerate(some) for b in some[:i])
        found = first_overlap(some)
        assert (found is not None) == overlap
        assert found is None or intersect(*found) is not None
        seen.add((overlap, len(some) > 16))
    assert len(seen) == 4


def test_many_boxes_take_little_time() -> None:
    grid = [Box((i, j), (1, 1)) for i in range(100) for j in range(100)]
    nested = [Box((0, i), (10**6, 10**6 - 2 * i)) for i in range(10**4)]
    start = time.process_time()
    assert first_overlap(grid) is None
    assert first_overlap([*grid, Box((5, 5), (2, 1))]) is not None
    assert first_overlap(nested) is not None
    assert first_overlap([]) is None
    assert first_overlap([Box((), ())]) is None
    assert time.process_time() - start < 2 * slowness()


def cut_at_random(ndim: int, count: int) -> list[Box]:
    """Boxes that make up one, cut into two again and again at random."""
    generator, boxes = random.Random(2), [Box((0,) * ndim, (1000,) * ndim)]
    while len(boxes) < count:
        at, d = generator.randrange(len(boxes)), generator.randrange(ndim)
        offset, shape = boxes[at]
        if shape[d] > 1:
            n = generator.randrange(1, shape[d])
            boxes[at] = Box(offset, (*shape[:d], n, *shape[d + 1 :]))
            rest = (*offset[:d], offset[d] + n, *offset[d + 1 :])
            boxes.append(Box(rest, (*shape[:d], shape[d] - n, *shape[d + 1 :])))
    return boxes


def test_boxes_that_make_up_one_take_no_steps_of_comparing() -> None:
    boxes, steps = cut_at_random(3, 2000), list[int]()
    assert first_overlap(boxes, steps.append) is None
    assert not sum(steps)
    boxes = cut_at_random(32, 2000)
    assert first_overlap(boxes, steps.append) is None
    assert sum(steps) < 20 * len(boxes)  # whatever their number
    twice = Box(boxes[7].offset, (1,) * 32)
    assert first_overlap([*boxes[:5], *boxes[6:], twice], steps.append) is not None


def test_comparing_boxes_with_gaps_is_counted_and_may_be_refused() -> None:
    steps: list[int] = []
    start = time.process_time()
    assert first_overlap(cut_at_random(32, 2000)[1:], steps.append) is None
    assert time.process_time() - start < 5 * 2e-7 * sum(steps) + 0.5

    def refuse(more: int) -> None:
        steps.append(more)
        if sum(steps) > 1000:
            raise CheckpointCorruptedError("too much")

    steps.clear()
    with pytest.raises(CheckpointCorruptedError, match="too much"):
        first_overlap(cut_at_random(32, 2000)[1:], refuse)


def test_what_is_long_is_shown_short() -> None:
    assert shown("a\n") == "'a\\n'"
    assert len(shown("x" * 10**6)) < 300
    assert shown([1]) == "[1]"
