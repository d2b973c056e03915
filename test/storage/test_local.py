"""The local folder: whole files or none, under many hands at once."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.storage import LocalStorage, Storage, local, local_files, noreplace
from paddle_dist_ckpt.storage.made_folder import MadeFolder
from paddle_dist_ckpt.testing import FaultyStorage
from paddle_dist_ckpt.testing.storage_conformance import in_threads, put
from test.storage.test_opening import read_in_both_ways
from test.system_calls import PATH_CALLS, SystemCalls, failing


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def test_an_error_without_a_number_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"^broken: {tmp_path}$"), local_files.about(tmp_path):
        raise OSError("broken")
    with pytest.raises(OSError, match=f"^broken {tmp_path}$"), local_files.about(tmp_path):
        raise OSError(f"broken {tmp_path}")


def test_a_missing_folder_has_no_names(tmp_path: Path) -> None:
    assert LocalStorage(tmp_path / "none").names() == []
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError):
            LocalStorage(path).names()


def test_prepare_makes_all_folders_and_may_be_repeated(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "a" / "b" / "c")
    assert in_threads(8, lambda i: storage.prepare()) == [None] * 8
    storage.prepare()
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert storage.names() == []


def test_a_temporary_name_that_cannot_be_removed_is_told_of_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that may only be read says so of names that nobody has made."""

    monkeypatch.setattr(Path, "unlink", failing(errno.EROFS))
    monkeypatch.setattr(os, "replace", failing(errno.EIO))
    for folder, there in ((tmp_path / "nowhere", False), (tmp_path, True)):
        caplog.clear()
        with pytest.raises(OSError, match=r"/f(\.tmp)?'"):
            LocalStorage(folder).publish("f", b"x", "f.tmp", replace=True)
        assert ("is left: [Errno 30]" in caplog.text) == there


