"""Copies of placements equal just what their texts equal, so they can stand for these."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from paddle_dist_ckpt.paddle_adapter import placement
from paddle_dist_ckpt.paddle_adapter.placement import COPIES_ARE_COMPARED, placement_copies, placement_texts
from test.paddle.tensors import from_local
from test.paddle.versions import FROM_LOCAL, lacks

MESH = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])


def spread(*placements: Any) -> Any:
    return from_local(paddle.ones([4, 4]), [8, 8], MESH, list(placements))


def some() -> list[list[Any]]:
    plain = [dist.Shard(0), dist.Shard(1), dist.Replicate(), dist.Partial(), dist.Partial(dist.ReduceType.kRedMax)]
    found = [[each, dist.Replicate()] for each in plain] + [[dist.Replicate(), dist.Shard(0)]]
    if hasattr(dist.Shard, "set_split_factor"):
        split = dist.Shard(0)
        split.set_split_factor(2)
        found.append([split, dist.Replicate()])
    with suppress(TypeError):  # in older versions a Shard has no order
        found.append([dist.Shard(0, shard_order=1), dist.Shard(0, shard_order=0)])
    return found


@lacks(FROM_LOCAL and COPIES_ARE_COMPARED, "has placements of which texts are compared")
def test_copies_equal_what_texts_equal() -> None:
    tensors = [spread(*placements) for placements in some()]
    compared = 0
    for tensor in tensors:
        copies = placement_copies(tensor)
        for other in tensors if copies is not None else ():
            assert (other.placements == copies) is (placement_texts(other) == placement_texts(tensor))
            compared += 1
    assert compared >= len(tensors) * 6


@lacks(hasattr(dist.Shard, "set_split_factor"), "has no split factors")
def test_where_placements_do_not_tell_a_split_their_texts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Paddle 3.1, where a tensor that is refused would be taken for one that is like it but for that."""
    monkeypatch.setattr(dist.Shard, "__ne__", lambda self, other: False)
    assert not placement._tells_splits()
    monkeypatch.setattr(placement, "COPIES_ARE_COMPARED", False)
    assert placement_copies(spread(dist.Shard(0), dist.Replicate())) is None


@lacks(FROM_LOCAL and COPIES_ARE_COMPARED, "has placements of which texts are compared")
def test_copies_outlive_the_tensor_and_do_not_change_with_it() -> None:
    shard = dist.Shard(1)
    tensor = spread(shard, dist.Replicate())
    copies = placement_copies(tensor)
    if hasattr(shard, "set_split_factor"):
        shard.set_split_factor(2)
        assert tensor.placements != copies
    del tensor, shard
    gc.collect()
    others = [spread(dist.Partial(), dist.Shard(0)) for _ in range(100)]
    assert copies == [dist.Shard(1), dist.Replicate()]
    assert others[0].placements != copies


def test_there_are_none_where_they_would_not_do() -> None:
    try:
        tensor = spread(dist.Shard(0, shard_order=1), dist.Shard(0, shard_order=0))
    except TypeError:
        pytest.skip("a Shard has no order")
    assert placement_copies(tensor) is None
