"""Deleting and copying checkpoints: what is left, also where it is cut short, and what is refused."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import logging
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CheckpointTimeoutError,
    DurabilityUnknownError,
    copy_checkpoint,
    delete_checkpoint,
    list_checkpoints,
    rebuild_metadata,
    verify,
)
from paddle_dist_ckpt.files import codec
from paddle_dist_ckpt.folder import copy as copying
from paddle_dist_ckpt.folder.claims import EXPIRES_AFTER, records_of
from paddle_dist_ckpt.folder.commit import remove_saves
from paddle_dist_ckpt.folder.copy import copy
from paddle_dist_ckpt.folder.delete import begin_clearing, begin_deletion, delete
from paddle_dist_ckpt.folder.lease import Lease
from paddle_dist_ckpt.folder.other_claims import OtherClaims
from paddle_dist_ckpt.manager.prune import carry_out, plan_prune
from paddle_dist_ckpt.manager.retention import Retention
from paddle_dist_ckpt.manager.steps import step_folder
from paddle_dist_ckpt.storage import Folders, LocalStorage
from paddle_dist_ckpt.testing import FaultyStorage
from test.folder import test_claims
from test.hooks import dies, does, raises
from test.jobs import (
    SMALL,
    Killed,
    Watch,
    age,
    another_host,
    data_files,
    files_in,
    little_memory,
    load_whole,
    save_alone,
    save_on,
    split_rows,
)
from test.strategies import some
from test.torture.crafting import Entry, write_checkpoint
from test.waiting import PATIENCE

CUT = np.arange(3000 * 300, dtype=np.float32).reshape(3000, 300)


def state(version: int) -> dict[str, Any]:
    return {"w": np.full((3, 500), version), "s": np.array(version), "none": np.zeros((0, 2)), "n": version}


def saved(folder: Path, *versions: int) -> None:
    """Each version under an id of its own number."""
    for version in versions:
        save_alone(state(version), folder, version)


def check_holds(folder: Path, *versions: int) -> None:
    """Assert that a folder has these versions, whole, and nothing else."""
    test_claims.check_holds(folder, {version: version for version in versions})


# -- delete


def test_what_is_deleted_is_gone_and_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "notes.txt").write_text("mine")
    assert delete_checkpoint(tmp_path, 2).unique_id == 2
    (tmp_path / "notes.txt").unlink()
    check_holds(tmp_path, 1, 3)
    with pytest.raises(CheckpointNotFoundError, match="with unique_id 2; it has those with the ids 1, 3"):
        delete_checkpoint(tmp_path, 2)


@pytest.mark.parametrize("by", some(["delete", "prune"], 1))
def test_nobody_waits_for_a_deletion_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """By Ctrl-C, at any of the things that it does."""
    for number in itertools.count():
        root, done = tmp_path / str(number), list[str]()
        for step in (1, 2, 3):
            saved(step_folder(root, step), step)

        def interrupt(operation: str, name: str, number: int = number, done: list[str] = done) -> None:
            done.append(operation)
            if len(done) == number + 1:
                raise KeyboardInterrupt

        plan = plan_prune(root, Retention(1, None, None))
        assert plan.doomed == [1, 2]
        folders = Folders(lambda path, hook=interrupt: FaultyStorage(path, hook))  # type: ignore[misc]
        monkeypatch.setattr("paddle_dist_ckpt.manager.prune.Folders", lambda folders=folders: folders)
        was_interrupted = False
        try:
            if by == "delete":
                delete(folders(step_folder(root, 1)), 1)
            else:
                carry_out(plan)
        except KeyboardInterrupt:
            was_interrupted = True
        assert was_interrupted == (len(done) > number), "it is not swallowed"
        for step in (1, 2, 3):
            for _, claim in records_of(LocalStorage(step_folder(root, step))).values():
                assert claim.done or not claim.deletes, (number, done)
            kept = list_checkpoints(step_folder(root, step))
            assert not kept or verify(step_folder(root, step), step).ok
            assert kept or step < (2 if by == "delete" else 3)
        if len(done) <= number:
            break
    assert number > 15
    assert list_checkpoints(step_folder(root, 1)) == []


@pytest.mark.parametrize("by", ["delete", "prune"])
def test_files_in_the_folders_of_other_hosts_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    ours, theirs = (step_folder(tmp_path / name, 1) for name in ("ours", "theirs"))
    save_on([state(1), {"more": np.arange(9)}], [ours, another_host(theirs, 1)], 1)
    saved(step_folder(tmp_path / "ours", 2), 2)
    (theirs_left,) = data_files(theirs)
    if by == "delete":
        delete_checkpoint(ours, 1)
    else:
        carry_out(plan_prune(tmp_path / "ours", Retention(1, None, None)))
    assert "1 of the 2 data files of checkpoint 1 are not in this folder; where they are" in caplog.text
    assert theirs_left.name in caplog.text
    assert data_files(theirs) == [theirs_left]
    caplog.clear()
    delete_checkpoint(step_folder(tmp_path / "ours", 2), 2)
    assert "are not in this folder" not in caplog.text


def test_arguments_of_delete(tmp_path: Path) -> None:
    for wrong in (None, -1, "1"):
        with pytest.raises(ValueError, match="unique_id"):
            delete_checkpoint(tmp_path, wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFoundError, match="there is no folder"):
        delete_checkpoint(tmp_path / "none", 1)
    assert files_in(tmp_path) == {}


class FullStorage(LocalStorage):
    """A folder on a full disk: names can be made, and nothing be put into files."""

    def publish(self, name: str, data: bytes, *args: Any, **kwargs: Any) -> bool:
        if data:
            raise FaultyStorage.no_space(name)
        return super().publish(name, data, *args, **kwargs)


def test_a_full_disk_can_be_deleted_from(tmp_path: Path) -> None:
    """Also where a save was killed, whose files go as well."""
    saved(tmp_path, 1, 2)
    dead = "0_3.0123456789abcdef.0.safetensors"
    (tmp_path / dead).write_bytes(b"x")
    (tmp_path / "3.0123456789abcdef.claim").write_text('{"save":"0123456789abcdef","replaces":null,"removes":[]}')
    age(tmp_path / "3.0123456789abcdef.claim")
    assert delete(FullStorage(tmp_path), 1).unique_id == 1
    check_holds(tmp_path, 2)


def test_a_copy_beside_another_one_that_is_faster_says_so(tmp_path: Path) -> None:
    saved(tmp_path / "from", 1)
    (name,) = (path.name for path in data_files(tmp_path / "from"))

    other = does("create", "*", lambda: (tmp_path / "to" / name).write_bytes(b"theirs"))
    with pytest.raises(CheckpointError, match=rf"to/{name} is being put there by somebody else; try again when that"):
        copy(LocalStorage(tmp_path / "from"), FaultyStorage(tmp_path / "to", other), 1, False)
    assert (tmp_path / "to" / name).read_bytes() == b"theirs"


def test_a_disk_without_room_for_a_name_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, 1)

    with pytest.raises(OSError, match="No space left"):
        delete(FaultyStorage(tmp_path, raises("publish", "*", errno.ENOSPC)), 1)
    check_holds(tmp_path, 1)


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
@pytest.mark.parametrize("failing", ["sync", "the removal that was done"])
def test_a_deletion_that_the_disk_does_not_confirm_is_told_as_such(
    tmp_path: Path, failing: str, kind: type[Exception]
) -> None:
    """What it would have removed stays, for a crash could bring the `.metadata` back; a later save removes it."""
    saved(tmp_path, 1, 2)
    kept = (tmp_path / "1.metadata").read_bytes()

    class Storage(LocalStorage):
        def delete(self, name: str) -> None:
            super().delete(name)
            if failing != "sync" and name == "1.metadata":
                raise kind(errno.EIO, "Input/output error", name)

        def sync(self) -> None:
            if not (tmp_path / "1.metadata").exists():
                raise kind(errno.EIO, "Input/output error", self.location)

    with pytest.raises(
        DurabilityUnknownError, match=r"checkpoint 1 is deleted from .*, its durability unknown.*Input/output"
    ) as caught:
        delete(Storage(tmp_path), 1)
    assert (caught.value.path, caught.value.unique_id) == (str(tmp_path), 1)
    assert list_checkpoints(tmp_path) == [2]
    (tmp_path / "1.metadata").write_bytes(kept)  # as after a crash
    assert verify(tmp_path, 1).problems == ()
    (tmp_path / "1.metadata").unlink()
    save_alone(state(3), tmp_path, 1, dataclasses.replace(SMALL, timeout=0.1))  # does not wait for who has ended
    for claim in tmp_path.glob("*.claim"):
        age(claim)
    delete_checkpoint(tmp_path, 1)
    saved(tmp_path, 3)
    check_holds(tmp_path, 2, 3)


@pytest.mark.parametrize("then", [OSError(errno.EIO, "Input/output error"), CheckpointTimeoutError("it hangs")])
def test_a_deletion_of_which_nothing_can_be_seen_may_be_done(tmp_path: Path, then: Exception) -> None:
    saved(tmp_path, 1)
    gone: list[str] = []

    def hook(operation: str, name: str) -> None:
        if gone:
            raise then
        if operation == "sync" and not (tmp_path / "1.metadata").exists():
            gone.append(name)
            raise OSError(errno.EIO, "Input/output error", name)

    with pytest.raises(DurabilityUnknownError, match="checkpoint 1 is perhaps deleted .which cannot be seen"):
        delete(FaultyStorage(tmp_path, hook), 1)


@pytest.mark.parametrize(
    ("number", "may_happen_late"),
    [(errno.EACCES, False), (errno.EROFS, False), (errno.EIO, True), (errno.ETIMEDOUT, True)],
)
def test_a_deletion_that_the_disk_refuses_is_an_error_of_the_disk(
    tmp_path: Path, number: int, may_happen_late: bool
) -> None:
    """A server may carry out later what it did not answer: a save to the id waits then, or it would be deleted."""
    saved(tmp_path, 1)

    with pytest.raises(OSError, match=os.strerror(number)):
        delete(FaultyStorage(tmp_path, raises("delete", "1.metadata", number)), 1)
    assert list_checkpoints(tmp_path) == [1]
    assert verify(tmp_path, 1).problems == ()
    claims = [claim.deletes and not claim.done for _, claim in records_of(LocalStorage(tmp_path)).values()]
    assert claims == [True] * may_happen_late


def test_the_files_of_a_deletion_are_removed_although_an_automatic_save_has_its_id_by_then(tmp_path: Path) -> None:
    """It is not taken for the checkpoint that was to be deleted."""
    saved(tmp_path, 0)
    done: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "sync" and not (tmp_path / "0.metadata").exists() and not done:
            done.append(operation)
            assert save_alone(state(2), tmp_path).unique_id == 0
            raise OSError(errno.EIO, "Input/output error", name)

    with pytest.raises(DurabilityUnknownError, match="checkpoint 0 is deleted"):
        delete(FaultyStorage(tmp_path, hook), 0)
    for claim in tmp_path.glob("*.claim"):
        age(claim)
    saved(tmp_path, 5)
    assert [path.name[:4] for path in data_files(tmp_path)] == ["0_0.", "0_5."]
    assert load_whole(tmp_path, 0)["n"] == 2


def test_a_dead_disk_is_asked_once_and_not_for_each_file(tmp_path: Path) -> None:
    for part in range(9):
        (tmp_path / f"0_1.{'a' * 16}.{part}.safetensors").touch()
    tried: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "delete":
            tried.append(name)
            raise OSError(errno.ETIMEDOUT, "Connection timed out", name)

    with pytest.raises(TimeoutError):
        remove_saves(FaultyStorage(tmp_path, hook), ["a" * 16])
    assert len(tried) == 1


@pytest.mark.parametrize("claim", ["empty, as on a full disk", "not to be read, as another user's"])
def test_a_save_waits_for_whoever_may_be_deleting(tmp_path: Path, claim: str) -> None:
    """What the save commits is not deleted in the place of what was meant."""
    saved(tmp_path, 1)
    waits, looked = threading.Event(), threading.Event()
    deletes_on: type[LocalStorage] = FullStorage if claim.startswith("empty") else LocalStorage

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "the save waits for that" in record.getMessage():
                waits.set()

    class Storage(deletes_on):  # type: ignore[misc, valid-type]
        def delete(self, name: str) -> None:
            if name == "1.metadata":
                looked.set()
                assert waits.wait(PATIENCE)
            super().delete(name)

    unread = "nothing" if claim.startswith("empty") else "*.claim"
    handler = Handler()
    logging.getLogger("paddle_dist_ckpt").addHandler(handler)
    thread = threading.Thread(target=delete, args=(Storage(tmp_path), 1))
    thread.start()
    try:
        assert looked.wait(PATIENCE)
        save_alone(state(1), FaultyStorage(tmp_path, raises("read", unread, errno.EACCES)), 1)
    finally:
        waits.set()
        thread.join(PATIENCE)
        logging.getLogger("paddle_dist_ckpt").removeHandler(handler)
    check_holds(tmp_path, 1)


def test_the_claim_of_a_deletion_stays_until_the_files_are_gone_for_good(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    watch = Watch([tmp_path])
    delete(watch.storages()[0], 1)
    done = [(operation, name.rpartition(".")[2]) for _, operation, name in watch.steps]
    after = done[done.index(("delete", "safetensors")) :]
    assert after.index(("sync", "")) < after.index(("delete", "claim"))


def test_files_that_another_checkpoint_refers_to_stay(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    kept = (tmp_path / "1.metadata").read_bytes()
    (tmp_path / "1.metadata").write_bytes(b"\x80\x04another format")
    recovered = rebuild_metadata(tmp_path)  # the same save under a second id
    (tmp_path / "1.metadata").write_bytes(kept)
    assert list_checkpoints(tmp_path) == [1, 2]
    delete_checkpoint(tmp_path, recovered.unique_id)
    check_holds(tmp_path, 1)


def test_nothing_is_deleted_while_somebody_saves(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    lease = Lease(LocalStorage(tmp_path), 3, automatic=False)
    try:
        with pytest.raises(CheckpointError, match="is being saved to"):
            delete_checkpoint(tmp_path, 1)
    finally:
        lease.end()
    check_holds(tmp_path, 1, 2)
    lease = Lease(LocalStorage(tmp_path), 3, automatic=False)
    lease.stop()
    age(tmp_path / lease.name)
    delete_checkpoint(tmp_path, 1)
    check_holds(tmp_path, 2)


def test_nothing_is_deleted_where_it_is_not_known_what_others_need(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "2.metadata").write_bytes((tmp_path / "2.metadata").read_bytes()[:-20])
    before = files_in(tmp_path)
    with pytest.raises(CheckpointError, match="which files checkpoint 2 needs"):
        delete_checkpoint(tmp_path, 1)
    assert files_in(tmp_path) == before


def test_tensors_of_other_checkpoints_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1, 2, 3)
    decoded: list[int] = []
    real = codec._metadata_of
    monkeypatch.setattr(codec, "_metadata_of", lambda body, cost: (decoded.append(body.unique_id), real(body, cost))[1])
    delete_checkpoint(tmp_path, 1)
    assert decoded == [1], "what is deleted is told to the caller"
    saved(tmp_path, 3)
    assert decoded == [1]
    check_holds(tmp_path, 2, 3)


def test_a_delete_that_is_killed_leaves_all_or_nothing_and_a_save_cleans_up(tmp_path: Path) -> None:
    saved(tmp_path / "start", 1, 2)
    watch = Watch([tmp_path / "start"])
    shutil.copytree(tmp_path / "start", tmp_path / "kept")
    delete_checkpoint(watch.storages()[0], 1)
    seen = set()
    for at in range(watch.count_by_rank()[0]):
        shutil.rmtree(tmp_path / "start")
        shutil.copytree(tmp_path / "kept", tmp_path / "start")
        frozen = tmp_path / f"frozen{at}"
        killed = Watch([tmp_path / "start"], (0, at), kills="all", frozen=frozen)
        with pytest.raises(Killed):
            delete_checkpoint(killed.storages()[0], 1)
        folder = frozen / "start"
        left = list_checkpoints(folder)
        seen.add(tuple(left))
        assert left in ([1, 2], [2])
        assert all(verify(folder, each).ok for each in left)
        for claim in folder.glob("*.claim*"):
            age(claim)
        saved(folder, 3)
        check_holds(folder, *left, 3)
    assert seen == {(1, 2), (2,)}


@pytest.mark.parametrize("error", [errno.EIO, RuntimeError("of a storage's own kind")])
def test_what_is_deleted_is_deleted_whatever_goes_wrong_with_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: int | Exception
) -> None:
    """Nor does a save to the id wait then, though nothing has ended properly."""
    saved(tmp_path, 1, 2)

    assert delete(FaultyStorage(tmp_path, raises("delete", "*.safetensors", error)), 2).unique_id == 2
    assert "files of removed saves are left to a later save" in caplog.text
    assert list_checkpoints(tmp_path) == [1]
    (claim,) = tmp_path.glob("2.*.claim")
    save_alone(state(3), tmp_path, 2, dataclasses.replace(SMALL, timeout=1e-9))
    assert load_whole(tmp_path, 2)["n"] == 3
    assert not claim.exists(), "it was done"
    saved(tmp_path, 4)
    assert list_checkpoints(tmp_path) == [1, 2, 4]
    assert len(files_in(tmp_path)) == 6


def test_a_save_waits_no_longer_than_it_may_for_who_deletes_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.folder.lease.EXPIRES_AFTER", -10.0)
    for module in ("claims", "other_claims"):
        monkeypatch.setattr(f"paddle_dist_ckpt.folder.{module}.is_expired", lambda *_: False)
    monkeypatch.setattr("paddle_dist_ckpt.folder.lease.FRESH_EVERY", 5.0)
    saved(tmp_path, 1)
    lease = Lease(LocalStorage(tmp_path), 1, automatic=False, deletes=True)
    with pytest.raises(
        CheckpointTimeoutError, match=rf"1 is being deleted, as {tmp_path}/{lease.name} says, for 0.1 s"
    ):
        save_alone(state(2), tmp_path, 1, dataclasses.replace(SMALL, timeout=0.1))
    lease.end()
    check_holds(tmp_path, 1)


def test_a_save_waits_for_a_deletion_that_has_died_until_its_claim_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    lease = Lease(LocalStorage(tmp_path), 1, automatic=False, deletes=True)
    waited = [0.0]

    def sleep(seconds: float) -> None:
        waited[0] += 10
        if waited[0] > EXPIRES_AFTER:
            age(tmp_path / lease.name)

    monkeypatch.setattr("paddle_dist_ckpt.folder.lease.time", SimpleNamespace(sleep=sleep, monotonic=lambda: waited[0]))
    save_alone(state(2), tmp_path, 1, dataclasses.replace(SMALL, timeout=0.1))
    assert load_whole(tmp_path, 1)["n"] == 2


# -- copy


def test_a_copy_is_the_checkpoint(tmp_path: Path) -> None:
    halves = split_rows(CUT, 2)
    save_on([{"cut": half, "n": 7, "text": "x" * 9000} for half in halves], tmp_path / "a", 3)
    assert copy_checkpoint(tmp_path / "a", tmp_path / "deep" / "b").unique_id == 3
    assert files_in(tmp_path / "deep" / "b") == files_in(tmp_path / "a")
    assert np.array_equal(load_whole(tmp_path / "deep" / "b")["cut"], CUT)


def test_a_copy_after_one_that_was_killed_says_for_how_long_that_is_in_the_way(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1)
    with pytest.raises(Killed):
        copy(LocalStorage(tmp_path / "a"), FaultyStorage(tmp_path / "b", dies("sync_file")), 1, False)
    (claim,) = (tmp_path / "b").glob("*.claim")
    with pytest.raises(ValueError, match=rf"the claim {claim.name} speaks of them: .* counts for 5 minutes"):
        copy_checkpoint(tmp_path / "a", tmp_path / "b")
    age(claim)
    copy_checkpoint(tmp_path / "a", tmp_path / "b")
    check_holds(tmp_path / "b", 1)
    (tmp_path / "b" / "1.metadata").unlink()
    with pytest.raises(ValueError, match="has files of this checkpoint already, but no .metadata: 0_1") as caught:
        copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert "claim" not in str(caught.value)


def test_a_copy_beside_others(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1, 2)
    saved(tmp_path / "b", 2)
    copy_checkpoint(tmp_path / "a", tmp_path / "b", 1)
    check_holds(tmp_path / "b", 1, 2)
    for number, text in ((1, "has a checkpoint with unique_id 1 already"), (2, "has a checkpoint with unique_id 2")):
        with pytest.raises(ValueError, match=text):
            copy_checkpoint(tmp_path / "a", tmp_path / "b", number)
    with pytest.raises(ValueError, match="already"):
        copy_checkpoint(tmp_path / "a", tmp_path / "a", 1)
    check_holds(tmp_path / "a", 1, 2)
    check_holds(tmp_path / "b", 1, 2)


def test_a_copy_of_what_has_another_id_there_is_refused(tmp_path: Path) -> None:
    """As it was rebuilt when its own id was another one's."""
    saved(tmp_path / "a", 1)
    save_id = copy_checkpoint(tmp_path / "a", tmp_path / "b").save_id
    (tmp_path / "b" / "1.metadata").unlink()
    saved(tmp_path / "b", 1)
    rebuild_metadata(tmp_path / "b", save_id)
    delete_checkpoint(tmp_path / "b", 1)
    with pytest.raises(ValueError, match="has this checkpoint already, with unique_id 2"):
        copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert list_checkpoints(tmp_path / "b") == [2]


