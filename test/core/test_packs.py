"""Which small copies are made together."""

from __future__ import annotations

import numpy as np

from paddle_dist_ckpt.core.packs import PACK_BYTES, PACK_COUNT, SMALL_BYTES, packs_of, stand_together


def packed(*sizes: int) -> tuple[list[list[int]], list[int]]:
    return packs_of(np.array(sizes, np.int64))


def test_what_is_large_is_copied_by_itself() -> None:
    assert packed(SMALL_BYTES, SMALL_BYTES + 1, SMALL_BYTES, 0) == ([[0, 2, 3]], [1])
    assert packed(1, SMALL_BYTES + 1) == ([], [0, 1])
    assert packed(SMALL_BYTES + 1, 1) == ([], [0, 1])
    assert packed() == ([], [])


def test_a_pack_is_bounded_in_bytes_and_parts() -> None:
    full = PACK_BYTES // SMALL_BYTES
    packs, alone = packed(*[SMALL_BYTES] * (2 * full + 1))
    assert [len(pack) for pack in packs] == [full, full]
    assert alone == [2 * full]
    packs, alone = packed(*[SMALL_BYTES - 1] * (full + 2))
    assert [len(pack) for pack in packs] == [full, 2]
    packs, alone = packed(*[1] * (PACK_COUNT + 2))
    assert [len(pack) for pack in packs] == [PACK_COUNT, 2]
    assert not alone


def test_memory_stands_together_without_gaps_in_order() -> None:
    sizes = np.array([4, 2, 6])
    assert stand_together(np.array([100, 104, 106]), sizes)
    assert not stand_together(np.array([100, 104, 107]), sizes)
    assert not stand_together(np.array([104, 100, 106]), sizes)
