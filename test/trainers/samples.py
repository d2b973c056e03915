"""What the jobs of both trainers have in common: samples, the size of the model, and a step of bfloat16 on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.distributed.auto_parallel import api

__all__ = ["LENGTH", "SIZES", "VOCABULARY", "Samples", "adamw"]

VOCABULARY, LENGTH = 64, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_own_adamw, _own_reshard = paddle._C_ops.adamw_, api.reshard


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


def adamw(parameter: Any, gradient: Any, *others: Any) -> Any:
    """Step on the master weight where there is one, as the kernel for bfloat16 does on devices."""
    master = others[6]
    if master is None:
        return _own_adamw(parameter, gradient, *others)
    others = (*others[:6], None, *others[7:16], False, *others[17:])
    results = _own_adamw(master, gradient.astype("float32"), *others)
    if master.is_dist():
        master = _own_reshard(master, parameter.process_mesh, parameter.placements)
    parameter.copy_(master.astype(parameter.dtype), True)
    return results
