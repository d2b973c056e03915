"""Which small copies from or to a device are made together, as one: each of its own costs more than its bytes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from .columns import IntArray

__all__ = ["PACK_BYTES", "PACK_COUNT", "SMALL_BYTES", "packs_of", "stand_together"]

SMALL_BYTES = 64 << 10
"""What is larger is copied by itself."""
PACK_BYTES = 4 << 20
"""The most bytes of what is copied together."""
PACK_COUNT = 1024
"""The most parts: Paddle's ``split`` takes twice as long for each of 4,000, and six times of 16,000."""


def packs_of(kinds: Iterable[Hashable | None], sizes: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Choose what is copied together.

    Args:
        kinds: Of each copy, what it has to have in common with others; None if it is made by itself.
        sizes: The bytes of each.

    Returns:
        The packs, two copies or more in each, and the copies that are made by themselves; all as places, in order.
    """
    open_packs: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    packs: list[list[int]] = []
    alone: list[int] = []
    for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if kind is None or size > SMALL_BYTES:
            alone.append(i)
            continue
        pack = open_packs.get(kind)
        if pack is None or len(pack) == PACK_COUNT or room[kind] < size:
            pack = open_packs[kind] = []
            packs.append(pack)
            room[kind] = PACK_BYTES
        pack.append(i)
        room[kind] -= size
    alone += [pack[0] for pack in packs if len(pack) == 1]
    return [pack for pack in packs if len(pack) > 1], sorted(alone)


def stand_together(addresses: IntArray, sizes: IntArray) -> bool:
    """Whether pieces of memory follow one another without a gap."""
    return bool(np.array_equal(addresses[:-1] + sizes[:-1], addresses[1:]))
