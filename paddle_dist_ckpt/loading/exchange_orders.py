"""From what ranks need and reach to each rank's order for the exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.box import Box
from ..files.metadata import Metadata
from ..planning.exchange_plan import ALL, ExchangeShard, Need, Parcel, Unit, plan_exchange
from .messages import ExchangeAnswer, ExchangeRound, Incoming, ShardNeed, UnitRead, WireParcel

__all__ = ["ExchangePlanner"]

_ALONE_BYTES = 256 << 10


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
                wanted = Need(self._place[rank], need.row, Box(*need.box))
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
        plans = {
            staged: plan_exchange(self._shards, needs, self._reach, len(self._ranks), self._metadata.block_bytes)
            for staged, needs in self._needs.items()
        }
        rounds = {staged: [(units, self._scatters(units)) for units in plan] for staged, plan in plans.items()}
        orders = {}
        for rank, place in self._place.items():
            units = [unit for rounds in plans.values() for units in rounds for unit in units if unit.reader == place]
            files = sorted({self._metadata.files[self._shards[unit.shard].file].name for unit in units})
            staged = [self._round(units, scatters, place) for units, scatters in rounds[True]]
            main = [self._round(units, scatters, place) for units, scatters in rounds[False]]
            orders[rank] = ExchangeAnswer(False, files, staged, main)
        return orders

    def _scatters(self, units: Sequence[Unit]) -> list[tuple[int, int]]:
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
        return sorted(largest.items())

    def _round(self, units: Sequence[Unit], scatters: list[tuple[int, int]], place: int) -> ExchangeRound:
        broadcasts: dict[int, list[list[tuple[int, Parcel]]]] = {}
        receives: dict[int, list[tuple[int, Parcel]]] = {}
        reads = []
        for unit in units:
            itemsize = self._shards[unit.shard].itemsize
            messages = broadcasts.setdefault(unit.reader, [[]])
            numbers = []
            for parcel in unit.parcels:
                numbers.append(_message(messages, itemsize, parcel) if parcel.destination == ALL else 0)
                if parcel.destination == place and unit.reader != place:
                    receives.setdefault(unit.reader, []).append((itemsize, parcel))
            if unit.reader == place:
                reads.append(self._read(unit, numbers))
        return ExchangeRound(
            reads,
            [_incoming(source, parcels, place) for source in sorted(broadcasts) for parcels in broadcasts[source]],
            [_incoming(source, receives[source], place) for source in sorted(receives)],
            scatters,
        )

    def _read(self, unit: Unit, messages: Sequence[int]) -> UnitRead:
        table = self._metadata.table
        tensor, box = table.shard_place(unit.shard)
        parcels = [
            WireParcel(
                p.destination,
                p.rows.get(unit.reader, -1) if p.destination == ALL else p.row,
                (p.box.offset, p.box.shape),
                message,
            )
            for p, message in zip(unit.parcels, messages, strict=True)
        ]
        return UnitRead(
            file=self._metadata.files[table.shard_file[unit.shard]].name,
            start=int(table.data_offsets[unit.shard]),
            first_block=int(self._first_block[unit.shard]),
            shape=box.shape,
            dtype=table.dtypes[tensor].name,
            key=self._metadata.key(table.paths[tensor]),
            parcels=parcels,
        )


def _message(messages: list[list[tuple[int, Parcel]]], itemsize: int, parcel: Parcel) -> int:
    """Put a parcel for all in one of its reader's messages: a large one alone, so that it can be sent from its target
    and received in its target, and all others together in the first. Returns the message's number."""
    if parcel.box.size * itemsize < _ALONE_BYTES:
        messages[0].append((itemsize, parcel))
        return 0
    messages.append([(itemsize, parcel)])
    return len(messages) - 1


def _incoming(source: int, parcels: Sequence[tuple[int, Parcel]], place: int) -> Incoming:
    return Incoming(
        source,
        [p.rows.get(place, -1) if p.destination == ALL else p.row for _, p in parcels],
        [(p.box.offset, p.box.shape) for _, p in parcels],
        [p.box.size * itemsize for itemsize, p in parcels],
    )
