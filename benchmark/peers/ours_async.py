"""This library, saving in the background, with its default options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle_dist_ckpt
from benchmark.peers import Pending
from benchmark.peers.ours import build, load, local_arrays, save, setup, versions, zero
from benchmark.peers.paddle_training import trainer
from paddle_dist_ckpt.core.memory import address_of, copy_bytes, fresh_pages

__all__ = [
    "build",
    "copier",
    "load",
    "local_arrays",
    "save",
    "setup",
    "start_save",
    "trainer",
    "versions",
    "zero",
]


def start_save(state: dict[str, Any], path: Path) -> Pending:
    """See :class:`benchmark.peers.AsyncPeer`."""
    return paddle_dist_ckpt.save_state_dict(state, path, async_save=True)


def copier(state: dict[str, Any]) -> Callable[[], None]:
    """See :class:`benchmark.peers.AsyncPeer`."""
    tensors = [tensor._local_value() for tensor in state.values()]
    parts = [(tensor.data_ptr(), tensor.numel().item() * tensor.element_size()) for tensor in tensors]
    buffer = fresh_pages(sum(nbytes for _, nbytes in parts))

    def copy() -> None:
        target = address_of(buffer)
        for source, nbytes in parts:
            copy_bytes(target, source, nbytes)
            target += nbytes

    return copy