def test_a_filesystem_that_does_not_say_how_large_it_is_has_unknown_room(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libfuse answers for those that do not implement it."""
    assert storage.free_bytes() is not None
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([512, 0, 0, 0, 0, 0, 0, 0, 0, 255]))
    assert storage.free_bytes() is None
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([512, 512, 0, 0, 0, 0, 0, 0, 0, 255]))
    assert storage.free_bytes() is None, "as the C library passes that on"
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([512, 512, 9, 0, 0, 0, 0, 0, 0, 255]))
    assert storage.free_bytes() == 0, "it is full"
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([0, 0, 9, 9, 9, 0, 0, 0, 0, 255]))
    assert storage.free_bytes() is None, "nobody knows how large a block is"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EACCES, errno.EOVERFLOW, errno.EIO])
def test_a_filesystem_that_may_not_be_asked_for_its_room_has_unknown_room(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "statvfs", failing(number, "refused"))
    if number == errno.EIO:  # the disk is broken
        with pytest.raises(OSError, match="refused"):
            storage.free_bytes()
    else:
        assert storage.free_bytes() is None


def test_an_error_of_closing_what_was_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, closed = LocalStorage(tmp_path), list[int]()
    put(storage, "f", b"content" * 100_000)
    real = os.close

    def close(descriptor: int) -> None:
        real(descriptor)
        closed.append(descriptor)
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "close", close)
    assert storage.read("f", 7) == b"content"
    file = storage.open("f")
    buffer = np.zeros(700_000, np.uint8)
    file.read_into([buffer], 0, once=True)
    file.close()
    assert buffer.tobytes() == b"content" * 100_000
    storage.sync()
    assert len(closed) >= 3
    written = storage.create("g")
    with pytest.raises(OSError, match=f"injected: '{tmp_path}/g'"):
        written.close()


def test_identity_tells_folders_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    a, b, link = (LocalStorage(tmp_path / name).identity() for name in ("a", "b", "link"))
    assert a == link
    assert a != b
    assert a.host == b.host


def test_a_filesystem_that_says_that_nothing_takes_any_room(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(storage, "full", bytes(range(100)))
    with (tmp_path / "hole").open("wb") as stream:
        stream.truncate(1 << 20)
    with (
        closing(storage.open("full")) as full,
        closing(storage.open("hole")) as hole,
        monkeypatch.context() as patch,
    ):
        patch.setattr(os, "fstat", lambda file: SimpleNamespace(st_dev=1, st_ino=file, st_blocks=0))
        assert [file.on_disk[1] for file in (full, hole)] == [100, 0]  # type: ignore[attr-defined]


def test_the_end_of_a_file_names_it(storage: LocalStorage) -> None:
    put(storage, "f", bytes(100))
    with closing(storage.open("f")) as file, pytest.raises(EOFError, match="f ends at byte 100"):
        file.read_into([np.zeros(50, np.uint8)], 60)


@pytest.mark.parametrize("flags", [True, False])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EXDEV])
def test_publish_without_hard_links(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int, flags: bool
) -> None:
    monkeypatch.setattr(os, "link", failing(number))
    if not flags:
        monkeypatch.setattr(noreplace, "_renameat2", None)
    assert storage.publish("m", b"1", "tmp", replace=False)
    assert not storage.publish("m", b"2", "tmp", replace=False)
    assert storage.read("m") == b"1"
    assert storage.names() == ["m"]


@pytest.mark.skipif(noreplace._renameat2 is None, reason="this system has no such rename")
def test_without_hard_links_nothing_is_replaced_that_appears_meanwhile(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        put(storage, "m", b"another save's")
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(Path, "exists", lambda _: False)  # too early
    assert not storage.publish("m", b"ours", "tmp", replace=False)
    assert storage.read("m") == b"another save's"
    assert storage.names() == ["m"]


@pytest.mark.parametrize("done", [True, False])
def test_a_rename_whose_answer_is_lost_is_known_to_be_done(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    def lost(source: Path, target: Path) -> None:
        if done:
            source.rename(target)
        raise OSError(errno.EIO, "lost", str(target))

    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    monkeypatch.setattr(local, "rename_noreplace", lost)
    if done:
        assert storage.publish("m", b"ours", "tmp", replace=False)
        assert storage.read("m") == b"ours"
    else:
        with pytest.raises(OSError, match="lost: '/.*/m'"):
            storage.publish("m", b"ours", "tmp", replace=False)
        assert storage.names() == []


@pytest.mark.parametrize(
    ("operation", "replace"),
    [("pwrite", True), ("pwrite", False), ("fsync", True), ("fsync", False), ("link", False), ("replace", True)],
)
def test_a_failed_publish_leaves_all_as_it_was(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, operation: str, replace: bool
) -> None:
    storage.publish("m", b"old", "tmp", replace=True)
    monkeypatch.setattr(os, operation, failing(errno.EIO, "a broken disk"))
    with pytest.raises(OSError, match="broken disk"):
        storage.publish("m" if replace else "n", b"new", "tmp", replace=replace)
    assert storage.names() == ["m"]
    assert storage.read("m") == b"old"


@pytest.mark.parametrize(("operation", "replace"), [("link", False), ("replace", True)])
def test_what_has_only_the_number_of_the_file_is_another_one(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, replace: bool
) -> None:
    """Somebody removes the temporary name, and writes a file of the final name that gets the number of the first."""

    def taken(source: Path, target: Path) -> None:
        Path(source).rename(target)
        os.utime(target, (1, 1))
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))

    monkeypatch.setattr(os, operation, taken)
    with pytest.raises(FileNotFoundError):
        storage.publish("m", b"new", "tmp", replace=replace)


def test_a_publish_onto_a_folder_fails_cleanly(storage: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(OSError):
        storage.publish("m", b"new", "tmp", replace=True)
    assert not storage.publish("m", b"new", "tmp", replace=False)
    assert storage.names() == ["m"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_where_nobody_says_what_is_a_hole_there_is_none(
    tmp_path: Path, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "a").touch()
    os.truncate(tmp_path / "a", 1 << 20)

    with closing(storage.open("a")) as file:
        assert file.is_hole(0, 1 << 20)
        monkeypatch.setattr(os, "lseek", failing(number))
        assert not file.is_hole(0, 1 << 20)
        assert file.hole_bytes(0, 1 << 20) == 0
        assert file.on_disk[1] == 1 << 20


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_follow_the_umask(storage: LocalStorage, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        put(storage, "f", b"x")
        storage.publish("linked", b"x", "tmp", replace=False)
        storage.publish("renamed", b"x", "tmp", replace=True)
    finally:
        os.umask(before)
    for name in ("f", "linked", "renamed"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_can_be_touched_where_no_times_can_be_set(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Else a save would count as dead when it takes longer than its claim counts."""
    put(storage, "0.claim", b"content")
    put(storage, "empty", b"")
    os.mkfifo(tmp_path / "fifo")
    for name in ("0.claim", "empty"):
        os.utime(tmp_path / name, (1, 1))

    monkeypatch.setattr(os, "utime", failing(number, "refused"))
    storage.touch("0.claim")
    assert storage.modified("0.claim") > 1
    assert storage.read("0.claim") == b"content"
    for name in ("empty", "fifo", "."):  # there is nothing to be written again
        with pytest.raises(OSError, match="refused"):
            storage.touch(name)
    assert storage.modified("empty") == 1


def test_a_folder_whose_sync_fails_is_an_error_and_one_that_cannot_be_synced_is_none(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
        monkeypatch.setattr(os, "fsync", failing(number, "not for folders"))
        storage.sync()
    monkeypatch.setattr(os, "fsync", failing(errno.EIO, "a broken disk"))
    with pytest.raises(OSError, match="broken disk"):
        storage.sync()


def test_a_short_write_goes_on_where_it_ended(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:7], at))
    put(storage, "f", bytes(range(100)))
    assert storage.read("f") == bytes(range(100))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(OSError, match="wrote nothing"):
        put(storage, "g", b"x")


