"""Writes a checkpoint and a manager's steps as the library that is imported does, for later versions to load.

Start it as rank 0 and 1 of a job of two, with the library of an earlier commit in PYTHONPATH, and a new folder:
``python make_earlier.py FOLDER``. So it uses no other part of the library than what that commit has. The folders, of
``native``, are called after the day of the commit:

- 2026-11-21: 52b9d5f6, the first whose files are those of format 1.0; neither objects nor own values of ranks.
- 2026-11-21-objects: 6ad6ebec, the first with objects, own values of ranks and a manager.
- 2026-11-23: f2b6246e, with the times of a save in `.metadata`.
- 2026-11-27: d2c2f4ab.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_dist_ckpt as ckpt

ROWS = np.arange(24, dtype="float32").reshape(6, 4)
STEPS = (1, 2, 3, 4)


def trained() -> tuple[paddle.nn.Layer, paddle.optimizer.Optimizer]:
    """A model and its optimizer after a step."""
    net = paddle.nn.Linear(4, 2)
    for parameter in net.parameters():
        parameter.set_value(paddle.arange(parameter.size, dtype="float32").reshape(parameter.shape) / 8)
    optimizer = paddle.optimizer.AdamW(0.5, parameters=net.parameters())
    net(paddle.ones([1, 4])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
    return net, optimizer


def values() -> dict[Any, Any]:
    """The values, but for the epoch, which is 3 in the first checkpoint and 4 in the second."""
    return {"epoch": 3, "big": 2**200, "pair": (1, b"\xff"), 7: ["学", None, float("inf")], "complex": 1 - 2j}


def main(folder: Path) -> None:
    """Save checkpoint 0, with a model and its optimizer, and 1, without; and steps, of which two and the best stay."""
    dist.init_parallel_env()
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])

    def rows(array: np.ndarray[Any, Any]) -> paddle.Tensor:
        return dist.shard_tensor(paddle.to_tensor(array), mesh, [dist.Shard(0)])

    net, optimizer = trained()
    state: dict[str, Any] = {
        "rows": rows(ROWS),
        "half": paddle.to_tensor(ROWS[:2]).astype("bfloat16"),
        "scalar": paddle.to_tensor(2.5),
        "none": paddle.zeros([0, 4]),
        "array": np.arange(5),
        "values": values(),
    }
    if hasattr(ckpt, "PerRank"):
        state["own"] = ckpt.PerRank({"rank": dist.get_rank()})
    try:
        ckpt.save_state_dict({**state, "model": net, "optimizer": optimizer}, folder)
    except ckpt.UnsupportedValueError:
        ckpt.save_state_dict({**state, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, folder)
    state["rows"] = rows(ROWS + 100)
    state["values"]["epoch"] = 4
    ckpt.save_state_dict(state, folder)
    if dist.get_rank() == 0:
        arrays = {**net.state_dict(), **optimizer.state_dict()}
        np.savez(
            folder / "expected.npz", **{key: each.numpy() for key, each in arrays.items() if hasattr(each, "numpy")}
        )
    if hasattr(ckpt, "CheckpointManager"):
        manager = ckpt.CheckpointManager(folder / "steps", keep_last=2, best=("loss", "min"))
        for step in STEPS:
            manager.save(step, {"rows": rows(ROWS + step), "step": step}, metrics={"loss": abs(step - 2) + 0.5})
        manager.wait()
        manager.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
