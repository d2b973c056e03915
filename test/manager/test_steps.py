"""Which steps of a manager's folder are there, which are kept, and what is removed in which order."""

from __future__ import annotations

import enum
import errno
import json
import math
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import CheckpointError, CheckpointTimeoutError, copy_checkpoint, rebuild_metadata, verify
from paddle_dist_ckpt.core.decoding import decoding
from paddle_dist_ckpt.files import codec
from paddle_dist_ckpt.folder import ids, lease
from paddle_dist_ckpt.folder.claims import is_abandoned, records_of
from paddle_dist_ckpt.manager import prune
from paddle_dist_ckpt.manager import steps as steps_module
from paddle_dist_ckpt.manager.removal import Going, Removals, remove_step, remove_together
from paddle_dist_ckpt.manager.retention import Retention
from paddle_dist_ckpt.manager.steps import NOTE, Steps, step_folder
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.storage import Folders, LocalStorage
from paddle_dist_ckpt.storage.base import FolderIdentity
from paddle_dist_ckpt.storage.helpers import Helpers
from paddle_dist_ckpt.testing import FaultyStorage, SimulatedRank, Stall, run_ranks
from test.hooks import raises
from test.jobs import age, all_ok, another_host, data_files, errors_of, load_whole, save_alone, save_on
from test.stalls import helpers_end
from test.waiting import PATIENCE

FOLDERS = Folders()


def save_step(root: Path, step: int, **metrics: float) -> None:
    options = SaveOptions(user_metadata={NOTE: {"step": step, "metrics": metrics}})
    save_alone({"x": np.full(3, step)}, step_folder(root, step), step, options)


def look(root: Path) -> Steps:
    steps = Steps(root)
    steps.look(FOLDERS)
    return steps


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(None, None, None), [1, 2, 3, 4, 5, 6]),
        (Retention(1, None, None), [6]),
        (Retention(2, None, None), [5, 6]),
        (Retention(1, 2, None), [2, 4, 6]),
        (Retention(1, None, ("loss", "min")), [3, 6]),
        (Retention(1, None, ("loss", "max")), [1, 6]),
        (Retention(1, None, ("loss", "min", 3)), [3, 5, 6]),
        (Retention(1, 2, ("loss", "max", 2)), [1, 2, 4, 6]),
        (Retention(1, 2, ("loss", "min")), [2, 3, 4, 6]),
        (Retention(None, 2, ("loss", "min")), [1, 2, 3, 4, 5, 6]),
        (Retention(9, None, None), [1, 2, 3, 4, 5, 6]),
    ],
)
def test_what_is_kept(retention: Retention, kept: list[int]) -> None:
    losses = {1: 9.0, 2: 5.0, 3: 1.0, 4: 4.0, 5: 2.0, 6: 3.0}
    doomed = retention.doomed({step: {"loss": loss} for step, loss in losses.items()}, 6, [])
    assert sorted(losses.keys() - set(doomed)) == kept


def test_the_newest_commit_and_what_is_being_read_are_kept() -> None:
    steps: dict[int, Any] = {step: {} for step in (100, 200, 300)}
    assert Retention(1, None, None).doomed(steps, 300, [100]) == [200]
    assert Retention(1, None, None).doomed(steps, 100, []) == [200], "100 was saved again after a return to it"


class _Word(str, enum.Enum):
    LOSS = "loss"
    MIN = "min"


def test_the_best_step() -> None:
    metrics: dict[int, Any] = {1: {"loss": 2.0}, 2: {"loss": 1.0}, 3: {"loss": 1.0}, 4: {"loss": float("nan")}, 5: {}}
    assert Retention(1, None, ("loss", "min")).best_of(metrics) == [3]
    assert Retention(1, None, ("loss", "max")).best_of(metrics) == [1]
    assert Retention(1, None, ("loss", "min", 2)).best_of(metrics) == [3, 2]
    assert Retention(1, None, ("loss", "max", 9)).best_of(metrics) == [1, 3, 2]
    assert Retention(1, None, (_Word.LOSS, _Word.MIN)).best_of(metrics) == [3]
    assert Retention(1, None, ("accuracy", "max")).best_of(metrics) == []
    assert Retention(1, None, None).best_of(metrics) == []


