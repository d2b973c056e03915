"""Rebuilds, deletions and copies, and what others do between two of their steps: nothing is lost, mixed or left."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paddle_dist_ckpt import list_checkpoints, read_metadata
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError, DurabilityUnknownError
from paddle_dist_ckpt.files.names import claim_name
from paddle_dist_ckpt.folder import copy as copy_module
from paddle_dist_ckpt.folder import rebuild as rebuild_module
from paddle_dist_ckpt.folder.claims import Claim
from paddle_dist_ckpt.folder.copy import copy
from paddle_dist_ckpt.folder.delete import begin_deletion, delete
from paddle_dist_ckpt.folder.rebuild import rebuild
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing import FaultyStorage
from test.folder.test_claims import FreezingStorage, check_holds, state
from test.jobs import Killed, age_claims, data_files, files_in, save_alone, save_on, try_save
from test.waiting import PATIENCE


def once(work: Callable[[], object]) -> Callable[[], None]:
    """Does this when it is called first."""
    left = [work]

    def call() -> None:
        if left:
            left.pop()()

    return call


def when(operation: str, of: Callable[[str], bool], work: Callable[[], object]) -> Callable[[str, str], None]:
    """A hook that does this once, before such an operation."""
    call = once(work)
    return lambda done, name: call() if done == operation and of(name) else None


def is_data(name: str) -> bool:
    return name.endswith(".safetensors")


def check_left(folder: Path, versions: dict[int, int]) -> None:
    """Nothing but these checkpoints is left when claims have expired, and somebody has saved."""
    for number in (90, 91):
        if list(folder.glob("*.claim")):
            age_claims(folder)
        save_alone(state(number), folder, 99)
    check_holds(folder, {**versions, 99: 91})


class RefusingStorage(FreezingStorage):
    """A folder in which no data file can be removed, or whose save dies when it tries to."""

    def __init__(self, path: Path, after: Callable[[], None], dies: bool) -> None:
        super().__init__(path, after=after)
        self._dies, self._dead = dies, False

    def delete(self, name: str) -> None:
        self._check()
        if is_data(name):
            self._dead = self._dies
            self._check()
            raise OSError(errno.EIO, "Input/output error", name)
        super().delete(name)

    def publish(self, *args: Any, **kwargs: Any) -> bool:
        self._check()
        return super().publish(*args, **kwargs)

    def _check(self) -> None:
        if self._dead:
            raise Killed


def rebuild_with(folder: Path, meanwhile: Callable[[Callable[[], None]], object]) -> None:
    """Rebuild, and do this when all is verified: it is given what then goes on, which raises if the rebuild does."""
    publish = rebuild_module._publish

    def publishing(*args: Any) -> None:
        patch.undo()
        meanwhile(lambda: publish(*args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuild_module, "_publish", publishing)
        rebuild(LocalStorage(folder), None, False)


def test_what_a_save_replaces_and_is_just_removing_is_not_rebuilt(tmp_path: Path) -> None:
    """A rebuild lists the files of a save before that is committed, and looks at claims when it has ended."""
    save_alone(state(1), tmp_path, 0)
    claimed, confirmed, go = rebuild_module.claimed_saves, threading.Event(), threading.Event()
    freezing = FreezingStorage(tmp_path, after=lambda: (confirmed.set(), go.wait(PATIENCE)))
    saving = threading.Thread(target=save_alone, args=(state(2), freezing, 0))

    def when_it_has_ended(storage: LocalStorage) -> dict[str, str]:
        go.set()
        saving.join()
        return claimed(storage)

    def meanwhile(go_on: Callable[[], None]) -> None:
        save_alone(state(3), FaultyStorage(tmp_path, when("delete", is_data, go_on)), 0)

    saving.start()
    assert confirmed.wait(PATIENCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuild_module, "claimed_saves", when_it_has_ended)
        rebuild_with(tmp_path, meanwhile)  # it fails in the middle of the other save, which logs that
    check_left(tmp_path, {0: 3})


def test_what_is_just_being_deleted_is_not_rebuilt(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path, 0)
    (tmp_path / "0.metadata").unlink()
    refused: list[str] = []

    def meanwhile(go_on: Callable[[], None]) -> None:
        def try_to() -> None:
            with pytest.raises(CheckpointError, match="is being removed, put there or rebuilt, as 0") as caught:
                go_on()
            refused.append(str(caught.value))

        rebuild(LocalStorage(tmp_path), None, False)
        delete(FaultyStorage(tmp_path, when("delete", is_data, try_to)), 0)

    rebuild_with(tmp_path, meanwhile)
    assert len(refused) == 1
    check_left(tmp_path, {})


def test_what_is_removed_before_the_last_look_is_not_rebuilt(tmp_path: Path) -> None:
    save_alone(state(1), tmp_path, 0)
    (tmp_path / "0.metadata").unlink()

    def is_metadata(name: str) -> bool:
        return name == "0.metadata"

    hook = when("publish", is_metadata, lambda: data_files(tmp_path)[0].unlink())
    with pytest.raises(CheckpointError, match="has been removed meanwhile"):
        rebuild(FaultyStorage(tmp_path, hook), None, False)
    assert files_in(tmp_path) == {}


def test_a_deletion_removes_nothing_that_is_committed_under_another_id(tmp_path: Path) -> None:
    """Not from the folders of other hosts either, where nobody sees what is committed."""
    for number in range(2):
        save_alone(state(number), tmp_path, number)
    first, second = (read_metadata(tmp_path, number).save_id for number in range(2))
    claim = Claim(first, second, [], done=True)
    (tmp_path / claim_name(0, first)).write_bytes(msgspec.json.encode(claim))
    deletion = begin_deletion(LocalStorage(tmp_path), 0, first)
    assert deletion.saves == [first]
    assert deletion.finish()
    check_left(tmp_path, {1: 1})


@pytest.mark.parametrize("ends", ["with an error", "killed"])
def test_a_deletion_removes_what_ended_saves_of_the_id_have_left(tmp_path: Path, ends: str) -> None:
    """Of three saves to an id, one cannot remove what another has left to it, which had not known of that one."""
    save_alone(state(1), tmp_path, 0)

    def second() -> None:
        between = once(lambda: save_alone(state(2), tmp_path, 0))
        try_save([state(3)], RefusingStorage(tmp_path, between, dies=ends == "killed"), 0)

    def third(operation: str, name: str) -> None:
        if operation == "create":
            second()
            raise OSError(errno.EDQUOT, "Disk quota exceeded", name)

    try_save([state(4)], FaultyStorage(tmp_path, third), 0)
    assert len(data_files(tmp_path)) == 2
    assert len(list(tmp_path.glob("*.claim"))) == 2
    delete(LocalStorage(tmp_path), 0)
    assert list(tmp_path.iterdir()) == []
    check_left(tmp_path, {})


def taken_by_another(folder: Path, fails: bool = False) -> FreezingStorage:
    """A folder in which a save that has chosen 0 finds that taken just then, and becomes 1."""

    class Failing(FreezingStorage):
        def sync(self) -> None:
            super().sync()
            if (folder / "1.metadata").exists():
                raise OSError(errno.EIO, "Input/output error", str(folder))

    kind = Failing if fails else FreezingStorage
    return kind(folder, after=once(lambda: save_alone(state(2), folder, 0)))


def test_a_claim_of_what_is_committed_under_another_id_is_left_to_those_of_that(tmp_path: Path) -> None:
    """An automatic save that became 1 waits for one to 1 that does not know it, while another one saves to 0."""

    def meanwhile() -> None:
        (report,) = save_on([state(1)], taken_by_another(tmp_path))
        assert report.unique_id == 1
        save_alone(state(3), tmp_path, 0)

    save_alone(state(4), FreezingStorage(tmp_path, after=once(meanwhile)), 1)
    check_left(tmp_path, {0: 3, 1: 4})


@pytest.mark.parametrize("which", [0, 1])
def test_such_a_claim_keeps_nothing_from_being_deleted(tmp_path: Path, which: int) -> None:
    results = try_save([state(1)], taken_by_another(tmp_path, fails=True))
    assert isinstance(results[0], DurabilityUnknownError)
    (claim,) = tmp_path.glob("0.*.claim")
    assert '"committed_as":1' in claim.read_text()
    delete(LocalStorage(tmp_path), which)
    check_left(tmp_path, {0: 2} if which else {1: 1})


# -- copies


def copied_to(storage: LocalStorage | FaultyStorage, source: Path) -> None:
    copy(LocalStorage(source), storage, 0, False)


def test_what_a_copy_makes_that_was_taken_for_dead_before_goes_at_once(tmp_path: Path) -> None:
    """It is frozen just before it makes a file, and thaws while whoever took it for dead is still at work."""
    source, folder = tmp_path / "a", tmp_path / "b"
    save_on([{"x": state(1)}, {"y": state(1)}], source, 0)

    class Frozen(LocalStorage):
        def create(self, name: str) -> Any:
            age_claims(folder)
            thawed, ended = threading.Event(), threading.Event()
            hook = when("create", is_data, lambda: (thawed.set(), ended.wait(PATIENCE)))
            saving = threading.Thread(target=save_alone, args=(state(7), FaultyStorage(folder, hook), 7))
            saving.start()
            assert thawed.wait(PATIENCE)
            self.go_on = lambda: (ended.set(), saving.join())
            return super().create(name)

    frozen = Frozen(folder)
    with pytest.raises(CheckpointError, match="another save or export took this one"):
        copied_to(frozen, source)
    frozen.go_on()
    made = {path.name for path in data_files(folder)}.intersection(path.name for path in data_files(source))
    assert not made
    assert not list(folder.glob("*.claim"))
    save_alone(state(8), folder, 8)
    check_holds(folder, {7: 7, 8: 8})
    copied_to(LocalStorage(folder), source)
    assert list_checkpoints(folder) == [0, 7, 8]


def test_a_copy_that_thaws_keeps_no_other_one_from_ending(tmp_path: Path) -> None:
    source, folder = tmp_path / "a", tmp_path / "b"
    save_on([{"x": state(1)}, {"y": state(1)}], source, 0)

    go_on, ended = threading.Event(), threading.Event()
    storage = FreezingStorage(folder, early=lambda: (go_on.set(), ended.wait(PATIENCE)))
    other = threading.Thread(target=copied_to, args=(storage, source))

    def take_over() -> None:
        age_claims(folder)
        other.start()
        assert go_on.wait(PATIENCE)

    with pytest.raises(CheckpointError, match="another save or export took this one"):
        copied_to(FaultyStorage(folder, when("sync_file", is_data, take_over)), source)
    ended.set()
    other.join()
    assert list_checkpoints(folder) == [0]
    assert not list(folder.glob("*.claim"))


@pytest.mark.parametrize("what", ["copy", "rebuild"])
@pytest.mark.parametrize("frozen", ["before its name is given", "before a look at its files"])
def test_who_was_taken_for_dead_says_so(tmp_path: Path, what: str, frozen: str, monkeypatch: Any) -> None:
    source, folder = tmp_path / "a", tmp_path / "b"
    save_alone(state(1), source, 0)

    def take_over() -> None:
        age_claims(folder)
        save_alone(state(5), folder, 5)

    storage = FreezingStorage(folder, after=once(take_over))
    if frozen == "before a look at its files":
        if what == "rebuild":
            pytest.skip("it looks at names alone")
        look = copy_module.check_sizes
        call = once(take_over)

        def looking(at: Any, *args: Any) -> None:
            if at.location == str(folder):
                call()
            look(at, *args)

        monkeypatch.setattr(copy_module, "check_sizes", looking)
        storage = LocalStorage(folder)
    if what == "rebuild":
        shutil.copytree(source, folder)
        (folder / "0.metadata").unlink()
    with pytest.raises(CheckpointError, match="another save or export took this one") as caught:
        copied_to(storage, source) if what == "copy" else rebuild(storage, None, False)
    assert type(caught.value) is CheckpointError
    assert list_checkpoints(folder) == [5]


# -- errors of other kinds after the commit


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("of a storage"), CheckpointTimeoutError("slow")])
@pytest.mark.parametrize("committed", [True, False])
def test_errors_of_any_kind_say_what_became_of_the_commit(tmp_path: Path, error: Exception, committed: bool) -> None:
    class Failing(LocalStorage):
        def publish(self, name: str, *args: Any, **kwargs: Any) -> bool:
            if not name.endswith(".metadata"):
                return super().publish(name, *args, **kwargs)
            if committed:
                super().publish(name, *args, **kwargs)
            raise error

    (found,) = try_save([state(1)], Failing(tmp_path), 0)
    if committed and not isinstance(error, CheckpointTimeoutError):
        assert isinstance(found, DurabilityUnknownError)
        assert "committed as id 0" in str(found)
        assert str(found).endswith(str(error) or "MemoryError")
    else:
        assert not isinstance(found, DurabilityUnknownError)
        assert isinstance(found, Exception)
    assert list_checkpoints(tmp_path) == [0] * committed
