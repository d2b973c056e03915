"""What becomes of what a save, a copy or a removal makes or leaves whose claim is gone, but which goes on."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from paddle_dist_ckpt import list_checkpoints, verify
from paddle_dist_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    DurabilityUnknownError,
)
from paddle_dist_ckpt.folder import commit
from paddle_dist_ckpt.folder.claims import Statement
from paddle_dist_ckpt.folder.copy import copy
from paddle_dist_ckpt.folder.delete import begin_deletion, delete
from paddle_dist_ckpt.folder.lease import Lease
from paddle_dist_ckpt.folder.rebuild import rebuild
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.storage.base import FolderIdentity
from paddle_dist_ckpt.testing import FaultyStorage
from test.folder.test_claims import FreezingStorage, check_holds, dead_save, state
from test.hooks import dies, does, raises
from test.jobs import (
    Killed,
    age,
    age_claims,
    another_host,
    data_files,
    errors_of,
    files_in,
    save_alone,
    save_on,
    saves_in,
    try_save,
)
from test.waiting import PATIENCE, until

FRESH_EVERY = "paddle_dist_ckpt.folder.own_claim.FRESH_EVERY"


def age_all_claims(folder: Path) -> None:
    """As :func:`age_claims`, where there may be none."""
    if list(folder.glob("*.claim")):
        age_claims(folder)


def claims_of(folder: Path) -> list[dict[str, Any]]:
    """What the claims of a folder say."""
    return [json.loads(claim.read_text()) for claim in sorted(folder.glob("*.claim"))]


def test_what_a_dead_save_has_left_is_not_forgotten_if_a_metadata_is_damaged_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Just between the removal of the dead save's claim and the look at which saves are committed."""
    save_alone(state(1), tmp_path, 1)
    dead_save(tmp_path, 5, last="sync")
    age_claims(tmp_path)
    whole = (tmp_path / "1.metadata").read_bytes()

    hook = does("delete", "5.*.claim", lambda: (tmp_path / "1.metadata").write_bytes(b"rubbish"))
    save_alone(state(6), FaultyStorage(tmp_path, hook), 6)
    assert "it is not certain which they are" in caplog.text
    assert [path.name[:4] for path in data_files(tmp_path)] == ["0_1.", "0_5.", "0_6."]
    (tmp_path / "1.metadata").write_bytes(whole)
    age_claims(tmp_path)
    save_alone(state(7), tmp_path, 7)
    check_holds(tmp_path, {1: 1, 6: 6, 7: 7})


@pytest.mark.parametrize("knows", ["who is taken for dead", "who takes it for dead"])
def test_what_a_save_replaces_while_it_is_taken_for_dead_is_not_forgotten(tmp_path: Path, knows: str) -> None:
    """It publishes when the other has looked which saves are committed, and before that has removed its claim."""
    save_alone(state(0), tmp_path, 0)
    confirmed, thaw, published, taken = (threading.Event() for _ in range(4))

    class Slow(FreezingStorage):
        def publish(self, name: str, *args: Any, **kwargs: Any) -> bool:
            is_published = super().publish(name, *args, **kwargs)
            if name.endswith(".metadata"):
                published.set()
                taken.wait(PATIENCE)
                if knows == "who takes it for dead":
                    raise Killed
            return is_published

    def confirm() -> None:
        confirmed.set()
        thaw.wait(PATIENCE)

    storage = FaultyStorage(tmp_path, lambda operation, name: None)
    storage._inner = Slow(tmp_path, after=confirm)
    thread = threading.Thread(target=try_save, args=([state(1)], storage, 0))

    def hook(operation: str, name: str) -> None:
        if operation == "delete" and name.startswith("0.") and name.endswith(".claim"):
            thaw.set()
            published.wait(PATIENCE)

    def until_then(operation: str, name: str) -> None:
        if operation == "names" and thaw.is_set():
            raise Killed
        hook(operation, name)

    thread.start()
    try:
        assert confirmed.wait(PATIENCE)
        age_claims(tmp_path)
        try_save([state(2)], FaultyStorage(tmp_path, hook if knows == "who takes it for dead" else until_then), 7)
    finally:
        taken.set()
        thread.join(PATIENCE)
    if claims := list(tmp_path.glob("*.claim")):
        for claim in claims:
            age(claim)
    save_alone(state(3), tmp_path, 8)
    check_holds(tmp_path, {0: 1, 8: 3} if knows == "who is taken for dead" else {0: 1, 7: 2, 8: 3})


@pytest.mark.parametrize("taken_over", [True, False])
def test_files_of_a_failed_save_are_left_to_a_claim(tmp_path: Path, taken_over: bool) -> None:
    """Other ranks may still be writing then, elsewhere too; but who takes a claim over looks for files once."""
    lease = commit.begin(LocalStorage(tmp_path), 5)
    name = f"0_5.{lease.save_id}.0.safetensors"
    (tmp_path / name).touch()
    if taken_over:
        (tmp_path / lease.name).unlink()
    commit.give_up(lease, settled=False)
    if not taken_over:
        assert sorted(os.listdir(tmp_path)) == sorted([name, lease.name])
        return
    (claim,) = tmp_path.iterdir()
    assert claim.name != lease.name
    assert json.loads(claim.read_text())["removes"] == [lease.save_id]


