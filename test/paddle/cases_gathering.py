"""Functions that test_gathering.py sends to ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import LoadOptions, PerRank, SaveOptions, gather_state_dict, scatter_state_dict
from test.paddle.layouts import Spread
from test.paddle.optimizers import named_state
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import dist_tensor, from_local, mesh_of, paddle_tensor, to_array
from test.ranks.groups import group_of

RANKS = 2
ROWS, COLUMNS, WHOLE = Spread([0, 1], (0,)), Spread([0, 1], (1,)), Spread([1, 0], (None,))


class Net(paddle.nn.Layer):
    """A weight of uneven parts, one on both ranks, one that is not trained, and a plain one with statistics."""

    def __init__(self, seed: int, cut: Spread | None) -> None:
        super().__init__()
        paddle.seed(seed)
        self.cut, self.both, self.frozen = (paddle.nn.Linear(5, 7) for _ in range(3))
        self.norm = paddle.nn.BatchNorm1D(3)
        self.frozen.weight.stop_gradient = True
        if cut is not None:
            for layer, spread in ((self.cut, cut), (self.both, WHOLE), (self.frozen, cut)):
                placements = [dist.Replicate() if dim is None else dist.Shard(dim) for dim in spread.dims]
                trained = not layer.weight.stop_gradient
                layer.weight = dist.shard_tensor(layer.weight, mesh_of(spread), placements, stop_gradient=not trained)


def job(seed: int, cut: Spread | None) -> dict[str, Any]:
    """A model, its optimizer, whose accumulators have numbers of their own, and what else a job has."""
    model = Net(seed, cut)
    schedule = paddle.optimizer.lr.StepDecay(0.1, step_size=2)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=model.parameters())
    for _ in range(seed):
        schedule.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "epoch": seed,
        "more": [None, (paddle.full([2], float(seed)), "x")],
    }
    structured = {parameter.name: key for key, parameter in model.named_parameters()}
    for i, (_, tensor) in enumerate(sorted(named_state(optimizer, structured).items(), key=lambda pair: pair[0])):
        if isinstance(tensor, paddle.Tensor):
            local = tensor._local_value() if tensor.is_dist() else tensor
            local.set_value(paddle.full(local.shape, seed + i / 8, local.dtype))
    return state


def arrays(state: dict[str, Any]) -> dict[str, Any]:
    """All tensors whole, as numpy arrays, by names that do not depend on the run, made by Paddle's own collectives."""
    structured = {parameter.name: key for key, parameter in state["model"].named_parameters()}
    named = {**state["model"].state_dict(), **named_state(state["optimizer"], structured)}
    whole = {}
    for key, tensor in named.items():
        if isinstance(tensor, paddle.Tensor):
            everywhere = tensor
            if tensor.is_dist():
                mesh = tensor.process_mesh
                everywhere = dist.reshard(tensor, mesh, [dist.Replicate()] * len(mesh.shape))._local_value()
            whole[key] = to_array(everywhere).copy()
    return whole


