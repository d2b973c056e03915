"""Checks every byte of a committed checkpoint against what was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..core.box import whole
from ..core.boxes import Boxes
from ..core.progress import Progress
from ..core.threads import io_threads
from ..errors import CheckpointCorruptedError
from ..files.datafile import read_header
from ..files.metadata import Metadata
from ..files.reader import Consumer, StoredEntry, read_entries
from ..files.runs import OpenFile
from ..planning.cover import covers_exactly
from ..reports import VerifyReport
from ..storage.base import Storage
from .checkpoint import read_checkpoint

__all__ = ["problems_of", "verify_checkpoint"]


def verify_checkpoint(storage: Storage, unique_id: int | None, progress: bool | None) -> VerifyReport:
    """See :func:`paddle_dist_ckpt.verify`."""
    metadata = read_checkpoint(storage, unique_id)
    problems = problems_of(storage, metadata, progress)
    return VerifyReport(
        path=storage.location,
        unique_id=metadata.unique_id,
        ok=not problems,
        problems=tuple(problems),
        files=len(metadata.files),
        total_bytes=sum(info.size for info in metadata.files),
    )


def problems_of(storage: Storage, metadata: Metadata, progress: bool | None) -> list[str]:
    """What is wrong with the files of a checkpoint, in words."""
    problems = _uncovered(metadata)
    with Progress("verify", sum(info.size for info in metadata.files), progress, True) as bar:
        for file in range(len(metadata.files)):
            problems += _check_file(storage, metadata, file, bar)
    return problems


def _uncovered(metadata: Metadata) -> list[str]:
    """Tensors whose shards do not make them up exactly."""
    table = metadata.table
    dimensions = max([1, *(len(layout.shape) for layout in table.layouts)])
    boxes = table.shard_boxes(dimensions)
    tensors = Boxes.of([whole(layout.shape) for layout in table.layouts], dimensions).take(table.layout_of)
    exact = covers_exactly(table.shard_tensor[boxes.filled], boxes.take(boxes.filled), tensors)
    return [f"{metadata.key(table.paths[t])}: its shards do not cover it exactly once" for t in np.flatnonzero(~exact)]


def _check_file(storage: Storage, metadata: Metadata, file: int, progress: Progress) -> list[str]:
    """Read all of one data file; returns what is wrong with it."""
    info, table = metadata.files[file], metadata.table
    first_block, counts = table.blocks(metadata.block_bytes, len(metadata.files))
    try:
        opened = storage.open(info.name)
    except OSError as error:
        return [f"{info.name}: {error}"]
    try:
        hashes, data_start = read_header(opened, info, int(counts[file]))
        known = OpenFile(info.name, opened, data_start, hashes)
        entries = []
        for shard in np.flatnonzero(table.shard_file == file).tolist():
            tensor, box = table.shard_place(shard)
            key = metadata.key(table.paths[tensor])
            start, block = int(table.data_offsets[shard]), int(first_block[shard])
            entries.append(StoredEntry(known, start, block, box.shape, table.dtypes[tensor], key))
        if not _check_entries(entries, metadata.block_bytes, progress):
            return []
        # Something is wrong: look at each entry by itself, to name every one that is damaged.
        return [found for entry in entries for found in _check_entries([entry], metadata.block_bytes, lambda _: None)]
    except (OSError, CheckpointCorruptedError) as error:
        return [str(error)]
    finally:
        opened.close()


def _check_entries(entries: Sequence[StoredEntry], block_bytes: int, progress: Callable[[int], None]) -> list[str]:
    """What is wrong with these entries; the first problem if there are several."""
    wanted = (
        (entry, [Consumer(whole(entry.shape), np.empty(0, entry.dtype.raw), lambda items, place: None)])
        for entry in entries
    )
    try:
        read_entries(wanted, block_bytes, io_threads(1, waits=True), lambda: None, progress)
    except (OSError, CheckpointCorruptedError) as error:
        return [str(error)]
    return []
