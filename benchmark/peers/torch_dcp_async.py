"""torch.distributed.checkpoint's ``async_save`` as it comes: staged in fresh memory, saved by a thread."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmark.peers import Pending, torch_dcp
from benchmark.peers.torch_dcp import build, load, local_arrays, save, versions, zero
from benchmark.peers.torch_training import copier, trainer

__all__ = [
    "build",
    "copier",
    "load",
    "local_arrays",
    "save",
    "save_group",
    "setup",
    "start_save",
    "trainer",
    "versions",
    "zero",
]


def setup(rank: int, world_size: int) -> None:
    """See :class:`benchmark.peers.Peer`."""
    torch_dcp.setup(rank, world_size)
    save_group()


@cache
def save_group() -> dist.ProcessGroup:
    """A group for saves alone: the thread's messages must not mix with the training's."""
    return dist.new_group(backend="gloo")


def start_save(state: dict[str, Any], path: Path) -> Pending:
    """See :class:`benchmark.peers.AsyncPeer`."""
    return dcp.async_save(state, checkpoint_id=path, process_group=save_group())
