"""Which boxes of one set overlap which boxes of another, without comparing all pairs."""

from __future__ import annotations

import numpy as np

from ..core.boxes import Boxes
from ..core.columns import IntArray

__all__ = ["overlapping_pairs"]

_DIRECT = 1 << 14  # so many pairs are compared at once rather than split further
_COMPARED = 1 << 20  # and so many at most

Span = tuple[IntArray, IntArray]  # where boxes start and where they end, each [n, d]; of a cell, [d]


def overlapping_pairs(a: Boxes, b: Boxes) -> tuple[IntArray, IntArray]:
    """All (i, j) where box i of ``a`` and box j of ``b`` have an element in common.

    Space is halved again and again along the dimension that separates best, a box going to each half that it reaches
    into, until few pairs are left, which are compared directly. A pair is kept only where its common region starts, so
    it is found once. For boxes that overlap little among their own set, which shards do not at all, the time is about
    O((n + m) log(n + m) + pairs). Tensors are told apart by making the tensor's number the first dimension.

    Returns:
        The pairs as two columns, ordered by i, then j.
    """
    found: list[tuple[IntArray, IntArray]] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    a_low, a_high, b_low, b_high = a.offset, a.high, b.offset, b.high
    bottom = np.full(a.dimensions, np.iinfo(np.int64).min)
    top = np.full(a.dimensions, np.iinfo(np.int64).max)
    stack = [(np.flatnonzero(a.filled), np.flatnonzero(b.filled), bottom, top)]
    while stack:
        some, others, low, high = stack.pop()
        if not len(some) or not len(others):
            continue
        spans = (a_low[some], a_high[some]), (b_low[others], b_high[others])
        cut = _best_cut(*spans) if len(some) * len(others) > _DIRECT else None
        if cut is None:
            i, j = _compare(*spans, (low, high))
            found.append((some[i], others[j]))
            continue
        d, at = cut
        left_high, right_low = high.copy(), low.copy()
        left_high[d] = right_low[d] = at
        stack.append((some[a_low[some, d] < at], others[b_low[others, d] < at], low, left_high))
        stack.append((some[a_high[some, d] > at], others[b_high[others, d] > at], right_low, high))
    i, j = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((j, i))
    return i[order], j[order]


def _best_cut(a: Span, b: Span) -> tuple[int, int] | None:
    """The dimension and place that leave the fewest pairs, or None where no cut makes them fewer."""
    (a_low, a_high), (b_low, b_high) = a, b
    best, fewest = None, len(a_low) * len(b_low)
    for d in range(a_low.shape[1]):
        starts = np.concatenate([a_low[:, d], b_low[:, d]])
        at = int(np.partition(starts, len(starts) // 2)[len(starts) // 2])
        left = int((a_low[:, d] < at).sum()) * int((b_low[:, d] < at).sum())
        right = int((a_high[:, d] > at).sum()) * int((b_high[:, d] > at).sum())
        if left + right < fewest:
            best, fewest = (d, at), left + right
    return best


def _compare(a: Span, b: Span, cell: Span) -> tuple[IntArray, IntArray]:
    """The overlapping pairs whose common region starts inside the cell, by comparing all."""
    (a_low, a_high), (b_low, b_high), (low, high) = a, b, cell
    step = max(1, _COMPARED // len(b_low))
    parts = []
    for start in range(0, len(a_low), step):
        rows = slice(start, start + step)
        hit = np.ones((len(a_low[rows]), len(b_low)), bool)
        for d in range(a_low.shape[1]):
            begin = np.maximum(a_low[rows, d, None], b_low[None, :, d])
            end = np.minimum(a_high[rows, d, None], b_high[None, :, d])
            hit &= (begin < end) & (begin >= low[d]) & (begin < high[d])
        i, j = np.nonzero(hit)
        parts.append((i + start, j))
    return np.concatenate([i for i, _ in parts]), np.concatenate([j for _, j in parts])
