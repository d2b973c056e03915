"""The manager of steps: when it saves, what it keeps, what it finds; alone and on ranks."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

import paddle_dist_ckpt.manager.manager as manager_module
from paddle_dist_ckpt import (
    AsyncSave,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    DurabilityUnknownError,
    LoadOptions,
    LocalStorage,
    SaveOptions,
    SaveReport,
    export,
    load_state_dict,
    read_metadata,
    save_state_dict,
)
from paddle_dist_ckpt.control.ranks import Ranks
from paddle_dist_ckpt.manager import shared_steps, sigterm
from paddle_dist_ckpt.manager.prune import carry_out, plan_prune
from paddle_dist_ckpt.manager.removal import Going, Removals, remove_step
from paddle_dist_ckpt.manager.retention import Retention
from paddle_dist_ckpt.manager.schedule import Schedule
from paddle_dist_ckpt.manager.steps import Steps
from paddle_dist_ckpt.saving.save_coordinator import SaveCoordinator
from paddle_dist_ckpt.storage import Folders
from paddle_dist_ckpt.testing import FaultyStorage, SimulatedRank, run_ranks
from test.jobs import errors_of
from test.paddle import cases_manager as cases
from test.ranks.pool import RankPool
from test.readers.golden import GOLDEN, expected_arrays
from test.strategies import some
from test.waiting import PATIENCE


def numbers(step: int) -> dict[str, Any]:
    return {"x": np.full(5, step), "step": step}


def folders(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def called() -> Iterator[list[int]]:
    """Has something for each SIGTERM that reaches the handler that the program had before."""
    reached: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: reached.append(1))
    yield reached
    signal.signal(signal.SIGTERM, before)


# -- alone


def test_steps_are_folders_of_their_own(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, options=SaveOptions(user_metadata={"run": 7})) as steps:
        steps.save(100, numbers(100), {"loss": 0.5})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000100"]
    copied = (tmp_path / "step-00000100").rename(tmp_path / "copied")
    target = numbers(0)
    assert load_state_dict(target, copied).unique_id == 100
    assert target["step"] == 100
    user = read_metadata(copied).user_metadata
    assert user == {"run": 7, "checkpoint_manager": {"step": 100, "metrics": {"loss": 0.5}}}


@pytest.mark.parametrize(
    ("arguments", "saved"),
    [({}, [0, 1, 2, 3, 4, 5, 6]), ({"save_interval_steps": 3}, [0, 3, 6]), ({"save_interval_seconds": 1e6}, [])],
)
def test_when_it_saves(tmp_path: Path, arguments: dict[str, Any], saved: list[int]) -> None:
    with CheckpointManager(tmp_path, **arguments) as steps:
        found = [step for step in range(7) if steps.save(step, numbers(step)) is not None]
        assert found == saved
        assert not steps.stopping
    if saved:
        assert folders(tmp_path) == saved


def test_a_save_by_force_and_what_is_returned(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=10) as steps:
        assert steps.save(5, numbers(5)) is None
        pending = steps.save(5, numbers(5), force=True)
        assert isinstance(pending, AsyncSave)
        assert pending.result().unique_id == 5
    with CheckpointManager(tmp_path, save_interval_steps=10, async_save=False) as steps:
        assert isinstance(steps.save(10, numbers(10)), SaveReport)


def test_a_step_that_was_just_restored_is_not_saved_again(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=5) as steps:
        steps.save(5, numbers(5))
    with CheckpointManager(tmp_path, save_interval_steps=5) as steps:
        assert steps.restore(numbers(0)) == 5
        assert not steps.should_save(5)
        assert steps.should_save(10)


def test_a_step_that_was_just_saved_is_saved_again_by_force_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paddle_dist_ckpt")
    with CheckpointManager(tmp_path, async_save=False) as steps:
        steps.save(1, numbers(1))
        assert steps.save(1, numbers(2)) is None
        assert "step 1 was saved, or restored, just now: force=True saves it again" in caplog.text
        assert steps.save(1, numbers(2), force=True) is not None
        target = numbers(0)
        steps.restore(target)
        assert str(target) == str(numbers(2))


@pytest.mark.parametrize("error", [RuntimeError("odd"), KeyboardInterrupt()], ids=repr)
def test_a_step_is_due_again_when_a_save_of_it_by_force_has_failed(tmp_path: Path, error: BaseException) -> None:
    """On the rank on which it was interrupted as well as on those to which that is an error."""

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            raise error

        def set_state_dict(self, state: dict[str, Any]) -> None: ...

    with CheckpointManager(tmp_path, async_save=False) as steps:
        steps.save(3, {"x": 1})
        assert not steps.should_save(3)
        with pytest.raises((CheckpointError, KeyboardInterrupt)):
            steps.save(3, {"odd": Odd()}, force=True)
        assert steps.should_save(3)


@pytest.mark.parametrize("told_by", ["wait", "result", "a save by force"])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_step_that_could_not_be_saved_is_due_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool, told_by: str
) -> None:
    def save(force: bool = False) -> None:
        saving = steps.save(20, numbers(20), force=force)
        assert saving is not None
        if isinstance(saving, AsyncSave):
            {"wait": steps.wait, "result": saving.result, "a save by force": saving.wait}[told_by]()

    with CheckpointManager(tmp_path, save_interval_steps=10, async_save=in_background) as steps:
        with monkeypatch.context() as patch:
            failing(patch, 20)
            if told_by == "a save by force" and in_background:
                save()
                save_by_force = pytest.raises(CheckpointError, match="an earlier save")
            else:
                save_by_force = pytest.raises(OSError, match="No space left")
            with save_by_force:
                save(force=told_by == "a save by force")
        assert steps.should_save(20)
        save()
        assert not steps.should_save(20)
        assert steps.save(20, numbers(20)) is None
        assert steps.all_steps() == [20]
        shutil.rmtree(tmp_path)
        with pytest.raises(CheckpointError, match="gone, without step 20 of before"):
            steps.save(30, numbers(30))


def test_a_step_that_could_not_be_saved_is_not_expected_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which a root that was made anew would be taken for one that is not mounted."""
    root = tmp_path / "run"
    with CheckpointManager(root) as steps:
        with monkeypatch.context() as patch:
            failing(patch, 1)
            steps.save(1, numbers(1))
            with pytest.raises(OSError, match="No space left"):
                steps.wait()
        root.rename(tmp_path / "other")
        steps.save(2, numbers(2))
        steps.wait()
        assert steps.all_steps() == [2]


def test_a_step_that_is_being_saved_is_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paddle_dist_ckpt")
    with CheckpointManager(tmp_path) as steps:
        steps.save(1, numbers(1))
        assert steps.save(1, numbers(1)) is None
        assert "a save of step 1 was begun just now; wait() tells how it ends" in caplog.text
        steps.wait()
        assert steps.save(1, numbers(1)) is None
        assert "step 1 was saved, or restored, just now" in caplog.text


def test_to_ask_twice_about_a_step_does_not_matter(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval_seconds=0.05) as steps:
        asked = []
        start = time.monotonic()
        for step in range(40):
            time.sleep(0.005)
            asked.append(
                (steps.should_save(step), steps.should_save(step), steps.save(step, numbers(step)) is not None)
            )
        seconds = time.monotonic() - start
        assert not steps.should_save(39)
        assert steps.save(39, numbers(39)) is None
    assert all(first == second == saved for first, second, saved in asked)
    assert 2 <= sum(saved for _, _, saved in asked) <= seconds / 0.05 + 1