def test_a_save_whose_claim_is_gone_claims_anew_what_it_writes_until_it_finds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was frozen before it had made its file, taken for dead, and is killed while it writes."""
    monkeypatch.setattr(FRESH_EVERY, 0.01)
    dead: list[bool] = []

    def hook(operation: str, name: str) -> None:
        if dead:
            raise Killed
        if operation == "create":
            (claim,) = tmp_path.glob("*.claim")
            claim.unlink()
            save_alone(state(1), tmp_path, 7)
            until(lambda: len(list(tmp_path.glob("5.*.claim"))) == 1)
        if operation == "sync_file":
            dead.append(True)
            raise Killed

    try_save([state(0)], FaultyStorage(tmp_path, hook), 5)
    for thread in threading.enumerate():
        if thread.name == "paddle_dist_ckpt claim":  # which may be about to touch the claim
            thread.join(PATIENCE)
    assert [path.name[:4] for path in data_files(tmp_path)] == ["0_5.", "0_7."]
    age_claims(tmp_path)
    save_alone(state(2), tmp_path, 8)
    check_holds(tmp_path, {7: 1, 8: 2})


@pytest.mark.parametrize("is_there", [True, False])
def test_a_save_that_finds_its_files_gone_says_that_its_claim_is(tmp_path: Path, is_there: bool) -> None:
    """Somebody has taken it for dead; but not if the folder is gone as well."""

    def hook(operation: str, name: str) -> None:
        if operation == "create":
            shutil.rmtree(tmp_path / "step")
            if is_there:
                (tmp_path / "step").mkdir()
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)

    (error,) = errors_of(try_save([state(0)], FaultyStorage(tmp_path / "step", hook), 5), CheckpointError)
    if not is_there:
        assert "No such file or directory" in str(error)
        return
    assert re.search(
        rf"the claim {tmp_path}/step/5\..*\.claim is gone: another save or export took .* for dead", str(error)
    )


def test_files_that_ranks_make_in_folders_of_their_own_when_all_were_taken_for_dead_are_not_forgotten(
    tmp_path: Path,
) -> None:
    """Who has taken the claim over has looked before; the coordinator finds that out when the others have reported."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"

    def hook(operation: str, name: str) -> None:
        if operation == "create":
            (claim,) = ours.glob("5.*.claim")
            claim.unlink()

    part = {"more": np.arange(9)}
    results = try_save([state(1), part], [FaultyStorage(ours, hook), another_host(theirs, 1)], 5)
    errors_of(results, CheckpointError)
    age_claims(ours)
    save_on([state(2), part], [ours, another_host(theirs, 1)], 7)
    assert [path.name[:4] for path in (*data_files(ours), *data_files(theirs))] == ["0_7.", "1_7."]


def test_a_claim_that_is_just_being_removed_is_not_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes a save for dead removes what its claim is to say next, and only then the claim."""
    lease, real = Lease(LocalStorage(tmp_path), 0, automatic=False), os.replace

    def replace(source: Any, target: Any) -> None:
        Path(source).unlink()
        real(source, target)

    with (
        monkeypatch.context() as patch,
        pytest.raises(CheckpointError, match=r"the claim .*\.claim\.tmp is gone: another save or export took this one"),
    ):
        patch.setattr(os, "replace", replace)
        lease.take_on("0123456789abcdef")
    assert (tmp_path / lease.name).exists()
    lease.withdraw()


@pytest.mark.parametrize("moved", ["made anew", "on another disk", "gone", "gone while it is made"])
def test_a_folder_that_somebody_removes_as_it_is_empty(tmp_path: Path, moved: str) -> None:
    """While ranks look at it: either the save goes on, or all of them hear what has happened."""
    folder = tmp_path / "step"
    done: list[bool] = []

    class Storage(LocalStorage):
        def prepare(self) -> None:
            if moved == "gone while it is made" and not done:
                done.append(True)
                raise FileExistsError(errno.EEXIST, "File exists", str(folder))
            super().prepare()

        def identity(self) -> FolderIdentity:
            found = super().identity()
            if moved == "made anew" and not done:
                done.append(True)
                return found._replace(inode=found.inode + 1)
            if moved == "on another disk" and not done:
                done.append(True)
                return found._replace(device=found.device + 1)
            return found

        def publish(self, name: str, *args: Any, **kwargs: Any) -> bool:
            if moved == "gone" and not done:
                done.append(True)
                folder.rmdir()
            return super().publish(name, *args, **kwargs)

    results = try_save([state(1), {"more": np.arange(9)}], Storage(folder), 5)
    if moved == "made anew":
        for error in errors_of(results, CheckpointError):
            assert f"ranks see different folders at {folder}, on one disk: somebody has removed" in str(error)
    elif moved == "on another disk":
        for error in errors_of(results, (CheckpointError, ValueError)):
            assert "ranks of one host have different folders" in str(error)
            assert "(the path is the same, and is mounted several times, as in containers" in str(error)
    else:
        assert [report.unique_id for report in results] == [5, 5]


def test_the_claim_of_a_deletion_in_a_folder_that_is_gone_says_so(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path / "step", 5)

    with pytest.raises(CheckpointNotFoundError, match="step has been removed meanwhile"):
        delete(FaultyStorage(tmp_path / "step", does("publish", "*", lambda: shutil.rmtree(tmp_path / "step"))), 5)


def test_what_a_dead_deletion_has_begun_is_not_forgotten_by_another_one_of_the_same(tmp_path: Path) -> None:
    """Which had looked at the checkpoint before, and finds it gone."""
    save_alone(state(1), tmp_path, 5)
    (save,) = saves_in(tmp_path)
    begin_deletion(LocalStorage(tmp_path), 5, save)  # the `.metadata` is gone; it dies
    age_claims(tmp_path)
    with pytest.raises(CheckpointError, match="has been replaced or removed meanwhile"):
        begin_deletion(LocalStorage(tmp_path), 5, save)
    age_claims(tmp_path)
    save_alone(state(2), tmp_path, 7)
    check_holds(tmp_path, {7: 2})


def test_a_deletion_that_is_taken_for_dead_leaves_its_files_to_a_later_save(tmp_path: Path) -> None:
    """The other looks which saves are committed just before the `.metadata` goes."""
    save_alone(state(1), tmp_path, 1)
    save_alone(state(2), tmp_path, 2)

    def hook(operation: str, name: str) -> None:
        if (operation, name) == ("delete", "1.metadata"):
            age_claims(tmp_path)
            save_alone(state(7), tmp_path, 7)

    delete(FaultyStorage(tmp_path, hook), 1)
    assert list_checkpoints(tmp_path) == [2, 7]
    age_claims(tmp_path)
    save_alone(state(8), tmp_path, 8)
    check_holds(tmp_path, {2: 2, 7: 7, 8: 8})


@pytest.mark.parametrize(
    ("deletes", "error", "fails"),
    [(False, errno.ENOSPC, True), (False, errno.EIO, True), (True, errno.EIO, True), (True, errno.ENOSPC, False)],
)
def test_only_a_deletion_on_a_full_disk_goes_on_when_it_cannot_pass_on_what_the_dead_have_said(
    tmp_path: Path, deletes: bool, error: int, fails: bool
) -> None:
    armed: list[bool] = []
    storage = FaultyStorage(tmp_path, raises("publish", "*.claim", error, lambda: armed))
    lease = Lease(storage, 0, automatic=True, deletes=deletes)
    armed.append(True)
    with pytest.raises(OSError, match=os.strerror(error)) if fails else nullcontext():
        lease.pass_on([Statement("e" * 16, None, ["f" * 16])])
    armed.clear()
    lease.end()


def test_what_a_deletion_could_not_say_on_a_full_disk_before_its_claim_was_removed_is_said_anew(tmp_path: Path) -> None:
    """Who has removed the claim has not read there that the deletion is done, and so not of its files."""
    armed: list[bool] = []
    storage = FaultyStorage(tmp_path, raises("publish", "*.claim", errno.ENOSPC, lambda: armed))
    lease = Lease(storage, 0, automatic=True, deletes=True)
    armed.append(True)
    lease.mark_done()
    armed.clear()
    (tmp_path / lease.name).unlink()
    assert lease.speak_again(["f" * 16]) is not None
    assert [says["removes"] for says in claims_of(tmp_path)] == [["f" * 16]]


def test_a_deletion_whose_files_somebody_else_has_removed_is_done_whatever_is_wrong_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_alone(state(1), tmp_path, 1)
    (save,) = saves_in(tmp_path)
    deletion = begin_deletion(LocalStorage(tmp_path), 1, save)
    age_claims(tmp_path)
    save_alone(state(2), tmp_path, 2)
    (tmp_path / "2.metadata").write_bytes(b"rubbish")
    assert deletion.finish()
    assert "files of removed saves are left" not in caplog.text


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_deletion_that_ends_before_it_has_begun_removes_nothing(tmp_path: Path, interrupted: bool) -> None:
    """While it says what it is going to remove; of the checkpoint, a file is in a folder of another host."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_on([state(1), {"more": np.arange(9)}], [ours, another_host(theirs, 1)], 5)
    before, published = files_in(ours), list[str]()

    def hook(operation: str, name: str) -> None:
        if operation == "publish":
            published.append(name)
            if len(published) == 2:
                raise KeyboardInterrupt if interrupted else OSError(errno.EIO, "Input/output error", name)

    with pytest.raises(KeyboardInterrupt if interrupted else OSError):
        delete(FaultyStorage(ours, hook), 5)
    assert len(published) == 2
    assert files_in(ours) == before


