"""The local folder: whole files or none, under many hands at once."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import socket
import stat
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.storage import LocalStorage, Storage, as_source, as_storage, local, local_files, noreplace
from paddle_dist_ckpt.storage.made_folder import MadeFolder
from paddle_dist_ckpt.testing import FaultyStorage
from paddle_dist_ckpt.testing.storage_conformance import in_threads, put
from test.system_calls import PATH_CALLS, SystemCalls, make_stale_when_removed


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def test_a_path_or_a_storage_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = as_storage(tmp_path)
    assert isinstance(storage, Storage)
    assert as_storage(storage) is storage
    assert as_storage(str(tmp_path)).location == storage.location == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    relative = as_storage("ckpt")
    monkeypatch.chdir("/")
    assert relative.location == str(tmp_path / "ckpt"), "a relative path means the folder of its time"
    for other in (None, 5, b"x", ["x"]):
        with pytest.raises(TypeError, match="path must be"):
            as_storage(other)
    for text in ("", "a\0b"):
        with pytest.raises(ValueError, match="path must name a local folder or file, not"):
            as_storage(text)


def test_a_storage_that_is_none_is_told_why() -> None:
    class Unfinished:
        location = "memory"
        touch = None

        def publish(self) -> None: ...

    with pytest.raises(TypeError, match="not the class LocalStorage"):
        as_storage(LocalStorage)
    with pytest.raises(TypeError, match=r"not Unfinished, which has no prepare, .*, touch, modified$"):
        as_storage(Unfinished())


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


def test_a_relative_path_in_a_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError, match="the current folder, to which it is relative, is gone: 'ckpt'"):
        as_storage("ckpt")
    assert as_storage(tmp_path).location == str(tmp_path)


def test_prepare_makes_all_folders_and_may_be_repeated(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "a" / "b" / "c")
    assert in_threads(8, lambda i: storage.prepare()) == [None] * 8
    storage.prepare()
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert storage.names() == []


def test_a_folder_below_very_many_others(tmp_path: Path) -> None:
    here = Path.cwd()
    try:
        os.chdir(tmp_path)  # a path of them all would be too long
        for _ in range(400):
            os.mkdir("d")
            os.chdir("d")
        LocalStorage("x").prepare()
        assert Path("x").is_dir()
    finally:
        os.chdir(here)
        shutil.rmtree(tmp_path / "d")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of all that is synced, in a process that has synced nothing yet."""
    local._durable.clear()
    found: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_the_names_of_all_folders_are_made_durable(tmp_path: Path, synced: list[str]) -> None:
    """Also those of folders that somebody else has made: once in a process."""
    (tmp_path / "theirs" / "x" / "y").mkdir(parents=True)
    (tmp_path / "far" / "x").mkdir(parents=True)
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "link").symlink_to(tmp_path / "theirs" / "x")
    (tmp_path / "to" / "far").symlink_to(tmp_path / "far" / "x")
    expected = {
        "a/b/c": ["", "a", "a/b"],
        "a/b": [],
        "theirs/x/y": ["", "theirs", "theirs/x"],
        "to/link": ["", "to"],
        "to/far/y": ["", "far", "far/x", "to"],
    }
    for name, folders in expected.items():
        synced.clear()
        LocalStorage(tmp_path / name).prepare()
        below = {path for path in synced if path.startswith(str(tmp_path))}
        assert below == {os.path.normpath(tmp_path / folder) for folder in folders}
        synced.clear()
        LocalStorage(tmp_path / name).prepare()
        assert synced == []


def test_names_are_made_durable_up_to_the_mount_point(tmp_path: Path, synced: list[str]) -> None:
    LocalStorage(tmp_path / "a").prepare()
    device = tmp_path.stat().st_dev
    above = [folder for folder in (tmp_path / "a").resolve().parents if folder.stat().st_dev == device]
    assert set(synced) == set(map(str, above))


