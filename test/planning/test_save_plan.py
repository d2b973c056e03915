"""Save plans, painted: every element once, from a local shard that has it, and every rank about as much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, intersect, whole
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.errors import UnsupportedValueError
from paddle_dist_ckpt.planning import save_plan
from paddle_dist_ckpt.planning.save_plan import GlobalTensors, HeldShards, SavePlan, plan_save
from test.planning.test_balance import lowest_maximum
from test.strategies import boxes_in, examples, paint, shapes, tilings

DIMENSIONS = 4
MEBI = 1 << 20


@dataclass(frozen=True)
class Shard:
    """A local shard of a rank."""

    tensor: int
    rank: int
    box: Box
    plain: bool = False
    addend: int = -1
    addends: int = 0


@dataclass
class State:
    """Global tensors and the shards that ranks have of them."""

    ranks: int
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    itemsizes: list[int] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)

    def add(self, shape: Sequence[int], itemsize: int, shards: Sequence[tuple[int, Box]], **more: Any) -> int:
        tensor = len(self.shapes)
        self.shapes.append(tuple(shape))
        self.itemsizes.append(itemsize)
        self.shards += [Shard(tensor, rank, box, **more) for rank, box in shards]
        return tensor

    @property
    def tensors(self) -> GlobalTensors:
        shapes = Boxes.of([whole(shape) for shape in self.shapes], DIMENSIONS).shape
        names, ndim = [f"tensor{i}" for i in range(len(shapes))], [len(shape) for shape in self.shapes]
        return GlobalTensors(names, np.array(self.itemsizes, np.int64), np.array(ndim, np.int64), shapes)

    def local(self) -> HeldShards:
        """The shards in columns, rank by rank; a shard's row is its number in the list, which leads back to it."""
        rows = sorted(range(len(self.shards)), key=lambda row: self.shards[row].rank)
        shards = [self.shards[row] for row in rows]
        names = ("tensor", "rank", "plain", "addend", "addends")
        columns_of = {name: np.array([getattr(s, name) for s in shards], np.int64) for name in names}
        return HeldShards(
            row=np.array(rows, np.int64), boxes=Boxes.of([s.box for s in shards], DIMENSIONS), **columns_of
        )

    def plan(self, coordinator: int = 0) -> SavePlan:
        return plan_save(self.tensors, self.local(), self.ranks, coordinator)

    def written(self, plan: SavePlan) -> list[tuple[int, int, int, Box]]:
        """What a plan writes: tensor, rank, local shard and box, without the padding."""
        found = []
        columns = (column.tolist() for column in (plan.tensor, plan.rank, self.local().row[plan.shard]))
        for t, rank, row, (offset, extent) in zip(*columns, plan.boxes.to_list(), strict=True):
            ndim = len(self.shapes[t])
            assert offset[ndim:] == (0,) * (DIMENSIONS - ndim)
            assert extent[ndim:] == (1,) * (DIMENSIONS - ndim)
            found.append((t, rank, row, Box(offset[:ndim], extent[:ndim])))
        return found

    def loads(self, plan: SavePlan) -> list[int]:
        loads = [0] * self.ranks
        for t, rank, _, box in self.written(plan):
            loads[rank] += box.size * self.itemsizes[t]
        return loads


def check(state: State, plan: SavePlan) -> None:
    """Every element is written once, by a rank that has it, from the local shard that the plan names."""
    written = state.written(plan)
    for t, shape in enumerate(state.shapes):
        assert (paint(shape, [box for u, _, _, box in written if u == t]) == 1).all()
    for t, rank, row, box in written:
        shard = state.shards[row]
        assert (shard.tensor, shard.rank) == (t, rank)
        assert intersect(box, shard.box) == box or (box == shard.box and not box.size)
    order = [(rank, -state.itemsizes[t], t, box.offset) for t, rank, _, box in written]
    assert order == sorted(order), "rows stand by rank and as the rank's files hold them"
    check_copies(state, plan)


