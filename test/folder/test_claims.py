"""Saves that freeze, die or replace each other: what their claims protect, and what later saves may remove."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import list_checkpoints, rebuild_metadata, verify
from paddle_dist_ckpt.control.ranks import Ranks
from paddle_dist_ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError
from paddle_dist_ckpt.folder import commit
from paddle_dist_ckpt.folder.claims import is_expired, records_of
from paddle_dist_ckpt.folder.delete import begin_clearing, begin_deletion, delete
from paddle_dist_ckpt.folder.lease import Lease
from paddle_dist_ckpt.folder.own_claim import OwnClaim
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.saving.rank_files import RankFiles
from paddle_dist_ckpt.storage import LocalStorage, local
from paddle_dist_ckpt.storage.base import FolderIdentity
from paddle_dist_ckpt.testing import FaultyStorage, NumpyAdapter, SimulatedRank, run_ranks
from paddle_dist_ckpt.testing.storage_conformance import in_threads
from paddle_dist_ckpt.wiring import save_with
from test.hooks import dies, does, raises
from test.interrupts import interrupted
from test.jobs import (
    Killed,
    age,
    age_claims,
    another_host,
    data_files,
    errors_of,
    files_in,
    load_whole,
    save_alone,
    save_on,
    saves_in,
    try_save,
    without_times,
)
from test.waiting import PATIENCE


def state(version: int) -> dict[str, Any]:
    return {"w": np.full(500, version), "n": version}


def check_holds(folder: Path, versions: dict[int, int]) -> None:
    """Assert that a folder has these versions under these ids, whole, and nothing else."""
    assert list_checkpoints(folder) == sorted(versions)
    for unique_id, version in versions.items():
        assert verify(folder, unique_id).problems == ()
        found = load_whole(folder, unique_id)
        assert found["n"] == version
        assert (found["w"] == version).all()
    assert len(files_in(folder)) == 2 * len(versions), sorted(files_in(folder))


def dead_save(folder: Path, unique_id: int | None, last: str) -> None:
    """Save version 99, and die at the first operation of this kind: what it has made by then stays."""
    errors_of(try_save([state(99)], FaultyStorage(folder, dies(last)), unique_id), Killed)


def never_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it be an error if a save waits for somebody who deletes its id."""

    def sleep(seconds: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr("paddle_dist_ckpt.folder.lease.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))


class FreezingStorage(LocalStorage):
    """A folder in which a save is frozen before it begins to commit, or before or after its last look at its claim."""

    def __init__(
        self,
        path: Path,
        before: Callable[[], Any] | None = None,
        after: Callable[[], Any] | None = None,
        early: Callable[[], Any] | None = None,
    ):
        super().__init__(path)
        self._before, self._after, self._early = before, after, early

    def publish(
        self, name: str, data: bytes, temporary: str, replace: bool, confirm: Callable[[], None] | None = None
    ) -> bool:
        """Publish, freezing on the way if it is a commit."""

        if self._early is not None and name.endswith(".metadata"):
            self._early()

        def freezing() -> None:
            if self._before is not None:
                self._before()
            if confirm is not None:
                confirm()
            if self._after is not None:
                self._after()

        return super().publish(name, data, temporary, replace, freezing if name.endswith(".metadata") else confirm)


# -- rebuilding beside saves


def test_the_files_of_a_save_that_is_about_to_commit_are_not_rebuilt(tmp_path: Path) -> None:
    refused: list[CheckpointNotFoundError] = []

    def hook(operation: str, name: str) -> None:
        if operation == "publish" and name == "0.metadata":
            with pytest.raises(CheckpointNotFoundError, match="being written") as caught:
                rebuild_metadata(tmp_path)
            refused.append(caught.value)

    save_on([state(1), {"more": np.arange(9)}], FaultyStorage(tmp_path, hook))
    assert refused
    assert list_checkpoints(tmp_path) == [0]


def test_a_rebuild_beside_a_save_that_fails_leaves_no_metadata_without_files(tmp_path: Path) -> None:
    refused: list[CheckpointNotFoundError] = []

    def hook(operation: str, name: str) -> None:
        if operation == "sync_file" and name.startswith("1_"):
            with pytest.raises(CheckpointNotFoundError) as caught:
                rebuild_metadata(tmp_path)
            refused.append(caught.value)
            raise OSError(errno.EIO, "injected")

    storages = [LocalStorage(tmp_path), FaultyStorage(tmp_path, hook)]
    results = try_save([state(1), {"more": np.arange(9)}], storages)
    assert all(isinstance(result, CheckpointError) for result in results)
    assert refused
    assert files_in(tmp_path) == {}


def test_the_files_of_a_replaced_checkpoint_that_wait_for_removal_are_not_rebuilt(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path, 5)
    dead_save(tmp_path, 5, last="delete")
    assert load_whole(tmp_path, 5)["n"] == 99
    with pytest.raises(CheckpointNotFoundError, match="to be removed"):
        rebuild_metadata(tmp_path)


def test_a_save_that_died_before_its_commit_has_replaced_nothing(tmp_path: Path) -> None:
    """What it would have replaced is rebuilt once its claim has expired, and survives the clean-up."""
    save_alone(state(1), tmp_path, 5)
    dead_save(tmp_path, 5, last="sync")
    original = without_times(tmp_path / "5.metadata")
    (tmp_path / "5.metadata").unlink()
    with pytest.raises(CheckpointError, match="is being saved to"):
        rebuild_metadata(tmp_path)
    age_claims(tmp_path)
    rebuild_metadata(tmp_path)
    assert (tmp_path / "5.metadata").read_bytes() == original
    assert not list(tmp_path.glob("*.claim"))

    (tmp_path / "5.metadata").unlink()
    save_alone(state(2), tmp_path, 6)
    assert not list(tmp_path.glob("*.claim"))
    rebuild_metadata(tmp_path)
    check_holds(tmp_path, {5: 1, 6: 2})


def test_what_a_claim_has_spoken_of_that_is_being_taken_over_is_not_rebuilt(tmp_path: Path) -> None:
    dead_save(tmp_path, 5, last="sync")
    age_claims(tmp_path)
    (dead,) = tmp_path.glob("*.claim")
    leases: list[Lease] = []

    def take_over(operation: str, name: str) -> None:
        if operation == "read" and name == dead.name and not leases:
            leases.append(Lease(LocalStorage(tmp_path), 7, automatic=True))

    with pytest.raises(CheckpointNotFoundError, match=r"the claim 7\..* says that it is"):
        rebuild_metadata(FaultyStorage(tmp_path, take_over))
    (lease,) = leases
    commit.remove_saves(lease.storage, lease.doomed)
    lease.end()
    assert files_in(tmp_path) == {}


def test_who_reads_what_claims_say_replaces_nothing_and_does_not_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_alone(state(1), tmp_path, 5)
    (tmp_path / "5.metadata").write_bytes(b"rubbish")
    dead = {"save": STUCK, "replaces": None, "removes": []}
    (tmp_path / f"5.{STUCK}.claim").write_text(json.dumps(dead))
    with pytest.raises(CheckpointNotFoundError, match="no complete save"):
        rebuild_metadata(tmp_path, save="0" * 16)
    assert "replacing" not in caplog.text


# -- interrupts


def test_a_save_that_is_interrupted_when_it_has_its_claim_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a thread would keep the claim fresh for as long as the process lives."""
    real = commit.begin

    def begin(*args: Any, **kwargs: Any) -> Lease:
        real(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(commit, "begin", begin)
    with pytest.raises(KeyboardInterrupt):
        save_with(Ranks.alone(), lambda: (state(1), NumpyAdapter()), tmp_path, None, False, SaveOptions())
    assert files_in(tmp_path) == {}
    assert "paddle_dist_ckpt claim" not in {thread.name for thread in threading.enumerate()}


# -- claims that cannot be removed

STUCK = "0123456789abcdef"


def stuck_claim(folder: Path, unique_id: int, **says: Any) -> FaultyStorage:
    """A folder in which another user's save has died, whose claim only that user may remove."""
    claim = folder / f"{unique_id}.{STUCK}.claim"
    claim.write_text(json.dumps({"save": STUCK, "replaces": None, "removes": [], **says}))
    age(claim)
    (folder / f"0_{unique_id}.{STUCK}.0.safetensors").write_bytes(b"theirs")
    return FaultyStorage(folder, raises("delete", claim.name, errno.EPERM))


def test_a_dead_claim_that_cannot_be_removed_is_in_nobodys_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The files of its save stay, and those that another dead save has left are removed."""
    save_alone(state(1), tmp_path, 1)
    dead_save(tmp_path, 7, last="sync")
    storage = stuck_claim(tmp_path, 5)
    age_claims(tmp_path)
    save_on([state(2)], storage, 2)
    assert caplog.text.count("the claim of a dead save is left, and with it the save's files") == 1
    save_on([state(3)], storage, 3)
    delete(storage, 1)
    theirs = {f"5.{STUCK}.claim", f"0_5.{STUCK}.0.safetensors"}
    assert theirs <= set(files_in(tmp_path))
    for name in theirs:
        (tmp_path / name).unlink()
    check_holds(tmp_path, {2: 2, 3: 3})


def test_a_dead_claim_that_may_not_be_read_is_left_with_what_it_says_to_whoever_may(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of another user, who lets nobody else read new files."""
    save_alone(state(1), tmp_path, 1)
    dead_save(tmp_path, 5, last="sync")
    (theirs,) = tmp_path.glob("5.*.claim")
    save_alone(state(2), tmp_path, 1)
    dead_save(tmp_path, 7, last="sync")
    age_claims(tmp_path)

    storage = FaultyStorage(tmp_path, raises("read", theirs.name, errno.EACCES))
    save_on([state(3)], storage, 2)
    assert caplog.text.count("the claim of a dead save is left, and with it the save's files: [Errno 13]") == 1
    assert [path.name for path in tmp_path.glob("*.claim")] == [theirs.name]
    assert [path.name[:4] for path in data_files(tmp_path)] == ["0_1.", "0_2.", "0_5."]
    delete(storage, 2)
    with pytest.raises(CheckpointNotFoundError):
        delete(storage, 5)
    save_on([state(4)], storage, 5)
    with pytest.raises(CheckpointError, match=r"has the claim of a dead save, 5\..*, which cannot be read or removed"):
        delete(storage, 5)
    age_claims(tmp_path)
    save_alone(state(5), tmp_path, 6)
    check_holds(tmp_path, {1: 2, 5: 4, 6: 5})


@pytest.mark.parametrize("unique_id", [2, 7])
def test_a_dead_claim_beside_a_damaged_metadata_is_not_taken_for_a_save_that_goes_on(
    tmp_path: Path, unique_id: int
) -> None:
    """Nobody can take it over until the `.metadata` is made again, and to wait would be of no use."""
    for number in (1, 2):
        save_alone(state(number), tmp_path, number)
    (tmp_path / "2.metadata").write_bytes(b"rubbish")
    claim = tmp_path / f"{unique_id}.{STUCK}.claim"
    claim.write_text(json.dumps({"save": STUCK, "replaces": None, "removes": []}))
    age(claim)
    with pytest.raises(CheckpointError, match=r"it is not known which files checkpoint 2 needs: .*2\.metadata is no"):
        delete(LocalStorage(tmp_path), 1)
    if unique_id == 2:
        with pytest.raises(
            CheckpointError, match=rf"the claim of a dead save, {claim.name}, .*2\.metadata is no"
        ) as error:
            rebuild_metadata(tmp_path)
        assert str(error.value).endswith("if nobody is at work there, remove that file")
        claim.unlink()
    rebuild_metadata(tmp_path)
    save_alone(state(3), tmp_path, 3)
    check_holds(tmp_path, {1: 1, 2: 2, 3: 3})


def test_claims_may_be_read_whatever_the_umask_is(tmp_path: Path) -> None:
    modes: dict[str, int] = {}

    def hook(operation: str, name: str) -> None:
        modes.update({path.name.rpartition(".")[2]: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()})

    before = os.umask(0o077)
    try:
        save_alone(state(1), FaultyStorage(tmp_path, hook), 1)
        delete(FaultyStorage(tmp_path, hook), 1)
    finally:
        os.umask(before)
    assert (modes["claim"], modes["metadata"], modes["safetensors"]) == (0o644, 0o600, 0o600)


def test_a_dead_claim_that_may_not_be_read_is_left_although_its_rewriting_may(tmp_path: Path) -> None:
    dead_save(tmp_path, 5, last="sync")
    (claim,) = tmp_path.glob("5.*.claim")
    (tmp_path / f"{claim.name}.tmp").write_bytes(b'{"save":')
    for path in tmp_path.glob("*.claim*"):
        age(path)

    save_on([state(2)], FaultyStorage(tmp_path, raises("read", claim.name, errno.EACCES)), 2)
    assert claim.exists()
    assert [path.name[:4] for path in data_files(tmp_path)] == ["0_2.", "0_5."]
    save_alone(state(3), tmp_path, 3)
    check_holds(tmp_path, {2: 2, 3: 3})


def test_a_claim_of_which_nothing_is_written_yet_may_be_of_a_save(tmp_path: Path) -> None:
    """Once it has its name, an empty one is of a deletion on a full disk."""
    name = f"0.{'d' * 16}.claim"
    for written, deletes in ((f"{name}.tmp", False), (name, True)):
        (tmp_path / written).touch()
        _, record = records_of(LocalStorage(tmp_path))[written]
        assert (record.may_replace, record.deletes) == (not deletes, deletes)


@pytest.mark.parametrize(
    ("says", "may_replace"),
    [
        ({"of_id": 5}, True),
        ({}, True),
        ({"of_id": 6}, False),
        ({"of_id": 5, "automatic": True}, False),
        ({"of_id": 5, "done": True}, False),
        ({"of_id": 5, "deletes": True}, False),
    ],
)
def test_what_was_taken_over_hinders_only_where_it_may_yet_replace_something(
    tmp_path: Path, says: dict[str, Any], may_replace: bool
) -> None:
    """By a claim that says of a save that it could not be stopped: so long nobody deletes what it would replace."""
    save_alone(state(5), tmp_path, 5)
    taken = [{"save": "e" * 16, "replaces": None, "removes": [], **says}]
    left = {"save": "d" * 16, "replaces": None, "removes": [], "deletes": True, "done": True, "passes_on": True}
    (tmp_path / f"7.{'d' * 16}.claim").write_text(json.dumps({**left, "taken": taken}))
    with pytest.raises(CheckpointError, match="may yet be replaced") if may_replace else nullcontext():
        delete(LocalStorage(tmp_path), 5)
    assert list_checkpoints(tmp_path) == ([5] if may_replace else [])


def test_a_claim_that_may_not_be_read_may_be_of_a_save_that_replaces_ours(tmp_path: Path) -> None:
    """A confirms, B is published and ends, A is published: B has left its claim, for A does not know of it."""
    confirmed, ended, own = threading.Event(), threading.Event(), set[str]()

    class Blind(FreezingStorage):
        def publish(self, name: str, *args: Any, **options: Any) -> bool:
            own.add(name)
            return super().publish(name, *args, **options)

        def read(self, name: str, limit: int | None = None) -> bytes:
            if ".claim" in name and name not in own:
                raise PermissionError(errno.EACCES, "Permission denied", name)
            return super().read(name, limit)

    def frozen() -> None:
        confirmed.set()
        assert ended.wait(PATIENCE)

    first = threading.Thread(target=save_alone, args=(state(1), FreezingStorage(tmp_path, after=frozen), 1))

    def begin_the_first() -> None:
        first.start()
        assert confirmed.wait(PATIENCE)

    save_alone(state(2), Blind(tmp_path, after=begin_the_first), 1)
    ended.set()
    first.join(PATIENCE)
    for claim in tmp_path.glob("*.claim"):
        age(claim)
    save_alone(state(3), tmp_path, 5)
    check_holds(tmp_path, {1: 1, 5: 3})


def test_claims_do_not_multiply_what_cannot_be_removed(tmp_path: Path) -> None:
    """An immutable file, say: each save passes on what is to be removed, until it can be."""
    save_alone(state(0), tmp_path, 1)
    (stuck,) = data_files(tmp_path)

    sizes = []
    for version in range(12):
        save_alone(state(version), FaultyStorage(tmp_path, raises("delete", stuck.name, errno.EPERM)), 1)
        assert len(data_files(tmp_path)) == 2, "one that cannot be removed keeps no other"
        sizes.append(sum(claim.stat().st_size for claim in tmp_path.glob("*.claim")))
        age_claims(tmp_path)
    assert max(sizes) < 60 * len(sizes), "no more than the ids of each save"
    save_alone(state(99), tmp_path, 1)
    check_holds(tmp_path, {1: 99})


def test_nobody_waits_for_a_dead_deletion_whose_claim_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_wait(monkeypatch)
    save_on([state(1)], stuck_claim(tmp_path, 5, deletes=True), 5)
    assert load_whole(tmp_path, 5)["n"] == 1


def test_what_a_dead_claim_that_cannot_be_removed_speaks_of_stays_if_the_next_save_dies(tmp_path: Path) -> None:
    """Its claim has spoken of these files before it is known that the other cannot be removed."""
    storage = stuck_claim(tmp_path, 5)
    errors_of(try_save([state(1)], FaultyStorage(tmp_path, dies("delete", f"*{STUCK}*"))), Killed)
    age_claims(tmp_path)
    save_on([state(2)], storage, 2)
    assert {name for name in files_in(tmp_path) if STUCK in name} == {f"5.{STUCK}.claim", f"0_5.{STUCK}.0.safetensors"}
    assert len(list(tmp_path.glob("*.claim"))) == 1


@pytest.mark.parametrize("automatic", [True, False])
def test_a_checkpoint_that_a_frozen_save_may_still_replace_is_not_deleted(tmp_path: Path, automatic: bool) -> None:
    save_alone(state(1), tmp_path, 1)
    storage = stuck_claim(tmp_path, 1, automatic=automatic)
    if automatic:
        delete(storage, 1)
    else:
        with pytest.raises(
            CheckpointError, match=r"has the claim of a dead save, 1\..*, which cannot be read or removed"
        ):
            delete(storage, 1)
    assert list_checkpoints(tmp_path) == ([] if automatic else [1])
    assert len(list(tmp_path.glob("*.claim"))) == 1


# -- deletions that are killed


@pytest.mark.parametrize("committed", [True, False])
def test_nobody_waits_for_who_was_killed_while_only_files_were_left_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    if committed:
        save_alone(state(1), tmp_path, 7)
        begin_deletion(LocalStorage(tmp_path), 7, *saves_in(tmp_path))
    else:
        dead_save(tmp_path, 7, "sync_file")
        age_claims(tmp_path)
        begin_clearing(LocalStorage(tmp_path), 7, of_checkpoint=False)
    assert [path.suffix for path in tmp_path.iterdir()].count(".safetensors") == 1
    never_wait(monkeypatch)
    save_alone(state(2), tmp_path, 7)
    assert load_whole(tmp_path, 7)["n"] == 2


# -- deletions that are refused


@pytest.mark.parametrize("committed", [True, False])
def test_nobody_waits_for_a_deletion_that_was_refused_when_it_had_taken_over_a_dead_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """Its claim has to stay, for it speaks of what the dead save has left."""
    if committed:
        save_alone(state(1), tmp_path, 7)
    dead_save(tmp_path, 7, "sync_file")
    (dead,) = tmp_path.glob("*.claim")
    refused: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "sync_file" and not refused:
            age(dead)
            with pytest.raises(CheckpointError, match="is being saved to") as caught:
                delete(LocalStorage(tmp_path), 7) if committed else begin_clearing(LocalStorage(tmp_path), 7, False)
            refused.append(str(caught.value))

    never_wait(monkeypatch)
    save_alone(state(2), FaultyStorage(tmp_path, hook), 7)
    assert refused
    assert not dead.exists()
    check_holds(tmp_path, {7: 2})


def test_the_claim_of_a_deletion_that_was_refused_does_not_speak_of_the_checkpoint(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path, 7)
    dead_save(tmp_path, 8, "sync_file")
    (dead,) = tmp_path.glob("*.claim")
    other = Lease(LocalStorage(tmp_path), 9, automatic=False)
    age(dead)
    with pytest.raises(CheckpointError, match="is being saved to"):
        delete(LocalStorage(tmp_path), 7)
    other.end()
    assert len(list(tmp_path.glob("7.*.claim"))) == 1
    (tmp_path / "7.metadata").unlink()
    assert rebuild_metadata(tmp_path).unique_id == 7
    age_claims(tmp_path)
    save_alone(state(2), tmp_path, 9)
    check_holds(tmp_path, {7: 1, 9: 2})


# -- frozen saves


def test_a_save_whose_folder_is_removed_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    (error,) = try_save([state(1)], FreezingStorage(folder, before=lambda: shutil.rmtree(folder)), 7)
    assert isinstance(error, CheckpointError)
    assert "is gone, and the folder with it: somebody has removed it meanwhile" in str(error)


@pytest.mark.parametrize("unique_id", [None, 3])
@pytest.mark.parametrize("when", ["early", "before", "after"])
def test_a_save_that_froze_at_its_commit_and_was_taken_for_dead_does_not_commit(
    tmp_path: Path, when: str, unique_id: int | None
) -> None:
    thawed: list[bool] = []

    def freeze() -> None:
        age_claims(tmp_path)
        save_alone(state(2), tmp_path, 7)
        thawed.append(True)

    (error,) = try_save([state(1)], FreezingStorage(tmp_path, **{when: freeze}), unique_id)
    assert thawed
    assert isinstance(error, CheckpointError)
    assert str(tmp_path) in str(error)
    assert "is gone: another save or export took this one, which was silent, for dead" in str(error)
    check_holds(tmp_path, {7: 2})


@pytest.mark.parametrize("when", ["before", "at the rename"])
def test_a_claim_that_was_taken_over_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    first = Lease(LocalStorage(tmp_path), 3, automatic=True)
    real = local.rename

    def take_over() -> None:
        for claim in tmp_path.glob(f"{first.name}*"):
            age(claim)
        second.append(Lease(LocalStorage(tmp_path), 4, automatic=True))

    def rename(source: Path, target: Path) -> None:
        if target.name == first.name and not second:
            take_over()
        real(source, target)

    second: list[Lease] = []
    monkeypatch.setattr(local, "rename", rename)
    if when == "before":
        take_over()
    with pytest.raises(
        CheckpointError, match=r"the claim .*/3\..*\.claim is gone: another save or export took this one"
    ):
        first.take_on("0123456789abcdef")
    first.stop()
    assert first.save_id in second[0].doomed
    assert not list(tmp_path.glob(f"*{first.save_id}*"))
    second[0].end()


@pytest.mark.parametrize("silent", [False, True])
def test_a_dead_claim_that_is_being_rewritten(tmp_path: Path, silent: bool) -> None:
    """Its save writes it between the removal of the claim and that of its temporary name, perhaps for the last time."""
    first = Lease(LocalStorage(tmp_path), 3, automatic=True)
    first.stop()
    claim = tmp_path / first.name
    age(claim)
    written: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "names" and not written and not claim.exists():
            written.append(name)
            claim.write_bytes(b"{}")
            if silent:
                age(claim)

    second = Lease(FaultyStorage(tmp_path, hook), 4, automatic=True)
    assert written
    assert second.doomed == []
    assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name}
    second.end()
    third = Lease(LocalStorage(tmp_path), 5, automatic=True)
    assert third.doomed == ([first.save_id] if silent else [])
    assert first.is_held() is not silent
    third.end()


def test_a_dead_claim_that_begins_to_be_rewritten_when_it_was_read_is_left(tmp_path: Path) -> None:
    first = Lease(LocalStorage(tmp_path), 3, automatic=True)
    first.stop()
    age(tmp_path / first.name)
    rewritten = tmp_path / f"{first.name}.tmp"
    second = Lease(FaultyStorage(tmp_path, does("read", first.name, rewritten.touch)), 4, automatic=True)
    assert rewritten.exists()
    assert first.is_held()
    assert second.doomed == []
    second.end()


def test_a_deletion_that_thaws_while_it_is_taken_over_is_not_taken_for_dead(tmp_path: Path) -> None:
    """Its claim is too old until just before it removes the `.metadata`; what takes it over replaces that meanwhile."""
    save_alone(state(0), tmp_path, 0)
    taking: list[str] = []
    taker = threading.Thread(target=lambda: save_alone(state(1), FaultyStorage(tmp_path, waits), 0))
    waiting, confirmed = threading.Event(), threading.Event()

    def waits(operation: str, name: str) -> None:
        if operation == "publish" and name.endswith(".claim"):
            taking.append(name)
            if len(taking) == 2:
                waiting.set()
                assert confirmed.wait(PATIENCE)

    class Slow(LocalStorage):
        claimed = 0

        def publish(self, *args: Any, **kwargs: Any) -> bool:
            is_published = super().publish(*args, **kwargs)
            self.claimed += 1
            return is_published

        def delete(self, name: str) -> None:
            if name == "0.metadata":
                confirmed.set()
                taker.join(2)  # it has to wait for this one
                assert taker.is_alive()
            super().delete(name)

    def freezes(operation: str, name: str) -> None:
        if slow.claimed == 2 and operation in ("touch", "modified") and not taking:
            age_claims(tmp_path)
            taker.start()
            assert waiting.wait(PATIENCE)

    storage = FaultyStorage(tmp_path, freezes)
    storage._inner = slow = Slow(tmp_path)
    delete(storage, 0)
    taker.join(PATIENCE)
    check_holds(tmp_path, {0: 1})


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("before", ["publish", "names", "delete"])
def test_a_save_that_thaws_while_it_is_taken_over(tmp_path: Path, before: str, silent: bool) -> None:
    """What it has written since is not forgotten, even if it is silent again, or it finds its claim gone."""
    first = Lease(LocalStorage(tmp_path), 3, automatic=True)
    first.stop()
    age(tmp_path / first.name)
    published: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "publish":
            published.append(name)
        if len(published) == 2 and operation == before and "thawed" not in published:
            published.append("thawed")
            first.take_on("0123456789abcdef")
            if silent:
                age(tmp_path / first.name)

    second = Lease(FaultyStorage(tmp_path, hook), 4, automatic=True)
    assert "thawed" in published
    if before == "delete":
        assert not first.is_held()
        assert second.doomed == [first.save_id]
    else:
        assert first.is_held()
        assert second.doomed == []
        assert "0123456789abcdef" in (tmp_path / first.name).read_text()
    second.end()


@pytest.mark.parametrize("damaged", [False, True])
def test_what_a_folder_of_another_host_has_committed_is_not_removed_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bool
) -> None:
    """Somebody has collected the files of all hosts there, to archive them."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_on([state(0), {"more": np.arange(9)}], [ours, another_host(theirs, 1)], 5)
    for path in ours.iterdir():
        shutil.copy2(path, theirs)
    if damaged:
        (theirs / "6.metadata").write_bytes(b"rubbish")
    before = files_in(theirs)
    save_on([state(1), {"more": np.arange(9)}], [ours, another_host(theirs, 1)], 5)
    assert verify(theirs, 5).ok
    assert load_whole(theirs, 5)["n"] == 0
    assert before.items() <= files_in(theirs).items()
    assert ("files of the replaced save are left to a later one" in caplog.text) == damaged
    if damaged:
        (theirs / "6.metadata").unlink()
        age_claims(ours)
    (theirs / "5.metadata").unlink()  # from here on the files are of no use
    save_on([state(2), {"more": np.arange(9)}], [ours, another_host(theirs, 1)], 5)
    assert len(data_files(theirs)) == (1 if damaged else 3), "what was left by mistake is removed later"


def test_a_metadata_alone_in_the_folder_of_another_host_keeps_nothing(tmp_path: Path) -> None:
    """Somebody gives it to all hosts, so that each may be the coordinator's."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for version in range(3):
        save_on([state(version), {"more": np.arange(9)}], [ours, another_host(theirs, 1)], 5)
        shutil.copy2(ours / "5.metadata", theirs)
        assert len(data_files(ours)) == len(data_files(theirs)) == 1


