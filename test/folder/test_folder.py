"""Ids, claims, leftovers and foreign files in a checkpoint folder."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import copy_checkpoint, delete_checkpoint, list_checkpoints, rebuild_metadata
from paddle_dist_ckpt.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    RankFailureError,
    UnsupportedValueError,
)
from paddle_dist_ckpt.folder import checkpoint, nothing
from paddle_dist_ckpt.folder.checkpoint import read_checkpoint, why_unknown
from paddle_dist_ckpt.folder.nothing import listed_ids, nothing_text
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing import FaultyStorage
from test.hooks import dies, does
from test.jobs import (
    Watch,
    age,
    all_ok,
    data_files,
    errors_of,
    files_in,
    load_alone,
    load_whole,
    save_alone,
    save_on,
    try_load,
    try_save,
)


def state(version: int) -> dict[str, Any]:
    return {"w": np.full(500, version), "n": version}


def version_in(folder: Any, unique_id: int | None = None) -> int:
    """The version that a reader finds, all of it."""
    found = load_whole(folder, unique_id)
    assert (found["w"] == found["n"]).all()
    return int(found["n"])


def ids(folder: Path) -> list[int]:
    return list_checkpoints(folder)


def dead_save(folder: Path, unique_id: int | None = None, operation: str = "sync", ranks: int = 1) -> list[str]:
    """Let a save die shortly before its commit; returns the names of what it leaves."""
    before = {path.name for path in folder.iterdir()} if folder.exists() else set()
    try_save([state(99)] * ranks, FaultyStorage(folder, dies(operation)), unique_id)
    return sorted({path.name for path in folder.iterdir()} - before)


# -- ids


def test_automatic_ids_count_up(tmp_path: Path) -> None:
    assert ids(tmp_path / "absent") == []
    assert [save_alone(state(v), tmp_path).unique_id for v in range(3)] == [0, 1, 2]
    save_alone(state(10), tmp_path, 10)
    assert save_alone(state(11), tmp_path).unique_id == 11
    save_alone(state(5), tmp_path, 5)
    assert ids(tmp_path) == [0, 1, 2, 5, 10, 11]
    assert version_in(tmp_path) == 11
    assert [version_in(tmp_path, unique_id) for unique_id in ids(tmp_path)] == [0, 1, 2, 5, 10, 11]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".metadata"] * 6 + [".safetensors"] * 6


def test_an_explicit_id_is_replaced_and_its_old_files_go(tmp_path: Path) -> None:
    save_on([state(0)] * 3, tmp_path, 4)
    old = {path.name for path in data_files(tmp_path)}
    other = save_alone(state(1), tmp_path).unique_id
    save_on([state(2)] * 2, tmp_path, 4)
    assert not old & {path.name for path in tmp_path.iterdir()}
    assert [version_in(tmp_path, unique_id) for unique_id in (4, other)] == [2, 1]
    assert ids(tmp_path) == [4, 5]


def test_large_ids(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path, 10**17)
    assert save_alone(state(2), tmp_path).unique_id == 10**17 + 1
    assert version_in(tmp_path) == 2


def test_the_newest_metadata_is_damaged(tmp_path: Path) -> None:
    for version in range(3):
        save_alone(state(version), tmp_path)
    newest = tmp_path / "2.metadata"
    good = newest.read_bytes()
    for bad in (b"", b"junk", good[:-20], good.replace(b'"/n"', b'"/m"'), bytes(len(good))):
        newest.write_bytes(bad)
        for results in (try_load([{"n": 0}], tmp_path), try_load([{"n": 0}, {"n": 0}], tmp_path)):
            for error in errors_of(results, CheckpointCorruptedError):
                assert "2.metadata" in str(error)
        with pytest.raises(CheckpointCorruptedError):
            load_alone({"n": 0}, tmp_path, 2)
        assert version_in(tmp_path, 1) == 1
        assert set(ids(tmp_path)) - {2} == {0, 1}
    assert save_alone(state(7), tmp_path).unique_id == 3
    assert version_in(tmp_path) == 7


def test_a_damaged_metadata_may_be_replaced(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path)
    (tmp_path / "0.metadata").write_bytes(b"junk")
    save_alone(state(2), tmp_path, 0)
    assert version_in(tmp_path) == 2
    assert len(data_files(tmp_path)) == 2, "files without a readable owner stay"


@pytest.mark.parametrize("damage", ["junk", "newer", "body", "directory"])
def test_an_unreadable_metadata_stops_no_save_and_no_load_of_others(tmp_path: Path, damage: str) -> None:
    """Nor may anything be deleted that it might need: what it says is not known."""
    save_alone(state(0), tmp_path)
    good = (tmp_path / "0.metadata").read_bytes()
    bad = {"junk": b"junk", "newer": good.replace(b"[1,0]", b"[2,0]"), "body": good.replace(b'"/n"', b'"/m"')}
    lost = set(files_in(tmp_path)) - {"0.metadata"}
    (tmp_path / "0.metadata").unlink()
    if damage == "directory":
        (tmp_path / "0.metadata").mkdir()
    else:
        (tmp_path / "0.metadata").write_bytes(bad[damage])
    save_alone(state(1), tmp_path, 1)
    dead_save(tmp_path, 1)
    dead_save(tmp_path, 1, operation="delete")
    for claim in tmp_path.glob("*.claim"):
        age(claim)
    assert save_on([state(2)] * 2, tmp_path, 1)[0].unique_id == 1
    assert save_on([state(3)] * 2, tmp_path)[0].unique_id == 2
    assert [version_in(tmp_path, unique_id) for unique_id in (1, 2)] == [2, 3]
    assert version_in(tmp_path) == 3
    assert lost <= set(files_in(tmp_path))


def test_a_metadata_of_another_id_is_refused(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path)
    shutil.copy(tmp_path / "0.metadata", tmp_path / "3.metadata")
    with pytest.raises(CheckpointCorruptedError, match="renamed"):
        version_in(tmp_path)


# -- leftovers


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("unique_id", [None, 0, 9])
def test_what_a_dead_save_leaves_is_never_read_and_removed_once_it_is_old(
    tmp_path: Path, unique_id: int | None, ranks: int
) -> None:
    save_alone(state(1), tmp_path)
    left = dead_save(tmp_path, unique_id, ranks=ranks)
    assert any(name.endswith(".claim") for name in left)
    assert any(name.endswith(".safetensors") for name in left)
    assert ids(tmp_path) == [0]
    assert version_in(tmp_path) == 1
    kept = {name: data for name, data in files_in(tmp_path).items() if name in left}
    fresh = save_on([state(2)] * 2, tmp_path, unique_id)[0].unique_id
    assert {name: files_in(tmp_path).get(name) for name in left} == kept, "it may be alive"
    (claim,) = (tmp_path / name for name in left if name.endswith(".claim"))
    age(claim, 200)
    save_alone(state(3), tmp_path)
    assert set(left) <= set(files_in(tmp_path)), "its claim is not so old"
    age(claim, 200)
    save_on([state(4)] * 2, tmp_path)
    assert not set(left) & set(files_in(tmp_path))
    assert version_in(tmp_path, fresh) == 2
    assert version_in(tmp_path) == 4


def test_old_files_under_a_fresh_claim_stay(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path)
    left = dead_save(tmp_path)
    for path in tmp_path.iterdir():
        if path.suffix != ".claim":
            age(path)
    save_alone(state(2), tmp_path)
    assert set(left) <= set(files_in(tmp_path))


def test_files_without_a_claim_are_never_deleted(tmp_path: Path) -> None:
    save_on([state(1)] * 2, tmp_path)
    (tmp_path / "0.metadata").unlink()
    lost = files_in(tmp_path)
    for path in tmp_path.iterdir():
        age(path, 10**6)
    for _ in range(2):
        save_on([state(2)] * 2, tmp_path, 0)
        save_alone(state(3), tmp_path)
    assert lost.items() <= files_in(tmp_path).items()
    (lost_save,) = {name.split(".")[1] for name in lost}
    metadata = rebuild_metadata(tmp_path, lost_save)
    assert version_in(tmp_path, metadata.unique_id) == 1


@pytest.mark.parametrize("unique_id", [None, 1])
def test_the_files_of_a_live_save_are_not_touched(tmp_path: Path, unique_id: int | None) -> None:
    """While one save writes, others come and go; then it commits."""
    save_alone(state(0), tmp_path)
    seen = []

    def hook(operation: str, name: str) -> None:
        if operation == "sync_file":
            mine = {name for name in files_in(tmp_path) if name.endswith((".claim", ".safetensors"))}
            save_alone(state(5), tmp_path)
            save_alone(state(6), tmp_path, 3)
            assert mine <= set(files_in(tmp_path))
            seen.append(True)

    report = save_on([state(7), {}], FaultyStorage(tmp_path, hook), unique_id)[0]
    assert seen
    assert version_in(tmp_path, report.unique_id) == 7
    assert version_in(tmp_path, 3) == 6
    assert not list(tmp_path.glob("*.claim"))


def test_a_save_that_slept_until_it_was_taken_for_dead_does_not_commit(tmp_path: Path) -> None:
    def hook(operation: str, name: str) -> None:
        if operation == "sync_file":
            for claim in tmp_path.glob("*.claim"):
                age(claim)
            save_alone(state(2), tmp_path)

    results = try_save([state(1)], FaultyStorage(tmp_path, hook))
    for error in errors_of(results, RankFailureError):
        assert "gone" in str(error)
    assert version_in(tmp_path) == 2
    assert len(files_in(tmp_path)) == 2


def test_an_expired_claim_of_a_committed_save_does_no_harm(tmp_path: Path) -> None:
    """It died between its commit and the removal of its claim."""
    save_alone(state(1), tmp_path, 4)
    old = files_in(tmp_path)
    left = dead_save(tmp_path, 4, operation="delete")
    assert version_in(tmp_path, 4) == 99
    assert set(old) - {"4.metadata"} <= set(files_in(tmp_path))
    assert any(name.endswith(".claim") for name in left)
    for claim in tmp_path.glob("*.claim"):
        age(claim)
    save_alone(state(2), tmp_path)
    assert version_in(tmp_path, 4) == 99
    assert version_in(tmp_path) == 2
    assert len(files_in(tmp_path)) == 4, "the files that it had replaced are gone, and its claim"


def test_two_explicit_saves_of_one_id_at_once(tmp_path: Path) -> None:
    """The second commits while the first writes; the first then replaces it, and nothing is left."""
    save_alone(state(0), tmp_path, 1)

    second = does("sync_file", "*", lambda: save_alone(state(5), tmp_path, 1))
    save_on([state(7)], FaultyStorage(tmp_path, second), 1)
    assert version_in(tmp_path, 1) == 7
    assert len(files_in(tmp_path)) == 2


def test_the_automatic_id_is_taken_meanwhile(tmp_path: Path) -> None:
    other = does("publish", "0.metadata", lambda: save_alone(state(5), tmp_path))
    (report,) = save_on([state(7)], FaultyStorage(tmp_path, other))
    assert report.unique_id == 1
    assert version_in(tmp_path, 0) == 5
    assert version_in(tmp_path, 1) == 7


def test_a_data_file_that_vanishes_or_changes_before_the_commit(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path)
    for damage in ("unlink", "truncate"):

        def hook(operation: str, name: str, damage: str = damage) -> None:
            if operation == "size":
                path = tmp_path / name
                path.unlink() if damage == "unlink" else path.write_bytes(b"x")

        for error in errors_of(try_save([state(2)] * 2, FaultyStorage(tmp_path, hook)), RankFailureError):
            assert re.search(r"/[01]_1\.", str(error))
        assert version_in(tmp_path) == 1
        assert ids(tmp_path) == [0]
        assert len(files_in(tmp_path)) == 2


# -- foreign files

JUNK = [
    "00.metadata",
    "-1.metadata",
    "1.metadata.tmp",
    "x.metadata",
    ".metadata",
    "1.METADATA",
    "metadata",
    "12.metadata~",
    "0_0.safetensors.tmp",
    "1_2.zz.0.safetensors",
    "99999999999999999999.metadata",
    "٣.metadata",
    "5.0123456789abcdeg.claim",
    "7.metadata.bak",
]


def test_foreign_files_never_confuse(tmp_path: Path) -> None:
    for name in JUNK:
        (tmp_path / name).write_bytes(b"junk")
    (tmp_path / "0.metadata").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "0_0.distcp").write_bytes(b"junk")
    (tmp_path / "a folder").mkdir()
    (tmp_path / "3.metadata.d").mkdir()
    before = files_in(tmp_path)
    for path in tmp_path.iterdir():
        age(path)
    assert ids(tmp_path) == [0]  # by its names, which are those of a checkpoint of Paddle's
    with pytest.raises(CheckpointCorruptedError):
        load_alone({}, tmp_path)
    assert save_on([state(1)] * 2, tmp_path)[0].unique_id == 1
    assert save_alone(state(2), tmp_path).unique_id == 2
    assert ids(tmp_path) == [1, 2]
    assert version_in(tmp_path) == 2
    save_alone(state(3), tmp_path, 1)
    assert version_in(tmp_path, 1) == 3
    assert before.items() <= files_in(tmp_path).items()


def test_eleven_is_not_one(tmp_path: Path) -> None:
    save_alone(state(11), tmp_path, 11)
    save_alone(state(1), tmp_path, 1)
    save_alone(state(111), tmp_path, 111)
    assert ids(tmp_path) == [1, 11, 111]
    for _ in range(2):
        save_alone(state(2), tmp_path, 1)
        assert [version_in(tmp_path, unique_id) for unique_id in (1, 11, 111)] == [2, 11, 111]
    left = dead_save(tmp_path, 1)
    for name in left:
        age(tmp_path / name)
    save_alone(state(3), tmp_path, 1)
    assert [version_in(tmp_path, unique_id) for unique_id in (1, 11, 111)] == [3, 11, 111]


def test_ids_of_another_format_count_as_used(tmp_path: Path) -> None:
    (tmp_path / "4.metadata").write_bytes(pickle.dumps([1]))
    (tmp_path / "0_6.distcp").write_bytes(b"x")
    (tmp_path / "1_6.distcp").write_bytes(b"x")
    assert save_alone(state(1), tmp_path).unique_id == 7


@pytest.mark.parametrize("protocol", range(2, 6))
def test_an_explicit_id_of_another_format_is_refused(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "4.metadata").write_bytes(pickle.dumps({"a": 1}, protocol))
    before = files_in(tmp_path)
    for error in errors_of(try_save([state(1)] * 2, tmp_path, 4), ValueError):
        assert "another format" in str(error)
    assert files_in(tmp_path) == before
    with pytest.raises(CheckpointError):
        load_alone({}, tmp_path, 4)


def test_a_newer_foreign_checkpoint_is_skipped_by_loads(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path)
    (tmp_path / "8.metadata").write_bytes(pickle.dumps({"a": 1}))
    assert version_in(tmp_path) == 1
    assert ids(tmp_path) == [0]


def test_a_newer_major_version_is_refused_and_kept(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path)
    path = tmp_path / "0.metadata"
    newer = path.read_bytes().replace(b'"version":[1,0]', b'"version":[2,0]')
    (tmp_path / "5.metadata").write_bytes(newer)
    with pytest.raises(CheckpointError, match=r"version 2\.0"):
        load_alone({}, tmp_path)
    assert ids(tmp_path) == [0]
    assert save_alone(state(2), tmp_path).unique_id == 6
    needing = path.read_bytes().replace(b'"required_features":[]', b'"required_features":["magic"]')
    (tmp_path / "7.metadata").write_bytes(needing)
    with pytest.raises(CheckpointError, match="magic"):
        load_alone({}, tmp_path)


def test_a_directory_with_the_name_of_a_metadata_file(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path)
    (tmp_path / "5.metadata").mkdir()
    (tmp_path / "0_9.0123456789abcdef.0.safetensors").mkdir()
    assert ids(tmp_path) == [0]
    assert save_alone(state(2), tmp_path).unique_id == 6
    assert version_in(tmp_path) == 2
    watch = Watch([tmp_path])
    save_alone(state(3), watch.storages()[0], 6)
    assert version_in(tmp_path) == 3


def test_files_follow_the_umask(tmp_path: Path) -> None:
    import os

    old = os.umask(0o027)
    try:
        save_on([state(1)] * 2, tmp_path / "made" / "here")
    finally:
        os.umask(old)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "made" / "here").iterdir()} == {"0o640"}


def test_the_path_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    errors_of(try_save([state(1)] * 2, path), FileExistsError)
    errors_of(try_load([state(1)] * 2, path), CheckpointNotFoundError)
    assert path.read_bytes() == b"x"


def test_a_save_beside_the_steps_of_a_manager_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "step-00000001").mkdir()
    save_alone(state(1), tmp_path)
    assert "steps of a CheckpointManager" not in caplog.text, "of a save that was never committed"
    save_alone(state(1), tmp_path / "step-00000007", 7)
    assert "steps of a CheckpointManager" not in caplog.text
    save_alone(state(1), tmp_path)
    assert f"{tmp_path}: the folder has the steps of a CheckpointManager as well" in caplog.text
    caplog.clear()
    copy_checkpoint(tmp_path / "step-00000007", tmp_path)
    assert f"{tmp_path}: the folder has the steps of a CheckpointManager as well" in caplog.text
    assert list_checkpoints(tmp_path) == [0, 1, 7]
    assert "no checkpoint is listed" not in caplog.text


@pytest.mark.parametrize("unique_id", [None, 7])
def test_only_a_storage_that_has_folders_is_asked_for_what_is_below(tmp_path: Path, unique_id: int | None) -> None:
    save_alone(state(1), tmp_path / "step-00000007", 7)
    save_alone(state(1), tmp_path / "checkpoint-9" / "model_state")

    def hook(operation: str, name: str) -> None:
        assert "/" not in name, (operation, name)

    storage = FaultyStorage(tmp_path, hook)
    assert listed_ids(storage) == []
    with pytest.raises(CheckpointNotFoundError, match="holds no committed checkpoint"):
        read_checkpoint(storage, unique_id)
    with pytest.raises(CheckpointNotFoundError, match="it is a CheckpointManager's folder with step 7"):
        read_checkpoint(LocalStorage(tmp_path), unique_id)


@pytest.mark.parametrize("unique_id", [None, 0])
def test_a_checkpoint_of_paddles_own_that_is_none_is_told(tmp_path: Path, unique_id: int | None) -> None:
    (tmp_path / "0.metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    (tmp_path / "0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointCorruptedError, match=r"0\.metadata"):
        load_alone({"x": np.zeros(2)}, tmp_path, unique_id)


@pytest.mark.parametrize("unique_id", [None, 0])
def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path, unique_id: int | None) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointNotFoundError, match="is a file; pass the folder"):
        read_checkpoint(LocalStorage(tmp_path / "file"), unique_id)


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    array = np.arange(3000)
    all_ok(try_save([{"a": array}] * 2, folder))
    targets = [{"a": np.zeros_like(array)} for _ in range(2)]
    all_ok(try_load(targets, folder))
    assert all((target["a"] == array).all() for target in targets)
    delete_checkpoint(folder, 0)
    assert list_checkpoints(folder) == []


def test_keys_that_would_be_equal_without_a_prefix_are_refused(tmp_path: Path) -> None:
    save_alone({"a": {"b": {"x": 1, "y": 2}}, "a.b": {"x": 3}}, tmp_path)
    assert load_whole(tmp_path, prefix="a.b", keys=["*.y"]) == {"y": 2}
    with pytest.raises(CheckpointError, match=r"below the prefix 'a\.b' there are equal keys from different branches"):
        load_whole(tmp_path, prefix="a.b")


def test_a_prefix_may_have_escapes(tmp_path: Path) -> None:
    save_alone({"a": {"b": {"x": 1}}, "a.b": {"x": 3}, "c\\d": {"x": 4}, 7: {"x": 5}, "7": {"x": 6}}, tmp_path)
    for prefix, expected in ((r"a\.b", 3), (r"c\d", 4), (r"c\\d", 4), (r"\i7", 5)):
        assert load_whole(tmp_path, prefix=prefix) == {"x": expected}
    with pytest.raises(CheckpointError, match=r"with its escapes, such as '\\i7', means one of them"):
        load_whole(tmp_path, prefix="7")
    with pytest.raises(CheckpointNotFoundError):
        load_whole(tmp_path, prefix=r"a\.b\.x")


@pytest.mark.parametrize("times", [4, 5])
def test_a_folder_that_is_removed_again_and_again_is_made_again_a_few_times(tmp_path: Path, times: int) -> None:
    made: list[str] = []

    def remove(operation: str, name: str) -> None:
        if operation == "publish" and name.endswith(".claim") and len(made) < times:
            made.append(name)
            (tmp_path / "ckpt").rmdir()

    if times < 5:
        save_alone(state(1), FaultyStorage(tmp_path / "ckpt", remove))
        assert version_in(tmp_path / "ckpt") == 1
    else:
        with pytest.raises(FileNotFoundError):
            save_alone(state(1), FaultyStorage(tmp_path / "ckpt", remove))
        assert not (tmp_path / "ckpt").exists()
    assert len(made) == times


class Stale(FaultyStorage):
    """A folder whose listing has a `.metadata` that is not there, as that of a network filesystem may."""

    def names(self) -> list[str]:
        return ["0.metadata"]


def test_a_listing_that_is_out_of_date_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"0\.metadata is listed, but is not there: it was removed just"):
        load_alone({}, Stale(tmp_path, lambda operation, name: None))


def test_a_metadata_that_cannot_be_read_when_it_is_asked_why_is_told(tmp_path: Path) -> None:
    reads: list[str] = []

    def fail(operation: str, name: str) -> None:
        if operation == "read":
            reads.append(name)
            if len(reads) > looks:
                raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    looks = 1 << 30
    with pytest.raises(CheckpointNotFoundError, match="is listed, but is not there"):
        load_alone({}, Stale(tmp_path, fail))
    looks = len(reads) - 1  # but for the one that finds out why
    del reads[:]
    with pytest.raises(CheckpointNotFoundError, match=r"0\.metadata cannot be read: .*Input/output error"):
        load_alone({}, Stale(tmp_path, fail))


def test_a_path_below_a_file_has_no_checkpoint_whether_or_not_an_id_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = "there is no folder .*/file/ckpt: a part of that path is a file"
    for unique_id in (None, 0):
        with pytest.raises(CheckpointNotFoundError, match=text):
            load_whole(tmp_path / "file" / "ckpt", unique_id)
        with pytest.raises(CheckpointNotFoundError, match=text):
            load_alone({"a": 1}, tmp_path / "file" / "ckpt", unique_id)


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (UnsupportedValueError("a sparse tensor"), "a sparse tensor"),
        (CheckpointCorruptedError("a damaged pickle"), None),
        (CheckpointNotFoundError("nothing that is known"), "nothing that is known"),
        (None, None),
    ],
)
def test_it_is_known_whether_no_reader_can_read_a_folder_or_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, known: str | None
) -> None:
    """Where none can, the function that was there before is asked, which may be able to."""

    def read(*_: Any) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(checkpoint, "read_checkpoint", read)
    assert why_unknown(LocalStorage(tmp_path), None) == known
    (tmp_path / "file").touch()
    assert why_unknown(LocalStorage(tmp_path / "file"), None) == known  # no folder
    save_alone(state(1), tmp_path, 3)
    expected = None if isinstance(error, CheckpointNotFoundError) else known  # another id than there is
    assert why_unknown(LocalStorage(tmp_path), 5) == expected


def test_a_missing_number_is_told_without_a_look_at_each_other_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Others(list[int]):
        looks = 0

        def __contains__(self, number: object) -> bool:
            Others.looks += 1
            return super().__contains__(number)

    save_alone(state(1), tmp_path, 3)
    (file,) = [path.name for path in data_files(tmp_path)]
    for number in range(100, 200):
        os.link(tmp_path / file, tmp_path / file.replace("0_3", f"0_{number}"))
    monkeypatch.setattr(nothing, "committed_ids", lambda storage: Others([3]))
    assert nothing_text(LocalStorage(tmp_path), 7).endswith("; its only one has the id 3")
    assert Others.looks == 0
    assert "it has 1 data file, such as" in nothing_text(LocalStorage(tmp_path), 150)
    assert Others.looks == 1