def test_damage_is_not_copied(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1)
    (path,) = data_files(tmp_path / "a")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorruptedError, match="checksum"):
        copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert files_in(tmp_path / "b") == {}
    path.unlink()
    with pytest.raises(CheckpointCorruptedError, match="is missing"):
        copy_checkpoint(tmp_path / "a", tmp_path / "b")


def test_a_value_in_metadata_that_cannot_be_decoded_is_not_copied(tmp_path: Path) -> None:
    """A load of the copy would be refused."""
    write_checkpoint(tmp_path / "a", {"/w": Entry([4], [[]])}, [("/n", b"1"), ("/v", b'{"x":1}')])
    with pytest.raises(CheckpointCorruptedError, match=r"a/0\.metadata: v: a stored value is not well-formed"):
        copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("byte", [b"\n", b"\0"], ids=repr)
def test_a_header_that_changes_while_it_is_copied_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte: bytes
) -> None:
    saved(tmp_path / "a", 1)
    (path,) = data_files(tmp_path / "a")
    opened = copying.open_data_file

    def change(*args: Any) -> Any:
        """Change the last byte, a space, of what has just been looked at."""
        found = opened(*args)
        with path.open("r+b") as file:
            file.seek(found.data_start - 1)
            file.write(byte)
        return found

    monkeypatch.setattr(copying, "open_data_file", change)
    with pytest.raises(CheckpointCorruptedError, match=f"{path.name} has changed while it was copied"):
        copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert files_in(tmp_path / "b") == {}


