"""torch.distributed.checkpoint's ``async_save`` by another process, through shared memory that is kept."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

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
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
    )


def start_save(state: dict[str, Any], path: Path) -> Pending:
    """See :class:`benchmark.peers.AsyncPeer`."""
    return dcp.async_save(
        state,
        checkpoint_id=path,
        process_group=save_group(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        async_stager=_stager(),
    )