def test_names_beyond_a_mount_point_are_not_made_durable(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lstat(path: Path) -> os.stat_result:
        mode, inode, device, *rest = real(path)
        return os.stat_result((mode, inode, device + (path == tmp_path / "disk"), *rest))

    real = Path.lstat
    monkeypatch.setattr(Path, "lstat", lstat)
    LocalStorage(tmp_path / "disk" / "a").prepare()
    assert synced == [str(tmp_path / "disk")]


@pytest.mark.parametrize("name", ["latest", "run/latest"])
def test_the_name_of_a_folder_that_is_removed_and_made_again_is_made_durable_again(
    tmp_path: Path, synced: list[str], name: str
) -> None:
    """Also where the new folder has the old one's inode, which ext4 gives again at once."""
    for _ in range(3):
        shutil.rmtree(tmp_path / name.split("/")[0], ignore_errors=True)
        (tmp_path / name).mkdir(parents=True)
        synced.clear()
        LocalStorage(tmp_path / name).prepare()
        assert {str((tmp_path / name).parent), str(tmp_path)} <= set(synced)
        synced.clear()
        LocalStorage(tmp_path / name).prepare()
        assert synced == []


def test_where_times_are_whole_seconds_a_folder_counts_as_the_same_later(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a folder that is removed and made again within a second would have neither another inode nor another time."""
    real, changed = Path.stat, float(int(time.time()))

    def coarse(path: Path, **options: Any) -> Any:
        status = real(path, **options)
        fields = {field: getattr(status, field) for field in dir(status) if field.startswith("st_")}
        return SimpleNamespace(**{**fields, "st_ctime": changed, "st_ctime_ns": int(changed) * 1_000_000_000})

    monkeypatch.setattr(Path, "stat", coarse)
    for later, expected in ((0.5, True), (2.5, True), (4.0, True), (4.5, False)):
        monkeypatch.setattr(local.time, "time", lambda later=later: changed + later)
        synced.clear()
        LocalStorage(tmp_path / "run").prepare()
        assert (str(tmp_path) in synced) == expected, later


def test_a_temporary_name_that_cannot_be_removed_is_told_of_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that may only be read says so of names that nobody has made."""

    def refuse(path: Path, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    def broken(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(source))

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(os, "replace", broken)
    for folder, there in ((tmp_path / "nowhere", False), (tmp_path, True)):
        caplog.clear()
        with pytest.raises(OSError, match=r"f\.tmp"):
            LocalStorage(folder).publish("f", b"x", "f.tmp", replace=True)
        assert ("is left: [Errno 30]" in caplog.text) == there


def test_a_folder_above_that_may_not_be_opened_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, *args: Any) -> int:
        if str(path) in map(str, tmp_path.parents):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args)

    monkeypatch.setattr(os, "open", refuse)
    LocalStorage(tmp_path / "a" / "b").prepare()
    assert (tmp_path / "a" / "b").is_dir()


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
    def refuse(path: Path) -> None:
        raise OSError(number, "refused", str(path))

    monkeypatch.setattr(os, "statvfs", refuse)
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


def test_reading_past_the_end_is_an_error(storage: LocalStorage) -> None:
    put(storage, "f", bytes(100))
    file = storage.open("f")
    for size, offset in ((101, 0), (1, 100), (50, 60), (1, 10**12)):
        with pytest.raises(EOFError, match="f ends at byte"):
            file.read_into([np.zeros(size, np.uint8)], offset)
    file.read_into([np.zeros(0, np.uint8)], 100)
    file.read_into([], 500)
    file.close()


@pytest.mark.parametrize("flags", [True, False])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EXDEV])
def test_publish_without_hard_links(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int, flags: bool
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, "no links here")

    monkeypatch.setattr(os, "link", refuse)
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

    def too_early(_: Path) -> bool:
        return False

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(Path, "exists", too_early)
    assert not storage.publish("m", b"ours", "tmp", replace=False)
    assert storage.read("m") == b"another save's"
    assert storage.names() == ["m"]


@pytest.mark.parametrize("done", [True, False])
def test_a_rename_whose_answer_is_lost_is_known_to_be_done(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    def lost(source: Path, target: Path) -> None:
        if done:
            source.rename(target)
        raise OSError(errno.EIO, "lost", str(target))

    monkeypatch.setattr(os, "link", refuse)
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
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "a broken disk")

    storage.publish("m", b"old", "tmp", replace=True)
    monkeypatch.setattr(os, operation, refuse)
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

    def refuse(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    with closing(storage.open("a")) as file:
        assert file.is_hole(0, 1 << 20)
        monkeypatch.setattr(local_files.os, "lseek", refuse)
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

    def refuse(path: Path, **_: Any) -> None:
        raise OSError(number, "refused", str(path))

    monkeypatch.setattr(os, "utime", refuse)
    storage.touch("0.claim")
    assert storage.modified("0.claim") > 1
    assert storage.read("0.claim") == b"content"
    for name in ("empty", "fifo", "."):  # there is nothing to be written again
        with pytest.raises(OSError, match="refused"):
            storage.touch(name)
    assert storage.modified("empty") == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF])