def test_who_loses_its_claim_while_it_takes_over_leaves_alone_what_has_its_own(tmp_path: Path) -> None:
    """The save that it has taken for dead thaws, and its claim is still there."""
    save_alone(state(1), tmp_path, 1)
    published: list[str] = []

    def take_over(operation: str, name: str) -> None:
        if operation == "publish" and name.endswith(".claim"):
            published.append(name)
            if len(published) == 2:
                (tmp_path / name).unlink()

    def hook(operation: str, name: str) -> None:
        if operation == "sync_file":
            (own,) = tmp_path.glob("5.*.claim")
            age(own)
            errors_of(try_save([state(7)], FaultyStorage(tmp_path, take_over), 7), CheckpointError)
            age_claims(tmp_path)
            os.utime(own)  # it lives
            save_alone(state(8), tmp_path, 8)

    save_alone(state(5), FaultyStorage(tmp_path, hook), 5)
    age_all_claims(tmp_path)
    save_alone(state(9), tmp_path, 9)
    check_holds(tmp_path, {1: 1, 5: 5, 8: 8, 9: 9})


def test_a_claim_is_kept_fresh_although_it_seemed_to_be_gone_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the name of a folder is not found for a moment."""
    monkeypatch.setattr(FRESH_EVERY, 0.01)
    touched: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "touch":
            touched.append(name)
            if len(touched) == 1:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)

    lease = Lease(FaultyStorage(tmp_path, hook), 3, automatic=True)
    until(lambda: len(touched) > 2)
    lease.end()
    assert set(touched) == {lease.name}
    assert not list(tmp_path.iterdir())


def test_a_save_that_was_taken_for_dead_and_has_removed_its_files_leaves_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FRESH_EVERY, 0.01)
    lease = commit.begin(LocalStorage(tmp_path), 5)
    (tmp_path / lease.name).unlink()
    until(lambda: list(tmp_path.glob("*.claim")))
    (tmp_path / f"0_5.{lease.save_id}.0.safetensors").touch()
    commit.give_up(lease, settled=True)
    assert not list(tmp_path.iterdir())


def test_who_loses_its_claim_while_it_takes_over_does_not_speak_of_what_is_committed(tmp_path: Path) -> None:
    """Or its `.metadata` could not be made again if it is damaged."""
    save_alone(state(5), tmp_path, 5)
    (save,) = saves_in(tmp_path)
    (tmp_path / f"5.{save}.claim").write_text(json.dumps({"save": save, "replaces": None, "removes": ["ab" * 8]}))
    age_claims(tmp_path)

    (tmp_path / f"5.{save}.metadata.tmp").touch()
    hangs = raises("delete", f"5.{save}.metadata.tmp", CheckpointTimeoutError("it hangs"))
    save_alone(state(7), FaultyStorage(tmp_path, hangs), 7)
    (says,) = (says for says in claims_of(tmp_path) if "taken" in says)
    assert [says["removes"], *(said["removes"] for said in says["taken"])] == [[], ["ab" * 8]]
    (tmp_path / "5.metadata").write_bytes(b"")
    assert rebuild(LocalStorage(tmp_path), save, False).save_id == save
    assert not verify(tmp_path, 5).problems


def test_a_copy_that_was_taken_for_dead_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one save have its id: what it claims anew does not speak of that."""
    monkeypatch.setattr(FRESH_EVERY, 0.01)
    ours, theirs = tmp_path / "from", tmp_path / "to"
    save_alone(state(1), ours, 1)
    copied: list[bool] = []

    def hook(operation: str, name: str) -> None:
        if operation == "sync_file" and not copied:
            copied.append(True)
            (claim,) = theirs.glob("*.claim")
            claim.unlink()
            for path in data_files(theirs):
                path.unlink()  # as whoever has taken it for dead does
            until(lambda: list(theirs.glob("*.claim")))
            copy(LocalStorage(ours), LocalStorage(theirs), 1, False)

    with pytest.raises((CheckpointError, OSError)):
        copy(LocalStorage(ours), FaultyStorage(theirs, hook), 1, False)
    assert verify(theirs, 1).problems == ()


