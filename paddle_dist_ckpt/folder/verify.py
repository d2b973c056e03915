"""Checks every byte of a checkpoint against what was written, or in another format what can be checked there."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from ..core.box import whole
from ..core.boxes import Boxes
from ..core.progress import Progress
from ..core.threads import io_threads
from ..errors import CheckpointCorruptedError
from ..files.metadata import FileInfo, Metadata
from ..files.reader import Consumer, StoredEntry, read_entries
from ..files.runs import CHUNK_BYTES, open_data_file
from ..planning.cover import covers_exactly
from ..reports import VerifyReport
from ..storage.base import Storage
from .checkpoint import read_checkpoint

__all__ = ["check_file", "problems_of", "uncovered", "verified_bytes", "verify_checkpoint"]


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
        verified_bytes=verified_bytes(metadata),
    )


def problems_of(storage: Storage, metadata: Metadata, progress: bool | None) -> list[str]:
    """What is wrong with the files of a checkpoint, in words."""
    problems = uncovered(metadata)
    with Progress("verify", sum(info.size for info in metadata.files), progress, True) as bar:
        for file in range(len(metadata.files)):
            problems += check_file(storage, metadata, file, bar)
    return problems


def verified_bytes(metadata: Metadata) -> int:
    """How many bytes of tensors are compared with a checksum."""
    if metadata.format == "native":
        return int(metadata.table.shard_bytes.sum())
    return sum(nbytes for _, _, nbytes, _ in metadata.checksums)


def _check_foreign(
    storage: Storage, info: FileInfo, checksums: list[tuple[int, int, int, int]], progress: Callable[[int], None]
) -> list[str]:
    """Check a file of another format: its size, and what that format has checksums of."""
    problems = list[str]()
    try:
        opened = open_data_file(storage, info, 0)
    except (OSError, CheckpointCorruptedError) as error:
        return [str(error)]
    try:
        buffer = np.empty(CHUNK_BYTES, np.uint8)
        for _, position, nbytes, expected in checksums:
            found = 0
            for at in range(position, position + nbytes, len(buffer)):
                part = buffer[: min(len(buffer), position + nbytes - at)]
                opened.file.read_into([part], at, once=True)
                found = zlib.crc32(part.data, found)
                progress(len(part))
            if found != expected:
                problems.append(f"{info.name}: the CRC-32 of {nbytes} bytes at {position} does not match")
    except (OSError, EOFError) as error:
        problems.append(f"{info.name}: {error}")
    finally:
        opened.file.close()
    return problems


def uncovered(metadata: Metadata) -> list[str]:
    """Tensors whose shards do not make them up exactly."""
    table = metadata.table
    dimensions = max([1, *(len(layout.shape) for layout in table.layouts)])
    boxes = table.shard_boxes(dimensions)
    tensors = Boxes.of([whole(layout.shape) for layout in table.layouts], dimensions).take(table.layout_of)
    exact = covers_exactly(table.shard_tensor[boxes.filled], boxes.take(boxes.filled), tensors)
    return [f"{metadata.key(table.paths[t])}: its shards do not cover it exactly once" for t in np.flatnonzero(~exact)]


def check_file(storage: Storage, metadata: Metadata, file: int, progress: Progress) -> list[str]:
    """Read all of one data file, or of one of another format what can be verified; returns what is wrong with it."""
    if metadata.format != "native":
        return _check_foreign(storage, metadata.files[file], metadata.file_checksums.get(file, []), progress)
    info, table = metadata.files[file], metadata.table
    first_block, counts = table.blocks(metadata.block_bytes, len(metadata.files))
    try:
        known = open_data_file(storage, info, int(counts[file]))
    except (OSError, CheckpointCorruptedError) as error:
        return [str(error)]
    try:
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
        known.file.close()


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
