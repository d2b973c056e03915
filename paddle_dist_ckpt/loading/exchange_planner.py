"""From what ranks need and reach to each rank's order for the exchange."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from ..core.box import flat_range
from ..core.boxes import Boxes
from ..core.cached import cached_property
from ..core.columns import IntArray, Mask, all_of, edges_of, narrow, pack_column, run_edges
from ..core.grouping import group_rows
from ..core.layouts import LayoutBoxes
from ..files.metadata import Metadata
from ..planning.exchange_packs import Pack, SmallNeeds
from ..planning.exchange_plan import ALL, ExchangeShard, Need, Unit, plan_exchange
from .exchange_orders import (
    ExchangeAnswer,
    ExchangeRound,
    KeptPacks,
    PackKind,
    ParcelOrder,
    SentPacks,
    ShardNeeds,
    ShardOrder,
    UnitOrder,
)
from .staging import own_round_bytes

__all__ = ["ExchangePlanner"]


class ExchangePlanner:
    """Plans a part of an exchange: of shards below ``end``, or of all.

    Ranks are positions inside, global ranks outside. ``reach`` are the positions of those that can read each file,
    ``loads`` is what each has to read so far, to which this adds.
    """

    def __init__(
        self,
        metadata: Metadata,
        first_block: IntArray,
        ranks: Sequence[int],
        reach: Mapping[int, Sequence[int]],
        needs: Sequence[ShardNeeds],
        staging_bytes: int,
        loads: list[int],
        end: int,
    ) -> None:
        self._metadata, self._ranks, self._own_bytes = metadata, ranks, own_round_bytes(staging_bytes)
        self._reach, self._loads, self._end = reach, loads, end
        self._needs = _AllNeeds.joined(metadata, needs, end)
        self._first_block = first_block

    def orders(self) -> dict[int, ExchangeAnswer]:
        """Each rank's order, by global rank."""
        columns = zip(self._ranks, self._rounds(), strict=True)
        return {rank: ExchangeAnswer(rounds=rounds, end=self._end) for rank, rounds in columns}

    def _rounds(self) -> list[list[ExchangeRound]]:
        """What each rank does in the rounds."""
        needs, block_bytes = self._needs, self._metadata.block_bytes
        is_small = self._metadata.table.shard_bytes[needs.shard] <= block_bytes
        shards, large = self._large(np.flatnonzero(~is_small))
        places = self._ordered(np.flatnonzero(is_small))
        small = needs.small(self._metadata, places)
        plan = plan_exchange(
            shards, large, self._reach, len(self._ranks), block_bytes, small, self._own_bytes, self._loads
        )
        rounds: list[list[ExchangeRound]] = [[] for _ in self._ranks]
        for one in plan:
            units = [unit for unit in one if isinstance(unit, Unit)]
            packs = self._packs([pack for pack in one if isinstance(pack, Pack)], places)
            sent, sizes = self._sent(packs)
            kept = self._kept(packs)
            senders = self._senders(units, shards, sizes)
            for place, (mine, orders) in enumerate(zip(rounds, self._told(units, shards), strict=True)):
                mine.append(ExchangeRound(orders, senders, sent.get(place), kept.get(place)))
        return rounds

    def _large(self, places: IntArray) -> tuple[dict[int, ExchangeShard], dict[int, list[Need]]]:
        """Needs of large shards as objects, and the shards, by number."""
        table, needs = self._metadata.table, self._needs
        different = np.unique(needs.shard[places])
        files = table.shard_file[different].tolist()
        shards = {
            shard: ExchangeShard(file, shape, table.dtypes[tensor].itemsize)
            for shard, file, (tensor, shape) in zip(different.tolist(), files, self._shapes(different), strict=True)
        }
        large: dict[int, list[Need]] = {}
        for need in places.tolist():
            shard = int(needs.shard[need])
            box = needs.boxes.box(int(needs.box[need]), len(shards[shard].shape))
            large.setdefault(shard, []).append(Need(int(needs.rank[need]), int(needs.row[need]), box))
        return shards, large

    def _ordered(self, places: IntArray) -> IntArray:
        """Needs of small shards in the order of :class:`SmallNeeds`."""
        needs, table = self._needs, self._metadata.table
        shard = needs.shard[places]
        of_need = needs.row[places], needs.box[places], needs.rank[places]
        order = np.lexsort((*of_need, shard, table.data_offsets[shard], table.shard_file[shard]))
        return places[order]

    def _senders(
        self,
        units: Sequence[Unit],
        shards: Mapping[int, ExchangeShard],
        sizes: dict[tuple[int, int], int],
    ) -> list[tuple[int, int]]:
        """The readers that send to single ranks in a round, each with the size of its largest message; ``sizes`` are
        those of packs, by reader and destination."""
        for unit in units:
            for parcel in () if unit.to_all else unit.parcels:
                if parcel.destination != unit.reader:
                    pair = unit.reader, parcel.destination
                    sizes[pair] = sizes.get(pair, 0) + parcel.box.size * shards[unit.shard].itemsize
        largest: dict[int, int] = {}
        for (reader, _), size in sizes.items():
            source = self._ranks[reader]
            largest[source] = max(largest.get(source, 0), size)
        return sorted(largest.items())

    def _packs(self, packs: Sequence[Pack], places: IntArray) -> _Packs:
        """The needs that the packs of a round meet, and for whom they are."""
        counts = [len(pack.needs) for pack in packs]
        need = places[np.concatenate([np.zeros(0, np.int64), *(pack.needs for pack in packs)])]
        reader = np.repeat(np.array([pack.reader for pack in packs], np.int64), counts)
        to_all = np.repeat(np.array([pack.to_all for pack in packs], bool), counts)
        rank = self._needs.rank[need].astype(np.int64)
        others = np.where(rank == reader, len(self._ranks), rank)
        # What is for all is sent as the first of the others needs it.
        first = np.minimum.reduceat(others, edges_of(np.array(counts, np.int64))[:-1]) if packs else others
        return _Packs(need, rank, reader, to_all & (rank != reader), np.repeat(first, counts) == rank)

    def _kept(self, packs: _Packs) -> dict[int, KeptPacks]:
        """What ranks are told of needs of their own, by position."""
        needs, told = self._needs, dict[int, KeptPacks]()
        order = np.lexsort((packs.for_all, packs.reader, packs.rank))
        need, rank, reader, for_all = (column[order] for column in packs[:4])
        for start, stop in itertools.pairwise(run_edges(rank).tolist()):
            place, mine = int(rank[start]), slice(start, stop)
            edges = run_edges(reader[mine], for_all[mine])
            firsts = start + edges[:-1]
            told[place] = KeptPacks(
                readers=[self._ranks[i] for i in reader[firsts].tolist()],
                for_all=for_all[firsts].tolist(),
                counts=pack_column(np.diff(edges)),
                rows=pack_column(needs.row[need[mine]]),
                files=self._files(needs.shard[need[mine][reader[mine] == place]])[0],
            )
        return told

    def _sent(self, packs: _Packs) -> tuple[dict[int, SentPacks], dict[tuple[int, int], int]]:
        """What readers are told of others' needs, by position; and how many bytes go from each to each other rank."""
        needs, table = self._needs, self._metadata.table
        chosen = np.flatnonzero((packs.rank != packs.reader) & (~packs.for_all | packs.is_first))
        destination = np.where(packs.for_all, ALL, packs.rank)[chosen]
        reader = packs.reader[chosen]
        order = np.lexsort((destination, reader))
        need, reader, destination = packs.need[chosen][order], reader[order], destination[order]
        shard, nbytes = needs.shard[need], edges_of(needs.nbytes[need])
        tensor = table.shard_tensor[shard]
        first, kind = group_rows(np.column_stack([self._shape_of(shard), table.dtype_of[tensor], needs.box[need]]))
        kinds = [
            PackKind(shape, table.dtypes[t].name, needs.boxes.box(box, len(shape)))
            for box, (t, shape) in zip(needs.box[need[first]].tolist(), self._shapes(shard[first]), strict=True)
        ]
        told, sizes = dict[int, SentPacks](), dict[tuple[int, int], int]()
        for start, stop in itertools.pairwise(run_edges(reader).tolist()):
            place, mine = int(reader[start]), slice(start, stop)
            edges = run_edges(destination[mine])
            to = destination[start + edges[:-1]].tolist()
            moved = np.diff(nbytes[start + edges]).tolist()
            sizes.update(((place, r), n) for r, n in zip(to, moved, strict=True) if r != ALL)
            files, file = self._files(shard[mine])
            keyed, key = np.unique(tensor[mine], return_inverse=True)
            used, kind_of = np.unique(kind[mine], return_inverse=True)
            told[place] = SentPacks(
                destinations=[r if r == ALL else self._ranks[r] for r in to],
                counts=pack_column(np.diff(edges)),
                files=files,
                file=pack_column(file),
                start=pack_column(table.data_offsets[shard[mine]]),
                block=pack_column(self._first_block[shard[mine]]),
                kind=pack_column(kind_of.reshape(-1)),
                kinds=[kinds[i] for i in used.tolist()],
                keys=[self._metadata.key(table.paths[t]) for t in keyed.tolist()],
                key=pack_column(key.reshape(-1)),
            )
        return told, sizes

    def _shape_of(self, shards: IntArray) -> IntArray:
        """Numbers that shards of one shape have in common, ``[shards]``."""
        table = self._metadata.table
        rows = table.layout_row_of(shards)
        first, row = group_rows(rows[:, None])
        dimensions = [len(table.layouts[i].shape) for i in table.layout_of[table.shard_tensor[shards[first]]].tolist()]
        _, number = group_rows(np.column_stack([dimensions, self._boxes.take(rows[first]).shape]))
        return number[row]

    @cached_property
    def _boxes(self) -> LayoutBoxes:
        """The boxes of all layouts, one layout after the other."""
        table = self._metadata.table
        return table.layout_boxes(max([1, *(len(layout.shape) for layout in table.layouts)]))

    def _shapes(self, shards: IntArray) -> list[tuple[int, tuple[int, ...]]]:
        """Shards' tensors and shapes. The boxes of a layout, which may be very many, are not all made for that."""
        table = self._metadata.table
        tensors = table.shard_tensor[shards]
        shapes = self._boxes.take(table.layout_row_of(shards)).shape.tolist()
        dimensions = [len(table.layouts[i].shape) for i in table.layout_of[tensors].tolist()]
        return [(t, tuple(shape[:size])) for t, shape, size in zip(tensors.tolist(), shapes, dimensions, strict=True)]

    def _files(self, shard: IntArray) -> tuple[list[str], IntArray]:
        """The names of the files that shards are in, and in which each is."""
        files, file = np.unique(self._metadata.table.shard_file[shard], return_inverse=True)
        return [self._metadata.files[i].name for i in files.tolist()], file.reshape(-1)

    def _told(self, units: Sequence[Unit], shards: Mapping[int, ExchangeShard]) -> list[list[UnitOrder]]:
        """What each rank is told of the units of a round, by position."""
        told: list[list[UnitOrder]] = [[] for _ in self._ranks]
        for unit in units:
            shard = shards[unit.shard]
            order = UnitOrder(self._ranks[unit.reader], shard.itemsize, [], None, self._is_whole(unit, shard))
            for place, one in self._for_all(unit, order) if unit.to_all else self._for_single(unit, order):
                told[place].append(one)
            read = msgspec.structs.replace(told[unit.reader][-1], shard=self._order(unit.shard, shard.shape))
            told[unit.reader][-1] = read
        return told

    def _for_all(self, unit: Unit, order: UnitOrder) -> Iterator[tuple[int, UnitOrder]]:
        """What each position is told of a unit for all. Of ranks whose needs have the same rows that is one object."""
        known: dict[tuple[int, ...], UnitOrder] = {}
        places = range(len(self._ranks))
        rows_of = zip(*(map(parcel.rows.get, places, itertools.repeat(-1)) for parcel in unit.parcels), strict=True)
        for place, rows in enumerate(rows_of):
            if rows not in known:
                parcels = [ParcelOrder(ALL, row, parcel.box) for row, parcel in zip(rows, unit.parcels, strict=True)]
                known[rows] = msgspec.structs.replace(order, parcels=parcels)
            yield place, known[rows]

    def _for_single(self, unit: Unit, order: UnitOrder) -> Iterator[tuple[int, UnitOrder]]:
        """What the positions are told of a unit for single ranks: those that need some of it, and the reader."""
        reads: list[ParcelOrder] = []
        parcels = {unit.reader: reads}
        for parcel in unit.parcels:
            one = ParcelOrder(self._ranks[parcel.destination], parcel.row, parcel.box)
            if parcel.destination != unit.reader:
                parcels.setdefault(parcel.destination, []).append(one)
                one = ParcelOrder(one.destination, -1, one.box)
            reads.append(one)
        return ((place, msgspec.structs.replace(order, parcels=some)) for place, some in parcels.items())

    def _is_whole(self, unit: Unit, shard: ExchangeShard) -> bool:
        """Whether the parcels are for all, and whole blocks, one behind the other."""
        if not unit.to_all:
            return False
        block_bytes = self._metadata.block_bytes
        ranges = [flat_range(parcel.box, shard.shape) for parcel in unit.parcels]
        found = [span for span in ranges if span is not None]
        if len(found) < len(ranges) or any(a[1] != b[0] for a, b in itertools.pairwise(found)):
            return False
        start, stop = found[0][0] * shard.itemsize, found[-1][1] * shard.itemsize
        return start % block_bytes == 0 and (stop % block_bytes == 0 or stop == shard.itemsize * math.prod(shard.shape))

    def _order(self, shard: int, shape: tuple[int, ...]) -> ShardOrder:
        table = self._metadata.table
        tensor = int(table.shard_tensor[shard])
        return ShardOrder(
            file=self._metadata.files[table.shard_file[shard]].name,
            start=int(table.data_offsets[shard]),
            first_block=int(self._first_block[shard]),
            shape=shape,
            dtype=table.dtypes[tensor].name,
            key=self._metadata.key(table.paths[tensor]),
        )


