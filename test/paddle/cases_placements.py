"""Functions that test_placements.py sends to ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import LoadOptions, load_state_dict, save_state_dict
from test.paddle.layouts import Spread, part_of
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import (
    NUMPY_DTYPES,
    dist_tensor,
    from_local,
    local_array,
    mesh_of,
    paddle_tensor,
    placements_of,
    to_array,
)
from test.paddle.versions import FROM_LOCAL
from test.ranks.groups import group_of

REDUCTIONS = {
    "sum": (dist.ReduceType.kRedSum, lambda parts: parts.sum(0)),
    "avg": (dist.ReduceType.kRedAvg, lambda parts: parts.mean(0)),
    "max": (dist.ReduceType.kRedMax, lambda parts: parts.max(0)),
    "min": (dist.ReduceType.kRedMin, lambda parts: parts.min(0)),
}
CUT = NUMPY_DTYPES if FROM_LOCAL else ("float32", "float64")  # dtypes of partial tensors that can be cut as well


def addends(count: int, shape: tuple[int, ...]) -> Any:
    """What each of ``count`` ranks has of a partial tensor. Their sum is a multiple of ``count``."""
    parts = np.random.default_rng(5).integers(-8, 9, (count, *shape))
    parts[0] -= parts.sum(0) % count
    return parts


def save_partial(path: str, ranks: int, reduction: str, dtype: str) -> None:
    """Save a tensor that is partial over all ranks, and one that another mesh dimension cuts besides."""
    kind, _ = REDUCTIONS[reduction]
    state = {"whole": _partial(addends(ranks, (5, 6)), dtype, Spread(list(range(ranks)), (None,)), kind)}
    if ranks == 4 and dtype in CUT:
        state["cut"] = _partial(addends(2, (5, 6)), dtype, Spread([[0, 1], [2, 3]], (None, 1)), kind)
    save_state_dict(state, path, group_of(ranks))


def _partial(parts: Any, dtype: str, spread: Spread, kind: Any) -> Any:
    """A tensor that is partial over the first mesh dimension, each of whose places has one of ``parts``."""
    mesh = mesh_of(spread)
    place = int(np.argwhere(np.array(spread.mesh) == dist.get_rank())[0][0])
    local = part_of(parts[place], spread, dist.get_rank())
    assert local is not None
    placements = [dist.Partial(kind), *(dist.Shard(dim) for dim in spread.dims[1:])]
    tensor = paddle_tensor(np.ascontiguousarray(local).astype(NUMPY_DTYPES[dtype]))
    return from_local(tensor, parts[0].shape, mesh, placements)


def partial_elsewhere(path: str, ranks: int) -> list[Any]:
    """Save a tensor that is partial over the last two ranks, and load it into itself; returns this rank's part."""
    members = Spread([ranks - 2, ranks - 1], (None,))
    share = paddle.full([3, 4], float(dist.get_rank() + 1))
    tensor = from_local(share, [3, 4], mesh_of(members), [dist.Partial()])
    save_state_dict({"x": tensor}, path, group_of(ranks))
    load_state_dict({"x": tensor}, path, group_of(ranks))
    part: list[Any] = local_array(tensor).tolist() if dist.get_rank() in members.mesh else []
    return part


def load_partial(path: str, ranks: int, reduction: str) -> list[Any]:
    """Load a tensor of ones to twelve into a partial one; returns this rank's part."""
    kind, _ = REDUCTIONS[reduction]
    array = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    save_state_dict({"x": paddle.to_tensor(array)}, path, group_of(ranks))
    target = _partial(np.full((ranks, 3, 4), 9), "float32", Spread(list(range(ranks)), (None,)), kind)
    load_state_dict({"x": target}, path, group_of(ranks))
    part: list[Any] = local_array(target).tolist()
    return part


def save_and_load(path: str, ranks: int, source: Spread, destination: Spread, shape: tuple[int, ...]) -> bool:
    """Save a tensor in one place and load it in another; returns whether this rank's part is right."""
    array = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    save_state_dict({"x": dist_tensor(array, source)}, path, group_of(ranks))
    target = dist_tensor(np.zeros_like(array), destination)
    load_state_dict({"x": target}, path, group_of(ranks))
    expected = part_of(array, destination, dist.get_rank())
    return expected is None or np.array_equal(local_array(target), expected)


def save_where_it_is(path: str, ranks: int, spread: Spread) -> None:
    """Save a tensor; ranks that its mesh does not hold have its key all the same."""
    save_state_dict({"x": dist_tensor(np.arange(24, dtype=np.int64).reshape(8, 3), spread)}, path, group_of(ranks))


