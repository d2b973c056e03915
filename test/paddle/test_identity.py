"""Tensors are recognised while they are the same ones in the same memory, and never otherwise."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_dist_ckpt.core.tensors import Identity
from paddle_dist_ckpt.paddle_adapter import PaddleAdapter
from test.paddle.tensors import from_local


def tensors() -> list[Any]:
    mesh = dist.ProcessMesh([0], dim_names=["x"])
    plain = [paddle.arange(12, dtype="float32").reshape([3, 4]) for _ in range(2)]
    return [*plain, from_local(paddle.ones([4, 4]), [4, 4], mesh, [dist.Shard(0)])]


def identity_of(values: list[Any]) -> Identity:
    adapter = PaddleAdapter(0)
    addresses = [address for value in values for address in adapter.view(value, "/t").addresses]
    found = adapter.identity(values, addresses)
    assert found is not None
    return found


def test_untouched_and_updated_tensors_are_the_same() -> None:
    layer = paddle.nn.Linear(4, 4)
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=layer.parameters())
    layer(paddle.ones([2, 4])).sum().backward()
    optimizer.step()
    values = [
        *tensors(),
        *layer.parameters(),
        *(v for v in optimizer.state_dict().values() if isinstance(v, paddle.Tensor)),
    ]
    identity = identity_of(values)
    assert identity.matches(values)
    before = values[0].data_ptr()
    layer(paddle.ones([2, 4])).sum().backward()
    optimizer.step()
    values[0].set_value(paddle.zeros([3, 4]))
    assert identity.matches(values) is (values[0].data_ptr() == before)


CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "another object": lambda t: t.__setitem__(0, t[0].clone()),
    "another order": lambda t: t.reverse(),
    "one more": lambda t: t.append(paddle.ones([1])),
    "one less": lambda t: t.pop(),
    "reshape_": lambda t: t[0].reshape_([4, 3]),
    "reshape_ of a DistTensor": lambda t: t[2].reshape_([2, 8]),
    "squeeze_": lambda t: t[1].unsqueeze_(0),
    "cast_": lambda t: t[0].cast_("int32"),
    "t_": lambda t: t[0].t_(),
    "data transposed": lambda t: setattr(t[2], "data", t[2].t()) or setattr(t[0], "data", t[0].t()),
    "data of another shape": lambda t: setattr(t[0], "data", t[0].reshape([4, 3])),
    "data of another dtype": lambda t: setattr(t[0], "data", t[0].view("int32")),
    "data of fewer elements": lambda t: setattr(t[0], "data", t[0][:1]),
    "tensor set to another shape": lambda t: t[0].get_tensor().set(np.ones((2, 6), "float32"), paddle.CPUPlace()),
    "tensor set to another dtype": lambda t: t[0].get_tensor().set(np.ones((3, 4), "int32"), paddle.CPUPlace()),
    "name": lambda t: setattr(t[0], "name", "new"),
    "no memory any more": lambda t: t[0]._clear_data(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_a_tensor_is_noticed(change: str) -> None:
    values = tensors()
    identity = identity_of(values)
    CHANGES[change](values)
    assert not identity.matches(values)


def test_a_weight_that_is_kept_beside_a_parameter_is_noticed() -> None:
    parameter = paddle.create_parameter([3, 4], "float32")
    identity = identity_of([parameter])
    assert identity.matches([parameter])
    parameter.unslice, parameter.master_weight = True, paddle.ones([3, 4])  # as group sharding does
    assert not identity.matches([parameter])


def test_it_keeps_no_tensor_alive() -> None:
    values = tensors()
    identity = identity_of(values)
    watched = [weakref.ref(value) for value in values]
    values = tensors()
    gc.collect()
    assert not any(reference() for reference in watched)
    assert not identity.matches(values)


def test_arrays_are_not_recognised() -> None:
    assert PaddleAdapter(0).identity([np.ones(3)], [0]) is None


def test_other_strides_at_the_same_place_are_noticed() -> None:
    base = paddle.arange(16, dtype="float32")
    value = paddle.as_strided(base, [2, 2], [4, 1])
    identity = identity_of([value])
    assert identity.matches([value])
    value.data = paddle.as_strided(base, [2, 2], [3, 1])
    assert (value.data_ptr(), value.shape, value.is_contiguous()) == (base.data_ptr(), [2, 2], False)
    assert not identity.matches([value])


def test_a_partial_tensor_is_not_taken_for_a_whole_one_that_looks_like_it() -> None:
    mesh, adapter = dist.ProcessMesh([0], dim_names=["x"]), PaddleAdapter(0)
    reductions = [
        adapter.view(from_local(paddle.ones([4, 4]), [4, 4], mesh, [placement]), "/t").geometry.reduction
        for placement in (dist.Replicate(), dist.Partial(), dist.Replicate())
    ]
    assert [reduction and reduction.operation for reduction in reductions] == [None, "sum", None]
