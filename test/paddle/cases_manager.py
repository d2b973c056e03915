"""Functions that test_manager.py sends to ranks."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle.distributed as dist

from paddle_dist_ckpt import (
    AsyncSave,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
    LoadOptions,
    LocalStorage,
    PerRank,
    SaveOptions,
    save_state_dict,
)
from paddle_dist_ckpt.manager import sigterm
from paddle_dist_ckpt.wiring import load_with
from test.paddle.layouts import Spread
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import dist_tensor, local_array
from test.ranks.groups import group_of


def manager(root: Any, ranks: int, **more: Any) -> CheckpointManager:
    """A manager for the first ranks."""
    options = SaveOptions(timeout=20, check_replicas="off", separate_folders=True)
    return CheckpointManager(root, process_group=group_of(ranks), options=options, **more)


def state(ranks: int, step: int) -> dict[str, Any]:
    """A state whose contents depend on the step, and in part on the rank."""
    array = np.arange(26, dtype=np.float32).reshape(13, 2) + step
    spread = Spread(list(range(ranks)), (0,))
    return {"x": dist_tensor(array, spread), "own": PerRank((dist.get_rank(), step)), "step": step}


def train_and_come_back(root: str, ranks: int, own_folders: bool) -> dict[str, Any]:
    """Save steps 1 to 12, every other one, keep two and the best; come back to two of them."""
    folder = Path(root, f"rank{dist.get_rank()}") if own_folders else Path(root)
    found: dict[str, Any] = {}
    with manager(folder, ranks, keep_last=2, best=("loss", "min"), save_interval_steps=2) as steps:
        found["nothing"] = steps.restore(state(ranks, 0)), steps.latest_step(), steps.best_step()
        for step in range(1, 13):
            steps.save(step, state(ranks, step), {"loss": abs(step - 4.0)})
        steps.wait()
        found["steps"] = steps.all_steps(), steps.latest_step(), steps.best_step()
        for asked in (None, 4):
            target = state(ranks, 0)
            found[f"restored {asked}"] = steps.restore(target, asked), target["step"], target["own"].value
            found[f"equal {asked}"] = bool(
                (local_array(target["x"]) == local_array(state(ranks, target["step"])["x"])).all()
            )
    found["folders"] = {path.name: sorted(each.name for each in path.iterdir()) for path in sorted(folder.iterdir())}
    return found


def due_by_time(root: str, ranks: int, seconds: float, count: int, other_names: bool = False) -> list[int]:
    """The steps that are due, if ranks take different time for their steps and drift apart."""
    root = named_otherwise(root) if other_names else root
    due = []
    with manager(root, ranks, save_interval_seconds=seconds) as steps:
        for step in range(count):
            time.sleep(0.001 * (1 + (step * 7 + dist.get_rank() * 3) % 5))
            if steps.should_save(step):
                due.append(step)
                steps.save(step, {"step": step})
    return due


def named_otherwise(root: str) -> str:
    """The folder by a path of this rank's own, which ends in another name than those of the others."""
    path = Path(root, f"rank{dist.get_rank()}")
    path.symlink_to(root)
    return str(path)


def interrupted(root: str, ranks: int, victim: int, other_names: bool = False) -> tuple[list[int], int, int | None]:
    """Train until a rank gets SIGTERM; returns the saved steps, the last step, and the step found afterwards."""
    root = named_otherwise(root) if other_names else root
    saved = []
    called: list[int] = []
    before, repeated = signal.signal(signal.SIGTERM, lambda *_: called.append(1)), sigterm._REPEAT_SECONDS
    try:
        with manager(root, ranks, save_interval_steps=10_000, save_on_sigterm=True) as steps:
            if dist.get_rank() == victim:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            for step in range(1, 9_000):
                time.sleep(0.002)
                if steps.save(step, {"step": step}) is not None:
                    saved.append(step)
                if steps.stopping:
                    break
            steps.wait()
            latest = steps.latest_step()
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGTERM)
        assert not called
        sigterm._REPEAT_SECONDS = 0.0
        os.kill(os.getpid(), signal.SIGTERM)  # it is this function's again
        assert called == [1]
    finally:
        sigterm._REPEAT_SECONDS = repeated
        signal.signal(signal.SIGTERM, before)
    return saved, step, latest


