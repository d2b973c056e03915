"""Checkpoints that other libraries wrote, and what is in them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_dist_ckpt.testing.reader_conformance import ForeignCheckpoint

__all__ = ["GOLDEN", "expected_arrays", "golden_checkpoint"]

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def expected_arrays(name: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a golden checkpoint by their flat keys; bfloat16 as its bits."""
    with np.load(GOLDEN / name / "expected.npz") as arrays:
        return dict(arrays)


def golden_checkpoint(name: str, without: Iterable[str] = (), **contents: Any) -> ForeignCheckpoint:
    """A golden checkpoint for :class:`ReaderTests`, without some of its files; ``contents`` is what it has beside."""
    left_out = ("expected.npz", *without)
    return ForeignCheckpoint.of_folder(GOLDEN / name, without=left_out, arrays=expected_arrays(name), **contents)
