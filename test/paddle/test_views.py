"""Tensors that are looked at together are seen as they are one by one; what cannot be seen so is left to that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_dist_ckpt.core.local_tensors import LocalTensors
from paddle_dist_ckpt.paddle_adapter import PaddleAdapter
from test.paddle.tensors import from_local
from test.paddle.versions import FROM_LOCAL, KEPT_DTYPES, lacks

pytestmark = [
    lacks(FROM_LOCAL, "makes DistTensors of whole tensors only"),
    lacks(KEPT_DTYPES, "has its tensors looked at one by one"),
]

PAIR = dist.ProcessMesh([0, 1], dim_names=["x"])
ALONE = dist.ProcessMesh([0], dim_names=["x"])


def spread(placement: Any, mesh: Any = PAIR, dtype: str = "float32", shape: tuple[int, ...] = (4, 4)) -> Any:
    """A DistTensor of these global and local shapes, whatever its placement, made without communication."""
    local = [2, 4] if placement == dist.Shard(0) else [4, 2] if placement == dist.Shard(1) else [4, 4]
    return from_local(paddle.ones(local, dtype), list(shape), mesh, [placement])


KINDS: dict[str, Callable[[], Any]] = {
    "rows": lambda: spread(dist.Shard(0)),
    "columns": lambda: spread(dist.Shard(1)),
    "everywhere": lambda: spread(dist.Replicate(), ALONE),
    "other dtype": lambda: spread(dist.Shard(0), dtype="bfloat16"),
    "plain": lambda: paddle.ones([4, 4]),
    "parameter": lambda: paddle.create_parameter([4, 4], "float32"),
    "other shape": lambda: paddle.ones([5]),
    "int": lambda: paddle.ones([4, 4], "int32"),
    "scalar": lambda: paddle.to_tensor(1.0),
    "of other ranks": lambda: spread(dist.Replicate(), dist.ProcessMesh([3], dim_names=["x"]), shape=(4, 6)),
}


def test_all_that_one_by_one_is_seen() -> None:
    adapter = PaddleAdapter(0)
    adapter.view(KINDS["plain"](), "/t")
    for make in KINDS.values():
        adapter.view(make(), "/t")
    values = [make() for make in KINDS.values() for _ in range(3)][::-1]
    values[1].name = "mine"
    views = adapter.views(values)
    assert views is not None
    found = [adapter.view(value, "/t") for value in values]
    assert all(one is each.geometry for one, each in zip(views.geometries, found, strict=True))
    assert list(views.addresses) == [address for each in found for address in each.addresses]
    assert list(views.names) == [each.name for each in found]
    assert all(one is each for one, each in zip(views.owners, values, strict=True))
    identity = adapter.identity(values, views.addresses)
    assert identity is not None
    assert identity.matches(values)


def marked(value: Any) -> Any:
    value.is_distributed = True
    return value


def offloaded(value: Any) -> Any:
    value.master_weight, value.unslice = paddle.ones([4, 4]), True
    return value


def emptied(value: Any) -> Any:
    value._clear_data()
    return value


def transposed_local() -> Any:
    """Of the same shape and local shape as others, not contiguous."""
    return from_local(paddle.ones([4, 2]).t(), [4, 4], PAIR, [dist.Shard(0)])


ODD: dict[str, Callable[[], Any]] = {
    "an array": lambda: np.ones((4, 4), "float32"),
    "a value": lambda: 1,
    "unseen shape": lambda: paddle.ones([4, 5]),
    "unseen dtype": lambda: paddle.ones([4, 4], "int8"),
    "transposed": lambda: paddle.ones([4, 4]).t(),
    "transposed local value": transposed_local,
    "partial": lambda: spread(dist.Partial(), ALONE),
    "other mesh": lambda: spread(dist.Shard(0), dist.ProcessMesh([1, 0], dim_names=["x"])),
    "other dimension of a mesh": lambda: from_local(
        paddle.ones([2, 4]),
        [4, 4],
        dist.ProcessMesh([[0], [1]], dim_names=["x", "y"]),
        [dist.Shard(0), dist.Replicate()],
    ),
    "marked": lambda: marked(paddle.create_parameter([4, 4], "float32")),
    "offloaded": lambda: offloaded(paddle.create_parameter([4, 4], "float32")),
    "sparse": lambda: paddle.ones([4, 4]).to_sparse_coo(2),
    "no memory": lambda: emptied(paddle.ones([4, 4])),
    "distributed without memory": lambda: emptied(spread(dist.Shard(0))),
    "no elements": lambda: paddle.ones([0, 4]),
}


@pytest.mark.parametrize("at", [0, 7])
@pytest.mark.parametrize("odd", ODD)
def test_one_that_is_like_none_is_not_taken_for_another(odd: str, at: int) -> None:
    adapter = PaddleAdapter(0)
    for make in KINDS.values():
        adapter.view(make(), "/t")
    values = [make() for make in KINDS.values()]
    assert adapter.views(values) is not None
    values[at] = ODD[odd]()
    assert adapter.views(values) is None


def test_the_last_that_looked_so_is_what_others_are_compared_with() -> None:
    """Two that differ in their meshes alone look the same: where they mix, tensors are looked at one by one."""
    adapter, other = PaddleAdapter(0), dist.ProcessMesh([1, 0], dim_names=["x"])
    first, second = (adapter.view(spread(dist.Shard(0), mesh), "/t") for mesh in (PAIR, other))
    assert first.geometry != second.geometry
    assert adapter.views([spread(dist.Shard(0)), spread(dist.Shard(0), other)]) is None
    views = adapter.views([spread(dist.Shard(0), other)])
    assert views is not None
    assert views.geometries[0] is second.geometry


class Counting(PaddleAdapter):
    """Counts the tensors that are looked at one by one."""

    alone = 0

    def view(self, value: Any, path: str) -> Any:
        self.alone += 1
        return super().view(value, path)


def test_many_are_looked_at_together() -> None:
    values = [KINDS[kind]() for _ in range(500) for kind in ("rows", "columns", "plain")]
    values[900] = paddle.ones([4, 4]).to_sparse_coo(2)
    paths = [f"/t{i}" for i in range(len(values))]
    adapter, tensors = Counting(0), LocalTensors()
    problems = tensors.look_at(paths, values, adapter)
    assert list(problems) == ["/t900"]
    assert problems["/t900"].startswith("t900: sparse")
    assert adapter.alone < 600, "those of the first batch, and of the one with the sparse tensor"
    expected, rest = LocalTensors(), [i for i in range(len(values)) if i != 900]
    for i in rest:
        expected.add(paths[i], adapter.view(values[i], paths[i]))
    for name in ("paths", "names", "geometries", "geometry", "addresses"):
        assert getattr(tensors, name) == getattr(expected, name), name
    assert all(one is values[i] for one, i in zip(tensors.owners, rest, strict=True))
