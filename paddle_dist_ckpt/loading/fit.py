"""How this rank's targets and a checkpoint fit together: what does not, and which part of which shard goes where."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from ..core.box import Box, flat_range
from ..core.boxes import Boxes
from ..core.columns import IntArray, unpack_column
from ..core.grouping import group_rows
from ..core.shards import ShardTable
from ..core.tensors import TensorAdapter
from ..files.batch import Batch, ItemKind
from ..files.codec import table_from_record
from ..files.metadata import FileInfo
from ..files.reader import Consumer, StoredEntry
from ..files.runs import OpenFile, Segments
from ..planning.load_plan import Overlaps, WantedBoxes, plan_load
from ..tree.paths import plain_key
from .messages import LoadAnswer, ShardNeed
from .own_values import OwnValues
from .targets import Targets, check_value_rows
from .wanted import WantedState

__all__ = ["Fit"]

_MANY = 2**62


class Fit:
    """A load's plan on one rank.

    Its items are the overlaps of targets with stored shards, numbered from 0.

    Args:
        answer: What the checkpoint has of this rank's wanted.
        wanted: What this rank wants.
        cast: Whether dtypes are converted.
        own: Which values it takes of those that every rank has its own of.
        adapter: Makes the memory of devices accessible.

    Attributes:
        targets: What is filled.
        problems: What does not fit, a line each.
        skipped: What is left as it is although the load does not fail, a line each.
        files: What `.metadata` says of each data file, with its number of blocks, by name.

    Raises:
        CheckpointCorruptedError: the answer contradicts itself.
    """

    def __init__(
        self, answer: LoadAnswer, wanted: WantedState, cast: bool, own: OwnValues, adapter: TensorAdapter
    ) -> None:
        self._answer = answer
        self._table: ShardTable = table_from_record(answer.tensors, len(answer.files))
        check_value_rows(self._table)
        shards = len(self._table.shard_file)
        self._starts = unpack_column(answer.starts, shards, _MANY, "starts")
        self._blocks = unpack_column(answer.blocks, shards, _MANY, "blocks")
        counts = unpack_column(answer.block_counts, len(answer.files), _MANY, "block_counts").tolist()
        self.files: dict[str, tuple[FileInfo, int]] = {
            info.name: (info, count) for info, count in zip(answer.files, counts, strict=True)
        }
        self.problems = wanted.problems + own.problems
        self._add_unfit(wanted)
        self.skipped = [f"{plain_key(path)}: {reason}" for path, reason in answer.skipped.items()]
        elsewhere = {**answer.stored, **dict.fromkeys((*answer.unfit, *answer.skipped))}
        self.targets = Targets(wanted, self._table, cast, elsewhere, own.others, adapter)
        self.problems += self.targets.problems
        self._plan()

    def _add_unfit(self, wanted: WantedState) -> None:
        present = {
            "none": "None",
            "dict": "a dict",
            "own": "a PerRank",
            "object": "an object",
            "other": "a value",
            "optional": "a value",
        }
        tensors = set(wanted.tensors.paths) if self._answer.unfit else set()
        for path, found in self._answer.unfit.items():
            has = (
                "a tensor"
                if path in tensors
                else present.get(wanted.values.get(path, ""), "no such entry in its object")
            )
            self.problems.append(f"{plain_key(path)}: the state_dict has {has}, in the checkpoint it is {found}")

    def _plan(self) -> None:
        targets = self.targets
        boxes = [piece.box for _, piece in targets.cells]
        dimensions = max([1, *(len(box.shape) for box in boxes), *(len(x.shape) for x in self._table.layouts)])
        wanted = WantedBoxes(targets.tensor, Boxes.of(boxes, dimensions).take(targets.cell))
        plan = plan_load(self._table, wanted)
        kept = self._covered(plan)
        self._target, self._shard, self._like = plan.wanted[kept], plan.shard[kept], plan.like[kept]
        self._shape, self._entry_shape = plan.boxes.shape, plan.stored.shape
        self._in_entry = plan.boxes.offset - plan.stored.offset
        # Items that are alike have wanted boxes that are alike; any of them will do.
        owner = np.zeros(len(plan.boxes), np.int64)
        owner[plan.like] = plan.wanted
        self._in_target = plan.boxes.offset - wanted.boxes.offset[owner]

    def _covered(self, plan: Overlaps) -> IntArray:
        """The items of the targets that can be filled; the others become problems."""
        for row in plan.uncovered.tolist():
            self.problems.append(
                f"{plain_key(self.targets.path(row))}: the checkpoint does not hold the region "
                f"{self.targets.box(row)} exactly once"
            )
        if not len(plan.uncovered):
            return np.arange(len(plan.wanted))
        self.targets.without_shared(plan.uncovered)
        return np.flatnonzero(~np.isin(plan.wanted, plan.uncovered))

    def needs(self, staged: bool) -> IntArray:
        """The items whose targets are looked at before they are used, or all the others."""
        return np.flatnonzero(self.targets.staged[self._target] == staged)

    @cached_property
    def _itemsize(self) -> IntArray:
        """The stored item size of each item's tensor."""
        return self._table.itemsizes[self._table.shard_tensor[self._shard]]

    def device_groups(self, most: int) -> list[IntArray]:
        """The targets on a device that are read and not staged, in groups of at most ``most`` bytes each (or one)."""
        return self.targets.device_groups(np.unique(self._target), most)

    def needs_of(self, rows: IntArray) -> IntArray:
        """The items of some targets."""
        order, first = self._by_row
        spans = zip(first[rows].tolist(), first[rows + 1].tolist(), strict=True)
        return np.sort(np.concatenate([np.zeros(0, np.int64), *(order[start:stop] for start, stop in spans)]))

    @cached_property
    def _by_row(self) -> tuple[IntArray, IntArray]:
        """The items by target, and where those of each target begin, and behind the last the end."""
        order = np.argsort(self._target, kind="stable")
        return order, np.searchsorted(self._target[order], np.arange(len(self.targets) + 1))

    def rows_on_device(self, items: Sequence[int]) -> IntArray:
        """The targets of some items, as far as they are on a device and not staged."""
        rows = np.unique(self._target[np.array(items, np.int64)])
        return rows[self.targets.on_device[rows] & ~self.targets.staged[rows]]

    def nbytes(self, items: IntArray) -> int:
        """Bytes of these items."""
        return int((np.prod(self._shape, axis=1, dtype=np.int64)[self._like[items]] * self._itemsize[items]).sum())

    def file_bytes(self) -> dict[str, int]:
        """How many bytes this rank would read of each file that holds some item.

        An estimate: all of an entry for an item that is not contiguous in it.
        """
        shapes = zip(self._in_entry.tolist(), self._shape.tolist(), self._entry_shape.tolist(), strict=True)
        contiguous = [flat_range(Box(tuple(offset), tuple(n)), entry) is not None for offset, n, entry in shapes]
        columns = np.prod(self._shape, axis=1, dtype=np.int64), np.prod(self._entry_shape, axis=1, dtype=np.int64)
        elements = np.where(np.array(contiguous, bool), *columns)
        file = self._table.shard_file[self._shard]
        nbytes = np.zeros(len(self._answer.files), np.int64)
        np.add.at(nbytes, file, elements[self._like] * self._itemsize)
        return {self._answer.files[i].name: int(nbytes[i]) for i in np.unique(file).tolist()}

    def split(self, items: IntArray) -> tuple[IntArray, IntArray]:
        """The items that can be read in batches, and the others: those of large entries, or with a cast."""
        entry_bytes = self._entry_elements[self._like[items]] * self._itemsize[items]
        stored = self._table.dtype_of[self._table.shard_tensor[self._shard[items]]]
        wanted = self._cell_dtypes
        alike = stored == wanted[self.targets.cell[self._target[items]]] if len(items) else np.zeros(0, bool)
        small = (entry_bytes <= self._answer.block_bytes) & alike
        return items[small], items[~small]

    @cached_property
    def _entry_elements(self) -> IntArray:
        """Elements of the shards that items which are alike are from."""
        elements: IntArray = np.prod(self._entry_shape, axis=1, dtype=np.int64)
        return elements

    @cached_property
    def _cell_dtypes(self) -> IntArray:
        """Which of the table's element types each of the targets' cells has, -1 for one that is not there."""
        number = {dtype.name: i for i, dtype in enumerate(self._table.dtype_list)}
        return np.array([number.get(geometry.dtype.name, -1) for geometry, _ in self.targets.cells], np.int64)

    def batches(self, items: IntArray, opened: Mapping[str, OpenFile]) -> list[Batch]:
        """These items file by file, in the order in which they stand there. Items that are alike share a kind."""
        file, start = self._table.shard_file[self._shard[items]], self._starts[self._shard[items]]
        items = items[np.lexsort((start, file))]
        kinds, kind = self._kinds(items)
        shard, addresses = self._shard[items], self.targets.addresses_of(self._target[items])
        file, starts, blocks = self._table.shard_file[shard], self._starts[shard], self._blocks[shard]
        stops = starts + np.array([one.entry_bytes for one in kinds], np.int64)[kind]
        cuts = (np.flatnonzero(file[1:] != file[:-1]) + 1).tolist()
        batches = []
        for a, b in itertools.pairwise([0, *cuts, len(items)] if len(items) else []):
            name = functools.partial(self._key_of, shard[a:b])
            source = opened[self._answer.files[file[a]].name]
            entries = Segments(source, starts[a:b], stops[a:b], blocks[a:b], name)
            batches.append(Batch(entries, kind[a:b], addresses[a:b], kinds))
        return batches

    def _kinds(self, items: IntArray) -> tuple[list[ItemKind], IntArray]:
        """The different kinds of items, and which kind each is."""
        row = self._target[items]
        columns = np.column_stack([self.targets.cell[row], self.targets.staged[row], self._like[items]])
        first, kind = group_rows(columns)
        kinds = []
        for i in items[first].tolist():
            target, box, entry_box = self._boxes(i)
            geometry, piece = self.targets.cells[self.targets.cell[target]]
            entry_shape = tuple(self._entry_shape[self._like[i]][: len(box.shape)].tolist())
            strides = self.targets.strides(target)
            kinds.append(ItemKind(geometry.dtype, entry_shape, entry_box, piece.box.shape, box, strides))
        return kinds, kind

    def _boxes(self, item: int) -> tuple[int, Box, Box]:
        """An item's target, and its box as counted from the target's corner and from the shard's."""
        row = int(self._target[item])
        ndim = len(self.targets.box(row).shape)
        columns = self._shape, self._in_target, self._in_entry
        shape, in_target, in_entry = (tuple(column[self._like[item]][:ndim].tolist()) for column in columns)
        return row, Box(in_target, shape), Box(in_entry, shape)

    def entries(self, items: IntArray, opened: Mapping[str, OpenFile]) -> list[tuple[StoredEntry, list[Consumer]]]:
        """The shards of these items, each with who consumes it."""
        found: dict[int, tuple[StoredEntry, list[Consumer]]] = {}
        for item in items.tolist():
            row, box, entry_box = self._boxes(item)
            shard = int(self._shard[item])
            if shard not in found:
                found[shard] = (self._entry(item, opened), [])
            found[shard][1].append(self.targets.consumer(row, box, entry_box))
        return list(found.values())

    def _entry(self, item: int, opened: Mapping[str, OpenFile]) -> StoredEntry:
        shard = int(self._shard[item])
        tensor = int(self._table.shard_tensor[shard])
        ndim = len(self._table.layouts[self._table.layout_of[tensor]].shape)
        return StoredEntry(
            file=opened[self._answer.files[self._table.shard_file[shard]].name],
            start=int(self._starts[shard]),
            first_block=int(self._blocks[shard]),
            shape=tuple(self._entry_shape[self._like[item]][:ndim].tolist()),
            dtype=self._table.dtypes[tensor],
            key=self._key(shard),
        )

    def _key_of(self, shards: IntArray, i: int) -> str:
        return self._key(int(shards[i]))

    def _key(self, shard: int) -> str:
        path = self._table.paths[int(self._table.shard_tensor[shard])]
        return self._answer.keys.get(path) or plain_key(path)

    def shard_needs(self) -> list[ShardNeed]:
        """What other ranks may read for this one."""
        first = self._table.first_shard
        needs = []
        for item, shard in enumerate(self._shard.tolist()):
            row, _, entry_box = self._boxes(item)
            corners = (entry_box.offset, entry_box.shape)
            number = shard - int(first[self.targets.tensor[row]])
            needs.append(
                ShardNeed(self.targets.stored_path(row), number, item, corners, bool(self.targets.staged[row]))
            )
        return needs

    def consumer(self, item: int, entry_part: Box) -> Consumer:
        """The consumer of a part of an item; the part is counted from the shard's corner."""
        row, box, entry_box = self._boxes(item)
        shift = entry_part.relative_to(entry_box.offset).offset
        part = Box(tuple(a + b for a, b in zip(shift, box.offset, strict=True)), entry_part.shape)
        return self.targets.consumer(row, part, entry_part)
