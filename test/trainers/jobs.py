"""What a test asks ranks to do with a trainer, and what they tell it. It needs no trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Run = Callable[..., list["Outcome"]]

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "data2": {},
    "sharding2": {"sharding": "stage1", "sharding_parallel_size": 2},
    "sharding2 of version 2": {"sharding": "stage1", "sharding_parallel_size": 2, "split_param": True},
    "tensor2": {"tensor_model_parallel_size": 2},
}
STAGES = "pipeline2"  # of a model that is loaded only: a CPU does not pass on what stages compute
DEGREES = {**LAYOUTS, STAGES: {"pipeline_model_parallel_size": 2}}
AUTO_LAYOUTS: dict[str, dict[str, Any]] = {  # as PaddleNLP calls them
    "one": {},
    "tensor2": {"tensor_parallel_degree": 2},
    "sharding2": {"sharding": "stage1", "sharding_parallel_degree": 2},
}
STEPS = 4
FOLDERS = ("model_state", "optimizer_state", "master_weight")  # of a checkpoint of the Trainer
CUT = "tensor2"  # for whose layers a CPU has no kernels
KINDS: dict[str, dict[str, Any]] = {  # arguments of jobs
    "trained": {},
    "elementwise": {"elementwise": True},
    "bfloat16": {"elementwise": True, "bf16": True},
}
PLACES = [(kind, layout) for kind in KINDS for layout in LAYOUTS if kind != "trained" or layout != CUT]


@dataclass(frozen=True, slots=True)
class Job:
    """A training job.

    Attributes:
        layout: One of `LAYOUTS`, or of `AUTO_LAYOUTS` for PaddleNLP.
        folder: Where it saves, after every two steps.
        resume: The folder of the checkpoint that it begins with.
        ours: Whether this library is installed in the place of Paddle's functions.
        bf16: Whether parameters are bfloat16 with float32 master weights, instead of float32.
        elementwise: Whether steps are made by an elementwise loss.
        lora: Whether only LoRA's weights are trained.
        ema: Whether moving averages of the weights are kept, and are among the tensors.
        zero_cost: Whether the files are written as PaddleFormers' zero-cost checkpoints are.
        model: ``"Llama"``; or one that computes the same, with the keys of its two layers ``"exchanged"``, or with gate
            and up projections that are ``"fused"``.
        every_state: Whether a resume makes the optimizer's states for parameters too that the checkpoint does not have
            under the same key. PaddleFormers leaves them out, and they begin anew.
        arguments: Further arguments of the Trainer.
    """

    layout: str
    folder: str
    resume: str | None = None
    ours: bool = True
    bf16: bool = False
    elementwise: bool = False
    lora: bool = False
    ema: bool = False
    zero_cost: bool = False
    model: str = "Llama"
    every_state: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of a tensor.

    Attributes:
        shape: Of the whole tensor.
        offset: Where the rank's box begins in it.
        box: The shape of that box.
        begin: The first element of the box, as if it were flat, that the rank has.
        values: The elements, flat.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    box: tuple[int, ...]
    begin: int
    values: Array


@dataclass(slots=True)
class Outcome:
    """What a job leaves on a rank: the losses of its steps, and its parts of the model and of the optimizer's state."""

    losses: list[float] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)


class Jobs:
    """Jobs that several tests look at. Each is run once.

    Args:
        run: Runs a function of `test.trainers.formers` or `test.trainers.nlp` on ranks.
        new_folder: Makes a folder.
    """

    def __init__(self, run: Run, new_folder: Callable[[], Path]) -> None:
        self._run = run
        self._new_folder = new_folder
        self._done: dict[str, tuple[Path, list[Outcome]]] = {}

    def trained(self, kind: str, layout: str, ours: bool, **options: Any) -> tuple[Path, list[Outcome]]:
        """Return the folder of a job that was not interrupted, with its checkpoints, and what its ranks had."""
        return self._once("train", kind, layout, ours, options)

    def exported(self, kind: str, layout: str, ours: bool, **options: Any) -> tuple[Path, list[Outcome]]:
        """Return the folder of a model that was saved for others after such a job, and what its ranks had."""
        return self._once("export", kind, layout, ours, options)

    def _once(self, function: str, kind: str, layout: str, ours: bool, options: Any) -> tuple[Path, list[Outcome]]:
        key = repr((function, kind, layout, ours, options))
        if key not in self._done:
            folder, other = self._new_folder(), self._new_folder()
            job = Job(layout, str(folder), ours=ours, **KINDS[kind], **options)
            if function == "train":
                self._done[key] = folder, self._run(function, job)
            else:
                self._done[key] = other, self._run(function, job, str(other))
        return self._done[key]


def with_layers_exchanged(key: str) -> str:
    """Return what a key of the model with two layers is called when each is called as the other was."""
    return re.sub(r"\.layers\.([01])\.", lambda found: f".layers.{1 - int(found[1])}.", key)


def whole(outcomes: Sequence[Outcome]) -> dict[str, Array]:
    """Return the whole tensors of which ranks have parts.

    Raises:
        AssertionError: Parts differ where they overlap, or leave something out.
    """
    tensors: dict[str, Array] = {}
    known: dict[str, Array] = {}
    for outcome in outcomes:
        for key, part in outcome.parts.items():
            tensor = tensors.setdefault(key, np.zeros(part.shape, part.values.dtype))
            seen = known.setdefault(key, np.zeros(part.shape, bool))
            box = tuple(slice(o, o + n) for o, n in zip(part.offset, part.box, strict=True))
            numbers = np.arange(tensor.size).reshape(part.shape)[box].reshape(-1)
            numbers = numbers[part.begin : part.begin + part.values.size]
            there = seen.flat[numbers]
            assert (tensor.flat[numbers][there] == part.values[there]).all(), key
            tensor.flat[numbers] = part.values
            seen.flat[numbers] = True
    assert all(seen.all() for seen in known.values())
    return tensors


def differences(found: dict[str, Array], expected: dict[str, Array]) -> list[str]:
    """Return the keys that only one of both has, and those of tensors that are not equal bit for bit."""
    both = found.keys() & expected.keys()
    changed = {key for key in both if found[key].tobytes() != expected[key].tobytes()}
    return sorted((found.keys() ^ expected.keys()) | changed)


def assert_resumed(outcomes: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """Expect of a job that was resumed after two steps what one has that was not interrupted."""
    assert [outcome.losses for outcome in outcomes] == [outcome.losses[2:] for outcome in expected]
    assert not differences(whole(outcomes), whole(expected))
