"""Functions that test_export.py sends to ranks."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import (
    CheckpointError,
    ExportReport,
    LoadOptions,
    SaveOptions,
    export,
    export_state_dict,
    save_state_dict,
    state_exports,
)
from paddle_dist_ckpt.storage import Folders
from paddle_dist_ckpt.testing import FaultyStorage
from test.paddle.layouts import LAYOUTS, Array
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import dist_tensor, local_array
from test.ranks.groups import group_of

SHAPES = {"embedding": (40, 12), "weight": (12, 36), "norm": (12,), "half": (8, 24)}


def arrays() -> dict[str, Array]:
    """Every global tensor, ``half`` as the bits of a bfloat16."""
    rng = np.random.default_rng(5)
    found: dict[str, Array] = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    found["half"] = (found["half"].view(np.uint32) >> 16).astype(np.uint16)
    return found


def _state(layout_name: str, filled: bool = True) -> dict[str, Any]:
    layout, state = LAYOUTS[layout_name], {}
    for i, (name, array) in enumerate(arrays().items()):
        if name == "half":
            state[name] = paddle.to_tensor(array if filled else np.zeros_like(array))
        else:
            state[name] = dist_tensor(array if filled else np.zeros_like(array), layout.spread(i, array.shape))
    return state


def export_live(layout_name: str, out: str, format: str) -> ExportReport:
    """Export a state_dict that is spread over ranks."""
    group = group_of(LAYOUTS[layout_name].ranks)
    options = SaveOptions(timeout=60, check_replicas="off")
    return export_state_dict({"model": _state(layout_name)}, out, format, group, prefix="model", options=options)


def save_and_export(layout_name: str, path: str, out: str, format: str) -> ExportReport:
    """Save, and export what was saved, on the same ranks; several files."""
    group = group_of(LAYOUTS[layout_name].ranks)
    save_state_dict(_state(layout_name), path, group)
    return export(path, out, format, max_shard_bytes=1500, process_group=group)


def load_by_paddle(layout_name: str, path: str) -> list[str]:
    """Load by Paddle's own function on a layout into zeros; returns the names of tensors that are wrong afterwards."""
    state = _state(layout_name, filled=False)
    expected = _state(layout_name)
    # Paddle's load asks for a GPU, which it does not need.
    with mock.patch.object(paddle.Tensor, "cuda", lambda tensor: tensor):
        dist.load_state_dict(state, path, group_of(LAYOUTS[layout_name].ranks))
    return [name for name in state if not np.array_equal(_local(state[name]), _local(expected[name]))]


def _local(tensor: paddle.Tensor) -> Any:
    return local_array(tensor) if tensor.is_dist() else tensor.numpy()


def bad_arguments_on_one_rank(path: str, out: str) -> list[Outcome]:
    """One of two ranks passes what cannot be; each time both export all the same afterwards."""
    odd, group = dist.get_rank() == 1, group_of(2)
    state, quick = {"w": paddle.ones([2])}, LoadOptions(timeout=20)
    casting = LoadOptions(timeout=20, cast=True) if odd else quick
    save_state_dict(state, path, group, unique_id=0)
    calls = [
        lambda to: export(path, to, dtype="int8" if odd else None, process_group=group, options=quick),
        lambda to: export(path, to, process_group=group, options=casting),
        lambda to: export_state_dict(state, to, "none" if odd else "paddle", group, options=SaveOptions(timeout=20)),
    ]
    outcomes = []
    for i, call in enumerate(calls):
        outcomes.append(outcome_of(lambda call=call: call(out)))
        export(path, f"{out}{i}", process_group=group, options=quick)
    return outcomes


def interrupted_between(out: str, ranks: int, victim: int, call: str) -> tuple[str, float, str | None]:
    """A rank is interrupted in an export of a state_dict before this call; what that raises, how long it takes, and
    what the next export raises."""
    state, group, options = {"w": paddle.ones([2])}, group_of(ranks), SaveOptions(timeout=60)
    how = {"side_effect": KeyboardInterrupt} if dist.get_rank() == victim else {"wraps": getattr(state_exports, call)}
    begun = time.monotonic()
    with mock.patch.object(state_exports, call, **how):
        try:
            raised = str(export_state_dict(state, out, process_group=group, options=options))
        except (CheckpointError, KeyboardInterrupt) as error:
            raised = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    return raised, seconds, outcome_of(lambda: export_state_dict(state, out, process_group=group)).error


def export_and_die(path: str, out: str, victim: int, at: int) -> Outcome:
    """Export on all ranks, of which one kills itself before its operation of that number in the new folder."""
    done = itertools.count(1)

    def hook(operation: str, name: str) -> None:
        if dist.get_rank() == victim and next(done) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def export_here() -> None:
        with mock.patch.object(Folders.__init__, "__defaults__", (lambda folder: FaultyStorage(folder, hook), None)):
            export(path, out, "native", max_shard_bytes=1500, options=LoadOptions(timeout=60))

    return outcome_of(export_here)
