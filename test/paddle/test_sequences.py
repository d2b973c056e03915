"""Sequences of calls, of which the disk refuses some: what was saved last is there, and nothing else is lost."""

from __future__ import annotations

import errno
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from paddle_dist_ckpt import (
    AsyncSave,
    CheckpointError,
    CheckpointManager,
    DurabilityUnknownError,
    copy_checkpoint,
    delete_checkpoint,
    list_checkpoints,
    load_merged_state_dict,
    load_state_dict,
    read_metadata,
    rebuild_metadata,
    save_state_dict,
    verify,
)
from paddle_dist_ckpt.files.names import metadata_name
from paddle_dist_ckpt.manager.prune import carry_out, plan_prune
from paddle_dist_ckpt.manager.retention import Retention
from paddle_dist_ckpt.manager.steps import step_folder
from paddle_dist_ckpt.storage import local_files
from test.strategies import examples
from test.system_calls import SystemCalls

FOLDERS = st.sampled_from("ab")
IDS = st.integers(0, 3)
STEPS = st.integers(0, 7)
METRICS = st.none() | st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf, -3.0])
RULES = st.builds(
    Retention,
    st.none() | st.integers(1, 3),
    st.none() | st.integers(2, 4),
    st.none() | st.tuples(st.just("loss"), st.sampled_from(["min", "max"])),
)
ERRORS = st.sampled_from([errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE])
FAULTS = st.none() | st.tuples(st.integers(0, 100), st.booleans(), ERRORS)
"""Which call of the system fails, if one does; whether it has done its work then; and with what error."""


class Refusals(RuleBasedStateMachine):
    """Calls that the disk may refuse.

    Attributes:
        path: A folder for all that is done.
        count: How many states have been made.
        refused: The call of the system that has failed in the last call, if one did.
        spoiled: Whether one has ever. A claim may be left, so that calls are refused until it counts as a dead one's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path, self.count, self.spoiled = Path(tempfile.mkdtemp()), 0, False
        self.refused: Any = None

    def teardown(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path)

    def attempt(self, fault: tuple[int, bool, int] | None, call: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """What a call returns, and what it raises: one of both is None."""
        calls = SystemCalls(self.path, *(fault or (None,)))
        found, raised = None, None
        try:
            with calls.watched():
                found = call()
        except (CheckpointError, OSError, ValueError) as error:
            raised = error
        self.refused = calls.failed
        self.spoiled |= calls.failed is not None
        note(f"refused: {self.refused}, raised: {raised!r}")
        return found, raised

    def new_state(self) -> dict[str, Any]:
        """A state that is like no other."""
        self.count += 1
        return {"w": np.full(3 + self.count % 2, self.count, np.float32), "number": self.count}


class FolderSequences(Refusals):
    """Two folders; ``saved`` has the states that are in each, by id."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: dict[str, dict[int, Any]] = {"a": {}, "b": {}}

    @rule(folder=FOLDERS, given=st.none() | IDS, in_background=st.booleans(), fault=FAULTS)
    def save(self, folder: str, given: int | None, in_background: bool, fault: Any) -> None:
        state, there = self.new_state(), self.saved[folder]

        def save() -> Any:
            saved = save_state_dict(state, self.path / folder, unique_id=given, async_save=in_background)
            return saved.result() if isinstance(saved, AsyncSave) else saved

        report, error = self.attempt(fault, save)
        due = max(there, default=-1) + 1 if given is None else given
        if error is None or isinstance(error, DurabilityUnknownError):
            assert (error or report).unique_id == due
            there[due] = state
        else:
            assert self.refused, error

    @rule(folder=FOLDERS, unique_id=IDS, fault=FAULTS)
    def delete(self, folder: str, unique_id: int, fault: Any) -> None:
        _, error = self.attempt(fault, lambda: delete_checkpoint(self.path / folder, unique_id))
        if error is None or isinstance(error, DurabilityUnknownError):
            del self.saved[folder][unique_id]
        else:
            assert self.spoiled or unique_id not in self.saved[folder], error

    @rule(source=FOLDERS, given=st.none() | IDS, fault=FAULTS)
    def copy(self, source: str, given: int | None, fault: Any) -> None:
        out = "ab".replace(source, "")
        there, others = self.saved[source], self.saved[out]
        _, error = self.attempt(fault, lambda: copy_checkpoint(self.path / source, self.path / out, given))
        due = max(there, default=-1) if given is None else given
        if error is None or isinstance(error, DurabilityUnknownError):
            assert due not in others
            others[due] = there[due]
        else:
            known = due in there and any(there[due] is state for state in others.values())
            assert self.spoiled or due not in there or due in others or known, error

    @rule(folder=FOLDERS, unique_id=IDS, is_damaged=st.booleans(), fault=FAULTS)
    def rebuild(self, folder: str, unique_id: int, is_damaged: bool, fault: Any) -> None:
        if unique_id not in self.saved[folder]:
            return
        path = self.path / folder
        save_id, file = read_metadata(path, unique_id).save_id, path / metadata_name(unique_id)
        whole = file.read_bytes()
        if is_damaged:
            file.write_bytes(whole[:100])
        else:
            file.unlink()
        _, error = self.attempt(fault, lambda: rebuild_metadata(path, save_id))
        assert error is None or self.spoiled, error
        if error is not None and not isinstance(error, DurabilityUnknownError):
            file.write_bytes(whole)

    @rule(folder=FOLDERS, unique_id=IDS, fault=FAULTS)
    def load(self, folder: str, unique_id: int, fault: Any) -> None:
        loaded, error = self.attempt(fault, lambda: load_merged_state_dict(self.path / folder, unique_id=unique_id))
        if error is None:
            check_same(loaded, self.saved[folder][unique_id])
        else:
            assert self.refused or unique_id not in self.saved[folder], error

    @rule(folder=FOLDERS, fault=FAULTS)
    def list(self, folder: str, fault: Any) -> None:
        ids, error = self.attempt(fault, lambda: list_checkpoints(self.path / folder))
        if error is None and self.refused:  # what may not be read is left out
            assert self.saved[folder].keys() >= {*ids}
        else:
            assert (
                self.refused if error and (self.path / folder).exists() else (ids or []) == sorted(self.saved[folder])
            )

    @invariant()
    def all_is_there(self) -> None:
        for folder, saved in self.saved.items():
            path = self.path / folder
            if saved:
                assert list_checkpoints(path) == sorted(saved)
            for unique_id, state in saved.items():
                assert verify(path, unique_id).ok
                check_same(load_merged_state_dict(path, unique_id=unique_id), state)