def check_copies(state: State, plan: SavePlan) -> None:
    """Every other rank that has a shard of the same box is named once for each part of it that is written."""
    written = state.written(plan)
    copies = [state.shards[row] for row in state.local().row[plan.copies].tolist()]
    found = [(item, copy.rank) for item, copy in zip(plan.copied.tolist(), copies, strict=True)]
    expected = {
        (item, shard.rank)
        for item, (t, rank, row, _) in enumerate(written)
        for shard in state.shards
        if (shard.tensor, shard.box) == (t, state.shards[row].box) and shard.rank != rank
        if shard.box.size and not shard.plain and shard.addend < 0
    }
    assert sorted(found) == sorted(expected)
    for item, copy in zip(plan.copied.tolist(), copies, strict=True):
        assert (copy.tensor, copy.box) == (written[item][0], state.shards[written[item][2]].box)
    assert [copy.rank for copy in copies] == sorted(copy.rank for copy in copies)


def boxes_by_rank(state: State, plan: SavePlan) -> list[tuple[int, int, Box]]:
    return [(rank, t, box) for t, rank, _, box in state.written(plan)]


@st.composite
def states(draw: st.DrawFn, overlapping: bool = False) -> State:
    """Tensors as tilings whose boxes are each on some ranks; plain ones; ones of no elements; partial ones."""
    state = State(draw(st.integers(1, 5)))
    some_ranks = st.sets(st.integers(0, state.ranks - 1), min_size=1)
    for _ in range(draw(st.integers(0, 4))):
        shape, itemsize = draw(shapes(most=5)), draw(st.sampled_from([1, 2, 4, 8, 16]))
        if draw(st.integers(0, 3)) == 0:
            state.add(shape, itemsize, [(rank, whole(shape)) for rank in draw(some_ranks)], plain=True)
        elif not math.prod(shape):
            state.add(shape, itemsize, [(rank, whole(shape)) for rank in draw(some_ranks)])
        else:
            boxes = list(draw(tilings(shape)))
            if overlapping:
                boxes += [box for box in draw(st.lists(boxes_in(shape), max_size=3)) if box not in boxes]
            state.add(shape, itemsize, [(rank, box) for box in boxes for rank in draw(some_ranks)])
    state.shards = draw(st.permutations(state.shards))
    return state


@examples(25)
@given(states(), st.data())
def test_every_element_is_written_once_by_a_rank_that_has_it(state: State, data: st.DataObject) -> None:
    check(state, state.plan(data.draw(st.integers(0, state.ranks - 1))))


@examples(25)
@given(states(overlapping=True))
def test_overlapping_boxes_are_cut_so_that_every_element_is_written_once(state: State) -> None:
    check(state, state.plan())


@examples(25)
@given(states(overlapping=True), st.randoms(use_true_random=False))
def test_the_plan_is_a_function_of_what_the_ranks_have(state: State, random: Any) -> None:
    first, second = state.plan(), state.plan()
    assert state.written(first) == state.written(second)
    assert first.transfers == second.transfers
    shuffled = State(state.ranks, state.shapes, state.itemsizes, list(state.shards))
    random.shuffle(shuffled.shards)
    assert boxes_by_rank(shuffled, shuffled.plan()) == boxes_by_rank(state, first)


@examples(25)
@given(states(), st.data())
def test_gaps_are_named(state: State, data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1, most=5))
    boxes = list(data.draw(tilings(shape)))
    missing = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    t = state.add(shape, 4, [(0, box) for box in boxes])
    with pytest.raises(UnsupportedValueError) as caught:
        state.plan()
    message = str(caught.value)
    assert f"tensor{t}" in message
    assert message.count("tensor") == 2, "no other tensor is blamed ('their tensors' is in the first line)"
    named = [missing] if str(missing) in message else [b for b in all_boxes(shape) if f"region {b} of" in message]
    assert any(not (paint(shape, [box]) > paint(shape, [missing])).any() for box in named), message


