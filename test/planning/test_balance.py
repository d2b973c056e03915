"""Shares against the best that any division could do, and dealing against painting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.planning.balance import ReplicaSet, balanced_shares, deal
from test.strategies import examples, paint, shapes

MEBI = 1 << 20


def lowest_maximum(fixed: list[int], sets: list[tuple[tuple[int, ...], int]]) -> float:
    """The smallest possible load of the busiest rank, if bytes could be divided at will.

    By min-cut duality: of all groups of ranks, the mean of what no rank outside of the group has.
    """
    ranks = range(len(fixed))
    groups = itertools.chain.from_iterable(itertools.combinations(ranks, n) for n in range(1, len(fixed) + 1))
    return max(
        (sum(fixed[r] for r in group) + sum(n for members, n in sets if set(members) <= set(group))) / len(group)
        for group in groups
    )


def loads_of(fixed: list[int], sets: list[tuple[tuple[int, ...], int]]) -> list[int]:
    """The ranks' loads under the shares, which are checked to be whole divisions of the sets."""
    replica_sets = [ReplicaSet(np.array(members), nbytes) for members, nbytes in sets]
    shares = balanced_shares(np.array(fixed, np.int64), replica_sets)
    loads = list(fixed)
    for (members, nbytes), share in zip(sets, shares, strict=True):
        assert share.shape == (len(members),)
        assert share.min(initial=0) >= 0
        assert share.sum() == nbytes
        for rank, n in zip(members, share.tolist(), strict=True):
            loads[rank] += n
    return loads


@st.composite
def crossing_sets(draw: st.DrawFn) -> tuple[list[int], list[tuple[tuple[int, ...], int]]]:
    """Loads of up to seven ranks and replica sets that may cross in any way."""
    ranks = draw(st.integers(2, 7))
    fixed = draw(st.lists(st.sampled_from([0, 0, MEBI, 10 * MEBI, 100 * MEBI]), min_size=ranks, max_size=ranks))
    members = st.sets(st.integers(0, ranks - 1), min_size=2).map(lambda s: tuple(sorted(s)))
    different = draw(st.lists(members, max_size=6, unique=True))
    return fixed, [(m, draw(st.integers(1, 100 * MEBI))) for m in different]


@examples(25)
@given(crossing_sets())
def test_the_busiest_rank_is_close_to_the_best_possible(
    case: tuple[list[int], list[tuple[tuple[int, ...], int]]],
) -> None:
    fixed, sets = case
    assert max(loads_of(fixed, sets)) <= 1.01 * lowest_maximum(fixed, sets) + 8


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64, 1000])
def test_one_set_of_all_ranks_is_level(ranks: int) -> None:
    loads = loads_of([0] * ranks, [(tuple(range(ranks)), 10**9 + 7)])
    assert max(loads) - min(loads) <= 1


def test_water_flows_past_ranks_that_are_full() -> None:
    assert loads_of([100, 0, 0, 50], [((0, 1, 2, 3), 60)]) == [100, 30, 30, 50]
    assert loads_of([0, 0, 0], []) == [0, 0, 0]
    assert loads_of([5, 5], [((0, 1), 0)]) == [5, 5]


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_a_slope_flows_down_a_chain_of_neighbours(ranks: int) -> None:
    """Each set reaches two ranks only, so bytes must move on from set to set."""
    fixed = [(ranks - r) * MEBI for r in range(ranks)]
    sets = [((r, r + 1), 100 * MEBI) for r in range(ranks - 1)]
    runs = [(i, j) for i in range(ranks) for j in range(i + 1, ranks + 1)]  # of a chain only runs of ranks can be worst
    best = max((sum(fixed[i:j]) + sum(n for m, n in sets if i <= m[0] and m[1] < j)) / (j - i) for i, j in runs)
    assert max(loads_of(fixed, sets)) <= 1.03 * best


def test_data_parallel_and_tensor_parallel_groups_cross() -> None:
    """8 x 8 ranks: each row holds one set of boxes, each column another, all of them a third."""
    rows = [(tuple(range(8 * i, 8 * i + 8)), (i + 1) * 10 * MEBI) for i in range(8)]
    cols = [(tuple(range(i, 64, 8)), (8 - i) * 10 * MEBI) for i in range(8)]
    loads = loads_of([0] * 64, [*rows, *cols, (tuple(range(64)), 64 * MEBI)])
    assert max(loads) <= 1.05 * sum(loads) / 64


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Boxes with their item sizes, and shares of all their bytes for up to five members."""
    boxes = draw(st.lists(shapes(least=1, dimensions=3), min_size=1, max_size=4))
    scale = draw(st.sampled_from([1, 64, 4096]))
    shaped = [tuple(n * (scale if d == 0 else 1) for d, n in enumerate(shape)) for shape in boxes]
    itemsizes = [draw(st.sampled_from([1, 2, 16])) for _ in shaped]
    total = sum(math.prod(shape) * size for shape, size in zip(shaped, itemsizes, strict=True))
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
    return shaped, itemsizes, np.diff([0, *cuts, total]).tolist()


@examples(25)
@given(lines(), st.sampled_from([0, 1000, MEBI]))
def test_every_element_is_dealt_once_and_near_its_share(
    line: tuple[list[tuple[int, ...]], list[int], list[int]], tolerance: int
) -> None:
    shaped, itemsizes, shares = line
    nbytes = np.array([math.prod(shape) * size for shape, size in zip(shaped, itemsizes, strict=True)], np.int64)
    padded = Boxes.of([whole(shape) for shape in shaped], 4).shape
    dealt = deal(np.array(shares, np.int64), nbytes, padded, np.array(itemsizes, np.int64), tolerance)
    canvases = [np.zeros(shape, np.int64) for shape in shaped]
    got = [0] * len(shares)
    for item, member in zip(dealt.item.tolist(), dealt.member.tolist(), strict=True):
        canvases[item] += 1
        got[member] += int(nbytes[item])
    for item, member, box in dealt.pieces:
        assert box.size
        ndim = len(shaped[item])
        canvases[item] += paint(shaped[item], [Box(box.offset[:ndim], box.shape[:ndim])])
        got[member] += box.size * itemsizes[item]
    assert all((canvas == 1).all() for canvas in canvases)
    slack = max(tolerance, 64 << 10)
    assert all(abs(a - b) <= slack for a, b in zip(got, shares, strict=True))


def test_small_boxes_stay_whole_and_large_ones_are_cut_between_rows() -> None:
    nbytes = np.array([1000, 8 * MEBI, 1000])
    extents = np.array([(250, 1), (2048, 1024), (250, 1)])
    half = int(nbytes.sum()) // 2
    dealt = deal(np.array([half, half]), nbytes, extents, np.array([4, 4, 4]), 0)
    assert dealt.item.tolist() == [0, 2]
    assert dealt.member.tolist() == [0, 1]
    assert [(i, m) for i, m, _ in dealt.pieces] == [(1, 0), (1, 1)]
    assert all(box.shape[1] == 1024 for _, _, box in dealt.pieces)
