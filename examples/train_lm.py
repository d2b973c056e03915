"""Trains a small language model over several ranks, saves it on the way, or goes on from what was saved.

Every rank runs this file. It can be tried without the demo around it::

    python -m paddle.distributed.launch --nproc_per_node 4 examples/train_lm.py \\
        --mesh 2 2 --layout columns --steps 40 --save-after 20 --checkpoint /tmp/lm --events /tmp/lm-4.jsonl
    python -m paddle.distributed.launch --nproc_per_node 2 examples/train_lm.py \\
        --mesh 1 2 --layout rows --steps 40 --resume --checkpoint /tmp/lm --events /tmp/lm-2.jsonl

The ranks form a mesh of data-parallel rows and model-parallel columns: a batch is divided over ``dp``, the weights of
linear layers over ``mp``. Rank 0 writes what happens to a file of JSON lines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from language_model import LanguageModel, evaluation_batch, language_loss, training_batch

from paddle_dist_ckpt import load_state_dict, save_state_dict

BATCH = 16
LEARNING_RATE = 3e-3

# The weights [inputs, outputs] that layout "columns" cuts along their outputs. The layers behind them, "output" and
# "down", it cuts along their inputs, so that the two together need one sum over mp. Layout "rows" does the opposite:
# dearer to compute, but as different as can be for who has to load the one into the other.
_OUTPUTS_CUT = ("characters", "query", "key", "value", "up", "head")
_INPUTS_CUT = ("output", "down")


class Trainer:
    """The model, the optimizer and the mesh that they are spread over."""

    def __init__(self, mesh_shape: tuple[int, int], layout: str, steps: int) -> None:
        paddle.seed(2024)
        dp, mp = mesh_shape
        ranks = [[row * mp + column for column in range(mp)] for row in range(dp)]
        self.mesh = dist.ProcessMesh(ranks, dim_names=["dp", "mp"])
        self.model = dist.shard_layer(LanguageModel(), self.mesh, _shard_function(layout))
        self.scheduler = paddle.optimizer.lr.CosineAnnealingDecay(LEARNING_RATE, T_max=steps)
        optimizer = paddle.optimizer.AdamW(self.scheduler, parameters=self.model.parameters())
        self.optimizer = dist.shard_optimizer(optimizer)

    def update(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Change the weights by one batch, and return its loss."""
        loss = self._loss(inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return float(_whole(loss))

    def evaluate(self) -> float:
        """Return the loss on text that is not trained on."""
        with paddle.no_grad():
            return float(_whole(self._loss(*evaluation_batch())))

    def objects(self, step: int) -> dict[str, Any]:
        """Return all that a run needs to go on after ``step``, as it is saved and loaded."""
        return {"model": self.model, "optimizer": self.optimizer, "lr": self.scheduler, "step": step}

    def state(self, step: int) -> dict[str, Any]:
        """Return the same as tensors and values under the keys of a checkpoint, to be compared. Nothing is copied."""
        model = self.model.state_dict()
        keys = {parameter.name: key for key, parameter in model.items()}
        optimizer = self.optimizer.state_dict()
        schedule = optimizer.pop("LR_Scheduler")
        return {
            "model": model,
            "optimizer": {**{_key_of(name, keys): x for name, x in optimizer.items()}, "LR_Scheduler": schedule},
            "lr": self.scheduler.state_dict(),
            "step": step,
        }

    def _loss(self, inputs: np.ndarray, targets: np.ndarray) -> paddle.Tensor:
        rows = [dist.Shard(0), dist.Replicate()]
        inputs, targets = (dist.shard_tensor(paddle.to_tensor(each), self.mesh, rows) for each in (inputs, targets))
        return language_loss(self.model(inputs), targets)


def _key_of(name: str, parameters: Mapping[str, str]) -> str:
    """Return the key of an optimizer's variable: ``head.weight.moment1`` for ``linear_12.w_0.dist_moment1_0``."""
    parameter = max((each for each in parameters if name.startswith(each + "_")), key=len)
    return f"{parameters[parameter]}.{name[len(parameter) + 1 :].rpartition('_')[0]}"


def digests(state: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a hash of each whole tensor and the ``repr()`` of each other value, by its dotted key."""
    found: dict[str, str] = {}
    for name, value in state.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found.update(digests(value, f"{key}."))
        elif isinstance(value, paddle.Tensor):
            found[key] = hashlib.sha256(_whole(value).numpy().tobytes()).hexdigest()
        else:
            found[key] = repr(value)
    return found


def describe(model: paddle.nn.Layer, name: str) -> dict[str, Any]:
    """Return how one weight lies on the ranks."""
    weight = model.state_dict()[name]
    return {
        "name": name,
        "shape": weight.shape,
        "local_shape": weight._local_value().shape,
        "placements": [str(each) for each in weight.placements],
    }


def main() -> None:
    """Train as the command line says."""
    args = _arguments()
    paddle.set_device("cpu")
    dist.init_parallel_env()
    events = Events(args.events)
    trainer = Trainer(tuple(args.mesh), args.layout, args.steps)
    events.write("layout", **describe(trainer.model, "blocks.0.up.weight"))

    done = 0
    if args.resume:
        state = trainer.objects(step=0)
        seconds = seconds_of(load_state_dict, state, args.checkpoint)
        done = state["step"]
        events.write("loaded", step=done, seconds=seconds)
        events.write("state", digests=digests(trainer.state(done)), evaluation=trainer.evaluate())

    for step in range(done + 1, args.steps + 1):
        loss = trainer.update(*training_batch(step, BATCH))
        trainer.scheduler.step()
        events.write("step", step=step, loss=loss)
        if step == args.save_after:
            seconds = seconds_of(save_state_dict, trainer.objects(step), args.checkpoint)
            events.write("saved", step=step, seconds=seconds)
            events.write("state", digests=digests(trainer.state(step)), evaluation=trainer.evaluate())


def seconds_of(function: Callable[..., Any], *args: Any) -> float:
    """Call ``function(*args)`` and return how long it took."""
    started = time.perf_counter()
    function(*args)
    return time.perf_counter() - started


class Events:
    """A file of JSON lines, written by rank 0."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def write(self, event: str, **fields: Any) -> None:
        """Append one line. All ranks call it."""
        if dist.get_rank() == 0:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, **fields}) + "\n")


