"""A tensor beyond 2 GiB, where offsets no longer fit in 32 bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.testing import ShardedArray
from test.jobs import load_on, save_on

ROWS, COLUMNS = 2304, 1 << 20  # of bytes: 2.25 GiB
MARKS = (0, 1000, 2047, 2048, 2049, ROWS - 1)  # rows that are not zero; 2048 is the first one beyond 2 GiB


def rows(low: int, high: int) -> ShardedArray:
    """Rows of the tensor, of which only the marked ones take up memory."""
    piece = np.zeros((high - low, COLUMNS), np.uint8)
    for mark in MARKS:
        if low <= mark < high:
            piece[mark - low] = np.arange(COLUMNS, dtype=np.uint32) + mark
    return ShardedArray((ROWS, COLUMNS), DTYPES["uint8"], [Box((low, 0), (high - low, COLUMNS))], [piece])


@pytest.mark.slow
def test_a_tensor_beyond_two_gibibytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.disk_usage(tmp_path).free < 6 << 30:
        pytest.skip("needs 6 GiB of disk")
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    folder = tmp_path / "large"
    try:
        reports = save_on([{"w": rows(0, 2250)}, {"w": rows(2250, ROWS)}], folder, options=SaveOptions(timeout=120))
        assert reports[0].total_bytes == ROWS * COLUMNS
        wanted = [(mark, min(mark + 2, ROWS)) for mark in MARKS]
        for low, high in wanted:
            target = rows(low, high)
            target.pieces[0][...] = 0x5A
            load_on([{"w": target}], folder)
            assert np.array_equal(target.pieces[0], rows(low, high).pieces[0])
        box = Box((2040, 77), (30, 3))
        column = ShardedArray((ROWS, COLUMNS), DTYPES["uint8"], [box], [np.ones(box.shape, "u1")])
        load_on([{"w": column}], folder)
        expected = np.zeros((ROWS, 3), np.uint8)
        for mark in MARKS:
            expected[mark] = (np.arange(77, 80) + mark) % 256
        expected = expected[2040:2070]
        assert np.array_equal(column.pieces[0], expected)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
