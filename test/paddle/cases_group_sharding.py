"""Functions that test_group_sharding.py sends to ranks: training with Paddle's group sharding, and resuming it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import paddle
from paddle.distributed.sharding import group_sharded_parallel

from paddle_dist_ckpt import (
    LoadOptions,
    StateDictMismatchError,
    UnsupportedValueError,
    load_state_dict,
    save_state_dict,
)
from test.ranks.group_sharding import on_host
from test.ranks.groups import group_of
from test.trainers.samples import adamw

RANKS = 2
STAGES = {"none": None, "stage 2": "os_g", "stage 3": "p_g_os"}
_SAVED, _STEPS = 2, 4


class _Linear(paddle.nn.Linear):
    """One that computes in float32, since a CPU has no kernels for bfloat16."""

    def forward(self, inputs: Any) -> Any:
        return paddle.matmul(inputs, self.weight.astype("float32")) + self.bias.astype("float32")


class Job:
    """A model, its optimizer and scheduler, whose parameters and states a stage of group sharding spreads over ranks.

    Vectors stay whole in stage 3, of the last matrix the second rank has padding alone, and the one before is cut in
    the middle of a row.
    """

    def __init__(self, stage: str, kind: str = "bfloat16", **options: Any) -> None:
        self.stage = stage
        self.layer = paddle.nn.Sequential(_Linear(6, 8), _Linear(8, 8), _Linear(8, 9), _Linear(9, 3))
        for i, parameter in enumerate(self.layer.parameters(), 1):
            count = int(np.prod(parameter.shape))
            parameter.set_value(np.linspace(-i, i, count, dtype=np.float32).reshape(parameter.shape) / 20)
        self.layer.to(dtype=kind)
        self.scheduler = paddle.optimizer.lr.StepDecay(0.1, 2)
        optimizer = paddle.optimizer.AdamW(self.scheduler, parameters=self.layer.parameters(), multi_precision=True)
        self.model, self.optimizer, level = self.layer, optimizer, STAGES[stage]
        if level is not None:
            with on_host():
                self.model, self.optimizer, _ = group_sharded_parallel(
                    self.layer, optimizer, level, group=group_of(RANKS), segment_size=10, **options
                )

    def train(self, first: int, last: int) -> list[float]:
        """Train, with the same data on all ranks; returns the losses."""
        losses = []
        with on_host(), patch.object(paddle._C_ops, "adamw_", adamw):
            for number in range(first, last):
                inputs = np.random.default_rng(number).standard_normal((4, 6)).astype(np.float32)
                loss = (self.model(paddle.to_tensor(inputs)) ** 2).mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.clear_grad()
                self.scheduler.step()
                losses.append(float(loss))
        return losses

    def gather(self) -> None:
        """Have each rank hold all parameters."""
        if self.stage == "stage 3":
            with on_host():
                self.model.get_all_parameters()

    def state(self) -> dict[str, Any]:
        """What is saved and loaded."""
        if self.stage == "none":
            return {"model": self.model, "optimizer": self.optimizer}
        self.gather()
        weights = self.layer.sharded_state_dict()
        states = self.optimizer.sharded_state_dict(weights)
        return {"model": weights, "optimizer": states, "LR_Scheduler": self.scheduler}

    def parameters(self) -> dict[str, Any]:
        """All parameters."""
        self.gather()
        return {key: value.astype("float32").numpy().copy() for key, value in self.layer.state_dict().items()}


def train(stage: str, folder: str) -> tuple[list[float], dict[str, Any]]:
    """Train, saving on the way; returns the losses after that, and the parameters."""
    job = Job(stage)
    job.train(0, _SAVED)
    save_state_dict(job.state(), folder, group_of(RANKS))
    return job.train(_SAVED, _STEPS), job.parameters()


def resume(stage: str, folder: str) -> tuple[list[float], dict[str, Any]]:
    """The same, from what was saved; a first step makes the accumulators."""
    job = Job(stage)
    if stage != "none":
        job.train(99, 100)
    load_state_dict(job.state(), folder, group_of(RANKS))
    return job.train(_SAVED, _STEPS), job.parameters()


def load_weights(stage: str, folder: str) -> tuple[dict[str, Any], list[str]]:
    """Load a bfloat16 model that was saved alone, and take a step at a learning rate of 0; returns the parameters."""
    job = Job(stage)
    options = LoadOptions(allow_missing=["optimizer.*", "LR_Scheduler.*"])
    state = {key: value for key, value in job.state().items() if key != "LR_Scheduler"}
    report = load_state_dict(state, folder, group_of(RANKS), options=options)
    job.scheduler.base_lr = 0.0
    job.scheduler.step()
    job.train(0, 1)
    return job.parameters(), list(report.skipped)


def save_weights(folder: str) -> dict[str, Any]:
    job = Job("none")
    job.train(0, _SAVED)
    save_state_dict({"model": job.model}, folder, group_of(RANKS))
    return job.parameters()


def refusals(stage: str, folder: str) -> list[str]:
    """Why the objects themselves are refused: the optimizer's, and the model's if it is."""
    job, texts = Job(stage), []
    job.train(0, 1)
    for state in ({"optimizer": job.optimizer}, {"model": job.model}):
        try:
            save_state_dict(state, folder, group_of(RANKS))
        except UnsupportedValueError as error:
            texts.append(str(error))
    return texts


def refusals_of_offloaded(stage: str, folder: str) -> list[str]:
    """Why what has its weights on the host too is refused, in a save and in a load."""
    save_state_dict({"x": Job("none", "float16").layer}, folder, group_of(RANKS), 0)
    job, texts = Job(stage, "float16", offload=True), []
    states: dict[str, Any] = {"weights": job.layer.sharded_state_dict(), "objects": job.layer}
    if stage == "stage 2":
        states = {"states": job.optimizer.state_dict(), "inner": job.optimizer._optim, "objects": job.optimizer}
    for state in states.values():
        for call in (save_state_dict, load_state_dict):
            try:
                call({"x": state}, folder, group_of(RANKS), 0)
            except (UnsupportedValueError, StateDictMismatchError) as error:
                texts.append(str(error))
    return texts
