"""Functions that test_drop_in.py sends to ranks, and a trainer as a user has written it for Paddle's own functions."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterable
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    LoadOptions,
    SaveOptions,
    drop_in,
    list_checkpoints,
)
from paddle_dist_ckpt.drop_in import install
from test.paddle.layouts import Spread
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import dist_tensor
from test.ranks.groups import group_of

_OPTIONS = {
    "save_options": SaveOptions(timeout=60, separate_folders=True),
    "load_options": LoadOptions(timeout=60, separate_folders=True),
}


class _Net(paddle.nn.Layer):
    """Two linear layers, whose parameters are distributed as the placements of the mesh's last dimension say."""

    def __init__(self, mesh: Any, placements: dict[str, Any]) -> None:
        super().__init__()
        lead = [dist.Replicate()] * (mesh.ndim - 1)
        self.up, self.down = paddle.nn.Linear(8, 16), paddle.nn.Linear(16, 4)
        for layer, name in ((self.up, "up"), (self.down, "down")):
            for part in ("weight", "bias"):
                spread = [*lead, placements[f"{name}.{part}"]]
                setattr(layer, part, dist.shard_tensor(getattr(layer, part), mesh, spread))

    def forward(self, x: Any) -> Any:
        return self.down(paddle.nn.functional.relu(self.up(x)))