def due_of_two(root: str, ranks: int) -> list[list[int]]:
    """The steps that are due of two managers of the same ranks, one of which goes by time."""
    due: list[list[int]] = [[], []]
    with (
        manager(f"{root}/a", ranks, save_interval_seconds=0.1, async_save=False) as timed,
        manager(f"{root}/b", ranks, save_interval_steps=10_000, save_on_sigterm=True, async_save=False) as other,
    ):
        for step in range(1, 200):
            time.sleep(0.002)
            for steps, found in zip((timed, other), due, strict=True):
                if steps.save(step, {"step": step}) is not None:
                    found.append(step)
        assert not timed.stopping
        assert not other.stopping
    return due


def due_when_made_again(root: str, ranks: int, victim: int) -> list[int]:
    """The steps that are due by time of a manager that is made again, since a rank was interrupted when it was made."""
    made = mock.patch("paddle_dist_ckpt.manager.manager.Schedule", side_effect=KeyboardInterrupt)
    with made if dist.get_rank() == victim else nullcontext(), suppress(KeyboardInterrupt):
        manager(root, ranks, save_interval_seconds=0.1)
    due = []
    with manager(root, ranks, save_interval_seconds=0.1) as steps:
        for step in range(200):
            time.sleep(0.002)
            if steps.should_save(step):
                due.append(step)
    return due


def due_after_going_back(root: str, ranks: int) -> list[list[int]]:
    """The steps that are due by time before and after a return to an early step."""
    due = []
    with manager(root, ranks, save_interval_seconds=0.1) as steps:
        steps.save(1, {"step": 1}, force=True)
        for first in (2, 0):
            found = []
            for step in range(first, first + 300):
                time.sleep(0.002)
                if steps.save(step, {"step": step}) is not None:
                    found.append(step)
            due.append(found)
            steps.restore({"step": 0}, 1)
    return due


def differing_arguments(root: str, ranks: int) -> Outcome:
    """Make managers that do not agree."""
    return outcome_of(lambda: manager(root, ranks, keep_last=1 + dist.get_rank()))


def numpys_arguments(root: str, ranks: int) -> list[int]:
    """Make managers of what is Python's on one rank and numpy's on the others, as if they had been told."""
    kind = np.int64 if dist.get_rank() else int
    seconds = np.float64(0.5) if dist.get_rank() else 0.5
    best = (np.str_("loss"), "min", np.int8(1)) if dist.get_rank() else ("loss", "min")
    given = {"keep_last": kind(2), "save_interval_steps": kind(3), "save_interval_seconds": seconds, "best": best}
    return manager(root, ranks, **given, coordinator_rank=kind(1)).all_steps()


def bad_arguments_on_one_rank(root: str, ranks: int) -> Outcome:
    """One rank passes what cannot be."""
    return outcome_of(lambda: manager(root, ranks, keep_last=0 if dist.get_rank() else 1))


def bad_roots_on_one_rank(root: str, ranks: int, victim: int) -> list[Outcome]:
    """Ranks have folders of their own, and what one of them has there is none for steps."""
    own = Path(root, f"host{dist.get_rank()}")
    (own / "run").mkdir(parents=True)
    if dist.get_rank() == victim:
        (own / "file").write_text("x")
        save_state_dict({"x": 1}, own / "checkpoint", options=SaveOptions(no_dist=True))
    return [outcome_of(lambda at=name: str(manager(own / at, ranks))) for name in ("file", "file/run", "checkpoint")]