def use_all(folder: Path) -> list[object]:
    """Do everything that can be done in a folder; what came of it."""
    storage = LocalStorage(folder)
    storage.prepare()
    found: list[object] = [storage.publish("x", b"one", "x.tmp", False), storage.publish("x", b"two", "x.tmp", True)]
    put(storage, "y", b"three")
    storage.touch("x")
    found += [storage.names(), storage.size("x"), storage.read("x"), read_in_both_ways(storage, "y")]
    found += [storage.modified("x") > 0, storage.identity() is not None, storage.free_bytes() is not None]
    storage.delete("y")
    storage.sync()
    return [*found, storage.names()]


@pytest.mark.parametrize("after", [False, True])
def test_what_a_signal_interrupts_is_done_all_the_same(tmp_path: Path, after: bool) -> None:
    """Filesystems in user space give up what waits for them; Python itself goes on only where a file is open."""
    with SystemCalls(tmp_path / "dry").watched() as dry:
        expected = use_all(tmp_path / "dry")
    calls = [at for at, (name, _) in enumerate(dry.calls) if name == "close" or name in {*PATH_CALLS} - {"open"}]
    assert {dry.calls[at][0] for at in calls} >= {"stat", "lstat", "statvfs", "listdir", "utime", "unlink", "close"}
    for at in calls:
        with SystemCalls(tmp_path / str(at), at, after, errno.EINTR).watched() as system:
            assert use_all(tmp_path / str(at)) == expected, dry.calls[at]
        assert system.failed is not None
        assert system.failed[0] == dry.calls[at][0]
        assert os.listdir(tmp_path / str(at)) == ["x"]


def test_the_faulty_storage_calls_its_hook_before_each_operation(tmp_path: Path) -> None:
    calls: list[tuple[str, str]] = []
    faulty = FaultyStorage(tmp_path, lambda operation, name: calls.append((operation, name)), free_bytes=5)
    assert isinstance(faulty, Storage)
    faulty.prepare()
    file = faulty.create("f")
    file.write(np.zeros(3, np.uint8), 0)
    file.sync()
    file.close()
    reader = faulty.open("f")
    reader.read_into([np.zeros(3, np.uint8)], 0)
    reader.close()
    assert faulty.publish("m", b"x", "tmp", replace=False)
    assert faulty.free_bytes() == 5
    assert calls == [
        ("prepare", ""),
        ("create", "f"),
        ("write", "f"),
        ("sync_file", "f"),
        ("open", "f"),
        ("read_into", "f"),
        ("publish", "m"),
    ]


def test_a_storage_can_be_sent_to_another_process(tmp_path: Path) -> None:
    copy = pickle.loads(pickle.dumps(LocalStorage(tmp_path)))
    assert copy.location == LocalStorage(tmp_path).location


def test_a_window_that_is_read_by_halves_is_whole(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    put(storage, "x", content.tobytes())
    real, seen = os.preadv, list[bytes]()
    with closing(storage.open("x")) as file:
        monkeypatch.setattr(os, "preadv", lambda number, views, at: real(number, [views[0][:700]], at))
        data = np.zeros(len(content), np.uint8)
        file.read_windows(data, 0, 1000, lambda window: seen.append(bytes(window)))
    assert b"".join(seen) == data.tobytes() == content.tobytes()


def test_a_window_that_cannot_be_read_names_the_file(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    put(storage, "x", bytes(5000))
    with closing(storage.open("x")) as file:
        monkeypatch.setattr(os, "preadv", failing(errno.EIO))
        with pytest.raises(OSError, match=r"error: '.*/x'"):
            file.read_windows(np.zeros(5000, np.uint8), 0, 1000, lambda window: None)


def test_a_read_that_fails_after_a_part_is_no_shorter_content(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(storage, "x", bytes(1_000_000))
    real, reads = os.read, []

    def read(descriptor: int, nbytes: int) -> bytes:
        reads.append(nbytes)
        if len(reads) == 3:
            raise BlockingIOError(errno.EAGAIN, "try again")
        return real(descriptor, min(nbytes, 5000))  # short, as a read may be

    monkeypatch.setattr(os, "read", read)
    with pytest.raises(BlockingIOError, match=r"try again.*/x"):
        storage.read("x")
    assert storage.read("x") == bytes(1_000_000)
    assert storage.read("x", 12_345) == bytes(12_345)


def test_a_folder_that_was_made_and_cannot_be_opened_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    monkeypatch.setattr(os, "open", failing(errno.EMFILE))
    with pytest.raises(OSError, match="Too many open files: .*made"):
        MadeFolder(made)
    assert not made.exists()