@pytest.mark.parametrize("unique_id", [None, 0])
def test_a_save_that_commits_while_it_is_taken_for_dead_keeps_its_files(tmp_path: Path, unique_id: int | None) -> None:
    """It thaws after its claim was removed, and before its temporary name is."""
    frozen, thaw = threading.Event(), threading.Event()

    def freeze() -> None:
        frozen.set()
        thaw.wait(PATIENCE)

    results: list[Any] = []

    def save_frozen() -> None:
        results.extend(try_save([state(1)], FreezingStorage(tmp_path, after=freeze), unique_id))

    def hook(operation: str, name: str) -> None:
        if operation == "delete" and name.endswith(".metadata.tmp"):
            thaw.set()
            thread.join(PATIENCE)

    thread = threading.Thread(target=save_frozen)
    thread.start()
    try:
        assert frozen.wait(PATIENCE)
        age_claims(tmp_path)
        save_alone(state(2), FaultyStorage(tmp_path, hook), 7)
    finally:
        thaw.set()
        thread.join(PATIENCE)
    assert results[0].unique_id == 0
    check_holds(tmp_path, {0: 1, 7: 2})


# -- saves that replace each other


@pytest.mark.parametrize("last", ["create", "sync_file"])
def test_a_dead_claim_that_is_dated_ahead_counts_from_when_it_is_found(tmp_path: Path, last: str) -> None:
    dead_save(tmp_path, None, last)
    (claim,) = tmp_path.glob("*.claim")
    age(claim, -30 * 86400)
    save_alone(state(1), tmp_path)
    assert claim.exists(), "it might be that of a save that lives"
    assert abs(claim.stat().st_mtime - (tmp_path / "0.metadata").stat().st_mtime) < PATIENCE
    age(claim, 299)
    save_alone(state(2), tmp_path)
    assert claim.exists()
    age(claim, 2)
    save_alone(state(3), tmp_path)
    check_holds(tmp_path, {0: 1, 1: 2, 2: 3})


