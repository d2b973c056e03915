"""Memory that cannot be had."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paddle_dist_ckpt.core.buffers import Buffers
from paddle_dist_ckpt.core.memory import Bytes1D, address_of, zeros_of
from paddle_dist_ckpt.errors import CheckpointError
from test.jobs import little_memory
from test.waiting import PATIENCE


@pytest.mark.parametrize("size", [1 << 62, 1 << 70])
def test_what_there_is_no_memory_for_is_named(size: int) -> None:
    with pytest.raises(CheckpointError, match="model.w: no memory for it: "):
        zeros_of((size,), np.dtype(np.uint8), "model.w")


def test_to_know_where_arrays_are_takes_no_memory() -> None:
    arrays = [np.zeros(1, np.uint8) for _ in range(10_000)]
    assert address_of(arrays[3]) == arrays[3].ctypes.data
    with little_memory(1 << 18):
        for array in arrays:
            address_of(array)


def test_a_buffer_that_there_is_no_memory_for_is_left_to_the_next_task() -> None:
    errors = [MemoryError("none left")]

    def fails_once(size: int) -> Bytes1D:
        if errors:
            raise errors.pop()
        return np.empty(size, np.uint8)

    buffers = Buffers(1, fails_once)
    with pytest.raises(MemoryError, match="none left"):
        buffers.take(100)
    with ThreadPoolExecutor(1) as pool:  # which would wait for ever
        assert len(pool.submit(buffers.take, 100).result(PATIENCE)) >= 100