def test_to_ask_costs_next_to_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval_seconds=1e6, save_interval_steps=10**9) as steps:
        steps.should_save(1)
        times = []
        for first in range(2, 20_002, 1000):
            start = time.thread_time()
            for step in range(first, first + 1000):
                steps.should_save(step)
            times.append((time.thread_time() - start) / 1000)
    assert sorted(times)[len(times) // 2] < 50e-6


def test_what_is_being_read_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()
    real = manager_module.load_with

    def slow(*args: Any) -> Any:
        reading.set()
        assert go_on.wait(20)
        return real(*args)

    monkeypatch.setattr(manager_module, "load_with", slow)
    with CheckpointManager(tmp_path, keep_last=1, async_save=False) as steps:
        steps.save(1, numbers(1))
        target = numbers(0)
        reader = threading.Thread(target=steps.restore, args=(target,))
        reader.start()
        assert reading.wait(20)
        for step in (2, 3):
            steps.save(step, numbers(step))
        assert folders(tmp_path) == [1, 3]
        go_on.set()
        reader.join()
        assert target["step"] == 1
        steps.save(4, numbers(4))
        assert folders(tmp_path) == [4]


def test_latest_is_only_ever_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paddle_dist_ckpt.saving.rank_files import RankFiles

    go_on = threading.Event()
    real = RankFiles.write
    monkeypatch.setattr(RankFiles, "write", lambda self: (go_on.wait(20), real(self))[1])
    go_on.set()
    with CheckpointManager(tmp_path, keep_last=1) as steps:
        steps.save(1, numbers(1))
        steps.wait()
        go_on.clear()
        pending = steps.save(2, numbers(2))
        assert isinstance(pending, AsyncSave)
        assert (steps.latest_step(), steps.all_steps(), folders(tmp_path)) == (1, [1], [1, 2])
        assert steps.restore(numbers(0)) == 1
        go_on.set()
        pending.result()
        assert (steps.latest_step(), folders(tmp_path)) == (2, [2])


def test_a_run_begins_with_what_others_wrote(tmp_path: Path) -> None:
    expected = expected_arrays("paddle-3.3.1")["layers.0.qkv.weight"]
    state = {"layers.0.qkv.weight": np.zeros_like(expected)}
    with CheckpointManager(tmp_path) as steps:
        with pytest.raises(ValueError, match="not both"):
            steps.restore(state, 1, path=GOLDEN / "paddle-3.3.1")
        assert steps.restore(state, path=GOLDEN / "paddle-3.3.1") is None
        steps.save(1, {"qkv": state["layers.0.qkv.weight"]})
        steps.wait()
        assert steps.all_steps() == [1]
    np.testing.assert_array_equal(state["layers.0.qkv.weight"], expected)


def failing(
    monkeypatch: pytest.MonkeyPatch,
    at_step: int,
    error: Exception = OSError(28, "No space left on device"),  # noqa: B008
) -> None:
    from paddle_dist_ckpt import LocalStorage

    real = LocalStorage.create

    def create(self: LocalStorage, name: str) -> Any:
        if f"step-{at_step:08d}" in self.location:
            raise error
        return real(self, name)

    monkeypatch.setattr(LocalStorage, "create", create)


def test_a_failure_in_the_background_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 2)
    steps = CheckpointManager(tmp_path, keep_last=1)
    steps.save(1, numbers(1))
    steps.save(2, numbers(2))
    with pytest.raises(CheckpointError, match="No space left"):
        steps.save(3, numbers(3))
    assert steps.latest_step() == 1, "nothing is removed before something newer is there"
    steps.save(4, numbers(4))
    steps.close()
    assert folders(tmp_path)[-1] == 4
    with pytest.raises(CheckpointError, match="closed"):
        steps.save(5, numbers(5))


def test_when_a_manager_is_closed_nothing_is_due_by_time(tmp_path: Path) -> None:
    """Nor on other ranks, if it is the coordinator's: they would wait for its part in the save."""
    with CheckpointManager(tmp_path, save_interval_seconds=1e-6) as steps:
        assert steps.should_save(1)
    assert not steps.should_save(2)


def test_a_failure_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, 2)
    with CheckpointManager(tmp_path) as steps:
        steps.save(2, numbers(2))
        with pytest.raises(CheckpointError, match="No space left"):
            steps.save(3, numbers(3))
    assert folders(tmp_path) in ([], [2]), "step 3 was not saved, and close() did not raise"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("No space"), RuntimeError("No")])
@pytest.mark.parametrize("of_another", [False, True])
@pytest.mark.parametrize("when_busy", ["wait", "raise"])
def test_the_last_save_before_the_end_is_made_whatever_was_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    of_another: bool,
    when_busy: Any,
) -> None:
    failing(monkeypatch, 2, error)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    options = SaveOptions(when_busy=when_busy)
    try:
        other = CheckpointManager(tmp_path / "other")
        with CheckpointManager(tmp_path, save_interval_steps=2, save_on_sigterm=True, options=options) as steps:
            (other if of_another else steps).save(2, numbers(2))
            signal.raise_signal(signal.SIGTERM)
            step = 2
            while not steps.stopping and step < 10_000:
                step += 1
                steps.save(step, numbers(step))
        assert re.search(f"failed: .*{re.escape(str(error))}", caplog.text)
        assert step in folders(tmp_path)
        if of_another:
            with pytest.raises(CheckpointError if isinstance(error, RuntimeError) else type(error)):
                other.close()
        with CheckpointManager(tmp_path) as steps:
            assert steps.latest_step() == step
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_failure_of_the_last_save_is_raised_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, 1)
    with pytest.raises(OSError, match="No space left"), CheckpointManager(tmp_path) as steps:
        steps.save(1, numbers(1))
    with pytest.raises(KeyError), CheckpointManager(tmp_path) as steps, caplog.at_level(logging.ERROR):
        steps.save(1, numbers(1))
        raise KeyError("of the user's")
    assert "failed as well" in caplog.text


@pytest.mark.parametrize("in_wait", [True, False])
def test_close_waits_for_what_an_interrupt_has_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_wait: bool
) -> None:
    begun, go_on, create, wait = threading.Event(), threading.Event(), LocalStorage.create, AsyncSave.wait

    def slow(self: LocalStorage, name: str) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        return create(self, name)

    def interrupted(self: AsyncSave, timeout: float | None = None) -> bool:
        assert begun.wait(PATIENCE)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStorage, "create", slow)
    steps = CheckpointManager(tmp_path)
    steps.save(1, numbers(1))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AsyncSave, "wait", interrupted)
        steps.wait() if in_wait else steps.close()

    def waits(self: AsyncSave, timeout: float | None = None) -> bool:
        go_on.set()
        return wait(self, timeout)

    monkeypatch.setattr(AsyncSave, "wait", waits)
    steps.close()
    assert go_on.is_set(), "it did not wait"
    assert (tmp_path / "step-00000001" / "1.metadata").exists()