@pytest.mark.parametrize("operation", ["free_bytes", "create", "publish"])
def test_a_copy_whose_folder_is_removed_says_that_its_claim_is_gone(tmp_path: Path, operation: str) -> None:
    """Who has taken it for dead has found nothing else there."""
    ours, theirs = tmp_path / "from", tmp_path / "to"
    save_alone(state(5), ours, 5)

    class Storage(FaultyStorage):
        def free_bytes(self) -> int | None:
            hook("free_bytes", "")
            return super().free_bytes()

    def hook(found: str, name: str) -> None:
        if found == operation and not name.endswith(".claim"):
            shutil.rmtree(theirs)

    with pytest.raises(CheckpointError, match="claim .* is gone, and the folder with it"):
        copy(LocalStorage(ours), Storage(theirs, hook), 5, False)
    assert not theirs.exists()


def test_a_deletion_on_a_full_disk_may_take_over_what_a_copy_makes(tmp_path: Path) -> None:
    """It cannot say so: the copy is refused, whichever id the deletion is of."""
    ours, theirs = tmp_path / "from", tmp_path / "to"
    save_alone(state(5), ours, 5)
    save_alone(state(1), theirs, 1)
    empty = theirs / "1.0123456789abcdef.claim"
    empty.touch()
    with pytest.raises(CheckpointError, match=f"are being removed from {theirs}, or put there, as {empty.name} says"):
        copy(LocalStorage(ours), LocalStorage(theirs), 5, False)
    empty.unlink()
    copy(LocalStorage(ours), LocalStorage(theirs), 5, False)


def test_a_checkpoint_of_paddles_that_a_save_stands_for_that_died_before_its_commit_stays(tmp_path: Path) -> None:
    (tmp_path / "0.metadata").write_bytes(b"\x80\x04}.")
    says = {"save": "0123456789abcdef", "replaces": None, "removes": [], "of_paddle": 0, "automatic": True}
    (tmp_path / "1.0123456789abcdef.claim").write_text(json.dumps(says))
    age_claims(tmp_path)
    save_alone(state(1), tmp_path, 2)
    assert (tmp_path / "0.metadata").exists()
    assert not list(tmp_path.glob("*.claim"))


def test_what_a_save_has_replaced_that_is_taken_over_late_is_said_at_once(tmp_path: Path) -> None:
    """Who has taken it over may die before it has removed that."""
    save_alone(state(0), tmp_path, 0)
    before, (replaced,) = files_in(tmp_path), saves_in(tmp_path)
    save_alone(state(1), tmp_path, 0)
    later, (save,) = (tmp_path / "0.metadata").read_bytes(), saves_in(tmp_path)
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    claim = tmp_path / f"0.{save}.claim"
    claim.write_text(json.dumps({"save": save, "replaces": replaced, "removes": []}))
    age_claims(tmp_path)

    commits = does("delete", claim.name, lambda: (tmp_path / "0.metadata").write_bytes(later))
    taker = commit.begin(FaultyStorage(tmp_path, commits), 7)
    taker.stop()
    assert taker.doomed == [replaced] == claims_of(tmp_path)[0]["removes"]


@pytest.mark.parametrize("when", ["look", "removal"])
def test_what_a_save_has_replaced_whose_claim_is_gone_then_is_left_to_a_later_one(tmp_path: Path, when: str) -> None:
    """Who has taken it for dead has done so before it was published."""
    save_alone(state(0), tmp_path, 5)
    (replaced,) = saves_in(tmp_path)
    committed: list[bool] = []

    class Storage(LocalStorage):
        def publish(self, name: str, *args: Any, **kwargs: Any) -> bool:
            is_published = super().publish(name, *args, **kwargs)
            if name == "5.metadata":
                committed.append(True)
            return is_published

    def hook(operation: str, name: str) -> None:
        if committed and operation == "names":
            for claim in tmp_path.glob("5.*.claim"):
                claim.unlink()
            committed.clear()
            if when == "look":
                raise OSError(errno.EIO, "Input/output error", name)

    storage = FaultyStorage(tmp_path, hook)
    storage._inner = Storage(tmp_path)
    save_alone(state(1), storage, 5)
    assert not committed
    if when == "look":
        assert [says["removes"] for says in claims_of(tmp_path)] == [[replaced]]
    age_all_claims(tmp_path)
    save_alone(state(2), tmp_path, 6)
    check_holds(tmp_path, {5: 1, 6: 2})


def test_a_deletion_is_not_refused_for_a_claim_that_it_has_left_itself(tmp_path: Path) -> None:
    """For what a dead save has left, when a `.metadata` was damaged while it took that over."""
    save_alone(state(1), tmp_path, 1)
    save_alone(state(2), tmp_path, 2)
    dead_save(tmp_path, 5, last="sync")
    age_claims(tmp_path)
    whole = (tmp_path / "1.metadata").read_bytes()
    damaged: list[bool] = []

    def hook(operation: str, name: str) -> None:
        if operation == "delete" and name.startswith("5.") and name.endswith(".claim"):
            (tmp_path / "1.metadata").write_bytes(b"rubbish")
            damaged.append(True)
        elif damaged and operation == "publish":
            (tmp_path / "1.metadata").write_bytes(whole)

    delete(FaultyStorage(tmp_path, hook), 2)
    age_claims(tmp_path)
    save_alone(state(3), tmp_path, 3)
    check_holds(tmp_path, {1: 1, 3: 3})


