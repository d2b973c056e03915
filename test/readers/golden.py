"""Checkpoints that other libraries wrote, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["GOLDEN", "expected_arrays"]

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def expected_arrays(name: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a golden checkpoint by their flat keys; bfloat16 as its bits."""
    with np.load(GOLDEN / name / "expected.npz") as arrays:
        return dict(arrays)