@pytest.mark.parametrize("seconds", [600, 30 * 86400])
def test_a_save_whose_claim_is_dated_ahead_loses_nothing(tmp_path: Path, seconds: float) -> None:
    """As where hosts set the times, and the clock of one is ahead."""
    dates = list[float]()

    def others() -> None:
        (claim,) = tmp_path.glob("5.*.claim")
        for version in (1, 2):
            age(claim, -seconds)
            dates.append(claim.stat().st_mtime)
            save_alone(state(version), tmp_path, 0)
            dates.append(claim.stat().st_mtime)

    save_alone(state(9), FreezingStorage(tmp_path, before=others), 5)
    check_holds(tmp_path, {0: 2, 5: 9})
    assert (dates[0] == dates[1]) == (seconds == 600), "so little is left as it is"


class ServersClock(LocalStorage):
    """What is written here has the time of a server, and what is touched that of the host."""

    ahead = 0.0

    def publish(self, name: str, *args: Any, **more: Any) -> bool:
        done = super().publish(name, *args, **more)
        os.utime(self._root / name, (time.time() + self.ahead,) * 2)
        return done


@pytest.mark.parametrize("ahead", [-900.0, 900.0])
def test_a_save_lives_where_the_servers_clock_is_another_than_the_hosts(tmp_path: Path, ahead: float) -> None:
    storage = ServersClock(tmp_path)
    storage.ahead = ahead
    lease = Lease(storage, 5, automatic=False)
    lease._claim.refresh(lambda: None)
    save_on([state(1)], storage, 7)
    assert lease.is_held()
    lease.mark_done()
    save_on([state(2)], storage, 7)
    assert lease.is_held()
    lease.end()
    check_holds(tmp_path, {7: 2})