@pytest.mark.parametrize("failing", ["damaged", "EIO"])
def test_files_of_a_failed_save_that_cannot_be_removed_when_its_claim_is_gone_are_left_to_a_later_one(
    tmp_path: Path, failing: str
) -> None:
    save_alone(state(1), tmp_path, 1)

    lease = commit.begin(
        FaultyStorage(tmp_path, raises("delete", "0_5*" if failing == "EIO" else "nothing", errno.EIO)), 5
    )
    (tmp_path / f"0_5.{lease.save_id}.0.safetensors").touch()
    (tmp_path / lease.name).unlink()
    whole = (tmp_path / "1.metadata").read_bytes()
    if failing == "damaged":
        (tmp_path / "1.metadata").write_bytes(b"rubbish")
    commit.give_up(lease, settled=True)
    (tmp_path / "1.metadata").write_bytes(whole)
    age_claims(tmp_path)
    save_alone(state(2), tmp_path, 7)
    check_holds(tmp_path, {1: 1, 7: 2})


def test_a_deletion_that_was_taken_for_dead_and_is_not_confirmed_leaves_its_files_to_a_later_save(
    tmp_path: Path,
) -> None:
    save_alone(state(1), tmp_path, 1)
    save_alone(state(2), tmp_path, 2)
    gone: list[bool] = []

    def hook(operation: str, name: str) -> None:
        if (operation, name) == ("delete", "1.metadata"):
            age_claims(tmp_path)
            save_alone(state(7), tmp_path, 7)
            gone.append(True)
        elif gone and operation == "sync":
            raise OSError(errno.EIO, "Input/output error", name)

    with pytest.raises(DurabilityUnknownError):
        delete(FaultyStorage(tmp_path, hook), 1)
    age_claims(tmp_path)
    save_alone(state(8), tmp_path, 8)
    check_holds(tmp_path, {2: 2, 7: 7, 8: 8})


def test_a_temporary_name_that_a_failed_rebuild_could_not_remove_is_left_to_a_later_save(tmp_path: Path) -> None:
    """The disk is full when it is to have its name, and at fault when it is to go."""
    save_alone(state(1), tmp_path, 1)
    save_alone(state(2), tmp_path, 2)
    (save,) = (save for save, unique_id in saves_in(tmp_path).items() if unique_id == 1)
    (tmp_path / "1.metadata").unlink()
    with stays_temporary(), pytest.raises(OSError, match="No space left"):
        rebuild(LocalStorage(tmp_path), save, False)
    (temporary,) = tmp_path.glob("*.metadata.tmp")
    (says,) = claims_of(tmp_path)
    assert says["deletes"]
    assert says["done"]  # nobody waits for it
    age_claims(tmp_path)
    save_alone(state(3), tmp_path, 3)
    assert not temporary.exists()
    assert not claims_of(tmp_path)
    rebuild(LocalStorage(tmp_path), save, False)
    check_holds(tmp_path, {1: 1, 2: 2, 3: 3})


@contextmanager
def stays_temporary() -> Iterator[None]:
    """No file may get a name without losing its old one: there is no room for a link, nor can the old name go."""

    def link(source: Any, target: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self.name.endswith(".metadata.tmp"):
            raise OSError(errno.EIO, "Input/output error", str(self))
        os.unlink(self)

    with mock.patch.object(os, "link", link), mock.patch.object(Path, "unlink", unlink):
        yield


class LastStep(FreezingStorage):
    """A folder that a save publishes its `.metadata` to only when it is told, and in which it may die then."""

    def __init__(self, path: Path, dies: bool) -> None:
        super().__init__(path, after=self._freeze)
        self._dies = dies
        self.is_there, self.goes_on = threading.Event(), threading.Event()

    def _freeze(self) -> None:
        self.is_there.set()
        assert self.goes_on.wait(PATIENCE)

    def publish(self, name: str, *args: Any, **kwargs: Any) -> bool:
        is_published = super().publish(name, *args, **kwargs)
        if self._dies and name.endswith(".metadata"):
            raise Killed
        return is_published


@contextmanager
def frozen_at_its_last_step(
    folder: Path, version: int, unique_id: int, dies: bool = True
) -> Iterator[Callable[[], None]]:
    """A save that has confirmed, and been silent since for longer than its claim counts.

    Yields:
        Lets it go on, until it has published, and died then if it ``dies``, or has found that it may not.
    """
    storage = FaultyStorage(folder, lambda operation, name: None)
    storage._inner = slow = LastStep(folder, dies)
    thread = threading.Thread(target=try_save, args=([state(version)], storage, unique_id))

    def thaw() -> None:
        slow.goes_on.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()

    thread.start()
    try:
        assert slow.is_there.wait(PATIENCE)
        age_claims(folder)
        yield thaw
    finally:
        thaw()


def dead_with_a_temporary_name(folder: Path, unique_id: int) -> Path:
    """Save, and die when the `.metadata` could be complete under its temporary name, which is returned."""
    dead_save(folder, unique_id, last="sync")
    (claim,) = folder.glob(f"{unique_id}.*.claim")
    temporary = claim.with_suffix(".metadata.tmp")
    temporary.touch()
    return temporary


@pytest.mark.parametrize("taker", ["save", "deletion"])
@pytest.mark.parametrize("then", ["another save", "a save over it", "another deletion"])
def test_what_a_save_replaces_that_its_taker_could_not_stop_is_not_forgotten(
    tmp_path: Path, taker: str, then: str
) -> None:
    """Its claim is gone, but not its temporary name, so it commits when it thaws, and dies."""
    for unique_id in (0, 5, 6):
        save_alone(state(unique_id), tmp_path, unique_id)
    with frozen_at_its_last_step(tmp_path, 1, 0) as thaw:
        storage = FaultyStorage(tmp_path, raises("delete", "*.metadata.tmp", errno.EIO))
        if taker == "save":
            save_alone(state(5), storage, 5)
        else:
            delete(storage, 6)
        thaw()
    left = {0: 1, 5: 5} | ({6: 6} if taker == "save" else {})
    if then == "a save over it":
        save_alone(state(3), tmp_path, 0)
        left[0] = 3
    age_claims(tmp_path)
    if then == "another deletion":
        delete(LocalStorage(tmp_path), 5)
        del left[5]
    else:
        save_alone(state(4), tmp_path, 8)
        left[8] = 4
    check_holds(tmp_path, left)


@pytest.mark.parametrize("ends", ["a save", "a deletion"])
def test_a_save_that_its_taker_could_not_stop_may_yet_commit(tmp_path: Path, ends: str) -> None:
    """Who removes the checkpoint that it replaces might remove what it commits, so nobody does for a while."""
    for unique_id in (0, 1):
        save_alone(state(unique_id), tmp_path, unique_id)
    with frozen_at_its_last_step(tmp_path, 2, 0) as thaw:
        storage = FaultyStorage(tmp_path, raises("delete", "*.metadata.tmp", errno.EIO))
        for _ in range(2):
            with pytest.raises(CheckpointError, match="may yet be replaced by a save that was taken for dead"):
                delete(storage, 0)
        with pytest.raises(CheckpointError, match="is being saved to"):  # to another id, but nothing else is known
            delete(storage, 1)
        (says,) = (says for says in claims_of(tmp_path) if "taken" in says)
        assert says["done"]
        if ends == "a save":
            save_alone(state(3), tmp_path, 0)
        thaw()
    assert verify(tmp_path, 0).problems == ()
    age_claims(tmp_path)
    delete(LocalStorage(tmp_path), 1)
    check_holds(tmp_path, {0: 2})


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM])
def test_a_temporary_name_that_cannot_be_removed_is_in_nobodys_way(tmp_path: Path, number: int) -> None:
    """It is immutable, or somebody has it open where that matters."""
    for unique_id in range(4):
        save_alone(state(unique_id), tmp_path, unique_id)
    temporary = dead_with_a_temporary_name(tmp_path, 9)
    storage = FaultyStorage(tmp_path, raises("delete", temporary.name, number))
    for unique_id in range(4):
        age_all_claims(tmp_path)
        save_alone(state(10 + unique_id), storage, unique_id)
        (says,) = (says for says in claims_of(tmp_path) if "taken" in says)
        assert len(says["taken"]) == 1
    age_all_claims(tmp_path)
    save_alone(state(9), tmp_path, 9)
    check_holds(tmp_path, {0: 10, 1: 11, 2: 12, 3: 13, 9: 9})