def numpy_of(state: Any) -> Any:
    """A nested state with arrays for tensors; those of a model and an optimizer in one dict."""
    if isinstance(state, dict):
        return {key: numpy_of(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(numpy_of, state))
    return to_array(state) if isinstance(state, paddle.Tensor) else state


def round_trip(receiver: int | None, frozen: bool) -> dict[str, Any]:
    """Gather from one layout, scatter to another one and to plain tensors; returns what there was before and after."""
    group = group_of(RANKS)
    state = job(3, ROWS)
    expected = arrays(state)
    whole = gather_state_dict({**state, "mine": PerRank(dist.get_rank())}, receiver, group, frozen=frozen)
    gathered = numpy_of(whole)
    found, steps, others, reports, mine = [], [], [], [], []
    for cut in (COLUMNS, None):
        target = {**job(5, cut), "mine": PerRank(None)}
        before = arrays(target)
        reports.append(scatter_state_dict(whole or None, target, receiver, group, frozen=frozen))
        found.append((before, arrays(target)))
        steps.append(target["optimizer"]._learning_rate.last_epoch)
        mine.append(target["mine"].value)
        others.append(numpy_of([target["epoch"], target["more"]]))
    unchanged = all(np.array_equal(value, expected[key]) for key, value in arrays(state).items())
    return {
        "expected": expected,
        "gathered": gathered,
        "found": found,
        "steps": steps,
        "others": others,
        "received": reports[0].bytes_received,
        "unchanged": unchanged,
        "mine": mine,
    }


def odd_tensors() -> dict[str, Any]:
    """Gather what is partial, empty, strided, an array, a part of a flattened weight, or a large value."""
    rank, group = dist.get_rank(), group_of(RANKS)
    mesh = mesh_of(WHOLE)
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    state = {
        "partial": from_local(paddle.full([3], float(rank + 1)), [3], mesh, [dist.Partial()]),
        "half": paddle_tensor(np.ones((3, 2), ml_dtypes.bfloat16)),
        "empty": paddle.empty([0, 4]),
        "strided": paddle_tensor(weight).T,
        "array": np.arange(3, dtype=np.uint16),
        "flattened": SimpleNamespace(
            local_tensor=paddle_tensor(weight.reshape(-1)[5 * rank : 5 + 7 * rank].copy()),
            local_shape=(3, 4),
            global_shape=(3, 4),
            global_offset=(0, 0),
            is_flattened=True,
            flattened_range=slice(5 * rank, 5 + 7 * rank),
        ),
        "text": "long " * 2000,
    }
    if rank == 1:
        state["mine"] = paddle.ones([4])
    whole = gather_state_dict(state, 1, group, offload=True)
    return numpy_of(whole)


def large(receiver: int, mebibytes: int) -> tuple[bool, int]:
    """Gather a weight that both ranks have a half of, in more than one round; whether it is right, and its bytes."""
    rows = mebibytes * RANKS
    array = np.arange(rows * (1 << 17), dtype=np.float32).reshape(rows, -1)
    whole = gather_state_dict({"w": dist_tensor(array, ROWS)}, receiver, group_of(RANKS))
    return ("w" in whole and np.array_equal(whole["w"].numpy(), array)), array.nbytes


def swapped() -> tuple[bool, bool]:
    """Let two distributed weights change places; whether each has what the other one had."""
    rank, group = dist.get_rank(), group_of(RANKS)
    array = np.arange(6 << 20, dtype=np.float32).reshape(-1, 1024)
    a, b = dist_tensor(array.copy(), ROWS), dist_tensor(-array, ROWS)
    scatter_state_dict({"a": b, "b": a}, {"a": a, "b": b}, None, group)
    part = np.split(array, RANKS)[rank]
    return np.array_equal(a._local_value().numpy(), -part), np.array_equal(b._local_value().numpy(), part)


def own_of_some_ranks() -> list[dict[str, Any]]:
    """Values of ranks' own that one rank alone has, as a stage of a pipeline does, gathered and given back."""
    rank, group = dist.get_rank(), group_of(RANKS)

    def state(value: Any) -> dict[str, Any]:
        return {f"stage{rank}": {"rng": PerRank(value), "both": PerRank(value)}, "both": PerRank(value)}

    found = []
    whole = gather_state_dict(state(10 + rank), None, group)
    for sender in (None, 0, 1):
        target = state(None)
        scatter_state_dict(whole if sender in (None, rank) else None, target, sender, group)
        found.append(target)
    return found


def _without_memory(call: Callable[[], Any]) -> Any:
    """Make a call while Paddle makes no tensors."""
    with patch.object(paddle, "empty", side_effect=MemoryError("no room")):
        return call()


def failures() -> dict[str, Outcome]:
    """Calls that go wrong on one rank, or on both, each followed by one that does not."""
    rank, group = dist.get_rank(), group_of(RANKS)
    state, target = job(3, ROWS), job(5, COLUMNS)
    whole = gather_state_dict(state, None, group)
    before = arrays(target)
    short = {**whole, "model": {**whole["model"], "cut.weight": paddle.zeros([5, 6])}}
    marked = paddle.ones([2])
    marked.is_distributed = True
    quick = LoadOptions(timeout=60)
    calls = {
        "ranks": lambda: gather_state_dict(state, rank, group),
        "no rank": lambda: gather_state_dict(state, 7, group),
        "a bool": lambda: gather_state_dict(state, None, group, frozen="no" if rank else True),
        "offload": lambda: gather_state_dict(state, None, group, offload=1 if rank else True),
        "a value": lambda: gather_state_dict({**state, "odd": object() if rank else None}, 0, group),
        "a part": lambda: gather_state_dict({"part": marked}, 0, group),
        "replicas": lambda: gather_state_dict({"own": paddle.full([3, 3], float(rank))}, 0, group),
        "shape": lambda: scatter_state_dict(short if rank == 0 else None, target, 0, group, options=quick),
        "missing": lambda: scatter_state_dict({"model": whole["model"]}, target, None, group),
        "no dict": lambda: scatter_state_dict(None if rank else whole, target, None, group),
        "memory": lambda: _without_memory(lambda: gather_state_dict({"w": paddle.ones([2])}, 1, group)),
        "one rank's own": lambda: gather_state_dict(
            {"own": paddle.full([3, 3], float(rank))}, 1, group, options=SaveOptions(check_replicas="warn")
        )["own" if rank else "nothing"],
    }
    outcomes = {name: outcome_of(lambda call=call: numpy_of(call())) for name, call in calls.items()}
    outcomes["untouched"] = outcome_of(
        lambda: all(np.array_equal(value, before[key]) for key, value in arrays(target).items())
    )
    outcomes["afterwards"] = outcome_of(lambda: sorted(gather_state_dict({"x": 5}, 1, group)))
    return outcomes


def own_of_fewer_ranks() -> tuple[Any, tuple[str, ...]]:
    """What one rank had as its own, given to two, by rank; what this one has then, and what was left."""
    target = {"more": PerRank("mine")}
    options = LoadOptions(per_rank="by_rank")
    report = scatter_state_dict({"more": {0: "a"}}, target, None, group_of(RANKS), options=options)
    return target["more"].value, report.skipped_keys


def a_rank_that_cannot_offer_its_files() -> Outcome:
    """What a call raises where one rank has no memory for what partial tensors are reduced to; a later one is well."""

    def fails(*_: Any) -> Any:
        raise MemoryError("no memory for addends")

    group, state = group_of(RANKS), {"w": paddle.ones([3])}
    with patch("paddle_dist_ckpt.saving.present._make_files", fails) if dist.get_rank() == 1 else nullcontext():
        outcome = outcome_of(lambda: gather_state_dict(state, None, group))
    assert gather_state_dict({"v": PerRank(dist.get_rank())}, None, group)["v"] == {0: 0, 1: 1}
    return outcome
