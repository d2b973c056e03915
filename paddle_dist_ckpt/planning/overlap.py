"""Which boxes of one set overlap which boxes of another, without comparing all pairs."""

from __future__ import annotations

import numpy as np

from ..core.columns import IntArray

__all__ = ["overlapping_pairs"]

_DIRECT = 1 << 14  # so many pairs are compared at once rather than split further


def overlapping_pairs(
    a_low: IntArray, a_high: IntArray, b_low: IntArray, b_high: IntArray
) -> tuple[IntArray, IntArray]:
    """All (i, j) where box i of ``a`` and box j of ``b`` have an element in common.

    Space is halved again and again along the dimension that separates best, a box going to each half that it reaches
    into, until few pairs are left, which are compared directly. A pair is kept only where its common region starts, so
    it is found once. For boxes that overlap little among their own set, which shards do not at all, the time is about
    O((n + m) log(n + m) + pairs). Tensors are told apart by making the tensor's number the first dimension.

    Args:
        a_low: Where each box of ``a`` starts, ``[n, d]``.
        a_high: Where it ends, ``[n, d]``.
        b_low: Where each box of ``b`` starts, ``[m, d]``.
        b_high: Where it ends, ``[m, d]``.

    Returns:
        The pairs as two columns, ordered by i, then j.
    """
    found: list[tuple[IntArray, IntArray]] = []
    a_all, b_all = np.flatnonzero((a_low < a_high).all(axis=1)), np.flatnonzero((b_low < b_high).all(axis=1))
    dimensions = a_low.shape[1]
    bottom = np.full(dimensions, np.iinfo(np.int64).min)
    top = np.full(dimensions, np.iinfo(np.int64).max)
    stack = [(a_all, b_all, bottom, top)]
    while stack:
        a, b, low, high = stack.pop()
        if not len(a) or not len(b):
            continue
        cut = _best_cut(a_low[a], a_high[a], b_low[b], b_high[b]) if len(a) * len(b) > _DIRECT else None
        if cut is None:
            found.append(_compare(a, b, a_low, a_high, b_low, b_high, low, high))
            continue
        d, at = cut
        left_high, right_low = high.copy(), low.copy()
        left_high[d] = right_low[d] = at
        stack.append((a[a_low[a, d] < at], b[b_low[b, d] < at], low, left_high))
        stack.append((a[a_high[a, d] > at], b[b_high[b, d] > at], right_low, high))
    return _ordered(found)


def _best_cut(a_low: IntArray, a_high: IntArray, b_low: IntArray, b_high: IntArray) -> tuple[int, int] | None:
    """The dimension and place that leave the fewest pairs, or None where no cut makes them fewer."""
    best, fewest = None, len(a_low) * len(b_low)
    for d in range(a_low.shape[1]):
        starts = np.concatenate([a_low[:, d], b_low[:, d]])
        at = int(np.partition(starts, len(starts) // 2)[len(starts) // 2])
        left = int((a_low[:, d] < at).sum()) * int((b_low[:, d] < at).sum())
        right = int((a_high[:, d] > at).sum()) * int((b_high[:, d] > at).sum())
        if left + right < fewest and left and right:
            best, fewest = (d, at), left + right
    return best


def _compare(
    a: IntArray,
    b: IntArray,
    a_low: IntArray,
    a_high: IntArray,
    b_low: IntArray,
    b_high: IntArray,
    low: IntArray,
    high: IntArray,
) -> tuple[IntArray, IntArray]:
    """The overlapping pairs among these whose common region starts inside the cell from ``low`` to ``high``."""
    rows = max(1, (1 << 20) // len(b))
    parts = []
    for start in range(0, len(a), rows):
        some = a[start : start + rows]
        hit = np.ones((len(some), len(b)), bool)
        for d in range(a_low.shape[1]):
            begin = np.maximum(a_low[some, d][:, None], b_low[b, d][None, :])
            end = np.minimum(a_high[some, d][:, None], b_high[b, d][None, :])
            hit &= (begin < end) & (begin >= low[d]) & (begin < high[d])
        i, j = np.nonzero(hit)
        parts.append((some[i], b[j]))
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _ordered(found: list[tuple[IntArray, IntArray]]) -> tuple[IntArray, IntArray]:
    if not found:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    i, j = np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found])
    order = np.lexsort((j, i))
    return i[order].astype(np.int64), j[order].astype(np.int64)
