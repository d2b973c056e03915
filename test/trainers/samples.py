"""What the trainers' jobs train on."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

__all__ = ["LENGTH", "VOCABULARY", "Samples"]

VOCABULARY, LENGTH = 64, 8


class Samples(paddle.io.Dataset):
    """As many equal samples, one after the other, as ranks are given in a step."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def __len__(self) -> int:
        return 64 * self.ranks

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = np.random.default_rng(index // self.ranks).integers(0, VOCABULARY, LENGTH)
        return {"input_ids": tokens, "labels": tokens}
