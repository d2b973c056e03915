"""Windows of data files whose tensors are on a device, which is a numpy array."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.buffers import Buffers
from paddle_dist_ckpt.core.device_memory import ArrayForm, DeviceArray, Request
from paddle_dist_ckpt.core.memory import address_of
from paddle_dist_ckpt.core.threads import run_all
from paddle_dist_ckpt.files import contents
from paddle_dist_ckpt.files.block_hashes import BlockHashes
from paddle_dist_ckpt.files.contents import AHEAD, Source, TensorContents
from test.core.test_device_memory import FakeDevice
from test.files.test_snapshot import WINDOW, File, file_of, nothing, page_memory, random_sizes
from test.jobs import LAYOUTS


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents.TensorContents, "window_bytes", WINDOW)


class CountingBuffers(Buffers):
    """Buffers that know how many are in use."""

    in_use = 0

    def take(self, size: int) -> np.ndarray:
        self.in_use += 1
        return super().take(size)

    def give_back(self, buffer: np.ndarray) -> None:
        self.in_use -= 1
        super().give_back(buffer)


class Broken(FakeDevice):
    """A device that refuses copies from a certain one on."""

    left = 3

    def read(self, requests: Sequence[Request], host: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("the device does not answer")
        super().read(requests, host)


def on_device(file: File, device: type[FakeDevice] = FakeDevice) -> tuple[list[Source], FakeDevice]:
    """A file's sources, two thirds of them on a device."""
    places, size = [], 0
    for array in file.arrays:
        base = array.base if array.base is not None and isinstance(array.base, np.ndarray) else array
        places.append((size, base))
        size += base.nbytes
    memory = device(np.zeros(size, np.uint8))
    sources: list[Source] = []
    for i, (array, (start, base)) in enumerate(zip(file.arrays, places, strict=True)):
        if i % 3 == 2 or not array.size or any(stride < 0 for stride in array.strides):
            sources.append(array)
            continue
        low = address_of(base)
        flat = np.frombuffer(base.tobytes(order="A"), np.uint8)
        memory.data[start : start + base.nbytes] = flat
        sources.append(
            DeviceArray(memory, start + address_of(array) - low, ArrayForm(array.shape, array.strides, array.dtype))
        )
    return sources, memory


def written(tensors: TensorContents, file: File, threads: int, check: Any = nothing) -> tuple[bytes, BlockHashes]:
    """What the windows hold together, and the digests."""
    found, hashes = bytearray(file.table.nbytes), BlockHashes(file.table)

    def write(window: contents.Window) -> None:
        with window as (start, data):
            found[start : start + len(data)] = data.tobytes()

    def tasks() -> Iterator[Callable[[], None]]:
        with closing(tensors.windows(range(file.table.nbytes), hashes)) as windows:
            for window in windows:
                yield functools.partial(write, window)

    run_all(tasks(), threads, check)
    return bytes(found), hashes


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", range(12))
def test_windows_hold_what_the_device_has(seed: int, threads: int) -> None:
    file = file_of(random_sizes(seed), 4096, [random.Random(seed).choice(list(LAYOUTS)), "c"])
    sources, device = on_device(file)
    buffers = CountingBuffers(threads + AHEAD)
    tensors = TensorContents(file.table, sources, buffers, device)
    found, hashes = written(tensors, file, threads)
    assert found == file.data
    assert hashes.values.tolist() == file.digests()
    assert buffers.in_use == 0
    memory = page_memory(file.table.nbytes)
    tensors.copy_to(memory, 0)
    assert memory.tobytes() == file.data


def test_copies_are_queued_ahead_and_no_further() -> None:
    file = file_of([("uint8", 8 * WINDOW)], 4096)
    sources, device = on_device(file)
    windows = TensorContents(file.table, sources, Buffers(1 + AHEAD), device).windows(
        range(8 * WINDOW), BlockHashes(file.table)
    )
    first = next(windows)
    assert len(device.queue) == 1 + AHEAD
    with first as (_, data):
        assert data.tobytes() == file.data[:WINDOW]
    windows.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_after_a_failure_no_buffer_is_in_use_and_no_copy_under_way(threads: int) -> None:
    file = file_of([("uint8", 8 * WINDOW)], 4096)
    for device_class, fails in ((Broken, OSError), (FakeDevice, TimeoutError)):
        sources, device = on_device(file, device_class)
        buffers = CountingBuffers(threads + AHEAD)
        checks = []

        def check(checks: list[int] = checks, raises: Any = fails) -> None:
            checks.append(1)
            if raises is TimeoutError and len(checks) == 4:
                raise TimeoutError

        with pytest.raises(fails):
            written(TensorContents(file.table, sources, buffers, device), file, threads, check)
        assert buffers.in_use == 0
        assert device.queue == []