@pytest.mark.parametrize("at", ["names", "delete"])
def test_the_temporary_name_of_a_committed_metadata_goes_although_who_took_it_over_dies_as_well(
    tmp_path: Path, at: str
) -> None:
    """The name is a second one of the `.metadata`, if its save died just after the link."""
    save_alone(state(0), tmp_path, 0)
    (save,) = saves_in(tmp_path)
    claim, temporary = tmp_path / f"0.{save}.claim", tmp_path / f"0.{save}.metadata.tmp"
    claim.write_text(json.dumps({"save": save, "replaces": None, "removes": []}))
    os.link(tmp_path / "0.metadata", temporary)
    age_claims(tmp_path)

    def hook(operation: str, name: str) -> None:
        if operation == at and not claim.exists():
            raise Killed

    try_save([state(1)], FaultyStorage(tmp_path, hook), 1)
    assert temporary.exists()
    assert not claim.exists()
    age_claims(tmp_path)
    save_alone(state(2), tmp_path, 2)
    check_holds(tmp_path, {0: 0, 2: 2})


def test_what_a_failed_taker_has_said_of_a_save_that_thaws_is_not_held_against_it(tmp_path: Path) -> None:
    """Its claim could not be removed, so that it goes on; the claim of who has tried speaks of it for a while."""
    save_alone(state(0), tmp_path, 0)
    with frozen_at_its_last_step(tmp_path, 1, 0) as thaw:
        (own,) = tmp_path.glob("0.*.claim")
        try_save([state(2)], FaultyStorage(tmp_path, dies("delete", own.name)), 7)
        age_claims(tmp_path)
        os.utime(own)  # it lives
        save_alone(state(3), tmp_path, 8)
        assert own.exists()
        thaw()
    assert verify(tmp_path, 0).problems == ()
    age_claims(tmp_path)
    save_alone(state(4), tmp_path, 9)
    check_holds(tmp_path, {0: 1, 8: 3, 9: 4})


def test_a_checkpoint_of_paddles_is_put_aside_by_who_takes_over_a_save_that_commits_late(tmp_path: Path) -> None:
    (tmp_path / "0.metadata").write_bytes(b"\x80\x04}.")
    save_alone(state(1), tmp_path, 1)
    (save,) = saves_in(tmp_path)
    data = (tmp_path / "1.metadata").read_bytes()
    (tmp_path / "1.metadata").unlink()
    says = {"save": save, "replaces": None, "removes": [], "of_paddle": 0, "automatic": True}
    (tmp_path / f"1.{save}.claim").write_text(json.dumps(says))
    age_claims(tmp_path)

    commits = does("delete", f"1.{save}.claim", lambda: (tmp_path / "1.metadata").write_bytes(data))
    save_alone(state(2), FaultyStorage(tmp_path, commits), 2)
    assert sorted(path.name for path in tmp_path.glob("*metadata*")) == [
        "0.metadata.replaced",
        "1.metadata",
        "2.metadata",
    ]
    assert not claims_of(tmp_path)


def test_a_claim_that_says_what_others_have_said_in_vain_depth_is_read(tmp_path: Path) -> None:
    """A stranger's: what it has taken says nothing of what that has taken, however deep it goes."""
    deep: dict[str, Any] = {"save": "x", "replaces": None, "removes": []}
    for _ in range(100):
        deep = {"save": "x", "replaces": None, "removes": ["cd" * 8], "taken": [deep]}
    (tmp_path / f"1.{'ab' * 8}.claim").write_text(json.dumps(deep))
    age_claims(tmp_path)
    save_alone(state(2), tmp_path, 2)
    check_holds(tmp_path, {2: 2})


@pytest.mark.parametrize("times", [1, 3])
def test_a_deletion_that_is_taken_for_dead_before_it_has_its_claim(tmp_path: Path, times: int) -> None:
    """Somebody has found the temporary name of its claim, and that is old."""
    save_alone(state(0), tmp_path, 0)
    gone: list[str] = []

    class Storage(LocalStorage):
        def publish(self, name: str, data: bytes, temporary: str, replace: bool, confirm: Any = None) -> bool:
            def taken_over() -> None:
                if len(gone) < times and name.endswith(".claim"):
                    gone.append(temporary)
                    (tmp_path / temporary).unlink()
                if confirm is not None:
                    confirm()

            return super().publish(name, data, temporary, replace, taken_over)

    if times == 1:
        delete(Storage(tmp_path), 0)
        assert not files_in(tmp_path)
    else:
        with pytest.raises(FileNotFoundError):
            delete(Storage(tmp_path), 0)
        check_holds(tmp_path, {0: 0})
    assert len(gone) == times


