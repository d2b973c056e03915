"""Exchange plans, painted: every needed element reaches everyone who needs it, once, from one reader."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, cut_flat_range, intersect, whole
from paddle_dist_ckpt.planning import exchange_plan
from paddle_dist_ckpt.planning.blocks import touched_blocks
from paddle_dist_ckpt.planning.exchange_packs import Pack, SmallNeeds
from paddle_dist_ckpt.planning.exchange_plan import ALL, ExchangeShard, Need, Parcel, Unit, plan_exchange
from test.strategies import boxes_in, examples, paint, shapes, some

BLOCK = 64
UNIT_BYTES, ROUND_BYTES, OWN_BYTES = 256, 1024, 2048


class Job(NamedTuple):
    """What an exchange is planned from."""

    shards: dict[int, ExchangeShard]
    needs: dict[int, list[Need]]
    reach: dict[int, list[int]]
    ranks: int


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Shards in up to three files, needs of up to five ranks, and which ranks reach which file."""
    ranks = draw(st.integers(1, 5))
    reach = {file: sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1))) for file in range(3)}
    shards, needs = {}, {}
    rows = [0] * ranks
    for number in draw(st.sets(st.integers(0, 20), max_size=4)):
        shape = draw(shapes(least=1))
        shards[number] = ExchangeShard(draw(st.integers(0, 2)), shape, draw(st.sampled_from([1, 2, 4, 8, 16])))
        wanted = []
        same_for_all = draw(st.booleans())
        boxes = draw(st.lists(boxes_in(shape, least=1), max_size=2))
        for rank in draw(st.permutations(range(ranks))):
            for box in boxes if same_for_all else draw(st.lists(boxes_in(shape, least=1), max_size=2)):
                wanted.append(Need(rank, rows[rank], box))
                rows[rank] += 1
        if wanted:
            needs[number] = wanted
    return Job(shards, needs, reach, ranks)


def planned(job: Job, block_bytes: int, own_bytes: int = 16 << 20) -> list[list[list[Unit]]]:
    """The plan: rounds of units, each of which has a unit for each of its shards."""
    boxes = sorted({need.box for wanted in job.needs.values() for need in wanted})
    small = []
    for number, wanted in job.needs.items():
        file, shape, itemsize = job.shards[number].file, job.shards[number].shape, job.shards[number].itemsize
        nbytes = math.prod(shape) * itemsize
        for need in wanted if nbytes <= block_bytes else ():
            place = boxes.index(need.box)
            small.append((file, number, need.rank, place, need.row, nbytes, need.box.size * itemsize))
    small.sort()
    file, shard, rank, box, row, entry, nbytes = np.array(small, np.int64).reshape(-1, 7).T
    columns = SmallNeeds(shard, file, entry, rank, box, nbytes)
    large = {n: wanted for n, wanted in job.needs.items() if n not in shard}
    shards = {number: job.shards[number] for number in large}
    rounds = plan_exchange(shards, large, job.reach, job.ranks, block_bytes, columns, own_bytes, [0] * job.ranks)

    def units(one: Unit | Pack) -> list[Unit]:
        if isinstance(one, Unit):
            return [one]
        found = []
        for number in dict.fromkeys(shard[one.needs].tolist()):
            here = [n for n in one.needs.tolist() if shard[n] == number]
            rows = [(int(rank[n]), int(row[n]), boxes[box[n]]) for n in here]
            parcels = tuple(Parcel(*taker) for taker in rows)
            if one.to_all:
                by_rank = [[taker for taker in rows if taker[0] == r] for r in sorted({r for r, _, _ in rows})]
                turns = zip(*by_rank, strict=True)
                parcels = tuple(Parcel(ALL, 0, turn[0][2], {r: n for r, n, _ in turn}) for turn in turns)
                assert all(len({taker[2] for taker in turn}) == 1 for turn in zip(*by_rank, strict=True))
            found.append(Unit(number, one.reader, parcels))
        return found

    return [[units(one) for one in turn] for turn in rounds]


