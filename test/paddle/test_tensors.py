"""Paddle's tensors of every kind, in a process that works alone."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from safetensors.numpy import save_file

from paddle_dist_ckpt import (
    CheckpointNotFoundError,
    LoadOptions,
    SaveOptions,
    StateDictMismatchError,
    UnsupportedValueError,
    load_merged_state_dict,
    load_state_dict,
    read_metadata,
    save_state_dict,
)
from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import dtype_named
from paddle_dist_ckpt.core.shards import Kind
from paddle_dist_ckpt.core.tensors import Geometry, LocalShard
from paddle_dist_ckpt.paddle_adapter import PaddleAdapter
from test.paddle.layouts import Spread
from test.paddle.tensors import NUMPY_DTYPES, dist_tensor, local_array, paddle_tensor, to_array
from test.paddle.versions import FROM_LOCAL, SHARD_ORDER, lacks
from test.strategies import some


def random_array(dtype: str, shape: tuple[int, ...] = (3, 5)) -> Any:
    numbers = np.random.default_rng(7).standard_normal(shape) * 4
    return np.asarray(numbers).astype(NUMPY_DTYPES[dtype])


def assert_same(found: Any, expected: Any) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_more_dimensions_than_paddle_has(tmp_path: Path) -> None:
    array = np.arange(2**9, dtype=np.float32)
    save_file({"nine": array.reshape((2,) * 9), "ten": array.reshape((2,) * 9 + (1,))}, tmp_path / "model.safetensors")
    assert load_merged_state_dict(tmp_path, keys=["nine"])["nine"].shape == [2] * 9
    with pytest.raises(UnsupportedValueError, match="^ten: Paddle has no tensors of more than 9 dimensions$"):
        load_merged_state_dict(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    some(itertools.product(NUMPY_DTYPES, [(3, 5), (), (0, 4), (1,)]), 2 * len(NUMPY_DTYPES)),
    ids=str,
)
def test_dtype(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = random_array(dtype, shape)
    save_state_dict({"x": paddle_tensor(array).reshape(list(shape))}, tmp_path)
    target = paddle.zeros(list(shape), "float32").astype(dtype) if shape else paddle_tensor(np.zeros_like(array))
    place = target.data_ptr()
    load_state_dict({"x": target}, tmp_path)
    assert target.data_ptr() == place
    if 0 in shape:
        assert (tuple(target.shape), str(target.dtype)) == (shape, f"paddle.{dtype}")
    else:
        assert_same(to_array(target), array)
    merged = load_merged_state_dict(tmp_path)["x"]
    assert (merged.dtype, tuple(merged.shape)) == (target.dtype, shape)
    if 0 not in shape:
        assert_same(to_array(merged), array)


VIEWS = {
    "transposed": lambda x: x.T,
    "slice": lambda x: x[1:3],
    "columns": lambda x: x[:, 2:5],
    "strided": lambda x: x[::2, 1::3],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_saved_as_they_look(tmp_path: Path, view: str) -> None:
    array = np.arange(48, dtype=np.float32).reshape(6, 8)
    tensor = VIEWS[view](paddle.to_tensor(array))
    expected = tensor.numpy()
    save_state_dict({"x": tensor}, tmp_path)
    assert_same(load_merged_state_dict(tmp_path)["x"].numpy(), expected)


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_filled_and_nothing_around_them(tmp_path: Path, view: str) -> None:
    whole = paddle.zeros([6, 8])
    target = VIEWS[view](whole)
    if target.data_ptr() not in range(whole.data_ptr(), whole.data_ptr() + 6 * 8 * 4):
        pytest.skip("this version of Paddle copies here")
    ones = paddle.ones(target.shape)
    save_state_dict({"x": ones}, tmp_path)
    load_state_dict({"x": target}, tmp_path)
    expected = np.zeros((6, 8), np.float32)
    VIEWS[view](expected)[...] = 1
    assert_same(whole.numpy(), expected)


@pytest.mark.parametrize("stop_gradient", [True, False])
def test_stop_gradient_is_kept(tmp_path: Path, stop_gradient: bool) -> None:
    save_state_dict({"x": paddle.full([4], 3.0)}, tmp_path)
    target = paddle.zeros([4])
    target.stop_gradient = stop_gradient
    load_state_dict({"x": target}, tmp_path)
    assert target.stop_gradient == stop_gradient
    assert target.tolist() == [3.0] * 4


def test_a_gradient_of_what_was_there_before_is_refused(tmp_path: Path) -> None:
    """It would silently be made of what was loaded meanwhile. What was not loaded is still there."""
    filled, other = (paddle.create_parameter([2], "float32") for _ in range(2))
    save_state_dict({"filled": paddle.ones([2])}, tmp_path)
    for case in ("alone", "among others", "not at all"):
        product, sum_of_other = (filled * filled).sum(), (other * other).sum()
        state: dict[str, Any] = {"filled": filled} if case != "not at all" else {}
        if case == "among others":
            state |= {"other": other, "array": np.zeros(2)}
        load_state_dict(state, tmp_path, options=LoadOptions(strict=False))
        sum_of_other.backward()
        if case == "not at all":
            product.backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()


def test_parameters_stay_parameters(tmp_path: Path) -> None:
    layer, other = paddle.nn.Linear(3, 5), paddle.nn.Linear(3, 5)
    save_state_dict(layer.state_dict(), tmp_path)
    weight = other.weight
    load_state_dict(other.state_dict(), tmp_path)
    assert other.weight is weight
    assert isinstance(weight, paddle.base.framework.EagerParamBase)
    assert weight.trainable
    assert not weight.stop_gradient
    assert_same(weight.numpy(), layer.weight.numpy())
    assert_same(other.bias.numpy(), layer.bias.numpy())
    (weight * 2).sum().backward()
    assert weight.grad.tolist() == [[2.0] * 5] * 3


def test_mesh_of_one_process(tmp_path: Path) -> None:
    array = random_array("float32", (6, 4))
    save_state_dict({"x": dist_tensor(array, Spread([[0]], (0, None)))}, tmp_path)
    assert_same(load_merged_state_dict(tmp_path)["x"].numpy(), array)
    target = dist_tensor(np.zeros_like(array), Spread([0], (1,)))
    load_state_dict({"x": target}, tmp_path)
    assert_same(local_array(target), array)
    plain = paddle.zeros([6, 4])
    load_state_dict({"x": plain}, tmp_path)
    assert_same(plain.numpy(), array)


def test_mesh_of_another_process_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match="x"):
        save_state_dict({"x": dist_tensor(random_array("float32"), Spread([1], (0,)))}, tmp_path)
    assert not list(tmp_path.glob("*.metadata"))


def test_loading_into_a_part_reads_only_that(tmp_path: Path) -> None:
    saved = {"a": paddle.ones([4]), "b": paddle.full([4], 2.0), "step": 3}
    save_state_dict(saved, tmp_path)
    target = {"b": paddle.zeros([4])}
    report = load_state_dict(target, tmp_path)
    assert target["b"].tolist() == [2.0] * 4
    assert sorted(report.unused_keys) == ["a", "step"]
    assert report.bytes_read == 16


def test_cast(tmp_path: Path) -> None:
    save_state_dict({"x": paddle.full([4], 1.5)}, tmp_path)
    target = {"x": paddle.zeros([4], "bfloat16")}
    with pytest.raises(StateDictMismatchError, match="x.*dtype|x.*float32"):
        load_state_dict(target, tmp_path)
    assert target["x"].astype("float32").tolist() == [0.0] * 4
    load_state_dict(target, tmp_path, options=LoadOptions(cast=True))
    assert target["x"].astype("float32").tolist() == [1.5] * 4


# -- whole state_dicts -------------------------------------------------------------------------------------------------


def nested_state() -> dict[str, Any]:
    return {
        "model": {"encoder": {"0.weight": paddle.full([2], 1.0)}, "encoder.1": {"bias": paddle.full([2], 2.0)}},
        "optimizer": {"moment": paddle.full([2], 3.0), "step": 11},
        "counts": np.arange(3),
        "note": ("a", 1.5),
    }


def test_merged_whole(tmp_path: Path) -> None:
    save_state_dict(nested_state(), tmp_path)
    merged = load_merged_state_dict(tmp_path)
    assert set(merged) == {"model", "optimizer", "counts", "note"}
    assert set(merged["model"]) == {"encoder", "encoder.1"}
    assert merged["model"]["encoder"]["0.weight"].tolist() == [1.0, 1.0]
    assert merged["optimizer"]["step"] == 11
    assert type(merged["counts"]) is np.ndarray
    assert merged["counts"].tolist() == [0, 1, 2]
    assert merged["note"] == ("a", 1.5)


def test_merged_flat(tmp_path: Path) -> None:
    save_state_dict(nested_state(), tmp_path)
    merged = load_merged_state_dict(tmp_path, flat=True)
    assert sorted(merged) == [
        "counts",
        "model.encoder.0.weight",
        "model.encoder.1.bias",
        "note",
        "optimizer.moment",
        "optimizer.step",
    ]


def test_merged_prefix(tmp_path: Path) -> None:
    save_state_dict(nested_state(), tmp_path)
    merged = load_merged_state_dict(tmp_path, "optimizer")
    assert set(merged) == {"moment", "step"}
    assert load_merged_state_dict(tmp_path, "model.encoder.1")["bias"].tolist() == [2.0, 2.0]
    assert list(load_merged_state_dict(tmp_path, "model.encoder", flat=True)) == ["0.weight"]
    with pytest.raises(CheckpointNotFoundError, match="opt"):
        load_merged_state_dict(tmp_path, "opt")


def test_merged_keys(tmp_path: Path) -> None:
    save_state_dict(nested_state(), tmp_path)
    assert list(load_merged_state_dict(tmp_path, keys="optimizer.step", flat=True)) == ["optimizer.step"]
    merged = load_merged_state_dict(tmp_path, keys=["model.*", "counts"], flat=True)
    assert sorted(merged) == ["counts", "model.encoder.0.weight", "model.encoder.1.bias"]
    both = load_merged_state_dict(tmp_path, "model", keys="*bias", flat=True)
    assert list(both) == ["encoder.1.bias"]
    with pytest.raises(CheckpointNotFoundError, match="nothing"):
        load_merged_state_dict(tmp_path, keys=["counts", "nothing.*"])


def test_keys_with_dots_do_not_collide(tmp_path: Path) -> None:
    state = {"a": {"b": paddle.full([1], 1.0)}, "a.b": paddle.full([1], 2.0), "c.d": 1, "c": {"d": 2}}
    save_state_dict(state, tmp_path)
    merged = load_merged_state_dict(tmp_path)
    assert merged["a"]["b"].item() == 1.0
    assert merged["a.b"].item() == 2.0
    assert (merged["c.d"], merged["c"]["d"]) == (1, 2)
    assert len(load_merged_state_dict(tmp_path, flat=True)) == 4


def test_tensors_arrays_and_values_together(tmp_path: Path) -> None:
    state = {
        "tensor": paddle.arange(4),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "list": [paddle.full([2], 5.0), 7, "x"],
        "scalar": np.float16(1.5),
        "values": {"a": [1, 2.5, None], "b": b"\0", 4: 2**100},
    }
    save_state_dict(state, tmp_path)
    array, tensor, item = np.zeros((2, 3), np.uint32), paddle.zeros([4], "int64"), paddle.zeros([2])
    target = {"tensor": tensor, "array": array, "list": [item, 0, ""], "scalar": None, "values": None}
    load_state_dict(target, tmp_path)
    assert target["tensor"] is tensor
    assert target["array"] is array
    assert target["list"][0] is item
    assert tensor.tolist() == [0, 1, 2, 3]
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (item.tolist(), target["list"][1:]) == ([5.0, 5.0], [7, "x"])
    assert type(target["scalar"]) is np.float16
    assert target["scalar"] == 1.5
    assert target["values"] == state["values"]


def train(seed: int, steps: int) -> tuple[Any, Any]:
    paddle.seed(seed)
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 1))
    schedule = paddle.optimizer.lr.StepDecay(0.1, step_size=2)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=model.parameters(), weight_decay=0.01)
    step(model, optimizer, steps)
    return model, optimizer


def step(model: Any, optimizer: Any, steps: int) -> None:
    for i in range(steps):
        loss = (model(paddle.full([2, 4], 1.0 + i)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        optimizer._learning_rate.step()


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with paddle.utils.unique_name.guard():
        model, optimizer = train(1, 3)
    save_state_dict({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    with paddle.utils.unique_name.guard():
        fresh, fresh_optimizer = train(2, 1)
    state = {"model": fresh.state_dict(), "optimizer": fresh_optimizer.state_dict()}
    load_state_dict(state, tmp_path)
    fresh_optimizer.set_state_dict(state["optimizer"])
    assert fresh_optimizer._learning_rate.last_epoch == 3
    assert fresh_optimizer.get_lr() == optimizer.get_lr()
    for each, its_optimizer in ((model, optimizer), (fresh, fresh_optimizer)):
        step(each, its_optimizer, 3)
    for mine, its in zip(model.parameters(), fresh.parameters(), strict=True):
        assert_same(its.numpy(), mine.numpy())


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_local_part_of_a_fleet_layer(tmp_path: Path) -> None:
    layer = paddle.nn.Linear(2, 2)
    layer.weight.is_distributed = True
    with pytest.raises(UnsupportedValueError, match=r"(?s)layer.weight.*sharded_state_dict"):
        save_state_dict({"layer": layer.state_dict()}, tmp_path)


class OffloadBuffer(paddle.nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([3])


def test_layer_that_is_called_as_the_buffer_of_group_sharding(tmp_path: Path) -> None:
    layer, value = OffloadBuffer(), paddle.ones([3])
    assert layer.weight.name.startswith("offload_buffer_")
    save_state_dict({"layer": layer}, tmp_path)
    for name in ("offload_buffer", "offload_buffer_moment1_0"):
        value.name = name
        with pytest.raises(UnsupportedValueError, match=f"x: .*slice.*{name}.*offload=True"):
            save_state_dict({"x": value}, tmp_path)


def test_parameter_with_a_users_own_master_weight(tmp_path: Path) -> None:
    layer = paddle.nn.Linear(2, 2)
    for parameter in layer.parameters():
        parameter.master_weight = parameter.astype("float64")
    save_state_dict({"layer": layer}, tmp_path)
    for parameter in layer.parameters():
        parameter.unslice = True  # as group sharding marks it
    with pytest.raises(UnsupportedValueError, match="layer.weight: group sharding's stage 3 with offload=True"):
        save_state_dict({"layer": layer}, tmp_path)


def test_sparse_tensor(tmp_path: Path) -> None:
    sparse = paddle.sparse.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], [2, 2])
    with pytest.raises(UnsupportedValueError, match="table.*sparse"):
        save_state_dict({"table": sparse}, tmp_path)


@lacks(SHARD_ORDER, "has no split factors")
def test_split_factor(tmp_path: Path) -> None:
    placements = [dist.Shard(0, split_factor=2)]
    tensor = paddle.Tensor(
        paddle.ones([4]), dims=[4], process_mesh=dist.ProcessMesh([0], dim_names=["x"]), placements=placements
    )
    with pytest.raises(UnsupportedValueError, match="fused.*split.factor"):
        save_state_dict({"fused": tensor}, tmp_path)


def test_all_refused_entries_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"(?s)first.*second"):
        save_state_dict({"first": object(), "good": 1, "second": {"x": {1, 2}}}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_mismatch_names_every_problem_and_touches_nothing(tmp_path: Path) -> None:
    save_state_dict({"a": paddle.ones([4]), "b": paddle.ones([4]), "c": paddle.ones([4])}, tmp_path)
    target = {"a": paddle.zeros([4]), "b": paddle.zeros([5]), "c": paddle.zeros([4], "float16"), "d": paddle.zeros([1])}
    with pytest.raises(StateDictMismatchError) as caught:
        load_state_dict(target, tmp_path)
    assert len(caught.value.problems) == 3
    assert all(any(key in problem for problem in caught.value.problems) for key in "bcd")
    assert target["a"].tolist() == [0.0] * 4
    report = load_state_dict(target, tmp_path, options=LoadOptions(strict=False))
    assert len(report.skipped) == 3
    assert target["a"].tolist() == [1.0] * 4


SAVE_ARGUMENTS: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "state_dict": (TypeError, {"state_dict": [1]}),
    "path": (TypeError, {"path": 5}),
    "coordinator_rank": (ValueError, {"coordinator_rank": "0"}),
    "unique_id": (ValueError, {"unique_id": -1}),
    "options": (TypeError, {"options": LoadOptions()}),
    "process_group": (TypeError, {"process_group": "everyone"}),
}


@pytest.mark.parametrize("name", SAVE_ARGUMENTS)
def test_wrong_argument_of_save(tmp_path: Path, name: str) -> None:
    error, arguments = SAVE_ARGUMENTS[name]
    with pytest.raises(error, match=name):
        save_state_dict(**{"state_dict": {"x": 1}, "path": tmp_path, **arguments})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SAVE_ARGUMENTS)
def test_wrong_argument_of_load(tmp_path: Path, name: str) -> None:
    error, arguments = SAVE_ARGUMENTS[name]
    save_state_dict({"x": 1}, tmp_path)
    if name == "options":
        arguments = {"options": SaveOptions()}
    with pytest.raises(error, match=name):
        load_state_dict(**{"state_dict": {"x": None}, "path": tmp_path, **arguments})


MERGED_ARGUMENTS: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "path": (TypeError, {"path": None}),
    "prefix": (TypeError, {"prefix": 3}),
    "unique_id": (ValueError, {"unique_id": True}),
    "keys": (TypeError, {"keys": 3}),
    "options": (TypeError, {"options": SaveOptions()}),
}


@pytest.mark.parametrize("name", MERGED_ARGUMENTS)
def test_wrong_argument_of_merged_load(tmp_path: Path, name: str) -> None:
    error, arguments = MERGED_ARGUMENTS[name]
    save_state_dict({"x": 1}, tmp_path)
    with pytest.raises(error, match=name):
        load_merged_state_dict(**{"path": tmp_path, **arguments})


def test_importing_the_package_does_not_import_paddle() -> None:
    code = "import sys, paddle_dist_ckpt; sys.exit('paddle' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


@lacks(FROM_LOCAL, "makes DistTensors of whole tensors only")
def test_a_local_value_that_its_placements_do_not_explain_is_refused(tmp_path: Path) -> None:
    mesh = dist.ProcessMesh([0], dim_names=["x"])
    odd = paddle.Tensor(paddle.ones([3, 2]), dims=[8, 2], process_mesh=mesh, placements=[dist.Shard(0)])
    with pytest.raises(UnsupportedValueError, match=r"w: its local value has shape \[3, 2\], but .* \[0:8,0:2\]"):
        save_state_dict({"w": odd}, tmp_path)


STRIDED = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
PLACED: dict[str, tuple[Any, tuple[LocalShard, ...], tuple[int, ...]]] = {
    "contiguous": (STRIDED, (LocalShard(whole((4, 5, 6))),), (0,)),
    "transposed": (STRIDED.transpose(2, 0, 1), (LocalShard(whole((6, 4, 5)), (4, 120, 24)),), (0,)),
    "part of a larger one": (STRIDED, (LocalShard(Box((1, 0, 0), (2, 5, 6))),), (120,)),
    "several shards": (
        STRIDED,
        (LocalShard(Box((1, 4, 2), (1, 1, 4))), LocalShard(Box((2, 0, 0), (2, 5, 6)))),
        (224, 240),
    ),
    "a scalar": (STRIDED[0, 0, 0], (LocalShard(whole(())),), (0,)),
}


@pytest.mark.parametrize("piece_bytes", [1, 8, 20, 100, 128, None])
@pytest.mark.parametrize("case", PLACED)
def test_pieces_of_what_is_on_a_device_lie_where_they_say(case: str, piece_bytes: int | None) -> None:
    array, shards, starts = PLACED[case]
    geometry = Geometry(Kind.TENSOR, dtype_named("float32"), array.shape, True, shards)
    placed, places = PaddleAdapter(0, piece_bytes)._placed(geometry, starts, "gpu:1")
    times = np.zeros(array.shape, int)
    for (box, strides), start in zip(placed.shards, places, strict=True):
        found = np.ndarray(box.shape, np.float32, STRIDED.data, start, strides)
        assert np.array_equal(found, array[box.slices])
        assert found.nbytes <= max(4, piece_bytes or found.nbytes)
        times[box.slices] += 1
    expected = np.zeros(array.shape, int)
    for shard in shards:
        expected[shard.box.slices] += 1
    assert np.array_equal(times, expected)
    assert placed.device == "gpu:1"
    if piece_bytes is None:
        assert len(placed.shards) == len(shards)


@pytest.mark.parametrize("others", [0, 20])
def test_what_an_optimizer_has_for_tensors_that_operations_returned(tmp_path: Path, others: int) -> None:
    """Paddle numbers them, and the next run may give their numbers to others; the other tensors are many, or none."""

    def job(names: str) -> dict[str, Any]:
        tensors = {name: paddle.full([2], float(ord(name))) for name in names}
        for tensor in tensors.values():
            tensor.stop_gradient = False
        optimizer = paddle.optimizer.Adam(0.1, parameters=list(tensors.values()))
        return {**tensors, "optimizer": optimizer, "more": [paddle.ones([2]) for _ in range(others)]}

    def go_on(state: dict[str, Any]) -> list[float]:
        (state["a"].sum() + (state["b"] ** 2).sum()).backward()
        state["optimizer"].step()
        state["optimizer"].clear_grad()
        return [float(state[name][0]) for name in "ab"]

    saved, target = job("ab"), job("ba")
    go_on(saved)
    save_state_dict(saved, tmp_path)
    assert {"optimizer.a.moment1", "optimizer.b.moment1"} < read_metadata(tmp_path).state_dict_metadata.keys()
    load_state_dict(target, tmp_path)
    assert go_on(target) == go_on(saved)


@pytest.mark.parametrize("others", [0, 20])
def test_copies_of_what_is_trained_are_not_called_by_numbers(others: int) -> None:
    """They are others in each save, and no plan would be the next one's."""
    weight = paddle.nn.Linear(2, 2).weight
    leaf = paddle.ones([2, 2])
    leaf.stop_gradient = False
    tensors = [weight, weight.clone(), weight * 2, leaf, leaf.clone(), *(paddle.ones([2]) for _ in range(others))]
    adapter = PaddleAdapter(0)
    views = adapter.views(tensors)
    for names in (adapter.names(tensors), *([] if views is None else [views.names])):
        assert [i for i, name in enumerate(names) if name is not None] == [0, 3]


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1)])
def test_what_an_optimizer_has_for_tensors_that_operations_returned_and_that_are_frozen(
    tmp_path: Path, frozen: tuple[int, ...]
) -> None:
    """In the job that saves, in that which loads, or in both."""

    def job(names: str) -> dict[str, Any]:
        tensors = {name: paddle.full([2], float(ord(name))) for name in names}
        for tensor in tensors.values():
            tensor.stop_gradient = False
        optimizer = paddle.optimizer.Adam(0.1, parameters=list(tensors.values()))
        return {**tensors, "optimizer": optimizer}

    def step(state: dict[str, Any]) -> list[float]:
        (state["a"].sum() + (state["b"] ** 2).sum()).backward()
        state["optimizer"].step()
        state["optimizer"].clear_grad()
        return [float(state[name][0]) for name in "ab"]

    jobs = job("ab"), job("ba")
    step(jobs[0])
    for number, state in enumerate(jobs):
        state["a"].stop_gradient = number in frozen
    save_state_dict(jobs[0], tmp_path)
    load_state_dict(jobs[1], tmp_path)
    for state in jobs:
        state["a"].stop_gradient = False
    assert step(jobs[0]) == step(jobs[1])