def test_a_claim_that_cannot_be_dated_anew_stops_nothing(tmp_path: Path) -> None:
    dead_save(tmp_path, None, "create")
    (claim,) = tmp_path.glob("*.claim")
    age(claim, -30 * 86400)

    save_alone(state(1), FaultyStorage(tmp_path, raises("touch", claim.name, errno.EPERM)))
    assert list_checkpoints(tmp_path) == [0]
    assert claim.exists()


def test_two_saves_that_replace_one_id_leave_the_later_one(tmp_path: Path) -> None:
    """The second one commits when the first is about to."""
    save_alone(state(0), tmp_path, 5)

    second = does("publish", "5.metadata", lambda: save_alone(state(1), tmp_path, 5))
    save_alone(state(2), FaultyStorage(tmp_path, second), 5)
    check_holds(tmp_path, {5: 2})


@pytest.mark.parametrize("at", [".claim", ".metadata"])
def test_what_was_replaced_at_the_last_moment_is_removed_after_a_crash_too(tmp_path: Path, at: str) -> None:
    """Another save comes before this one has its claim, or before it is committed."""
    save_alone(state(0), tmp_path, 5)
    done: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "publish" and name.endswith(at) and not done:
            save_alone(state(1), tmp_path, 5)
            done.append("meeting")
        elif done == ["meeting"] and operation == "delete":
            done.append("death")
        if "death" in done:
            raise Killed

    try_save([state(2)], FaultyStorage(tmp_path, hook), 5)
    assert len(data_files(tmp_path)) == 2
    age_claims(tmp_path)
    save_alone(state(3), tmp_path, 6)
    check_holds(tmp_path, {5: 2, 6: 3})


