"""Columns, and flags in rows."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_dist_ckpt.core.columns import MANY, all_in_row, any_in_row, narrow, numbered, sums_by
from paddle_dist_ckpt.core.shards import by_file


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (5, 1), (40, 3)])
def test_flags_of_rows_are_joined_as_numpy_does(shape: tuple[int, int]) -> None:
    flags = np.random.default_rng(0).random(shape) < 0.5
    assert np.array_equal(all_in_row(flags), flags.all(axis=1))
    assert np.array_equal(any_in_row(flags), flags.any(axis=1))


@pytest.mark.parametrize("count", [0, 1, 1000])
@pytest.mark.parametrize("dtype", [np.int8, np.int64])
def test_small_numbers_are_numbered_as_numpy_does(count: int, dtype: type) -> None:
    numbers = np.random.default_rng(count).integers(0, 9, count).astype(dtype) * 13
    used, which = numbered(numbers)
    expected, place = np.unique(numbers, return_inverse=True)
    assert np.array_equal(used, expected)
    assert np.array_equal(which, place.reshape(-1))


@pytest.mark.parametrize("count", [0, 5, MANY, MANY + 3])
def test_sums_are_exact_beyond_the_types_of_columns(count: int) -> None:
    rng = np.random.default_rng(count)
    group, values = rng.integers(0, 7, count), rng.integers(0, 100, count)
    expected = [sum(values[group == i].tolist()) for i in range(9)]
    assert sums_by(narrow(group), narrow(values), 9).tolist() == expected
    large = sums_by(group, values + (1 << 40), 9)  # beyond what a float holds exactly
    assert large.tolist() == [expected[i] + (np.count_nonzero(group == i) << 40) for i in range(9)]


@pytest.mark.parametrize("files", [1, 3, (1 << 14) + 1, 1 << 16, 1 << 20])  # with four sizes, keys beyond 16 bits, too
def test_shards_are_ordered_by_file_and_size_as_numpy_does(files: int) -> None:
    rng = np.random.default_rng(files)
    file, itemsize = rng.integers(0, files, 5000), rng.choice([1, 2, 4, 16], 5000)
    file[:2] = files - 1  # the highest key is there
    assert np.array_equal(by_file(file, itemsize), np.lexsort([-itemsize, file]))
