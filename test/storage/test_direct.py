"""Writing past the page cache: what arrives is the same, whatever can be written that way and whatever cannot."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.storage import LocalStorage, direct, local_files

PAGE = direct.ALIGNMENT


@pytest.fixture
def pages() -> np.ndarray:
    """Five pages of data that start at a page."""
    buffer = np.frombuffer(mmap.mmap(-1, 5 * PAGE), np.uint8)
    buffer[:] = np.random.default_rng(0).integers(0, 256, 5 * PAGE)
    return buffer


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Every write: its descriptor, offset and size."""
    seen: list[tuple[int, int, int]] = []
    real = os.pwrite

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        seen.append((descriptor, offset, len(data)))
        return real(descriptor, data, offset)

    monkeypatch.setattr(local_files.os, "pwrite", pwrite)
    return seen


def write(folder: Path, pieces: list[tuple[np.ndarray, int]]) -> bytes:
    folder.mkdir(exist_ok=True)
    file = LocalStorage(folder).create("file")
    for data, offset in pieces:
        file.write(data, offset)
    file.sync()
    file.close()
    return (folder / "file").read_bytes()


def test_whole_pages_go_past_the_cache_and_the_rest_does_not(
    tmp_path: Path, pages: np.ndarray, writes: list[tuple[int, int, int]]
) -> None:
    assert write(tmp_path, [(pages[: 3 * PAGE + 100], 0)]) == pages[: 3 * PAGE + 100].tobytes()
    if direct._filesystem(tmp_path.stat().st_dev) not in direct._LOCAL_DISKS:
        pytest.skip("the temporary folder is not on a local disk")
    assert [(offset, size) for _, offset, size in writes] == [(0, 3 * PAGE), (3 * PAGE, 100)]
    assert writes[0][0] != writes[1][0]


@pytest.mark.parametrize("shift", [(1, 0), (0, 1), (7, 512), (512, 512)])
def test_what_is_not_aligned_arrives_all_the_same(tmp_path: Path, pages: np.ndarray, shift: tuple[int, int]) -> None:
    data = pages[shift[0] :]
    assert write(tmp_path, [(data, shift[1])]) == bytes(shift[1]) + data.tobytes()


def test_pieces_in_any_order_make_up_the_file(tmp_path: Path, pages: np.ndarray) -> None:
    cuts = [(pages[4 * PAGE :], 4 * PAGE), (pages[: 2 * PAGE], 0), (pages[2 * PAGE : 4 * PAGE], 2 * PAGE)]
    assert write(tmp_path, cuts) == pages.tobytes()


@pytest.mark.parametrize("after", [0, PAGE, PAGE + 512])
def test_a_disk_that_stops_taking_direct_writes(
    tmp_path: Path, pages: np.ndarray, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """A short write, or EINVAL for another alignment than ours, is made good through the cache."""
    real = os.pwrite
    first: list[int] = []

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        first.append(descriptor)
        if descriptor != first[0] or len(data) < 5 * PAGE:
            return real(descriptor, data, offset)
        if not after:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.write(os.open(tmp_path / "file", os.O_WRONLY), bytes(data[:after]))

    monkeypatch.setattr(direct, "_filesystem", lambda device: "ext4")
    if not _has_direct(tmp_path):
        pytest.skip("the temporary folder's filesystem has no direct writes")
    monkeypatch.setattr(local_files.os, "pwrite", pwrite)
    assert write(tmp_path, [(pages, 0)]) == pages.tobytes()


def test_a_new_file_whose_name_is_exchanged_is_written_all_the_same(
    tmp_path: Path, pages: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the folder cannot lead the writer elsewhere."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")

    def exchange(descriptor: int, access: int) -> int | None:
        os.rename(tmp_path / "file", tmp_path / "moved")
        (tmp_path / "file").symlink_to(victim)
        return direct.open_direct(descriptor, access)

    monkeypatch.setattr(local_files, "open_direct", exchange)
    write(tmp_path, [(pages, 0)])
    assert victim.read_bytes() == b"precious"
    assert (tmp_path / "moved").read_bytes() == pages.tobytes()


def _has_direct(folder: Path) -> bool:
    with (folder / "probe").open("wb") as probe:
        descriptor = direct.open_direct(probe.fileno(), os.O_WRONLY)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def test_a_full_disk_is_not_hidden(tmp_path: Path, pages: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local_files.os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, [(pages, 0)])


def test_files_that_are_closed_have_no_descriptor_left(
    tmp_path: Path, pages: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_filesystem", lambda device: "ext4")
    before = len(os.listdir("/proc/self/fd"))
    for i in range(50):
        write(tmp_path / f"{i}", [(pages, 0)])
        file = LocalStorage(tmp_path / f"{i}").open("file")
        file._open_direct()  # type: ignore[attr-defined]
        file.close()
    assert len(os.listdir("/proc/self/fd")) < before + 25


@pytest.mark.parametrize("kind", ["tmpfs", "nfs4", "overlay", ""])
def test_other_filesystems_are_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(direct, "_filesystem", lambda device: kind)
    with (tmp_path / "file").open("wb") as file:
        assert direct.open_direct(file.fileno(), os.O_WRONLY) is None


def test_the_type_of_a_filesystem_is_found() -> None:
    assert direct._filesystem(os.stat("/proc").st_dev) == "proc"
    assert direct._filesystem(os.makedev(4095, 1)) == ""


def test_a_mount_whose_name_is_no_text_is_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(b"7 1 0:1 / /mnt/\xff rw - nfs4 host:/ rw\n8 1 4095:2 / /data rw - xfs /dev/sdb rw\n")
    monkeypatch.setattr(direct, "Path", lambda name: mounts)
    assert direct._filesystem(os.makedev(4095, 2)) == "xfs"


def test_without_proc_the_type_of_no_filesystem_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    assert direct._filesystem.__wrapped__(os.stat("/").st_dev) == ""
