"""Finding equal rows among many, exactly and without sorting rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .columns import IntArray, pieces_of, places_within, run_edges

__all__ = ["group_blocks", "group_rows", "mixed"]

_U64 = npt.NDArray[np.uint64]
_GOLDEN = 0x9E3779B97F4A7C15
_PIECE = 1 << 14  # rows that are worked on at a time, so that what comes between stays in the processor's cache


def group_rows(rows: IntArray) -> tuple[IntArray, IntArray]:
    """Which rows of a matrix, ``[n, k]``, are equal.

    Rows are told apart by a 64-bit hash, and then compared with the one that stands for their group; should different
    rows ever have one hash, they are sorted instead. Time is O(n log n) in rows, with small constants.

    Returns:
        The first row of each group, in the order in which they stand (``[groups]``); and the group of each row
        (``[n]``).
    """
    if rows.shape[1] and 2 * len(edges := run_edges(*rows.T)) < len(rows):  # equal ones stand together
        first, group = group_rows(rows[edges[:-1]])
        return edges[first], np.repeat(group, np.diff(edges))
    _, first, group = np.unique(_row_hashes(rows), return_index=True, return_inverse=True)
    group = group.reshape(-1)
    if not (rows.take(first[group], axis=0) == rows).all():
        _, first, group = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        group = group.reshape(-1)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order].astype(np.int64), rank[group].astype(np.int64)


def group_blocks(starts: IntArray, rows: IntArray, heads: IntArray) -> tuple[IntArray, IntArray]:
    """Which runs of rows are equal, row by row.

    Args:
        starts: Where each run begins in ``rows``, and behind the last the end, ``[runs + 1]``.
        rows: ``[n, k]``.
        heads: What else must be equal of a run, ``[runs, h]``.

    Returns:
        The first run of each group, and the group of each run, as :func:`group_rows` has them.
    """
    counts = np.diff(starts)
    sums = np.zeros(len(rows) + 1, np.uint64)
    hashes, places = _row_hashes(rows), places_within(counts).view(np.uint64)
    for piece in pieces_of(len(rows), _PIECE):
        hashes[piece] = mixed(hashes[piece] + mixed(places[piece]))
    np.cumsum(hashes, out=sums[1:])
    keys = np.column_stack([heads, counts, (sums[starts[1:]] - sums[starts[:-1]]).view(np.int64)])
    first, group = group_rows(keys)
    same = places_within(counts, starts[first][group])
    if not all((rows.take(same[piece], axis=0) == rows[piece]).all() for piece in pieces_of(len(rows), _PIECE)):
        # different runs of one hash
        return np.arange(len(counts)), np.arange(len(counts))
    return first, group


def _row_hashes(rows: IntArray) -> _U64:
    hashes = np.zeros(len(rows), np.uint64)
    for piece in pieces_of(len(rows), _PIECE):
        for column in range(rows.shape[1]):
            hashes[piece] = mixed(hashes[piece] + rows[piece, column].astype(np.uint64))
    return hashes


def mixed(x: _U64) -> _U64:
    """The numbers that splitmix64 draws in these states: 64 bits that look random, the same for the same state."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