class Trainer:
    """Trains, saves and resumes with nothing but Paddle's names."""

    def __init__(self, mesh: Any, placements: dict[str, Any]) -> None:
        self.mesh = mesh
        self.model = _Net(mesh, placements)
        self.scheduler = paddle.optimizer.lr.StepDecay(0.05, step_size=2)
        optimizer = paddle.optimizer.AdamW(self.scheduler, parameters=self.model.parameters())
        self.optimizer = dist.shard_optimizer(optimizer)

    def state(self) -> dict[str, Any]:
        """The tensors; the scheduler is no tensor, so it has a file of its own."""
        optimizer = self.optimizer.state_dict()
        optimizer.pop("LR_Scheduler", None)
        return {"model": self.model.state_dict(), "optimizer": optimizer}

    def save(self, folder: str) -> None:
        dist.save_state_dict(self.state(), os.path.join(folder, "dist_ckpt"))
        if dist.get_rank() == 0:
            paddle.save(self.scheduler.state_dict(), os.path.join(folder, "scheduler.pdparams"))
        dist.barrier()

    def resume(self, folder: str) -> None:
        state = self.state()
        dist.load_state_dict(state, os.path.join(folder, "dist_ckpt"))
        self.model.set_state_dict(state["model"])
        scheduler = paddle.load(os.path.join(folder, "scheduler.pdparams"))
        self.optimizer.set_state_dict({**state["optimizer"], "LR_Scheduler": scheduler})

    def train(self, steps: Iterable[int]) -> list[float]:
        losses = []
        replicated = [dist.Replicate()] * self.mesh.ndim
        for step in steps:
            numbers = np.random.default_rng(step)
            x, y = (paddle.to_tensor(numbers.standard_normal((8, size), np.float32)) for size in (8, 4))
            x, y = (dist.shard_tensor(batch, self.mesh, replicated) for batch in (x, y))
            loss = ((self.model(x) - y) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            self.scheduler.step()
            losses.append(float(loss.numpy()))
        return losses


def train_and_resume(folder: str) -> dict[str, Any]:
    """Train on four ranks in a row, and go on from the middle on a square of them in another layout."""
    rows = {"up.weight": dist.Shard(1), "up.bias": dist.Shard(0), "down.weight": dist.Shard(0)}
    square = {"up.weight": dist.Shard(0), "up.bias": dist.Replicate(), "down.weight": dist.Shard(1)}
    with install():
        first = Trainer(dist.ProcessMesh([0, 1, 2, 3], ["mp"]), {**rows, "down.bias": dist.Replicate()})
        for steps in (range(1), range(1, 3)):
            first.train(steps)
            first.save(folder)
        uninterrupted = first.train(range(3, 8))

        second = Trainer(dist.ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"]), {**square, "down.bias": dist.Shard(0)})
        second.resume(folder)
        resumed = second.train(range(3, 8))
        third = Trainer(second.mesh, {**square, "down.bias": dist.Shard(0)})
    return {
        "uninterrupted": uninterrupted,
        "resumed": resumed,
        "anew": third.train(range(3, 8)),
        "checkpoints": list_checkpoints(os.path.join(folder, "dist_ckpt")),
        "names": [sorted(trainer.state()["optimizer"]) for trainer in (first, second)],
    }


def newest_of_the_coordinator(root: str, ranks: int) -> tuple[list[int], list[int]]:
    """Save in folders that have other checkpoints on each rank. Returns the ids saved under, and what is there then."""
    rank, group = dist.get_rank(), group_of(ranks)
    folder = os.path.join(root, str(rank))
    alone = SaveOptions(no_dist=True)
    saved = []
    with install(save_options=alone):
        for unique_id in (3, 4) if rank == 0 else (3, 9):
            dist.save_state_dict({"x": paddle.ones([2])}, folder, unique_id=unique_id)
    spread = Spread(list(range(ranks)), (0,))
    for policy in ("paddle", "next", "paddle"):
        with install(policy, **_OPTIONS):  # type: ignore[arg-type]
            state = {"x": dist_tensor(np.arange(12, dtype=np.float32), spread)}
            saved.append(dist.save_state_dict(state, folder, process_group=group).unique_id)
            dist.load_state_dict(state, folder, process_group=group)
    return saved, list_checkpoints(folder)


def with_aoa_config(folder: str, ranks: int, having: list[int], given: Any) -> tuple[Outcome, Outcome]:
    """Load with an aoa_config on some ranks, then without."""
    config = given if dist.get_rank() in having else None
    state, group = {"x": paddle.zeros([3])}, group_of(ranks)
    with install(**_OPTIONS):  # type: ignore[arg-type]
        dist.save_state_dict({"x": paddle.ones([3])}, folder, group)
        first = outcome_of(lambda: dist.load_state_dict(state, folder, group, aoa_config=config))
        second = outcome_of(lambda: dist.load_state_dict(state, folder, group) and float(state["x"].sum()))
    return first, second


def save_twice(folder: str, ranks: int, empty: tuple[int, ...]) -> bool:
    """Save twice into one folder, some ranks an empty dict; load; returns whether Paddle's `load` names the tensor."""
    rank, group = dist.get_rank(), group_of(ranks)
    state = {} if rank in empty else {"w": paddle.arange(4, dtype="float32")}
    with install(**_OPTIONS):  # type: ignore[arg-type]
        for _ in range(2):
            dist.save_state_dict(state, folder, process_group=group)
        dist.load_state_dict(state, folder, process_group=group)
        (file,) = [name for name in os.listdir(folder) if name.endswith(".metadata")]
        return "w" in paddle.load(os.path.join(folder, file)).state_dict_metadata


def load_from_nowhere(folder: str, ranks: int) -> tuple[bool, bool]:
    """Load from no folder, and from one without a checkpoint; returns whether FileNotFoundErrors are raised."""
    state, group, found = {"x": paddle.zeros([3])}, group_of(ranks), []
    with install(**_OPTIONS):  # type: ignore[arg-type]
        for path in (os.path.join(folder, "none"), folder):
            try:
                dist.load_state_dict(state, path, group)
            except CheckpointNotFoundError as error:
                found.append(isinstance(error, FileNotFoundError))
    first, second = found
    return first, second


def with_transform(folder: str, ranks: int, having: list[int]) -> tuple[str | None, float]:
    """Load with a load_transform on some ranks, then without."""
    transform = object() if dist.get_rank() in having else None
    state, group = {"x": paddle.zeros([3])}, group_of(ranks)
    with install(**_OPTIONS):  # type: ignore[arg-type]
        dist.save_state_dict({"x": paddle.ones([3])}, folder, group)
        first = outcome_of(lambda: dist.load_state_dict(state, folder, group, load_transform=transform))
        dist.load_state_dict(state, folder, group)
    return first.error, float(state["x"].sum())


def merge_wrongly(folder: str, ranks: int, wrong: dict[str, Any]) -> list[Outcome]:
    """Call merge_sharded_state_dict with arguments that are wrong on rank 1, then load."""
    home: Any = importlib.import_module("paddle.distributed.flex_checkpoint.dcp.load_state_dict")
    state, group = {"x": paddle.zeros([3])}, group_of(ranks)
    given: dict[str, Any] = {"load_path": f"{folder}/saved", "save_path": f"{folder}/merged"}
    with install(**_OPTIONS):  # type: ignore[arg-type]
        dist.save_state_dict({"x": paddle.ones([3])}, f"{folder}/saved", group)
        if "aoa_config" in wrong:
            given["aoa_config"] = {"aoa_statements": ["x -> x"]}
        if dist.get_rank() == 1:
            given |= wrong
        merged = outcome_of(lambda: home.merge_sharded_state_dict(**given, process_group=group))
        return [merged, outcome_of(lambda: dist.load_state_dict(state, f"{folder}/saved", group))]


def leave_to_former(folder: str, ranks: int) -> list[str]:
    """Load from an empty folder; returns what a function in the place of Paddle's was asked for."""
    asked: list[str] = []
    former, group = dist.load_state_dict, group_of(ranks)
    dist.load_state_dict = lambda *given, **named: asked.append("former")
    try:
        with install(foreign="former", **_OPTIONS):  # type: ignore[arg-type]
            dist.load_state_dict({"x": paddle.zeros([3])}, folder, process_group=group)
    finally:
        dist.load_state_dict = former
    return asked


def interrupted_when_it_knows_who_can_read(path: str, ranks: int, victim: int) -> tuple[str, float, list[float]]:
    """A rank is interrupted in a load that may be left to the former function, when it knows that it is not; what that
    raises, how long it takes, and what the next one loads."""
    group, target = group_of(ranks), {"w": paddle.zeros([2])}
    victim_does = {"side_effect": KeyboardInterrupt} if dist.get_rank() == victim else {"wraps": drop_in.load_with}
    with install(foreign="former", load_options=LoadOptions(timeout=60)):
        dist.save_state_dict({"w": paddle.ones([2])}, path, group)
        begun = time.monotonic()
        with mock.patch.object(drop_in, "load_with", **victim_does):
            try:
                raised = str(dist.load_state_dict(target, path, group))
            except (CheckpointError, KeyboardInterrupt) as error:
                raised = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - begun
        dist.load_state_dict(target, path, group)
        return raised, seconds, target["w"].tolist()
