"""Jobs of PaddleFormers' own Trainer with a tiny Llama, which the tests send to ranks.

Every sample that the ranks of a step are given is the same, and a rank trains on one at a time. So a job computes the
same numbers on any layout, bit for bit, and is compared with one that was never interrupted, on one rank.

What a CPU has not is put in its place (see also `test.ranks.fleet`). Kernels for tensor parallelism and for bfloat16
are missing: there, a step is made by an elementwise loss of the parameters instead of the model's, and AdamW steps on
the float32 master weights. PaddleFormers has version 2 of sharding in mixed precision only, whose level O1 computes in
float32 here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base import core
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel import tensor_parallel
from paddle.distributed.parallel import parallel_helper
from paddleformers.nn.mlp import MLP
from paddleformers.peft import LoRAConfig, LoRAModel
from paddleformers.trainer import Trainer, TrainerCallback, TrainingArguments
from paddleformers.trainer import trainer as formers_trainer
from paddleformers.trainer.trainer_utils import init_optimizer
from paddleformers.trainer.utils.zero_cost_checkpoint import EMABufferFcBased, NonZCCEMACallback
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM, LlamaForCausalLMPipe
from paddleformers.transformers.llama import modeling

import paddle_dist_ckpt
from paddle_dist_ckpt import CheckpointManager, LoadOptions, load_state_dict, stored
from test.ranks.fleet import stand_ins
from test.trainers import zero_cost
from test.trainers.jobs import DEGREES, LAYOUTS, STAGES, STEPS, Array, Job, Outcome, Part, with_layers_exchanged
from test.trainers.samples import SIZES, Samples, adamw

_DEVICE = {"FLAGS_selected_gpus": os.environ["PADDLE_RANK_IN_NODE"]}  # which PaddleFormers asks for


class TinyTrainer(Trainer):
    """A Trainer that records its losses, and takes an elementwise one if asked to."""

    elementwise: bool
    zero_cost: bool
    losses: list[float]

    def _save_flex_model_state(self, output_dir: str) -> None:
        if not self.zero_cost:
            super()._save_flex_model_state(output_dir)

    def _save_flex_optimizer_state(self, output_dir: str) -> None:
        if self.zero_cost:
            zero_cost.dump(self, output_dir)
        else:
            super()._save_flex_optimizer_state(output_dir)

    def autocast_smart_context_manager(self) -> Any:
        return nullcontext()

    def compute_loss(self, model: Any, inputs: Any, *more: Any) -> Any:
        if self.elementwise:
            loss = sum((each.astype("float32") ** 2).sum() for each in model.parameters() if not each.stop_gradient)
        else:
            loss = super().compute_loss(model, inputs, *more)
        self.losses.append(float(loss))
        return loss


def train(job: Job) -> Outcome:
    """Train until step `STEPS`, and return what this rank has then."""
    with place(job):
        return train_and_keep(job)[0]


def export(job: Job, folder: str) -> Outcome:
    """Train, save the model for others into ``folder``, and return what this rank has."""
    with place(job):
        outcome, trainer = train_and_keep(job)
        with patch.object(paddle.Tensor, "cuda", _same_tensor):
            trainer.save_model(folder, last_fc_to_hf=True)
        return outcome


def from_pretrained(job: Job, folder: str) -> Outcome:
    """Return this rank's parts of the model in ``folder``, or of that whose LoRA weights are there."""
    with place(job):
        make_arguments(job)
        kind = "bfloat16" if job.bf16 else "float32"
        if job.lora:
            model = LoRAModel.from_pretrained(make_model(job, bare=True), folder)
        else:
            kind_of_model = LlamaForCausalLMPipe if job.layout == STAGES else LlamaForCausalLM
            model = kind_of_model.from_pretrained(folder, config=config_of(job.layout), dtype=kind)
        return Outcome([], {key: part_of(weight) for key, weight in model.sharded_state_dict().items()})


