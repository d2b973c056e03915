"""Placements of DistTensors, on real ranks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import paddle.distributed as dist
import pytest

from paddle_dist_ckpt import UnsupportedValueError, load_merged_state_dict, verify
from paddle_dist_ckpt.core.tensors import Reduction
from paddle_dist_ckpt.paddle_adapter.placement import reduction_of
from test.paddle import cases_placements as cases
from test.paddle.layouts import Spread
from test.paddle.tensors import to_array
from test.paddle.versions import FROM_LOCAL, SHARD_ORDER, lacks
from test.ranks.pool import RankPool
from test.strategies import some

partial_of_16_bits = lacks(FROM_LOCAL, "makes no partial tensors of 16 bits on CPU")
two_cuts_of_one_dimension = lacks(FROM_LOCAL, "cuts no tensor dimension by two mesh dimensions")


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", *(pytest.param(name, marks=partial_of_16_bits) for name in ("bfloat16", "float16"))],
)
@pytest.mark.parametrize("ranks", some([2, 3, 4], 2))
@pytest.mark.parametrize("reduction", list(cases.REDUCTIONS))
def test_partial_is_reduced_when_saved(pool: RankPool, tmp_path: Path, reduction: str, ranks: int, dtype: str) -> None:
    pool.run(cases.save_partial, str(tmp_path), ranks, reduction, dtype, ranks=ranks, timeout=45)
    _, reduce = cases.REDUCTIONS[reduction]
    merged = load_merged_state_dict(tmp_path)
    for name, count in (("whole", ranks), ("cut", 2)):
        if name in merged:
            found = to_array(merged[name]).astype(np.float64)
            assert found.tolist() == reduce(cases.addends(count, (5, 6))).tolist()
    assert ("cut" in merged) == (ranks == 4 and dtype in cases.CUT)


def test_loading_into_a_partial_sum_gives_one_rank_the_value(pool: RankPool, tmp_path: Path) -> None:
    value = np.arange(1.0, 13).reshape(3, 4).tolist()
    zero = np.zeros((3, 4)).tolist()
    assert pool.run(cases.load_partial, str(tmp_path), 4, "sum", ranks=4) == [value, zero, zero, zero]


def test_a_partial_tensor_that_some_ranks_have_no_part_of(pool: RankPool, tmp_path: Path) -> None:
    sums = [[2.0 + 3.0] * 4] * 3
    zeros = [[0.0] * 4] * 3
    assert pool.run(cases.partial_elsewhere, str(tmp_path), 3, ranks=3) == [[], sums, zeros]
    assert to_array(load_merged_state_dict(tmp_path)["x"]).tolist() == sums


@pytest.mark.parametrize("reduction", ["avg", "max", "min"])
def test_loading_into_another_partial_gives_all_ranks_the_value(pool: RankPool, tmp_path: Path, reduction: str) -> None:
    value = np.arange(1.0, 13).reshape(3, 4).tolist()
    assert pool.run(cases.load_partial, str(tmp_path), 2, reduction, ranks=2) == [value, value]


MOVES = {
    "to_a_mesh_without_some_ranks": (Spread([0, 1, 2, 3], (0,)), Spread([1, 3], (0,))),
    "from_a_mesh_without_some_ranks": (Spread([2], (None,)), Spread([0, 1, 2, 3], (1,))),
    "between_meshes_that_share_no_rank": (Spread([3, 1], (1,)), Spread([0, 2], (0,))),
    "reversed": (Spread([0, 1, 2, 3], (0,)), Spread([3, 2, 1, 0], (0,))),
    "to_shards_without_elements": (Spread([0, 1], (0,)), Spread([0, 1, 2, 3], (1,))),
    "from_shards_without_elements": (Spread([0, 1, 2, 3], (1,)), Spread([[0, 2], [1, 3]], (0, None))),
    "two_mesh_dims_on_one_tensor_dim": (Spread([[0, 1], [2, 3]], (0, 0)), Spread([[3, 1], [2, 0]], (1, 0))),
    "three_mesh_dims": (Spread([[[0, 1], [2, 3]]], (None, 0, 1)), Spread([[[0], [1]], [[2], [3]]], (1, 0, None))),
}


@pytest.mark.parametrize(
    "move", [pytest.param(move, marks=[two_cuts_of_one_dimension] * move.startswith("two_mesh_dims")) for move in MOVES]
)
@pytest.mark.parametrize("shape", [(13, 3), (7, 2), (8, 5, 2)], ids=str)
def test_move(pool: RankPool, tmp_path: Path, move: str, shape: tuple[int, ...]) -> None:
    source, destination = MOVES[move]
    assert pool.run(cases.save_and_load, str(tmp_path), 4, source, destination, shape, ranks=4) == [True] * 4


def test_ranks_outside_the_mesh_write_nothing(pool: RankPool, tmp_path: Path) -> None:
    pool.run(cases.save_where_it_is, str(tmp_path), 4, Spread([1, 2], (0,)), ranks=4)
    writers = {int(path.name.partition("_")[0]) for path in tmp_path.glob("*.safetensors") if path.stat().st_size}
    assert writers <= {0, 1, 2}  # 0 is the coordinator, which always has a file
    assert load_merged_state_dict(tmp_path)["x"].numpy().tolist() == np.arange(24).reshape(8, 3).tolist()


@lacks(SHARD_ORDER, "has no order of several cuts of one dimension")
@pytest.mark.parametrize("orders", [(0, 1), (1, 0)], ids=str)
def test_shard_order(pool: RankPool, tmp_path: Path, orders: tuple[int, int]) -> None:
    assert pool.run(cases.save_in_shard_order, str(tmp_path), orders, ranks=4) == [True] * 4
    assert load_merged_state_dict(tmp_path)["x"].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("shape", "spread"),
    [
        ((13, 2), Spread([0, 1, 2, 3], (0,))),
        ((8, 4), Spread([[0, 1], [2, 3]], (0, 1))),
        pytest.param((8, 4), Spread([[0, 1], [2, 3]], (0, 0)), marks=two_cuts_of_one_dimension),
        ((8, 4), Spread([[3, 1], [2, 0]], (1, None))),
    ],
    ids=str,
)
def test_what_paddle_has_cut(pool: RankPool, tmp_path: Path, shape: tuple[int, ...], spread: Spread) -> None:
    for found, expected in pool.run(cases.save_what_paddle_cuts, str(tmp_path), shape, spread, ranks=4):
        assert found.tolist() == expected.tolist()
    assert load_merged_state_dict(tmp_path)["x"].numpy().ravel().tolist() == list(range(math.prod(shape)))


def test_what_reshard_returns(pool: RankPool, tmp_path: Path) -> None:
    """In Paddle 2.6 that does not tell how it is to be reduced, so partial tensors are refused there."""
    outcomes = pool.run(cases.save_resharded, str(tmp_path), ranks=2)
    assert {outcome.error for outcome in outcomes} == {None if FROM_LOCAL else "UnsupportedValueError"}
    merged = load_merged_state_dict(tmp_path, unique_id=0)
    assert merged["cut"].tolist() == merged["again"].tolist() == list(range(6))


@pytest.mark.parametrize("tensors", [1, 8])
def test_replicas_share_the_writing(pool: RankPool, tmp_path: Path, tensors: int) -> None:
    size = 32 << 20
    reports = pool.run(cases.save_large, str(tmp_path), 4, tensors, size // tensors, ranks=4)
    written = [mine for mine, _ in reports]
    assert {total for _, total in reports} == {size}
    assert sum(written) == size
    assert max(written) <= 1.05 * size / 4
    assert verify(tmp_path).ok


@pytest.mark.parametrize("tensors", [1, 8])
def test_replicas_share_the_reading(pool: RankPool, tmp_path: Path, tensors: int) -> None:
    size = 48 << 20
    pool.run(cases.save_large, str(tmp_path), 3, tensors, size // tensors, ranks=3)
    results = pool.run(cases.load_large, str(tmp_path), 4, tensors, size // tensors, "always", ranks=4)
    assert all(right for _, _, right in results)
    assert sum(read for read, _, _ in results) == size
    assert max(read for read, _, _ in results) <= 1.1 * size / 4
    assert [read + received for read, received, _ in results] == [size] * 4


def test_large_partial(pool: RankPool, tmp_path: Path) -> None:
    elements = 5 << 20  # 40 MiB, several of the chunks in which addends travel
    pool.run(cases.save_large_partial, str(tmp_path), 4, elements, ranks=4)
    assert np.array_equal(load_merged_state_dict(tmp_path)["x"].numpy(), np.arange(elements))


@pytest.mark.skipif(not hasattr(dist.Partial(), "reduce_type"), reason="the reductions look otherwise")
def test_partial_in_several_ways_is_refused() -> None:
    sums, largest = dist.Partial(dist.ReduceType.kRedSum), dist.Partial(dist.ReduceType.kRedMax)
    with pytest.raises(UnsupportedValueError, match=r"^w: partial with several reductions \(max, sum\)$"):
        reduction_of((2, 2), (0, 1), [sums, largest], "w")
    assert reduction_of((2, 3), (1, 2), [sums, sums], "w") == Reduction("sum", 5, 6)
    assert reduction_of((2, 3), (1, 2), [dist.Replicate(), sums], "w") == Reduction("sum", 2, 3)
