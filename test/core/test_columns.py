"""Columns, and flags in rows."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_dist_ckpt.core.columns import all_in_row, any_in_row


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (5, 1), (40, 3)])
def test_flags_of_rows_are_joined_as_numpy_does(shape: tuple[int, int]) -> None:
    flags = np.random.default_rng(0).random(shape) < 0.5
    assert np.array_equal(all_in_row(flags), flags.all(axis=1))
    assert np.array_equal(any_in_row(flags), flags.any(axis=1))
