"""Whose business the files of a dead save are, where several could remove them, and some of these die or fail."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import list_checkpoints, verify
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError
from paddle_dist_ckpt.folder.copy import copy
from paddle_dist_ckpt.folder.delete import delete
from paddle_dist_ckpt.folder.other_claims import StuckClaimError
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing import FaultyStorage
from test.folder.test_claims import check_holds, dead_save, state
from test.folder.test_gone_claims import (
    LastStep,
    age_all_claims,
    claims_of,
    dead_with_a_temporary_name,
    frozen_at_its_last_step,
)
from test.hooks import dies, raises
from test.jobs import Killed, age, age_claims, data_files, files_in, save_alone, save_on, saves_in, try_save
from test.waiting import PATIENCE


def check_after_later_saves(folder: Path, versions: dict[int, int]) -> None:
    """Assert that two more saves, each when all claims have expired, clean up, and these versions are there besides."""
    for unique_id in (90, 91):
        age_all_claims(folder)
        save_alone(state(unique_id), folder, unique_id)
    check_holds(folder, versions | {90: 90, 91: 91})


def fails_once(operation: str, name: str, number: int) -> Callable[[str, str], None]:
    """A hook: this fails the first time."""
    failed: list[bool] = []

    def hook(found: str, about: str) -> None:
        if (found, about) == (operation, name) and not failed:
            failed.append(True)
            raise OSError(number, os.strerror(number), about)

    return hook


def killed_after_its_commit(
    folder: Path, version: int, unique_id: int, before_each: Callable[[str, str], None] = lambda operation, name: None
) -> Path:
    """A save that is killed just when it has published; returns its claim."""
    before, dead = {*folder.glob("*.claim")}, list[bool]()

    class Storage(LocalStorage):
        def publish(self, name: str, *args: Any, **kwargs: Any) -> bool:
            super().publish(name, *args, **kwargs)
            if name.endswith(".metadata"):
                dead.append(True)
                raise Killed
            return True

    def hook(operation: str, name: str) -> None:
        if dead:
            raise Killed
        before_each(operation, name)

    storage = FaultyStorage(folder, hook)
    storage._inner = Storage(folder)
    try_save([state(version)], storage, unique_id)
    return next(claim for claim in folder.glob("*.claim") if claim not in before)


def test_what_a_save_has_left_by_a_claim_is_not_left_to_it_again(tmp_path: Path) -> None:
    """It could not remove a file of a dead save, and lasts longer than the claim counts by which it has left that."""
    save_alone(state(0), tmp_path, 0)
    dead_save(tmp_path, 5, last="sync")
    age_claims(tmp_path)
    (file,) = tmp_path.glob("0_5.*")
    once, saved = fails_once("delete", file.name, errno.EIO), list[bool]()

    def hook(operation: str, name: str) -> None:
        once(operation, name)
        if operation == "sync_file" and not saved:
            saved.append(True)
            for claim in tmp_path.glob("*.claim"):
                if json.loads(claim.read_text()).get("passes_on"):
                    age(claim)
            save_alone(state(1), tmp_path, 7)

    save_alone(state(2), FaultyStorage(tmp_path, hook), 6)
    assert saved
    check_after_later_saves(tmp_path, {0: 0, 6: 2, 7: 1})


def test_what_a_save_would_have_replaced_is_not_left_to_it(tmp_path: Path) -> None:
    """It was to replace a dead save that is committed, and with that what this has replaced; but it fails."""
    save_alone(state(0), tmp_path, 0)
    claim, saved = killed_after_its_commit(tmp_path, 1, 0), list[bool]()

    def hook(operation: str, name: str) -> None:
        if operation == "sync_file":
            if not saved:
                saved.append(True)
                age(claim)
                save_alone(state(2), tmp_path, 7)
            raise OSError(errno.ENOSPC, "No space left on device", name)

    try_save([state(3)], FaultyStorage(tmp_path, hook), 0)
    assert saved
    check_after_later_saves(tmp_path, {0: 1, 7: 2})


def test_what_a_refused_deletion_would_have_removed_is_not_left_to_it(tmp_path: Path) -> None:
    save_alone(state(0), tmp_path, 0)
    before, (replaced,) = files_in(tmp_path), saves_in(tmp_path)
    save_alone(state(1), tmp_path, 0)
    (save,) = saves_in(tmp_path)
    for name, data in before.items():
        if replaced in name:
            (tmp_path / name).write_bytes(data)
    claim = tmp_path / f"0.{save}.claim"
    claim.write_text(json.dumps({"save": save, "replaces": replaced, "removes": [], "done": True}))

    def hook(operation: str, name: str) -> None:
        if (operation, name) == ("delete", "0.metadata"):
            age(claim)
            save_alone(state(2), tmp_path, 7)
            raise OSError(errno.EPERM, "Operation not permitted", name)

    with pytest.raises(PermissionError):
        delete(FaultyStorage(tmp_path, hook), 0)
    check_after_later_saves(tmp_path, {0: 1, 7: 2})


def test_what_a_copy_has_taken_over_and_could_not_remove_is_not_forgotten(tmp_path: Path) -> None:
    """It is of the very checkpoint that is copied: a deletion of that has died."""
    ours, theirs = tmp_path / "from", tmp_path / "to"
    save_alone(state(1), ours, 1)
    save_alone(state(9), theirs, 9)
    copy(LocalStorage(ours), LocalStorage(theirs), 1, False)
    (file,) = theirs.glob("0_1.*")
    with pytest.raises(Killed):
        delete(FaultyStorage(theirs, dies("delete", file.name)), 1)
    age_claims(theirs)
    with pytest.raises(OSError, match="Input/output error"):
        copy(LocalStorage(ours), FaultyStorage(theirs, fails_once("delete", file.name, errno.EIO)), 1, False)
    check_after_later_saves(theirs, {9: 9})


def test_what_a_copy_finds_there_and_nobody_else_makes_is_not_forgotten(tmp_path: Path) -> None:
    """A copy that was frozen has made it when it thawed; its claim is gone, and the one it has left has expired."""
    ours, theirs = tmp_path / "from", tmp_path / "to"
    save_on([state(1), {"more": np.arange(9)}], ours, 1)
    save_alone(state(9), theirs, 9)
    is_there, goes_on, failed = threading.Event(), threading.Event(), list[BaseException]()

    def waits(operation: str, name: str) -> None:
        if operation == "sync_file" and not is_there.is_set():
            is_there.set()
            assert goes_on.wait(PATIENCE)

    def other() -> None:
        try:
            copy(LocalStorage(ours), FaultyStorage(theirs, waits), 1, False)
        except CheckpointError as error:
            failed.append(error)

    thread = threading.Thread(target=other)

    def freezes(operation: str, name: str) -> None:
        if operation == "create" and name.startswith("1_1."):
            age_claims(theirs)
            thread.start()
            assert is_there.wait(PATIENCE)

    with pytest.raises(CheckpointError, match="another save or export took this one"):
        copy(LocalStorage(ours), FaultyStorage(theirs, freezes), 1, False)
    for claim in theirs.glob("*.claim"):
        if json.loads(claim.read_text()).get("passes_on"):
            age(claim)
    save_alone(state(2), theirs, 7)
    goes_on.set()
    thread.join(PATIENCE)
    assert [str(error) for error in failed if "being put there by somebody else" in str(error)]
    check_after_later_saves(theirs, {7: 2, 9: 9})


@pytest.mark.parametrize("is_stuck", ["name", "claim"])
def test_what_is_replaced_by_a_save_that_could_not_be_stopped_is_not_forgotten(tmp_path: Path, is_stuck: str) -> None:
    """It commits when the claim has expired of what it replaces, which has waited for it."""
    save_alone(state(0), tmp_path, 0)
    with frozen_at_its_last_step(tmp_path, 1, 0, dies=False) as thaw:
        (claim,) = tmp_path.glob("*.claim")
        name = claim.name if is_stuck == "claim" else claim.name.replace(".claim", ".metadata.tmp")
        storage = FaultyStorage(tmp_path, raises("delete", name, errno.EPERM))
        save_alone(state(2), storage, 0)
        age_claims(tmp_path)
        save_alone(state(3), storage, 7)
        thaw()
    check_after_later_saves(tmp_path, {0: 1, 7: 3})


def test_what_is_replaced_by_a_save_that_another_claim_passes_on_is_not_forgotten(tmp_path: Path) -> None:
    """That claim is dated anew each time, so that it may be fresh when the one has expired of what is replaced."""
    save_alone(state(0), tmp_path, 0)
    with frozen_at_its_last_step(tmp_path, 1, 0, dies=False) as thaw:
        (claim,) = tmp_path.glob("*.claim")
        storage = FaultyStorage(tmp_path, raises("delete", claim.name.replace(".claim", ".metadata.tmp"), errno.EPERM))
        save_alone(state(2), storage, 0)
        for version, unique_id, passes_on in ((3, 7, True), (4, 8, False)):
            for claim in tmp_path.glob("*.claim"):
                if json.loads(claim.read_text()).get("passes_on", False) is passes_on:
                    age(claim)
            save_alone(state(version), storage, unique_id)
        thaw()
    check_after_later_saves(tmp_path, {0: 1, 7: 3, 8: 4})


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("is_stuck", ["name", "claim"])
def test_deletions_go_on_beside_a_committed_save_that_waits_for_one_that_cannot_be_stopped(
    tmp_path: Path, is_stuck: str, is_killed: bool
) -> None:
    for unique_id in range(3):
        save_alone(state(unique_id), tmp_path, unique_id)
    temporary = dead_with_a_temporary_name(tmp_path, 0)
    claim = temporary.with_suffix("").with_suffix(".claim")
    age_claims(tmp_path)
    hook = raises("delete", claim.name if is_stuck == "claim" else temporary.name, errno.EACCES)
    if is_killed:
        killed_after_its_commit(tmp_path, 7, 0, hook)
    else:
        save_alone(state(7), FaultyStorage(tmp_path, hook), 0)
    for unique_id in (1, 2):
        age_claims(tmp_path)
        delete(FaultyStorage(tmp_path, hook), unique_id)
    if is_stuck == "claim":
        with pytest.raises(StuckClaimError, match=claim.name):
            delete(FaultyStorage(tmp_path, hook), 0)
    check_after_later_saves(tmp_path, {0: 7})


def test_what_a_live_save_replaces_that_was_killed_at_its_commit_is_not_forgotten(tmp_path: Path) -> None:
    """It could not say any more that it is done, and its claim has expired."""
    save_alone(state(0), tmp_path, 0)
    with frozen_at_its_last_step(tmp_path, 1, 0, dies=False) as thaw:
        (own,) = tmp_path.glob("*.claim")
        os.utime(own)  # it lives
        age(killed_after_its_commit(tmp_path, 2, 0))
        save_alone(state(3), tmp_path, 7)
        thaw()
    check_after_later_saves(tmp_path, {0: 1, 7: 3})


def test_what_cannot_be_settled_for_long_is_passed_on_without_growing(tmp_path: Path) -> None:
    save_alone(state(0), tmp_path, 0)
    temporary = dead_with_a_temporary_name(tmp_path, 5)

    hangs = raises("delete", temporary.name, CheckpointTimeoutError("it hangs"))
    for number in range(4):
        age_all_claims(tmp_path)
        save_alone(state(number), FaultyStorage(tmp_path, hangs), 10)
        (says,) = (says for says in claims_of(tmp_path) if "taken" in says)
        assert len(says["taken"]) == 1
    check_after_later_saves(tmp_path, {0: 0, 10: 3})


def test_deletions_go_on_beside_the_temporary_name_of_another_id_that_stays(tmp_path: Path) -> None:
    for unique_id in range(3):
        save_alone(state(unique_id), tmp_path, unique_id)
    temporary = dead_with_a_temporary_name(tmp_path, 9)
    age_claims(tmp_path)
    storage = FaultyStorage(tmp_path, raises("delete", temporary.name, errno.EBUSY))
    for unique_id in range(2):
        delete(storage, unique_id)
    assert temporary.exists()
    check_after_later_saves(tmp_path, {2: 2})


def test_a_checkpoint_of_paddles_that_a_deletion_could_not_put_aside_is_left_to_a_later_save(tmp_path: Path) -> None:
    (tmp_path / "0.metadata").write_bytes(b"\x80\x04}.")
    for unique_id in (1, 2):
        save_alone(state(unique_id), tmp_path, unique_id)
    save = {unique_id: save for save, unique_id in saves_in(tmp_path).items()}[1]
    says = {"save": save, "replaces": None, "removes": [], "of_paddle": 0, "automatic": True}
    (tmp_path / f"1.{save}.claim").write_text(json.dumps(says))
    age_claims(tmp_path)
    delete(FaultyStorage(tmp_path, fails_once("publish", "0.metadata.replaced", errno.EIO)), 2)
    assert (tmp_path / "0.metadata").exists()
    age_claims(tmp_path)
    save_alone(state(3), tmp_path, 3)
    assert sorted(path.name for path in tmp_path.glob("*metadata*")) == [
        "0.metadata.replaced",
        "1.metadata",
        "3.metadata",
    ]
    assert not claims_of(tmp_path)


def copies_at_its_last_step(ours: Path, theirs: Path, hook: Callable[[str, str], None]) -> Callable[[], None]:
    """Begin a copy of checkpoint 5, and wait until it has confirmed; returns what lets it go on, to its end."""
    storage = FaultyStorage(theirs, hook)
    storage._inner = slow = LastStep(theirs, dies=False)
    thread = threading.Thread(target=copy, args=(LocalStorage(ours), storage, 5, False))
    thread.start()
    assert slow.is_there.wait(PATIENCE)

    def go_on() -> None:
        slow.goes_on.set()
        thread.join(PATIENCE)

    return go_on


def test_a_deletion_leaves_the_files_of_a_copy_that_could_not_be_stopped(tmp_path: Path) -> None:
    """The claims of the copy, and of an ended save that was to remove the same files, are another user's."""
    ours, theirs = tmp_path / "from", tmp_path / "to"
    save_alone(state(5), ours, 5)
    save_alone(state(0), theirs, 0)
    (copied,), (save,) = saves_in(ours), saves_in(theirs)
    claim = theirs / f"0.{save}.claim"
    claim.write_text(json.dumps({"save": save, "replaces": None, "removes": [copied], "done": True}))
    age_claims(theirs)

    def hook(operation: str, name: str) -> None:
        if operation == "delete" and name.endswith(".claim") and (name == claim.name or name.startswith("5.")):
            raise OSError(errno.EPERM, "Operation not permitted", name)

    go_on = copies_at_its_last_step(ours, theirs, hook)
    age_claims(theirs)
    delete(FaultyStorage(theirs, hook), 0)
    go_on()
    assert list_checkpoints(theirs) == [5]
    assert verify(theirs, 5).problems == ()


