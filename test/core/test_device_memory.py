"""Arrays in a device's memory, by a device that is a numpy array."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paddle_dist_ckpt.core import device_memory
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.device_memory import DeviceArray


class FakeDevice:
    """Memory that counts what is copied."""

    base = 1000

    def __init__(self, data: np.ndarray) -> None:
        self.data = data.copy().view(np.uint8).reshape(-1)
        self.copied = 0

    def read(self, start: int, into: np.ndarray) -> None:
        into[...] = self.data[start : start + len(into)]
        self.copied += len(into)

    def write(self, start: int, data: np.ndarray) -> None:
        self.data[start : start + len(data)] = data


@pytest.mark.parametrize("span", [16, 200, 4 << 20])
def test_any_range_of_any_box(monkeypatch: pytest.MonkeyPatch, span: int) -> None:
    monkeypatch.setattr(device_memory, "_SPAN_BYTES", span)
    for seed in range(300):
        draw = random.Random(seed)
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 4)))
        whole = np.arange(int(np.prod(shape)), dtype="<u4").reshape(shape)
        device = FakeDevice(np.concatenate([np.zeros(3, "<u4"), whole.reshape(-1)]))
        array = DeviceArray(device, 12, shape, np.dtype("<u4"))
        corners = [sorted(draw.sample(range(n + 1), 2)) for n in shape]
        part = array.part(Box(tuple(a for a, _ in corners), tuple(b - a for a, b in corners)))
        expected = whole[tuple(slice(a, b) for a, b in corners)]
        assert (part.shape, part.nbytes, part.itemsize) == (expected.shape, expected.nbytes, 4)
        assert np.array_equal(part.to_host(), expected)
        low, high = sorted(draw.choices(range(expected.size + 1), k=2))
        into = np.full((high - low) * 4, 255, np.uint8)
        part.read(low * 4, high * 4, into)
        assert np.array_equal(into.view("<u4"), expected.reshape(-1)[low:high])


def test_columns_are_read_with_little_around_them() -> None:
    whole = np.arange(1 << 20, dtype="<u4").reshape(1 << 10, 1 << 10)
    device = FakeDevice(whole)
    array = DeviceArray(device, 0, whole.shape, np.dtype("<u4"))
    assert np.array_equal(array.part(Box((0, 8), (1 << 10, 1000))).to_host(), whole[:, 8:1008])
    assert device.copied <= whole.nbytes


def test_what_is_contiguous_is_written_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_SPAN_BYTES", 8)
    device = FakeDevice(np.arange(12, dtype="<u4"))
    rows = DeviceArray(device, 0, (4, 3), np.dtype("<u4")).part(Box((1, 0), (2, 3)))
    rows.write(np.arange(50, 56, dtype="<u4").reshape(2, 3))
    assert device.data.view("<u4").tolist() == [0, 1, 2, *range(50, 56), 9, 10, 11]
    rows.clear()
    assert device.data.view("<u4").tolist() == [0, 1, 2, *[0] * 6, 9, 10, 11]
