"""Entries of a folder that no save has made, or that somebody has changed: they cost little and hide nothing."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    LoadOptions,
    copy_checkpoint,
    delete_checkpoint,
    export,
    list_checkpoints,
    read_metadata,
    rebuild_metadata,
    verify,
)
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointError, CheckpointNotFoundError
from paddle_dist_ckpt.folder.aside import put_aside
from paddle_dist_ckpt.folder.catalogs import foreign_ids
from paddle_dist_ckpt.folder.commit import Aftermath, begin, finish
from paddle_dist_ckpt.folder.delete import begin_deletion
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.storage.local_files import LocalReadable
from paddle_dist_ckpt.testing import FaultyStorage
from test.hooks import does, raises
from test.jobs import Watch, age_claims, data_files, errors_of, files_in, load_alone, load_whole, save_alone, try_load
from test.readers.golden import GOLDEN

ODD: dict[str, Any] = {
    "a loop": lambda path: path.symlink_to(path.name),
    "a long link": lambda path: path.symlink_to("x" * 300),
    "nothing": lambda path: path.symlink_to("nothing"),
    "a fifo": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "a link away": lambda path: path.symlink_to("/etc/hostname"),
    "no ending": lambda path: path.symlink_to("/dev/zero"),
    "below a file": lambda path: path.symlink_to("/etc/hostname/x"),
}


def test_each_of_many_links_to_nothing_is_looked_at_as_rarely_as_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        (tmp_path / f"{number}.metadata").symlink_to("nothing")
    looks = list[str]()
    real = LocalStorage.read

    def read(self: LocalStorage, name: str, limit: int | None = None) -> bytes:
        looks.append(name)
        return real(self, name, limit)

    monkeypatch.setattr(LocalStorage, "read", read)
    monkeypatch.setattr(os.path, "realpath", lambda *args, **kwargs: 1 // 0)  # takes long
    assert list_checkpoints(tmp_path) == []
    assert len(looks) == 100
    looks.clear()
    with pytest.raises(CheckpointNotFoundError, match="0.metadata is a link to something that is not there"):
        read_metadata(tmp_path)
    assert len(looks) == 101


class StaleListing(LocalStorage):
    """A folder of a network filesystem, whose listing still has what another host has removed."""

    def names(self) -> list[str]:
        return sorted({*super().names(), "0.metadata"})


def test_a_listing_that_is_out_of_date_is_told_as_that(tmp_path: Path) -> None:
    storage = StaleListing(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="0.metadata is listed, but is not there: it was removed"):
        load_alone({"w": np.zeros(3)}, storage)
    save_alone({"w": np.ones(3)}, storage)
    assert list_checkpoints(storage) == [1]


@pytest.mark.parametrize("name", ["7.metadata", "7.0123456789abcdef.claim", "0_7.0123456789abcdef.0.safetensors"])
@pytest.mark.parametrize("kind", ODD)
def test_odd_entries_hide_nothing(tmp_path: Path, kind: str, name: str) -> None:
    save_alone({"a": np.arange(3)}, tmp_path, 1)
    ODD[kind](tmp_path / name)
    assert list_checkpoints(tmp_path) == [1]
    assert load_whole(tmp_path, 1)["a"].tolist() == [0, 1, 2]
    assert verify(tmp_path, 1).ok
    save_alone({"a": np.arange(4)}, tmp_path, 9)
    assert list_checkpoints(tmp_path) == [1, 9]


@pytest.mark.parametrize("kind", ODD)
def test_what_stands_for_a_data_file_is_damage(tmp_path: Path, kind: str) -> None:
    save_alone({"a": np.arange(3000)}, tmp_path / "c", 1)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    file.unlink()
    ODD[kind](file)
    calls: list[Callable[[], object]] = [
        lambda: load_whole(tmp_path / "c"),
        lambda: load_alone({"a": np.zeros(3000, np.int64)}, tmp_path / "c"),
        lambda: copy_checkpoint(tmp_path / "c", tmp_path / "copy"),
        lambda: export(tmp_path / "c", tmp_path / "out"),
    ]
    for call in calls:
        with pytest.raises(CheckpointCorruptedError, match=file.name):
            call()
    assert not verify(tmp_path / "c").ok


@pytest.mark.parametrize("kind", ["a loop", "a long link", "below a file"])
def test_so_it_is_in_a_checkpoint_of_paddles(tmp_path: Path, kind: str) -> None:
    shutil.copytree(GOLDEN / "paddle-3.3.1", tmp_path / "c")
    file = min((tmp_path / "c").glob("*.distcp"))
    file.unlink()
    ODD[kind](file)
    with pytest.raises(CheckpointCorruptedError, match=file.name):
        load_whole(tmp_path / "c")


@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize("kind", ODD)
def test_odd_claims_of_an_id_stop_no_save_to_it(tmp_path: Path, kind: str, expired: bool) -> None:
    save_alone({"a": np.arange(3)}, tmp_path, 7)
    odd = tmp_path / "7.0123456789abcdef.claim"
    ODD[kind](odd)
    if expired:
        os.utime(odd, (1, 1), follow_symlinks=False)
    for size in (4, 5):
        save_alone({"a": np.arange(size)}, tmp_path, 7)
    assert load_whole(tmp_path, 7)["a"].size == 5
    with pytest.raises(CheckpointNotFoundError, match="no complete save without"):
        rebuild_metadata(tmp_path)
    gone = expired and kind not in ("a folder", "nothing")
    assert os.path.lexists(odd) is not gone


def test_a_metadata_file_that_may_not_be_read_hides_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "7.metadata").write_bytes(b"\x80\x04")
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")

    assert foreign_ids(FaultyStorage(tmp_path, raises("read", "*", errno.EACCES))) == [0]
    assert "7.metadata cannot be looked at: [Errno 13] Permission denied" in caplog.text


def test_a_claim_that_may_not_be_read_stops_no_save(tmp_path: Path) -> None:
    """If it is dead; one that may be of somebody who deletes is waited for."""
    (tmp_path / "7.0123456789abcdef.claim").write_text("{}")
    age_claims(tmp_path)

    for unique_id in (7, 7, None):
        save_alone({"a": np.arange(3)}, FaultyStorage(tmp_path, raises("read", "7.0123*", errno.EACCES)), unique_id)
    assert list_checkpoints(tmp_path) == [7, 8]


def test_a_metadata_file_that_is_made_shorter_while_it_is_read_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_alone({f"text {i}": "x" * 3000 for i in range(40)}, tmp_path)
    monkeypatch.setattr(LocalReadable, "size", property(lambda self: self._size + 1))
    with pytest.raises(CheckpointCorruptedError):
        read_metadata(tmp_path)
    with pytest.raises(CheckpointCorruptedError):
        copy_checkpoint(tmp_path, tmp_path / "to")
    assert list_checkpoints(tmp_path) == [0]


def test_a_file_that_is_one_hole_has_nothing_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 1 << 20)
    (tmp_path / "small").write_bytes(b"x")
    storage = LocalStorage(tmp_path)
    for name, nbytes in (("hole", 0), ("small", 1)):
        with closing(storage.open(name)) as file:
            _, found = getattr(file, "on_disk")  # noqa: B009 (it may be left out)
            assert found == nbytes


def test_a_link_whose_way_leads_elsewhere_by_now_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder on the way became a link after it was looked where the link leads to."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_text("secret")
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_text("fine")
    (folder / "link").symlink_to("below/file")
    storage, real = LocalStorage(folder), os.path.realpath
    assert storage.read("link") == b"fine"

    def resolved(path: Any, **kwargs: Any) -> str:
        found = real(path, **kwargs)
        if str(path).endswith("link") and not (folder / "below").is_symlink():
            (folder / "below").rename(tmp_path / "away")
            (folder / "below").symlink_to(tmp_path / "secret")
        return found

    monkeypatch.setattr(os.path, "realpath", resolved)
    with pytest.raises(IsADirectoryError):
        storage.read("link")


def test_a_link_whose_file_is_removed_while_it_is_opened_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("fine")
    (tmp_path / "link").symlink_to("file")
    real = os.readlink

    def removed(path: Any, **kwargs: Any) -> str:
        if str(path).startswith("/proc/self/fd/"):
            (tmp_path / "file").unlink()
        return real(path, **kwargs)

    monkeypatch.setattr(os, "readlink", removed)
    with pytest.raises(FileNotFoundError):
        LocalStorage(tmp_path).read("link")


def test_a_sparse_metadata_file_of_paddles_is_not_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "0.metadata").write_bytes(pickle.dumps({}))
    os.truncate(tmp_path / "0.metadata", 1 << 30)
    tracemalloc.start()
    try:
        lease = begin(LocalStorage(tmp_path), None, replace_newest=True)
        assert lease.of_paddle == 0
        finish(lease, Aftermath([], [], False))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert f"{tmp_path}/0.metadata is too large to be one of Paddle's" in caplog.text


def test_a_checkpoint_of_paddles_is_put_aside_for_good_before_the_claim_goes(tmp_path: Path) -> None:
    (tmp_path / "0.metadata").write_bytes(pickle.dumps({}))
    watch = Watch([tmp_path])
    finish(begin(watch.storages()[0], None, replace_newest=True), Aftermath([], [], False))
    assert [path.name for path in tmp_path.iterdir()] == ["0.metadata.replaced"]
    done = [(operation, name.rpartition(".")[2]) for _, operation, name in watch.steps]
    after = done[done.index(("delete", "metadata")) :]
    assert after.index(("sync", "")) < after.index(("delete", "claim"))


def test_a_save_does_not_replace_what_paddle_has_saved_under_its_id_meanwhile(tmp_path: Path) -> None:
    theirs = pickle.dumps({})
    writes = does("create", "*.safetensors", lambda: (tmp_path / "5.metadata").write_bytes(theirs))
    with pytest.raises(CheckpointError, match=r"5\.metadata is of another format now, and stays; use another id"):
        save_alone({"a": np.arange(3)}, FaultyStorage(tmp_path, writes), 5)
    assert files_in(tmp_path) == {"5.metadata": theirs}


def test_a_metadata_that_paddle_writes_while_another_is_put_aside_stays(tmp_path: Path) -> None:
    (tmp_path / "5.metadata").write_bytes(b"\x80\x04 the first")
    anew = does("publish", "5.metadata.replaced", lambda: (tmp_path / "5.metadata").write_bytes(b"\x80\x04 the second"))
    put_aside(FaultyStorage(tmp_path, anew), 5, "temporary")
    assert (tmp_path / "5.metadata").read_bytes() == b"\x80\x04 the second"
    gone = does("publish", "5.metadata.replaced", (tmp_path / "5.metadata").unlink)
    put_aside(FaultyStorage(tmp_path, gone), 5, "temporary")
    assert [path.name for path in tmp_path.iterdir()] == ["5.metadata.replaced"]


@pytest.mark.parametrize("taker", ["a save that fails", "a deletion", "a save of the same id in time"])
def test_that_a_checkpoint_of_paddles_is_to_be_put_aside_is_not_forgotten(tmp_path: Path, taker: str) -> None:
    """The save that stands for it was killed before it had done so."""
    (tmp_path / "0.metadata").write_bytes(pickle.dumps({}))
    save_alone({"a": np.arange(3)}, tmp_path, 5)
    (tmp_path / "5.metadata").rename(tmp_path / "hidden")
    dead = begin(LocalStorage(tmp_path), None, replace_newest=True)
    dead.stop()
    (tmp_path / "hidden").rename(tmp_path / "5.metadata")
    save = read_metadata(tmp_path, 5).save_id
    says = json.loads((tmp_path / dead.name).read_text()) | {"save": save}
    (tmp_path / dead.name).unlink()
    claim = tmp_path / f"5.{save}.claim"
    claim.write_text(json.dumps(says))
    if taker == "a save of the same id in time":
        save_alone({"a": np.arange(4)}, tmp_path, 5)
    else:
        age_claims(tmp_path)
    if taker == "a save that fails":
        with pytest.raises(OSError, match="No space left"):
            save_alone({"a": np.arange(4)}, FaultyStorage(tmp_path, no_room_for_files), 6)
    elif taker == "a deletion":
        with pytest.raises(CheckpointNotFoundError):
            delete_checkpoint(tmp_path, 6)
        begin_deletion(LocalStorage(tmp_path), 5, save).finish()
    assert (tmp_path / "0.metadata.replaced").exists()
    assert not (tmp_path / "0.metadata").exists()


def no_room_for_files(operation: str, name: str) -> None:
    if operation == "create":
        raise FaultyStorage.no_space(name)


def test_a_checkpoint_of_paddles_that_cannot_be_put_aside_is_left_to_a_later_save(tmp_path: Path) -> None:
    """The save that finds the claim of the dead one that stands for it goes on, and leaves a claim that says so."""
    (tmp_path / "0.metadata").write_bytes(pickle.dumps({}))
    save_alone({"a": np.arange(3)}, tmp_path, 1)
    save = read_metadata(tmp_path, 1).save_id
    claim = tmp_path / f"1.{save}.claim"
    said = {"save": save, "replaces": None, "removes": [], "of_paddle": 0, "automatic": True}
    claim.write_text(json.dumps(said))
    age_claims(tmp_path)

    save_alone({"a": np.arange(4)}, FaultyStorage(tmp_path, raises("publish", "0.metadata.replaced", errno.ENOSPC)), 2)
    assert (tmp_path / "0.metadata").exists()
    assert not claim.exists()
    (claim,) = tmp_path.glob("*.claim")
    assert [said["of_paddle"] for said in json.loads(claim.read_text())["taken"]] == [0]
    age_claims(tmp_path)
    save_alone({"a": np.arange(5)}, tmp_path, 3)
    assert not (tmp_path / "0.metadata").exists()
    assert not list(tmp_path.glob("*.claim"))


def test_a_large_metadata_file_is_in_memory_once(tmp_path: Path) -> None:
    size = 96 << 20
    save_alone({"a": np.arange(3)}, tmp_path, 0)
    file = tmp_path / "0.metadata"
    head, body = file.read_bytes().split(b"\n")[:2]
    head = head.replace(b'"body_bytes":%d' % len(body), b'"body_bytes":%d' % size)
    file.write_bytes(head + b"\n" + b" " * size + b"\n")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorruptedError, match="its checksum does not match"):
            read_metadata(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < size + (64 << 20)
    finally:
        tracemalloc.stop()


def test_the_data_file_that_leads_away_is_not_read(tmp_path: Path) -> None:
    save_alone({"a": np.arange(3)}, tmp_path / "theirs", 0)
    (data,) = (tmp_path / "theirs").glob("*.safetensors")
    os.rename(data, tmp_path / data.name)
    data.symlink_to(tmp_path / data.name)
    targets = [{"a": np.zeros(3, int)}, {"a": np.zeros(3, int)}]
    for error in errors_of(try_load(targets, tmp_path / "theirs", options=LoadOptions(timeout=60)), Exception):
        assert "outside its folder" in str(error)
    (problem,) = verify(tmp_path / "theirs").problems
    assert "outside its folder" in problem
    assert not any(target["a"].any() for target in targets)


@pytest.mark.parametrize("promised", [False, True])
def test_a_metadata_file_that_is_a_hole_is_not_read_whole(tmp_path: Path, promised: bool) -> None:
    """20 GiB, of which nearly none are on the disk."""
    save_alone({"a": np.arange(3)}, tmp_path, 0)
    save_alone({"a": np.arange(3)}, tmp_path, 1)
    file = tmp_path / "1.metadata"
    if promised:
        head, body = file.read_bytes().split(b"\n")[:2]
        size = b'"body_bytes":%d' % len(body)
        assert size in head
        file.write_bytes(head.replace(size, b'"body_bytes":%d' % (20 << 30)) + b"\n" + body)
    os.truncate(file, 20 << 30)
    tracemalloc.start()
    try:
        assert list_checkpoints(tmp_path) == [0, 1]
        with pytest.raises(CheckpointCorruptedError, match="1.metadata has .* bytes"):
            read_metadata(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_of_very_many_files_that_are_no_metadata_some_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(250):
        (tmp_path / f"{i}.metadata").touch()
    save_alone({"a": np.arange(3)}, tmp_path, 1000)
    assert list_checkpoints(tmp_path) == [1000]
    said = [record.getMessage() for record in caplog.records if "not listed: " in record.getMessage()]
    assert len(said) == 101
    assert said[0].startswith(f"not listed: {tmp_path}/0.metadata is no paddle_dist_ckpt .metadata file")
    assert said[-1] == f"and not listed: 150 more .metadata files of {tmp_path}"


def test_what_is_no_checkpoint_of_paddles_any_more_keeps_its_name(tmp_path: Path) -> None:
    save_alone({"a": np.arange(3)}, tmp_path, 5)
    ours = (tmp_path / "5.metadata").read_bytes()
    put_aside(LocalStorage(tmp_path), 5, "temporary")
    put_aside(LocalStorage(tmp_path), 6, "temporary")
    assert not list(tmp_path.glob("*.replaced"))

    def save(operation: str, name: str) -> None:
        if operation == "publish":
            (tmp_path / "7.metadata").write_bytes(ours)

    (tmp_path / "7.metadata").write_bytes(pickle.dumps({}))
    put_aside(FaultyStorage(tmp_path, save), 7, "temporary")
    assert (tmp_path / "7.metadata").read_bytes() == ours
    assert (tmp_path / "5.metadata").read_bytes() == ours


@pytest.mark.parametrize("name", ["torch-dcp-2.13", "hf-safetensors", "paddle-2.6.2"])
def test_checkpoints_of_others_are_neither_deleted_nor_copied(tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / "theirs"))
    before = sorted(path.name for path in folder.iterdir())
    text = f"the checkpoint in {folder} is of the format .*; only this library's own can be managed"
    with pytest.raises(ValueError, match=text):
        delete_checkpoint(folder, read_metadata(folder).unique_id)
    with pytest.raises(ValueError, match=text):
        copy_checkpoint(folder, tmp_path / "copy")
    assert sorted(path.name for path in folder.iterdir()) == before
    assert not (tmp_path / "copy").exists()


def test_a_file_is_meant_alone_whatever_number_a_checkpoint_beside_it_has(tmp_path: Path) -> None:
    """A file has the number 0, as the listing says, and as ranks are told that export it."""
    save_alone({"w": np.full(3, 7.0)}, tmp_path, 0)
    export(tmp_path, tmp_path / "out", format="safetensors")
    (tmp_path / "out" / "model.safetensors").rename(tmp_path / "m.safetensors")
    save_alone({"w": np.zeros(3)}, tmp_path, 0)
    (data_file,) = data_files(tmp_path)
    assert list_checkpoints(tmp_path / "m.safetensors") == [0]
    for unique_id in (None, 0):
        assert read_metadata(tmp_path / "m.safetensors", unique_id).format == "safetensors"
        assert (load_whole(tmp_path / "m.safetensors", unique_id)["w"] == 7).all()
        assert read_metadata(tmp_path / "0.metadata", unique_id).format == "native"
    assert read_metadata(data_file, 0).format == "native"  # which it is a part of
    for unique_id in (None, 1):
        with pytest.raises(CheckpointNotFoundError, match="is a data file of checkpoint 0"):
            read_metadata(data_file, unique_id)
    save_alone({"w": np.zeros(3)}, tmp_path, 3)
    for name in ("m.safetensors", "0.metadata"):
        told = f"/{name} holds no .* with unique_id 3; its only one has the id 0"
        with pytest.raises(CheckpointNotFoundError, match=told):
            read_metadata(tmp_path / name, 3)
