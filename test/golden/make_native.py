"""Writes the golden checkpoint of the current format version: ``python -m test.golden.make_native FOLDER``.

Run it once when a format version is released, never again: its output is what later versions must still read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from paddle_dist_ckpt import SaveOptions
from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks, shard_array

RANKS = 3


def global_arrays() -> dict[str, Any]:
    """The tensors, by flat key."""
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "model.weight": random.normal(size=(7, 5)).astype("float32"),
        "model.table": random.normal(size=(300, 100)).astype("float32"),
        "model.half": random.normal(size=(4, 6)).astype("float16"),
        "model.brain": random.normal(size=(6, 3)).astype(ml_dtypes.bfloat16),
        "model.tiny": random.normal(size=(9,)).astype(ml_dtypes.float8_e4m3fn),
        "model.complex": (random.normal(size=(3, 2)) + 1j * random.normal(size=(3, 2))).astype("complex128"),
        "model.mask": random.integers(0, 2, (5, 2)).astype(bool),
        "model.scalar": np.array(2.5),
        "model.empty": np.zeros((0, 4), "int64"),
    }
    return arrays


def values() -> dict[str, Any]:
    """The values, as they stand in the state_dict."""
    return {
        "epoch": 3,
        "big": 2**200,
        "nan": float("nan"),
        "text": "学习率",
        "long": "x" * 5000,
        "pair": (1, b"\x00\xff"),
        "nested": {"a": [1.5, None, True], 7: {}},
    }


def cut(shape: tuple[int, ...], rank: int) -> list[Box]:
    """A rank's rows of a tensor; scalars and empty tensors are whole on every rank."""
    if not shape or 0 in shape:
        return [whole(shape)]
    size = -(-shape[0] // RANKS)
    start, stop = min(rank * size, shape[0]), min((rank + 1) * size, shape[0])
    return [Box((start,) + (0,) * (len(shape) - 1), (stop - start, *shape[1:]))] if stop > start else []


def state_dict(rank: int) -> dict[str, Any]:
    """What one rank saves. The table is replicated, so its writing is divided among the ranks."""
    arrays = global_arrays()
    model = {
        key.removeprefix("model."): shard_array(a, [whole(a.shape)] if key == "model.table" else cut(a.shape, rank))
        for key, a in arrays.items()
    }
    return {"model": model, "a.b": np.arange(3), "a": {"b": np.arange(4)}, "values": values()}


def main(folder: str) -> None:
    """Write the checkpoint."""

    def save(rank: SimulatedRank) -> None:
        options = SaveOptions(user_metadata={"purpose": "golden"}, block_bytes=16384)
        rank.save(state_dict(rank.rank), Path(folder), 4, options)

    for result in run_ranks(RANKS, save):
        if isinstance(result, BaseException):
            raise result


if __name__ == "__main__":
    main(sys.argv[1])