def test_a_header_that_is_most_of_its_file_is_copied_in_pieces(tmp_path: Path) -> None:
    cuts = [list(range(1, 1 << 10)), list(range(1, 1 << 8))]
    write_checkpoint(tmp_path / "a", {"/w": Entry([1 << 10, 1 << 8], cuts, "uint8", 0, b"x" * (1 << 18))})
    (file,) = data_files(tmp_path / "a")
    with little_memory(file.stat().st_size):
        copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert files_in(tmp_path / "b") == files_in(tmp_path / "a")


def test_room_is_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "a", 1)
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda storage: 100)
    with pytest.raises(CheckpointError, match="has room for 100 bytes"):
        copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert files_in(tmp_path / "b") == {}


def test_a_copy_that_is_killed_is_not_seen_and_a_save_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a hundred times; when it syncs is seen elsewhere
    saved(tmp_path / "a", 1)
    saved(tmp_path / "start", 2)
    shutil.copytree(tmp_path / "start", tmp_path / "kept")
    watch = Watch([tmp_path / "start"])
    copy_checkpoint(tmp_path / "a", watch.storages()[0])
    seen = set()
    for at in range(watch.count_by_rank()[0]):
        shutil.rmtree(tmp_path / "start")
        shutil.copytree(tmp_path / "kept", tmp_path / "start")
        frozen = tmp_path / f"frozen{at}"
        killed = Watch([tmp_path / "start"], (0, at), kills="all", frozen=frozen)
        with pytest.raises(Killed):
            copy_checkpoint(tmp_path / "a", killed.storages()[0])
        folder = frozen / "start"
        left = list_checkpoints(folder)
        seen.add(tuple(left))
        assert all(verify(folder, each).ok for each in left)
        for claim in folder.glob("*.claim*"):
            age(claim)
        if left == [2]:
            copy_checkpoint(tmp_path / "a", folder)  # tries again, over what is left
            check_holds(folder, 1, 2)
        saved(folder, 3)
        check_holds(folder, 1, 2, 3)
    assert seen == {(2,), (1, 2)}


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1)
    watch = Watch([tmp_path / "b"])
    copy_checkpoint(tmp_path / "a", watch.storages()[0])
    first = next(i for i, (_, what, _) in enumerate(watch.steps) if what == "create")
    last = next(i for i, (_, what, name) in enumerate(watch.steps) if what == "publish" and name.endswith(".metadata"))
    for at in range(first, last + 1):
        shutil.rmtree(tmp_path / "b")
        failing = Watch([tmp_path / "b"], (0, at), lambda: OSError(5, "broken"))
        with pytest.raises(OSError, match="broken"):
            copy_checkpoint(tmp_path / "a", failing.storages()[0])
        assert files_in(tmp_path / "b") == {}


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO])
def test_a_copy_that_cannot_open_what_it_has_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    saved(tmp_path / "from", 1)

    def fail(descriptor: int, flags: int) -> int | None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            raise OSError(error, os.strerror(error))
        return None

    with monkeypatch.context() as patch:
        patch.setattr("paddle_dist_ckpt.storage.local_files.open_direct", fail)
        with pytest.raises(OSError, match=os.strerror(error)):
            copy_checkpoint(tmp_path / "from", tmp_path / "to")
    assert not files_in(tmp_path / "to")
    copy_checkpoint(tmp_path / "from", tmp_path / "to")
    check_holds(tmp_path / "to", 1)