def load_unified(job: Job, folder: str) -> Outcome:
    """Return what a model and its optimizer have that this library has loaded from a unified checkpoint of a job."""
    with place(job):
        trainer = make_trainer(job)
        trainer.create_optimizer_and_scheduler(STEPS)
        linear = "model.layers.{i}.{part}.{name}_proj.weight"
        recipes = {
            f"model.{linear}": stored(f"model.{linear}").T,
            f"optimizer.{linear}.moment{{n}}": stored(f"optimizer.{linear}/moment{{n}}_0"),
        }
        if job.bf16:
            recipes[f"optimizer.{linear}.master_weight"] = stored(f"master_weights.{linear}")
        state = {"model": trainer.model, "optimizer": trainer.optimizer}
        load_state_dict(state, folder, options=LoadOptions(key_map=_key_in_unified, recipes=recipes))
        return Outcome([], parts_of(trainer))


def _key_in_unified(key: str) -> str | None:
    if not key.startswith("optimizer."):
        return key
    if key.startswith("optimizer.LR_Scheduler"):
        return None
    parameter, _, name = key.removeprefix("optimizer.").rpartition(".")
    return f"master_weights.{parameter}" if name == "master_weight" else f"optimizer.{parameter}/{name}_0"


def load_flex(job: Job, folder: str) -> Outcome:
    """Return what a model and its optimizer have that this library has loaded from a flex checkpoint of a job, without
    the Trainer."""
    with place(job):
        trainer = make_trainer(job)
        trainer.create_optimizer_and_scheduler(STEPS)
        model, optimizer = trainer.model, trainer.optimizer
        load_state_dict(model.state_dict(), f"{folder}/model_state")
        for part in ("optimizer_state", "master_weight"):
            options = LoadOptions(key_map=functools.partial(_key_in_flex, part))
            load_state_dict({"model": model, "optimizer": optimizer}, f"{folder}/{part}", options=options)
        return Outcome([], parts_of(trainer))


def _key_in_flex(part: str, key: str) -> str | None:
    if not key.startswith("optimizer.") or key.startswith("optimizer.LR_Scheduler"):
        return None
    parameter, _, name = key.removeprefix("optimizer.").rpartition(".")
    if name == "master_weight":
        return f"{parameter}.w_0" if part == "master_weight" else None
    return f"{parameter}.{name}_0" if part == "optimizer_state" else None


def train_with_manager(job: Job, root: str, first: int) -> Outcome:
    """Train from step ``first`` on, where a callback lets a manager restore and save; returns what this rank has."""
    with place(job):
        trainer = make_trainer(job)
        samples = trainer.train_dataset
        trainer.train_dataset = paddle.io.Subset(samples, range(first * samples.ranks, len(samples)))
        trainer.add_callback(_Kept(root, first))
        trainer.train()
        return Outcome(trainer.losses, parts_of(trainer))


class _Kept(TrainerCallback):
    """Restores what a manager has, and saves with it after each step."""

    def __init__(self, root: str, first: int) -> None:
        self.manager, self.first = CheckpointManager(root), first

    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        assert self.manager.restore(_state(**found)) == (self.first or None)

    def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self.manager.save(self.first + state.global_step, _state(**found))

    def on_train_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self.manager.close()


def _state(model: Any, optimizer: Any, lr_scheduler: Any, **_: Any) -> dict[str, Any]:
    """What is saved: objects, or what they say of their parts where an optimizer has parts of parameters."""
    if not isinstance(getattr(optimizer, "_inner_opt", None), DygraphShardingOptimizerV2):
        return {"model": model, "optimizer": optimizer}
    weights = model.sharded_state_dict()
    states = optimizer.sharded_state_dict(weights)
    if not states:
        init_optimizer(optimizer, weights, {f"{key}.moment1_0" for key in weights})
        states = optimizer.sharded_state_dict(weights)
    return {"model": weights, "optimizer": states, "LR_Scheduler": lr_scheduler}


def averages_for_zero_cost(job: Job, pretend: bool) -> list[str]:
    """What zero-cost checkpoints, which need a device, are given of the moving averages at the step to resume from:
    the file to read, or the names of tensors.

    Args:
        pretend: Whether the Trainer is to believe that it is on ranks in another layout.
    """
    found: list[str] = []

    def begin(model: Any, checkpoint: str) -> None:
        trainer.zcc_manager = SimpleNamespace(
            set_ema_state_dict=found.append, set_ema_shared_memory=lambda tensors, **_: found.extend(sorted(tensors))
        )
        trainer._handle_checkpoint_resume(checkpoint)
        raise StopIteration

    with place(job), ExitStack() as stack:
        stack.enter_context(patch.object(paddle.Tensor, "cpu", paddle.clone))
        if pretend:
            other = patch.object(
                formers_trainer.DistInfoCollectorValidator, "check_same_strategy", lambda *_: (False, "")
            )
            stack.enter_context(other)
        trainer = make_trainer(job)
        trainer.args.enable_zero_cost_checkpoint, trainer.create_zcc_manager = True, begin
        trainer.hcg = fleet.get_hybrid_communicate_group()
        with suppress(StopIteration):
            trainer.train(resume_from_checkpoint=job.resume)
        return found