class ManagerSequences(Refusals):
    """Two managers with rules of their own about one folder; ``saved`` has the steps: their states and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.root = self.path / "run"
        self.saved: dict[int, tuple[Any, float | None]] = {}

    @initialize(first=RULES, second=RULES)
    def begin(self, first: Retention, second: Retention) -> None:
        self.retentions = [first, second]
        self.managers = [self.make(rules) for rules in self.retentions]

    def make(self, rules: Retention) -> CheckpointManager:
        best: Any = rules.best
        return CheckpointManager(self.root, keep_last=rules.keep_last, keep_every=rules.keep_every, best=best)

    @rule(which=st.integers(0, 1), rules=RULES)
    def begin_anew(self, which: int, rules: Retention) -> None:
        self.managers[which].close()
        self.retentions[which], self.managers[which] = rules, self.make(rules)

    @rule(which=st.integers(0, 1), step=STEPS, metric=METRICS, force=st.booleans(), fault=FAULTS)
    def save(self, which: int, step: int, metric: float | None, force: bool, fault: Any) -> None:
        state, metrics = self.new_state(), None if metric is None else {"loss": metric}

        def save() -> Any:
            saved = self.managers[which].save(step, state, metrics, force)
            return saved.result() if isinstance(saved, AsyncSave) else saved

        report, error = self.attempt(fault, save)
        if report is None and error is None:
            assert not force
        elif error is None or isinstance(error, DurabilityUnknownError):
            self.saved[step] = state, metric
            self.have_gone(self.kept(self.retentions[which], step))
        else:
            assert self.refused, error

    @rule(rules=RULES, fault=FAULTS)
    def prune(self, rules: Retention, fault: Any) -> None:
        if self.saved:
            _, error = self.attempt(fault, lambda: carry_out(plan_prune(self.root, rules)))
            assert error is None or self.refused, error
            self.have_gone(self.kept(rules, max(self.saved)))

    def kept(self, rules: Retention, newest: int) -> set[int]:
        """The steps that rules keep."""
        if rules.keep_last is None:
            return {*self.saved}
        last, every = sorted(self.saved)[-rules.keep_last :], rules.keep_every
        found: set[int | None] = {
            newest,
            self.best(rules),
            *last,
            *(step for step in self.saved if every and step % every == 0),
        }
        return {step for step in self.saved if step in found}

    def best(self, rules: Retention) -> int | None:
        if rules.best is None:
            return None
        sign = -1 if rules.best[1] == "min" else 1
        known = [
            (sign * metric, step)
            for step, (_, metric) in self.saved.items()
            if metric is not None and not math.isnan(metric)
        ]
        return max(known)[1] if known else None

    def have_gone(self, kept: set[int]) -> None:
        """Forget the steps that have gone: all but these, and none of these, but for what was left for now."""
        there = {step for step in self.saved if (step_folder(self.root, step) / metadata_name(step)).exists()}
        assert there >= kept
        assert self.spoiled or there == kept
        self.saved = {step: self.saved[step] for step in there}

    @rule(which=st.integers(0, 1), step=st.none() | STEPS, fault=FAULTS)
    def restore(self, which: int, step: int | None, fault: Any) -> None:
        state = {"w": np.zeros(4, np.float32), "number": 0}
        if step is not None and step in self.saved:
            state["w"] = np.zeros_like(self.saved[step][0]["w"])
        elif step is None and self.saved:
            state["w"] = np.zeros_like(self.saved[max(self.saved)][0]["w"])
        restored, error = self.attempt(fault, lambda: self.managers[which].restore(state, step))
        if error is None:
            assert restored == (max(self.saved, default=None) if step is None else step)
            if restored is not None:
                check_same(state, self.saved[restored][0])
        else:
            assert self.refused or (step is not None and step not in self.saved), error

    @invariant()
    def all_is_there(self) -> None:
        for rules, manager in zip(self.retentions, self.managers, strict=True):
            assert manager.all_steps() == sorted(self.saved)
            assert manager.latest_step() == max(self.saved, default=None)
            assert manager.best_step() == self.best(rules)
        for step, (state, _) in self.saved.items():
            loaded = {"w": np.zeros_like(state["w"]), "number": 0}
            load_state_dict(loaded, step_folder(self.root, step), unique_id=step)
            check_same(loaded, state)


def check_same(loaded: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    assert loaded["number"] == state["number"]
    assert np.array_equal(loaded["w"], state["w"])


@pytest.fixture(autouse=True)
def _not_stale_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that the disk calls stale, once, is waited for: that much less."""
    monkeypatch.setattr(local_files, "_STALE_SECONDS", 0.1)


def test_folders() -> None:
    run_state_machine_as_test(FolderSequences, settings=settings(examples(8, 300), stateful_step_count=20))


def test_managers() -> None:
    run_state_machine_as_test(ManagerSequences, settings=settings(examples(5, 200), stateful_step_count=20))