def test_restore_says_what_is_missing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as steps:
        assert steps.restore(numbers(0)) is None
        with pytest.raises(CheckpointNotFoundError, match="step-00000009"):
            steps.restore(numbers(0), 9)
        for bad in (-1, 1.5, True, None, 10**18, 2**64):
            with pytest.raises(ValueError, match="step must be"):
                steps.save(bad, numbers(0))
            with pytest.raises(ValueError, match="step must be"):
                steps.should_save(bad)


@pytest.mark.parametrize(
    "arguments",
    [
        {"keep_last": 0},
        {"keep_last": 2.0},
        {"keep_every": -1},
        {"best": "loss"},
        {"best": ["loss", "min"]},
        {"best": ("loss", "min", 0)},
        {"best": ("loss", "min", 1, 1)},
        {"save_interval_steps": 0},
        {"save_interval_steps": 1.5},
        {"save_interval_seconds": 0},
        {"save_interval_seconds": "5"},
        {"save_interval_seconds": float("nan")},
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any]) -> None:
    ((name, value),) = arguments.items()
    kinds = {"best": "a tuple", "save_interval_seconds": "a number of seconds above 0"}
    kind = kinds.get(name, "an integer of at least 1")
    with pytest.raises(ValueError, match=f"^{name} must be None or {kind}.*, not ") as caught:
        CheckpointManager(tmp_path, **arguments)
    assert str(caught.value).endswith(repr(value))
    with pytest.raises(TypeError):
        CheckpointManager(tmp_path, options={"timeout": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="async_save must be a bool"):
        CheckpointManager(tmp_path, async_save="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="async_save must be a bool"):
        save_state_dict(numbers(0), tmp_path, async_save="no")  # type: ignore[call-overload]


def test_steps_and_intervals_may_be_numpy_integers(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=np.int64(2)) as steps:  # type: ignore[arg-type]
        assert steps.save(np.int64(3), numbers(3)) is None  # type: ignore[arg-type]
        steps.save(np.int64(4), numbers(4))  # type: ignore[arg-type]
        steps.wait()
        assert steps.restore(numbers(0), np.int64(4)) == 4  # type: ignore[arg-type]


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("run") as steps:
        steps.save(1, numbers(1))
        monkeypatch.chdir(tmp_path / "elsewhere")
        steps.save(2, numbers(2))
        steps.wait()
        assert steps.all_steps() == [1, 2]
    assert folders(tmp_path / "run") == [1, 2]


def test_a_repeated_sigterm_does_not_end_the_last_save(
    tmp_path: Path, called: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher repeats it while close() waits for that save."""
    repeated, publish = threading.Event(), LocalStorage.publish

    def slow(storage: LocalStorage, name: str, *args: Any, **kwargs: Any) -> bool:
        if name == "1.metadata":
            assert repeated.wait(PATIENCE)
        return publish(storage, name, *args, **kwargs)

    def wait(manager: CheckpointManager) -> None:
        signal.raise_signal(signal.SIGTERM)
        repeated.set()
        wait_for_save(manager)

    monkeypatch.setattr(LocalStorage, "publish", slow)
    with CheckpointManager(tmp_path, save_on_sigterm=True) as steps:
        signal.raise_signal(signal.SIGTERM)
        steps.save(1, numbers(1))
        wait_for_save = CheckpointManager.wait
        monkeypatch.setattr(CheckpointManager, "wait", wait)
    assert (folders(tmp_path), called) == ([1], [])
    signal.raise_signal(signal.SIGTERM)
    assert not called, "what follows is not interrupted either"
    monkeypatch.setattr(sigterm, "_REPEAT_SECONDS", 0.0)
    signal.raise_signal(signal.SIGTERM)
    assert called == [1], "it is not the manager's any more"


@pytest.mark.parametrize("when", ["after the last step", "while its save is waited for"])
def test_a_first_sigterm_that_no_step_follows_counts_when_the_last_save_is_made(
    tmp_path: Path, called: list[int], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    wait_for_save = CheckpointManager.wait

    def wait(manager: CheckpointManager) -> None:
        signal.raise_signal(signal.SIGTERM)
        assert not called
        wait_for_save(manager)

    with CheckpointManager(tmp_path, save_on_sigterm=True) as steps:
        steps.save(1, numbers(1))
        if when == "after the last step":
            signal.raise_signal(signal.SIGTERM)
            steps.save(1, numbers(1), force=True)
            assert not called
        else:
            monkeypatch.setattr(CheckpointManager, "wait", wait)
    assert (folders(tmp_path), called) == ([1], [1])


@pytest.mark.parametrize("where", ["in the block", "by the last save"])
def test_a_sigterm_does_not_hide_what_is_raised(
    tmp_path: Path, called: list[int], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It is what a launcher sends to the ranks that are left when one has died."""

    def fail(manager: CheckpointManager) -> None:
        raise CheckpointError("by the last save")

    with pytest.raises(CheckpointError, match=where), CheckpointManager(tmp_path, save_on_sigterm=True) as steps:
        steps.save(1, numbers(1))
        signal.raise_signal(signal.SIGTERM)
        if where == "in the block":
            raise CheckpointError(where)
        monkeypatch.setattr(CheckpointManager, "wait", fail)
    assert not called


@pytest.mark.parametrize("first", [0, 1])
def test_sigterm_reaches_all_managers_that_are_open(
    tmp_path: Path, called: list[int], monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    made = [CheckpointManager(tmp_path / str(i), save_on_sigterm=True) for i in range(3)]
    made.pop(first).close()
    signal.raise_signal(signal.SIGTERM)
    for manager in made:
        deadline = time.monotonic() + 10
        step = 0
        while not manager.stopping and time.monotonic() < deadline:
            manager.should_save(step := step + 1)
        assert manager.stopping
    signal.raise_signal(signal.SIGTERM)
    assert not called, "launchers send it several times in a row"
    monkeypatch.setattr(sigterm, "_REPEAT_SECONDS", 0.0)
    signal.raise_signal(signal.SIGTERM)
    assert called == [1], "later, it is not the managers'"
    for manager in made:
        manager.close()
    signal.raise_signal(signal.SIGTERM)
    assert called == [1, 1]


def test_a_forked_process_does_not_swallow_sigterm(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_on_sigterm=True):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)  # the signal did not end it
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_process_that_is_forked_during_a_removal_can_ask_for_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, begin = threading.Event(), threading.Event(), Removals.begin

    def slow(self: Removals, *args: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        return begin(self, *args)

    with CheckpointManager(tmp_path, keep_last=1) as steps:
        steps.save(1, numbers(1))
        steps.wait()
        monkeypatch.setattr(Removals, "begin", slow)
        steps.save(2, numbers(2))
        assert begun.wait(PATIENCE)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)  # ends it if it hangs
            try:
                os._exit(0 if steps.all_steps() == [1, 2] else 2)
            finally:
                os._exit(3)
        status = os.waitpid(child, 0)[1]
        go_on.set()
        assert os.waitstatus_to_exitcode(status) == 0
        steps.wait()
        assert steps.all_steps() == [2]


def test_a_manager_that_is_closed_by_another_thread_swallows_no_sigterm(tmp_path: Path, called: list[int]) -> None:
    manager = CheckpointManager(tmp_path, save_on_sigterm=True)
    thread = threading.Thread(target=manager.close)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGTERM)
    assert called == [1]


def test_a_manager_whose_close_is_interrupted_at_once_swallows_no_sigterm(
    tmp_path: Path, called: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[int]()
    close = Schedule.close

    def interrupted_once(schedule: Schedule) -> None:
        closed.append(1)
        if len(closed) == 1:
            raise KeyboardInterrupt
        close(schedule)

    manager = CheckpointManager(tmp_path, save_on_sigterm=True)
    monkeypatch.setattr(Schedule, "close", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    signal.raise_signal(signal.SIGTERM)
    assert called == [1]
    manager.close()
    assert len(closed) == 2, "it is closed on all ranks"


def test_sigterm_needs_the_main_thread(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            CheckpointManager(tmp_path, save_on_sigterm=True)
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


def test_a_step_is_due_again_after_a_return_to_an_earlier_one(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=10) as steps:
        steps.save(10, numbers(10))
        steps.save(20, numbers(20))
        steps.restore(numbers(0), 10)
        assert steps.save(20, numbers(21)) is not None
        steps.wait()
        target = numbers(0)
        steps.restore(target, 20)
        assert target["step"] == 21


@pytest.mark.parametrize("in_background", [False, True])
def test_metrics_that_lack_what_best_needs_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_background: bool
) -> None:
    with CheckpointManager(tmp_path, keep_last=1, best=("loss", "min"), async_save=in_background) as steps:
        steps.save(1, numbers(1), {"loss": 0.5})
        steps.wait()
        assert not warnings_of(caplog)
        steps.save(2, numbers(2), {"val_loss": 0.1, "accuracy": 0.9})
        steps.save(3, numbers(3))
    (said,) = warnings_of(caplog)
    assert "step 2 was saved without the metric 'loss'" in said
    assert "'val_loss', 'accuracy'" in said


@pytest.mark.parametrize("in_background", [False, True])
def test_a_step_is_saved_whatever_its_retention_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, in_background: bool
) -> None:
    def look(self: Steps, *_: Any) -> None:
        raise MemoryError("Unable to allocate 3.1 GiB")

    with CheckpointManager(tmp_path, keep_last=1, async_save=in_background) as steps:
        with monkeypatch.context() as patch:
            patch.setattr(Steps, "look", look)
            steps.save(1, numbers(1))
            steps.wait()
        assert "saved, but not all that follows a save was done: " in caplog.text
        assert steps.all_steps() == [1]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("what", ["metric", "damage"])
def test_a_handler_of_the_log_may_ask_the_manager(tmp_path: Path, in_background: bool, what: str) -> None:
    """It is called by warnings that are given while the steps are looked at."""
    seen: list[tuple[str, int | None]] = []
    steps = CheckpointManager(tmp_path, keep_last=3, best=("loss", "min"), async_save=in_background)

    class Asks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING and not seen:
                seen.append((record.getMessage(), None))
                seen.append(("", steps.latest_step()))

    def work() -> None:
        steps.save(2, numbers(2), {} if what == "metric" else {"loss": 1.0})
        steps.wait()
        steps.all_steps()

    steps.save(1, numbers(1), {"loss": 1.0})
    steps.wait()
    if what == "damage":
        (tmp_path / "step-00000000").mkdir()
        (tmp_path / "step-00000000" / "0.metadata").write_bytes(b"rubbish")
    handler, logger = Asks(), logging.getLogger("paddle_dist_ckpt")
    filters = list(logger.filters)
    logger.addHandler(handler)
    try:
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        worker.join(PATIENCE)
        assert not worker.is_alive(), "it waits for itself"
    finally:
        logger.removeHandler(handler)
    assert ("without the metric" if what == "metric" else "not counted") in seen[0][0]
    assert seen[1] == ("", 2)
    assert logger.filters == filters


@pytest.mark.parametrize("what", ["ask", "save"])
def test_a_handler_of_a_signal_may_use_the_manager_that_is_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    manager, found = CheckpointManager(tmp_path, async_save=False, keep_last=1), list[Any]()
    manager.save(1, numbers(1))
    look = Steps.look

    def interrupted(steps: Steps, opened: Folders) -> None:
        monkeypatch.setattr(Steps, "look", look)
        if what == "save":
            manager.save(2, numbers(2))
        found.append(manager.all_steps())
        look(steps, opened)

    monkeypatch.setattr(Steps, "look", interrupted)
    worker = threading.Thread(target=lambda: found.append(manager.latest_step()), daemon=True)
    worker.start()
    worker.join(PATIENCE)
    assert not worker.is_alive(), "it waits for itself"
    latest = 2 if what == "save" else 1
    assert found == [[latest], latest]


def test_a_handler_of_a_signal_may_wait_for_a_failed_save_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 1)
    manager, raised = CheckpointManager(tmp_path), AsyncSave.raised
    pending = manager.save(1, numbers(1))
    assert isinstance(pending, AsyncSave)
    with pytest.raises(OSError, match="No space left"):
        pending.result()

    def interrupted(saving: AsyncSave) -> bool:
        monkeypatch.setattr(AsyncSave, "raised", raised)
        manager.wait()
        return saving.raised

    monkeypatch.setattr(AsyncSave, "raised", property(interrupted))
    assert manager.should_save(1)
    manager.close()


@pytest.mark.parametrize("keep_last", [None, 2])
def test_a_step_below_those_that_there_are_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep_last: int | None
) -> None:
    with CheckpointManager(tmp_path, async_save=False) as before:
        before.save(100, numbers(100))
        before.save(200, numbers(200))
    with CheckpointManager(tmp_path, keep_last=keep_last, async_save=False) as steps:
        assert not warnings_of(caplog)
        steps.save(10, numbers(10))
        steps.save(20, numbers(20))
    (said,) = warnings_of(caplog)
    assert "step 10 was saved, and" in said
    assert "has higher ones: steps 100, 200. restore()" in said
    assert ("keep_last=2 removes" in said) == (keep_last is not None)


def test_arguments_that_keep_nothing_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for arguments in ({}, {"keep_last": 1}, {"keep_last": 1, "keep_every": 2, "best": ("loss", "min")}):
        CheckpointManager(tmp_path, **arguments).close()
    assert not warnings_of(caplog)
    CheckpointManager(tmp_path, keep_every=2, best=("loss", "min")).close()
    (said,) = warnings_of(caplog)
    assert "without keep_last every step is kept, with or without keep_every and best" in said


@pytest.mark.parametrize("bad", ["s3://bucket/run", ""])
def test_roots_that_are_no_folders(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ValueError, match="must name a local folder"):
        CheckpointManager(bad)


@pytest.mark.parametrize("bad", [[1], {"loss": "0.01"}, {"loss": True}, {3: 1.0}, {"loss": np.ones(2)}])
def test_bad_metrics(tmp_path: Path, bad: Any) -> None:
    with CheckpointManager(tmp_path) as steps:
        with pytest.raises(TypeError, match="metrics"):
            steps.save(1, numbers(1), bad)
        with pytest.raises(TypeError, match="options must be LoadOptions"):
            steps.restore(numbers(0), options=SaveOptions())  # type: ignore[arg-type]
        assert steps.all_steps() == []


@pytest.mark.parametrize("given", [[True, True], [False, True]], ids=str)
def test_a_restore_of_several_ranks_does_not_take_an_option_to_be_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[bool]
) -> None:
    own = threading.local()
    monkeypatch.setattr(manager_module, "connected", lambda *_: own.ranks)
    states = [numbers(0), numbers(0)]

    def restore(rank: SimulatedRank) -> None:
        own.ranks = dataclasses.replace(rank.connection, count=2)
        with CheckpointManager(tmp_path, async_save=False, options=SaveOptions(timeout=60)) as steps:
            steps.save(3, numbers(3))
            steps.restore(states[rank.rank], options=LoadOptions(timeout=60, no_dist=given[rank.rank]))

    for error in errors_of(run_ranks(2, restore), ValueError):
        assert "the ranks of a manager restore together" in str(error)
    assert all(state["step"] == 0 and not state["x"].any() for state in states)


