"""Reading past the page cache, in all the ways in which it is done in part, refused, cut short or done at once."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.storage import LocalStorage, ReadableFile, direct, local_files
from paddle_dist_ckpt.storage.direct import ALIGNMENT, is_cached, open_direct, read_direct

SIZE = (9 << 20) + 1234  # several pieces, and no multiple of a page
LEAST = local_files._LEAST_DIRECT
PIECE = direct._PIECE
CONTENT = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random bytes, durable, so that the cache can be emptied of it."""
    found = tmp_path_factory.mktemp("past_cache") / "f"
    with found.open("wb") as file:
        file.write(CONTENT.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return found


@pytest.fixture
def file(path: Path) -> Iterator[ReadableFile]:
    """The file, open, with nothing of it in the cache; and as many descriptors as before when it is closed."""
    before = descriptors()
    opened = LocalStorage(path.parent).open(path.name)
    make_cold(path)
    yield opened
    opened.close()
    assert descriptors() == before


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def make_cold(path: Path) -> None:
    with path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(path: Path, start: int, stop: int) -> None:
    """Have the cache hold a part of the file and no more."""
    with path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        assert len(os.pread(opened.fileno(), stop - start, start)) == stop - start


def supported(path: Path) -> bool:
    with path.open("rb") as opened:
        descriptor = open_direct(opened.fileno(), os.O_RDONLY)
    if descriptor is None:
        return False
    os.close(descriptor)
    make_cold(path)
    with path.open("rb") as opened:
        return not is_cached(opened.fileno(), 0, SIZE)


def needs_support(path: Path) -> None:
    if not supported(path):
        pytest.skip("here files are read through the cache, or what it holds cannot be told")


def read(file: ReadableFile, offset: int, sizes: Sequence[int], once: bool = True) -> None:
    """Read into buffers whose neighbourhood must not change, and compare."""
    memory = [np.full(size + 64, 0xA5, np.uint8) for size in sizes]
    file.read_into([m[32 : 32 + size] for m, size in zip(memory, sizes, strict=True)], offset, once)
    for m, size in zip(memory, sizes, strict=True):
        assert np.array_equal(m[32 : 32 + size], CONTENT[offset : offset + size])
        assert (m[:32] == 0xA5).all()
        assert (m[32 + size :] == 0xA5).all()
        offset += size


Reads = list[tuple[bool, int, int]]
PREADV = os.preadv


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Each read: whether it was past the cache, where, of how many bytes."""
    seen: Reads = []

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        seen.append((is_direct, offset, sum(map(len, buffers))))
        return PREADV(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return seen


EDGES = [0, 1, 511, 512, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, PIECE - 1, PIECE, PIECE + 1]
LENGTHS = [LEAST - 1, LEAST, LEAST + 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + LEAST, 3 * PIECE + 77]


@pytest.mark.parametrize("offset", EDGES)
def test_ranges_at_the_edges_of_pages_and_pieces(path: Path, file: ReadableFile, offset: int) -> None:
    for size in LENGTHS:
        make_cold(path)
        read(file, offset, [size])


@pytest.mark.parametrize("size", [*LENGTHS, 1, ALIGNMENT, SIZE])
def test_ranges_up_to_the_end_of_the_file(path: Path, file: ReadableFile, size: int) -> None:
    read(file, SIZE - size, [size])
    make_cold(path)
    read(file, max(0, SIZE - size - 1), [min(size, SIZE - 1)])


def test_random_ranges_into_random_buffers(path: Path, file: ReadableFile) -> None:
    rng = random.Random(4)
    for _ in range(150):
        if rng.random() < 0.5:
            make_cold(path)
        offset = rng.choice([0, rng.randrange(SIZE), rng.randrange(SIZE) // ALIGNMENT * ALIGNMENT])
        left, sizes = SIZE - offset, []
        for _ in range(rng.randrange(6)):
            size = rng.choice([0, 1, rng.randrange(5000), rng.randrange(2 * LEAST), rng.randrange(2 * PIECE)])
            sizes.append(min(size, left - sum(sizes)))
        read(file, offset, sizes, rng.random() < 0.8)


def test_more_buffers_than_one_call_takes(path: Path, file: ReadableFile) -> None:
    read(file, 3, [LEAST, *[100] * 3000, LEAST + 5, *[1] * 10])


def test_large_buffers_go_past_the_cache_and_small_ones_do_not(path: Path, file: ReadableFile, reads: Reads) -> None:
    needs_support(path)
    read(file, 1000, [100, PIECE + 100, 200, LEAST])
    large = [(offset, size) for is_direct, offset, size in reads if is_direct]
    assert large[0][0] == 0
    assert all(offset % ALIGNMENT == size % ALIGNMENT == 0 for offset, size in large)
    assert sum(size for _, size in large) <= PIECE + LEAST + 4 * ALIGNMENT
    assert [size for is_direct, _, size in reads if not is_direct] == [100, 100, 200]


@pytest.mark.parametrize(("once", "sizes"), [(False, [SIZE]), (True, [LEAST - 1]), (True, []), (True, [0, 0])])
def test_what_is_small_or_wanted_again_goes_through_the_cache(
    path: Path, file: ReadableFile, reads: Reads, once: bool, sizes: list[int]
) -> None:
    read(file, 0, sizes, once)
    assert not any(is_direct for is_direct, *_ in reads)


def test_what_the_cache_holds_comes_from_it(path: Path, file: ReadableFile, reads: Reads) -> None:
    needs_support(path)
    warm(path, 0, 4 << 20)
    read(file, 100, [3 << 20])
    assert not any(is_direct for is_direct, *_ in reads)
    read(file, 5 << 20, [3 << 20])
    assert any(is_direct for is_direct, *_ in reads), "the rest of the file is not in it"


# -- what the cache holds


def test_what_is_read_past_the_cache_is_not_kept_in_it(path: Path, file: ReadableFile) -> None:
    needs_support(path)
    for once in (True, False):
        read(file, 0, [SIZE], once)
        assert file.is_cached() is not once


def test_is_cached_tells_most_from_little(path: Path, file: ReadableFile) -> None:
    needs_support(path)
    assert not file.is_cached()
    warm(path, 0, SIZE // 3)
    assert not file.is_cached()
    warm(path, SIZE // 2, SIZE)
    assert file.is_cached()
    make_cold(path)
    assert not file.is_cached()


def test_an_empty_file_is_cached(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    file = LocalStorage(tmp_path).open("empty")
    assert file.is_cached()
    file.read_into([], 0, once=True)
    file.read_into([np.zeros(0, np.uint8)], 7, once=True)
    for size in (1, LEAST, PIECE):
        with pytest.raises(EOFError, match="empty ends at byte 0"):
            file.read_into([np.zeros(size, np.uint8)], 0, once=True)
    file.close()


def test_a_kernel_that_does_not_tell_is_believed_to_cache(
    path: Path, file: ReadableFile, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoSuchCall:
        @staticmethod
        def syscall(*args: Any) -> int:
            ctypes.set_errno(errno.ENOSYS)
            return -1

    for library in (NoSuchCall(), None):
        monkeypatch.setattr(direct, "_libc", library)
        assert file.is_cached()
        read(file, 5, [PIECE])
    assert not any(is_direct for is_direct, *_ in reads)


# -- ends, refusals and failures


@pytest.mark.parametrize("beyond", [1, 100, ALIGNMENT, PIECE, 10 * PIECE])
@pytest.mark.parametrize("inside", [0, 1, ALIGNMENT, LEAST, PIECE + 5, SIZE])
def test_the_end_of_the_file_is_named(path: Path, file: ReadableFile, inside: int, beyond: int) -> None:
    for sizes in ([inside + beyond], [inside, beyond]):
        make_cold(path)
        with pytest.raises(EOFError, match=f"f ends at byte {SIZE}"):
            file.read_into([np.zeros(size, np.uint8) for size in sizes], SIZE - inside, once=True)


def test_a_place_behind_the_end(path: Path, file: ReadableFile) -> None:
    with pytest.raises(EOFError):
        file.read_into([np.zeros(PIECE, np.uint8)], SIZE + 3 * PIECE + 1, once=True)


def refusing(code: int, when: Callable[[int], bool]) -> Callable[[int, Any, int], int]:
    """As os.preadv, but some of the direct reads fail."""
    count = [0]

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            count[0] += 1
            if when(count[0]):
                raise OSError(code, os.strerror(code))
        return PREADV(descriptor, buffers, offset)

    return preadv


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
@pytest.mark.parametrize("when", ["always", "the second time", "every second time"])
def test_a_device_that_refuses(
    path: Path, file: ReadableFile, monkeypatch: pytest.MonkeyPatch, code: int, when: str
) -> None:
    conditions: dict[str, Callable[[int], bool]] = {
        "always": lambda n: True,
        "the second time": lambda n: n == 2,
        "every second time": lambda n: n % 2 == 0,
    }
    monkeypatch.setattr(os, "preadv", refusing(code, conditions[when]))
    read(file, 17, [3 * PIECE, 100, LEAST, PIECE + 9])


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_device_that_fails(path: Path, file: ReadableFile, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """It is not read again through the cache; and nothing is lost by it."""
    needs_support(path)
    monkeypatch.setattr(os, "preadv", refusing(code, lambda n: n == 2))
    with pytest.raises(OSError, match=os.strerror(code)) as error:
        file.read_into([np.zeros(SIZE, np.uint8)], 0, once=True)
    assert error.value.errno == code
    monkeypatch.undo()
    read(file, 0, [SIZE])


@pytest.mark.parametrize("most", [512, ALIGNMENT, ALIGNMENT + 512, 100_000])
def test_reads_that_come_short(path: Path, file: ReadableFile, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A read of less than was asked, past the cache or not, is gone on with, wherever it ended."""

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        total = sum(map(len, buffers))
        copy = bytearray(min(total, most))
        got = os.pread(reader, len(copy), offset)
        left = memoryview(got)
        for buffer in buffers:
            part = min(len(buffer), len(left))
            memoryview(buffer)[:part] = left[:part]
            left = left[part:]
        return len(got)

    reader = os.open(path, os.O_RDONLY)
    monkeypatch.setattr(os, "preadv", preadv)
    try:
        read(file, ALIGNMENT + 300, [LEAST + 1, 10, PIECE // 8])
    finally:
        os.close(reader)


def test_files_that_cannot_be_opened_past_the_cache(
    path: Path, file: ReadableFile, monkeypatch: pytest.MonkeyPatch, reads: Reads
) -> None:
    asked: list[int] = []

    monkeypatch.setattr(local_files, "open_direct", lambda descriptor, access: asked.append(descriptor))
    for _ in range(3):
        make_cold(path)
        read(file, 1, [PIECE, PIECE])
    assert not any(is_direct for is_direct, *_ in reads)
    assert len(asked) <= 1, "once is enough"


_NO_DIRECT = [errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.ENOENT, errno.EMFILE]


@pytest.mark.parametrize("code", _NO_DIRECT)
def test_where_no_file_can_be_opened_so_the_cache_is_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Of the filesystem, a sandbox, a system without /proc, or a limit of open files."""
    real = os.open

    def refuse(name: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, "no")
        return real(name, flags, *more)

    monkeypatch.setattr(direct, "_filesystem", lambda device: "ext4")
    monkeypatch.setattr(direct.os, "open", refuse)
    with path.open("rb") as opened:
        assert open_direct(opened.fileno(), os.O_RDONLY) is None
    storage = LocalStorage(path.parent)
    with closing(storage.create(f"written-{code}")) as written:
        written.write(np.ones(2 * ALIGNMENT, np.uint8), 0)
    assert storage.read(f"written-{code}") == b"\1" * (2 * ALIGNMENT)


def test_the_file_that_is_open_is_read_whatever_its_name_means_now(tmp_path: Path) -> None:
    """A save may replace or remove it while it is read."""
    name = tmp_path / "f"
    for change in ("removed", "replaced"):
        with name.open("wb") as opened:
            opened.write(CONTENT.tobytes())
            opened.flush()
            os.fsync(opened.fileno())
        file = LocalStorage(tmp_path).open("f")
        make_cold(name)
        name.unlink()
        if change == "replaced":
            name.write_bytes(bytes(SIZE))
        read(file, 7, [SIZE - 7])
        file.close()


# -- descriptors, buffers, threads


def test_descriptors_are_closed_after_failures_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, storage = descriptors(), LocalStorage(path.parent)
    for _ in range(5):
        make_cold(path)
        file = storage.open(path.name)
        with pytest.raises(EOFError):
            file.read_into([np.zeros(SIZE + 1, np.uint8)], 0, once=True)
        file.close()
    assert descriptors() == before
    with pytest.raises(FileNotFoundError):
        storage.open("absent")
    assert descriptors() == before


def test_buffers_are_put_back_and_used_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_support(path)
    made: list[int] = []
    fresh = direct.fresh_pages
    monkeypatch.setattr(direct, "fresh_pages", lambda size: made.append(size) or fresh(size))
    storage = LocalStorage(path.parent)
    files = [storage.open(path.name) for _ in range(4)]
    for file in files:
        make_cold(path)
        read(file, 1, [SIZE - 1])
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_direct(10**6, memoryview(bytearray(LEAST)), 0, storage._buffers)
    for file in files:
        file.close()
    assert len(made) == 1
    assert storage._buffers.qsize() == 1
    assert storage._buffers.get().ctypes.data % mmap.PAGESIZE == 0


def test_many_threads_read_one_file_and_several(path: Path) -> None:
    """As a load does: each range arrives whole, and there are at most as many buffers as threads."""
    storage, before = LocalStorage(path.parent), descriptors()
    files = [storage.open(path.name) for _ in range(2)]
    make_cold(path)
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(12):
                size = rng.randrange(LEAST, 2 * PIECE)
                read(rng.choice(files), rng.randrange(SIZE - size), [size])
                if rng.random() < 0.3:
                    make_cold(path)
        except BaseException as error:
            failures.put(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in files:
        file.close()
    assert failures.empty(), failures.get()
    assert storage._buffers.qsize() <= 6
    assert descriptors() == before
