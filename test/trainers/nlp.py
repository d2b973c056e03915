"""Jobs of PaddleNLP's own AutoTrainer with a tiny one of its Llamas, which the tests send to ranks.

As in `test.trainers.formers`, the samples of a step are equal, so that all layouts compute the same: bit for bit, but
for tensor parallelism, which adds up in another order.

What a CPU has not is put in its place. Gloo cannot add up and cut at once, so a reshard does it in two steps. Models in
bfloat16 take a step by an elementwise loss of their parameters, which is the same bit for bit on any layout, and AdamW
steps on the float32 master weights. Programs of static mode have `test.ranks.static`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel import api
from paddle.distributed.flex_checkpoint.dcp.utils import compute_local_shape_and_global_offset

import paddle_dist_ckpt
from test.ranks import static
from test.ranks.fleet import stand_ins
from test.trainers import paddlenlp_imports  # noqa: F401  before PaddleNLP
from test.trainers.jobs import AUTO_LAYOUTS, STEPS, Job, Outcome, Part
from test.trainers.samples import LENGTH, SIZES, Samples, adamw

from paddlenlp.trainer import AutoTrainingArguments, TrainerState  # isort: skip
from paddlenlp.trainer.auto_trainer import AutoTrainer  # isort: skip
from paddlenlp.transformers import (  # isort: skip
    LlamaConfig,
    LlamaForCausalLM3DAuto,
    LlamaPretrainingCriterion3DAuto,
)


class TinyTrainer(AutoTrainer):
    """An AutoTrainer that takes samples in their order, records its losses, and takes an elementwise one if asked."""

    elementwise: bool
    losses: list[float]

    def _get_train_sampler(self) -> Any:
        size = self.args.per_device_train_batch_size * self.args.dataset_world_size
        return paddle.io.BatchSampler(dataset=self.train_dataset, shuffle=False, batch_size=size)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        if self.elementwise:
            return sum((each.astype("float32") ** 2).sum() for each in model.parameters())
        return super().compute_loss(model, inputs, return_outputs)

    def training_step(self, model: Any, inputs: Any) -> Any:
        loss = super().training_step(model, inputs)
        self.losses.append(value_of(loss))
        return loss


def train(job: Job) -> Outcome:
    """Train until step `STEPS`, and return what this rank has then."""
    with place(job):
        return train_and_keep(job)[0]


def train_unloaded(job: Job) -> Outcome:
    """Resume as `train` does, but for the model's and the optimizer's state, which are not loaded."""
    with place(job), patch.object(dist, "load_state_dict", lambda *_: None):
        return train_and_keep(job)[0]


def train_as_paddle(job: Job) -> Outcome:
    """Resume as `train` does, with Paddle's own function as it is."""
    with place(job), patch.object(dist, "load_state_dict", _own_load):
        return train_and_keep(job)[0]


def save_model(job: Job, folder: str) -> Outcome:
    """Train, save the model alone into ``folder``, and return what this rank has."""
    with place(job):
        outcome, trainer = train_and_keep(job)
        trainer.save_model(folder)
        return outcome


def train_and_keep(job: Job) -> tuple[Outcome, TinyTrainer]:
    if job.resume and job.ours:
        paddle.nn.Linear(1, 1)  # so that the layers have other numbers than in the run that saved
    trainer = make_trainer(job)
    if trainer.args.to_static:
        static.install(dist.get_world_size())
    trainer.train(resume_from_checkpoint=job.resume)
    return Outcome(trainer.losses, dict(parts_of(trainer))), trainer


def make_trainer(job: Job) -> TinyTrainer:
    """Return an AutoTrainer whose model has contents that depend on its keys only."""
    arguments = AutoTrainingArguments(
        **{
            "output_dir": job.folder,
            "enable_auto_parallel": True,
            "to_static": False,
            "device": "cpu",
            "max_steps": STEPS,
            "save_steps": 2,
            "logging_steps": 1,
            "per_device_train_batch_size": 1,
            "learning_rate": 0.03,
            "weight_decay": 0.01,
            "max_grad_norm": 0,
            "bf16": job.bf16,
            "fp16_opt_level": "O2" if job.bf16 else "O1",
            "report_to": [],
            "disable_tqdm": True,
            **AUTO_LAYOUTS[job.layout],
            **job.arguments,
        }
    )
    config = LlamaConfig(
        **SIZES,
        seq_length=LENGTH,
        tensor_parallel_degree=arguments.tensor_parallel_degree,
        tensor_parallel_output=arguments.tensor_parallel_degree > 1,
        use_flash_attention=False,
    )
    model = LlamaForCausalLM3DAuto(config)
    fill(model)
    trainer = TinyTrainer(
        model=model,
        criterion=LlamaPretrainingCriterion3DAuto(config),
        args=arguments,
        train_dataset=Samples(arguments.dataset_world_size),
    )
    trainer.losses, trainer.elementwise = [], job.elementwise
    return trainer