def test_a_copy_whose_empty_folder_is_removed_makes_it_again(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1)
    removed: list[str] = []

    def remove(operation: str, name: str) -> None:
        if operation == "publish" and not removed:
            removed.append(name)
            (tmp_path / "b").rmdir()

    copy(LocalStorage(tmp_path / "a"), FaultyStorage(tmp_path / "b", remove), 1, False)
    assert removed
    check_holds(tmp_path / "b", 1)


def test_a_copy_that_is_interrupted_after_its_commit_keeps_its_claim_fresh_no_more(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1)
    before = set(threading.enumerate())

    def interrupt(operation: str, name: str) -> None:
        if operation == "names" and (tmp_path / "b" / "1.metadata").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(LocalStorage(tmp_path / "a"), FaultyStorage(tmp_path / "b", interrupt), 1, False)
    assert list_checkpoints(tmp_path / "b") == [1]
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    delete_checkpoint(tmp_path / "c", 1)  # does not wait for it either
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread.name
    (claim,) = (tmp_path / "b").glob("*.claim")
    age(claim)
    saved(tmp_path / "b", 2)
    check_holds(tmp_path / "b", 1, 2)


@pytest.mark.parametrize("operation", ["size", "open"])
def test_a_copy_starts_again_when_its_checkpoint_is_replaced(tmp_path: Path, operation: str) -> None:
    saved(tmp_path / "a", 1)
    left = [3]

    def replace(what: str, name: str) -> None:
        if what == operation and name.endswith(".safetensors") and left[0]:
            left[0] -= 1
            save_alone({"a": np.arange(5.0) + left[0]}, tmp_path / "a", 1)

    copy_checkpoint(FaultyStorage(tmp_path / "a", replace), tmp_path / "b", 1)
    assert verify(tmp_path / "b").ok
    assert files_in(tmp_path / "b") == files_in(tmp_path / "a")
    left[0] = 4
    with pytest.raises(CheckpointReplacedError, match="was replaced 4 times"):
        copy_checkpoint(FaultyStorage(tmp_path / "a", replace), tmp_path / "c", 1)
    assert list((tmp_path / "c").glob("*")) == []


