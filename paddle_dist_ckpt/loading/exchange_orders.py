"""From what ranks need and reach to each rank's order for the exchange."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from ..core.box import flat_range
from ..files.metadata import Metadata
from ..planning.exchange_plan import ALL, ExchangeShard, Need, Unit, plan_exchange
from .messages import ExchangeAnswer, ExchangeRound, ParcelOrder, ShardNeed, ShardOrder, UnitOrder

__all__ = ["ExchangePlanner"]


class ExchangePlanner:
    """Plans the exchange of one load. Ranks are positions inside, global ranks outside."""

    def __init__(
        self,
        metadata: Metadata,
        ranks: Sequence[int],
        reach: Mapping[int, Sequence[str]],
        needs: Mapping[int, Sequence[ShardNeed]],
    ) -> None:
        self._metadata, self._ranks = metadata, ranks
        self._place = {rank: i for i, rank in enumerate(ranks)}
        file_number = {info.name: i for i, info in enumerate(metadata.files)}
        self._reach: dict[int, list[int]] = {}
        for rank in ranks:
            for name in reach.get(rank, ()):
                self._reach.setdefault(file_number[name], []).append(self._place[rank])
        self._needs: dict[bool, dict[int, list[Need]]] = {False: {}, True: {}}
        table = metadata.table
        for rank in ranks:
            for need in needs[rank]:
                shard = int(table.first_shard[table.index[need.path]]) + need.shard
                wanted = Need(self._place[rank], need.row, need.box)
                self._needs[need.staged].setdefault(shard, []).append(wanted)
        self._shards: dict[int, ExchangeShard] = {}
        for shard in (*self._needs[False], *self._needs[True]):
            tensor, box = table.shard_place(shard)
            self._shards[shard] = ExchangeShard(int(table.shard_file[shard]), box.shape, table.dtypes[tensor].itemsize)
        self._first_block, _ = table.blocks(metadata.block_bytes, len(metadata.files))

    def unreached(self) -> list[str]:
        """Files that are needed and that no rank can read."""
        missing = {shard.file for shard in self._shards.values()} - set(self._reach)
        return [self._metadata.files[i].name for i in sorted(missing)]

    def orders(self) -> dict[int, ExchangeAnswer]:
        """Each rank's order, by global rank."""
        staged, main = self._rounds(self._needs[True]), self._rounds(self._needs[False])
        return {
            rank: ExchangeAnswer(
                staged=[ExchangeRound(self._told(units, place), senders) for units, senders in staged],
                main=[ExchangeRound(self._told(units, place), senders) for units, senders in main],
            )
            for rank, place in self._place.items()
        }

    def _rounds(
        self, needs: Mapping[int, Sequence[Need]]
    ) -> list[tuple[list[tuple[Unit, bool]], list[tuple[int, int]]]]:
        """The rounds of one pass, each unit with whether it is sent as whole blocks, and who sends in each."""
        plan = plan_exchange(self._shards, needs, self._reach, len(self._ranks), self._metadata.block_bytes)
        return [([(unit, self._is_whole(unit)) for unit in units], self._senders(units)) for units in plan]

    def _senders(self, units: Sequence[Unit]) -> list[tuple[int, int]]:
        """The readers that send to single ranks in a round, each with the size of its largest message."""
        sizes: dict[tuple[int, int], int] = {}
        for unit in units:
            for parcel in unit.parcels:
                if parcel.destination not in (ALL, unit.reader):
                    pair = (unit.reader, parcel.destination)
                    sizes[pair] = sizes.get(pair, 0) + parcel.box.size * self._shards[unit.shard].itemsize
        largest: dict[int, int] = {}
        for (source, _), size in sizes.items():
            largest[source] = max(largest.get(source, 0), size)
        return [(self._ranks[source], size) for source, size in sorted(largest.items())]

    def _told(self, units: Sequence[tuple[Unit, bool]], place: int) -> list[UnitOrder]:
        """What the rank at a position is told of a round."""
        told = []
        for unit, is_whole in units:
            reads = unit.reader == place
            parcels = [
                ParcelOrder(
                    ALL if p.destination == ALL else self._ranks[p.destination],
                    p.row if p.destination == place else p.rows.get(place, -1),
                    p.box,
                )
                for p in unit.parcels
                if reads or p.destination in (ALL, place)
            ]
            if parcels:
                shard = self._order(unit.shard) if reads else None
                itemsize = self._shards[unit.shard].itemsize
                told.append(UnitOrder(self._ranks[unit.reader], itemsize, parcels, shard, is_whole))
        return told

    def _is_whole(self, unit: Unit) -> bool:
        """Whether the parcels are for all, and whole blocks, one behind the other."""
        if unit.parcels[0].destination != ALL:  # then all are
            return False
        shard, block_bytes = self._shards[unit.shard], self._metadata.block_bytes
        ranges = [flat_range(parcel.box, shard.shape) for parcel in unit.parcels]
        found = [span for span in ranges if span is not None]
        if not found or len(found) < len(ranges) or any(a[1] != b[0] for a, b in itertools.pairwise(found)):
            return False
        start, stop = found[0][0] * shard.itemsize, found[-1][1] * shard.itemsize
        return start % block_bytes == 0 and (stop % block_bytes == 0 or stop == shard.itemsize * math.prod(shard.shape))

    def _order(self, shard: int) -> ShardOrder:
        table = self._metadata.table
        tensor, box = table.shard_place(shard)
        return ShardOrder(
            file=self._metadata.files[table.shard_file[shard]].name,
            start=int(table.data_offsets[shard]),
            first_block=int(self._first_block[shard]),
            shape=box.shape,
            dtype=table.dtypes[tensor].name,
            key=self._metadata.key(table.paths[tensor]),
        )
