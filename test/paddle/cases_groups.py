"""Functions that test_groups.py sends to ranks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import (
    AsyncSave,
    CheckpointError,
    CheckpointManager,
    LoadOptions,
    SaveOptions,
    export_state_dict,
    load_state_dict,
    save_state_dict,
)
from paddle_dist_ckpt.control.session import Session
from paddle_dist_ckpt.paddle_adapter import groups
from test.paddle.layouts import Spread, part_of
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import dist_tensor, local_array
from test.ranks.groups import group_of

# State of the worker process: groups are made once.
_groups: dict[tuple[int, ...], Any] = {}


def array() -> Any:
    """The tensor that these tests save."""
    return np.arange(26, dtype=np.float32).reshape(13, 2)


def make_group(ranks: list[int]) -> None:
    """Make a group; all ranks call it."""
    if tuple(ranks) not in _groups:
        _groups[tuple(ranks)] = dist.new_group(ranks, backend="gloo")


def save_and_load(
    path: str, ranks: list[int] | None, coordinator: int, by_rank: bool = False
) -> tuple[bool, int, list[str]]:
    """Save and load in a group (None is the default one).

    Returns:
        Whether this rank's part is right, its value, and the files in its folder.
    """
    group = None if ranks is None else _groups[tuple(ranks)]
    members = list(range(dist.get_world_size())) if ranks is None else ranks
    spread = Spread(members, (0,))
    folder = Path(path, f"rank{dist.get_rank()}") if by_rank else Path(path)
    state: dict[str, Any] = {"x": dist_tensor(array(), spread), "rank": dist.get_rank()}
    options = SaveOptions(check_replicas="off", separate_folders=by_rank)
    save_state_dict(state, folder, group, coordinator, options=options)
    target = {"x": dist_tensor(np.zeros_like(array()), spread), "rank": -1}
    load_state_dict(target, folder, group, coordinator, options=LoadOptions(separate_folders=by_rank))
    expected = part_of(array(), spread, dist.get_rank())
    files = [file.name for file in folder.iterdir()]
    return np.array_equal(local_array(target["x"]), expected), target["rank"], files


def call_wrongly(path: str, ranks: list[int], coordinator: int) -> tuple[Outcome, Outcome]:
    """Save and load with a group or coordinator that must be refused."""
    group = _groups[tuple(ranks)]
    save = outcome_of(lambda: save_state_dict({"x": paddle.ones([2])}, path, group, coordinator))
    load = outcome_of(lambda: load_state_dict({"x": paddle.ones([2])}, path, group, coordinator))
    return save, load


def save_and_load_alone(path: str) -> tuple[float, int]:
    """Save and load without the others, each rank in its own folder if it is called on several."""
    folder, rank = Path(path, str(dist.get_rank())), dist.get_rank()
    save_state_dict({"x": paddle.full([3], float(rank)), "rank": rank}, folder, options=SaveOptions(no_dist=True))
    target = {"x": paddle.zeros([3]), "rank": -1}
    load_state_dict(target, folder, options=LoadOptions(no_dist=True))
    return float(target["x"].sum()), target["rank"]


def save_different_keys(path: str, ranks: int) -> None:
    """Save a state of which each rank has another part."""
    rank = dist.get_rank()
    state: dict[str, Any] = {"all": paddle.ones([2]), f"only{rank}": paddle.full([2], float(rank))}
    if rank == 0:
        state = {}  # not even what all others have
    elif rank == 2:
        state["nested"] = {"value": 5, "big": "y" * 9000}
    save_state_dict(state, path, group_of(ranks))


def load_different_keys(path: str, ranks: int) -> tuple[Any, ...]:
    """Load another part on each rank: nothing, one tensor, and all values."""
    rank = dist.get_rank()
    targets: list[dict[str, Any]] = [{}, {"only3": paddle.zeros([2])}, {"nested": None}, {"all": paddle.zeros([2])}]
    report = load_state_dict(targets[rank], path, group_of(ranks))
    tensors = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in targets[rank].items()}
    return tensors, report.unused_keys


def save_differing_replicas(path: str, check: Any) -> Outcome:
    """Save plain tensors and values of which two differ between ranks."""
    rank = dist.get_rank()
    state = {"same": paddle.ones([4]), "other": paddle.full([4], float(rank)), "seed": rank, "step": 7}
    options = SaveOptions(check_replicas=check)
    return outcome_of(lambda: save_state_dict(state, path, group_of(3), 1, options=options).warnings)


def save_again_and_again(path: str, ranks: list[int], saves: int) -> list[int]:
    """Save several times with a group, as fast as it goes; returns the ids."""
    spread, ids = Spread(ranks, (0,)), []
    for i in range(saves):
        state = {"x": dist_tensor(np.full((13, 2), 100 * ranks[0] + i, np.float32), spread), "i": 100 * ranks[0] + i}
        ids.append(save_state_dict(state, path, _groups[tuple(ranks)]).unique_id)
    return ids


def save_together_with(path: str, by_rank: dict[int, list[int]], saves: int) -> list[int]:
    """Save with the group that this rank belongs to, while another group saves into the same folder."""
    return save_again_and_again(path, by_rank[dist.get_rank()], saves)


def save_before_others(path: str, ranks: list[int], coordinator: int, timeout: float) -> Outcome:
    """Save in a group that may never have met."""
    options = SaveOptions(timeout=timeout)
    group = _groups[tuple(ranks)]
    return outcome_of(lambda: save_state_dict({"step": 1}, path, group, coordinator, options=options).unique_id)


class Several:
    """As a tensor of several elements is, asked for its index."""

    def __index__(self) -> int:
        raise AssertionError("only one element variable can be converted to python index.")

    def __repr__(self) -> str:
        return "Several()"


def name_coordinators(path: str, ranks: list[int], named: dict[int, Any]) -> dict[str, Outcome]:
    """Make each kind of call with the coordinator that this rank is told to name."""
    group, coordinator = _groups[tuple(ranks)], named[dist.get_rank()]
    state = {"x": dist_tensor(array(), Spread(ranks, (0,)))}
    calls = {
        "save": lambda: save_state_dict(state, path, group, coordinator),
        "async": lambda: save_state_dict(state, path, group, coordinator, async_save=True).result(),
        "load": lambda: load_state_dict(state, path, group, coordinator),
        "manager": lambda: CheckpointManager(path, process_group=group, coordinator_rank=coordinator).close(),
        "export": lambda: export_state_dict(
            state, Path(path, "out"), process_group=group, coordinator_rank=coordinator
        ),
    }
    outcomes = {}
    for name, call in calls.items():
        outcomes[name] = outcome_of(lambda call=call: [call(), None][1])  # type: ignore[misc]
    return outcomes


def interrupt_before_the_hub(path: str, ranks: list[int], coordinator: int, victim: int) -> tuple[str, float, int]:
    """Make a group's first save, on one rank with an interrupt when all have agreed on the coordinator, and a second.

    Returns:
        What the first raised, how long it took, and the id of the second.
    """
    state, group, begun = {"step": 1}, _groups[tuple(ranks)], time.monotonic()
    make, interrupts = groups._HubMaker.hub, [KeyboardInterrupt] if dist.get_rank() == victim else []

    def interrupted_once(*given: Any) -> Any:
        if interrupts:
            raise interrupts.pop()
        return make(*given)

    save_state_dict(state, path, group)  # which makes the hub on which they meet
    try:
        with mock.patch.object(groups._HubMaker, "hub", interrupted_once):
            save_state_dict(state, path, group, coordinator)
        said = "nothing"
    except (KeyboardInterrupt, CheckpointError) as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - begun, save_state_dict(state, path, group, coordinator).unique_id


def save_as_stages(path: str, ranks: int, check: Any, in_background: bool) -> Outcome:
    """Save a linear layer of which every rank has its own, under the same keys, as a stage of a pipeline."""
    layer = paddle.nn.Linear(4, 4)
    layer.weight.set_value(paddle.full([4, 4], float(dist.get_rank())))

    def save() -> tuple[str, ...]:
        options = SaveOptions(check_replicas=check)
        saved = save_state_dict({"model": layer}, path, group_of(ranks), async_save=in_background, options=options)
        return (saved.result() if isinstance(saved, AsyncSave) else saved).warnings

    return outcome_of(save)


def save_data_parallel(path: str, ranks: int, in_background: bool) -> tuple[int, int]:
    """Save a model and its optimizer that every rank has alike, but for a statistic, after the same step on all.

    Returns:
        The bytes that this rank has written, and how many warnings there were.
    """
    layer = paddle.nn.Linear(256, 256)
    layer.weight.set_value(paddle.arange(256 * 256, dtype="float32").reshape([256, 256]) / 1000)
    norm = paddle.nn.BatchNorm1D(8)
    norm._mean.set_value(paddle.full([8], float(dist.get_rank())))
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters())
    (layer(paddle.ones([2, 256])) ** 2).mean().backward()
    optimizer.step()
    state = {"model": layer, "norm": norm, "optimizer": optimizer}
    saved = save_state_dict(state, path, group_of(ranks), async_save=in_background)
    report = saved.result() if isinstance(saved, AsyncSave) else saved
    targets = {"model": paddle.nn.Linear(256, 256)}
    load_state_dict(targets, path, group_of(ranks))
    assert np.array_equal(targets["model"].weight.numpy(), layer.weight.numpy())
    return report.bytes_written, len(report.warnings)


def load_from_two_threads(path: str, ranks: int, coordinators: dict[str, int]) -> list[bool]:
    """Load in a group from two threads at once, each with a coordinator; on one rank the first is late for its
    collectives.

    Returns:
        Whether each has loaded what is right.
    """
    group, spread = group_of(ranks), Spread(list(range(ranks)), (0,))
    arrays = {name: array() + i for i, name in enumerate(("first", "second"))}
    for name, one in arrays.items():
        save_state_dict({"x": dist_tensor(one, spread), "all": one}, f"{path}/{name}", group)
    begun, run_collectives = threading.Event(), Session.run_collectives

    def late(session: Session, *given: Any) -> Any:
        if threading.current_thread().name == "first_0":
            time.sleep(2)  # in which the other thread would come first
        return run_collectives(session, *given)

    def load(name: str) -> bool:
        def rename(key: str) -> str:
            begun.set()
            return key

        target = {"x": dist_tensor(np.zeros_like(array()), spread), "all": np.zeros_like(array())}
        options = LoadOptions(key_map=rename, exchange="always", timeout=20)
        load_state_dict(target, f"{path}/{name}", group, coordinators[name], options=options)
        own = part_of(arrays[name], spread, dist.get_rank())
        return np.array_equal(local_array(target["x"]), own) and np.array_equal(target["all"], arrays[name])

    with (
        ThreadPoolExecutor(1, thread_name_prefix="first") as one,
        ThreadPoolExecutor(1, thread_name_prefix="second") as other,
        mock.patch.object(Session, "run_collectives", late if dist.get_rank() == 0 else run_collectives),
    ):
        first = one.submit(load, "first")
        assert begun.wait(60)
        second = other.submit(load, "second")
        return [first.result(), second.result()]
