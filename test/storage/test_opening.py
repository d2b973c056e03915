"""What somebody else has put into a local folder, or replaces there: opened with care, or not at all."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.storage import LocalStorage, as_source, local_files
from paddle_dist_ckpt.testing.storage_conformance import put
from test.system_calls import failing, make_stale_when_removed


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


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
    monkeypatch.setattr(os, "lstat", failing(errno.ESTALE))  # nothing of the folder answers
    with pytest.raises(OSError, match="Stale file handle: '/.*/x'"):
        reader.read_into([buffer], 0)
    reader.close()
    writer.close()


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

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        with pytest.raises(OSError, match="Stale file handle: '/.*/x'"):
            storage.read("x")
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("call", ["open", "readlink"])
def test_a_link_that_a_file_replaces_while_it_is_followed_is_opened_again(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    put(storage, "y", b"old")
    (tmp_path / "x").symlink_to("y")
    real, left = getattr(os, call), [1]

    def replaced(path: Any, *args: Any, **more: Any) -> Any:
        if not left or not str(path).endswith("/x"):
            return real(path, *args, **more)
        left.pop()
        if call == "readlink":
            os.rename(tmp_path / "y", path)
            return real(path)
        try:
            return real(path, *args, **more)
        finally:
            os.rename(tmp_path / "y", path)

    monkeypatch.setattr(os, call, replaced)
    assert storage.read("x") == b"old"
    assert not left


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
