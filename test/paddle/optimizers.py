"""An optimizer's state by names that are the same in every run, as saves have it; and a scaler as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import paddle

from paddle_dist_ckpt.paddle_adapter.optimizers import optimizer_state
from paddle_dist_ckpt.tree.canonical import canonical_paths


def flat(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The paths of an optimizer's entries, those of the master weights' own dict among them."""
    for key, value in state.items():
        if key == "master_weights" and isinstance(value, dict):
            yield from ((f"{key}/{name}", master) for name, master in value.items())
        else:
            yield key, value


def named_state(optimizer: Any, structured: Mapping[str, str]) -> dict[str, Any]:
    """Its state; ``structured`` has the structured name for each parameter's variable name."""
    entries = dict(flat(optimizer_state(optimizer)))
    paths = [*(f"/model/{name}" for name in structured.values()), *(f"/optimizer/{path}" for path in entries)]
    found = canonical_paths(paths, [*structured, *[None] * len(entries)])
    return {found.get(f"/optimizer/{key}", key).rpartition("/")[2]: value for key, value in entries.items()}


def scaler_of(enable: bool, scale: float = 512.0) -> Any:
    """A GradScaler, as on a GPU; on the CPU Paddle disables each."""
    place = SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
    with mock.patch.object(paddle.amp.grad_scaler, "_dygraph_tracer", return_value=place):
        return paddle.amp.GradScaler(enable=enable, init_loss_scaling=scale)
