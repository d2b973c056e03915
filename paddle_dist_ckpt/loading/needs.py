"""What a rank needs of a checkpoint: which part of which stored shard goes to which part of which target."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from ..core.box import Box, whole
from ..core.boxes import Boxes
from ..core.columns import IntArray, Mask, any_in_row, edges_of, narrow, pack_column, pieces_of, sums_by
from ..core.dtypes import DTYPES
from ..core.grouping import group_rows
from ..core.memory import Bytes1D
from ..files.batches import Batch, ItemKind, Kinds, hand_out
from ..files.reader import Consumer, StoredEntry
from ..files.runs import OpenFile
from ..planning.blocks import touched_blocks
from ..planning.load_plan import WantedBoxes, plan_load
from ..tree.paths import plain_key
from .exchange_orders import ShardNeeds
from .small_items import SmallItems, batches_of
from .stored import StoredShards
from .targets import Targets

__all__ = ["Needs"]

_TOGETHER = 1 << 14  # kinds that are looked at together
_MANY = 1 << 17  # needs from which on they are read some after others
_READ_TOGETHER = 1 << 14  # of which there is all that it takes to read them; threads work on several such parts
_CODES = {dtype: i for i, dtype in enumerate(DTYPES.values())}
_Boxes = tuple[int, Box, Box, tuple[int, ...]]
"""See :meth:`Needs._boxes`."""


class Needs:
    """The overlaps of a rank's targets with stored shards, numbered from 0.

    Columns have a row for each need (``[needs]``), or for needs that are alike in all their boxes (``[kinds]``).

    Args:
        stored: What is stored of it.
        targets: What is filled. Those that are not covered are left as they are.
        block_bytes: Bytes of a block of the checkpoint.

    Attributes:
        targets: The same targets.
        block_bytes: The same number.
        uncovered: The targets of which not everything is stored, or something repeatedly.
    """

    def __init__(self, stored: StoredShards, targets: Targets, block_bytes: int) -> None:
        self.targets, self.block_bytes = targets, block_bytes
        self._stored, self._table = stored, stored.table
        table = self._table
        boxes = [piece.box for _, piece in targets.cells]
        dimensions = max([1, *(len(box.shape) for box in boxes), *(len(x.shape) for x in table.layouts)])
        cells = Boxes.of(boxes, dimensions)
        self._cell_shape = cells.shape
        plan = plan_load(table, WantedBoxes(targets.tensor, cells.take(targets.cell)))
        self.uncovered: list[int] = plan.uncovered.tolist()
        targets.filled[plan.uncovered] = False
        targets.leave(set(map(targets.path, self.uncovered)))
        targets.stage_shared()
        kept = targets.filled[plan.wanted]
        self._target, self._shard, self._like = plan.wanted[kept], plan.shard[kept], plan.like[kept]
        self._alike = plan.alike  # makes the boxes, [kinds]
        self._latest_boxes: tuple[int, _Boxes] | None = None
        volumes = np.zeros((2, len(plan.alike)), np.int64)
        for piece in pieces_of(len(plan.alike), _TOGETHER):
            common, stored_boxes, _ = plan.alike.take(piece)
            volumes[:, piece] = common.volumes, stored_boxes.volumes
        itemsize = table.itemsizes[table.shard_tensor[self._shard]]
        self._nbytes, self._entry_bytes = (narrow(volume[self._like] * itemsize) for volume in volumes)

    def chosen(self, staged: bool) -> IntArray:
        """The needs whose targets are looked at before they are used, or all the others; of targets that are filled."""
        targets = self.targets
        return narrow(np.flatnonzero((targets.filled & (targets.staged == staged))[self._target]))

    def device_groups(self, needs: IntArray, most: int) -> tuple[IntArray, list[tuple[IntArray, IntArray]]]:
        """Divide some needs: those of targets on the host, or staged; and targets on a device in groups of at most
        ``most`` bytes each (or one), each group with its needs, in the order in which the files have them."""
        rows = self.rows_on_device(needs)
        if not len(rows):
            return needs, []
        needs = self._as_stored(needs)
        wanted, first = np.unique(self._target[needs], return_index=True)
        rows = rows[np.argsort(first[np.searchsorted(wanted, rows)])]
        starts: list[int] = []
        room = 0
        for i, nbytes in enumerate(self.targets.nbytes[rows].tolist()):
            if not starts or nbytes > room:
                starts.append(i)
                room = most
            room -= nbytes
        group = np.zeros(len(self.targets), np.int64)  # of each target, from 1; 0 for all others
        group[rows] = np.searchsorted(starts, np.arange(len(rows)), side="right")
        order = np.argsort(group[self._target[needs]], kind="stable")
        firsts = np.searchsorted(group[self._target[needs[order]]], np.arange(1, len(starts) + 1))
        on_host, *parts = np.split(needs[order], firsts)
        return on_host, list(zip(np.split(rows, starts)[1:], parts, strict=True))

    def rows_on_device(self, needs: IntArray) -> IntArray:
        """The targets of some needs, as far as they are on a device and not staged."""
        rows = np.unique(self._target[needs])
        return rows[self.targets.on_device[rows] & ~self.targets.staged[rows]]

    def wanted_key(self, need: int) -> str:
        """The flat key of what a need is for."""
        return plain_key(self.targets.path(int(self._target[need])))

    def nbytes(self, needs: IntArray) -> int:
        """Bytes of these needs."""
        return int(self._nbytes[needs].sum())

    def file_bytes(self) -> dict[str, int]:
        """How many bytes this rank would read of each file that holds some need.

        An estimate: all of an entry for a need that is not contiguous in it.
        """
        contiguous = np.zeros(len(self._alike), bool)
        for piece in pieces_of(len(self._alike), _TOGETHER):
            common, stored, _ = self._alike.take(piece)
            # A box is in one piece unless it is cut in some dimension and longer than 1 in one before that.
            inner_cut = np.logical_or.accumulate((common.shape != stored.shape)[:, :0:-1], axis=1)[:, ::-1]
            contiguous[piece] = ~any_in_row(inner_cut & (common.shape[:, :-1] != 1))
        file = self._table.shard_file[self._shard]
        sizes = np.where(contiguous[self._like], self._nbytes, self._entry_bytes)
        nbytes = sums_by(file, sizes, int(file.max(initial=-1)) + 1)
        return {self._stored.file_name(i): int(nbytes[i]) for i in np.unique(file).tolist()}

    def bytes_to_read(self, some: Collection[str]) -> tuple[dict[str, int], int]:
        """How many bytes the blocks have that hold what each of some wanted paths needs; and all paths together, which
        may share some of the blocks."""
        numbers = {path: i for i, path in enumerate(some)}
        number = np.array([numbers.get(self.targets.path(row), -1) for row in self._target.tolist()], np.int64)
        del numbers  # there may be very many
        theirs, every = np.flatnonzero(number >= 0), np.arange(len(number))
        in_all = int(self._bytes_to_read(every, np.zeros_like(every), 1)[0])
        return dict(zip(some, self._bytes_to_read(theirs, number[theirs], len(some)).tolist(), strict=True)), in_all

    def _bytes_to_read(self, needs: IntArray, group: IntArray, count: int) -> IntArray:
        """The same of each of so many groups of needs, given the group of each of these."""
        is_small = self._are_batched(needs)  # of those all are read, which are one block each
        once = group_rows(np.column_stack([group[is_small], self._shard[needs[is_small]]]))[0]
        found = sums_by(group[is_small][once], self._entry_bytes[needs[is_small][once]], count)
        needs_of: dict[tuple[int, int], list[int]] = {}
        for need, number in zip(needs[~is_small].tolist(), group[~is_small].tolist(), strict=True):
            needs_of.setdefault((number, int(self._shard[need])), []).append(need)
        known = dict[tuple[int, ...], int]()
        for (number, shard), together in needs_of.items():
            itemsize = int(self._table.itemsizes[self._table.shard_tensor[shard]])
            kind = (itemsize, *self._like[together].tolist())
            if kind not in known:
                known[kind] = self._touched_bytes(together, itemsize)
            found[number] += known[kind]
        return found

    def _touched_bytes(self, needs: Sequence[int], itemsize: int) -> int:
        """How many bytes the blocks of a shard have that hold some needs of it."""
        size, entry_bytes = self.block_bytes, int(self._entry_bytes[needs[0]])
        boxes = [self._boxes(need)[2] for need in needs]
        blocks = touched_blocks(self._boxes(needs[0])[3], itemsize, boxes, size)
        return sum(min(stop * size, entry_bytes) - start * size for start, stop in blocks)

    def _are_batched(self, needs: IntArray) -> Mask:
        """Which of some needs are read in batches: those of small entries, ``[n]``."""
        are: Mask = self._entry_bytes[needs] <= self.block_bytes
        return are

    def items(self, needs: IntArray) -> SmallItems:
        """Needs that are read in batches, with where they go. Needs that are alike share a kind."""
        kinds, kind = self._kinds(needs)
        shard, rows = self._shard[needs], self._target[needs]
        files, file = np.unique(self._table.shard_file[shard], return_inverse=True)
        return SmallItems(
            files=[self._stored.file_name(i) for i in files.tolist()],
            file=file.reshape(-1),
            starts=self._stored.starts[shard].astype(np.int64),
            blocks=self._stored.blocks[shard].astype(np.int64),
            addresses=self.targets.address[rows],
            kind=kind,
            kinds=kinds,
            key=lambda i: self._stored.key(int(shard[i])),
            name=lambda i: self.wanted_key(int(needs[i])),
        )

    def batches(self, needs: IntArray, opened: Mapping[str, OpenFile]) -> Iterator[Batch]:
        """Those of these needs that are read in batches, file by file, in the order in which they stand there."""
        small = narrow(needs[self._are_batched(needs)])
        together = max(1, len(small))
        if len(small) > _MANY:
            small, together = self._as_stored(small), _READ_TOGETHER
        for some in pieces_of(len(small), together):
            items = self.items(small[some])
            yield from batches_of([items], opened, self.block_bytes)

    def _as_stored(self, needs: IntArray) -> IntArray:
        """Needs in the order in which what they need stands in the files."""
        shard = self._shard[needs]
        starts, file = self._stored.starts[shard], self._table.shard_file[shard]
        if ((file[1:] > file[:-1]) | ((file[1:] == file[:-1]) & (starts[1:] >= starts[:-1]))).all():
            return needs
        return needs[np.lexsort((starts, file))]

    def unpack(self, needs: IntArray, data: Bytes1D) -> None:
        """Hand out what was sent for needs, the boxes one behind the other.

        Raises:
            CheckpointError: a finite value would become infinite.
        """
        kinds, kind = self._kinds(needs, packed=True)
        starts, addresses = edges_of(self._nbytes[needs])[:-1], self.targets.address[self._target[needs]]
        hand_out(kinds, kind, starts, addresses, data, lambda i: self.wanted_key(int(needs[i])))

    def _kinds(self, needs: IntArray, packed: bool = False) -> tuple[Kinds, IntArray]:
        """The different kinds of needs, and which kind each is; of ``packed`` ones the entries are what is needed."""
        row, stored = self._target[needs], self._table.shard_tensor[self._shard[needs]]
        columns = [self.targets.cell[row], self.targets.staged[row], self._like[needs], self._table.dtype_of[stored]]
        first, kind = group_rows(np.column_stack(columns))
        needs, row, stored = needs[first], row[first], stored[first]
        cell, like = self.targets.cell[row], self._like[needs]
        wanted = np.array([_CODES[geometry.dtype] for geometry, _ in self.targets.cells], np.int64)[cell]
        of_pair, pair = group_rows(np.column_stack([self._table.dtype_of[stored], wanted]))
        pairs = [
            (self._table.dtypes[t], self.targets.cells[c][0].dtype)
            for t, c in zip(stored[of_pair].tolist(), cell[of_pair].tolist(), strict=True)
        ]
        places = np.empty((len(needs), 4), np.int64)
        for some in pieces_of(len(needs), _TOGETHER):
            places[some] = self._places(like[some], cell[some], packed)
        places[~self.targets.are_in_one_piece(row), 1] = -1
        places[:, 3] *= np.array([stored.itemsize for stored, _ in pairs], np.int64)[pair]

        def one(number: int) -> ItemKind:
            need, tensor = int(needs[number]), int(stored[number])
            target, box, entry_box, entry_shape = self._boxes(need)
            geometry, piece = self.targets.cells[self.targets.cell[target]]
            dtypes, strides = (self._table.dtypes[tensor], geometry.dtype), self.targets.strides(target)
            if packed:
                entry_box, entry_shape = whole(box.shape), box.shape
            return ItemKind(*dtypes, entry_shape, entry_box, piece.box.shape, box, strides)

        return Kinds.of_columns(one, pairs, pair, *places.T), kind

    def _places(self, like: IntArray, cell: IntArray, packed: bool) -> IntArray:
        """Of needs that are alike: with which element of its entry and of its target each starts, -1 if it is not in
        one piece there; how many elements it has, and its entry, ``[n, 4]``."""
        common, stored, asked = self._alike.take(like)
        entry_shape = common.shape if packed else stored.shape
        needed = Boxes(np.zeros_like(common.offset) if packed else common.offset - stored.offset, common.shape)
        target = Boxes(common.offset - asked.offset, common.shape).flat_starts(self._cell_shape[cell])
        return np.column_stack(
            [needed.flat_starts(entry_shape), target, needed.volumes, Boxes(needed.offset, entry_shape).volumes]
        )

    def _boxes(self, need: int) -> _Boxes:
        """A need's target, its box as counted from the target's corner and from the shard's, the shard's shape.

        Of a large need one part is asked for after the other, so what was found last is kept: in one tuple, as several
        threads ask.
        """
        latest = self._latest_boxes
        if latest is None or latest[0] != need:
            row, like = int(self._target[need]), int(self._like[need])
            ndim = len(self.targets.box(row).shape)
            common, stored, asked = (boxes.box(0, ndim) for boxes in self._alike.take(slice(like, like + 1)))
            found = row, common.relative_to(asked.offset), common.relative_to(stored.offset), stored.shape
            latest = self._latest_boxes = need, found
        return latest[1]

    def entries(self, needs: IntArray, opened: Mapping[str, OpenFile]) -> list[tuple[StoredEntry, list[Consumer]]]:
        """The shards of the others of these needs, each with who consumes it."""
        found: dict[int, tuple[StoredEntry, list[Consumer]]] = {}
        for need in needs[~self._are_batched(needs)].tolist():
            row, box, entry_box, entry_shape = self._boxes(need)
            shard = int(self._shard[need])
            if shard not in found:
                found[shard] = (self._stored.entry(shard, entry_shape, opened), [])
            found[shard][1].append(self.targets.consumer(row, box, entry_box))
        return list(found.values())

    def shard_needs(self, staged: bool, start: int, most: int) -> tuple[ShardNeeds, int]:
        """What other ranks may read for this one.

        Args:
            staged: Whether it is for targets that are looked at before they are used, or for all others.
            start: The first shard whose turn it is, as the coordinator counts them.
            most: How many needs there should be at most; there are more if so many are of the first of these shards.

        Returns:
            The needs; and before which shard they end, 0 if there are no more.
        """
        needs = self.chosen(staged)
        shard = narrow(self._stored.everywhere(self._shard[needs]))
        chosen, end = shard >= start, 0
        if int(chosen.sum()) > most:
            end = max(int(np.partition(shard[chosen], most)[most]), int(shard[chosen].min()) + 1)
            chosen &= shard < end
            end = end if end <= int(shard.max()) else 0
        needs, shard = needs[chosen], shard[chosen]
        alike, like = np.unique(self._like[needs], return_inverse=True)
        boxes, box = self._boxes_in_shards(alike)
        found = ShardNeeds(
            row=pack_column(needs),
            shard=pack_column(shard),
            box=pack_column(box[like.reshape(-1)]),
            dimensions=self._alike.asked.dimensions,
            boxes=pack_column(boxes.reshape(-1)),
        )
        return found, end

    def _boxes_in_shards(self, alike: IntArray) -> tuple[IntArray, IntArray]:
        """The different boxes of needs that are alike, in their shards' coordinates, as offsets and lengths, ``[boxes,
        2 * d]``; and which of them each has, ``[kinds]``."""
        found, number, count = [np.zeros((0, 2 * self._alike.asked.dimensions), np.int64)], [], 0
        for common, stored, _ in (self._alike.take(alike[piece]) for piece in pieces_of(len(alike), _TOGETHER)):
            rows = np.hstack([common.offset - stored.offset, common.shape])
            first, group = group_rows(rows)
            found.append(rows[first])
            number.append(narrow(group + count))
            count += len(first)
        rows = np.concatenate(found)
        first, group = group_rows(rows)
        return rows[first], group[np.concatenate([np.zeros(0, np.int64), *number])]

    def consumer(self, need: int, entry_part: Box) -> Consumer:
        """The consumer of a part of a need; the part is counted from the shard's corner."""
        row, box, entry_box, _ = self._boxes(need)
        shift = entry_part.relative_to(entry_box.offset).offset
        part = Box(tuple(a + b for a, b in zip(shift, box.offset, strict=True)), entry_part.shape)
        return self.targets.consumer(row, part, entry_part)