def save_in_shard_order(path: str, orders: tuple[int, int]) -> bool:
    """Save a tensor one dimension of which is cut by two mesh dimensions in an order of their own.

    Returns:
        Whether loading it again in that layout gives every rank its own part.
    """
    array = np.arange(8, dtype=np.float32)
    outer, inner = (0, 1) if orders == (0, 1) else (1, 0)
    rank = dist.get_rank()
    at = (rank // 2, rank % 2)
    start = 4 * at[outer] + 2 * at[inner]
    expected = array[start : start + 2]
    target = _co_sharded(np.zeros(2, np.float32), orders)
    save_state_dict({"x": _co_sharded(expected, orders)}, path, group_of(4))
    load_state_dict({"x": target}, path, group_of(4))
    return np.array_equal(local_array(target), expected)


def _co_sharded(local: Any, orders: tuple[int, int]) -> Any:
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
    placements = [dist.Shard(0, shard_order=order) for order in orders]
    return paddle.Tensor(paddle.to_tensor(local), dims=[8], process_mesh=mesh, placements=placements)


def save_what_paddle_cuts(path: str, shape: tuple[int, ...], spread: Spread) -> tuple[Any, Any]:
    """Save a tensor of 0, 1, 2, ... that Paddle itself has cut.

    Returns:
        What this rank has of it, and what these tests say it has by the placements that Paddle gives the tensor. Where
        several mesh dimensions are to cut one tensor dimension, Paddle 3.0 lets only the last of them do it.
    """
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    tensor = dist.shard_tensor(paddle.to_tensor(array), mesh_of(spread), placements_of(spread))
    save_state_dict({"x": tensor}, path, group_of(4))
    dims = tuple(next(filter(placement.is_shard, range(len(shape))), None) for placement in tensor.placements)
    return to_array(tensor._local_value()), part_of(array, Spread(spread.mesh, dims), dist.get_rank())


def save_resharded(path: str) -> Outcome:
    """Save and load what ``reshard`` returns; the result is whether all came back."""
    mesh = mesh_of(Spread([0, 1], (None,)))
    whole = dist_tensor(np.arange(6, dtype=np.float32), Spread([0, 1], (None,)))
    cut = dist.reshard(whole, mesh, [dist.Shard(0)])
    again = dist.reshard(cut, mesh, [dist.Replicate()])
    state = {"cut": cut, "again": again}
    before = [local_array(tensor).copy() for tensor in state.values()]
    save_state_dict(state, path, group_of(2))
    for tensor in state.values():
        tensor.scale_(0.0)
    load_state_dict(state, path, group_of(2))
    assert all(map(np.array_equal, map(local_array, state.values()), before))
    partial = dist.reshard(whole, mesh, [dist.Partial()])
    return outcome_of(lambda: save_state_dict({"partial": partial}, path, group_of(2)))


def save_large(path: str, ranks: int, tensors: int, nbytes: int) -> tuple[int, int]:
    """Save replicated DistTensors of ``nbytes`` each; returns what this rank wrote, and all ranks."""
    spread = Spread(list(range(ranks)), (None,))
    state = {f"layer{i}": dist_tensor(np.full(nbytes // 4, i, np.float32), spread) for i in range(tensors)}
    report = save_state_dict(state, path, group_of(ranks))
    return report.bytes_written, report.total_bytes


def save_large_partial(path: str, ranks: int, elements: int) -> None:
    """Save a partial tensor of 0, 1, 2, ..., of which every rank holds as much."""
    spread = Spread(list(range(ranks)), (None,))
    share = np.arange(elements, dtype=np.float64) / ranks
    tensor = from_local(paddle.to_tensor(share), [elements], mesh_of(spread), [dist.Partial()])
    save_state_dict({"x": tensor}, path, group_of(ranks))


def load_large(path: str, ranks: int, tensors: int, nbytes: int, exchange: Any) -> tuple[int, int, bool]:
    """Load what `save_large` has saved; returns the bytes read and received, and whether all is right."""
    spread = Spread(list(range(ranks)), (None,))
    state = {f"layer{i}": dist_tensor(np.full(nbytes // 4, -1, np.float32), spread) for i in range(tensors)}
    report = load_state_dict(state, path, group_of(ranks), options=LoadOptions(exchange=exchange))
    right = all((local_array(state[f"layer{i}"]) == i).all() for i in range(tensors))
    return report.bytes_read, report.bytes_received, right
