"""Reads boxes of a checkpoint's tensors in one process, without a framework."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.box import Box, whole
from ..core.boxes import Boxes
from ..core.buffers import Buffers
from ..core.cached import cached_property
from ..core.columns import IntArray, Mask, places_within
from ..core.memory import address_of
from ..core.threads import run_all
from ..errors import CheckpointCorruptedError
from ..files.batches import Batch, ItemKind, Kinds
from ..files.holes import HoleBudget
from ..files.metadata import Metadata
from ..files.reader import Consumer, StoredEntry, are_holes, clear, entry_tasks, view_at
from ..files.runs import CHUNK_BYTES, OpenFile, Segments, check_open_files, open_data_file
from ..planning.load_plan import Overlaps, WantedBoxes, plan_load
from ..storage.base import Storage
from .checkpoint import check_sizes

__all__ = ["BoxReader"]

Array = npt.NDArray[Any]
_Wanted = dict[int, tuple[StoredEntry, list[Consumer]]]
_TOGETHER = 1 << 13  # overlaps for which there are objects at a time
_PLANNED = 1 << 18  # overlaps for which there is a plan at a time, about


class _Plan(NamedTuple):
    """Which overlaps fill some of the boxes, those from row ``first`` on.

    Attributes:
        first: The row.
        overlaps: The overlaps.
        edges: Where those of each box begin, and where the last end.
    """

    first: int
    overlaps: Overlaps
    edges: IntArray


class BoxReader:
    """Some boxes of a checkpoint's tensors: planned, then read in any order, by one thread or several.

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

    def __init__(
        self, storage: Storage, metadata: Metadata, tensors: Sequence[int] | IntArray, boxes: Sequence[Box]
    ) -> None:
        self._storage, self._metadata = storage, metadata
        table = metadata.table
        self._boxes = list(boxes)
        dimensions = max([1, *(len(layout.shape) for layout in table.layouts)])
        self._wanted = WantedBoxes(np.array(tensors, np.int64), Boxes.of(self._boxes, dimensions))
        self._row_tensor = self._wanted.tensor
        most = table.layout_counts[table.layout_of[self._row_tensor]].cumsum() // max(
            _PLANNED, 8 * len(table.shard_file)
        )
        self._groups = [0, *(np.flatnonzero(np.diff(most)) + 1).tolist(), len(self._boxes)]
        self._plans: dict[int, _Plan] = {}
        self._planning = threading.Lock()
        shards = [np.unique(self._planned(row).overlaps.shard) for row in self._groups[:-1]]
        self._shards = np.unique(np.concatenate(shards)).astype(np.int64)
        self._files = np.unique(table.shard_file[self._shards]).tolist()
        check_sizes(storage, metadata, self._files)
        self._starts = table.data_offsets
        self._first_blocks, self._block_counts = metadata.blocks
        self._are_known_holes, self._looked_at = np.zeros(len(self._shards), bool), set[int]()
        self._opened: dict[int, OpenFile] = {}
        self._budget = HoleBudget()
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
        size = self._metadata.block_bytes
        for large, batches in self._parts(rows, targets):
            buffers = Buffers(threads)
            tasks = itertools.chain(
                entry_tasks(large.values(), size, buffers, progress),
                *(batch.tasks(buffers, progress) for batch in batches),
            )
            run_all(tasks, threads, check)

    def _planned(self, row: int) -> _Plan:
        """The plan for a box, and for others beside it: a few plans are kept, and made again when that is needed."""
        group = bisect.bisect_right(self._groups, row) - 1
        with self._planning:
            found = self._plans.get(group)
            if found is None:
                while len(self._plans) > 1:
                    del self._plans[next(iter(self._plans))]
                found = self._plans[group] = self._plan(range(*self._groups[group : group + 2]))
        return found

    def _plan(self, rows: range) -> _Plan:
        some = slice(rows.start, rows.stop)
        wanted = WantedBoxes(self._row_tensor[some], self._wanted.boxes.take(some))
        plan = plan_load(self._metadata.table, wanted)
        for row in (rows.start + plan.uncovered[:1]).tolist():
            key, box = self._metadata.key(self._metadata.table.paths[self._row_tensor[row]]), self._boxes[row]
            raise CheckpointCorruptedError(f"{key}: the checkpoint does not hold the region {box} exactly once")
        return _Plan(rows.start, plan, np.searchsorted(plan.wanted, np.arange(len(rows) + 1)))

    @cached_property
    def may_have_holes(self) -> bool:
        """Whether a file of the boxes has parts without bytes on the disk; opens them all to find out."""
        files = np.unique(self._metadata.table.shard_file[self._shards]).tolist()
        return not all(self._file(number).holes.none for number in files)

    def _is_stored(self, plan: _Plan, overlaps: IntArray) -> Mask:
        """Which of some overlaps are not in shards that are known to be zeros nowhere on the disk, ``[n]``.

        Each file is looked at when it is needed. In one that cannot be opened none is known: who reads it will hear.
        """
        shard = plan.overlaps.shard[overlaps]
        for file in np.unique(self._metadata.table.shard_file[shard]).tolist():
            if file not in self._looked_at:
                with suppress(CheckpointCorruptedError, OSError):
                    self._look_for_holes(file)
        return ~self._are_known_holes[np.searchsorted(self._shards, shard)]

    def _look_for_holes(self, file: int) -> None:
        """Find out, by a look or two, which of the boxes' shards in a file are holes."""
        if not self._file(file).holes.none:
            mine = np.flatnonzero(self._metadata.table.shard_file[self._shards] == file)
            nbytes = self._metadata.table.shard_bytes[self._shards[mine]].astype(np.int64)
            for some, segments in self._segments(self._shards[mine], np.zeros_like(nbytes), nbytes):
                for part in segments.zeros():
                    self._are_known_holes[mine[some[part]]] = True
        self._looked_at.add(file)

    def is_hole(self, row: int) -> bool:
        """Whether one of the boxes is known to be zeros without being read."""
        plan = self._planned(row)
        overlaps = np.arange(*plan.edges[row - plan.first : row - plan.first + 2])
        overlaps = overlaps[self._is_stored(plan, overlaps)]
        starts = range(0, len(overlaps), _TOGETHER)
        return all(self._are_holes(row, plan.overlaps, overlaps[start : start + _TOGETHER]) for start in starts)

    def _are_holes(self, row: int, plan: Overlaps, overlaps: IntArray) -> bool:
        """The same of a box in some of its overlaps. There are objects only for those in pieces in large shards."""
        table, size, ndim = self._metadata.table, self._metadata.block_bytes, len(self._boxes[row].shape)
        tensor = int(self._row_tensor[row])
        common, stored, _ = plan.alike.take(plan.like[overlaps])
        common = Boxes(common.offset - stored.offset, common.shape)
        shard, first = plan.shard[overlaps].astype(np.int64), common.flat_starts(stored.shape)
        nbytes, itemsize = table.shard_bytes[shard].astype(np.int64), table.dtypes[tensor].itemsize
        is_small = nbytes <= size
        low = np.where(is_small, 0, first * itemsize // size * size)
        high = np.where(is_small, nbytes, -(-(first + common.volumes) * itemsize // size) * size)
        in_row = np.flatnonzero(is_small | (first >= 0))
        segments = self._segments(*_cut(shard[in_row], low[in_row], np.minimum(high, nbytes)[in_row], size))
        if not all(each.are_zeros() for _, each in segments):
            return False
        nothing = np.zeros((), table.dtypes[tensor].raw)
        for i in np.flatnonzero(~is_small & (first < 0)).tolist():
            box = common.box(i, ndim)
            entry = self._entry(int(shard[i]), tensor, stored.box(i, ndim))
            if not are_holes([(entry, [Consumer(box, np.broadcast_to(nothing, box.shape))])], size):
                return False
        return True

    def _segments(self, shard: IntArray, low: IntArray, high: IntArray) -> Iterator[tuple[IntArray, Segments]]:
        """Bytes ``low:high`` of some shards, whole blocks, file by file; and the place in ``shard`` of each segment."""
        table, size = self._metadata.table, self._metadata.block_bytes
        start, file = self._starts[shard].astype(np.int64), table.shard_file[shard]
        order = np.lexsort((start + low, file))
        begin, end, file = (start + low)[order], (start + high)[order], file[order]
        blocks = (self._first_blocks[shard].astype(np.int64) + low // size)[order]
        edges = [0, *(np.flatnonzero(file[1:] != file[:-1]) + 1).tolist(), len(file)]
        for a, b in itertools.pairwise(edges):
            if a < b:
                opened = self._file(int(file[a]))
                yield order[a:b], Segments(opened, size, begin[a:b], end[a:b], blocks[a:b], str)

    def _parts(self, rows: Sequence[int], targets: Sequence[Array]) -> Iterator[tuple[_Wanted, list[Batch]]]:
        """What has to be read to fill arrays with some of the boxes, in portions that take bounded memory.

        Small entries, of one block at most, come in batches if their part is in one piece in a contiguous target; all
        others come as objects.
        """
        addresses = [address_of(target) if target.flags.c_contiguous else -1 for target in targets]
        asked, address = np.array(rows, np.int64), np.array(addresses, np.int64)
        group = np.searchsorted(self._groups, asked, side="right")
        for number in np.unique(group).tolist():
            mine = np.flatnonzero(group == number)
            plan = self._planned(int(asked[mine[0]]))
            first, last = plan.edges[asked[mine] - plan.first], plan.edges[asked[mine] - plan.first + 1]
            overlaps, place = places_within(last - first, first), mine.repeat(last - first)  # the target of each
            is_stored = self._is_stored(plan, overlaps)
            for i in np.unique(place[~is_stored]).tolist():
                clear(targets[i])
            overlaps, place = overlaps[is_stored], place[is_stored]
            for start in range(0, len(overlaps), _TOGETHER):
                some = overlaps[start : start + _TOGETHER], place[start : start + _TOGETHER]
                yield self._chunk(plan.overlaps, *some, asked, targets, address)

    def _chunk(
        self,
        plan: Overlaps,
        overlaps: IntArray,
        place: IntArray,
        rows: IntArray,
        targets: Sequence[Array],
        address: IntArray,
    ) -> tuple[_Wanted, list[Batch]]:
        """See :meth:`_parts`; ``place`` says which of ``rows``, ``targets`` and ``address`` each overlap is of."""
        table = self._metadata.table
        common, stored, box = plan.alike.take(plan.like[overlaps])
        shard, tensor = plan.shard[overlaps].astype(np.int64), self._row_tensor[rows[place]]
        source = Boxes(common.offset - stored.offset, common.shape).flat_starts(stored.shape)
        target = Boxes(common.offset - box.offset, common.shape).flat_starts(box.shape)
        is_small = table.shard_bytes[shard] <= self._metadata.block_bytes
        is_small &= (source >= 0) & (target >= 0) & (address[place] >= 0)
        at = np.flatnonzero(is_small)
        shard_of, tensor_of = shard[at], tensor[at]
        goes_to = address[place[at]] + target[at] * table.itemsizes[tensor_of]
        batches = self._batches(shard_of, tensor_of, source[at], goes_to, common.volumes[at])
        large: _Wanted = {}
        for i in np.flatnonzero(~is_small).tolist():
            row, into, number = int(rows[place[i]]), targets[int(place[i])], int(shard[i])
            ndim = len(self._boxes[row].shape)
            part, whole_shard = common.box(i, ndim), stored.box(i, ndim)
            if number not in large:
                large[number] = (self._entry(number, int(tensor[i]), whole_shard), [])
            wanted = view_at(into, part.relative_to(self._boxes[row].offset).slices)
            large[number][1].append(Consumer(part.relative_to(whole_shard.offset), wanted))
        return large, batches

    def _batches(
        self, shard: IntArray, tensor: IntArray, source: IntArray, addresses: IntArray, sizes: IntArray
    ) -> list[Batch]:
        """Elements in a row of small shards, file by file.

        Args:
            shard: The shard of each row of elements, ``[n]``.
            tensor: Its tensor.
            source: The first of the elements in the shard.
            addresses: Where that goes.
            sizes: How many elements there are.
        """
        table = self._metadata.table
        starts, file = self._starts[shard].astype(np.int64), table.shard_file[shard]
        order = np.lexsort((starts, file))
        shard, tensor, starts, file, source = (c[order] for c in (shard, tensor, starts, file, source))
        addresses, sizes, nbytes = addresses[order], sizes[order], table.shard_bytes[shard].astype(np.int64)
        pair = table.dtype_of[tensor]
        items = nbytes // table.itemsizes[tensor]  # of the shard

        def one(number: int) -> ItemKind:
            dtype, size = table.dtypes[int(tensor[number])], int(sizes[number])
            part = Box((int(source[number]),), (size,))
            return ItemKind(dtype, dtype, (int(items[number]),), part, (size,), whole((size,)), None)

        kinds = Kinds.of_columns(
            one, [(d, d) for d in table.dtype_list], pair, source, np.zeros_like(source), sizes, nbytes
        )

        def batch(first: int, last: int) -> Batch:
            def key(i: int) -> str:
                return self._metadata.key(table.paths[int(tensor[first + i])])

            some = slice(first, last)
            blocks = self._first_blocks[shard[some]].astype(np.int64)
            opened, size = self._file(int(file[first])), self._metadata.block_bytes
            begin, kind = starts[some], np.arange(first, last)
            return Batch(opened, size, begin, begin + nbytes[some], blocks, key, kind, addresses[some], kinds, key)

        edges = [0, *(np.flatnonzero(file[1:] != file[:-1]) + 1).tolist(), len(file)]
        return [batch(first, last) for first, last in itertools.pairwise(edges) if first < last]

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
                try:
                    opened = open_data_file(self._storage, self._metadata.files[number], blocks, self._budget)
                except OSError as error:
                    check_open_files(error, len(self._files))
                    raise
                self._closing.callback(opened.file.close)
                self._opened[number] = opened
            return self._opened[number]


def _cut(shard: IntArray, low: IntArray, high: IntArray, block_bytes: int) -> tuple[IntArray, IntArray, IntArray]:
    """Bytes ``low:high`` of some shards, in pieces of whole blocks, each no larger than what is read at once."""
    step = max(1, CHUNK_BYTES // block_bytes) * block_bytes
    counts = -(-(high - low) // step)
    low = low.repeat(counts) + places_within(counts) * step
    return shard.repeat(counts), low, np.minimum(low + step, high.repeat(counts))