def test_a_save_whose_temporary_name_stays_when_its_id_is_taken_says_why(tmp_path: Path) -> None:
    """It would try the next id under the same name."""
    save_alone(state(0), tmp_path, 0)

    class Storage(LocalStorage):
        def publish(self, name: str, data: bytes, temporary: str, replace: bool, confirm: Any = None) -> bool:
            if name == "1.metadata":
                save_alone(state(1), tmp_path, 1)
                (tmp_path / temporary).write_bytes(data)  # could not be removed
                stuck.append(temporary)
                return False
            return super().publish(name, data, temporary, replace, confirm)

    def hook(operation: str, name: str) -> None:
        if operation == "delete" and name in stuck:
            raise OSError(errno.EIO, "Input/output error", name)

    stuck: list[str] = []
    storage = FaultyStorage(tmp_path, hook)
    storage._inner = Storage(tmp_path)
    with pytest.raises((OSError, CheckpointError), match="Input/output error"):
        save_alone(state(2), storage)
    stuck.clear()
    age_claims(tmp_path)
    save_alone(state(3), tmp_path)
    check_holds(tmp_path, {0: 0, 1: 1, 2: 3})


@pytest.mark.parametrize("dies", [False, True])
def test_what_a_live_save_may_yet_replace_is_not_forgotten_by_who_takes_over_its_claim(
    tmp_path: Path, dies: bool
) -> None:
    """Two saves of one id: the second is committed, and its claim waits for the first, which has confirmed before."""
    save_alone(state(0), tmp_path, 0)
    with frozen_at_its_last_step(tmp_path, 1, 0, dies) as thaw:
        (own,) = tmp_path.glob("*.claim")
        os.utime(own)  # it lives
        save_alone(state(2), tmp_path, 0)
        (waiting,) = {*tmp_path.glob("*.claim")} - {own}
        age(waiting)
        save_alone(state(3), tmp_path, 7)
        assert waiting.exists()
        thaw()
    assert waiting.exists() is dies
    age_all_claims(tmp_path)
    save_alone(state(4), tmp_path, 8)
    check_holds(tmp_path, {0: 1, 7: 3, 8: 4})


@pytest.mark.parametrize("is_stuck", [False, True])
@pytest.mark.parametrize("member", ["removes", "replaces", "taken removes", "taken replaces", "taken"])
def test_a_claim_of_a_stranger_has_no_files_removed_of_a_save_that_has_its_own(
    tmp_path: Path, member: str, is_stuck: bool
) -> None:
    """Or one of a save that had found the other's claim too old, and was killed before it could remove that."""
    save_alone(state(0), tmp_path, 0)
    with frozen_at_its_last_step(tmp_path, 1, 1, dies=False) as thaw:
        (own,) = tmp_path.glob("*.claim")
        live = own.name.split(".")[1]
        says: dict[str, Any] = {"save": "ef" * 8, "replaces": None, "removes": []}
        says |= {"replaces": live, "done": True} if "replaces" in member else {"removes": [live]}
        if member == "taken":
            says = {"save": "cd" * 8, "replaces": None, "removes": [], "taken": [says | {"save": live, "removes": []}]}
        elif member.startswith("taken"):
            says = {"save": "cd" * 8, "replaces": None, "removes": [], "taken": [says]}
        (tmp_path / f"7.{says['save']}.claim").write_text(json.dumps(says))
        age_claims(tmp_path)
        if not is_stuck:
            os.utime(own)
        stuck = raises("delete", own.name if is_stuck else "nothing", errno.EACCES)
        save_alone(state(8), FaultyStorage(tmp_path, stuck), 8)
        thaw()
    assert verify(tmp_path, 1).problems == ()
    check_holds(tmp_path, {0: 0, 1: 1, 8: 8})


def test_a_rebuild_is_not_refused_for_what_a_dead_save_was_to_replace(tmp_path: Path) -> None:
    """The dead save has got no further, and who took it over was killed as well."""
    save_alone(state(0), tmp_path, 0)
    (replaced,) = saves_in(tmp_path)
    dead_save(tmp_path, 0, last="sync")
    (claim,) = tmp_path.glob("0.*.claim")
    age_claims(tmp_path)

    def hook(operation: str, name: str) -> None:
        if operation == "names" and not claim.exists():
            raise Killed

    try_save([state(1)], FaultyStorage(tmp_path, hook), 7)
    (says,) = claims_of(tmp_path)
    assert [said["replaces"] for said in says["taken"]] == [replaced]
    age_claims(tmp_path)
    (tmp_path / "0.metadata").unlink()
    temporary = tmp_path / claim.name.replace(".claim", ".metadata.tmp")
    temporary.touch()  # with this, it may yet replace that
    with pytest.raises(CheckpointError, match="it is being written, or to be removed"):
        rebuild(LocalStorage(tmp_path), replaced, False)
    temporary.unlink()
    assert rebuild(LocalStorage(tmp_path), replaced, False).save_id == replaced
    check_holds(tmp_path, {0: 0})


def test_a_rebuild_of_a_dead_save_says_which_claim_to_remove(tmp_path: Path) -> None:
    """It stays until then, and a later save removes what the dead one has written."""
    dead_save(tmp_path, 0, last="sync")
    (claim,) = tmp_path.glob("0.*.claim")
    age_claims(tmp_path)
    with pytest.raises(CheckpointError, match=rf"the claim {claim.name} says .*; if nobody .*, remove that file"):
        rebuild(LocalStorage(tmp_path), None, False)
    claim.unlink()
    assert rebuild(LocalStorage(tmp_path), None, False).unique_id == 0
    assert list_checkpoints(tmp_path) == [0]