def test_who_is_alone_may_say_so(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, async_save=False) as steps:
        steps.save(3, numbers(3))
        assert steps.restore(numbers(0), options=LoadOptions(no_dist=True)) == 3


def test_a_metric_of_several_elements_is_refused_whatever_holds_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as steps, pytest.raises(TypeError, match="'loss' is no single number"):
        steps.save(1, numbers(1), {"loss": paddle.ones([2])})  # type: ignore[dict-item]


def dead_step(root: Path, step: int) -> Path:
    """What a save has left that was killed when its data files were written; returns the folder."""
    folder = root / f"step-{step:08d}"
    save_state_dict(numbers(step), folder, unique_id=step)
    (folder / f"{step}.metadata").unlink()
    (data,) = folder.iterdir()
    (folder / f"{step}.{data.name.split('.')[1]}.claim").touch()
    return folder


@pytest.mark.parametrize("by", ["a new manager", "the same one", "prune"])
def test_what_a_killed_save_has_left_beside_a_step_that_is_kept_goes(tmp_path: Path, by: str) -> None:
    """The job began again at once, when its claim still counted, and has saved the step anew."""
    options: dict[str, Any] = {"async_save": False, "keep_last": 1, "keep_every": 2}
    (claim,) = dead_step(tmp_path, 2).glob("*.claim")
    claim.write_text("{}")  # for an empty one is of a deletion
    with CheckpointManager(tmp_path, **options) as steps:
        for step in (1, 2, 3):
            steps.save(step, numbers(step))
        folder = tmp_path / "step-00000002"
        assert len(list(folder.glob("*.safetensors"))) == 2
        age(folder)
        if by == "the same one":
            steps.save(4, numbers(4))
    if by == "a new manager":  # before it looks whether there is room for what it saves
        with CheckpointManager(tmp_path, **options) as steps, pytest.raises(CheckpointError, match="cannot be stored"):
            steps.save(4, {"x": object()})
    if by == "prune":
        plan = plan_prune(tmp_path, Retention(2, None, None))
        assert (plan.doomed, plan.abandoned, plan.littered) == ([], [], [2])
        assert carry_out(plan).tidied == [2]
    assert len(list(folder.glob("*.safetensors"))) == 1
    assert not list(folder.glob("*.claim"))
    state = numbers(0)
    load_state_dict(state, folder)
    assert (state["x"] == 2).all()


