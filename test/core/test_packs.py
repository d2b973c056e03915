"""Which small copies are made together."""

from __future__ import annotations

import numpy as np

from paddle_dist_ckpt.core.packs import PACK_BYTES, PACK_COUNT, SMALL_BYTES, packs_of, stand_together


def test_copies_of_one_kind_are_made_together() -> None:
    assert packs_of(["a", "b", "a", None, "b", "a", "c"], [8, 2, 8, 8, 2, 8, 4]) == ([[0, 2, 5], [1, 4]], [3, 6])


def test_what_is_large_is_copied_by_itself() -> None:
    assert packs_of("aaa", [SMALL_BYTES, SMALL_BYTES + 1, SMALL_BYTES]) == ([[0, 2]], [1])
    assert packs_of("aa", [SMALL_BYTES + 1, 1]) == ([], [0, 1])
    assert packs_of("", []) == ([], [])


def test_a_pack_is_bounded_in_bytes_and_parts() -> None:
    full = PACK_BYTES // SMALL_BYTES
    packs, alone = packs_of(["a"] * (2 * full + 1), [SMALL_BYTES] * (2 * full + 1))
    assert [len(pack) for pack in packs] == [full, full]
    assert alone == [2 * full]
    packs, alone = packs_of(["a"] * (PACK_COUNT + 2), [1] * (PACK_COUNT + 2))
    assert [len(pack) for pack in packs] == [PACK_COUNT, 2]
    assert not alone


def test_memory_stands_together_without_gaps_in_order() -> None:
    sizes = np.array([4, 2, 6])
    assert stand_together(np.array([100, 104, 106]), sizes)
    assert not stand_together(np.array([100, 104, 107]), sizes)
    assert not stand_together(np.array([104, 100, 106]), sizes)
