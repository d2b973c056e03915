"""The data files of one rank: what goes in each, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..core.box import Box, flat_range
from ..core.columns import IntArray, column_size, unpack_column, unpack_signed
from ..core.layouts import shared_layouts
from ..core.protocols import ControlSession
from ..core.shards import ShardTable
from ..files.codec import VERSION
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
from ..files.tables import table_to_record
from ..options import SaveOptions
from ..tree.paths import plain_key
from ..tree.values import to_jsonable
from .describe import LocalState
from .messages import ItemList, RankPlan

__all__ = ["FilePlan", "Items", "plan_files"]


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """What a rank writes, or has copies of, in order: its shards, of some only a box.

    Attributes:
        rows: Which of the rank's shards each is from, ``[items]``.
        numbers: Which of ``boxes`` each is, ``[items]``. Equal numbers mean an equal geometry too.
        boxes: The different boxes, in global coordinates: first those of the rank's cells, then what is cut from them.
    """

    rows: IntArray
    numbers: IntArray
    boxes: list[Box]

    @classmethod
    def of(cls, state: LocalState, listed: ItemList) -> Items:
        """What a plan says of the shards of a state."""
        rows = unpack_column(listed.row, column_size(listed.row, "row"), 2**62, "row")
        corners = unpack_signed(listed.boxes, 2 * listed.dimensions).tolist()
        cut = unpack_column(listed.cut, len(corners), max(1, len(rows)), "cut").tolist()
        numbers = state.shards.cell[rows]
        boxes = [shard.box for _, shard in state.shards.cells]
        known: dict[tuple[int, Box], int] = {}
        for i, corner in zip(cut, corners, strict=True):
            cell = int(numbers[i])
            ndim = len(boxes[cell].shape)
            box = Box(tuple(corner[:ndim]), tuple(corner[listed.dimensions : listed.dimensions + ndim]))
            numbers[i] = known.setdefault((cell, box), len(boxes))
            if numbers[i] == len(boxes):
                boxes.append(box)
        return cls(rows, numbers, boxes)

    def sources(self, state: LocalState, reduced: Mapping[tuple[int, Box], Any]) -> list[Source]:
        """Where the bytes of each are now; ``reduced`` has those of partial tensors, by shard and box."""
        cells = state.shards.cells
        sources: list[Source] = np.array(state.tensors.addresses, np.int64)[self.rows].tolist()
        special = np.array([s.strides is not None or g.reduction is not None or g.on_device for g, s in cells], bool)
        plain_on_device = np.array([g.on_device and g.reduction is None for g, _ in cells], bool)
        cell, is_cut = state.shards.cell[self.rows], self.numbers >= len(cells)
        odd, on_device = special[cell] | is_cut, plain_on_device[cell] & ~is_cut
        for i, array in zip(np.flatnonzero(on_device).tolist(), state.device_arrays(self.rows[on_device]), strict=True):
            sources[i] = array
        for i in np.flatnonzero(odd & ~on_device).tolist():
            row, box = int(self.rows[i]), self.boxes[self.numbers[i]]
            geometry, shard = state.shard(row)
            if geometry.reduction is not None:
                sources[i] = reduced[row, box]
                continue
            elements = flat_range(box.relative_to(shard.box.offset), shard.box.shape)
            if shard.strides is None and elements is not None and not geometry.on_device:
                sources[i] = state.tensors.addresses[row] + elements[0] * geometry.dtype.itemsize
            else:
                sources[i] = state.part(row, box)
        return sources

    def entries(self, state: LocalState, keys: Mapping[str, str], block_bytes: int) -> FileTable:
        """The entries of the files."""
        tensors, owners = state.tensors, state.shards.tensor[self.rows].tolist()
        used, first, kind = np.unique(self.numbers, return_index=True, return_inverse=True)
        kind = kind.reshape(-1).astype(np.int64)
        kinds, suffixes = [], []
        for number, i in zip(used.tolist(), first.tolist(), strict=True):
            box, (geometry, _) = self.boxes[number], state.shard(self.rows[i])
            kinds.append(EntryKind(geometry.dtype, box.shape))
            suffixes.append(slice_suffix(box, geometry.shape))
        paths = [tensors.paths[owner] for owner in owners]
        names = [
            escaped_key(keys[path] if path in keys else plain_key(path)) + suffixes[k]
            for path, k in zip(paths, kind.tolist(), strict=True)
        ]
        return FileTable(names, kinds, kind, block_bytes)

    def table(self, state: LocalState) -> ShardTable:
        """The tensors of these items, with just the shards that are among them."""
        tensors = state.tensors
        found: dict[int, list[int]] = {}
        for owner, number in zip(state.shards.tensor[self.rows].tolist(), self.numbers.tolist(), strict=True):
            found.setdefault(owner, []).append(number)
        of_tensor = {owner: tuple(numbers) for owner, numbers in found.items()}
        owners = sorted(of_tensor, key=tensors.paths.__getitem__)
        geometries = [tensors.geometries[tensors.geometry[owner]] for owner in owners]
        # Of tensors with the same boxes, which there are many of, the boxes are compared once.
        known = {of_tensor[owner]: geometry.shape for owner, geometry in zip(owners, geometries, strict=True)}
        layouts, layout = shared_layouts((known[key], tuple(sorted(self.boxes[n] for n in key))) for key in known)
        layout_of = dict(zip(known, layout.tolist(), strict=True))
        return ShardTable(
            [tensors.paths[owner] for owner in owners],
            [geometry.dtype for geometry in geometries],
            np.array([geometry.kind for geometry in geometries], np.int64),
            layouts,
            np.array([layout_of[of_tensor[owner]] for owner in owners], np.int64),
            np.zeros(len(self.rows), np.int64),
            [tensors.names[owner] for owner in owners],
        )


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """One data file, in terms that hold for every save by the same plan.

    Attributes:
        number: Its number among this rank's files, of which there are ``count``.
        items: What is in it.
        table: Its entries, one for each item.
        tensors: JSON of the tensors and shards that are in it, as its header has them.
        values: Paths of the values that its header has.
        writers: The ranks that write files; in the coordinator's first file only.
    """

    number: int
    count: int
    items: Items
    table: FileTable
    tensors: msgspec.Raw
    values: Sequence[str]
    writers: list[int] | None

    def partial_boxes(self, state: LocalState) -> list[tuple[int, Box]]:
        """The shard and the global box of every entry of a partial tensor."""
        items = self.items
        partial = np.array([geometry.reduction is not None for geometry, _ in state.shards.cells], bool)
        found = np.flatnonzero(partial[state.shards.cell[items.rows]])
        return [(int(items.rows[i]), items.boxes[items.numbers[i]]) for i in found]

    def info(
        self, state: LocalState, save: SaveInfo, session: ControlSession, version: str | None, options: SaveOptions
    ) -> DataFileInfo:
        """What the file's header says beside its entries: all from which a lost `.metadata` can be made again.

        ``save`` is what is the same in all files, but for the framework's ``version``.
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


def plan_files(state: LocalState, plan: RankPlan, block_bytes: int) -> list[FilePlan]:
    """The files that one rank writes; none if it has nothing to write and is not the coordinator."""
    items = Items.of(state, plan.items)
    if not len(items.rows) and plan.writers is None and not plan.values:
        return []
    tables = split_in_parts(items.entries(state, plan.keys, block_bytes))
    found, start = [], 0
    for number, table in enumerate(tables):
        here = slice(start, start + len(table.names))
        start = here.stop
        part = Items(items.rows[here], items.numbers[here], items.boxes)
        found.append(
            FilePlan(
                number=number,
                count=len(tables),
                items=part,
                table=table,
                tensors=msgspec.Raw(msgspec.json.encode(table_to_record(part.table(state)))),
                values=plan.values if number == 0 else [],
                writers=plan.writers if number == 0 else None,
            )
        )
    return found