def all_boxes(shape: tuple[int, ...]) -> list[Box]:
    """Every box of at least one element."""
    sides = [[(a, b - a) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    found = [Box((), ())]
    for side in sides:
        found = [Box((*box.offset, o), (*box.shape, e)) for box in found for o, e in side]
    return found


@pytest.mark.parametrize("box", [Box((2, 0), (3, 6)), Box((0, 5), (4, 2)), Box((-1, 0), (2, 6))])
def test_boxes_outside_are_named(box: Box) -> None:
    state = State(2)
    state.add((4, 6), 4, [(0, whole((4, 6))), (1, box)])
    with pytest.raises(UnsupportedValueError, match="tensor0") as caught:
        state.plan()
    assert str(box) in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    state = State(2)
    state.add((4,), 4, [(0, Box((0,), (2,)))])
    state.add((4,), 4, [(0, whole((4,)))])
    state.add((2, 2), 4, [(1, Box((0, 1), (2, 1)))])
    state.add((3,), 4, [])
    with pytest.raises(UnsupportedValueError) as caught:
        state.plan()
    message = str(caught.value)
    assert all(words in message for words in ("tensor0", "[2:4]", "tensor2", "[0:2,0:1]", "tensor3", "[0:3]"))
    assert "tensor1" not in message


def test_plain_tensors_are_the_coordinators_or_the_lowest_ranks() -> None:
    state = State(4)
    for holders in ([0, 1, 2, 3], [3, 1], [2]):
        state.add((5, 3), 4, [(rank, whole((5, 3))) for rank in holders], plain=True)
    assert [(t, rank) for t, rank, _, _ in sorted(state.written(state.plan(3)))] == [(0, 3), (1, 3), (2, 2)]
    assert [(t, rank) for t, rank, _, _ in sorted(state.written(state.plan(0)))] == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 32])
@pytest.mark.parametrize(
    "tensors",
    [
        [((16 << 20,), 4)],
        [((4096, 4096), 4)],
        [((32, 1024, 1024), 2)],
        [((1, 64 << 20), 1)],
        [((64 << 20, 1), 1)],
        [((7, 3, 1_000_003), 4)],
        [((1000, 17), 4)] * 1000,
        [((1024, 1024), 4), ((1024,), 4), ((), 8)] * 20,
        [((50_000, 2048), 2), *[((2048, 2048), 2), ((2048,), 4)] * 16],
    ],
    ids=["flat", "square", "deep", "one row", "one column", "odd", "many small", "mixed", "model"],
)
def test_what_all_ranks_have_is_divided_evenly(tensors: list[tuple[tuple[int, ...], int]], ranks: int) -> None:
    state = State(ranks)
    for shape, itemsize in tensors:
        state.add(shape, itemsize, [(rank, whole(shape)) for rank in range(ranks)])
    loads = state.loads(state.plan())
    assert sum(loads) == sum(math.prod(shape) * itemsize for shape, itemsize in tensors)
    assert sum(loads) >= 64 * MEBI
    assert max(loads) <= 1.05 * sum(loads) / ranks


@examples(30)
@given(st.data())
def test_crossing_replicas_are_divided_nearly_as_well_as_can_be(data: st.DataObject) -> None:
    state = State(data.draw(st.integers(2, 6)))
    fixed, sets = [0] * state.ranks, []
    for _ in range(data.draw(st.integers(1, 12))):
        members = sorted(data.draw(st.sets(st.integers(0, state.ranks - 1), min_size=1)))
        shape = (data.draw(st.integers(1, 64)), 1024, 1024)
        state.add(shape, 4, [(rank, whole(shape)) for rank in members])
        nbytes = math.prod(shape) * 4
        if len(members) == 1:
            fixed[members[0]] += nbytes
        else:
            sets.append((tuple(members), nbytes))
    assert max(state.loads(state.plan())) <= 1.05 * lowest_maximum(fixed, sets) + MEBI


def test_ranks_that_must_write_more_get_less_of_what_all_have() -> None:
    state = State(4)
    state.add((64, MEBI), 1, [(0, whole((64, MEBI)))])
    state.add((96, MEBI), 1, [(rank, whole((96, MEBI))) for rank in range(4)])
    state.add((8, MEBI), 1, [(rank, whole((8, MEBI))) for rank in range(4)], plain=True)
    loads = state.loads(state.plan(coordinator=1))
    assert loads[0] == 64 * MEBI
    assert max(loads[1:]) <= 1.05 * 104 * MEBI / 3


def test_large_boxes_are_cut_into_few_pieces_and_small_ones_are_not() -> None:
    state = State(8)
    for shape in [(8192, 8192), *[(64,)] * 100]:
        state.add(shape, 4, [(rank, whole(shape)) for rank in range(8)])
    written = state.written(state.plan())
    assert sum(t == 0 for t, *_ in written) == 8
    assert all(sum(u == t for u, *_ in written) == 1 for t in range(1, 101))