def fill(model: Any) -> None:
    """Give the parameters contents that depend on their names only, not on the layout."""
    for key, tensor in model.state_dict().items():
        generator = np.random.default_rng(list(key.encode()))
        values = (generator.standard_normal(tensor.shape) * 0.1).astype("float32")
        local = tensor._local_value()
        local.set_value(paddle.to_tensor(values[box_of(tensor)]))


def parts_of(trainer: Any) -> Iterator[tuple[str, Part]]:
    """Yield this rank's parts of the model and the optimizer's state, by names that are the same in each run."""
    names = {tensor.name: key for key, tensor in trainer.model.state_dict().items()}
    if trainer.args.to_static:
        program = trainer.model_wrapped
        model, optimizer = program.state_dict("param"), program.state_dict("opt")
    else:
        model, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
        optimizer |= optimizer.pop("master_weights", {})
    for key in names.values():
        yield key, part_of(model[key])
    for name, tensor in optimizer.items():
        owner = next((each for each in names if f"{name}_".startswith(f"{each}_")), None)
        if owner is not None:  # else of the learning rate
            suffix = re.sub(r"_\d+$", "", name.removeprefix(owner))
            yield f"{names[owner]} {suffix or 'master weight'}", part_of(tensor)


def part_of(tensor: Any) -> Part:
    values = tensor._local_value().astype("float32").numpy().reshape(-1)
    box = box_of(tensor)
    shape = tuple(each.stop - each.start for each in box)
    return Part(tuple(tensor.shape), tuple(each.start for each in box), shape, 0, values)


def box_of(tensor: Any) -> tuple[slice, ...]:
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.process_mesh, tensor.placements)
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def value_of(loss: Any) -> float:
    if not isinstance(loss, paddle.Tensor):
        return float(loss)
    if loss.is_dist():
        loss = dist.reshard(loss, loss.process_mesh, [dist.Replicate()] * loss.process_mesh.ndim)._local_value()
    return float(loss)


@contextmanager
def place(job: Job) -> Iterator[None]:
    """Put in its place what the AutoTrainer does not find on a CPU, and the library if the job has it."""
    with ExitStack() as stack:
        stack.enter_context(stand_ins())
        stack.enter_context(patch.object(TrainerState, "save_to_json", _save_to_json))
        stack.enter_context(patch.object(paddle.amp, "decorate", _decorate))
        stack.enter_context(patch.object(paddle._C_ops, "adamw_", adamw))
        stack.enter_context(patch.object(dist, "reshard", _reshard))
        stack.enter_context(patch.object(api, "reshard", _reshard))
        stack.enter_context(paddle.utils.unique_name.guard())  # Paddle's own functions know the names of a run alone
        if job.ours:
            stack.enter_context(paddle_dist_ckpt.install())
        else:
            stack.enter_context(patch.object(paddle.Tensor, "cuda", _same_tensor))
            stack.enter_context(patch.object(dist, "load_state_dict", _load_flat))
        yield


def _same_tensor(tensor: Any, *_: Any, **__: Any) -> Any:
    """Stand in for ``Tensor.cuda``, which Paddle's loads on several ranks call."""
    return tensor


_own_save_to_json = TrainerState.save_to_json


def _save_to_json(state: TrainerState, path: str) -> None:
    """Let one rank alone write the AutoTrainer's ``trainer_state.json``, which all do at once, and mix up."""
    if dist.get_rank() == 0:
        _own_save_to_json(state, path)


def _decorate(models: Any, **_: Any) -> None:
    """Stand in for ``paddle.amp.decorate``, which does nothing on a CPU."""
    models.to(dtype="bfloat16")


_own_load = dist.load_state_dict


def _load_flat(state: dict[str, Any], path: str) -> None:
    """Stand in for Paddle's own function, which refuses the nested dict that the AutoTrainer gives it."""
    _own_load({f"{part}.{key}": tensor for part, tensors in state.items() for key, tensor in tensors.items()}, path)


_own_reshard = api.reshard


def _reshard(tensor: Any, mesh: Any, placements: Any) -> Any:
    """Add up before cutting, which gloo cannot do at once, and cut float32, since a CPU cannot cut bfloat16."""
    if tensor.dtype == paddle.bfloat16:
        return _reshard(tensor.astype("float32"), mesh, placements).astype("bfloat16")
    if tensor.process_mesh == mesh:
        whole = [dist.Replicate() if each.is_partial() else each for each in tensor.placements]
        tensor = _own_reshard(tensor, mesh, whole)
    return _own_reshard(tensor, mesh, placements)