def test_a_clean_up_that_fails_on_another_host_is_left_to_a_later_save(tmp_path: Path) -> None:
    """The claim is no longer kept fresh, or else it would stay as long as the process lives."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    states = [state(0), {"more": np.arange(9)}]
    save_on(states, [ours, another_host(theirs, 1)], 5)

    refusing = FaultyStorage(theirs, raises("delete", "*.safetensors", errno.EIO), FolderIdentity("host1", 1, 1))
    threads = set(threading.enumerate())
    save_on(states, [ours, refusing], 5)
    assert len(data_files(theirs)) == 2
    for thread in set(threading.enumerate()) - threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} keeps running"
    age_claims(ours)
    save_on(states, [ours, another_host(theirs, 1)], 6)
    assert len(data_files(ours)) == len(data_files(theirs)) == 2
    assert not list(ours.glob("*.claim*"))


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_save_that_replaces_another_without_knowing_leaves_nothing_of_it(tmp_path: Path, hosts: int) -> None:
    """The other one begins, commits and ends between the look of this one at the id and its commit."""
    folders = [tmp_path / str(i) for i in range(hosts)]
    rest = [another_host(folder, i) for i, folder in enumerate(folders)][1:]
    more = [{"more": np.arange(9)}] * (hosts - 1)
    save_on([state(0), *more], [folders[0], *rest], 5)
    met: list[bool] = []

    def meet() -> None:
        save_on([state(1), *more], [folders[0], *rest], 5)
        met.append(bool(list(folders[0].glob("*.claim"))))

    save_on([state(2), *more], [FreezingStorage(folders[0], after=meet), *rest], 5)
    assert met == [True], "the first to end has left its claim to the other"
    (save_id,) = {path.name.split(".")[1] for folder in folders for path in data_files(folder)}
    assert save_id in (folders[0] / "5.metadata").read_text()
    assert not [path for folder in folders for path in folder.glob("*.claim*")]


@pytest.mark.parametrize("turn", range(3))
def test_saves_that_confirm_together_leave_one_and_at_most_claims(tmp_path: Path, turn: int) -> None:
    save_alone(state(0), tmp_path, 5)
    together = threading.Barrier(3)
    storages = [FreezingStorage(tmp_path, after=lambda: together.wait(PATIENCE) and None) for _ in range(3)]
    done = in_threads(3, lambda i: save_alone(state(i + 1), storages[i], 5))
    assert [report.unique_id for report in done] == [5, 5, 5]
    assert len(data_files(tmp_path)) == 1, "the last to end has seen the others' marks"
    assert not list(tmp_path.glob("*.claim*"))
    assert load_whole(tmp_path, 5)["n"] in (1, 2, 3)


def test_a_save_that_is_replaced_just_before_it_looks_for_others_leaves_nothing(tmp_path: Path) -> None:
    save_alone(state(0), tmp_path, 5)
    before = (tmp_path / "5.metadata").read_bytes()
    frozen, thaw = threading.Event(), threading.Event()

    def freeze() -> None:
        frozen.set()
        assert thaw.wait(PATIENCE)

    def hook(operation: str, name: str) -> None:
        if operation == "names" and not thaw.is_set() and (tmp_path / "5.metadata").read_bytes() != before:
            thaw.set()
            other.join(PATIENCE)

    other = threading.Thread(target=save_alone, args=(state(2), FreezingStorage(tmp_path, after=freeze), 5))
    other.start()
    try:
        assert frozen.wait(PATIENCE)
        save_alone(state(1), FaultyStorage(tmp_path, hook), 5)
        assert thaw.is_set()
    finally:
        thaw.set()
        other.join(PATIENCE)
    check_holds(tmp_path, {5: 2})


def test_what_replaces_a_save_leaves_its_claim_to_a_third_one_that_replaces_it_in_its_turn(tmp_path: Path) -> None:
    """The third has confirmed before both what it replaces, so that claim alone tells it of the second."""
    save_alone(state(0), tmp_path, 5)
    before = (tmp_path / "5.metadata").read_bytes()
    frozen, thaw = threading.Event(), threading.Event()
    replaced: list[bool] = []

    def freeze() -> None:
        frozen.set()
        assert thaw.wait(PATIENCE)

    def hook(operation: str, name: str) -> None:
        if operation == "names" and not replaced and (tmp_path / "5.metadata").read_bytes() != before:
            replaced.append(True)
            save_alone(state(2), tmp_path, 5)

    third = threading.Thread(target=save_alone, args=(state(3), FreezingStorage(tmp_path, after=freeze), 5))
    third.start()
    try:
        assert frozen.wait(PATIENCE)
        save_alone(state(1), FaultyStorage(tmp_path, hook), 5)
        assert replaced
    finally:
        thaw.set()
        third.join(PATIENCE)
    check_holds(tmp_path, {5: 3})


def test_what_waits_for_a_save_that_dies_is_removed_later(tmp_path: Path) -> None:
    """Both have confirmed what they replace; one commits and ends, the other commits over it and dies."""
    save_alone(state(0), tmp_path, 5)
    met: list[bool] = []

    def meet() -> None:
        save_alone(state(1), tmp_path, 5)
        met.append(True)

    def hook(operation: str, name: str) -> None:
        if met and operation != "publish":
            raise Killed

    storage = FreezingStorage(tmp_path, after=meet)
    dying = FaultyStorage(tmp_path, hook)
    dying._inner = storage
    try_save([state(2)], dying, 5)
    assert len(data_files(tmp_path)) == 2
    age_claims(tmp_path)
    save_alone(state(3), tmp_path, 6)
    check_holds(tmp_path, {5: 2, 6: 3})


def test_what_a_dead_save_has_left_prevents_no_save_and_is_not_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (5, 4, 9):
        dead_save(tmp_path, number, last="sync")
    age_claims(tmp_path)

    for number in (6, 7):
        save_alone(state(number), FaultyStorage(tmp_path, raises("delete", "0_5.*", errno.EPERM)), number)
        assert [path.name[:4] for path in data_files(tmp_path)] == ["0_5.", *(f"0_{n}." for n in range(6, number + 1))]
        age_claims(tmp_path)
    assert sum("left to a later save" in record.getMessage() for record in caplog.records) == 2
    (tmp_path / "7.metadata").unlink()
    assert rebuild_metadata(tmp_path).unique_id == 7, "no claim speaks of what is committed"
    save_alone(state(8), tmp_path, 8)
    check_holds(tmp_path, {6: 6, 7: 7, 8: 8})


def test_what_a_rank_makes_after_the_others_have_given_up_is_removed_later(tmp_path: Path) -> None:
    """It does not know of that, and dies when it has made its file."""
    over, dead = threading.Event(), list[bool]()

    def die(operation: str, name: str) -> None:
        if dead:
            raise Killed
        if operation == "create":
            assert over.wait(PATIENCE)
            dead.append(True)

    hang = raises("sync_file", "*", CheckpointTimeoutError("it hangs"))

    def work(rank: SimulatedRank) -> None:
        try:
            rank.save([state(1), {"more": np.arange(9)}][rank.rank], FaultyStorage(tmp_path, [hang, die][rank.rank]), 5)
        finally:
            over.set()

    run_ranks(2, work)
    assert [path.name[:4] for path in data_files(tmp_path)] == ["1_5."]
    age_claims(tmp_path)
    save_alone(state(2), tmp_path, 7)
    check_holds(tmp_path, {7: 2})


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_a_rank_makes_when_its_save_was_taken_over_is_removed_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: int
) -> None:
    """It was frozen when it had written; the others have given up, and nobody will look for its file any more."""
    over, stopped, write = threading.Event(), threading.Event(), RankFiles._write

    def write_and_freeze(files: RankFiles) -> Any:
        written = write(files)
        if files._context.session.rank == frozen and not stopped.is_set():
            stopped.set()
            assert over.wait(PATIENCE)
            for file in files._files:  # as if they were made only now, when who has taken over has looked
                (tmp_path / file.name).touch()
        return written

    def hang(operation: str, name: str) -> None:
        if operation == "sync_file":
            assert stopped.wait(PATIENCE)
            raise CheckpointTimeoutError("it hangs")

    def work(rank: SimulatedRank) -> None:
        part = [state(1), {"more": np.arange(9)}][rank.rank]
        try:
            rank.save(part, tmp_path if rank.rank == frozen else FaultyStorage(tmp_path, hang), 5)
        finally:
            if rank.rank != frozen:
                age_claims(tmp_path)
                save_alone(state(2), tmp_path, 7)
                over.set()

    monkeypatch.setattr(RankFiles, "_write", write_and_freeze)
    errors_of(run_ranks(2, work), CheckpointError)
    assert [path.name[:4] for path in data_files(tmp_path)] == ["0_7."]
    for claim in tmp_path.glob("*.claim"):  # which speaks of what other ranks may have made
        age(claim)
    save_alone(state(3), tmp_path, 8)
    check_holds(tmp_path, {7: 2, 8: 3})


def test_what_a_dead_save_had_replaced_is_removed_if_that_is_replaced_in_its_turn(tmp_path: Path) -> None:
    """Its own claim does not tell any more that it was ever committed."""
    save_alone(state(0), tmp_path, 5)
    dead_save(tmp_path, 5, last="delete")
    save_alone(state(1), tmp_path, 5)
    assert len(data_files(tmp_path)) == 1
    age_claims(tmp_path)
    save_alone(state(2), tmp_path, 6)
    check_holds(tmp_path, {5: 1, 6: 2})


def test_a_claim_is_kept_fresh_while_its_save_looks_for_dead_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow disk that takes long, and others would take the save for dead."""
    monkeypatch.setattr("paddle_dist_ckpt.folder.own_claim.FRESH_EVERY", 0.01)
    refreshed, seen = threading.Event(), list[bool]()

    def hook(operation: str, name: str) -> None:
        if operation == "touch":
            refreshed.set()
        if operation == "modified" and not seen:
            seen.append(refreshed.wait(PATIENCE))

    save_on([state(1)], FaultyStorage(tmp_path, hook))
    assert seen == [True]


