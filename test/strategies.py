"""What several tests draw from: shapes, boxes, tilings; and the numpy oracle that they are compared with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, whole

T = TypeVar("T")
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

long_run = False
"""Whether the tests run with ``--long``; conftest.py sets it before it imports a test."""


def draws(normal: int, long: int | None = None) -> int:
    """How many times a test tries something at random: ``long`` times (20 times ``normal``) with ``--long``."""
    if not long_run:
        return normal
    return 20 * normal if long is None else long


def some(cases: Iterable[T], count: int) -> list[T]:
    """Cases to try of many that are much alike: so many; all with ``--long``.

    Of tuples, as a grid has them, those are taken in which each value in each place comes about equally often, so that
    each comes at all if ``count`` allows that. Others are evenly spread.
    """
    every = list(cases)
    if long_run or count >= len(every):
        return every
    if not isinstance(every[0], tuple):
        return [every[i * len(every) // count] for i in range(count)]
    values = [[(place, str(value)) for place, value in enumerate(case)] for case in every]  # type: ignore[arg-type]
    used, left, chosen = Counter[tuple[int, str]](), list(range(len(every))), []
    for _ in range(count):
        best = min(left, key=lambda i: sum(used[value] for value in values[i]))
        left.remove(best)
        chosen.append(best)
        used.update(values[best])
    return [every[i] for i in sorted(chosen)]


def examples(normal: int, long: int | None = None) -> settings:
    """So many examples, however long they take on a busy machine: always the same ones, others with ``--long``."""
    count = draws(normal, long)
    return settings(max_examples=count, derandomize=not long_run, deadline=None, suppress_health_check=SLOW)


@st.composite
def shapes(draw: st.DrawFn, least: int = 0, most: int = 6, dimensions: int = 4) -> tuple[int, ...]:
    """Shapes of 0 to 4 dimensions. With ``least`` 0 some have sizes of 0, but not so many that little else is drawn."""
    ndim = draw(st.integers(0, dimensions))
    low = least if not least and rarely(draw) else max(least, 1)
    return tuple(draw(st.integers(low, most)) for _ in range(ndim))


@st.composite
def boxes_in(draw: st.DrawFn, shape: Sequence[int], least: int = 0) -> Box:
    """A box inside a tensor of this shape; with ``least`` 0 some have no elements."""
    low = least if not least and rarely(draw) else 1
    offset, extent = [], []
    for n in shape:
        start = draw(st.integers(0, max(0, n - low)))
        offset.append(start)
        extent.append(draw(st.integers(min(low, n - start), n - start)))
    return Box(tuple(offset), tuple(extent))


def rarely(draw: st.DrawFn) -> bool:
    """True about once in ten times."""
    return draw(st.integers(0, 9)) == 7


@st.composite
def tilings(draw: st.DrawFn, shape: Sequence[int], most: int = 8) -> list[Box]:
    """Boxes that make up a tensor: a grid, or irregular ones from cutting boxes in two again and again."""
    if not math.prod(shape):
        return []
    return draw(grids(shape)) if draw(st.booleans()) else draw(irregular_tilings(shape, most))


@st.composite
def grids(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """The boxes of a grid, in row-major order."""
    cuts = [sorted(draw(st.sets(st.integers(1, n - 1), max_size=2))) if n > 1 else [] for n in shape]
    edges = [[0, *c, n] for c, n in zip(cuts, shape, strict=True)]
    counts = [len(e) - 1 for e in edges]
    return [
        Box(
            tuple(e[i] for e, i in zip(edges, place, strict=True)),
            tuple(e[i + 1] - e[i] for e, i in zip(edges, place, strict=True)),
        )
        for place in np.ndindex(*counts)
    ]


@st.composite
def irregular_tilings(draw: st.DrawFn, shape: Sequence[int], most: int = 8) -> list[Box]:
    """Boxes from cutting one in two, and then some of the halves, in drawn places."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, most - 1))):
        i = draw(st.integers(0, len(boxes) - 1))
        offset, extent = boxes[i]
        long = [d for d, n in enumerate(extent) if n > 1]
        if not long:
            continue
        d = draw(st.sampled_from(long))
        at = draw(st.integers(1, extent[d] - 1))
        boxes[i] = Box(offset, (*extent[:d], at, *extent[d + 1 :]))
        behind = (*offset[:d], offset[d] + at, *offset[d + 1 :])
        boxes.append(Box(behind, (*extent[:d], extent[d] - at, *extent[d + 1 :])))
    return boxes


def paint(shape: Sequence[int], boxes: Iterable[Box]) -> npt.NDArray[np.int64]:
    """How many of the boxes have each element."""
    canvas = np.zeros(shape, np.int64)
    for box in boxes:
        canvas[box.slices] += 1
    return canvas


def equal(a: Any, b: Any) -> bool:
    """Whether two values are of the same types and equal all through, NaN like NaN and -0.0 unlike 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            equal(p, q) and equal(x, y) for (p, x), (q, y) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return equal(a.real, b.real) and equal(a.imag, b.imag)
    return bool(a == b)
