"""How this rank's targets and a checkpoint fit together: what does not, and which part of which shard goes where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..core.box import Box
from ..core.codec import table_from_record
from ..core.metadata import FileInfo
from ..core.paths import plain_key
from ..core.shards import IntArray, Kind, ShardTable, unpack_column
from ..planning.load_plan import ReadItems, WantedBoxes, plan_load
from .messages import LoadAnswer, ShardNeed
from .reader import Consumer, OpenFile, StoredEntry
from .targets import Target, Targets, Wishes, check_value_rows

__all__ = ["Fit"]

_MANY = 2**62


class Fit:
    """A load's plan on one rank.

    Its items are the overlaps of targets with stored shards, numbered from 0.

    Args:
        answer: What the checkpoint has of this rank's wishes.
        wishes: The wishes.
        cast: Whether dtypes are converted.

    Attributes:
        targets: What is filled, and the problems.
        files: What `.metadata` says of each data file, with its number of blocks, by name.

    Raises:
        CheckpointCorruptedError: the answer contradicts itself.
    """

    def __init__(self, answer: LoadAnswer, wishes: Wishes, cast: bool) -> None:
        self._answer = answer
        self._table: ShardTable = table_from_record(answer.tensors, len(answer.files))
        check_value_rows(self._table)
        shards = len(self._table.shard_file)
        self._starts = unpack_column(answer.starts, shards, _MANY, "starts").tolist()
        self._blocks = unpack_column(answer.blocks, shards, _MANY, "blocks").tolist()
        counts = unpack_column(answer.block_counts, len(answer.files), _MANY, "block_counts").tolist()
        self.files: dict[str, tuple[FileInfo, int]] = {
            info.name: (info, count) for info, count in zip(answer.files, counts, strict=True)
        }
        self.targets = Targets(problems=list(wishes.problems))
        self._add_targets(wishes, cast)
        self.targets.stage_shared()
        self._plan()

    def _add_targets(self, wishes: Wishes, cast: bool) -> None:
        present = {"none": "None", "dict": "a dict", "other": "a value"}
        for path, found in self._answer.odd.items():
            has = "a tensor" if path in wishes.views else present[wishes.values[path]]
            self.targets.problems.append(
                f"{plain_key(path)}: the state_dict has {has}, in the checkpoint it is {found}"
            )
        for path, view in wishes.views.items():
            if path in self._table.index:
                self.targets.add_tensor(path, view, self._table, cast)
        for path, kind in zip(self._table.paths, self._table.kinds.tolist(), strict=True):
            if kind == Kind.VALUE:
                self.targets.add_value(path, self._table)

    def _plan(self) -> None:
        rows = self.targets.rows
        dimensions = max([1, *(len(target.offset) for target in rows), *(len(x.shape) for x in self._table.layouts)])
        wanted = WantedBoxes(
            np.array([target.tensor for target in rows], np.int64),
            _padded([target.offset for target in rows], dimensions, 0),
            _padded([target.shape for target in rows], dimensions, 1),
        )
        items = self._without_uncovered(plan_load(self._table, wanted))
        low, extents = self._table.box_columns(dimensions)
        self._extents = extents.tolist()
        self._wanted, self._shard = items.wanted.tolist(), items.shard.tolist()
        self._shape = items.shape.tolist()
        self._in_target = (items.offset - wanted.offset[items.wanted]).tolist()
        self._in_entry = (items.offset - low[items.shard]).tolist()
        self._tensor, self._file = self._table.shard_tensor.tolist(), self._table.shard_file.tolist()

    def _without_uncovered(self, items: ReadItems) -> ReadItems:
        for i in items.uncovered.tolist():
            target = self.targets.rows[i]
            box = Box(target.offset, target.shape)
            self.targets.problems.append(
                f"{plain_key(target.path)}: the checkpoint does not hold the region {box} exactly once"
            )
        if not len(items.uncovered):
            return items
        unread = [self.targets.rows[i] for i in items.uncovered.tolist()]
        self.targets.shared = [shared.without(unread) for shared in self.targets.shared]
        keep = ~np.isin(items.wanted, items.uncovered)
        return ReadItems(items.wanted[keep], items.shard[keep], items.offset[keep], items.shape[keep], items.uncovered)

    def items(self, staged: bool) -> list[int]:
        """The items whose targets are looked at before they are used, or all the others."""
        rows = self.targets.rows
        return [item for item, row in enumerate(self._wanted) if rows[row].staged == staged]

    def nbytes(self, items: Sequence[int]) -> int:
        """Bytes of these items."""
        dtypes, tensor, shard = self._table.dtypes, self._tensor, self._shard
        return sum(Box((), tuple(self._shape[i])).size * dtypes[tensor[shard[i]]].itemsize for i in items)

    def needed_files(self) -> list[str]:
        """Names of the files that hold some item."""
        return sorted({self._answer.files[i].name for i in {self._file[shard] for shard in self._shard}})

    def _boxes(self, item: int) -> tuple[Target, Box, Box]:
        """An item's target, and its box as counted from the target's corner and from the shard's."""
        target = self.targets.rows[self._wanted[item]]
        ndim = len(target.offset)
        shape = tuple(self._shape[item][:ndim])
        return target, Box(tuple(self._in_target[item][:ndim]), shape), Box(tuple(self._in_entry[item][:ndim]), shape)

    def entries(self, items: Sequence[int], opened: Mapping[str, OpenFile]) -> list[tuple[StoredEntry, list[Consumer]]]:
        """The shards of these items, each with who consumes it."""
        found: dict[int, tuple[StoredEntry, list[Consumer]]] = {}
        for item in items:
            target, box, entry_box = self._boxes(item)
            shard = self._shard[item]
            if shard not in found:
                found[shard] = (self._entry(shard, opened), [])
            found[shard][1].append(target.consumer(box, entry_box))
        return list(found.values())

    def _entry(self, shard: int, opened: Mapping[str, OpenFile]) -> StoredEntry:
        tensor = self._tensor[shard]
        path, ndim = self._table.paths[tensor], len(self._table.layouts[self._table.layout_of[tensor]].shape)
        return StoredEntry(
            file=opened[self._answer.files[self._file[shard]].name],
            start=self._starts[shard],
            first_block=self._blocks[shard],
            shape=tuple(self._extents[shard][:ndim]),
            dtype=self._table.dtypes[tensor],
            key=self._answer.keys.get(path) or plain_key(path),
        )

    def shard_needs(self) -> list[ShardNeed]:
        """What other ranks may read for this one."""
        first: IntArray = self._table.first_shard
        needs = []
        for item, shard in enumerate(self._shard):
            target, _, entry_box = self._boxes(item)
            corners = (entry_box.offset, entry_box.shape)
            needs.append(ShardNeed(target.path, shard - int(first[target.tensor]), item, corners, target.staged))
        return needs

    def consumer(self, item: int, entry_part: Box) -> Consumer:
        """The consumer of a part of an item; the part is counted from the shard's corner."""
        target, box, entry_box = self._boxes(item)
        shift = entry_part.relative_to(entry_box.offset).offset
        part = Box(tuple(a + b for a, b in zip(shift, box.offset, strict=True)), entry_part.shape)
        return target.consumer(part, entry_part)


def _padded(rows: Sequence[tuple[int, ...]], dimensions: int, fill: int) -> IntArray:
    pad = [(fill,) * n for n in range(dimensions + 1)]
    return np.array([row + pad[dimensions - len(row)] for row in rows], np.int64).reshape(-1, dimensions)
