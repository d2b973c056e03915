"""Saves by a process that remembers notice whatever becomes of a tensor in place, also of a DistTensor."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_dist_ckpt import SaveOptions, UnsupportedValueError, load_merged_state_dict, read_metadata
from paddle_dist_ckpt.control import NoTransport, SoloHub
from paddle_dist_ckpt.control.ranks import Ranks
from paddle_dist_ckpt.paddle_adapter import PaddleAdapter
from paddle_dist_ckpt.paddle_adapter import identity as identity_module
from paddle_dist_ckpt.saving.save_memory import SaveMemory
from paddle_dist_ckpt.wiring import paddles, save_with
from test.paddle.tensors import from_local
from test.paddle.test_identity import identity_of
from test.paddle.versions import FROM_LOCAL, lacks

PAIR = dist.ProcessMesh([0, 1], dim_names=["x"])
ALONE = dist.ProcessMesh([0], dim_names=["x"])


def numbers(*shape: int) -> Any:
    return paddle.to_tensor(np.arange(np.prod(shape), dtype="float32").reshape(shape))


def spread(local: Any, shape: list[int], placement: Any, mesh: Any = PAIR) -> Any:
    """A DistTensor of this local value, made without communication."""
    return from_local(local, shape, mesh, [placement])


def save_by(memory: SaveMemory, state: dict[str, Any], folder: Path) -> None:
    ranks = Ranks(0, SoloHub(), NoTransport(), NoTransport(), {"save": memory})
    save_with(ranks, paddles(ranks, state), folder, None, False, SaveOptions())


# -- what may become of a DistTensor in place

DIST: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "other dimension": (
        lambda: spread(numbers(2, 4), [4, 4], dist.Shard(0)),
        lambda x: spread(x._local_value().reshape([4, 2]), [4, 4], dist.Shard(1)),
    ),
    "becomes partial": (
        lambda: spread(numbers(4, 4), [4, 4], dist.Replicate()),
        lambda x: spread(x._local_value(), [4, 4], dist.Partial()),
    ),
    "was partial": (
        lambda: spread(numbers(4, 4), [4, 4], dist.Partial()),
        lambda x: spread(x._local_value(), [4, 4], dist.Replicate()),
    ),
    "other ranks": (
        lambda: spread(numbers(2, 4), [4, 4], dist.Shard(0)),
        lambda x: spread(x._local_value(), [4, 4], dist.Shard(0), dist.ProcessMesh([1, 0], dim_names=["x"])),
    ),
    "no longer distributed": (
        lambda: spread(numbers(4, 4), [4, 4], dist.Replicate()),
        lambda x: x._local_value(),
    ),
    "now distributed": (
        lambda: numbers(4, 4),
        lambda x: spread(x[:2], [4, 4], dist.Shard(0)),
    ),
}


@lacks(FROM_LOCAL, "makes DistTensors of whole tensors only")
@pytest.mark.parametrize("how", ["data", "_share_underline_tensor_to"])
@pytest.mark.parametrize("change", DIST)
def test_another_distribution_of_the_same_memory_is_noticed(change: str, how: str) -> None:
    make, make_other = DIST[change]
    tensor = make()
    identity, place = identity_of([tensor]), tensor.data_ptr()
    assert identity.matches([tensor])
    other = make_other(tensor)
    if how == "data":
        tensor.data = other
    else:
        other._share_underline_tensor_to(tensor)
    assert tensor.data_ptr() == place, "or this test shows nothing"
    assert not identity.matches([tensor])


@lacks(FROM_LOCAL, "makes DistTensors of whole tensors only")
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("change", DIST)
def test_one_that_looks_like_one_before_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, change: str, copied: bool
) -> None:
    """Whether copies of placements are compared, or their texts."""
    if not copied:
        monkeypatch.setattr(identity_module, "placement_copies", lambda tensor: None)
    make, make_other = DIST[change]
    values = [make(), make_other(make())]
    expected = [PaddleAdapter(0).view(value, "/t").geometry for value in values]
    assert expected[0] != expected[1]
    adapter = PaddleAdapter(0)
    for _ in range(2):
        assert [adapter.view(value, "/t").geometry for value in values] == expected
    for value, geometry in zip(values, expected, strict=True):
        several = adapter.views([value, value])
        assert several is None or several.geometries == [geometry, geometry]
    several = adapter.views(values)
    assert several is None or several.geometries == expected


@lacks(FROM_LOCAL, "makes DistTensors of whole tensors only")
def test_another_local_shape_is_noticed() -> None:
    """Of the same layout: what would be read else lies beyond its memory."""
    tensor = spread(numbers(2, 4), [4, 4], dist.Shard(0))
    shorter = spread(tensor._local_value()[:1], [4, 4], dist.Shard(0))
    adapter = PaddleAdapter(0)
    geometry = adapter.view(tensor, "/t").geometry
    with pytest.raises(UnsupportedValueError, match=r"its local value has shape \[1, 4\], but by its placements it is"):
        adapter.view(shorter, "/t")
    assert geometry == adapter.view(tensor, "/t").geometry
    assert adapter.views([tensor, shorter]) is None
    identity, place = identity_of([tensor]), tensor.data_ptr()
    tensor.data = shorter
    assert tensor.data_ptr() == place, "or this test shows nothing"
    assert not identity.matches([tensor])


def test_plain_ones_that_differ_in_one_thing_are_not_taken_for_each_other() -> None:
    matrix = numbers(4, 4)
    values = [matrix, paddle.ones([4, 4], "int32"), matrix.t(), numbers(4, 4, 1), paddle.ones([4, 4], "bfloat16")]
    expected = [PaddleAdapter(0).view(value, "/t").geometry for value in values]
    assert all(one != other for one, other in itertools.combinations(expected, 2))
    adapter = PaddleAdapter(0)
    for order in (values, values[::-1], values):
        for value in order:
            assert adapter.view(value, "/t").geometry == expected[next(i for i, x in enumerate(values) if x is value)]


def test_those_that_are_alike_have_one_geometry() -> None:
    adapter = PaddleAdapter(0)
    values = [spread(numbers(4, 4), [4, 4], dist.Replicate()) for _ in range(2)]
    values += [numbers(3, 4), spread(numbers(4, 4), [4, 4], dist.Replicate()), numbers(3, 4)]
    found = [adapter.view(value, "/t").geometry for value in values]
    assert found[0] is found[1] is found[3]
    assert found[2] is found[4]


@lacks(FROM_LOCAL, "makes DistTensors of whole tensors only")
@pytest.mark.parametrize("at", [0, 255, 256, 599])
@pytest.mark.parametrize("change", ["other dimension", "other ranks"])
def test_one_of_many_that_are_alike_is_noticed(change: str, at: int) -> None:
    """Many are compared some hundreds at a time; only one of them changes, and stays where it is."""
    make, make_other = DIST[change]
    values = [make() for _ in range(600)]
    identity, place = identity_of(values), values[at].data_ptr()
    assert identity.matches(values)
    values[at].data = make_other(values[at])
    assert values[at].data_ptr() == place, "or this test shows nothing"
    assert not identity.matches(values)


@pytest.mark.parametrize("count", [255, 256, 512, 601])
def test_fewer_or_more_of_many_are_noticed(count: int) -> None:
    values = [paddle.ones([1]) for _ in range(601)]
    identity = identity_of(values[:600])
    assert identity.matches(values[:600])
    assert not identity.matches(values[:count])


def test_a_dist_tensor_that_is_updated_in_place_is_the_same() -> None:
    layer = paddle.nn.Linear(4, 4)
    for name, parameter in list(layer._parameters.items()):
        layer._parameters[name] = dist.shard_tensor(parameter, ALONE, [dist.Replicate()])
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    values = layer.parameters()
    assert all(value.is_dist() for value in values)
    identity = identity_of(values)
    inputs = dist.shard_tensor(paddle.ones([2, 4]), ALONE, [dist.Replicate()])
    before = values[0]._local_value().numpy().copy()
    layer(inputs).sum().backward()
    optimizer.step()
    assert not np.array_equal(values[0]._local_value().numpy(), before)
    assert identity.matches(values)


def test_what_is_remembered_outlives_the_tensor() -> None:
    """What Paddle gives of a DistTensor lies within it, and is overwritten by what comes after it."""
    mesh = dist.ProcessMesh([[3, 0], [2, 1]], dim_names=["first", "second"])
    tensor = dist.shard_tensor(numbers(4, 4), mesh, [dist.Shard(1), dist.Replicate()])
    attributes = identity_of([tensor]).attributes
    del tensor
    gc.collect()
    others = [dist.shard_tensor(numbers(4, 4), PAIR, [dist.Shard(0)]) for _ in range(100)]
    assert [each.process_ids for each in attributes["mesh"]] == [[3, 0, 2, 1]]
    assert attributes["placements"] == [["Shard(dim=1)", "Replicate()"]]
    assert all(each.is_dist() for each in others)


# -- end to end


def share_memory(tensor: Any, other: Any) -> None:
    """``other`` must live meanwhile: what get_tensor() returns lies within it."""
    tensor.get_tensor()._share_data_with(other.get_tensor())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: None,
    "set_value": lambda x: x.set_value(paddle.ones([3, 3])),
    "add_": lambda x: x.add_(paddle.ones([3, 3])),
    "an element": lambda x: x.__setitem__((1, 2), -5.0),
    "data transposed": lambda x: setattr(x, "data", x.T),
    "data reshaped": lambda x: setattr(x, "data", x.reshape([9])),
    "data of a part": lambda x: setattr(x, "data", x[:2]),
    "data of columns": lambda x: setattr(x, "data", x[:, :2]),
    "data of another dtype": lambda x: setattr(x, "data", x.view("int32")),
    "data of its own": lambda x: setattr(x, "data", x),
    "other data": lambda x: setattr(x, "data", paddle.full([2, 5], 3.0)),
    "tensor set": lambda x: x.get_tensor().set(np.full((1, 9), 2.0, "float32"), paddle.CPUPlace()),
    "dimensions set": lambda x: x.get_tensor()._set_dims([9, 1]),
    "tensor shared": lambda x: share_memory(x, x.T),
    "buffer shared": lambda x: paddle.full([3, 3], 7.0)._share_buffer_to(x),
    "impl transposed": lambda x: x.T._share_underline_tensor_to(x),
    "reshape_": lambda x: x.reshape_([1, 9]),
    "flatten_": lambda x: x.flatten_(),
    "cast_": lambda x: x.cast_("float64"),
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_([1, 0]),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "set_": lambda x: x.set_(x, [2, 2], [3, 1], 0),
    "resize_": lambda x: x.resize_([2, 4]),
}


@pytest.mark.parametrize(
    "change",
    [
        *(name for name in CHANGES if name not in ("set_", "resize_")),
        *(
            pytest.param(name, marks=lacks(hasattr(paddle.Tensor, name), f"has no Tensor.{name}"))
            for name in ("set_", "resize_")
        ),
    ],
)
def test_the_second_save_has_what_is_there(tmp_path: Path, change: str) -> None:
    memory = SaveMemory()
    tensor, other = numbers(3, 3), numbers(2, 2)
    for _ in range(3):
        save_by(memory, {"x": tensor, "y": other}, tmp_path)
        found = load_merged_state_dict(tmp_path)
        assert (found["x"].shape, found["x"].dtype) == (tensor.shape, tensor.dtype)
        assert found["x"].numpy().tobytes() == np.ascontiguousarray(tensor.numpy()).tobytes()
        assert np.array_equal(found["y"].numpy(), np.arange(4, dtype="float32").reshape(2, 2))
        if change != "set_value" or tensor.shape == [3, 3]:
            try:
                CHANGES[change](tensor)
            except ValueError:  # cannot be done twice
                return


def test_data_that_come_to_lie_where_others_were(tmp_path: Path) -> None:
    """Memory that was freed is given out again: the same address and version, another tensor."""
    memory, tensor = SaveMemory(), paddle.full([40, 60], 0.0)
    again = 0
    for i, shape in enumerate([(40, 60), (60, 40), (2400,), (30, 80), (40, 60), (20, 120), (60, 40), (120, 20)]):
        place = tensor.data_ptr()
        tensor.data = paddle.zeros([1])
        gc.collect()
        tensor.data = paddle.full(list(shape), float(i))
        again += tensor.data_ptr() == place
        save_by(memory, {"x": tensor}, tmp_path)
        found = load_merged_state_dict(tmp_path)["x"]
        assert found.shape == list(shape)
        assert (found.numpy() == i).all()
    if not again:
        pytest.skip("the allocator gave no memory out again")


def test_another_tensor_at_the_same_key_and_place(tmp_path: Path) -> None:
    """The old object is gone, and the new one may well have its id and its memory."""
    memory = SaveMemory()
    for i in range(20):
        tensor = paddle.full([4, 6] if i % 2 else [6, 4], float(i))
        save_by(memory, {"x": tensor}, tmp_path)
        found = load_merged_state_dict(tmp_path)["x"]
        assert found.shape == tensor.shape
        assert (found.numpy() == i).all()
        del tensor


def test_names_are_those_of_now(tmp_path: Path) -> None:
    memory, tensor = SaveMemory(), numbers(2, 2)
    for name in ("first", "second", "first"):
        tensor.name = name
        save_by(memory, {"x": tensor}, tmp_path)
        assert read_metadata(tmp_path).variable_names == {"x": name}


def test_a_tensor_that_cannot_be_saved_any_more_is_refused(tmp_path: Path) -> None:
    memory, tensor = SaveMemory(), paddle.create_parameter([2, 2], "float32")
    save_by(memory, {"x": tensor}, tmp_path)
    tensor.is_distributed = True
    with pytest.raises(UnsupportedValueError, match="is_distributed"):
        save_by(memory, {"x": tensor}, tmp_path)


def test_a_tensor_without_memory_is_refused(tmp_path: Path) -> None:
    memory, tensor = SaveMemory(), numbers(2, 2)
    save_by(memory, {"x": tensor}, tmp_path)
    tensor._clear_data()
    with pytest.raises(UnsupportedValueError):
        save_by(memory, {"x": tensor}, tmp_path)


def test_a_memory_keeps_no_tensor_alive_and_forgets_none_too_early(tmp_path: Path) -> None:
    memory, state = SaveMemory(), {f"t{i}": numbers(3, i + 1) for i in range(10)}
    state["d"] = spread(numbers(4, 4), [4, 4], dist.Replicate(), ALONE)
    save_by(memory, state, tmp_path)
    watched = {key: weakref.ref(value) for key, value in state.items()}
    del state["t3"]
    gc.collect()
    assert [key for key, reference in watched.items() if reference() is None] == ["t3"]
    save_by(memory, state, tmp_path)
    assert set(load_merged_state_dict(tmp_path)) == set(state)
    state.clear()
    gc.collect()
    assert not any(reference() for reference in watched.values())


def test_tensors_and_arrays_together(tmp_path: Path) -> None:
    """An array cannot be referenced weakly, so then nothing is recognised, and all is saved rightly nevertheless."""
    memory, array, tensor = SaveMemory(), np.zeros(5), numbers(2, 2)
    for i in range(3):
        array += i
        tensor.set_value(paddle.full([2, 2], float(i)))
        save_by(memory, {"a": array, "t": tensor}, tmp_path)
        assert not memory.known
        found = load_merged_state_dict(tmp_path)
        assert np.array_equal(found["a"], array)
        assert (found["t"].numpy() == i).all()