def test_the_first_save_has_the_room_of_a_step_that_was_not_finished(tmp_path: Path) -> None:
    """Whichever step it is, and before it is written: there may be room for one alone."""
    with CheckpointManager(tmp_path, async_save=False) as steps:
        steps.save(1, numbers(1))
    age(dead_step(tmp_path, 2))
    with CheckpointManager(tmp_path, async_save=False) as steps:
        assert steps.restore(numbers(0)) == 1
        assert folders(tmp_path) == [1, 2]
        with pytest.raises(CheckpointError, match="cannot be stored"):
            steps.save(3, {"x": object()})
        assert folders(tmp_path)[:1] == [1]
        assert 2 not in folders(tmp_path)
        steps.save(4, numbers(4))
        assert steps.all_steps() == [1, 4]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_after_one_that_found_no_room_looks_again_for_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    """A job that is started again at once finds the claim of the save that was killed still fresh."""

    def free_bytes(storage: LocalStorage) -> int:
        return 0 if folder.exists() and folder.name not in storage.location else 1 << 30

    folder = dead_step(tmp_path, 2)
    with CheckpointManager(tmp_path, async_save=in_background) as steps:
        monkeypatch.setattr(LocalStorage, "free_bytes", free_bytes)
        with pytest.raises(OSError, match="0 bytes free"):
            steps.save(3, numbers(3))
        age(folder)
        steps.save(4, numbers(4))
        steps.wait()
        age(dead_step(tmp_path, 2))
        with pytest.raises(OSError, match="0 bytes free"):
            steps.save(5, numbers(5))
        steps.save(6, numbers(6))
        steps.wait()
        assert steps.all_steps() == [4, 6]
        assert not folder.exists()


@pytest.mark.parametrize("asked", ["wait", "result", "by the next save"])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_after_one_that_has_filled_the_disk_looks_again_for_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool, asked: str
) -> None:
    """Where it is not known how much is free, room is lacking when the save goes on in the background."""
    folder, create = dead_step(tmp_path, 2), LocalStorage.create

    def full(storage: LocalStorage, name: str) -> Any:
        if name.endswith(".safetensors") and folder.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(storage, name)

    def save(step: int) -> None:
        saving = steps.save(step, numbers(step))
        if asked == "wait":
            steps.wait()
        elif isinstance(saving, AsyncSave):
            saving.result() if asked == "result" else saving.wait()

    with CheckpointManager(tmp_path, async_save=in_background) as steps:
        monkeypatch.setattr(LocalStorage, "create", full)
        if asked == "by the next save" and in_background:
            save(3)
        else:
            with pytest.raises(OSError, match="No space left"):
                save(3)
        age(folder)
        if asked == "by the next save" and in_background:
            with pytest.raises(CheckpointError, match="an earlier save"):
                save(4)
        save(5)
        assert steps.all_steps() == [5]
        assert not folder.exists()


def test_a_manager_says_what_it_is(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=2, best=("loss", "min")) as steps:
        assert repr(steps) == f"CheckpointManager({str(tmp_path)!r}, keep_last=2, best=('loss', 'min'))"


def age(folder: Path) -> None:
    """Let all in a folder be old enough for an abandoned save's."""
    for path in (*folder.iterdir(), folder):
        os.utime(path, (1, 1), follow_symlinks=False)


def test_whatever_has_metadata_is_not_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_state_dict(numbers(3), tmp_path / "step-00000003", unique_id=0)
    save_state_dict(numbers(4), tmp_path / "step-00000004", unique_id=4)
    (tmp_path / "step-00000004" / "4.metadata").write_bytes(b"damaged")
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000005" / "0.metadata").write_bytes(b"\x80\x04of Paddle's own")
    save_state_dict(numbers(6), tmp_path / "step-00000006", unique_id=6)
    (tmp_path / "step-00000006" / "6.metadata").unlink()
    for path in list((tmp_path / "step-00000006").iterdir()):
        path.rename(path.with_name("6_0.0123456789abcdef.0.safetensors"))
    (tmp_path / "step-00000006" / "6.0123456789abcdef.claim").touch()
    before = {step: sorted(path.name for path in (tmp_path / f"step-{step:08d}").iterdir()) for step in (3, 4, 5)}
    for step in (3, 4, 5, 6):
        age(tmp_path / f"step-{step:08d}")
    with caplog.at_level(logging.INFO, "paddle_dist_ckpt"), CheckpointManager(tmp_path) as steps:
        steps.save(7, numbers(7))
        steps.wait()
        assert steps.all_steps() == [7]
    assert folders(tmp_path) == [3, 4, 5, 7]
    assert before == {step: sorted(path.name for path in (tmp_path / f"step-{step:08d}").iterdir()) for step in before}
    assert "removing step 6" in caplog.text


