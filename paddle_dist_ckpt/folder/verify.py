"""Checks every byte of a checkpoint against what was written, or in another format what can be checked there."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from contextlib import closing

import numpy as np

from ..core.box import whole
from ..core.boxes import Boxes
from ..core.columns import IntArray
from ..core.frames import with_room_for_frames
from ..core.layouts import Grid
from ..core.progress import Progress
from ..core.shards import Kind
from ..core.threads import io_threads
from ..errors import CheckpointCorruptedError, CheckpointError, CheckpointTimeoutError
from ..files.checks import check_entries
from ..files.holes import HoleBudget
from ..files.metadata import FileInfo, Metadata
from ..files.pieces import FileEntries
from ..files.runs import CHUNK_BYTES, open_data_file
from ..planning.cover import covers_exactly
from ..reports import VerifyReport
from ..storage.base import Storage
from ..tree.paths import plain_key
from ..tree.values import from_jsonable
from .checkpoint import Restarts, read_checkpoint
from .stored_values import read_values

__all__ = [
    "check_file",
    "check_values",
    "damaged_values",
    "problems_of",
    "uncovered",
    "verified_bytes",
    "verify_checkpoint",
]


@with_room_for_frames
def verify_checkpoint(storage: Storage, unique_id: int | None, progress: bool | None) -> VerifyReport:
    """See :func:`paddle_dist_ckpt.verify`."""
    restarts = Restarts(storage)
    while True:
        metadata = read_checkpoint(storage, unique_id)
        problems = problems_of(storage, metadata, progress)
        if not problems or not restarts.due(metadata):
            break
    return VerifyReport(
        path=storage.location,
        unique_id=metadata.unique_id,
        ok=not problems,
        problems=tuple(problems),
        files=len(metadata.files),
        total_bytes=sum(info.size for info in metadata.files),
        verified_bytes=verified_bytes(metadata),
    )


def problems_of(storage: Storage, metadata: Metadata, progress: bool | None) -> list[str]:
    """What is wrong with the files of a checkpoint, in words."""
    problems, budget = uncovered(metadata), HoleBudget()
    with Progress("verify", sum(info.size for info in metadata.files), progress, True) as bar:
        for file in range(len(metadata.files)):
            problems += check_file(storage, metadata, file, bar, budget)
    problems += check_values(storage, metadata)
    return list(dict.fromkeys(problems))  # what is wrong with a file is found again where a value is read of it


def verified_bytes(metadata: Metadata) -> int:
    """How many bytes of tensors are compared with a checksum."""
    if metadata.format == "native":
        return int(metadata.table.shard_bytes.sum())
    return sum(nbytes for _, _, nbytes, _ in metadata.checksums)


def _check_foreign(
    storage: Storage,
    info: FileInfo,
    checksums: list[tuple[int, int, int, int]],
    progress: Callable[[int], None],
    budget: HoleBudget,
) -> list[str]:
    """Check a file of another format: its size, and what that format has checksums of."""
    problems = list[str]()
    try:
        opened = open_data_file(storage, info, 0, budget)
    except (OSError, CheckpointCorruptedError) as error:
        return [str(error)]
    try:
        buffer = np.empty(CHUNK_BYTES, np.uint8)
        for _, position, nbytes, expected in checksums:
            found = 0
            for at in range(position, position + nbytes, len(buffer)):
                part = buffer[: min(len(buffer), position + nbytes - at)]
                opened.holes.read(at, len(part))
                opened.file.read_into([part], at, once=True)
                found = zlib.crc32(part.data, found)
                progress(len(part))
            if found != expected:
                problems.append(f"{info.name}: the CRC-32 of {nbytes} bytes at {position} does not match")
    except (OSError, EOFError, CheckpointCorruptedError) as error:
        problems.append(f"{info.name}: {error}")
    finally:
        opened.file.close()
    return problems


def uncovered(metadata: Metadata) -> list[str]:
    """Tensors whose shards do not make them up exactly, and those that are not there."""
    keys = (metadata.key(metadata.table.paths[t]) for t in _not_exact(metadata).tolist())
    lost = [f"{plain_key(path)}: {metadata.left_out[path]}" for path in metadata.lost]
    return [*(f"{key}: its shards do not cover it exactly once" for key in keys), *lost]


def _not_exact(metadata: Metadata) -> IntArray:
    """The places of these tensors in the table."""
    grids = np.array([isinstance(layout.parts, Grid) for layout in metadata.table.layouts], bool)
    others = np.flatnonzero(~grids[metadata.table.layout_of])  # a grid is exact
    table, _ = metadata.table.select(others.tolist())
    dimensions = max([1, *(len(layout.shape) for layout in table.layouts)])
    boxes = table.shard_boxes(dimensions)
    tensors = Boxes.of([whole(layout.shape) for layout in table.layouts], dimensions).take(table.layout_of)
    exact = covers_exactly(table.shard_tensor[boxes.filled], boxes.take(boxes.filled), tensors)
    return others[~exact]


def check_file(storage: Storage, metadata: Metadata, file: int, progress: Progress, budget: HoleBudget) -> list[str]:
    """Read all of one data file, or of one of another format what can be verified; returns what is wrong with it."""
    if metadata.format != "native":
        return _check_foreign(storage, metadata.files[file], metadata.file_checksums.get(file, []), progress, budget)
    try:
        known = open_data_file(storage, metadata.files[file], int(metadata.blocks[1][file]), budget)
    except (OSError, CheckpointCorruptedError) as error:
        return [str(error)]
    threads = io_threads(1, waits=True)
    with closing(known.file):
        parts = [check_entries(entries, threads, progress) for entries in FileEntries.of(metadata, file, known)]
    return list(itertools.chain.from_iterable(parts))


def damaged_values(metadata: Metadata, part: slice = slice(None)) -> list[str]:
    """What is wrong with values in `.metadata` itself, all or a part of them."""
    problems = []
    for path, tree in metadata.value_records[part]:
        try:
            from_jsonable(tree)
        except CheckpointCorruptedError as error:
            problems.append(f"{metadata.key(path)}: {error}")
    return problems


def check_values(storage: Storage, metadata: Metadata, part: slice = slice(None)) -> list[str]:
    """Decode values, all or a part of them, as a load does; returns what is wrong."""
    problems = damaged_values(metadata, part)
    stored = np.flatnonzero(metadata.table.kinds == Kind.VALUE)
    try:
        rows = stored[~np.isin(stored, _not_exact(metadata))].tolist()[part]
        found = read_values(storage, metadata, rows)
        problems += dict.fromkeys(str(value) for value in found if isinstance(value, CheckpointCorruptedError))
    except CheckpointTimeoutError:
        raise
    except (OSError, CheckpointError) as error:
        problems.append(str(error))
    return problems
