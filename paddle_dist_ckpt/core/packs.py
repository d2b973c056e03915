"""Which small copies from or to a device are made together, as one: each of its own costs more than its bytes."""

from __future__ import annotations

import numpy as np

from .columns import IntArray

__all__ = ["PACK_BYTES", "PACK_COUNT", "SMALL_BYTES", "packs_of", "stand_together"]

SMALL_BYTES = 64 << 10
"""What is larger is copied by itself."""
PACK_BYTES = 4 << 20
"""The most bytes of what is copied together."""
PACK_COUNT = 1024
"""The most parts."""


def packs_of(sizes: IntArray) -> tuple[list[list[int]], list[int]]:
    """Choose what is copied together.

    Args:
        sizes: The bytes of each copy, ``[copies]``.

    Returns:
        The packs, two copies or more in each, and the copies that are made by themselves; all as places, in order.
    """
    small = np.flatnonzero(sizes <= SMALL_BYTES)
    ends, packs, first = np.append(0, np.cumsum(sizes[small])), list[list[int]](), 0
    while first < len(small):
        full = int(np.searchsorted(ends, ends[first] + PACK_BYTES, side="right")) - 1
        stop = min(first + PACK_COUNT, full)
        packs.append(small[first:stop].tolist())
        first = stop
    alone = np.flatnonzero(sizes > SMALL_BYTES).tolist()
    if packs and len(packs[-1]) == 1:  # as only the last can have
        alone = sorted(alone + packs.pop())
    return packs, alone


def stand_together(addresses: IntArray, sizes: IntArray) -> bool:
    """Whether pieces of memory follow one another without a gap."""
    return bool(np.array_equal(addresses[:-1] + sizes[:-1], addresses[1:]))