@pytest.mark.parametrize("finished", [False, True])
def test_a_restore_goes_on_to_what_there_is_while_others_remove_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """The latest step is removed at each operation on its folder; a step that was asked for by number is missing."""
    restored: list[int | None] = []
    for at in range(100):
        root, seen = tmp_path / str(at), list[str]()
        with CheckpointManager(root, async_save=False) as steps:
            for step in (1, 2):
                steps.save(step, numbers(step))
            with monkeypatch.context() as patch:
                for name in ("read", "open", "size", "names"):
                    patch.setattr(
                        LocalStorage, name, removing(getattr(LocalStorage, name), root, 2, at, finished, seen)
                    )
                target = numbers(0)
                restored.append(steps.restore(target))
            assert target["step"] == restored[-1]
            assert float(target["x"].sum()) == float(numbers(target["step"])["x"].sum())
            if len(seen) <= at:
                break
            assert steps.latest_step() == 1
            with pytest.raises(CheckpointNotFoundError):
                steps.restore(numbers(0), 2)
            assert steps.restore(numbers(0), 1) == 1
    assert set(restored) == {1, 2}
    assert restored[-1] == 2, "nobody removes it"


def removing(real: Any, root: Path, step: int, at: int, finished: bool, seen: list[str]) -> Any:
    """An operation of a storage, before which a step is removed if it is the ``at``-th of those about its folder."""

    def operation(storage: LocalStorage, *args: Any, **more: Any) -> Any:
        if storage.location.endswith(f"{step:08d}") and threading.current_thread() is threading.main_thread():
            seen.append(real.__name__)
            if len(seen) == at + 1:
                removal = Removals(looked_at(root)).begin(Going([step]), Folders())[step]
                if finished:
                    removal.finish()
                    remove_step(root, step, (), Folders())
        return real(storage, *args, **more)

    return operation


def looked_at(root: Path) -> Steps:
    steps = Steps(root)
    steps.look(Folders())
    return steps


@pytest.mark.parametrize("in_background", [False, True])
def test_a_step_whose_durability_is_unknown_counts_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    real, refused = os.fsync, list[bool]()

    def refuse(descriptor: int) -> None:
        if not refused and (tmp_path / "step-00000002" / "2.metadata").exists():
            refused.append(True)
            raise OSError(errno.EIO, "injected")
        real(descriptor)

    with CheckpointManager(tmp_path, keep_last=1, async_save=in_background, save_interval_steps=1) as steps:
        steps.save(1, numbers(1))
        steps.wait()
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(DurabilityUnknownError, match="committed as id 2") as caught:
            saved = steps.save(2, numbers(2))
            assert isinstance(saved, AsyncSave)
            saved.result()
        assert caught.value.unique_id == 2
        assert (folders(tmp_path), steps.all_steps(), steps.latest_step()) == ([1, 2], [1, 2], 2)
        assert not steps.should_save(2)
        monkeypatch.undo()
        steps.save(3, numbers(3))
        steps.wait()
        assert steps.all_steps() == [3]


def test_odd_things_in_the_root_do_not_hide_the_steps(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=1) as steps:
        steps.save(1, numbers(1))
        steps.wait()
        (tmp_path / "step-00000007").write_text("a file")
        (tmp_path / "step-00000008").symlink_to(tmp_path / "step-00000008")
        assert steps.all_steps() == [1]
        assert steps.restore(numbers(0)) == 1
        steps.save(2, numbers(2))
        steps.wait()
        assert steps.all_steps() == [2]
        assert (tmp_path / "step-00000007").exists()


def test_steps_elsewhere_are_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with CheckpointManager(tmp_path / "root", keep_last=1) as steps:
        steps.save(1, numbers(1))
        steps.wait()
        (tmp_path / "root" / "step-00000001").rename(tmp_path / "archived")
        (tmp_path / "root" / "step-00000001").symlink_to(tmp_path / "archived")
        before = sorted(path.name for path in (tmp_path / "archived").iterdir())
        steps.save(2, numbers(2))
        steps.wait()
        assert steps.all_steps() == [1, 2]
    assert sorted(path.name for path in (tmp_path / "archived").iterdir()) == before


# -- on ranks


@pytest.mark.parametrize("own_folders", [False, True])
def test_four_ranks_train_and_come_back(pool: RankPool, tmp_path: Path, own_folders: bool) -> None:
    results = pool.run(cases.train_and_come_back, str(tmp_path), 4, own_folders, ranks=4)
    for rank, found in enumerate(results):
        assert found["nothing"] == (None, None, None)
        assert found["steps"] == ([4, 10, 12], 12, 4)
        assert found["restored None"] == (12, 12, (rank, 12))
        assert found["restored 4"] == (4, 4, (rank, 4))
        assert found["equal None"]
        assert found["equal 4"]
        assert list(found["folders"]) == ["step-00000004", "step-00000010", "step-00000012"]
        metadata = [name for files in found["folders"].values() for name in files if name.endswith(".metadata")]
        assert len(metadata) == (3 if rank == 0 or not own_folders else 0)


@pytest.mark.parametrize("other_names", [False, True])
def test_time_decides_alike_on_all_ranks(pool: RankPool, tmp_path: Path, other_names: bool) -> None:
    root = made(tmp_path / "run")
    results = pool.run(cases.due_by_time, str(root), 4, 0.2, 400, other_names, ranks=4)
    assert all(due == results[0] for due in results)
    assert len(results[0]) >= 3
    assert folders(root) == results[0]