def test_a_copy_of_what_is_deleted_meanwhile(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1)

    def delete(what: str, name: str) -> None:
        if what == "open" and name.endswith(".safetensors") and data_files(tmp_path / "a"):
            delete_checkpoint(tmp_path / "a", 1)

    with pytest.raises(CheckpointNotFoundError):
        copy_checkpoint(FaultyStorage(tmp_path / "a", delete), tmp_path / "b", 1)
    assert files_in(tmp_path / "b") == {}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_room_for_a_name_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A full XFS makes no file at all."""
    saved(tmp_path, 1)
    before, real = files_in(tmp_path), os.open

    def full(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match=rf"{os.strerror(number)}, not even for .*: remove any other file .*claim\.tmp'"):
        delete_checkpoint(tmp_path, 1)
    monkeypatch.undo()
    assert files_in(tmp_path) == before
    delete_checkpoint(tmp_path, 1)
    assert files_in(tmp_path) == {}


# -- copies of what somebody else removes


def copied(tmp_path: Path) -> tuple[Path, Path, str]:
    """A checkpoint 1, a copy of it, and the save of which they are."""
    saved(tmp_path / "a", 1)
    return tmp_path / "a", tmp_path / "b", copy_checkpoint(tmp_path / "a", tmp_path / "b").save_id


@pytest.mark.parametrize("full", [False, True])
def test_nothing_is_copied_to_where_it_is_being_removed(tmp_path: Path, full: bool) -> None:
    """Nor where the disk is too full to say so in the claim."""
    source, folder, save = copied(tmp_path)
    claims: list[str] = []

    def hook(operation: str, name: str) -> None:
        if full and operation == "publish":
            claims.append(name)
            if len(claims) != 2:  # but for an empty one
                raise OSError(errno.ENOSPC, "No space left on device", name)

    deletion = begin_deletion(FaultyStorage(folder, hook), 1, save)
    remove_saves(LocalStorage(folder), deletion.saves)  # as one rank of each folder does, before all is removed again
    with pytest.raises(CheckpointError, match=r"are being removed from .*, as 1\..*\.claim says; try again"):
        copy_checkpoint(source, folder)
    deletion.finish()
    assert files_in(folder) == {}
    copy_checkpoint(source, folder)
    check_holds(folder, 1)


def test_nothing_is_copied_to_where_a_save_is_about_to_remove_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its ranks are to remove was found out when it began."""
    source, folder, save = copied(tmp_path)
    deletion = begin_deletion(LocalStorage(folder), 1, save)  # it dies at the end
    remove_saves(LocalStorage(folder), deletion.saves)
    for claim in folder.glob("*.claim"):
        age(claim)
    refused: list[str] = []

    def remove(storage: Any, saves: list[str], check: Any) -> None:
        assert save in saves
        with pytest.raises(CheckpointError, match="are being removed from") as caught:
            copy_checkpoint(source, folder)
        refused.append(str(caught.value))
        remove_saves(storage, saves, check)

    with monkeypatch.context() as patch:
        patch.setattr("paddle_dist_ckpt.saving.save.remove_saves", remove)
        saved(folder, 2)
    assert len(refused) == 1
    copy_checkpoint(source, folder)
    check_holds(folder, 1, 2)