class _Packs(NamedTuple):
    """The needs that the packs of a round meet, in columns.

    Attributes:
        need: Which need it is, ``[items]``.
        rank: Who has it, ``[items]``.
        reader: Who reads it, ``[items]``.
        for_all: Whether it comes with what is for all ranks, ``[items]``.
        is_first: Whether it is of the first rank that its pack is sent to, ``[items]``.
    """

    need: IntArray
    rank: IntArray
    reader: IntArray
    for_all: Mask
    is_first: Mask


@dataclass(frozen=True, slots=True, eq=False)
class _AllNeeds:
    """What all ranks need, in columns with a row for each need.

    Attributes:
        shard, rank, row: The shard, who needs some of it, and that rank's own number for it, ``[needs]``.
        box: Which of ``boxes`` it is in the shard's coordinates, ``[needs]``.
        nbytes: Its size, ``[needs]``.
        boxes: The different boxes.
    """

    shard: IntArray
    rank: IntArray
    row: IntArray
    box: IntArray
    nbytes: IntArray
    boxes: Boxes

    @classmethod
    def joined(cls, metadata: Metadata, messages: Sequence[ShardNeeds], end: int) -> _AllNeeds:
        """What ranks said of the shards below ``end``, or of all, one behind the other."""
        table = metadata.table
        columns: list[tuple[IntArray, ...]] = []
        boxes: list[Boxes] = []
        before = 0  # how many boxes ranks before this one have said
        for place, message in enumerate(messages):
            shard, box = all_of(message.shard), all_of(message.box) + before
            parts = shard, np.full_like(shard, place), all_of(message.row), box
            chosen = shard < (end or len(table.shard_file))
            columns.append(tuple(narrow(part[chosen]) for part in parts))
            flat, size = all_of(message.boxes), message.dimensions
            rows = flat.reshape(-1, 2 * size)
            boxes.append(Boxes(rows[:, :size], rows[:, size:]))
            before += len(rows)
        shard, rank, row, box = map(np.concatenate, zip(*columns, strict=True))
        every = Boxes.joined(boxes, max(part.dimensions for part in boxes))
        first, alike = group_rows(every.table)
        box, found = narrow(alike)[box], every.take(first)
        nbytes = found.volumes[box] * table.itemsizes[table.shard_tensor[shard]]
        return cls(shard, rank, row, box, narrow(nbytes), found)

    def small(self, metadata: Metadata, places: IntArray) -> SmallNeeds:
        """Some needs, all of small shards, for the plan."""
        table, shard = metadata.table, self.shard[places]
        file, sizes = table.shard_file[shard], table.shard_bytes[shard]
        return SmallNeeds(shard, file, sizes, self.rank[places], self.box[places], self.nbytes[places])
