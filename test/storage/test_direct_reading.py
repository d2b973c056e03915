"""Reading past the page cache gives the same bytes, and gives up where it must."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.storage import LocalStorage, direct, local

SIZE = 5_000_001


@pytest.fixture
def content(tmp_path: Path) -> np.ndarray:
    data = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    return data


def drop_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def needs_direct(path: Path) -> None:
    descriptor = direct.open_direct(path, os.O_RDONLY)
    if descriptor is None:
        pytest.skip("the temporary folder's filesystem is read through the cache")
    os.close(descriptor)
    drop_cache(path)
    file = LocalStorage(path.parent).open(path.name)
    cached = file.is_cached()
    file.close()
    if cached:
        pytest.skip("this kernel does not tell what its page cache holds, or keeps it")


RANGES = [
    (0, [SIZE]),
    (1, [SIZE - 1]),
    (4095, [300_000, 1, 700_000]),
    (123, [3_000_000, 0, 1_500_000]),
    (4096, [262_144]),
]


@pytest.mark.parametrize(("offset", "sizes"), RANGES)
@pytest.mark.parametrize("cold", [True, False])
def test_any_range_is_read(tmp_path: Path, content: np.ndarray, offset: int, sizes: list[int], cold: bool) -> None:
    file = LocalStorage(tmp_path).open("f")
    if cold:
        drop_cache(tmp_path / "f")
    buffers = [np.zeros(size, np.uint8) for size in sizes]
    file.read_into(buffers, offset, once=True)
    file.close()
    assert np.array_equal(np.concatenate(buffers), content[offset : offset + sum(sizes)])


def test_what_the_cache_lacks_is_read_past_it_and_not_kept(tmp_path: Path, content: np.ndarray) -> None:
    needs_direct(tmp_path / "f")
    file = LocalStorage(tmp_path).open("f")
    for once in (True, False):
        file.read_into([np.zeros(SIZE, np.uint8)], 0, once=once)
        assert file.is_cached() is not once
    file.close()


@pytest.mark.parametrize("offset", [1, SIZE - 400_000, SIZE, SIZE + 5000])
def test_a_file_that_ends_too_early(tmp_path: Path, content: np.ndarray, offset: int) -> None:
    file = LocalStorage(tmp_path).open("f")
    drop_cache(tmp_path / "f")
    with pytest.raises(EOFError):
        file.read_into([np.zeros(SIZE, np.uint8)], offset, once=True)
    file.close()


def test_a_device_that_refuses_is_read_through_the_cache(
    tmp_path: Path, content: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_direct(tmp_path / "f")
    real, refused = os.preadv, []

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(direct.os, "preadv", preadv)
    file = LocalStorage(tmp_path).open("f")
    buffer = np.zeros(SIZE, np.uint8)
    file.read_into([buffer], 0, once=True)
    file.close()
    assert refused
    assert np.array_equal(buffer, content)


def test_an_error_of_the_disk_is_not_hidden(
    tmp_path: Path, content: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_direct(tmp_path / "f")

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(local.os, "preadv", preadv)
    file = LocalStorage(tmp_path).open("f")
    with pytest.raises(OSError, match="Input/output error"):
        file.read_into([np.zeros(SIZE, np.uint8)], 0, once=True)
    file.close()


def test_descriptors_are_closed_and_buffers_used_again(tmp_path: Path, content: np.ndarray) -> None:
    storage = LocalStorage(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        drop_cache(tmp_path / "f")
        file = storage.open("f")
        file.read_into([np.zeros(SIZE, np.uint8)], 0, once=True)
        file.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert storage._buffers.qsize() <= 1
