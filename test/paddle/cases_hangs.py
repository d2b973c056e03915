"""Functions that test_hangs.py sends to ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from paddle_dist_ckpt import (
    CheckpointManager,
    LoadOptions,
    SaveOptions,
    load_merged_state_dict,
    load_state_dict,
    save_state_dict,
)
from test.paddle.layouts import Spread
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import dist_tensor
from test.ranks.groups import group_of
from test.stalls import helpers_end

__all__ = ["load", "load_alone", "save", "save_steps"]


def _state(ranks: int, number: int) -> dict[str, Any]:
    array = np.full((64, 4096), number, np.float32)
    return {"x": dist_tensor(array, Spread(list(range(ranks)), (0,))), "number": number}


@contextmanager
def _hanging(call: str | None) -> Iterator[None]:
    """A system call does not return for data files, until the end of the block; then it goes on."""
    if call is None:
        yield
        return
    released, original = threading.Event(), getattr(os, call)

    def hang(descriptor: int, *args: Any) -> Any:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            released.wait()
        return original(descriptor, *args)

    setattr(os, call, hang)
    try:
        yield
    finally:
        setattr(os, call, original)
        released.set()
        helpers_end()


def save(path: str, ranks: int, number: int, hangs: int | None, in_background: bool, bound: float) -> Outcome:
    """Save a state, on disks of which that of one rank may hang; returns the id."""
    state, options, group = _state(ranks, number), SaveOptions(progress_timeout=bound), group_of(ranks)

    def run() -> int:
        if in_background:
            return save_state_dict(state, path, group, async_save=True, options=options).result().unique_id
        return save_state_dict(state, path, group, options=options).unique_id

    with _hanging("fsync" if paddle.distributed.get_rank() == hangs else None):
        return outcome_of(run)


def load(path: str, ranks: int, hangs: int | None, bound: float) -> Outcome:
    """Load a state; returns the number that it has."""
    state, options = _state(ranks, -1), LoadOptions(progress_timeout=bound)

    def run() -> int:
        load_state_dict(state, path, group_of(ranks), options=options)
        return int(state["number"])

    with _hanging("preadv" if paddle.distributed.get_rank() == hangs else None):
        return outcome_of(run)


def load_alone(path: str, bound: float) -> Outcome:
    """Load everything into this process, from a disk that hangs."""
    with _hanging("preadv"):
        return outcome_of(lambda: load_merged_state_dict(path, options=LoadOptions(progress_timeout=bound)))


def save_steps(root: str, ranks: int, hangs: int, bound: float) -> tuple[Outcome, list[int]]:
    """Save a step, one whose disk hangs on a rank, and one more; returns what became of the second, and all steps."""
    options = SaveOptions(progress_timeout=bound)
    with CheckpointManager(root, keep_last=2, options=options, process_group=group_of(ranks)) as manager:
        manager.save(1, _state(ranks, 1))
        manager.wait()
        with _hanging("fsync" if paddle.distributed.get_rank() == hangs else None):
            manager.save(2, _state(ranks, 2))
            outcome = outcome_of(manager.wait)
        manager.save(3, _state(ranks, 3))
        manager.wait()
        return outcome, manager.all_steps()
