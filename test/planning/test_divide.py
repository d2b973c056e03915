"""Planning in columns, many replica sets at once, against planning one set after the other with plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.planning.balance import ReplicaSet, balanced_shares, deal
from paddle_dist_ckpt.planning.save_plan import plan_save
from test.planning.test_save_plan import DIMENSIONS, State
from test.strategies import examples, irregular_tilings, shapes

MEBI = 1 << 20


# -- shares


def pour(loads: Sequence[int], amount: int) -> list[int]:
    """The definition: byte by byte in effect, the lowest vessels first, those of one level in their order."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    filled, vessels = loads[order[0]], 1
    while vessels < len(order) and vessels * loads[order[vessels]] - filled <= amount:
        filled += loads[order[vessels]]
        vessels += 1
    surface, rest = divmod(amount + filled, vessels)
    added = [0] * len(loads)
    for place, i in enumerate(order[:vessels]):
        added[i] = surface - loads[i] + (place < rest)
    return added


def shares_in_turn(fixed: Sequence[int], sets: Sequence[ReplicaSet]) -> list[list[int]]:
    """Every set in turn, smaller ones first, until nothing moves."""
    loads = list(fixed)
    shares = [[0] * len(s.members) for s in sets]
    settled = max(1, (sum(fixed) + sum(s.nbytes for s in sets)) // len(fixed) // 1000)
    for _ in range(50):
        moved = 0
        for i in sorted(range(len(sets)), key=lambda i: len(sets[i].members)):
            members = sets[i].members.tolist()
            others = [loads[rank] - share for rank, share in zip(members, shares[i], strict=True)]
            poured = pour(others, sets[i].nbytes)
            moved = max([moved, *(abs(a - b) for a, b in zip(poured, shares[i], strict=True))])
            shares[i] = poured
            for rank, load, share in zip(members, others, poured, strict=True):
                loads[rank] = load + share
        if moved <= settled or len(sets) == 1:
            break
    return shares


@st.composite
def replica_sets(draw: st.DrawFn) -> tuple[list[int], list[ReplicaSet]]:
    """Loads of ranks, and sets of them, of which some cross, some do not, and some are there twice."""
    ranks = draw(st.integers(1, 9))
    size = st.sampled_from([0, 1, 7, 1000, MEBI, 2**40])
    fixed = draw(st.lists(size, min_size=ranks, max_size=ranks))
    members = st.sets(st.integers(0, ranks - 1), min_size=1).map(sorted)
    sets = draw(st.lists(st.tuples(members, size), max_size=10))
    return fixed, [ReplicaSet(np.array(m, np.int64), nbytes) for m, nbytes in sets]


@examples(25)
@given(replica_sets())
def test_sets_poured_at_once_get_what_they_get_in_turn(problem: tuple[list[int], list[ReplicaSet]]) -> None:
    fixed, sets = problem
    found = balanced_shares(np.array(fixed, np.int64), sets)
    assert [share.tolist() for share in found] == shares_in_turn(fixed, sets)
    assert all(share.dtype == np.int64 for share in found)


def test_many_sets_that_share_no_rank() -> None:
    fixed = (np.arange(600) * 7919 % 1000).tolist()
    sets = [ReplicaSet(np.arange(i, i + 3), 500 + i) for i in range(0, 600, 3)]
    sets += [ReplicaSet(np.arange(i, 600, 100), 900) for i in range(100)]
    assert [share.tolist() for share in balanced_shares(np.array(fixed), sets)] == shares_in_turn(fixed, sets)


# -- lines


class Line(NamedTuple):
    """A set's items and its members' shares of them."""

    boxes: list[Box]
    itemsizes: list[int]
    shares: list[int]

    @property
    def nbytes(self) -> list[int]:
        return [box.size * size for box, size in zip(self.boxes, self.itemsizes, strict=True)]


@st.composite
def some_lines(draw: st.DrawFn) -> list[Line]:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        scale = draw(st.sampled_from([1, 64, 20_000]))
        extents = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4))
        boxes = [Box((0, 0), (scale * a, b)) for a, b in extents]
        line = Line(boxes, [draw(st.sampled_from([1, 2, 16])) for _ in boxes], [])
        total = sum(line.nbytes)
        marks = sorted(draw(st.lists(st.sampled_from([0, total // 3, total // 2, total - 1, total]), max_size=4)))
        found.append(line._replace(shares=np.diff([0, *marks, total]).tolist()))
    return found


@examples(25)
@given(some_lines(), st.sampled_from([0, 1000, MEBI]))
def test_several_lines_are_dealt_as_if_each_were_alone(lines: list[Line], tolerance: int) -> None:
    def dealt(shares: list[int], nbytes: list[int], boxes: list[Box], itemsizes: list[int]) -> tuple[list, list]:
        extents = Boxes.of(boxes, 2).shape
        found = deal(np.array(shares), np.array(nbytes), extents, np.array(itemsizes), tolerance)
        return list(zip(found.item.tolist(), found.member.tolist(), strict=True)), found.pieces

    uncut, pieces = [], []
    items = members = 0
    for line in lines:
        alone, parts = dealt(line.shares, line.nbytes, line.boxes, line.itemsizes)
        uncut += [(item + items, member + members) for item, member in alone]
        pieces += [(item + items, member + members, box) for item, member, box in parts]
        items, members = items + len(line.boxes), members + len(line.shares)
    joined = [[x for line in lines for x in column(line)] for column in COLUMNS]
    assert dealt(*joined) == (uncut, pieces)


COLUMNS = (lambda x: x.shares, lambda x: x.nbytes, lambda x: x.boxes, lambda x: x.itemsizes)


# -- whole plans


class Held(NamedTuple):
    """A box, and the local shard of each rank that holds it, by rank."""

    tensor: int
    box: Box
    holders: dict[int, int]


def held_boxes(state: State) -> list[Held]:
    found: dict[tuple[int, Box], dict[int, int]] = {}
    for row, shard in enumerate(state.shards):
        found.setdefault((shard.tensor, shard.box), {}).setdefault(shard.rank, row)
    return [Held(*key, dict(sorted(holders.items()))) for key, holders in sorted(found.items())]


def planned_in_turn(state: State, coordinator: int) -> list[tuple[int, int, int, Box]]:
    """Tensor, rank, local shard and box of what is written, each replica set planned by itself."""
    rows: list[tuple[int, int, int, Box]] = []
    sets: dict[tuple[int, ...], list[Held]] = {}
    fixed = [0] * state.ranks
    plain = {shard.tensor for shard in state.shards if shard.plain}
    for held in held_boxes(state):
        ranks = tuple(held.holders)
        if held.tensor in plain:
            ranks = (coordinator if coordinator in ranks else ranks[0],)
        if len(ranks) == 1:
            rows.append((held.tensor, ranks[0], held.holders[ranks[0]], held.box))
            fixed[ranks[0]] += held.box.size * state.itemsizes[held.tensor]
        else:
            sets.setdefault(ranks, []).append(held)
    ordered = sorted(sets, key=lambda ranks: (len(ranks), ranks))
    nbytes = [[held.box.size * state.itemsizes[held.tensor] for held in sets[ranks]] for ranks in ordered]
    total = sum(fixed) + sum(map(sum, nbytes))
    replica_sets = [ReplicaSet(np.array(ranks), sum(n)) for ranks, n in zip(ordered, nbytes, strict=True)]
    shares = shares_in_turn(fixed, replica_sets)
    for ranks, sizes, share in zip(ordered, nbytes, shares, strict=True):
        itemsizes = np.array([state.itemsizes[held.tensor] for held in sets[ranks]])
        boxes = [held.box for held in sets[ranks]]
        extents = Boxes.of(boxes, DIMENSIONS).shape
        dealt = deal(np.array(share), np.array(sizes), extents, itemsizes, total // state.ranks // 128)
        uncut = zip(dealt.item.tolist(), dealt.member.tolist(), strict=True)
        pieces = [(i, m, whole(boxes[i].shape)) for i, m in uncut]
        for i, m, part in [*pieces, *dealt.pieces]:
            held = sets[ranks][i]
            offset = tuple(a + b for a, b in zip(held.box.offset, part.offset, strict=False))
            cut = Box(offset, part.shape[: len(offset)])
            rows.append((held.tensor, ranks[m], held.holders[ranks[m]], cut))
    return sorted(rows, key=lambda row: (row[1], -state.itemsizes[row[0]], row[0], row[3].offset))


@st.composite
def replicated_states(draw: st.DrawFn) -> State:
    """Tilings of tensors, small ones and such that are worth cutting, each box on some ranks; in any order."""
    state = State(draw(st.integers(1, 6)))
    some_ranks = st.sets(st.integers(0, state.ranks - 1), min_size=1).map(sorted)
    few = draw(st.lists(some_ranks, min_size=1, max_size=3))
    for _ in range(draw(st.integers(0, 4))):
        shape, scale = draw(shapes(least=1, most=5)), draw(st.sampled_from([1, 100, 50_000]))
        sized = tuple(n * (scale if d == 0 else 1) for d, n in enumerate(shape))
        plain = draw(st.integers(0, 4)) == 0
        shards = []
        for box in draw(irregular_tilings(shape, 1 if plain else 5)):
            factor = tuple(scale if d == 0 else 1 for d in range(len(shape)))
            offset, extent = (tuple(n * f for n, f in zip(corner, factor, strict=True)) for corner in box)
            ranks = draw(st.one_of(st.sampled_from(few), some_ranks))
            shards += [(rank, Box(offset, extent)) for rank in ranks + ranks[: draw(st.integers(0, 1))]]
        state.add(sized, draw(st.sampled_from([1, 4, 16])), shards, plain=plain)
    state.shards = draw(st.permutations(state.shards))
    return state


@examples(25)
@given(replicated_states(), st.data())
def test_plans_are_those_made_set_by_set(state: State, data: st.DataObject) -> None:
    coordinator = data.draw(st.integers(0, state.ranks - 1))
    assert state.written(state.plan(coordinator)) == planned_in_turn(state, coordinator)


def test_many_sets_that_differ_from_tensor_to_tensor() -> None:
    state = State(24)
    random = np.random.default_rng(3)
    for t in range(60):
        groups = np.sort(random.permutation(24).reshape(6, 4), axis=1).tolist()
        shape = (6 * (40_000 if t % 20 == 0 else 3), 5)
        rows = shape[0] // 6
        shards = [(rank, Box((i * rows, 0), (rows, 5))) for i, group in enumerate(groups) for rank in group]
        state.add(shape, [2, 4][t % 2], shards)
    assert state.written(plan_save(state.tensors, state.local(), 24, 0)) == planned_in_turn(state, 0)