def small_plan(job: Job) -> list[list[list[Unit]]]:
    """The plan with small units and rounds, so that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_plan, "_UNIT_BYTES", UNIT_BYTES)
        patch.setattr(exchange_plan, "_ROUND_BYTES", ROUND_BYTES)
        patch.setattr(exchange_plan, "_FEW", 2)  # so that more are cut in columns
        return planned(job, BLOCK, OWN_BYTES)


def units_of(rounds: list[list[list[Unit]]]) -> list[Unit]:
    """All units."""
    return [unit for turn in rounds for together in turn for unit in together]


def deliveries(units: list[Unit]) -> list[tuple[int, int, int, int, Box]]:
    """Everything that arrives: shard, reader, rank, its row, box."""
    found = []
    for unit in units:
        for parcel in unit.parcels:
            rows = parcel.rows if parcel.destination == ALL else {parcel.destination: parcel.row}
            found += [(unit.shard, unit.reader, rank, row, parcel.box) for rank, row in rows.items()]
    return found


@examples(35)
@given(jobs())
def test_each_need_is_met_once(job: Job) -> None:
    units = units_of(small_plan(job))
    arrived = deliveries(units)
    for number, wanted in job.needs.items():
        for need in wanted:
            mine = [box for s, _, rank, row, box in arrived if (s, rank, row) == (number, need.rank, need.row)]
            expected = paint(job.shards[number].shape, [need.box])
            assert np.array_equal(paint(job.shards[number].shape, mine), expected)
    known = {(number, need.rank, need.row) for number, wanted in job.needs.items() for need in wanted}
    assert {(s, rank, row) for s, _, rank, row, _ in arrived} == known


@examples(35)
@given(jobs())
def test_each_block_is_read_by_one_rank_that_reaches_it(job: Job) -> None:
    readers: dict[tuple[int, int], int] = {}
    for unit in units_of(small_plan(job)):
        shard = job.shards[unit.shard]
        assert unit.reader in job.reach[shard.file]
        boxes = [parcel.box for parcel in unit.parcels]
        for start, stop in touched_blocks(shard.shape, shard.itemsize, boxes, BLOCK):
            for block in range(start, stop):
                assert readers.setdefault((unit.shard, block), unit.reader) == unit.reader
                inside = cut_flat_range(
                    shard.shape,
                    block * BLOCK // shard.itemsize,
                    min((block + 1) * BLOCK // shard.itemsize, math.prod(shard.shape)),
                )
                takers = {n.rank for n in job.needs[unit.shard] if any(intersect(n.box, part) for part in inside)}
                assert takers
    wanted_blocks = {
        (number, block)
        for number, wanted in job.needs.items()
        for start, stop in touched_blocks(
            job.shards[number].shape, job.shards[number].itemsize, [n.box for n in wanted], BLOCK
        )
        for block in range(start, stop)
    }
    assert set(readers) == wanted_blocks


@examples(35)
@given(jobs())
def test_readers_read_for_themselves_where_they_can(job: Job) -> None:
    for unit in units_of(small_plan(job)):
        takers = {rank for _, _, rank, _, _ in deliveries([unit])}
        assert unit.reader in takers or not takers & set(job.reach[job.shards[unit.shard].file])


@examples(35)
@given(jobs())
def test_broadcasts_are_for_what_all_others_need(job: Job) -> None:
    for unit in units_of(small_plan(job)):
        for parcel in unit.parcels:
            if parcel.destination != ALL:
                continue
            assert job.ranks >= 2
            assert {*parcel.rows, unit.reader} == set(range(job.ranks))
            for rank, row in parcel.rows.items():
                (need,) = [n for n in job.needs[unit.shard] if (n.rank, n.row) == (rank, row)]
                assert intersect(need.box, parcel.box) == parcel.box


@examples(35)
@given(jobs())
def test_rounds_bound_what_a_rank_sends_and_receives(job: Job) -> None:
    rounds = small_plan(job)
    assert all(rounds)
    for turn in rounds:
        moved, kept = [0] * job.ranks, [0] * job.ranks
        for unit in units_of([turn]):
            for parcel in unit.parcels:
                nbytes = parcel.box.size * job.shards[unit.shard].itemsize
                if parcel.destination == ALL:
                    moved = [n + nbytes for n in moved]
                elif parcel.destination != unit.reader:
                    moved[unit.reader] += nbytes
                    moved[parcel.destination] += nbytes
                else:
                    kept[unit.reader] += nbytes
        assert (max(moved) <= ROUND_BYTES and max(kept) <= OWN_BYTES) or len(turn) == 1


@examples(25)
@given(jobs())
def test_the_same_needs_make_the_same_plan(job: Job) -> None:
    again = small_plan(job._replace(needs=dict(reversed(job.needs.items()))))
    assert again == small_plan(job)


def test_what_all_ranks_need_is_broadcast() -> None:
    shard = ExchangeShard(0, (2 << 20, 16), 4)
    needs = {0: [Need(rank, 7, whole(shard.shape)) for rank in range(4)]}
    rounds = planned(Job({0: shard}, needs, {0: [0, 1, 2, 3]}, 4), 1 << 20)
    units = units_of(rounds)
    assert all(
        parcel.destination == ALL and parcel.rows == dict.fromkeys(range(4), 7) for u in units for parcel in u.parcels
    )
    assert sum(parcel.box.size for unit in units for parcel in unit.parcels) == 32 << 20
    assert len(rounds) == 8


@pytest.mark.parametrize(
    ("takers", "reader", "most"),
    [([0, 1, 2, 3], 2, 32), ([0, 1, 3], 2, 32), ([0, 1, 3], 0, 4), ([0, 1], 2, 4), ([1], 2, 4)],
)
def test_units_are_larger_where_all_need_the_very_same(takers: list[int], reader: int, most: int) -> None:
    """As they are then broadcast; elsewhere its reader keeps a copy for each rank."""
    shard = ExchangeShard(0, (256 << 20,), 4)
    needs = {0: [Need(rank, 0, whole(shard.shape)) for rank in takers]}
    job = Job({0: shard}, needs, {0: [reader]}, 4)
    units = units_of(planned(job, 1 << 20, 64 << 20))
    assert {unit.parcels[0].box.size * 4 for unit in units} == {most << 20}
    bounded = units_of(planned(job, 1 << 20, 16 << 20))  # by what a rank with little memory may read at once
    assert {unit.parcels[0].box.size * 4 for unit in bounded} == {min(most, 16) << 20}
    assert all((unit.parcels[0].destination == ALL) is (most == 32) for unit in units)
    others = {0: [*needs[0], Need(2, 0, Box((5,), (7,)))]}
    units = units_of(planned(Job({0: shard}, others, {0: [reader]}, 4), 1 << 20))
    assert max(unit.parcels[0].box.size * 4 for unit in units) == 4 << 20


def test_reading_is_spread_over_the_ranks_that_can() -> None:
    shard = ExchangeShard(0, (64 << 20,), 4)
    needs = {0: [Need(rank, 0, whole(shard.shape)) for rank in range(4)]}
    for reach, shares in (([0, 1, 2, 3], 1 / 4), ([1, 3], 1 / 2), ([2], 1)):
        loads: dict[int, int] = {}
        for unit in units_of(planned(Job({0: shard}, needs, {0: reach}, 4), 1 << 20)):
            loads[unit.reader] = loads.get(unit.reader, 0) + sum(p.box.size for p in unit.parcels) * 4
        assert loads == dict.fromkeys(reach, int(shares * (256 << 20)))


@pytest.mark.parametrize("size", [100, 4096])
def test_of_two_ranks_one_broadcasts_what_the_other_needs(size: int) -> None:
    """Whether or not it needs that itself. So it is sent from its place and received in it."""
    shard = ExchangeShard(0, (size,), 4)
    needs = [Need(rank, rank, whole((size,))) for rank in range(2)]
    for wanted, rows in ((needs, {0: 0, 1: 1}), (needs[:1], {0: 0})):
        units = units_of(planned(Job({0: shard}, {0: wanted}, {0: [1]}, 2), 4096))
        assert all(unit.reader == 1 for unit in units)
        assert {(parcel.destination, *parcel.rows.items()) for unit in units for parcel in unit.parcels} == {
            (ALL, *rows.items())
        }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("size", [100, 4096])
def test_what_its_reader_alone_needs_is_not_sent(ranks: int, size: int) -> None:
    shard = ExchangeShard(0, (size,), 4)
    job = Job({0: shard}, {0: [Need(0, 5, whole((size,)))]}, {0: [0]}, ranks)
    parcels = [parcel for unit in units_of(planned(job, 4096)) for parcel in unit.parcels]
    assert {(parcel.destination, parcel.row) for parcel in parcels} == {(0, 5)}


def test_no_needs_make_no_rounds() -> None:
    assert planned(Job({0: ExchangeShard(0, (4,), 4)}, {}, {0: [0]}, 2), 4096) == []


@pytest.mark.parametrize(("ranks", "reach"), some([(4, [1, 3]), (3, [0, 1, 2]), (2, [0])], 1))
def test_many_small_shards_are_few_units(ranks: int, reach: list[int]) -> None:
    shards = {number: ExchangeShard(number % 2, (256,), 4) for number in range(2000)}
    needs = {number: [Need(rank, number, whole((256,))) for rank in range(ranks)] for number in shards}
    rounds = planned(Job(shards, needs, {0: reach, 1: reach}, ranks), 1 << 20)
    together = [units for turn in rounds for units in turn]
    assert len(together) <= 4
    assert sorted(unit.shard for units in together for unit in units) == list(range(2000))
    loads = [sum(len(units) for units in together if units[0].reader == rank) for rank in range(ranks)]
    assert all(loads[rank] == 0 for rank in range(ranks) if rank not in reach)
    assert {parcel.destination for units in together for unit in units for parcel in unit.parcels} == {ALL}


@pytest.mark.parametrize("takers", [range(1, 6), [1]])
def test_a_pack_is_small_if_many_need_it(takers: range | list[int]) -> None:
    """Its reader keeps a copy for each rank, and of each need, until it is sent."""
    shards = {number: ExchangeShard(0, (1 << 18,), 4) for number in range(640)}
    times = 5 // len(takers)
    needs = {
        number: [Need(rank, times * number + i, whole((1 << 18,))) for rank in takers for i in range(times)]
        for number in shards
    }
    rounds = planned(Job(shards, needs, {0: [0]}, 8), 1 << 20)
    sent = [sum(parcel.box.size * 4 for unit in units_of([turn]) for parcel in unit.parcels) for turn in rounds]
    assert sum(sent) == 3200 << 20
    assert 8 << 20 < max(sent) <= 16 << 20


def test_a_tensor_is_complete_soon_after_it_is_begun() -> None:
    """Its shards are in several files, and none of these is read to its end before the next one."""
    shards = {n: ExchangeShard(n % 4, (2, 4 << 20), 1) for n in range(32)}  # four of each tensor
    needs = {n: [Need(rank, n // 4, Box((rank, 0), (1, 4 << 20))) for rank in range(2)] for n in shards}
    rounds = planned(Job(shards, needs, {file: [0, 1] for file in range(4)}, 2), 1 << 20)
    tensors = [{unit.shard // 4 for unit in units_of([turn])} for turn in rounds]
    assert len(tensors) >= 8
    assert all(max(here) - min(here) <= 1 for here in tensors)
    assert [min(here) for here in tensors] == sorted(min(here) for here in tensors)


def _looks(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], boxes: list[Box]) -> tuple[int, int]:
    """How often a plan looks at a box, and how many units it has, if each rank needs a box of a shard in blocks of
    256 KiB."""
    looks = list[Box]()

    def counted(a: Box, b: Box) -> Box | None:
        looks.append(b)
        return intersect(a, b)

    monkeypatch.setattr(exchange_plan, "intersect", counted)
    ranks, none = len(boxes), np.zeros(0, np.int64)
    needs = {0: [Need(rank, rank, box) for rank, box in enumerate(boxes)]}
    small = SmallNeeds(none, none, none, none, none, none)
    shards, reach = {0: ExchangeShard(0, shape, 4)}, {0: range(ranks)}
    rounds = plan_exchange(shards, needs, reach, ranks, 1 << 18, small, 1 << 40, [0] * ranks)
    return len(looks), sum(map(len, rounds))


def test_a_plan_looks_at_a_need_only_where_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor that is cut by its rows among many ranks: else the time would grow with the square of these."""
    boxes = [Box((rank * 8, 0), (8, 1 << 16)) for rank in range(64)]
    assert _looks(monkeypatch, (64 * 8, 1 << 16), boxes) == (8 * 64, 8 * 64)  # each unit is for one rank


def test_a_plan_looks_once_at_what_all_ranks_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each rank."""
    shape = (64 * 8, 1 << 16)
    assert _looks(monkeypatch, shape, [whole(shape)] * 64) == (8 * 64, 8 * 64)


@pytest.mark.parametrize("alike", [True, False])
def test_a_plan_has_no_more_units_than_who_reads_may_share(alike: bool) -> None:
    """However many ranks there are: each unit has something for each of them."""
    for ranks in (4, 64):
        shard = ExchangeShard(0, (4096, 4096), 4)
        boxes = [whole(shard.shape) if alike else Box((0, 64 * rank), (4096, 64)) for rank in range(ranks)]
        needs = {0: [Need(rank, 0, box) for rank, box in enumerate(boxes)]}
        units = units_of(planned(Job({0: shard}, needs, {0: [1]}, ranks), 1 << 18))
        assert len(units) == (8 if alike else 16)