def test_a_save_leaves_the_files_of_a_copy_that_has_come_since_it_has_read_what_it_inherits(tmp_path: Path) -> None:
    """What a dead save was to remove are files of the checkpoint that is copied."""
    ours, theirs = tmp_path / "from", tmp_path / "to"
    save_alone(state(5), ours, 5)
    save_alone(state(0), theirs, 0)
    (copied,), (save,) = saves_in(ours), saves_in(theirs)
    says = {"save": save, "replaces": None, "removes": [copied]}
    (theirs / f"0.{save}.claim").write_text(json.dumps(says))
    age_claims(theirs)
    going: list[Callable[[], None]] = []

    def hook(operation: str, name: str) -> None:
        if operation == "publish" and name.startswith("0.") and name.endswith(".claim") and not going:
            going.append(copies_at_its_last_step(ours, theirs, lambda operation, name: None))

    save_alone(state(1), FaultyStorage(theirs, hook), 0)
    (go_on,) = going
    go_on()
    assert list_checkpoints(theirs) == [0, 5]
    assert verify(theirs, 5).problems == ()
    age_all_claims(theirs)
    save_alone(state(6), theirs, 6)
    check_holds(theirs, {0: 1, 5: 5, 6: 6})


@pytest.mark.parametrize("work", ["save", "delete"])
def test_the_files_of_a_copy_stay_that_begins_while_an_ended_save_is_cleaned_up_after(
    tmp_path: Path, work: str
) -> None:
    """What the ended save was to remove are files of the checkpoint that is copied; its claim expires meanwhile."""
    ours, theirs = tmp_path / "from", tmp_path / "to"
    save_alone(state(5), ours, 5)
    for unique_id in (0, 7):
        save_alone(state(unique_id), theirs, unique_id)
    (copied,), ended = saves_in(ours), "e" * 16  # the latter was replaced by what is there now
    claim = theirs / f"0.{ended}.claim"
    claim.write_text(json.dumps({"save": ended, "replaces": None, "removes": [copied], "done": True}))
    storage, copies, errors = LastStep(theirs, dies=False), list[threading.Thread](), list[CheckpointError]()
    looks_at = "0.metadata" if work == "save" else "7.metadata"
    before = (theirs / "0.metadata").read_bytes()

    def copy_it() -> None:
        try:
            copy(LocalStorage(ours), storage, 5, False)
        except CheckpointError as error:
            errors.append(error)
            storage.is_there.set()

    def hook(operation: str, name: str) -> None:
        is_time = work == "delete" or (theirs / "0.metadata").read_bytes() != before
        if operation == "read" and name == looks_at and is_time and not copies:
            age(claim)
            copies.append(threading.Thread(target=copy_it))
            copies[0].start()
            assert storage.is_there.wait(PATIENCE)

    at_work = FaultyStorage(theirs, hook)
    if work == "save":
        save_alone(state(1), at_work, 0)
    else:
        delete(at_work, 0)
    storage.goes_on.set()
    copies[0].join(PATIENCE)
    there = [0, 7] if work == "save" else [7]
    assert list_checkpoints(theirs) == (there if errors else sorted([*there, 5]))
    assert all("are being removed" in str(error) for error in errors)
    for unique_id in list_checkpoints(theirs):
        assert verify(theirs, unique_id).problems == ()


def test_a_full_disk_keeps_no_files_of_what_was_replaced_when_an_ended_save_waits(tmp_path: Path) -> None:
    """There is no room for what the new one's claim has to say of the ended one."""
    save_alone(state(0), tmp_path, 0)
    save = "d" * 16
    claim = tmp_path / f"0.{save}.claim"
    claim.write_text(json.dumps({"save": save, "replaces": None, "removes": ["e" * 16], "done": True}))
    published: list[str] = []

    def hook(operation: str, name: str) -> None:
        if published and operation == "publish":
            raise OSError(errno.ENOSPC, "No space left on device", name)
        published.extend([name] * ((operation, name) == ("publish", "0.metadata")))

    save_alone(state(1), FaultyStorage(tmp_path, hook), 0)
    assert len(data_files(tmp_path)) == 1
    check_after_later_saves(tmp_path, {0: 1})