def train_and_keep(job: Job) -> tuple[Outcome, TinyTrainer]:
    trainer = make_trainer(job)
    trainer.train(resume_from_checkpoint=job.resume)
    return Outcome(trainer.losses, parts_of(trainer)), trainer


def parts_of(trainer: TinyTrainer) -> dict[str, Part]:
    """Return what this rank has of the model, of the optimizer's state, and of moving averages."""
    model = trainer.model.sharded_state_dict()
    weights = {**model, **trainer.optimizer.sharded_state_dict(model)}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, NonZCCEMACallback):
            averages = callback.buffer._build_ema_save_sharded_state_dict()
            weights |= {f"average of {key}": weight for key, weight in averages.items()}
    return {key: part_of(weight) for key, weight in weights.items()}


def make_trainer(job: Job) -> TinyTrainer:
    """Return a Trainer whose model has contents that depend on its keys only."""
    arguments = make_arguments(job)
    samples = Samples(arguments.dataset_world_size)
    trainer = TinyTrainer(model=make_model(job), args=arguments, train_dataset=samples)
    trainer.losses = []
    trainer.elementwise = job.elementwise
    trainer.zero_cost = job.zero_cost
    return trainer


def make_arguments(job: Job) -> TrainingArguments:
    """Return the arguments of a Trainer, which have told fleet their topology."""
    degrees = DEGREES[job.layout]
    mixed = job.bf16 or degrees.get("split_param", False)
    with patch.object(parallel_helper, "_is_parallel_ctx_initialized", FirstFalse()):
        arguments = TrainingArguments(
            **{
                "output_dir": job.folder,
                "device": "cpu",
                "max_steps": STEPS,
                "save_steps": 2,
                "logging_steps": 1,
                "per_device_train_batch_size": 1,
                "dataloader_shuffle": False,
                "learning_rate": 0.01,
                "max_grad_norm": 0,
                "bf16": mixed,
                "amp_master_grad": mixed,
                "fp16_opt_level": "O2" if job.bf16 else "O1",
                "sharding": "",
                "split_param": False,
                "report_to": [],
                "disable_tqdm": True,
                "save_checkpoint_format": "flex_checkpoint",
                "load_checkpoint_format": "flex_checkpoint",
                **({"zcc_save_ema_coef": 0.75} if job.ema else {}),
                **degrees,
                **job.arguments,
            }
        )
    if not mixed and not job.ours and arguments.aoa_config:  # Paddle takes no statements for what does not exist
        arguments.aoa_config_master_weight = {"aoa_statements": []}
    if dist.get_world_size() == 1:
        fleet.init(is_collective=True)
    return arguments


def make_model(job: Job, bare: bool = False) -> Any:
    """Return a model, with LoRA's weights if the job has them and it is not to be ``bare``."""
    paddle.set_default_dtype("bfloat16" if job.bf16 else "float32")
    mlp = functools.partial(MLP, fuse_up_gate=True) if job.model == "fused" else MLP
    try:
        with patch.object(modeling, "MLP", mlp):
            model = LlamaForCausalLM(config_of(job.layout))
        if job.model == "exchanged":
            exchange_layers(model.model)
        if job.lora and not bare:
            degree = LAYOUTS[job.layout].get("tensor_model_parallel_size", 1)
            kind = "bfloat16" if job.bf16 else "float32"
            targets = [".*q_proj.*", ".*down_proj.*"]
            config = LoRAConfig(target_modules=targets, r=4, tensor_model_parallel_size=degree, dtype=kind)
            model = LoRAModel(model, config)
            model.mark_only_lora_as_trainable()
    finally:
        paddle.set_default_dtype("float32")
    fill(model, exchanged=job.model == "exchanged")
    return model


def exchange_layers(llama: Any) -> None:
    """Call the first layer the second and the second the first, and still compute with them in the order as before."""
    in_order = list(llama.layers)
    llama.layers = paddle.nn.LayerList(in_order[::-1])
    llama.__dict__["layers"] = in_order  # which is found before sublayers are


