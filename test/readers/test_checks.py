"""Overlapping boxes are found, however they lie."""

from __future__ import annotations

import random
import time

from paddle_dist_ckpt.core.box import Box, intersect
from paddle_dist_ckpt.readers.checks import first_overlap, shown


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
    assert time.process_time() - start < 2


def test_what_is_long_is_shown_short() -> None:
    assert shown("a\n") == "'a\\n'"
    assert len(shown("x" * 10**6)) < 300
    assert shown([1]) == "[1]"
