"""Orders for an exchange, carried out in memory: what every rank gets by them, and what it takes to give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.columns import all_of, pack_column
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.layouts import Layout
from paddle_dist_ckpt.core.messages import decode, encode
from paddle_dist_ckpt.core.shards import ShardTable
from paddle_dist_ckpt.files.metadata import FileInfo, Metadata
from paddle_dist_ckpt.loading import exchange_planner
from paddle_dist_ckpt.loading.exchange_messages import Message, messages_of
from paddle_dist_ckpt.loading.exchange_orders import ExchangeAnswer, ExchangeRound, KeptPacks, ShardNeeds
from paddle_dist_ckpt.loading.exchange_planner import ExchangePlanner
from paddle_dist_ckpt.planning import exchange_plan
from paddle_dist_ckpt.planning.exchange_plan import ALL, ExchangeShard, Need, Parcel, Unit
from test.planning.test_exchange_plan import BLOCK, ROUND_BYTES, UNIT_BYTES, Job, jobs
from test.strategies import examples

_DTYPES = {1: "uint8", 2: "float16", 4: "float32", 8: "float64", 16: "complex128"}
_DIMENSIONS = 6  # at most


class Planned:
    """The orders of a job. Its ranks are positions; outside, each is 2 more than twice that."""

    def __init__(self, job: Job, block_bytes: int) -> None:
        self.job, self.ranks, self.numbers = job, [2 * place + 2 for place in range(job.ranks)], sorted(job.shards)
        shards = [job.shards[number] for number in self.numbers]
        self.table = ShardTable(
            paths=[f"/t{number:02}" for number in self.numbers],
            dtypes=[DTYPES[_DTYPES[shard.itemsize]] for shard in shards],
            kinds=np.zeros(len(shards), np.int64),
            layouts=[Layout.from_cuts(shard.shape, [[] for _ in shard.shape]) for shard in shards],
            layout_of=np.arange(len(shards)),
            shard_file=np.array([shard.file for shard in shards], np.int64),
            names=[None] * len(shards),
        )
        metadata = Metadata(
            save_id="0" * 16,
            unique_id=0,
            world_size=job.ranks,
            block_bytes=block_bytes,
            created="",
            library="",
            paddle_version=None,
            user_tree=None,
            files=[FileInfo(f"file{i}", 1 << 40, "0" * 16) for i in range(3)],
            table=self.table,
            value_records=[],
        )
        needs = [self._needs(place) for place in range(job.ranks)]
        first_block, loads = 7 * np.arange(len(shards)), [0] * job.ranks
        planner = ExchangePlanner(metadata, first_block, self.ranks, job.reach, needs, 1 << 20, loads, 0)
        self.orders = planner.orders()

    def _needs(self, place: int) -> ShardNeeds:
        mine = [(n, i) for i, number in enumerate(self.numbers) for n in self._of(number) if n.rank == place]
        boxes = [
            [*n.box.offset, *(0,) * (_DIMENSIONS - len(n.box.offset)), *n.box.shape]
            + [1] * (_DIMENSIONS - len(n.box.shape))
            for n, _ in mine
        ]
        return ShardNeeds(
            row=pack_column([n.row for n, _ in mine]),
            shard=pack_column([i for _, i in mine]),
            box=pack_column(range(len(mine))),
            dimensions=_DIMENSIONS,
            boxes=pack_column(np.array(boxes, np.int64).reshape(-1)),
        )

    def _of(self, number: int) -> list[Need]:
        return self.job.needs.get(number, [])


class Simulation:
    """Carries orders out: arrays in place of files, and for each need an array in place of its target."""

    def __init__(self, planned: Planned) -> None:
        self.planned, job = planned, planned.job
        random = np.random.default_rng(0)
        self.stored = [
            np.frombuffer(random.bytes(array.nbytes), array.dtype).reshape(array.shape)
            for array in (np.empty(job.shards[n].shape, _raw(job.shards[n].itemsize)) for n in planned.numbers)
        ]
        self.at = {
            (f"file{file}", int(start)): i
            for i, (file, start) in enumerate(zip(planned.table.shard_file, planned.table.data_offsets, strict=True))
        }
        self.needs = {
            (planned.ranks[need.rank], need.row): (i, need.box)
            for i, number in enumerate(planned.numbers)
            for need in job.needs.get(number, [])
        }
        self.times = {key: np.zeros(box.shape, np.int64) for key, (_, box) in self.needs.items()}

    def run(self) -> None:
        """Carry all rounds out, and see that each element of each need was filled once."""
        decoded = {rank: decode(encode(order), ExchangeAnswer) for rank, order in self.planned.orders.items()}
        for rounds in zip(*(order.rounds for order in decoded.values()), strict=True):
            self._round(dict(zip(decoded, rounds, strict=True)))
        assert all((times == 1).all() for times in self.times.values())

    def _round(self, rounds: Mapping[int, ExchangeRound]) -> None:
        messages = {rank: messages_of(one, rank) for rank, one in rounds.items()}
        sent = {
            address: self._read(rank, message, rounds[rank].kept)
            for rank, mine in messages.items()
            for address, message in mine.items()
            if address[0] == rank
        }
        largest: dict[int, int] = {}
        for (source, destination, _), data in sent.items():
            if destination not in (ALL, source):
                largest[source] = max(largest.get(source, 0), len(data))
        assert all(one.senders == sorted(largest.items()) for one in rounds.values())
        for address in sent:
            for rank in messages if address[1] == ALL else [address[1]]:
                assert address in messages[rank], "who is sent something is told of it"
        for rank, mine in messages.items():
            for address, message in mine.items():
                self._fill(rank, message, sent[address], address[0] == rank)

    def _read(self, rank: int, message: Message, kept: KeptPacks | None) -> bytes:
        data = b""
        for unit, parcel in message.parts:
            assert unit.shard is not None, "a reader is told what it reads"
            i = self._stored_at(rank, unit.shard.file, unit.shard.start)
            assert (unit.shard.first_block, unit.shard.shape) == (7 * i, self.stored[i].shape)
            data += self.stored[i][parcel.box.slices].tobytes()
        if message.pack is not None:
            packs, items = message.pack
            order = packs.order
            columns = [
                all_of(column)[items].tolist()
                for column in (order.file, order.start, order.block, order.kind, order.key)
            ]
            for file, start, block, kind, key in zip(*columns, strict=True):
                i = self._stored_at(rank, order.files[file], start)
                assert (block, order.kinds[kind].shape) == (7 * i, self.stored[i].shape)
                assert order.keys[key] == self.planned.table.paths[i][1:]
                data += self.stored[i][order.kinds[kind].box.slices].tobytes()
        elif kept is not None:
            for row in message.kept.tolist():
                i, box = self.needs[rank, row]
                assert self.planned.job.shards[self.planned.numbers[i]].file in {int(f[4:]) for f in kept.files}
                data += self.stored[i][box.slices].tobytes()
        return data

    def _stored_at(self, rank: int, file: str, start: int) -> int:
        assert self.planned.ranks.index(rank) in self.planned.job.reach[int(file[4:])], "no rank reads what it cannot"
        return self.at[file, start]

    def _fill(self, rank: int, message: Message, data: bytes, reads: bool) -> None:
        for row, box, itemsize in self._parts(rank, message):
            size = box.size * itemsize
            here, data = data[:size], data[size:]
            if row >= 0:
                i, wanted = self.needs[rank, row]
                assert here == self.stored[i][box.slices].tobytes()
                self.times[rank, row][box.relative_to(wanted.offset).slices] += 1
        assert not data or (reads and message.pack is not None), "a message is as long at both ends"

    def _parts(self, rank: int, message: Message) -> Iterator[tuple[int, Box, int]]:
        for unit, parcel in message.parts:
            yield parcel.row, parcel.box, unit.itemsize
        for row in message.kept.tolist():
            i, box = self.needs[rank, row]
            yield row, box, self.stored[i].itemsize


def _raw(itemsize: int) -> np.dtype[Any]:
    return np.dtype(f"V{itemsize}")


@examples(40)
@given(jobs())
def test_every_need_is_filled_once_with_what_is_stored(job: Job) -> None:
    if not job.shards:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_plan, "_UNIT_BYTES", UNIT_BYTES)
        patch.setattr(exchange_plan, "_ROUND_BYTES", ROUND_BYTES)
        patch.setattr(exchange_plan, "_FEW", 2)
        Simulation(Planned(job, BLOCK)).run()


@pytest.mark.parametrize("ranks", [9, 40])
@pytest.mark.parametrize("cut", ["columns", "rows", "alike", "nearly alike"])
def test_many_ranks_get_what_they_need(ranks: int, cut: str) -> None:
    rows = columns = 4 * ranks
    boxes = {
        "columns": [Box((0, 4 * rank), (rows, 4)) for rank in range(ranks)],
        "rows": [Box((4 * rank, 0), (4, columns)) for rank in range(ranks)],
        "alike": [whole((rows, columns))] * ranks,
        "nearly alike": [*[whole((rows, columns))] * (ranks - 1), Box((1, 1), (rows - 1, columns - 2))],
    }[cut]
    needs = {0: [Need(rank, rank % 3, box) for rank, box in enumerate(boxes)]}
    for able in ([2], range(ranks)):
        job = Job({0: ExchangeShard(0, (rows, columns), 4)}, needs, {0: [*able], 1: [], 2: []}, ranks)
        Simulation(Planned(job, 1024)).run()


class _Counted(tuple[Parcel, ...]):
    """Parcels that count how many of them are looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Parcel]:
        _Counted.looks += len(self)
        return super().__iter__()