def test_a_folder_that_cannot_be_synced_is_no_error(
    storage: LocalStorage, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, "not for folders")

    monkeypatch.setattr(os, "fsync", refuse)
    storage.sync()


def test_a_folder_whose_sync_fails_is_an_error(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EIO, "a broken disk")

    monkeypatch.setattr(os, "fsync", refuse)
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


def test_what_another_host_removes_is_gone(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_stale_when_removed(monkeypatch)
    monkeypatch.setattr(local_files, "_STALE_SECONDS", 0.1)
    put(storage, "x", b"content" * 1000)
    reader, writer = storage.open("x"), storage.create("y")
    for name in ("x", "y"):
        storage.delete(name)
    buffer = np.zeros(7000, np.uint8)
    for use in (lambda: reader.read_into([buffer], 0), lambda: writer.write(buffer, 0), writer.sync):
        with pytest.raises(FileNotFoundError, match=r"another host has removed it: '/.*/[xy]'"):
            use()
    (tmp_path / "x").touch()
    with pytest.raises(OSError, match="Stale file handle: '/.*/x'"):  # it is there, for all that is known
        reader.read_into([buffer], 0)
    (tmp_path / "x").unlink()
    monkeypatch.setattr(os, "lstat", lambda path: _raise_stale(path))  # nothing of the folder answers
    with pytest.raises(OSError, match="Stale file handle: '/.*/x'"):
        reader.read_into([buffer], 0)
    reader.close()
    writer.close()


def _raise_stale(path: Path) -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))


