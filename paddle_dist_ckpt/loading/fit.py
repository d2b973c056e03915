"""How this rank's targets and a checkpoint fit together: what does not, and which part of which shard goes where."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from ..core.box import Box, flat_range
from ..core.boxes import Boxes
from ..core.columns import IntArray
from ..core.grouping import group_rows
from ..core.tensors import TensorAdapter
from ..files.reader import Batch, Consumer, ItemKind, StoredEntry
from ..files.runs import OpenFile
from ..planning.load_plan import Overlaps, WantedBoxes, plan_load
from ..tree.paths import plain_key
from .messages import LoadAnswer, ShardNeed
from .own_values import OwnValues
from .stored import StoredShards
from .targets import Targets
from .wanted import WantedState

__all__ = ["Fit"]


class Fit:
    """A load's plan on one rank.

    Its needs are the overlaps of targets with stored shards, numbered from 0. Its columns
    have a row for each need (``[needs]``), or for needs that are alike in all their boxes (``[kinds, dimensions]``).

    Args:
        answer: What the checkpoint has of what this rank wants.
        wanted: What this rank wants.
        cast: Whether dtypes are converted.
        own: Which values it takes of those that every rank has its own of.
        adapter: Makes the memory of devices accessible.

    Attributes:
        targets: What is filled.
        problems: What does not fit, a line each.
        skipped: What is left as it is although the load does not fail, a line each.
        stored: What is stored of it.

    Raises:
        CheckpointCorruptedError: the answer contradicts itself.
    """

    def __init__(
        self, answer: LoadAnswer, wanted: WantedState, cast: bool, own: OwnValues, adapter: TensorAdapter
    ) -> None:
        self.stored = StoredShards(answer)
        self._block_bytes = answer.block_bytes
        self._table = self.stored.table
        self.problems = wanted.problems + own.problems + _unfit(answer, wanted)
        self.skipped = [f"{plain_key(path)}: {reason}" for path, reason in answer.skipped.items()]
        elsewhere = {**answer.stored, **dict.fromkeys((*answer.unfit, *answer.skipped))}
        self.targets = Targets(wanted, self._table, cast, elsewhere, own.others, adapter)
        self.problems += self.targets.problems
        self._plan()

    def _plan(self) -> None:
        """Fill the columns: ``_target``, ``_shard`` and ``_like`` are ``[needs]``; the boxes' shape, where it starts in
        the shard and in the target, and the shard's shape, are ``[kinds, dimensions]``."""
        targets = self.targets
        boxes = [piece.box for _, piece in targets.cells]
        dimensions = max([1, *(len(box.shape) for box in boxes), *(len(x.shape) for x in self._table.layouts)])
        wanted = WantedBoxes(targets.tensor, Boxes.of(boxes, dimensions).take(targets.cell))
        plan = plan_load(self._table, wanted)
        kept = self._covered(plan)
        self._target, self._shard, self._like = plan.wanted[kept], plan.shard[kept], plan.like[kept]
        self._shape, self._entry_shape = plan.boxes.shape, plan.stored.shape
        self._in_entry = plan.boxes.offset - plan.stored.offset
        # Needs that are alike have wanted boxes that are alike; any of them will do.
        owner = np.zeros(len(plan.boxes), np.int64)
        owner[plan.like] = plan.wanted
        self._in_target = plan.boxes.offset - wanted.boxes.offset[owner]

    def _covered(self, plan: Overlaps) -> IntArray:
        """The needs of the targets that can be filled; the others become problems."""
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
        """The needs whose targets are looked at before they are used, or all the others."""
        return np.flatnonzero(self.targets.staged[self._target] == staged)

    @cached_property
    def _itemsize(self) -> IntArray:
        """The size of a stored element of each need's tensor, ``[needs]``."""
        return self._table.itemsizes[self._table.shard_tensor[self._shard]]

    def device_groups(self, most: int) -> list[IntArray]:
        """The targets on a device that are read and not staged, in groups of at most ``most`` bytes each (or one)."""
        rows = self.rows_on_device(np.arange(len(self._target)))
        groups: list[list[int]] = []
        room = 0
        for row, nbytes in zip(rows.tolist(), self.targets.sizes(rows).tolist(), strict=True):
            if not groups or nbytes > room:
                groups.append([])
                room = most
            groups[-1].append(row)
            room -= nbytes
        return [np.array(group, np.int64) for group in groups]

    def needs_of(self, rows: IntArray) -> IntArray:
        """The needs of some targets."""
        order, first = self._by_row
        spans = zip(first[rows].tolist(), first[rows + 1].tolist(), strict=True)
        return np.sort(np.concatenate([np.zeros(0, np.int64), *(order[start:stop] for start, stop in spans)]))

    @cached_property
    def _by_row(self) -> tuple[IntArray, IntArray]:
        """The needs by target, and where those of each target begin, and behind the last the end."""
        order = np.argsort(self._target, kind="stable")
        return order, np.searchsorted(self._target[order], np.arange(len(self.targets) + 1))

    def rows_on_device(self, needs: IntArray) -> IntArray:
        """The targets of some needs, as far as they are on a device and not staged."""
        rows = np.unique(self._target[needs])
        return rows[self.targets.on_device[rows] & ~self.targets.staged[rows]]

    def nbytes(self, needs: IntArray) -> int:
        """Bytes of these needs."""
        return int((self._elements[self._like[needs]] * self._itemsize[needs]).sum())

    def file_bytes(self) -> dict[str, int]:
        """How many bytes this rank would read of each file that holds some need.

        An estimate: all of an entry for a need that is not contiguous in it.
        """
        shapes = zip(self._in_entry.tolist(), self._shape.tolist(), self._entry_shape.tolist(), strict=True)
        contiguous = [flat_range(Box(tuple(offset), tuple(n)), entry) is not None for offset, n, entry in shapes]
        elements = np.where(np.array(contiguous, bool), self._elements, self._entry_elements)
        file = self._table.shard_file[self._shard]
        nbytes = np.zeros(int(file.max(initial=-1)) + 1, np.int64)
        np.add.at(nbytes, file, elements[self._like] * self._itemsize)
        return {self.stored.file_name(i): int(nbytes[i]) for i in np.unique(file).tolist()}

    def split(self, needs: IntArray) -> tuple[IntArray, IntArray]:
        """The needs that can be read in batches, and the others: those of large entries, or with a cast."""
        entry_bytes = self._entry_elements[self._like[needs]] * self._itemsize[needs]
        stored = self._table.dtype_of[self._table.shard_tensor[self._shard[needs]]]
        wanted = self._cell_dtypes
        alike = stored == wanted[self.targets.cell[self._target[needs]]] if len(needs) else np.zeros(0, bool)
        small = (entry_bytes <= self._block_bytes) & alike
        return needs[small], needs[~small]

    @cached_property
    def _elements(self) -> IntArray:
        """Elements of needs that are alike, ``[kinds]``."""
        elements: IntArray = np.prod(self._shape, axis=1, dtype=np.int64)
        return elements

    @cached_property
    def _entry_elements(self) -> IntArray:
        """Elements of the shards that needs which are alike are from, ``[kinds]``."""
        elements: IntArray = np.prod(self._entry_shape, axis=1, dtype=np.int64)
        return elements

    @cached_property
    def _cell_dtypes(self) -> IntArray:
        """Which of the table's element types each of the targets' cells has, -1 for one that is not there."""
        number = {dtype.name: i for i, dtype in enumerate(self._table.dtype_list)}
        return np.array([number.get(geometry.dtype.name, -1) for geometry, _ in self.targets.cells], np.int64)

    def batches(self, needs: IntArray, opened: Mapping[str, OpenFile]) -> list[Batch]:
        """These needs file by file, in the order in which they stand there. Needs that are alike share a kind."""
        file, start = self._table.shard_file[self._shard[needs]], self.stored.starts[self._shard[needs]]
        needs = needs[np.lexsort((start, file))]
        kinds, kind = self._kinds(needs)
        shard, addresses = self._shard[needs], self.targets.addresses_of(self._target[needs])
        file, starts, blocks = self._table.shard_file[shard], self.stored.starts[shard], self.stored.blocks[shard]
        stops = starts + np.array([one.entry_bytes for one in kinds], np.int64)[kind]
        cuts = (np.flatnonzero(file[1:] != file[:-1]) + 1).tolist()
        batches = []
        for a, b in itertools.pairwise([0, *cuts, len(needs)] if len(needs) else []):
            key = functools.partial(self._key, shard[a:b])
            source = opened[self.stored.file_name(file[a])]
            columns = starts[a:b], stops[a:b], blocks[a:b]
            batches.append(Batch(source, self._block_bytes, *columns, key, kind[a:b], addresses[a:b], kinds))
        return batches

    def _kinds(self, needs: IntArray) -> tuple[list[ItemKind], IntArray]:
        """The different kinds of needs, and which kind each is."""
        row = self._target[needs]
        columns = np.column_stack([self.targets.cell[row], self.targets.staged[row], self._like[needs]])
        first, kind = group_rows(columns)
        kinds = []
        for i in needs[first].tolist():
            target, box, entry_box = self._boxes(i)
            geometry, piece = self.targets.cells[self.targets.cell[target]]
            strides = self.targets.strides(target)
            kinds.append(ItemKind(geometry.dtype, self._shape_of_shard(i), entry_box, piece.box.shape, box, strides))
        return kinds, kind

    def _boxes(self, need: int) -> tuple[int, Box, Box]:
        """A need's target, and its box as counted from the target's corner and from the shard's."""
        row = int(self._target[need])
        ndim = len(self.targets.box(row).shape)
        columns = self._shape, self._in_target, self._in_entry
        shape, in_target, in_entry = (tuple(column[self._like[need]][:ndim].tolist()) for column in columns)
        return row, Box(in_target, shape), Box(in_entry, shape)

    def _shape_of_shard(self, need: int) -> tuple[int, ...]:
        ndim = len(self.targets.box(int(self._target[need])).shape)
        return tuple(self._entry_shape[self._like[need]][:ndim].tolist())

    def entries(self, needs: IntArray, opened: Mapping[str, OpenFile]) -> list[tuple[StoredEntry, list[Consumer]]]:
        """The shards of these needs, each with who consumes it."""
        found: dict[int, tuple[StoredEntry, list[Consumer]]] = {}
        for need in needs.tolist():
            row, box, entry_box = self._boxes(need)
            shard = int(self._shard[need])
            if shard not in found:
                found[shard] = (self.stored.entry(shard, self._shape_of_shard(need), opened), [])
            found[shard][1].append(self.targets.consumer(row, box, entry_box))
        return list(found.values())

    def _key(self, shards: IntArray, i: int) -> str:
        return self.stored.key(int(shards[i]))

    def shard_needs(self) -> list[ShardNeed]:
        """What other ranks may read for this one."""
        first = self._table.first_shard
        needs = []
        for need, shard in enumerate(self._shard.tolist()):
            row, _, entry_box = self._boxes(need)
            number = shard - int(first[self.targets.tensor[row]])
            needs.append(
                ShardNeed(self.targets.stored_path(row), number, need, entry_box, bool(self.targets.staged[row]))
            )
        return needs

    def consumer(self, need: int, entry_part: Box) -> Consumer:
        """The consumer of a part of a need; the part is counted from the shard's corner."""
        row, box, entry_box = self._boxes(need)
        shift = entry_part.relative_to(entry_box.offset).offset
        part = Box(tuple(a + b for a, b in zip(shift, box.offset, strict=True)), entry_part.shape)
        return self.targets.consumer(row, part, entry_part)


_PRESENT = {
    "none": "None",
    "dict": "a dict",
    "own": "a PerRank",
    "object": "an object",
    "other": "a value",
    "optional": "a value",
}


def _unfit(answer: LoadAnswer, wanted: WantedState) -> list[str]:
    """The problems with wanted paths at which something of another kind is stored, or nothing."""
    tensors = set(wanted.tensors.paths) if answer.unfit else set()
    problems = []
    for path, found in answer.unfit.items():
        present = _PRESENT.get(wanted.values.get(path, ""), "no such entry in its object")
        has = "a tensor" if path in tensors else present
        problems.append(f"{plain_key(path)}: the state_dict has {has}, in the checkpoint it is {found}")
    return problems