def test_orders_look_at_each_parcel_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each rank: of a tensor cut by columns among a thousand ranks they would take a minute."""
    real: Any = exchange_plan.plan_exchange
    parcels = list[int]()

    def counted(*arguments: Any) -> list[list[Any]]:
        rounds = real(*arguments)
        parcels.extend(len(unit.parcels) for one in rounds for unit in one)
        return [[Unit(unit.shard, unit.reader, _Counted(unit.parcels)) for unit in one] for one in rounds]

    monkeypatch.setattr(exchange_planner, "plan_exchange", counted)
    monkeypatch.setattr(_Counted, "looks", 0)
    ranks = 64
    needs = {0: [Need(rank, 0, Box((0, 64 * rank), (256, 64))) for rank in range(ranks)]}
    Planned(Job({0: ExchangeShard(0, (256, 64 * ranks), 4)}, needs, {0: [0], 1: [], 2: []}, ranks), 1 << 18)
    assert parcels == [ranks] * 8
    assert 0 < _Counted.looks <= 4 * sum(parcels)


def test_what_all_ranks_are_told_alike_is_one_object() -> None:
    ranks = 16
    needs = {0: [Need(rank, rank % 2, whole((256, 4096))) for rank in range(ranks)]}
    planned = Planned(Job({0: ExchangeShard(0, (256, 4096), 4)}, needs, {0: [5], 1: [], 2: []}, ranks), 1 << 18)
    for rounds in zip(*(order.rounds for order in planned.orders.values()), strict=True):
        for orders in zip(*(one.units for one in rounds), strict=True):
            assert len(set(map(id, orders))) == 3  # even rows, odd ones, and the reader's


def test_what_ranks_are_told_of_small_shards_is_made_once_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each pair of them: what that takes grows with the square of their number."""
    real, packed = exchange_planner.pack_column, list[int]()
    monkeypatch.setattr(exchange_planner, "pack_column", lambda values: packed.append(len(values)) or real(values))
    ranks = 48
    shards = {i: ExchangeShard(i % 3, (4, 4 * ranks), 4) for i in range(2 * ranks)}
    needs = {i: [Need(rank, i, Box((0, 4 * rank), (4, 4))) for rank in range(ranks)] for i in shards}
    everywhere = {file: [*range(ranks)] for file in range(3)}
    planned = Planned(Job(shards, needs, everywhere, ranks), 1 << 14)
    Simulation(planned).run()
    rounds = max(len(order.rounds) for order in planned.orders.values())
    assert sum(packed) > ranks * ranks
    assert len(packed) <= 8 * ranks * rounds