def test_managers_of_the_same_ranks_are_kept_apart(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(cases.due_of_two, str(tmp_path), 3, ranks=3)
    timed, other = results[0]
    assert results == [[timed, other]] * 3
    assert len(timed) >= 2
    assert other == []


@pytest.mark.parametrize("victim", [0, 1])
def test_managers_are_matched_although_a_rank_was_interrupted_when_it_made_one(
    pool: RankPool, tmp_path: Path, victim: int
) -> None:
    first, second = pool.run(cases.due_when_made_again, str(tmp_path), 2, victim, ranks=2)
    assert len(first) >= 2
    assert first == second


def test_time_decides_soon_after_a_return_to_an_early_step(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(cases.due_after_going_back, str(tmp_path), 3, ranks=3)
    assert all(due == results[0] for due in results)
    assert all(len(due) >= 2 and due[0] < 250 for due in results[0])


@pytest.mark.parametrize("other_names", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_sigterm_on_one_rank_saves_once_and_stops_all(
    pool: RankPool, tmp_path: Path, victim: int, other_names: bool
) -> None:
    root = made(tmp_path / "run")
    results = pool.run(cases.interrupted, str(root), 3, victim, other_names, ranks=3)
    saved, last, latest = results[0]
    assert results == [(saved, last, latest)] * 3
    assert saved == [last] == [latest]
    assert folders(root) == saved


def test_managers_that_differ_are_refused_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    for outcome in pool.run(cases.differing_arguments, str(tmp_path), 3, ranks=3):
        assert outcome.error == "ValueError"
        assert "must be the same on every rank: keep_last is 1 on rank 0, " in outcome.message
    for outcome in pool.run(cases.bad_arguments_on_one_rank, str(tmp_path), 3, ranks=3):
        assert "keep_last must be None or an integer of at least 1" in outcome.message
    assert pool.run(cases.numpys_arguments, str(tmp_path), 3, ranks=3) == [[]] * 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_root_that_is_none_on_one_rank_is_refused_on_every_rank(pool: RankPool, tmp_path: Path, victim: int) -> None:
    words = ("/file is a file", "/file/run is a file, or below one", "/checkpoint holds a checkpoint itself")
    for outcomes in pool.run(cases.bad_roots_on_one_rank, str(tmp_path), 2, victim, ranks=2):
        for outcome, said in zip(outcomes, words, strict=True):
            assert outcome.error == "ValueError"
            assert f"host{victim}{said}" in outcome.message


@pytest.mark.parametrize("gone", [False, True], ids=["another", "gone"])
@pytest.mark.parametrize("by_restore", [False, True], ids=["saved", "restored"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_root_that_is_not_mounted_any_more_on_one_rank_stops_the_save(
    pool: RankPool, tmp_path: Path, victim: int, by_restore: bool, gone: bool
) -> None:
    said = "gone" if gone else "another folder than before"
    for outcome, made, latest in pool.run(cases.lost_mount, str(tmp_path), 2, victim, by_restore, gone, ranks=2):
        assert re.search(rf"/host{victim} is {said}, without step 1 of before", outcome.message)
        assert not made
        assert latest == 3


def test_bad_metrics_of_one_rank_are_an_error_on_every_rank_and_the_next_save_is_made(
    pool: RankPool, tmp_path: Path
) -> None:
    for refused, steps in pool.run(cases.bad_metrics_on_one_rank, str(tmp_path), 3, ranks=3):
        for outcome in refused:
            assert "metrics must be names and numbers" in outcome.message
        assert steps == [0, 1, 3]


@pytest.mark.parametrize("victim", [0, 1])
def test_all_ranks_hear_of_a_save_by_a_manager_that_is_closed_on_one(
    pool: RankPool, tmp_path: Path, victim: int
) -> None:
    """But not where the step is not due, for they make no call then."""
    due = [False, False, True, True, True, False]
    for rank, (outcomes, steps) in enumerate(pool.run(cases.closed_on_one_rank, str(tmp_path), 3, victim, ranks=3)):
        for outcome, together in zip(outcomes, due, strict=True):
            assert ("the manager is closed" in outcome.message) == (together or rank == victim)
            assert outcome.result is None
            assert ("CheckpointManager.save" in outcome.message) == (together and rank != victim)
            assert outcome.seconds < 10
        assert steps == [2]


@pytest.mark.parametrize("victim", [0, 1])
def test_all_ranks_make_the_save_after_one_that_was_interrupted_on_one(
    pool: RankPool, tmp_path: Path, victim: int
) -> None:
    """The one knows at once that it has failed, and the others hear of it."""
    results = pool.run(cases.interrupted_as_it_begins, str(tmp_path), 3, victim, ranks=3)
    for rank, (raised, steps) in enumerate(results):
        assert raised == ("KeyboardInterrupt" if rank == victim else "RankFailureError")
        assert steps == [1, 3]


def test_a_restore_of_a_step_that_is_not_there_asks_in_one_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank that is interrupted between two the others would hear at the timeout."""
    make, kinds = Ranks.make_session, []

    def made(ranks: Ranks, kind: str, timeout: float) -> Any:
        kinds.append(kind)
        return make(ranks, kind, timeout)

    with CheckpointManager(tmp_path, async_save=False) as steps:
        steps.save(1, numbers(1))
        monkeypatch.setattr(Ranks, "make_session", made)
        with pytest.raises(CheckpointNotFoundError, match="step-00000009; .* has step 1$"):
            steps.restore(numbers(0), step=9)
    assert kinds == ["restore step 9", "load_state_dict"]


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_restore_that_is_interrupted_before_it_reads_is_told_to_all(
    pool: RankPool, tmp_path: Path, victim: int, gone: bool
) -> None:
    results = pool.run(cases.interrupted_before_it_reads, str(tmp_path), 3, victim, gone, ranks=3)
    for rank, (raised, seconds, restored) in enumerate(results):
        assert raised.startswith("KeyboardInterrupt" if rank == victim else "RankFailureError"), raised
        assert rank == victim or f"rank {victim}" in raised
        assert seconds < 30
        assert restored == 1


def test_all_ranks_make_a_save_again_that_has_failed_on_one(pool: RankPool, tmp_path: Path) -> None:
    for raised, due, steps in pool.run(cases.made_again, str(tmp_path), 3, 1, ranks=3):
        assert raised == "RankFailureError"
        assert due
        assert steps == [10, 20]


def test_only_a_first_save_has_rounds_for_what_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, plan, remove_together = list[str](), SaveCoordinator.plan, shared_steps.remove_together

    def planned(*args: Any) -> Any:
        rounds.append("plan")
        return plan(*args)

    def removed(*args: Any) -> None:
        rounds.append("retain")
        remove_together(*args)

    monkeypatch.setattr(SaveCoordinator, "plan", planned)
    monkeypatch.setattr(shared_steps, "remove_together", removed)
    with CheckpointManager(tmp_path, async_save=False) as steps:
        for step, expected in ((1, ["plan", "retain", "plan", "retain"]), (2, ["plan", "retain"])):
            rounds.clear()
            steps.save(step, numbers(step))
            assert rounds == expected


def test_a_latest_step_that_cannot_be_read_is_an_error_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    for failed in pool.run(cases.unreadable_step, str(tmp_path), 2, ranks=2):
        for outcome in failed:
            assert outcome.error == "RankFailureError"
            assert "step-00000002 cannot be read, and may be the latest step: [Errno 116] Stale" in outcome.message


def test_a_missing_step_is_an_error_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    for outcome in pool.run(cases.missing_step, str(tmp_path), 3, ranks=3):
        assert outcome.error == "CheckpointNotFoundError"
        assert "step-00000077" in outcome.message


def test_ranks_on_other_hosts_than_before_do_not_begin_anew(pool: RankPool, tmp_path: Path) -> None:
    for nothing, latest, older, *restored in pool.run(cases.ranks_on_other_hosts, str(tmp_path), 3, ranks=3):
        for outcome, has in ((nothing, "has none"), (latest, "has none"), (older, "has step 5 as its latest")):
            assert outcome.error == "RankFailureError"
            assert re.search("/host0 on rank 2 has step 7, and .*/host1 on the coordinator, rank 0, ", outcome.message)
            assert f"{has}: do the ranks run on other hosts" in outcome.message
            assert "coordinator_rank=2 goes on from step 7" in outcome.message
        assert restored == [(5, 5), (7, 7)]


@pytest.mark.parametrize("odd", ["damaged", "a file", "a link to nowhere"])
def test_a_highest_step_that_is_none_is_passed_over_with_roots_of_ranks_too(tmp_path: Path, odd: str) -> None:
    options = SaveOptions(separate_folders=True)
    with CheckpointManager(tmp_path, async_save=False, options=options) as steps:
        for step in (1, 2):
            steps.save(step, numbers(step))
        if odd == "damaged":
            (tmp_path / "step-00000002" / "2.metadata").write_bytes(b"rubbish")
        elif odd == "a file":
            (tmp_path / "step-00000005").touch()
        else:
            (tmp_path / "step-00000005").symlink_to(tmp_path / "none")
        expected = 1 if odd == "damaged" else 2
        assert steps.latest_step() == steps.restore(numbers(0)) == expected


def test_a_root_that_is_a_link_to_nowhere_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """What it leads to may not be mounted."""
    root = tmp_path / "root"
    root.symlink_to(tmp_path / "none")
    with CheckpointManager(root, async_save=False) as steps:
        for use in (lambda: steps.restore(numbers(0)), steps.latest_step, lambda: steps.save(1, numbers(1))):
            with pytest.raises(CheckpointError, match=r"root is a link to nowhere: is what it leads to mounted\?"):
                use()
        (tmp_path / "none").mkdir()
        assert steps.restore(numbers(0)) is None


def test_steps_go_with_their_files_whatever_a_handler_of_the_log_raises(tmp_path: Path) -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("the log is not shipped")

    logger, handler = logging.getLogger("paddle_dist_ckpt"), Raises(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with CheckpointManager(tmp_path, async_save=False, keep_last=1) as steps:
            for step in (1, 2, 3):
                steps.save(step, numbers(step))
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    assert folders(tmp_path) == [3]


@pytest.mark.parametrize("becomes", ["nothing", "an empty folder", "another root"])
def test_a_root_that_is_another_folder_is_not_saved_to(tmp_path: Path, becomes: str) -> None:
    """The disk with the steps is unmounted, say."""
    root, other = tmp_path / "root", tmp_path / "other"
    for place in (root, other):
        with CheckpointManager(place, async_save=False) as steps:
            for step in (1, 2):
                steps.save(step, numbers(step))
    with CheckpointManager(root, async_save=False, keep_last=1) as steps:
        assert steps.restore(numbers(0)) == 2
        root.rename(tmp_path / "away")
        if becomes == "an empty folder":
            root.mkdir()
        elif becomes == "another root":
            root.symlink_to(other)
        for use in (lambda: steps.save(3, numbers(3)), lambda: steps.restore(numbers(0)), steps.latest_step):
            with pytest.raises(CheckpointError, match=r"root is .*, without steps 1, 2 of before: is it mounted\?"):
                use()
        assert folders(other) == [1, 2]
        assert becomes != "nothing" or not root.exists()
        if becomes != "nothing":
            root.unlink() if root.is_symlink() else root.rmdir()
        (tmp_path / "away").rename(root)
        steps.save(3, numbers(3))
        assert steps.all_steps() == [3]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_root_of_another_run_is_not_saved_to_for_a_step_that_is_removed_here_or_not_there_yet(
    tmp_path: Path, in_background: bool
) -> None:
    """A link to the folder of a run, say, that leads to the next one's by now, which has saved at the same steps."""
    root, other = tmp_path / "root", tmp_path / "other"
    with CheckpointManager(other, async_save=False) as steps:
        for step in (1, 2, 3):
            steps.save(step, numbers(step))
    (tmp_path / "run").mkdir()
    root.symlink_to("run")
    with CheckpointManager(root, async_save=in_background, keep_last=1) as steps:
        for step in (1, 2):
            steps.save(step, numbers(step + 10))
        steps.wait()
        assert steps.all_steps() == [2]
        root.unlink()
        root.symlink_to("other")
        for use in (lambda: steps.save(3, numbers(13)), lambda: steps.restore(numbers(0)), steps.latest_step):
            with pytest.raises(CheckpointError, match=r"is another folder than before, without step 2 of before"):
                use()
    assert folders(other) == [1, 2, 3]
    target = numbers(0)
    load_state_dict(target, other / "step-00000003")
    assert target["step"] == 3


@pytest.mark.parametrize("damaged", [False, True])
def test_a_root_of_another_number_with_the_steps_is_the_same(tmp_path: Path, damaged: bool) -> None:
    """Some file systems number folders anew when they are mounted again."""
    root = tmp_path / "root"
    with CheckpointManager(root, async_save=False) as steps:
        steps.save(1, numbers(1))
        assert steps.latest_step() == 1
        shutil.copytree(root, tmp_path / "copy")
        shutil.rmtree(root)
        (tmp_path / "copy").rename(root)
        if damaged:
            (root / "step-00000001" / "1.metadata").write_bytes(b"rubbish")
        steps.save(2, numbers(2))
        assert steps.all_steps() == ([2] if damaged else [1, 2])
        for folder in root.iterdir():
            shutil.rmtree(folder)
        assert steps.all_steps() == [], "somebody has removed them, and the root is that of the last look"


@pytest.mark.parametrize("in_background", some([True, False], 1))
def test_a_save_when_the_interpreter_ends(tmp_path: Path, in_background: bool) -> None:
    import subprocess
    import sys

    code = (
        "import atexit, sys, numpy as np\nfrom paddle_dist_ckpt import load_state_dict, save_state_dict\n"
        f"def last():\n    save_state_dict({{'x': np.ones(3_000_000)}}, sys.argv[1], async_save={in_background})\n"
        "    target = {'x': np.zeros(3_000_000)}\n    load_state_dict(target, sys.argv[1])\n"
        "    print(target['x'].sum())\n"
        "atexit.register(last)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, env=env, timeout=60, stdout=subprocess.PIPE
    )
    assert done.stdout.split() == [b"3000000.0"]


def test_a_process_that_ends_without_close_has_saved(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, numpy as np\nfrom paddle_dist_ckpt import CheckpointManager\n"
        "CheckpointManager(sys.argv[1]).save(3, {'x': np.ones(1000)})\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=env, timeout=60)
    with CheckpointManager(tmp_path) as steps:
        assert steps.latest_step() == 3


def test_the_folder_of_a_manager_is_a_path(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="root must be a str or a PathLike of one, not FaultyStorage"):
        CheckpointManager(FaultyStorage(tmp_path, lambda operation, name: None))
    for wrong in (5, None, b"steps"):
        with pytest.raises(TypeError, match=f"root must be a str or a PathLike of one, not {type(wrong).__name__}"):
            CheckpointManager(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="out must be a str or a PathLike of one, not int"):
        export(tmp_path, 5)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_looked_for_before_the_first_save_does_not_prevent_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    going, errors = Removals.going, [OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path))]

    def unseen(self: Removals, *arguments: Any, **more: Any) -> Any:
        if errors:
            raise errors.pop()
        return going(self, *arguments, **more)

    monkeypatch.setattr(Removals, "going", unseen)
    with CheckpointManager(tmp_path) as steps:
        steps.save(1, {"a": 1}).wait()
        assert steps.all_steps() == [1]
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"{tmp_path}: steps that were never committed are left for now: [Errno 5]")


def test_a_first_save_waits_no_longer_for_a_look_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: Any, **__: Any) -> None:
        raise CheckpointTimeoutError("a look has not returned", [0])

    with CheckpointManager(tmp_path) as steps:
        monkeypatch.setattr(Removals, "going", hangs)
        with pytest.raises(CheckpointTimeoutError, match="a look has not returned"):
            steps.save(1, {"a": 1})
        monkeypatch.undo()
        assert steps.all_steps() == []