def config_of(layout: str) -> LlamaConfig:
    tensor = 2 if layout == "tensor2" else 1
    return LlamaConfig(
        **SIZES,
        _attn_implementation="eager",
        fuse_rms_norm=False,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=2 if layout == STAGES else 1,
    )


def fill(model: Any, exchanged: bool = False) -> None:
    """Give the parameters contents that depend on what they are only, not on the layout or on what they are called."""
    for key, weight in model.sharded_state_dict().items():
        name = with_layers_exchanged(key) if exchanged else key
        box = tuple(slice(o, o + n) for o, n in zip(weight.global_offset, weight.local_shape, strict=True))
        tensor = weight.local_tensor
        if ".up_gate_proj." in name:  # each rank has its parts of the two
            half = weight.global_shape[0], weight.global_shape[1] // 2
            columns = slice(box[1].start // 2, box[1].stop // 2)
            parts = [contents(name.replace("up_gate", each), half)[:, columns] for each in ("gate", "up")]
            values = np.concatenate(parts, axis=1)
        else:
            values = contents(name, weight.global_shape)[box]
        tensor.set_value(paddle.to_tensor(values).astype(tensor.dtype))


def contents(name: str, shape: Sequence[int]) -> Array:
    generator = np.random.default_rng(list(name.encode()))
    return (generator.standard_normal(shape) * 0.1).astype("float32")


def part_of(weight: Any) -> Part:
    values = paddle.Tensor(weight.local_tensor).astype("float32").numpy().reshape(-1)
    begin = weight.flattened_range.start if weight.is_flattened else 0
    return Part(tuple(weight.global_shape), tuple(weight.global_offset), tuple(weight.local_shape), begin, values)


@contextmanager
def place(job: Job) -> Iterator[None]:
    """Put in its place what the Trainer does not find on a CPU, and the library if the job has it."""
    with ExitStack() as stack:
        stack.enter_context(stand_ins())
        stack.enter_context(patch.dict(os.environ, PADDLE_LOCAL_SIZE=str(dist.get_world_size()), **_DEVICE))
        stack.enter_context(patch.object(core.ProcessGroup, "all_reduce_on_calc_stream", _all_reduce))
        stack.enter_context(patch.object(paddle._C_ops, "adamw_", adamw))
        stack.enter_context(patch.object(tensor_parallel, "broadcast_input_data", _as_it_is))
        stack.enter_context(patch.object(paddle.Tensor, "pin_memory", paddle.clone))
        stack.enter_context(patch.object(EMABufferFcBased, "_get_model_state", _float32_state))
        if job.every_state:
            stack.enter_context(patch.object(formers_trainer, "init_optimizer", _init_every_state))
        if job.ours:
            stack.enter_context(paddle_dist_ckpt.install())
        if job.ema:  # which clear what they have copied from a device
            stack.enter_context(patch.object(paddle.Tensor, "cpu", paddle.clone))
        if job.ema or not job.ours:
            stack.enter_context(patch.object(paddle.Tensor, "cuda", _same_tensor))
        yield


def _same_tensor(tensor: Any, *_: Any, **__: Any) -> Any:
    """Stand in for ``Tensor.cuda``, which Paddle's loads and exports on several ranks call, and moving averages."""
    return tensor


def _init_every_state(optimizer: Any, model: Any, _: Any) -> None:
    """Make the optimizer's states of all parameters, whatever keys the checkpoint has."""
    init_optimizer(optimizer, model, _EveryKey())


class _EveryKey(dict[str, Any]):
    def __contains__(self, _: object) -> bool:
        return True


def _float32_state(buffer: Any) -> dict[str, Any]:
    """Return the parameters that are averaged and saved: averages of bfloat16 ones are of their master weights."""
    return {key: value for key, value in buffer.model.state_dict().items() if value.dtype == paddle.float32}


def _all_reduce(group: Any, tensor: Any, op: Any) -> None:
    task = group.all_reduce(tensor, op)
    task.wait()


def _as_it_is(_: Any, *inputs: Any, **named: Any) -> Any:
    return (inputs, named) if named else inputs


class FirstFalse:
    """Says first that there is no parallel context, so that the Trainer tells fleet its topology."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked > 1