def test_what_another_host_removes_is_gone_when_this_one_has_noticed(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client goes by what it has seen of a name for a second, say."""
    make_stale_when_removed(monkeypatch)
    put(storage, "x", b"content" * 1000)
    reader = storage.open("x")
    storage.delete("x")
    real, known = os.lstat, [os.lstat(tmp_path)] * 3
    monkeypatch.setattr(os, "lstat", lambda path: known.pop() if known else real(path))
    with pytest.raises(FileNotFoundError, match="another host has removed it: '/.*/x'"):
        reader.read_into([np.zeros(7000, np.uint8)], 0)
    assert not known
    reader.close()


@pytest.mark.parametrize(
    ("call", "code"),
    [(call, errno.ESTALE) for call in ("open", "fstat", "read")] + [(call, errno.ENOENT) for call in ("fstat", "read")],
)
def test_a_file_that_another_host_replaces_is_opened_again(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """On GlusterFS a name that was replaced cannot be opened for up to a second, or what is open cannot be read."""
    put(storage, "x", b"old")
    real, left = getattr(os, call), [1, 2, 3]

    def replaced(*args: Any, **more: Any) -> Any:
        if left and (call != "open" or str(args[0]).endswith("/x")):
            left.pop()
            with monkeypatch.context() as patch:
                patch.setattr(os, call, real)
                storage.publish("x", b"new", "x.tmp", replace=True)
            raise OSError(code, os.strerror(code))
        return real(*args, **more)

    monkeypatch.setattr(os, call, replaced)
    if call == "read":
        assert storage.read("x") == b"new"
    else:
        with closing(storage.open("x")) as file:
            assert file.size == 3
    assert not left


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
@pytest.mark.parametrize("call", ["fstat", "read"])
def test_a_file_that_stays_stale_is_an_error(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    monkeypatch.setattr(local_files, "_STALE_SECONDS", 0.2)
    put(storage, "x", b"0")
    descriptors = len(os.listdir("/proc/self/fd"))

    def fail(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="Stale file handle: '/.*/x'"):
            storage.read("x")
    assert len(os.listdir("/proc/self/fd")) == descriptors


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


# -- what somebody else has put into the folder


def read_in_both_ways(storage: LocalStorage, name: str) -> bytes:
    file = storage.open(name)
    buffer = np.zeros(file.size, np.uint8)
    file.read_into([buffer], 0)
    file.close()
    assert storage.size(name) == file.size
    assert storage.read(name) == buffer.tobytes()
    return buffer.tobytes()


def make_odd(path: Path, kind: str) -> None:
    """Make something at a path that is no file."""
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(str(path))
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # zeros without end
        except PermissionError:
            pytest.skip("only root makes devices")


def test_a_read_that_has_to_wait_waits(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filesystems that fetch a file from elsewhere let a read fail of what was opened not to wait."""
    put(storage, "x", b"content")
    blocking = []

    def watched(name: str) -> None:
        real = getattr(os, name)

        def read(descriptor: int, *args: Any) -> Any:
            blocking.append(os.get_blocking(descriptor))
            return real(descriptor, *args)

        monkeypatch.setattr(os, name, read)

    watched("read")
    watched("preadv")
    assert read_in_both_ways(storage, "x") == b"content"
    assert blocking
    assert all(blocking)


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

    def preadv(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with closing(storage.open("x")) as file:
        monkeypatch.setattr(os, "preadv", preadv)
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


def test_a_file_that_is_lent_to_a_client_is_waited_for(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file server itself: a file that a client has a lease of is opened when that has given it back."""
    put(storage, "x", b"content")
    os.mkfifo(tmp_path / "fifo")
    real = os.open

    def lent(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_NONBLOCK:
            raise BlockingIOError(errno.EWOULDBLOCK, "lent", str(path))
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", lent)
    assert read_in_both_ways(storage, "x") == b"content"
    with pytest.raises(BlockingIOError):
        storage.read("fifo")


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["folder", "fifo", "socket", "device"])
def test_what_is_no_file_is_never_opened_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, linked: bool
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    make_odd(Path("odd"), kind)
    if linked:
        Path("link").symlink_to("odd")
    opened = len(os.listdir("/proc/self/fd"))
    storage = LocalStorage(tmp_path)
    for read in (storage.open, storage.read, storage.size):
        with pytest.raises(IsADirectoryError, match=f"it is no file: '{tmp_path}/{'link' if linked else 'odd'}'"):
            read("link" if linked else "odd")
    assert len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.parametrize("target", ["{0}/other/secret", "../other/secret", "deep/up/secret", "/dev/zero"])
def test_links_out_of_the_folder_are_not_followed(tmp_path: Path, target: str) -> None:
    for name in ("folder/deep", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "other" / "secret").write_bytes(b"secret")
    (tmp_path / "folder" / "deep" / "up").symlink_to("../../other")
    (tmp_path / "folder" / "link").symlink_to(target.format(tmp_path))
    storage = LocalStorage(tmp_path / "folder")
    for read in (storage.open, storage.read, storage.size):
        with pytest.raises(IsADirectoryError, match="it is a link to .*, outside its folder; .*: '.*/link'"):
            read("link")


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "f").write_bytes(b"content")
    (tmp_path / "folder" / "near").symlink_to("f")
    (tmp_path / "folder" / "far").symlink_to(tmp_path / "folder" / "near")
    (tmp_path / "name").symlink_to("folder")
    for path in (tmp_path / "folder", tmp_path / "name"):
        assert [read_in_both_ways(LocalStorage(path), name) for name in ("f", "near", "far")] == [b"content"] * 3


def test_looks_at_links_leave_no_file_open(tmp_path: Path, storage: LocalStorage) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("a")
    before = len(os.listdir("/proc/self/fd"))
    assert [storage.size("link") for _ in range(100)] == [3] * 100
    assert len(os.listdir("/proc/self/fd")) < before + 50


def test_links_to_the_cache_of_hugging_face_are_followed(tmp_path: Path) -> None:
    """From its snapshots, folders in these, and a folder elsewhere; also if the cache is reached by a link."""
    blobs, other = tmp_path / "hub" / "models--a--b" / "blobs", tmp_path / "notes" / "blobs"
    snapshot, elsewhere = tmp_path / "hub" / "models--a--b" / "snapshots" / "12ab", tmp_path / "local"
    for folder in (blobs, other, snapshot / "unet", elsewhere):
        folder.mkdir(parents=True)
    (blobs / "f00d").write_bytes(b"weights")
    (other / "f00d").write_bytes(b"of somebody")
    (tmp_path / "cache").symlink_to(tmp_path / "hub")
    (snapshot / "m.safetensors").symlink_to("../../blobs/f00d")
    (snapshot / "unet" / "m.safetensors").symlink_to("../../../blobs/f00d")
    (elsewhere / "m.safetensors").symlink_to(tmp_path / "cache" / "models--a--b" / "blobs" / "f00d")
    for path in (snapshot, snapshot / "unet", elsewhere, tmp_path / "cache" / "models--a--b" / "snapshots" / "12ab"):
        assert read_in_both_ways(LocalStorage(path), "m.safetensors") == b"weights"
    (elsewhere / "n.safetensors").symlink_to(other / "f00d")
    with pytest.raises(IsADirectoryError, match="outside its folder"):
        LocalStorage(elsewhere).open("n.safetensors")


def test_all_links_are_followed_if_told_so(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "content").write_bytes(b"content")
    (tmp_path / "a" / "link").symlink_to("../content")
    (tmp_path / "a" / "endless").symlink_to("/dev/zero")
    storage = pickle.loads(pickle.dumps(LocalStorage(tmp_path / "a", follow_links=True)))
    assert read_in_both_ways(storage, "link") == b"content"
    with pytest.raises(IsADirectoryError, match="it is no file"):
        storage.open("endless")


def test_a_link_to_a_file_is_followed_if_told_so(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "weights").write_bytes(b"weights")
    (tmp_path / "a" / "link").symlink_to("../weights")
    storage = pickle.loads(pickle.dumps(as_source(LocalStorage(tmp_path / "a" / "link", follow_links=True))))
    assert storage.names() == ["link"]
    assert read_in_both_ways(storage, "link") == b"weights"
    with pytest.raises(IsADirectoryError, match="outside its folder"):
        as_source(tmp_path / "a" / "link").open("link")


@pytest.mark.parametrize("name", ["loop", "dangling", "x" * 300])
def test_names_that_lead_nowhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nothing")
    storage = LocalStorage(tmp_path)
    for read in (storage.open, storage.read, storage.size):
        with pytest.raises(OSError):
            read(name)


def test_a_folder_is_not_removed_as_a_file(storage: LocalStorage, caplog: pytest.LogCaptureFixture) -> None:
    (Path(storage.location) / "7.claim").mkdir()
    storage.delete("7.claim")
    assert storage.names() == ["7.claim"]
    assert f"{storage.location}/7.claim is left" in caplog.text


def test_what_a_link_leads_to_is_not_touched(tmp_path: Path, storage: LocalStorage) -> None:
    (tmp_path / "theirs").write_bytes(b"")
    os.utime(tmp_path / "theirs", (1, 1))
    (tmp_path / "claim").symlink_to("theirs")
    storage.touch("claim")
    assert (tmp_path / "theirs").stat().st_mtime == 1
    assert storage.modified("claim") > 1


def test_two_dots_after_a_link_are_above_what_it_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there" / "below").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there" / "below")
    monkeypatch.chdir(tmp_path / "here")
    beyond = {
        "link/../a": "there/a",
        f"{tmp_path}/here/link/..": "there",
        "../here/link/../../b/./c/": "b/c",
        "../a": "a",
        "..": ".",
        "link/d/../e": "here/link/e",  # as it is written where that makes no difference
        "none/../f": "here/f",
        "link": "here/link",
    }
    for path, expected in beyond.items():
        assert LocalStorage(path).location == os.path.normpath(tmp_path / expected), path
    assert LocalStorage("/..").location == "/"


def test_without_a_home_folder_there_is_no_place_that_a_tilde_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda text: text)
    for path in ("~", "~/ck"):
        with pytest.raises(ValueError, match=r"path is '~.*', and there is no home folder"):
            as_storage(path)
    assert as_storage("~ck").location.endswith("/~ck")  # which may be called so


def test_a_folder_that_was_made_and_cannot_be_opened_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    made = tmp_path / "made"
    made.mkdir()
    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(OSError, match="Too many open files: .*made"):
        MadeFolder(made)
    assert not made.exists()


def test_a_path_of_bytes_is_refused_however_it_is_passed() -> None:
    class OfBytes:
        def __fspath__(self) -> bytes:
            return b"ckpt"

    with pytest.raises(TypeError, match="path must be a str or a PathLike of one, not bytes"):
        as_storage(OfBytes())


def test_without_proc_a_file_is_taken_to_be_the_one_that_was_meant(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").symlink_to("g")
    (tmp_path / "g").write_bytes(b"1234")
    readlink = os.readlink

    def none(path: Any, **options: Any) -> Any:
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return readlink(path, **options)

    monkeypatch.setattr(os, "readlink", none)
    assert read_in_both_ways(storage, "f") == b"1234"