def lost_mount(root: str, ranks: int, victim: int, by_restore: bool, gone: bool) -> tuple[Outcome, bool, int | None]:
    """A rank's root is another folder after a first step, or gone; what a save says, whether that made anything there,
    and the latest step when the folder is back.
    """
    own = Path(root, f"host{dist.get_rank()}")
    if by_restore:
        with manager(own, ranks, async_save=False) as steps:
            steps.save(1, state(ranks, 1))
    with manager(own, ranks, async_save=False, keep_last=1) as steps:
        if by_restore:
            steps.restore(state(ranks, 0))
        else:
            steps.save(1, state(ranks, 1))
        real, is_victim = own.with_suffix(".real"), dist.get_rank() == victim
        if is_victim:
            own.rename(real)
            if not gone:
                own.mkdir()
        outcome = outcome_of(lambda: steps.save(2, state(ranks, 2)))
        made = is_victim and own.exists() and any(own.iterdir())
        dist.barrier(group_of(ranks))
        if is_victim:
            if own.exists():
                own.rmdir()
            real.rename(own)
        dist.barrier(group_of(ranks))
        target = state(ranks, 0)
        assert steps.restore(target) == target["step"] == 1
        steps.save(3, state(ranks, 3))
        return outcome, made, steps.latest_step()


def bad_metrics_on_one_rank(root: str, ranks: int) -> tuple[list[Outcome], list[int]]:
    """One rank passes what is no number with a first save, and with a later one."""
    refused = []
    with manager(root, ranks, async_save=False) as steps:
        for step, bad in ((0, True), (0, False), (1, False), (2, True), (3, False)):
            metrics: Any = {"loss": np.ones(2)} if bad and dist.get_rank() == 1 else {"loss": 1.0}
            outcome = outcome_of(lambda at=step, passed=metrics: steps.save(at, state(ranks, at), passed))
            if bad:
                refused.append(outcome)
            else:
                assert outcome.error is None, outcome
        return refused, steps.all_steps()


def closed_on_one_rank(root: str, ranks: int, victim: int) -> tuple[list[Outcome], list[int]]:
    """One rank has closed the manager: what becomes of steps that are not due, due, due again, and saved by force."""
    with manager(root, ranks, save_interval_steps=2) as steps:
        steps.save(2, state(ranks, 2))
        steps.wait()
        if dist.get_rank() == victim:
            steps.close()
        outcomes = []
        for step, force in ((2, False), (3, False), (4, False), (4, False), (5, True), (5, False)):
            outcomes.append(outcome_of(lambda at=step, forced=force: steps.save(at, state(ranks, at), force=forced)))
        return outcomes, steps.all_steps()


def interrupted_as_it_begins(root: str, ranks: int, victim: int) -> tuple[str | None, list[int]]:
    """A rank is interrupted when its save is to go on in the background; what is raised, and the steps at the end."""
    with manager(root, ranks) as steps:
        steps.save(1, state(ranks, 1))
        steps.wait()
        start = AsyncSave.start

        def interrupt(_: AsyncSave) -> None:
            raise KeyboardInterrupt

        if dist.get_rank() == victim:
            AsyncSave.start = interrupt  # type: ignore[method-assign]
        try:
            steps.save(2, state(ranks, 2))
            raised = outcome_of(steps.wait).error
        except KeyboardInterrupt:
            raised = "KeyboardInterrupt"
        finally:
            AsyncSave.start = start  # type: ignore[method-assign]
        dist.barrier(group_of(ranks))
        steps.save(3, state(ranks, 3))
        steps.wait()
        return raised, steps.all_steps()


