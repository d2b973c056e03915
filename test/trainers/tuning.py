"""Jobs of PaddleFormers' trainers for supervised fine-tuning and for preferences (DPO), which the tests send to ranks.

The model is that of `test.trainers.formers`, with LoRA if the job has it, whose dropout draws random numbers; samples
are shuffled, the learning rate warms up, and gradients are accumulated.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.parallel import parallel_helper
from paddleformers.cli.train.dpo.dpo_argument import DPOConfig
from paddleformers.cli.train.dpo.dpo_trainer import DPOTrainer
from paddleformers.cli.train.sft.sft_config import SFTConfig
from paddleformers.cli.train.sft.sft_trainer import SFTTrainer
from paddleformers.peft import LoRAConfig, LoRAModel
from paddleformers.trainer import TrainingArguments
from paddleformers.transformers import LlamaForCausalLM

from paddle_dist_ckpt import rng_state
from test.trainers.formers import FirstFalse, TinyTrainer, config_of, fill, part_of, place
from test.trainers.jobs import DEGREES, STEPS, Job, Outcome
from test.trainers.samples import LENGTH, VOCABULARY, Samples


class Pairs(paddle.io.Dataset):
    """Prompts of two tokens, each with an answer to prefer, of three, and another."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = np.random.default_rng(index).integers(0, VOCABULARY, LENGTH)
        labels = np.where(np.arange(LENGTH) < 2, -100, tokens)
        places = np.array([0, 2, 5, LENGTH])
        return {
            "input_ids": tokens,
            "position_ids": np.arange(LENGTH),
            "response_labels": labels,
            "response_indexs": places,
        }


def train(job: Job, preferences: bool) -> tuple[Outcome, str, list[Any]]:
    """Train until step `STEPS`; returns what this rank has then, its random state, and what was logged."""
    with place(job), patch.object(paddle.device, "synchronize", lambda *_: None):
        paddle.seed(11)
        if job.resume:
            paddle.nn.Linear(1, 1)  # so that layers have other numbers than in the run that saved
        trainer = _with_preferences(job) if preferences else _supervised(job)
        trainer.losses = []
        trainer.elementwise = trainer.zero_cost = False
        trainer.train(resume_from_checkpoint=job.resume)
        model = trainer.model.sharded_state_dict()
        weights = {**model, **trainer.optimizer.sharded_state_dict(model)}
        log = [{key: one[key] for key in ("loss", "learning_rate") if key in one} for one in trainer.state.log_history]
        outcome = Outcome(trainer.losses, {key: part_of(weight) for key, weight in weights.items()})
        return outcome, repr(rng_state()), log


class _Supervised(TinyTrainer, SFTTrainer):
    pass


class _Preferring(TinyTrainer, DPOTrainer):
    def _wrap_ref_model(self, model: Any) -> Any:
        return model  # fleet takes it for a pipeline


def _supervised(job: Job) -> Any:
    return _Supervised(
        model=_model(job, None),
        args=_arguments(SFTConfig, job, max_seq_len=LENGTH),
        train_dataset=Samples(1),
        tokenizer=SimpleNamespace(pad_token="<pad>", model_max_length=LENGTH, save_pretrained=lambda *_, **__: None),
        data_collator=_collate,
    )


def _with_preferences(job: Job) -> Any:
    config = DPOConfig(lora=job.lora)
    reference = None if job.lora else _model(job, config)
    return _Preferring(
        model=_model(job, config),
        data_collator=_collate,
        ref_model=reference,
        dpo_config=config,
        args=_arguments(TrainingArguments, job),
        train_dataset=Pairs(),
    )


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
    if "response_indexs" in batch:
        batch["response_indexs"][:, 0] = np.arange(len(samples))
    return {key: paddle.to_tensor(values) for key, values in batch.items()}


def _arguments(kind: Any, job: Job, **more: Any) -> Any:
    with patch.object(parallel_helper, "_is_parallel_ctx_initialized", FirstFalse()):
        arguments = kind(
            **{
                "output_dir": job.folder,
                "device": "cpu",
                "max_steps": STEPS,
                "save_steps": 2,
                "logging_steps": 1,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "learning_rate": 0.01,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 2,
                "max_grad_norm": 0,
                "amp_master_grad": False,
                "sharding": "",
                "split_param": False,
                "report_to": [],
                "disable_tqdm": True,
                "save_checkpoint_format": "flex_checkpoint",
                "load_checkpoint_format": "flex_checkpoint",
                **DEGREES[job.layout],
                **more,
            }
        )
    if dist.get_world_size() == 1:
        fleet.init(is_collective=True)
    return arguments


def _model(job: Job, dpo_config: Any) -> Any:
    config = config_of(job.layout)
    config.dpo_config = dpo_config
    model = LlamaForCausalLM(config)
    if job.lora:
        targets = [".*q_proj.*", ".*down_proj.*"]
        model = LoRAModel(model, LoRAConfig(target_modules=targets, r=4, lora_dropout=0.3, dtype="float32"))
        model.mark_only_lora_as_trainable()
    fill(model)
    return model