@pytest.mark.parametrize("by", ["delete", "save"])
def test_who_removes_and_was_taken_for_dead_leaves_what_has_come_back(tmp_path: Path, by: str) -> None:
    """Stopped at any look into the folder from its last step on, by Ctrl-Z, say, and continued an hour later."""
    for number in itertools.count():
        source, folder, save = copied(tmp_path / str(number))
        looks: list[str] = []

        def come_back(what: str, name: str, at: int = number, source: Path = source, looks: list[str] = looks) -> None:
            if by == "delete" or looks or (what, name) == ("publish", "1.metadata"):  # its last step
                looks.append(what)
            if what == "names" and looks.count("names") == at + 1 and "back" not in looks:
                looks.append("back")
                folder = source.parent / "b"
                for claim in folder.glob("*.claim*"):
                    age(claim)
                saved(folder, 7)
                if by == "save":
                    delete_checkpoint(folder, 1)
                copy_checkpoint(source, folder)

        storage = FaultyStorage(folder, lambda what, name: None)
        if by == "delete":
            deletion = begin_deletion(storage, 1, save)
            storage._hook = come_back
            deletion.finish()
        else:
            storage._hook = come_back
            with suppress(CheckpointError):
                save_on([state(3)], storage, 1)
        if "back" not in looks:
            break
        assert verify(folder, 1).problems == ()
        assert (load_whole(folder, 1)["w"] == 1).all()
    assert number >= 2