def test_a_deletion_does_not_pass_over_a_claim_of_which_a_save_may_yet_commit(tmp_path: Path) -> None:
    """It cannot remove that claim, nor is it one of the id; and what it would remove is what that save commits."""
    for unique_id in (0, 5):
        save_alone(state(unique_id), tmp_path, unique_id)

    refusing = FaultyStorage(tmp_path, raises("delete", "7.*.claim", errno.EACCES))
    with frozen_at_its_last_step(tmp_path, 1, 0, dies=False) as thaw:
        save_alone(state(7), FaultyStorage(tmp_path, raises("delete", "*.metadata.tmp", errno.EIO)), 7)
        age_claims(tmp_path)
        with pytest.raises(CheckpointError, match="may yet be replaced by a save that was taken for dead"):
            delete(refusing, 0)
        delete(refusing, 5)
        thaw()
    age_claims(tmp_path)
    save_alone(state(8), tmp_path, 8)
    check_holds(tmp_path, {0: 1, 7: 7, 8: 8})


def test_what_was_taken_over_before_the_disk_stops_answering_is_not_forgotten(tmp_path: Path) -> None:
    """It stops at the second of two dead saves' claims."""
    save_alone(state(0), tmp_path, 0)
    for unique_id in (5, 6):
        dead_save(tmp_path, unique_id, last="sync")
    age_claims(tmp_path)
    removed: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "delete" and name.endswith(".claim") and name[0] in "56":
            removed.append(name)
            if len(removed) == 2:
                raise CheckpointTimeoutError("it hangs")

    save_alone(state(1), FaultyStorage(tmp_path, hook), 1)
    assert len(removed) == 2
    age_claims(tmp_path)
    save_alone(state(2), tmp_path, 2)
    check_holds(tmp_path, {0: 0, 1: 1, 2: 2})


def test_claims_that_are_too_many_for_one_are_taken_over_one_after_the_other(tmp_path: Path) -> None:
    dead_save(tmp_path, 5, last="sync")
    large = [f"{number:016x}" for number in range(25000)]  # with 19 bytes each
    for unique_id in (6, 7):
        says = {"save": f"{unique_id:016}", "replaces": None, "removes": large}
        (tmp_path / f"{unique_id}.{says['save']}.claim").write_text(json.dumps(says))
    age_claims(tmp_path)

    try_save([state(0)], FaultyStorage(tmp_path, raises("delete", "*.claim", Killed())), 0)
    sizes = [len(claim.read_bytes()) for claim in tmp_path.glob("0.*.claim")]
    assert len(sizes) == 1
    assert sizes[0] < 600_000
    for unique_id in range(4):
        age_all_claims(tmp_path)
        save_alone(state(unique_id), tmp_path, unique_id)
    check_holds(tmp_path, {0: 0, 1: 1, 2: 2, 3: 3})


@pytest.mark.parametrize("says", ["a dead copy", "a dead save has taken", "an ended save"])
def test_files_that_a_live_copy_makes_stay_whoever_was_to_remove_them(tmp_path: Path, says: str) -> None:
    """Another copy of the same checkpoint has died, or somebody has taken that over, before this one came."""
    ours, theirs = tmp_path / "from", tmp_path / "to"
    save_alone(state(5), ours, 5)
    (copied,) = saves_in(ours)
    claim: dict[str, Any] = {"save": "ef" * 8, "replaces": None, "removes": [copied]}
    if says == "a dead save has taken":
        claim = {"save": "cd" * 8, "replaces": None, "removes": [], "taken": [claim | {"of_id": 5}]}
    claim["done"] = says == "an ended save"

    def hook(operation: str, name: str) -> None:
        if operation == "publish" and name == "5.metadata":
            file = theirs / f"9.{claim['save']}.claim"
            file.write_text(json.dumps(claim))
            if says != "an ended save":
                age(file)
            save_alone(state(9), theirs, 9)
            assert not file.exists()

    copy(LocalStorage(ours), FaultyStorage(theirs, hook), 5, False)
    check_holds(theirs, {5: 5, 9: 9})


def test_a_save_whose_folder_goes_just_before_it_is_made_durable_says_so(tmp_path: Path) -> None:
    """By who has taken it for dead."""
    folder, sizes = tmp_path / "ckpt", list[str]()

    def hook(operation: str, name: str) -> None:
        sizes.extend([name] * (operation == "size"))
        if operation == "sync" and sizes:
            shutil.rmtree(folder)

    (error,) = errors_of(try_save([state(1)], FaultyStorage(folder, hook), 1), CheckpointError)
    assert f"{folder} is gone before it could be committed" in str(error)


@pytest.mark.parametrize("work", ["save", "copy"])
def test_who_is_taken_for_dead_removes_nothing_more_of_the_dead(tmp_path: Path, work: str) -> None:
    """What it was about to remove may have been brought back by then."""
    ours, theirs = tmp_path / "from", tmp_path / "to"
    save_alone(state(1), ours, 1)
    dead_save(theirs, 5, last="sync")
    age_claims(theirs)
    (file,), taken = theirs.glob("0_5.*"), list[str]()

    def hook(operation: str, name: str) -> None:
        for claim in theirs.glob("*.claim") if operation == "names" and not taken else ():
            said = json.loads(claim.read_text())
            if said["removes"] and "taken" not in said:  # it is certain what is to go
                taken.append(claim.name)
                claim.unlink()

    storage = FaultyStorage(theirs, hook)
    if work == "save":
        errors_of(try_save([state(7)], storage, 7), CheckpointError)
    else:
        with pytest.raises(CheckpointError, match="is gone: another save or export took this one"):
            copy(LocalStorage(ours), storage, 1, False)
    assert taken
    assert file.exists()


def test_a_save_that_is_done_leaves_no_claim_if_another_one_has_taken_its_last(tmp_path: Path) -> None:
    """Whoever has removed it has read what it said; what was to be added is said by claims that are there yet."""
    save_alone(state(1), tmp_path, 5)
    lease = Lease(LocalStorage(tmp_path), 5, automatic=False)
    lease.mark_done(5)
    (tmp_path / lease.name).unlink()
    with pytest.raises(CheckpointError, match="is gone"):
        lease.take_on("0123456789abcdef")
    assert lease.doomed == []
    assert lease.speak_again([str(lease.replaces)]) is None
    lease.stop()
    assert not list(tmp_path.glob("*.claim*"))