@pytest.mark.parametrize(
    "arguments", [(0, None, None), (True, None, None), (None, -1, None), (1, None, "loss"), (1, None, ("loss", "most"))]
)
def test_bad_retention_is_refused(arguments: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"keep_|best"):
        Retention(*arguments)


@pytest.mark.parametrize(
    ("best", "why"),
    [
        (None, "the manager has no best"),
        (("accuracy", "max"), "no step has a value of the metric 'accuracy'"),
        (("nan", "max"), "no step has a value of the metric 'nan'"),
        (("loss", "max"), None),
    ],
)
def test_that_no_step_is_the_best_one_is_warned_of(
    tmp_path: Path, best: Any, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Who restores the best one would restore the latest."""
    assert look(tmp_path).best(Retention(1, None, best)) is None
    assert caplog.messages == []
    save_step(tmp_path, 1, loss=1.0, nan=math.nan)
    assert look(tmp_path).best(Retention(1, None, best)) == (None if why else 1)
    text = f"{tmp_path}: no step is the best one, for {why}; restore(step=None) takes the latest"
    assert caplog.messages == ([text] if why else [])


def test_numbers_of_numpy_are_pythons() -> None:
    """Minus three is 253 to eight bits without a sign, and a thousand is too much for them."""
    steps: dict[int, Any] = {step: {} for step in range(100, 1100, 100)}
    assert Retention(np.uint8(3), None, None).doomed(steps, 1000, []) == [*range(100, 800, 100)]  # type: ignore[arg-type]
    assert Retention(np.uint64(3), np.int8(50), None).doomed(steps, 1000, []) == []  # type: ignore[arg-type]


def test_only_committed_steps_count(tmp_path: Path) -> None:
    for step in (3, 20):
        save_step(tmp_path, step, loss=step / 2)
    (step_folder(tmp_path, 20) / "20.metadata").rename(step_folder(tmp_path, 20) / "21.metadata")
    step_folder(tmp_path, 30).mkdir()
    (tmp_path / "step-40").mkdir()
    (tmp_path / "notes.txt").touch()
    assert look(tmp_path).metrics == {3: {"loss": 1.5}}
    assert look(tmp_path / "nowhere").metrics == {}


def test_a_damaged_step_is_logged_and_not_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    (step_folder(tmp_path, 2) / "2.metadata").write_bytes(b"rubbish")
    assert list(look(tmp_path).metrics) == [1]
    assert "not counted among the steps" in caplog.text


def test_what_is_copied_back_after_it_was_pruned_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save_step(tmp_path / "run", step)
    copy_checkpoint(step_folder(tmp_path / "run", 1), tmp_path / "backup")

    def remove(root: Path, step: int, saves: Collection[str], opened: Folders) -> None:
        assert not list(step_folder(root, step).glob("*.claim"))
        copy_checkpoint(tmp_path / "backup", step_folder(root, step))
        remove_step(root, step, saves, opened)

    monkeypatch.setattr(prune, "remove_step", remove)
    assert prune.carry_out(prune.plan_prune(tmp_path / "run", Retention(1, None, None))).removed == [1]
    assert verify(step_folder(tmp_path / "run", 1)).ok


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("unread", [(2,), (1, 2), (1,)])
def test_a_step_that_the_disk_does_not_give_may_be_the_latest(
    tmp_path: Path, unread: tuple[int, ...], code: int
) -> None:
    """A job that passed over it would go on from an earlier step, or begin anew, and save over those that are there."""
    for step in (1, 2):
        save_step(tmp_path, step)
    hidden = {f"{step}.metadata" for step in unread}

    def refuse(operation: str, name: str) -> None:
        if operation == "read" and name in hidden:
            raise OSError(code, os.strerror(code), name)

    steps = Steps(tmp_path)
    steps.look(Folders(lambda folder: FaultyStorage(folder, refuse)))
    if 2 in unread:
        with pytest.raises(CheckpointError, match=r"step-00000002 cannot be read, and may be the latest step: \[Errno"):
            steps.latest()
    else:
        assert steps.latest() == 2
    steps.look(FOLDERS)
    assert steps.latest() == 2


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("unread", [(1,), (1, 2), (1, 2, 3)])
def test_a_step_that_the_disk_does_not_give_may_be_the_best(
    tmp_path: Path, unread: tuple[int, ...], damaged: bool
) -> None:
    """Who asks for the best to restore it gets another one, or by step=None the latest."""
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
        save_step(tmp_path, step, loss=loss)
    files = {step: step_folder(tmp_path, step) / f"{step}.metadata" for step in unread}
    hidden, rules = {path.name for path in files.values()}, Retention(1, None, ("loss", "min"))

    def refuse(operation: str, name: str) -> None:
        if operation == "read" and name in hidden:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    if damaged:
        for path in files.values():
            path.write_bytes(b"rubbish")
    steps = Steps(tmp_path)
    steps.look(FOLDERS if damaged else Folders(lambda folder: FaultyStorage(folder, refuse)))
    if damaged and len(unread) < 3:
        assert steps.best(rules) == len(unread) + 1
        return
    with pytest.raises(CheckpointError, match="cannot be read, and may be the best step"):
        steps.best(rules)
    assert steps.best(Retention(1, None, None)) is None
    if not damaged:
        steps.look(FOLDERS)
        assert steps.best(rules) == 1


def test_a_step_that_memory_was_too_short_for_may_be_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not passed over as one that is damaged is."""
    for step in (1, 2):
        save_step(tmp_path, step)
    real = codec.decode_note

    def short(data: bytes, name: str, unique_id: int) -> Any:
        with decoding(name):
            if unique_id == 2:
                raise MemoryError
        return real(data, name, unique_id)

    monkeypatch.setattr(ids, "decode_note", short)
    steps = Steps(tmp_path)
    steps.look(FOLDERS)
    with pytest.raises(CheckpointError, match=r"2 cannot be read, and may be the latest step: 2.*not enough memory"):
        steps.latest()
    monkeypatch.undo()
    steps.look(FOLDERS)
    assert steps.latest() == 2


def test_a_folder_of_which_no_step_can_be_read_is_not_empty(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    (step_folder(tmp_path, 2) / "2.metadata").write_bytes(b"rubbish")
    assert look(tmp_path).latest() == 1, "what is damaged is passed over"
    (step_folder(tmp_path, 1) / "1.metadata").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"step-00000002 cannot be read.*rebuild_metadata"):
        look(tmp_path).latest()
    for step in (1, 2):
        (step_folder(tmp_path, step) / f"{step}.metadata").unlink()
    (tmp_path / "step-00000007").write_text("a file")
    (tmp_path / "step-00000008").symlink_to(tmp_path / "step-00000008")
    assert look(tmp_path).latest() is None, "those were never committed, or are no steps"


def test_an_interrupt_between_two_removals_is_not_swallowed_and_leaves_nobody_waiting(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    steps, hook = look(tmp_path), raises("publish", "2.*.claim", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Removals(steps).begin(Going([1, 2]), Folders(lambda path: FaultyStorage(path, hook)))  # type: ignore[misc]
    (left,) = records_of(LocalStorage(step_folder(tmp_path, 1))).values()
    assert left[1].done
    assert look(tmp_path).latest() == 3
    assert sorted(look(tmp_path).metrics) == [2, 3]


def test_a_step_is_read_again_only_if_it_was_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path, 1, loss=1.0)
    steps = look(tmp_path)
    read: list[int] = []
    real = steps_module.note_of
    monkeypatch.setattr(steps_module, "note_of", lambda storage, step: (read.append(step), real(storage, step))[1])
    steps.look(FOLDERS)
    assert read == []
    save_step(tmp_path, 1, loss=2.0)
    steps.look(FOLDERS)
    assert read == [1]
    assert steps.metrics == {1: {"loss": 2.0}}


def removed(steps: Steps, root: Path, step: int) -> bool:
    """Remove a step, or try to."""
    for removal in Removals(steps).begin(Going([step]), FOLDERS).values():
        removal.finish()
        remove_step(root, step, removal.saves, FOLDERS)
        return True
    return False


def test_metadata_goes_first_and_other_files_stay(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    (step_folder(tmp_path, 2) / "tokenizer.json").touch()
    steps = look(tmp_path)
    for step in (1, 2):
        removal = Removals(steps).begin(Going([step]), FOLDERS)[step]
        assert not (step_folder(tmp_path, step) / f"{step}.metadata").exists()
        assert any(name.endswith(".safetensors") for name in os.listdir(step_folder(tmp_path, step)))
        assert removal.saves == [next(step_folder(tmp_path, step).glob("*.safetensors")).name.split(".")[1]]
        removal.finish()
        remove_step(tmp_path, step, removal.saves, FOLDERS)
    assert steps.metrics == {}
    assert not step_folder(tmp_path, 1).exists()
    assert os.listdir(step_folder(tmp_path, 2)) == ["tokenizer.json"]
    remove_step(tmp_path, 77, ["0123456789abcdef"], FOLDERS)


def test_a_step_that_was_saved_anew_stays(tmp_path: Path) -> None:
    """Whoever removes has looked before the other job's commit."""
    save_step(tmp_path, 1, loss=1.0)
    steps = look(tmp_path)
    save_step(tmp_path, 1, loss=2.0)
    assert not removed(steps, tmp_path, 1)
    assert look(tmp_path).metrics == {1: {"loss": 2.0}}
    assert len(os.listdir(step_folder(tmp_path, 1))) == 2


def test_a_step_that_has_become_a_link_stays(tmp_path: Path) -> None:
    """It was a folder when it was decided which steps go."""
    save_step(tmp_path, 1)
    steps, folder = look(tmp_path), step_folder(tmp_path, 1)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to("elsewhere")
    assert not removed(steps, tmp_path, 1)
    assert len(os.listdir(tmp_path / "elsewhere")) == 2


@pytest.mark.parametrize("committed", [True, False])
def test_a_step_that_is_being_saved_stays(tmp_path: Path, committed: bool) -> None:
    """The other job has its claim before anybody looks, and commits after it was told so."""
    save_step(tmp_path, 1, loss=1.0)
    if not committed:
        (step_folder(tmp_path, 1) / "1.metadata").unlink()
    steps = look(tmp_path)
    tried: list[bool] = []

    def hook(operation: str, name: str) -> None:
        if operation in ("create", "sync_file", "publish") and not name.endswith(".claim"):
            tried.append(removed(steps, tmp_path, 1))

    save_alone({"x": np.full(3, 7)}, FaultyStorage(step_folder(tmp_path, 1), hook), 1)
    assert tried == [False] * 3
    assert load_whole(step_folder(tmp_path, 1), 1)["x"].tolist() == [7] * 3


@pytest.mark.parametrize("when", ["delete", "sync"])
def test_a_save_to_a_step_that_is_being_removed_is_there_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It begins and writes while the other job removes the step; its commit waits until that is over."""
    save_step(tmp_path, 1, loss=1.0)
    steps, folder = look(tmp_path), step_folder(tmp_path, 1)
    waited = threading.Event()
    real = getattr(LocalStorage, when)

    def meet(storage: LocalStorage, *args: Any) -> None:
        uncommitting = args == ("1.metadata",) if when == "delete" else not (folder / "1.metadata").exists()
        if uncommitting and threading.current_thread() is threading.main_thread() and not waited.is_set():
            saver.start()
            assert waited.wait(PATIENCE), "it looks for the claim before it commits"
        real(storage, *args)

    def look_again(seconds: float) -> None:
        waited.set()
        time.sleep(seconds)

    saver = threading.Thread(target=lambda: save_alone({"x": np.full(3, 7)}, folder, 1))
    monkeypatch.setattr(LocalStorage, when, meet)
    monkeypatch.setattr(lease, "time", SimpleNamespace(sleep=look_again, monotonic=time.monotonic))
    assert removed(steps, tmp_path, 1)
    saver.join(PATIENCE)
    assert load_whole(folder, 1)["x"].tolist() == [7] * 3
    assert len(os.listdir(folder)) == 2


def test_a_save_makes_its_folder_again_that_was_empty_and_is_removed(tmp_path: Path) -> None:
    folder, times = step_folder(tmp_path, 1), []

    def remove(operation: str, name: str) -> None:
        if operation == "publish" and name.endswith(".claim") and not times:
            times.append(name)
            remove_step(tmp_path, 1, (), FOLDERS)
            assert not folder.exists()

    save_alone({"x": np.full(3, 7)}, FaultyStorage(folder, remove), 1)
    assert times
    assert load_whole(folder, 1)["x"].tolist() == [7] * 3
    assert len(os.listdir(folder)) == 2


def test_a_save_makes_its_folder_again_that_is_removed_before_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, times, identity = step_folder(tmp_path, 1), list[int](), LocalStorage.identity

    def remove(storage: LocalStorage) -> FolderIdentity:
        if len(times) < 3:
            times.append(1)
            remove_step(tmp_path, 1, (), FOLDERS)
        return identity(storage)

    monkeypatch.setattr(LocalStorage, "identity", remove)
    save_alone({"x": np.full(3, 7)}, folder, 1)
    assert len(times) == 3
    assert load_whole(folder, 1)["x"].tolist() == [7] * 3


def test_what_is_left_of_a_removal_that_was_cut_short_goes_later(tmp_path: Path) -> None:
    save_step(tmp_path, 9)
    save_step(tmp_path, 1)
    assert list(Removals(look(tmp_path)).begin(Going([1]), FOLDERS)) == [1]
    folder = step_folder(tmp_path, 1)
    for path in [*folder.iterdir(), folder]:
        age(path)
    steps = look(tmp_path)
    assert Removals(steps).going(FOLDERS).abandoned == [1]
    assert removed(steps, tmp_path, 1)
    assert not folder.exists()


def never_wait(seconds: float) -> None:
    raise AssertionError("it waits")


def test_nobody_waits_for_a_removal_that_has_failed_on_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has left goes with the step's next save, on every host."""
    roots = [tmp_path / "host0", tmp_path / "host1"]
    states = [{f"x{rank}": np.full(3, rank)} for rank in range(2)]
    folders = [step_folder(root, 1) for root in roots]
    save_on(states, [another_host(folder, rank) for rank, folder in enumerate(folders)], 1)

    def remove(rank: SimulatedRank) -> None:
        root, hook = roots[rank.rank], raises("delete", "*.safetensors" if rank.rank else "nothing", errno.EIO)
        opened = Folders(lambda folder: FaultyStorage(folder, hook, FolderIdentity(f"host{rank.rank}", 1, 1)))
        with rank.hub.session("save_state_dict", PATIENCE) as session:
            remove_together(session, root, lambda: Removals(look(root)).begin(Going([1]), opened), opened)

    errors_of(run_ranks(2, remove), CheckpointError)
    assert list(look(roots[0]).metrics) == []
    assert len(data_files(folders[1])) == 1
    monkeypatch.setattr(lease, "time", SimpleNamespace(sleep=never_wait, monotonic=time.monotonic))
    save_on(states, [another_host(folder, rank) for rank, folder in enumerate(folders)], 1)
    assert [len(os.listdir(folder)) for folder in folders] == [2, 1]


def test_one_rank_of_each_folder_removes(tmp_path: Path) -> None:
    """The coordinator in its own, though it is not the lowest rank there, and the lowest rank in each other."""
    hosts = [0, 0, 1, 1]
    roots = [tmp_path / f"host{host}" for host in hosts]
    states = [{f"x{rank}": np.full(3, rank)} for rank in range(4)]
    folders = [step_folder(root, 1) for root in roots]
    save_on(states, [another_host(folder, host) for folder, host in zip(folders, hosts, strict=True)], 1, coordinator=1)
    assert [len(data_files(folder)) for folder in folders] == [2, 2, 2, 2]
    removing: set[int] = set()

    def remove(rank: SimulatedRank) -> None:
        root, identity = roots[rank.rank], FolderIdentity(f"host{hosts[rank.rank]}", 1, 1)

        def note(operation: str, name: str) -> None:
            if operation == "delete":
                removing.add(rank.rank)

        opened = Folders(lambda folder: FaultyStorage(folder, note, identity))
        with rank.hub.session("save_state_dict", PATIENCE) as session:
            remove_together(session, root, lambda: Removals(look(root)).begin(Going([1]), opened), opened)

    all_ok(run_ranks(4, remove, 1))
    assert removing == {1, 2}
    assert not any(folder.exists() for folder in folders)


def test_only_what_nobody_works_on_is_abandoned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And no data files that no claim speaks of: they may be all that is left of a step."""
    save_step(tmp_path, 9)
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step)
        (step_folder(tmp_path, step) / f"{step}.metadata").unlink()
    claim = step_folder(tmp_path, 2) / "2.0123456789abcdef.claim"
    dead = step_folder(tmp_path, 3) / "3.0123456789abcdef.claim"
    claim.touch()
    dead.touch()
    age(dead)
    step_folder(tmp_path, 5).mkdir()
    for step in (1, 2, 3, 5):  # but not 4, which may just have been made
        age(step_folder(tmp_path, step))
    removals = Removals(look(tmp_path))
    for _ in range(2):
        assert removals.going(FOLDERS) == Going([], [3, 5], [])
    assert [record.getMessage()[:15] for record in caplog.records] == ["step 1 is left:"]
    for step, removal in removals.begin(Going(abandoned=[3, 5]), FOLDERS).items():
        removal.finish()
        remove_step(tmp_path, step, removal.saves, FOLDERS)
    assert not step_folder(tmp_path, 5).exists()
    (left,) = os.listdir(step_folder(tmp_path, 3))  # its claim is of another save
    assert left.endswith(".safetensors")
    assert rebuild_metadata(step_folder(tmp_path, 1)).unique_id == 1
    now = LocalStorage(step_folder(tmp_path, 9)).modified("9.metadata")
    assert not is_abandoned(LocalStorage(tmp_path / "nowhere"), now)


def test_only_what_may_go_is_asked_whether_it_is_a_link(tmp_path: Path) -> None:
    """A manager may keep thousands of steps, and a question takes a while over a network."""
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    step_folder(tmp_path, 4).mkdir()
    age(step_folder(tmp_path, 4))
    step_folder(tmp_path, 5).symlink_to(step_folder(tmp_path, 4))
    removals, asked = Removals(look(tmp_path)), list[str]()

    class Counted(Folders):
        def run(self, doing: str, path: object, *more: Any, **others: Any) -> Any:
            asked.append(Path(str(path)).name)
            return super().run(doing, path, *more, **others)

    assert removals.going(Counted()).abandoned == [4]
    assert asked == ["step-00000004", "step-00000005"]
    assert removals.going(Counted(), [2, 5]).doomed == [2]


def test_what_is_dated_far_ahead_is_abandoned_when_it_has_been_found_for_as_long_as_others(tmp_path: Path) -> None:
    save_step(tmp_path, 9)
    folder = step_folder(tmp_path, 1)
    folder.mkdir()
    claim = folder / "1.0123456789abcdef.claim"
    claim.touch()
    age(claim, -30 * 86400)
    age(folder, -30 * 86400)
    removals = Removals(look(tmp_path))
    assert removals.going(FOLDERS).abandoned == []
    age(claim, 301)
    age(folder, 301)
    assert removals.going(FOLDERS).abandoned == [1]


def test_the_clock_of_the_folder_counts_and_not_that_of_a_link_to_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (step_folder(root, 1)).mkdir(parents=True)
    (tmp_path / "link").symlink_to(root)
    age(step_folder(root, 1))
    age(root)
    link, before = tmp_path / "link", (tmp_path / "link").lstat().st_mtime_ns
    removals = Removals(look(link))
    assert removals.going(FOLDERS, now=root.stat().st_mtime).abandoned == []
    assert removals.going(FOLDERS).abandoned == [1]
    assert link.lstat().st_mtime_ns == before
    assert root.stat().st_mtime > step_folder(root, 1).stat().st_mtime + 3000


@contextmanager
def hanging_folders(stall: Stall) -> Iterator[Folders]:
    """What opens folders of which an operation hangs, and is given up."""
    with closing(Helpers(0.8, 0)) as helpers:
        yield Folders(lambda folder: FaultyStorage(folder, stall), helpers)


@pytest.mark.parametrize("operation", ["names", "read", "modified"])
def test_a_folder_of_steps_that_hangs_is_no_folder_without_steps(tmp_path: Path, operation: str) -> None:
    """A job that took it for one would begin anew."""
    for step in (1, 2):
        save_step(tmp_path, step)
    step_folder(tmp_path, 3).mkdir()  # which may be left of a save
    stall = Stall(operation)
    steps = Steps(tmp_path)
    with (
        hanging_folders(stall) as hanging,
        pytest.raises(CheckpointTimeoutError, match="has not returned for 0.8 s on rank 0"),
    ):
        steps.look(hanging)
        Removals(steps).going(hanging)
    assert stall.reached.is_set()
    stall.release()
    helpers_end()
    steps.look(FOLDERS)
    assert list(steps.metrics) == [1, 2]


def test_a_step_whose_removal_hangs_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    stall = Stall("delete")
    steps = look(tmp_path)
    with hanging_folders(stall) as hanging:
        assert Removals(steps).begin(Going([1]), hanging) == {}
    assert "step 1 is left for now: " in caplog.text
    assert "has not returned for 0.8 s on rank 0" in caplog.text
    assert stall.reached.is_set()
    stall.release()
    helpers_end()
    steps.look(FOLDERS)
    assert 2 in steps.metrics


# -- what dead saves have left beside steps that stay


def littered_step(root: Path, step: int, **says: Any) -> Path:
    """A step beside which a dead save has left a data file and its claim."""
    save_step(root, step)
    folder = step_folder(root, step)
    (folder / f"0_{step}.{'d' * 16}.0.safetensors").write_bytes(b"dead")
    claim = folder / f"{step}.{'d' * 16}.claim"
    claim.write_text(json.dumps({"save": "d" * 16, "replaces": None, "removes": [], **says}))
    age(claim)
    age(folder)
    return folder


def test_a_folder_that_cannot_be_listed_keeps_no_other_from_being_tidied(tmp_path: Path) -> None:
    littered_step(tmp_path, 2)
    step_folder(tmp_path, 1).write_text("a file")
    for anew in (True, False):
        assert Removals(look(tmp_path)).going(FOLDERS, anew=anew).littered == [2]
    plan = prune.plan_prune(tmp_path, Retention(1, None, None))
    assert (plan.doomed, plan.littered) == ([], [2])
    assert prune.carry_out(plan).tidied == [2]


def test_a_step_that_has_become_a_link_is_not_tidied(tmp_path: Path) -> None:
    folder = littered_step(tmp_path / "run", 1)
    removals = Removals(look(tmp_path / "run"))
    assert removals.going(FOLDERS).littered == [1]
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert removals.going(FOLDERS, anew=False).littered == []
    assert removals.begin(Going(littered=[1]), FOLDERS) == {}
    assert removals.going(FOLDERS).littered == []
    assert len(os.listdir(tmp_path / "elsewhere")) == 4


def test_the_claim_of_a_save_that_has_ended_is_left_to_whoever_takes_over_what_it_says(tmp_path: Path) -> None:
    """It waits for what another save does, and has not expired."""
    folder = littered_step(tmp_path, 1)
    (own,) = (path for path in folder.glob("*.safetensors") if "d" * 16 not in path.name)
    removals = Removals(look(tmp_path))
    ended = folder / f"1.{own.name.split('.')[1]}.claim"
    replaced = folder / f"0_1.{'e' * 16}.0.safetensors"
    going = removals.going(FOLDERS)
    ended.write_text(json.dumps({"save": own.name.split(".")[1], "replaces": "e" * 16, "removes": [], "done": True}))
    replaced.write_bytes(b"replaced")
    assert removals.begin(going, FOLDERS)[1].finish()
    assert ended.exists()
    age(ended)
    save_step(tmp_path, 1)
    assert not replaced.exists()
    assert len(data_files(folder)) == 1


def test_who_tidies_again_and_again_does_not_add_to_what_is_to_be_removed(tmp_path: Path) -> None:
    folder = littered_step(tmp_path, 1)

    opened = Folders(lambda path: FaultyStorage(path, raises("delete", f"*{'d' * 16}*.safetensors", errno.EPERM)))
    for _ in range(3):
        removals = Removals(look(tmp_path))
        assert not removals.begin(removals.going(opened), opened)[1].finish()
        (claim,) = folder.glob("*.claim")
        assert json.loads(claim.read_text())["removes"] == ["d" * 16]
        age(claim)
        age(folder)
    assert verify(folder, 1).ok


def test_a_step_that_is_removed_is_not_tidied_too(tmp_path: Path) -> None:
    littered_step(tmp_path, 1)
    save_step(tmp_path, 2)
    plan = prune.plan_prune(tmp_path, Retention(1, None, None))
    assert (plan.doomed, plan.littered) == ([1], [])
    assert prune.carry_out(plan).removed == [1]
    assert not step_folder(tmp_path, 1).exists()