def test_a_copy_is_not_committed_when_somebody_is_about_to_remove_it(tmp_path: Path) -> None:
    source, folder, save = copied(tmp_path)
    delete_checkpoint(folder, 1)
    leases: list[Lease] = []

    def claim(operation: str, name: str) -> None:
        if operation == "publish" and name == "1.metadata":
            leases.append(Lease(LocalStorage(folder), 9, automatic=True))
            leases[0].take_on(save)

    with pytest.raises(CheckpointError, match=r"are being removed from .*, as 9\..*\.claim says"):
        copy_checkpoint(source, FaultyStorage(folder, claim))
    leases[0].end()
    assert files_in(folder) == {}


@pytest.mark.parametrize("when", ["before the looks", "just before the look for claims"])
def test_a_copy_is_not_committed_when_somebody_has_removed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    source, folder, save = copied(tmp_path)
    delete_checkpoint(folder, 1)
    speaking_of = OtherClaims.speaking_of

    def look(others: OtherClaims, save: str) -> str | None:
        remove_saves(LocalStorage(folder), [save])  # by somebody whose claim is gone now
        return speaking_of(others, save)

    def remove(operation: str, name: str) -> None:
        if operation == "publish" and name == "1.metadata":
            if when == "before the looks":
                remove_saves(LocalStorage(folder), [save])
            else:
                monkeypatch.setattr(OtherClaims, "speaking_of", look)

    with pytest.raises(CheckpointCorruptedError, match="is missing"):
        copy_checkpoint(source, FaultyStorage(folder, remove))
    assert files_in(folder) == {}


