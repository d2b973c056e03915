"""Reads boxes of a checkpoint's tensors in one process, without a framework."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box, whole
from ..core.boxes import Boxes
from ..core.decoding import decoding
from ..core.memory import Bytes1D, zeros_of
from ..errors import CheckpointCorruptedError
from ..files.metadata import Metadata
from ..files.reader import Consumer, StoredEntry, are_holes, read_entries, view_at
from ..files.room import Room, bytes_on_disk
from ..files.runs import OpenFile, open_data_file
from ..planning.load_plan import WantedBoxes, plan_load
from ..storage.base import Storage
from ..tree.values import decode_value
from .checkpoint import check_sizes

__all__ = ["BoxReader", "read_json", "read_values"]

Array = npt.NDArray[Any]
_Wanted = dict[int, tuple[StoredEntry, list[Consumer]]]
_TOGETHER = 1 << 13  # overlaps for which there are objects at a time


class BoxReader:
    """Some boxes of a checkpoint's tensors: planned once, then read in any order, by one thread or several.

    A context manager, which closes the data files. They are opened when they are first needed. Every block that is read
    is verified.

    Args:
        storage: The folder.
        metadata: What the checkpoint holds.
        tensors: The place of each box's tensor in the metadata's table, ``[n]``.
        boxes: Where each lies in its tensor.

    Raises:
        CheckpointCorruptedError: a box is not stored, or not just once, or a file is not as large as it should be.
    """

    def __init__(self, storage: Storage, metadata: Metadata, tensors: Sequence[int], boxes: Sequence[Box]) -> None:
        self._storage, self._metadata = storage, metadata
        table = metadata.table
        self._tensors, self._boxes = list(tensors), list(boxes)
        dimensions = max([1, *(len(layout.shape) for layout in table.layouts)])
        wanted = WantedBoxes(np.array(self._tensors, np.int64), Boxes.of(self._boxes, dimensions))
        self._plan = plan_load(table, wanted)
        for row in self._plan.uncovered[:1].tolist():
            key, box = metadata.key(table.paths[self._tensors[row]]), self._boxes[row]
            raise CheckpointCorruptedError(f"{key}: the checkpoint does not hold the region {box} exactly once")
        check_sizes(storage, metadata, np.unique(table.shard_file[self._plan.shard]).tolist())
        self._first = np.searchsorted(self._plan.wanted, np.arange(len(self._boxes) + 1)).tolist()
        self._starts = table.data_offsets
        self._first_blocks, self._block_counts = table.blocks(metadata.block_bytes, len(metadata.files))
        self._opened: dict[int, OpenFile] = {}
        self._opening = threading.Lock()
        self._closing = ExitStack()

    def __enter__(self) -> BoxReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def read(
        self,
        rows: Sequence[int],
        targets: Sequence[Array],
        threads: int = 1,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Fill arrays with some of the boxes.

        Args:
            rows: Which of the boxes.
            targets: For each an array of its shape and of the raw items of its tensor (``DType.raw``), of any strides.
            threads: How many threads read.
            check: Called now and then; may raise to stop.
            progress: Told how many bytes were read, as they are.

        Raises:
            CheckpointCorruptedError: a file is missing or damaged, or a block is not what was written.
            OSError: reading failed.
        """
        wanted: _Wanted = {}
        for row, target in zip(rows, targets, strict=True):
            for some in self._overlaps(row):
                self._want(row, some, target, wanted)
                if len(wanted) >= _TOGETHER:
                    read_entries(wanted.values(), self._metadata.block_bytes, threads, check, progress)
                    wanted.clear()
        read_entries(wanted.values(), self._metadata.block_bytes, threads, check, progress)

    def is_hole(self, row: int) -> bool:
        """Whether one of the boxes is known to be zeros without being read."""
        raw = self._metadata.table.dtypes[self._tensors[row]].raw
        nothing = np.broadcast_to(np.zeros((), raw), self._boxes[row].shape)
        parts = (self._want(row, some, nothing, {}) for some in self._overlaps(row))
        return all(are_holes(wanted.values(), self._metadata.block_bytes) for wanted in parts)

    def _overlaps(self, row: int) -> Iterator[slice]:
        """The overlaps that make up one box, so many at a time that all that it takes to read them has room."""
        first, last = self._first[row : row + 2]
        return (slice(start, min(start + _TOGETHER, last)) for start in range(first, last, _TOGETHER))

    def _want(self, row: int, some: slice, target: Array, wanted: _Wanted) -> _Wanted:
        """Add to the wanted shards some of the parts that make up one box."""
        plan, box = self._plan, self._boxes[row]
        ndim = len(box.shape)
        commons, all_stored, _ = plan.alike.take(plan.like[some])
        for i, shard in enumerate(plan.shard[some].tolist()):
            common, stored = commons.box(i, ndim), all_stored.box(i, ndim)
            if shard not in wanted:
                wanted[shard] = (self._entry(shard, self._tensors[row], stored), [])
            place = common.relative_to(box.offset).slices
            wanted[shard][1].append(Consumer(common.relative_to(stored.offset), view_at(target, place)))
        return wanted

    def _entry(self, shard: int, tensor: int, stored: Box) -> StoredEntry:
        table = self._metadata.table
        return StoredEntry(
            file=self._file(int(table.shard_file[shard])),
            start=int(self._starts[shard]),
            first_block=int(self._first_blocks[shard]),
            shape=stored.shape,
            dtype=table.dtypes[tensor],
            key=self._metadata.key(table.paths[tensor]),
        )

    def _file(self, number: int) -> OpenFile:
        with self._opening:
            if number not in self._opened:
                blocks = int(self._block_counts[number])
                opened = open_data_file(self._storage, self._metadata.files[number], blocks)
                self._closing.callback(opened.file.close)
                self._opened[number] = opened
            return self._opened[number]


def read_values(storage: Storage, metadata: Metadata, rows: Sequence[int]) -> Iterator[Any]:
    """The values that are stored as the entries of these places in the table; in place of one that is damaged, or none,
    the CheckpointCorruptedError that says so.

    Raises:
        CheckpointCorruptedError: not all of them are stored, or a file is not there.
        OSError: reading failed.
    """
    table, room = metadata.table, Room(partial(bytes_on_disk, storage, metadata.save_id), metadata.cost)
    for row, data in zip(rows, read_json(storage, metadata, rows), strict=True):
        if isinstance(data, CheckpointCorruptedError):
            yield data
            continue
        try:
            with decoding(metadata.key(table.paths[row])):
                room.take(data.data)
                value = decode_value(data.data)
        except CheckpointCorruptedError as error:
            yield error
        else:
            yield value


def read_json(
    storage: Storage, metadata: Metadata, rows: Sequence[int]
) -> Iterator[Bytes1D | CheckpointCorruptedError]:
    """The same, as JSON."""
    if not rows:
        return
    table = metadata.table
    shapes = [table.layouts[table.layout_of[row]].shape for row in rows]
    with BoxReader(storage, metadata, rows, list(map(whole, shapes))) as reader:
        for place, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
            key, dtype = metadata.key(table.paths[row]), table.dtypes[row]
            data = zeros_of(shape, dtype.raw, key)
            try:
                if dtype.name != "uint8" or len(shape) != 1:
                    raise CheckpointCorruptedError(f"{key}: a stored value that is not a row of bytes")
                reader.read([place], [data])
            except CheckpointCorruptedError as error:
                yield error
            else:
                yield data