def _shard_function(layout: str) -> Any:
    """Return the function that ``dist.shard_layer`` calls with each layer, to spread the layer's own parameters."""

    def shard(name: str, layer: paddle.nn.Layer, mesh: dist.ProcessMesh) -> None:
        for key, parameter in list(layer.named_parameters(include_sublayers=False)):
            cut = _cut(name.rpartition(".")[-1], len(parameter.shape), layout)
            placement = dist.Replicate() if cut is None else dist.Shard(cut)
            setattr(layer, key, dist.shard_tensor(parameter, mesh, [dist.Replicate(), placement]))

    return shard


def _cut(layer: str, dimensions: int, layout: str) -> int | None:
    """Return the dimension along which a parameter of ``layer`` is divided over mp, None if it is not."""
    outputs_cut, inputs_cut = (_OUTPUTS_CUT, _INPUTS_CUT) if layout == "columns" else (_INPUTS_CUT, _OUTPUTS_CUT)
    if layer in outputs_cut:
        return dimensions - 1
    if layer in inputs_cut and dimensions == 2:
        return 0
    return None


def _whole(tensor: paddle.Tensor) -> paddle.Tensor:
    """Return the global tensor, gathered on this rank."""
    if not tensor.is_dist():
        return tensor
    mesh = tensor.process_mesh
    return dist.reshard(tensor, mesh, [dist.Replicate()] * len(mesh.shape))._local_value()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mesh", type=int, nargs=2, metavar=("DP", "MP"), required=True, help="shape of the mesh")
    parser.add_argument("--layout", choices=("columns", "rows"), required=True, help="how weights are divided over mp")
    parser.add_argument("--steps", type=int, default=40, help="the last step")
    parser.add_argument("--save-after", type=int, help="the step after which to save")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--checkpoint", required=True, help="folder of the checkpoint")
    parser.add_argument("--events", required=True, help="file for what happened, as JSON lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