def test_a_copy_that_was_taken_for_dead_leaves_the_files_of_the_next_one(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1)
    folder, leases = tmp_path / "b", list[Lease]()

    def take_over(operation: str, name: str) -> None:
        if operation == "sync_file" and name.endswith(".safetensors"):
            (claim,) = folder.glob("*.claim")
            age(claim)
            leases.append(Lease(LocalStorage(folder), 1, automatic=True))
            (save,) = {save for save in leases[0].doomed if save not in claim.name}
            remove_saves(leases[0].storage, leases[0].doomed)
            leases[0].take_on(save)
            shutil.copy(tmp_path / "a" / name, folder)

    with pytest.raises(CheckpointError, match="another save or export took this one"):
        copy_checkpoint(tmp_path / "a", FaultyStorage(folder, take_over))
    assert [path.name for path in data_files(folder)] == [path.name for path in data_files(tmp_path / "a")]
    leases[0].end()


def test_a_copy_that_was_taken_for_dead_removes_what_it_has_made_after_that(tmp_path: Path) -> None:
    save_on([{"w": half} for half in split_rows(CUT, 2)], tmp_path / "a", 1)
    folder, taken = tmp_path / "b", list[str]()

    def take_over(operation: str, name: str) -> None:
        if operation == "sync_file" and name.endswith(".safetensors") and not taken:
            taken.append(name)
            for claim in folder.glob("*.claim"):
                age(claim)
            lease = Lease(LocalStorage(folder), 2, automatic=True)
            remove_saves(lease.storage, lease.doomed)
            lease.end()

    with pytest.raises(CheckpointError, match="another save or export took this one"):
        copy_checkpoint(tmp_path / "a", FaultyStorage(folder, take_over))
    assert taken
    assert files_in(folder) == {}


def test_a_checkpoint_that_is_there_under_another_id_is_not_copied(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1)
    folder = tmp_path / "b"
    copy_checkpoint(tmp_path / "a", folder)
    (folder / "1.metadata").unlink()
    (save,) = {path.name.split(".")[1] for path in data_files(folder)}
    saved(folder, 1)
    assert rebuild_metadata(folder, save).unique_id == 2
    delete_checkpoint(folder, 1)
    before = files_in(folder)
    with pytest.raises(ValueError, match="has this checkpoint already, with unique_id 2"):
        copy_checkpoint(tmp_path / "a", folder)
    assert files_in(folder) == before
    assert verify(folder).ok


def test_a_copy_does_not_take_the_place_of_what_appears_meanwhile(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1)
    saved(tmp_path / "other", 1)
    folder = tmp_path / "b"

    def appear(operation: str, name: str) -> None:
        if operation == "publish" and name == "1.metadata":
            shutil.copytree(tmp_path / "other", folder, dirs_exist_ok=True)

    with pytest.raises(CheckpointError, match=r"b/1\.metadata appeared meanwhile"):
        copy_checkpoint(tmp_path / "a", FaultyStorage(folder, appear))
    assert files_in(folder) == files_in(tmp_path / "other")


def test_nothing_is_cleared_where_a_checkpoint_has_come_meanwhile(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    before = files_in(tmp_path)
    with pytest.raises(CheckpointError, match="has a checkpoint by now"):
        begin_clearing(LocalStorage(tmp_path), 2, of_checkpoint=False)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("seen", [True, False])
def test_files_that_another_has_removed_are_gone_whatever_is_said(tmp_path: Path, seen: bool) -> None:
    """A deletion whose claim somebody has found too old, who has removed the files meanwhile."""
    saved(tmp_path, 1)
    blind: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "names" and blind:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path))
        if operation == "delete" and name.endswith(".safetensors"):
            (tmp_path / name).unlink()
            blind.extend([] if seen else [name])
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), name)

    (save,) = {path.name.split(".")[1] for path in data_files(tmp_path)}
    deletion = begin_deletion(FaultyStorage(tmp_path, hook), 1, save)
    assert deletion.finish() == seen
    assert list(tmp_path.glob("*.safetensors")) == []