def interrupted_before_it_reads(
    root: str, ranks: int, victim: int, gone: bool = False
) -> tuple[str, float, int | None]:
    """A rank is interrupted when it knows which step is restored, or that this one is gone; what that raises, how long
    it takes, and the next."""

    def load(*args: Any, **named: Any) -> None:
        with suppress(CheckpointNotFoundError):
            if gone:
                load_with(*args, **named)
        raise KeyboardInterrupt

    with manager(root, ranks, async_save=False) as steps:
        steps.save(1, state(ranks, 1))
        interrupt = {"side_effect": load if dist.get_rank() == victim else load_with}
        latest = {"side_effect": [7, 1]} if gone else {"wraps": steps._steps.known.latest}
        begun = time.monotonic()
        with (
            mock.patch("paddle_dist_ckpt.manager.manager.load_with", **interrupt),
            mock.patch.object(steps._steps.known, "latest", **latest),  # type: ignore[call-overload]
        ):
            try:
                raised = str(steps.restore(state(ranks, 0), options=LoadOptions(timeout=60, separate_folders=True)))
            except (CheckpointError, KeyboardInterrupt) as error:
                raised = f"{type(error).__name__}: {error}"
        return raised, time.monotonic() - begun, steps.restore(state(ranks, 0))


def made_again(root: str, ranks: int, victim: int) -> tuple[str | None, bool, list[int]]:
    """A save fails on a rank and is made again; what is raised, whether it is due then, and the steps at the end."""
    with manager(root, ranks, save_interval_steps=10) as steps:
        steps.save(10, state(ranks, 10))
        steps.wait()
        create = LocalStorage.create

        def full(storage: LocalStorage, name: str) -> Any:
            if name.endswith(".safetensors"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return create(storage, name)

        if dist.get_rank() == victim:
            LocalStorage.create = full  # type: ignore[method-assign]
        try:
            steps.save(20, state(ranks, 20))
            raised = outcome_of(steps.wait).error
        finally:
            LocalStorage.create = create  # type: ignore[method-assign]
        due = steps.should_save(20)
        steps.save(20, state(ranks, 20))
        steps.wait()
        return raised, due, steps.all_steps()


def unreadable_step(root: str, ranks: int) -> list[Outcome]:
    """Look for the latest step while the coordinator's disk does not give one, and then again."""
    with manager(root, ranks, async_save=False) as steps:
        for step in (1, 2):
            steps.save(step, {"step": step})
        read = LocalStorage.read

        def refuse(storage: LocalStorage, name: str, *args: Any) -> bytes:
            if name == "2.metadata":
                raise OSError(errno.ESTALE, "Stale file handle", name)
            return read(storage, name, *args)

        LocalStorage.read = refuse  # type: ignore[method-assign]
        try:
            failed = [outcome_of(lambda: steps.restore({"step": 0})), outcome_of(steps.latest_step)]
        finally:
            LocalStorage.read = read  # type: ignore[method-assign]
        assert steps.restore({"step": 0}) == steps.latest_step() == 2
    return failed


def missing_step(root: str, ranks: int) -> Outcome:
    """Restore a step that is not there."""
    with manager(root, ranks) as steps:
        return outcome_of(lambda: steps.restore({"step": 0}, 77))


def ranks_on_other_hosts(root: str, ranks: int) -> list[Any]:
    """Save with a root a rank; come back with the ranks on the hosts of others, and then with the right coordinator."""
    rank = dist.get_rank()
    with manager(Path(root, f"host{rank}"), ranks, async_save=False) as steps:
        steps.save(7, state(ranks, 7))
    there = Path(root, f"host{(rank + 1) % ranks}")
    with manager(there, ranks, async_save=False) as steps:
        found: list[Any] = [outcome_of(lambda: steps.restore(state(ranks, 0))), outcome_of(steps.latest_step)]
        steps.save(5, state(ranks, 5))
        found.append(outcome_of(lambda: steps.restore(state(ranks, 0))))
        target = state(ranks, 0)
        found.append((steps.restore(target, 5), target["step"]))
    with manager(there, ranks, coordinator_rank=ranks - 1) as steps:
        target = state(ranks, 0)
        found.append((steps.restore(target), target["step"]))
    return found
