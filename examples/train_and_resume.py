"""Trains a small language model under a CheckpointManager: killed at any moment, it goes on where it was.

Every rank runs this file, and whoever starts the job starts it with the same command again after a crash::

    python -m paddle.distributed.launch --nproc_per_node 4 examples/train_and_resume.py \\
        --mesh 2 2 --layout columns --root /tmp/lm-steps --events /tmp/lm.jsonl

The same folder serves a job of another size. ``killed.py`` beside this file kills such a job again and again.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from language_model import CONTEXT, training_text
from train_lm import BATCH, Events, Trainer, digests

from paddle_dist_ckpt import CheckpointManager, LoadOptions, PerRank, rng_state, set_rng_state


class Windows:
    """Batches at random places of the text, which depend on numpy's generator, and their number: a position."""

    def __init__(self) -> None:
        self._text = training_text()
        self.drawn = 0

    def draw(self) -> tuple[np.ndarray, np.ndarray]:
        """The next inputs and targets, each int64 [BATCH, CONTEXT]."""
        starts = np.random.randint(0, len(self._text) - CONTEXT, BATCH)
        windows = self._text[starts[:, None] + np.arange(CONTEXT + 1)]
        self.drawn += 1
        return windows[:, :-1].copy(), windows[:, 1:].copy()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`set_state_dict`."""
        return {"drawn": self.drawn}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches that a saved run had drawn."""
        self.drawn = state["drawn"]


def main() -> None:
    """Train as the command line says, from the latest step that is there."""
    args = _arguments()
    paddle.set_device("cpu")
    dist.init_parallel_env()
    events = Events(args.events)
    np.random.seed(2024)  # the same batches on every rank; DistTensors take their rows of them
    trainer, windows = Trainer(tuple(args.mesh), args.layout, args.steps), Windows()
    state: dict[str, Any] = {
        "model": trainer.model,
        "optimizer": trainer.optimizer,
        "lr": trainer.scheduler,
        "windows": windows,
        "rng": PerRank(rng_state()),
    }
    with CheckpointManager(args.root, keep_last=2, save_interval_steps=args.every, save_on_sigterm=True) as manager:
        done = manager.restore(state, options=LoadOptions(per_rank="coordinator")) or 0
        set_rng_state(state["rng"].value)
        events.write("started", step=done, drawn=windows.drawn)
        for step in range(done + 1, args.steps + 1):
            loss = trainer.update(*windows.draw())
            trainer.scheduler.step()
            events.write("step", step=step, loss=loss)
            if manager.should_save(step):
                state["rng"] = PerRank(rng_state())
                manager.save(step, state, metrics={"loss": loss})
            if manager.stopping:
                break
    final = digests(trainer.state(step=args.steps))
    events.write("state", digests=final, digest=_digest_of(final), drawn=windows.drawn, evaluation=trainer.evaluate())


def _digest_of(found: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mesh", type=int, nargs=2, metavar=("DP", "MP"), required=True, help="shape of the mesh")
    parser.add_argument("--layout", choices=("columns", "rows"), required=True, help="how weights are divided over mp")
    parser.add_argument("--steps", type=int, default=40, help="the last step")
    parser.add_argument("--every", type=int, default=3, help="save at multiples of so many steps")
    parser.add_argument("--root", required=True, help="folder of the steps' checkpoints")
    parser.add_argument("--events", required=True, help="file for what happened, as JSON lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
