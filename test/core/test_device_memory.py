"""Arrays in a device's memory, by a device that is a numpy array."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core import device_memory
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.device_memory import ArrayForm, DeviceArray, Request, Scattered, read_scattered, write_all
from paddle_dist_ckpt.core.dtypes import dtype_named
from paddle_dist_ckpt.core.memory import address_of, bytes_at

ITEM = np.dtype("<u4")


class FakeDevice:
    """Memory, and a queue of copies from and to it, which are made when somebody waits."""

    base = 1000

    def __init__(self, data: np.ndarray) -> None:
        self.data = data.copy().view(np.uint8).reshape(-1)
        self.copied = 0
        self.queue: list[Callable[[], None]] = []
        self.hosts: list[Any] = []  # what keeps host memory alive until the queue is empty
        self._one_waits = threading.Lock()

    def read(self, requests: Sequence[Request], host: Any) -> None:
        for memory, start, address, nbytes in requests:
            assert memory is self
            into = bytes_at(address, nbytes)
            self.hosts.append(host)
            self.queue.append(lambda start=start, into=into: np.copyto(into, self.data[start : start + len(into)]))
            self.copied += len(into)

    def write(self, requests: Sequence[Request], host: Any) -> None:
        for memory, start, address, nbytes in requests:
            assert memory is self
            data = bytes_at(address, nbytes)
            self.hosts.append(host)
            self.queue.append(lambda start=start, data=data: np.copyto(self.data[start : start + len(data)], data))

    def strided(self, start: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        """It has no kernels."""

    def mark(self) -> FakeDevice:
        return self

    def wait(self) -> None:
        with self._one_waits:
            while self.queue:
                self.queue.pop(0)()
            self.hosts.clear()


def drawn(draw: random.Random) -> tuple[FakeDevice, ArrayForm, DeviceArray, np.ndarray]:
    """A device, an array there that may be transposed and have gaps, and the same array on the host."""
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 4)))
    steps = [draw.choice([1, 1, 2]) for _ in shape]
    padded = tuple(n * step for n, step in zip(shape, steps, strict=True))
    whole = np.arange(3, 3 + int(np.prod(padded)), dtype=ITEM)
    device = FakeDevice(np.concatenate([np.zeros(3, ITEM), whole]))
    memory = device.data[12:].view(ITEM).reshape(padded)
    order = draw.sample(range(len(shape)), len(shape))
    index = tuple(slice(None, None, step) for step in steps)
    array = memory[(*index, ...)].transpose(order)
    start = 12 + address_of(array) - address_of(memory)
    return device, DeviceArray(device, start, ArrayForm(array.shape, array.strides, ITEM)), array


def drawn_part(draw: random.Random) -> tuple[FakeDevice, ArrayForm, DeviceArray, np.ndarray, tuple[Any, ...]]:
    """A device, a box of such an array, the whole array on the host, and where in it the box is."""
    device, array, whole = drawn(draw)
    corners = [sorted(draw.sample(range(n + 1), 2)) for n in array.form.shape]
    part = array.part(Box(tuple(a for a, _ in corners), tuple(b - a for a, b in corners)))
    return device, part, whole, (*(slice(a, b) for a, b in corners), ...)


@pytest.mark.parametrize("span", [16, 200, 4 << 20])
def test_any_range_of_any_box(monkeypatch: pytest.MonkeyPatch, span: int) -> None:
    monkeypatch.setattr(device_memory, "_SPAN_BYTES", span)
    for seed in range(300):
        draw = random.Random(seed)
        device, part, whole, index = drawn_part(draw)
        expected = np.array(whole[index])
        assert (part.form.shape, part.nbytes, part.form.itemsize) == (expected.shape, expected.nbytes, 4)
        assert np.array_equal(part.to_host(device), expected)
        low, high = sorted(draw.choices(range(expected.size + 1), k=2))
        into = np.full((high - low) * 4, 255, np.uint8)
        part.read(low * 4, high * 4, into, device)
        assert np.array_equal(into.view(ITEM), expected.reshape(-1)[low:high])


@pytest.mark.parametrize("span", [16, 200, 4 << 20])
def test_any_box_is_written_and_cleared_and_nothing_beside_it(monkeypatch: pytest.MonkeyPatch, span: int) -> None:
    monkeypatch.setattr(device_memory, "_SPAN_BYTES", span)
    for seed in range(300):
        draw = random.Random(seed)
        device, part, whole, index = drawn_part(draw)
        expected = device.data.copy()
        view = np.ndarray(whole.shape, ITEM, expected.data, address_of(whole) - address_of(device.data), whole.strides)
        view[index] = np.arange(1000, 1000 + part.nbytes // 4, dtype=ITEM).reshape(part.form.shape)
        data = np.array(view[index]).reshape(-1)
        write_all([(part, address_of(data))], data, device)
        device.wait()
        assert device.data.tobytes() == expected.tobytes()
        view[index] = 0
        part.clear(device)
        assert device.data.tobytes() == expected.tobytes()


def test_what_is_contiguous_takes_one_copy_and_the_rest_is_left() -> None:
    device = FakeDevice(np.arange(64, dtype=ITEM))
    array = DeviceArray(device, 0, ArrayForm((8, 8), None, ITEM))
    into = np.zeros(64, np.uint8)
    requests: list[Request] = []
    scattered: list[Scattered] = []
    array.part(Box((2, 0), (2, 8))).add_pieces(0, 64, address_of(into), requests, scattered)
    assert [(start, nbytes) for _, start, _, nbytes in requests] == [(64, 64)]
    assert not scattered
    device.read(requests, into)
    device.wait()
    assert into.view(ITEM).tolist() == list(range(16, 32))
    array.part(Box((0, 1), (2, 3))).add_pieces(0, 24, address_of(into), requests, scattered)
    assert len(requests) == 1
    assert len(scattered) == 1
    read_scattered(scattered, device)
    assert into[:24].view(ITEM).tolist() == [1, 2, 3, 9, 10, 11]


def test_columns_are_read_with_little_around_them() -> None:
    whole = np.arange(1 << 20, dtype=ITEM).reshape(1 << 10, 1 << 10)
    device = FakeDevice(whole)
    array = DeviceArray(device, 0, ArrayForm(whole.shape, None, ITEM))
    assert np.array_equal(array.part(Box((0, 8), (1 << 10, 1000))).to_host(device), whole[:, 8:1008])
    assert device.copied <= whole.nbytes


def test_a_transposed_array_is_copied_once() -> None:
    whole = np.arange(1 << 22, dtype=ITEM).reshape(1 << 11, 1 << 11)
    device = FakeDevice(whole)
    array = DeviceArray(device, 0, ArrayForm(whole.shape, whole.T.strides, ITEM))
    assert np.array_equal(array.to_host(device), whole.T)
    assert device.copied <= 1.1 * whole.nbytes


def test_large_items_and_no_items() -> None:
    device = FakeDevice(np.arange(8, dtype=np.uint8).repeat(16))
    array = DeviceArray(device, 0, ArrayForm((4, 2), None, dtype_named("complex128").raw))
    assert array.part(Box((1, 1), (2, 1))).to_host(device).tobytes() == bytes([3] * 16 + [5] * 16)
    assert array.part(Box((1, 1), (0, 1))).to_host(device).shape == (0, 1)