def test_of_overlapping_boxes_the_larger_stays_whole() -> None:
    state = State(2)
    state.add((10,), 4, [(0, Box((0,), (3,))), (1, Box((1,), (9,)))])
    assert boxes_by_rank(state, state.plan()) == [(0, 0, Box((0,), (1,))), (1, 0, Box((1,), (9,)))]


def test_a_rank_may_have_one_box_twice() -> None:
    state = State(2)
    state.add((1024, 1024), 4, [(0, whole((1024, 1024))), (0, whole((1024, 1024)))])
    state.add((64, MEBI), 1, [(rank, whole((64, MEBI))) for rank in (0, 0, 1)])
    plan = state.plan()
    check(state, plan)
    assert max(state.loads(plan)) <= 1.1 * sum(state.loads(plan)) / 2


@examples(25)
@given(st.data())
def test_every_writer_of_a_partial_tensor_gets_every_other_addend_once(data: st.DataObject) -> None:
    state = State(data.draw(st.integers(2, 6)))
    state.add((3,), 4, [(0, whole((3,)))])
    shape, count = data.draw(shapes(least=1)), data.draw(st.integers(2, min(3, state.ranks)))
    extra = st.lists(st.integers(0, count - 1), max_size=state.ranks - count)
    t = state.add(shape, 4, [])
    for box in data.draw(tilings(shape)):
        holders = data.draw(st.permutations(range(state.ranks)))
        addends = [*range(count), *data.draw(extra)]
        state.shards += [Shard(t, r, box, addend=a, addends=count) for r, a in zip(holders, addends, strict=False)]
    plan = state.plan()
    check(state, plan)
    expected = []
    for t, rank, row, box in state.written(plan):
        if t == 1:
            own = state.shards[row]
            others = {s.addend for s in state.shards if s.tensor == 1 and s.box == own.box} - {own.addend}
            expected += [(rank, row, box, addend) for addend in others]
    found = []
    numbers = state.local().row.tolist()
    for source, destination, box in plan.transfers:
        shard, row = state.shards[numbers[source]], numbers[destination]
        assert shard.tensor == 1
        assert intersect(shard.box, box) == box
        found.append((state.shards[row].rank, row, box, shard.addend))
    assert sorted(found) == sorted(expected)


def test_a_partial_tensor_that_lacks_an_addend_is_named() -> None:
    state = State(2)
    state.add((3,), 4, [(0, whole((3,)))])
    t = state.add((4,), 4, [])
    state.shards += [Shard(t, rank, whole((4,)), addend=addend, addends=3) for rank, addend in ((0, 0), (1, 2))]
    with pytest.raises(UnsupportedValueError, match=r"tensor1: .* 3 addends.*\[0, 2\]"):
        state.plan()


def test_a_tensor_without_elements_is_in_a_file() -> None:
    """Else whoever reads the files alone would not know of it."""
    state = State(3)
    state.add((4, 0), 8, [(rank, Box((rank, 0), (1, 0))) for rank in range(3)])
    state.add((6,), 4, [(rank, Box((2 * rank,), (2,))) for rank in range(3)])
    assert [(t, rank) for t, rank, _, _ in state.written(state.plan(1))] == [(1, 0), (0, 1), (1, 1), (1, 2)]


def test_nothing_makes_an_empty_plan() -> None:
    plan = State(3).plan()
    assert len(plan.tensor) == len(plan.rank) == 0
    assert plan.transfers == []


@pytest.mark.parametrize("most", [1, 40, 100])
def test_of_very_many_copies_some_are_left_out(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    state = State(16)
    for _ in range(5):
        state.add((8, 8), 4, [(rank, whole((8, 8))) for rank in range(16)])
    monkeypatch.setattr(save_plan, "_MOST_COPIES", most)
    plan = state.plan()
    pairs = set(zip(plan.copied.tolist(), state.local().rank[plan.copies].tolist(), strict=True))
    assert len(pairs) == len(plan.copied) <= max(most, 2 * 5)
    assert set(plan.copied.tolist()) == set(range(5)), "each has at least one that is compared"
    assert len({rank for _, rank in pairs}) > 1
