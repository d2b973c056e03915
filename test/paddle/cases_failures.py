"""Functions that test_failures.py sends to ranks."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import (
    CheckpointManager,
    LoadOptions,
    SaveOptions,
    export,
    export_state_dict,
    gather_state_dict,
    load_state_dict,
    save_state_dict,
    scatter_state_dict,
)
from test.paddle.layouts import Spread
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import dist_tensor, local_array
from test.ranks.groups import group_of

ROWS = 64
COLUMNS = 4096


def save(path: str, ranks: int, unique_id: int | None, state: dict[str, Any]) -> int:
    """Save values; returns the id."""
    return save_state_dict(state, path, group_of(ranks), unique_id=unique_id).unique_id


def _state(ranks: int, number: int) -> dict[str, Any]:
    """A state that says ``number`` everywhere, of which each rank writes a part."""
    array = np.full((ROWS, COLUMNS), number, np.float32)
    return {
        "x": dist_tensor(array, Spread(list(range(ranks)), (0,))),
        "y": paddle.full([3], float(number)),
        "number": number,
    }


def save_number(path: str, ranks: int, number: int, unique_id: int | None = None, timeout: float = 60) -> Outcome:
    """Save a state; returns the id."""
    state, options = _state(ranks, number), SaveOptions(timeout=timeout)
    return outcome_of(
        lambda: save_state_dict(state, path, group_of(ranks), unique_id=unique_id, options=options).unique_id
    )


def load_number(path: str, ranks: int, exchange: Any = "auto", timeout: float = 60) -> Outcome:
    """Load a state; returns the numbers that it has."""
    state, options = _state(ranks, -1), LoadOptions(timeout=timeout, exchange=exchange)

    def load() -> list[float]:
        load_state_dict(state, path, group_of(ranks), options=options)
        return sorted({*np.unique(local_array(state["x"])), *state["y"].tolist(), state["number"]})

    return outcome_of(load)


def save_wrongly(path: str, ranks: int, wrong: int, how: str) -> Outcome:
    """Save a state that does not fit on rank ``wrong``."""
    state = _state(ranks, 1)
    if dist.get_rank() == wrong:
        state |= {
            "unsupported": {"callback": {"run": print}},
            "shape": {"y": paddle.ones([4])},
            "dtype": {"y": paddle.ones([3], "int32")},
            "kind": {"y": "a value"},
            "container": {"y": {"deeper": 1}},
            "unique_id": {},
            "path": {},
            "options": {},
        }[how]
    unique_id = 5 if how == "unique_id" and dist.get_rank() == wrong else None
    folder: Any = 5 if how == "path" and dist.get_rank() == wrong else path
    options: Any = {"timeout": 5} if how == "options" and dist.get_rank() == wrong else None
    return outcome_of(lambda: save_state_dict(state, folder, group_of(ranks), unique_id=unique_id, options=options))


def load_wrongly(path: str, ranks: int, wrong: int, how: str) -> tuple[Outcome, bool]:
    """Load into targets that do not fit on rank ``wrong``; also returns whether this rank's targets are untouched."""
    state = _state(ranks, -1)
    if dist.get_rank() == wrong:
        state |= {
            "shape": {"y": paddle.full([4], -1.0)},
            "missing": {"z": paddle.full([4], -1.0)},
            "value": {"y": 3},
            "options": {},
        }[how]
    options: Any = {"timeout": 5} if how == "options" and dist.get_rank() == wrong else None
    outcome = outcome_of(lambda: load_state_dict(state, path, group_of(ranks), options=options))
    untouched = bool((local_array(state["x"]) == -1).all()) and state["number"] == -1
    return outcome, untouched


def call_wrongly(path: str, ranks: int, wrong: int) -> dict[str, Outcome]:
    """Make each call that ranks make together with a wrong argument on rank ``wrong``, and then a right one."""
    group, state, out = group_of(ranks), {"w": paddle.ones([2])}, f"{path}/out"
    saving, loading = SaveOptions(timeout=60), LoadOptions(timeout=60)

    def odd(one: Any, other: Any) -> Any:
        return one if dist.get_rank() == wrong else other

    def manager(**given: Any) -> CheckpointManager:
        given = {"options": saving, "async_save": False, **given}
        return CheckpointManager(f"{path}/run", process_group=group, **given)

    class Metrics(dict[str, float]):
        def items(self) -> Any:
            raise RuntimeError("metrics that cannot be read")

    steps, every_other, timed = manager(), manager(save_interval_steps=2), manager(save_interval_seconds=1e-9)
    save_state_dict(state, path, group, unique_id=0)
    steps.save(0, state)
    save_options, load_options = odd({"timeout": 5}, saving), odd(saving, loading)
    calls: dict[str, Callable[[], Any]] = {
        "manager, options": lambda: manager(options=save_options),
        "manager, async_save": lambda: manager(async_save=odd("yes", True)),
        "manager, async_save differs": lambda: manager(async_save=odd(True, False)),
        "gather": lambda: gather_state_dict(state, None, group, options=save_options),
        "scatter": lambda: scatter_state_dict(state, state, None, group, options=load_options),
        "export": lambda: export(path, out, process_group=group, options=load_options),
        "export_state_dict": lambda: export_state_dict(state, out, process_group=group, options=save_options),
        "restore, options": lambda: steps.restore(state, options=load_options),
        "restore a step, options": lambda: steps.restore(state, 0, options=load_options),
        "restore elsewhere, options": lambda: steps.restore(state, path=path, options=load_options),
        "restore, both": lambda: steps.restore(state, odd(0, None), path=path),
        "restore, step": lambda: steps.restore(state, odd(-1, 0)),
        "save, step": lambda: steps.save(odd("1", 1), state),
        "save, step of an interval": lambda: every_other.save(odd(2.0, 2), state),
        "save, step after another": lambda: [every_other.save(3, state), every_other.save(odd("next", 4), state)],
        "save, step when it is time": lambda: [timed.save(1, state), timed.all_steps(), timed.save(odd("", 2), state)],
        "save, step that is due": lambda: [every_other.should_save(6), every_other.save(odd(None, 6), state)],
        "save, metrics": lambda: steps.save(1, state, odd(Metrics(loss=1.0), {"loss": 1.0})),
    }
    outcomes = {name: outcome_of(call) for name, call in calls.items()}
    outcomes["and then"] = outcome_of(lambda: (steps.save(1, state), steps.restore(state))[1])
    return outcomes


