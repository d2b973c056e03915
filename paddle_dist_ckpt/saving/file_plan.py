"""The data files of one rank: what goes in each, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..core.box import Box, flat_range
from ..core.columns import IntArray, unpack_column, unpack_signed
from ..core.protocols import ControlSession
from ..core.shards import LayoutCollection, ShardTable
from ..files.codec import VERSION, table_to_record
from ..files.contents import Source
from ..files.datafile import (
    FORMAT,
    DataFileInfo,
    EntryKind,
    FileTable,
    escaped_key,
    slice_suffix,
    split_in_parts,
)
from ..files.metadata import SaveInfo, save_members
from ..options import SaveOptions
from ..tree.paths import plain_key
from ..tree.values import to_jsonable
from .describe import LocalState
from .messages import RankPlan, Transfer

__all__ = ["FilePlan", "KnownPlan", "plan_files"]


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """One data file, in terms that hold for every save by the same plan.

    Attributes:
        number: Its number among this rank's files, of which there are ``count``.
        table: Its entries.
        tensors: JSON of the tensors and shards that are in it, as its header has them.
        rows: Which of the rank's shards each entry is from, ``[entries]``.
        cuts: For entries that are only a part of their shard, the box in global coordinates.
        values: Paths of the values that its header has.
        writers: The ranks that write files; in the coordinator's first file only.
    """

    number: int
    count: int
    table: FileTable
    tensors: msgspec.Raw
    rows: IntArray
    cuts: dict[int, Box]
    values: Sequence[str]
    writers: list[int] | None

    def sources(self, state: LocalState, reduced: Mapping[tuple[int, Box], Any]) -> list[Source]:
        """Where each entry's bytes are now; ``reduced`` has those of partial tensors, by shard and box."""
        sources: list[Source] = np.array(state.tensors.addresses, np.int64)[self.rows].tolist()
        cells = state.shards.cells
        special = np.array([s.strides is not None or g.reduction is not None or g.on_device for g, s in cells], bool)
        odd = set(np.flatnonzero(special[state.shards.cell[self.rows]]).tolist()) | set(self.cuts)
        for i in odd:
            row = int(self.rows[i])
            geometry, shard = state.shard(row)
            box = self.cuts.get(i, shard.box)
            if geometry.reduction is not None:
                sources[i] = reduced[row, box]
                continue
            elements = flat_range(box.relative_to(shard.box.offset), shard.box.shape)
            if shard.strides is None and elements is not None and not geometry.on_device:
                sources[i] = state.tensors.addresses[row] + elements[0] * geometry.dtype.itemsize
            else:
                sources[i] = state.part(row, box)
        return sources

    def boxes(self, state: LocalState) -> list[tuple[int, Box]]:
        """The shard and the global box of every entry of a partial tensor."""
        cells = state.shards.cells
        partial = np.array([geometry.reduction is not None for geometry, _ in cells], bool)
        found = np.flatnonzero(partial[state.shards.cell[self.rows]]).tolist() if len(cells) else []
        rows = [(i, int(self.rows[i])) for i in found]
        return [(row, self.cuts.get(i, state.shard(row)[1].box)) for i, row in rows]

    def info(
        self, state: LocalState, save: SaveInfo, session: ControlSession, version: str | None, options: SaveOptions
    ) -> DataFileInfo:
        """What the file's header says beside its entries: all from which a lost `.metadata` can be made again.

        Args:
            state: What this rank has.
            save: What is the same in all files, but for the version.
            session: Who saves.
            version: The framework's.
            options: How to save.
        """
        is_first_of_all = self.number == 0 and session.rank == session.coordinator
        user = options.user_metadata if is_first_of_all else None
        wanted = set(self.values)
        pairs = sorted((value.path, value.json) for value in state.values if value.path in wanted)
        tensors: Any = self.tensors  # msgspec writes it as it is
        return DataFileInfo(
            **(save_members(save) | {"paddle_version": version}),
            format=FORMAT,
            version=VERSION,
            rank=session.rank,
            part=self.number,
            parts=self.count,
            tensors=tensors,
            values=[(path, msgspec.Raw(json)) for path, json in pairs],
            writers=self.writers,
            user_metadata=to_jsonable(dict(user), "user_metadata") if user is not None else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class KnownPlan:
    """One rank's part of a plan, with all that can be used again while the plan stays the same.

    Attributes:
        plan_id: Names the plan; 0 for none.
        block_bytes: The block size for which it is right.
        total_bytes: All that the ranks write together.
        transfers: What the ranks send each other of partial tensors.
        files: This rank's.
    """

    plan_id: int = 0
    block_bytes: int = 0
    total_bytes: int = 0
    transfers: Sequence[Transfer] = ()
    files: Sequence[FilePlan] = ()


def plan_files(state: LocalState, plan: RankPlan, block_bytes: int, is_coordinator: bool) -> list[FilePlan]:
    """The files that one rank writes; none if it has nothing to write."""
    items = _Items.of(state, plan)
    tables = split_in_parts(items.entries(state, plan.keys, block_bytes))
    if not len(items.rows) and not is_coordinator and not plan.values:
        return []
    found, start = [], 0
    for number, table in enumerate(tables):
        stop = start + len(table.names)
        part = items.part(start, stop)
        found.append(
            FilePlan(
                number=number,
                count=len(tables),
                table=table,
                tensors=msgspec.Raw(msgspec.json.encode(table_to_record(part.table(state)))),
                rows=part.rows,
                cuts=part.cuts,
                values=plan.values if number == 0 else [],
                writers=plan.writers if number == 0 and is_coordinator else None,
            )
        )
        start = stop
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Items:
    """What a rank writes, in order: its shards, of some only a box.

    Attributes:
        rows: Which of the rank's shards each is from, ``[items]``.
        cuts: For those that are only a part of their shard, the box in global coordinates, by item.
        numbers: Which of ``boxes`` each is, ``[items]``. Equal numbers mean an equal geometry too.
        boxes: The different boxes, in global coordinates.
    """

    rows: IntArray
    cuts: dict[int, Box]
    numbers: IntArray
    boxes: list[Box]

    @classmethod
    def of(cls, state: LocalState, plan: RankPlan) -> _Items:
        """What a plan says of the shards of a state."""
        rows = unpack_column(plan.row, len(plan.row.data) // int(plan.row.dtype[-1]), 2**62, "row")
        corners = unpack_signed(plan.boxes, 2 * plan.dimensions).tolist()
        cut = unpack_column(plan.cut, len(corners), max(1, len(rows)), "cut").tolist()
        numbers = state.shards.cell[rows]
        boxes = [shard.box for _, shard in state.shards.cells]
        cuts: dict[int, Box] = {}
        known: dict[tuple[int, Box], int] = {}
        for i, corner in zip(cut, corners, strict=True):
            cell = int(numbers[i])
            ndim = len(boxes[cell].shape)
            box = Box(tuple(corner[:ndim]), tuple(corner[plan.dimensions : plan.dimensions + ndim]))
            cuts[i] = box
            numbers[i] = known.setdefault((cell, box), len(boxes))
            if numbers[i] == len(boxes):
                boxes.append(box)
        return cls(rows, cuts, numbers, boxes)

    def part(self, start: int, stop: int) -> _Items:
        """A run of them."""
        cuts = {i - start: box for i, box in self.cuts.items() if start <= i < stop}
        return _Items(self.rows[start:stop], cuts, self.numbers[start:stop], self.boxes)

    def entries(self, state: LocalState, keys: Mapping[str, str], block_bytes: int) -> FileTable:
        """The entries of the files."""
        tensors, owners = state.tensors, state.shards.tensor[self.rows].tolist()
        geometries = tensors.geometries
        used, first, kind = np.unique(self.numbers, return_index=True, return_inverse=True)
        alike = [geometries[tensors.geometry[owners[i]]] for i in first.tolist()]
        boxes = [self.boxes[number] for number in used.tolist()]
        kinds = [EntryKind(geometry.dtype, box.shape) for geometry, box in zip(alike, boxes, strict=True)]
        suffixes = [slice_suffix(box, geometry.shape) for geometry, box in zip(alike, boxes, strict=True)]
        kind = kind.reshape(-1).astype(np.int64)
        paths = [tensors.paths[owner] for owner in owners]
        names = [
            escaped_key(keys[path] if path in keys else plain_key(path)) + suffixes[k]
            for path, k in zip(paths, kind.tolist(), strict=True)
        ]
        return FileTable(names, kinds, kind, block_bytes)

    def table(self, state: LocalState) -> ShardTable:
        """The tensors of these items, with just the shards that are among them."""
        tensors = state.tensors
        of_tensor: dict[int, tuple[int, ...]] = {}
        for owner, number in zip(state.shards.tensor[self.rows].tolist(), self.numbers.tolist(), strict=True):
            of_tensor[owner] = (*of_tensor[owner], number) if owner in of_tensor else (number,)
        owners = sorted(of_tensor, key=tensors.paths.__getitem__)
        collection = LayoutCollection()
        known: dict[tuple[tuple[int, ...], int], int] = {}
        layout_of = []
        for owner in owners:
            key = of_tensor[owner], tensors.geometry[owner]
            if key not in known:
                boxes = tuple(sorted(self.boxes[number] for number in key[0]))
                known[key] = collection.add(tensors.geometries[key[1]].shape, boxes)
            layout_of.append(known[key])
        geometries = [tensors.geometries[tensors.geometry[owner]] for owner in owners]
        return ShardTable(
            [tensors.paths[owner] for owner in owners],
            [geometry.dtype for geometry in geometries],
            np.array([geometry.kind for geometry in geometries], np.int64),
            collection.layouts,
            np.array(layout_of, np.int64),
            np.zeros(len(self.rows), np.int64),
            [tensors.names[owner] for owner in owners],
        )
