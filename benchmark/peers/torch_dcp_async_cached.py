"""torch.distributed.checkpoint's ``async_save`` with a stager that keeps its memory for the next save."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmark.peers import Pending
from benchmark.peers.torch_dcp_async import (
    build,
    copier,
    load,
    local_arrays,
    save,
    save_group,
    setup,
    trainer,
    versions,
    zero,
)

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


@cache
def _stager() -> DefaultStager:
    """What it offers but for this is for GPUs, or for another process."""
    return DefaultStager(StagingOptions(False, False, False, False))


def start_save(state: dict[str, Any], path: Path) -> Pending:
    """See :class:`benchmark.peers.AsyncPeer`."""
    return dcp.async_save(state, checkpoint_id=path, process_group=save_group(), async_stager=_stager())