def test_a_claim_that_could_not_be_refreshed_once_is_refreshed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.folder.own_claim.FRESH_EVERY", 0.01)
    failed, refreshed = threading.Event(), threading.Event()

    def hook(operation: str, name: str) -> None:
        if operation == "touch" and not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, "injected")
        if operation == "touch":
            refreshed.set()

    lease = Lease(FaultyStorage(tmp_path, hook), 3, automatic=True)
    try:
        assert refreshed.wait(PATIENCE)
    finally:
        lease.end()
    assert failed.is_set()


def test_a_save_that_cannot_look_for_dead_ones_leaves_no_claim(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_on([state(1)], FaultyStorage(tmp_path, raises("modified", "*", errno.EIO)))
    assert not files_in(tmp_path)


def test_an_automatic_save_that_got_a_later_id_and_was_replaced_there_leaves_nothing(tmp_path: Path) -> None:
    """Its claim is called by the id that it had set out for."""

    def take_its_id() -> None:
        save_alone(state(1), tmp_path, 0)

    def replace_it() -> None:
        save_alone(state(2), FreezingStorage(tmp_path, before=take_its_id), None)  # becomes 1

    save_alone(state(3), FreezingStorage(tmp_path, after=replace_it), 1)
    check_holds(tmp_path, {0: 1, 1: 3})


def test_a_save_that_was_silent_has_a_fresh_claim_when_it_commits(tmp_path: Path) -> None:
    """Who has found it too old looks once more before it is removed."""
    lease = Lease(LocalStorage(tmp_path), 0, automatic=True)
    age_claims(tmp_path)
    lease.confirm()
    assert not is_expired(lease.storage, lease.name, time.time())
    lease.end()


def test_a_temporary_name_of_a_claim_that_stayed_when_it_was_rewritten_goes_with_it(tmp_path: Path) -> None:
    lease = Lease(LocalStorage(tmp_path), 0, automatic=True)
    (tmp_path / f"{lease.name}.tmp").touch()
    lease.end()
    assert list(tmp_path.iterdir()) == []


def test_a_claim_that_cannot_be_kept_fresh_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started. The save fails as others do, and the next one finds nothing of it."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "paddle_dist_ckpt claim":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(CheckpointError, match=r"the claim .* cannot be kept fresh: can't start new thread"):
            save_alone({"w": np.ones(3)}, tmp_path)
    assert list(tmp_path.iterdir()) == []
    save_alone({"w": np.ones(3)}, tmp_path)


def test_a_claim_can_be_removed_after_an_interrupt_wherever_it_came(tmp_path: Path) -> None:
    """What stops its refreshing must not be left locked: the clean-up would wait for it, and so would other ranks."""
    storage, done = LocalStorage(tmp_path), list[bool]()

    def work() -> None:
        came = True
        for number in itertools.count():
            claim = OwnClaim(storage, f"0.{number:016x}.claim")
            claim.publish(b"{}")
            claim.keep_fresh(lambda: None)
            came = interrupted(number, claim.stop)
            claim.remove()
            if not came:
                break
        done.append(True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert done
    assert storage.names() == []


def test_a_claim_that_cannot_be_refreshed_holds_no_commit_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_alone(state(1), FaultyStorage(tmp_path, raises("touch", "*.claim", errno.EIO)), 1)
    assert re.search(r"the claim 1\.[0-9a-f]{16}\.claim could not be refreshed: .*Input/output error", caplog.text)
    assert verify(tmp_path, 1).ok
    assert not list(tmp_path.glob("*.claim"))