def skip_one_save(path: str, ranks: int, absent: int) -> tuple[Outcome | None, list[Outcome]]:
    """Save, save without rank ``absent``, and save twice with it; returns what became of all but the first."""
    save_number(path, ranks, 1)
    skipped = None if dist.get_rank() == absent else save_number(path, ranks, 2, timeout=2)
    after = []
    for number in (3, 4):
        dist.barrier()
        after.append(save_number(path, ranks, number))
    dist.barrier()
    return skipped, after


@contextmanager
def _replaced(name: str, function: Any) -> Iterator[None]:
    original = getattr(os, name)
    setattr(os, name, function)
    try:
        yield
    finally:
        setattr(os, name, original)


def save_on_full_disk(path: str, ranks: int, full: int) -> Outcome:
    """Save while the disk of one rank is full."""

    def no_space(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if dist.get_rank() != full:
        return save_number(path, ranks, 2)
    with _replaced("pwrite", no_space):
        return save_number(path, ranks, 2)


def load_from_bad_disk(path: str, ranks: int, bad: int, exchange: str) -> Outcome:
    """Load while the disk of one rank reads the files' headers but not their data."""
    read = os.preadv

    def broken(descriptor: int, buffers: Any, offset: int) -> int:
        if offset > 8:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, buffers, offset)

    if dist.get_rank() != bad:
        return load_number(path, ranks, exchange)
    with _replaced("preadv", broken):
        return load_number(path, ranks, exchange)


def die_in(doing: str, path: str, ranks: int, victim: int, exchange: str) -> Outcome:
    """Save a checkpoint, then save or load with one rank that stops in the middle, to be killed there."""
    first = save_number(path, ranks, 1)
    assert first.error is None, first.message
    function = "pwrite" if doing == "save" else "preadv"

    def stop(*_: Any) -> int:
        Path(path, "stopped").touch()
        time.sleep(600)
        return 0

    if dist.get_rank() == victim:
        setattr(os, function, stop)
    if doing == "save":
        return save_number(path, ranks, 2)
    return load_number(path, ranks, exchange)


def save_for_ever(path: str, ranks: int, unique_id: int | None) -> None:
    """Save one state after another until killed, and note each one that is done."""
    for number in range(1, 100_000):
        outcome = save_number(path, ranks, number, unique_id)
        if outcome.error is not None:
            raise RuntimeError(outcome.message)
        if dist.get_rank() == 0:
            Path(path, "done.tmp").write_text(str(number))
            Path(path, "done.tmp").replace(Path(path, "done"))


def save_without_coordinator(path: str, how: int) -> Outcome:
    """Save on rank 1, while rank 0, which keeps the job's store, gets a signal before it has made its hub."""
    if dist.get_rank() == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), how)
    return outcome_of(lambda: save_state_dict({"x": 1}, path, options=SaveOptions(timeout=5)))


def save_with_secrets(path: str, secrets: list[str]) -> list[Outcome]:
    """Save with a secret for each rank, then the same on all, and again on a hub of another coordinator."""

    def save_with(secret: str, coordinator: int) -> Outcome:
        os.environ["PADDLE_DIST_CKPT_SECRET_FILE"] = secret
        options = SaveOptions(timeout=60)
        return outcome_of(lambda: save_state_dict({"x": 1}, path, None, coordinator, options=options))

    own = secrets[dist.get_rank()]
    return [save_with(*how) for how in ((own, 0), (secrets[0], 0), (own, 1), (secrets[0], 1))]


def save_with_secret_on(path: str, secret: str, having: list[int]) -> list[Outcome]:
    """Save twice, with a secret on some ranks alone, and then on none."""
    if dist.get_rank() in having:
        os.environ["PADDLE_DIST_CKPT_SECRET_FILE"] = secret
    options = SaveOptions(timeout=60)
    outcomes = [outcome_of(lambda: save_state_dict({"x": 1}, path, options=options)) for _ in range(2)]
    os.environ.pop("PADDLE_DIST_CKPT_SECRET_FILE", None)
    dist.barrier()  # as after any error
    return [*outcomes, outcome_of(lambda: save_state_dict({"x": 1}, path, options=options).unique_id)]
