"""ShardedWeight: what it may say of itself, saved and loaded as any layout, by ranks that are threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt import (
    LoadOptions,
    SaveOptions,
    StateDictMismatchError,
    UnsupportedValueError,
    load_merged_state_dict,
    load_state_dict,
    read_metadata,
    save_state_dict,
)
from paddle_dist_ckpt.core.box import Box, cut_flat_range, whole
from paddle_dist_ckpt.paddle_adapter.groups import Ranks
from paddle_dist_ckpt.paddle_adapter.optimizers import make_accumulators
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from paddle_dist_ckpt.wiring import load_with, paddles, save_with
from test.paddle.layouts import Array, Spread, part_of
from test.paddle.tensors import NUMPY_DTYPES, local_array, mesh_of, paddle_tensor, placements_of, to_array
from test.strategies import examples, irregular_tilings, shapes

# Paddle has it from 3.3 on.
ShardedWeight: Any = pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.sharded_weight").ShardedWeight
States = list[dict[str, Any]]


def on_ranks(states: States, call: Callable[[Ranks, dict[str, Any]], Any]) -> list[Any]:
    """Make a call on one rank for each state, at the same time; returns what each returned, or raised."""

    def work(rank: SimulatedRank) -> Any:
        return call(Ranks(rank.rank, rank.hub, rank.transport, rank.transport), states[rank.rank])

    return run_ranks(len(states), work)


def saved(path: Path, *states: dict[str, Any]) -> list[Any]:
    """What a save on so many ranks returned or raised."""
    options = SaveOptions(timeout=60)
    return on_ranks(
        list(states), lambda ranks, state: save_with(ranks, paddles(ranks, state), path, None, False, options)
    )


def loaded(path: Path, *states: dict[str, Any]) -> list[Any]:
    """What a load on so many ranks returned or raised."""
    options = LoadOptions(timeout=60)
    return on_ranks(list(states), lambda ranks, state: load_with(ranks, paddles(ranks, state), path, None, options))


def raise_first(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


def assert_same(found: Array, expected: Array) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


# -- parts of a tensor -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, or a range of the box's elements."""

    box: Box
    span: tuple[int, int] | None = None

    def of(self, array: Array) -> Array:
        """What this part of a tensor holds."""
        cut = array[self.box.slices].copy()
        return cut if self.span is None else cut.reshape(-1)[slice(*self.span)]

    def weight(self, array: Array) -> Any:
        """The part of a tensor as Paddle has it."""
        shape, offset = self.box.shape, self.box.offset
        local = tensor_of(self.of(array))
        if self.span is None:
            return ShardedWeight("x", local, shape, array.shape, offset)
        return ShardedWeight("x", local, shape, array.shape, offset, True, slice(*self.span))


def tensor_of(array: Array) -> Any:
    return paddle_tensor(array).reshape(list(array.shape))


def rows(start: int, stop: int, columns: int = 4) -> Part:
    return Part(Box((start, 0), (stop - start, columns)))


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies on ranks: as parts, one a rank, or as a DistTensor."""

    parts: tuple[Part, ...] = ()
    spread: Spread | None = None

    @property
    def ranks(self) -> int:
        return len(self.parts) if self.spread is None else int(np.array(self.spread.mesh).size)

    def values(self, array: Array) -> list[Any]:
        """What each rank has of a tensor."""
        if self.spread is None:
            return [part.weight(array) for part in self.parts]
        return [dist_tensor(array, self.spread, rank) for rank in range(self.ranks)]

    def expected(self, array: Array) -> list[Array]:
        if self.spread is None:
            return [part.of(array) for part in self.parts]
        found = [part_of(array, self.spread, rank) for rank in range(self.ranks)]
        return [each.copy() for each in found if each is not None]

    def found(self, values: list[Any]) -> list[Array]:
        if self.spread is None:
            return [to_array(weight.local_tensor) for weight in values]
        return [local_array(value) for value in values]


def dist_tensor(array: Array, spread: Spread, rank: int) -> Any:
    """A DistTensor as one of the ranks sees it."""
    local = part_of(array, spread, rank)
    assert local is not None
    tensor = tensor_of(local.copy())
    return paddle.Tensor(tensor, dims=list(array.shape), process_mesh=mesh_of(spread), placements=placements_of(spread))


@st.composite
def part_layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Parts that make up a tensor; some boxes are cut into ranges, and some ranks have what others have too."""
    parts: list[Part] = []
    for box in draw(irregular_tilings(shape, 4)):
        cuts = sorted(draw(st.sets(st.integers(0, box.size), max_size=2)))
        if draw(st.booleans()):
            edges = [0, *cuts, box.size]
            parts += [Part(box, span) for span in itertools.pairwise(edges)]
        else:
            parts.append(Part(box))
    parts += draw(st.lists(st.sampled_from(parts), max_size=2))
    return Layout(tuple(draw(st.permutations(parts))))


@st.composite
def spreads(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """A DistTensor's layout on 1 to 4 ranks."""
    mesh = draw(st.sampled_from([[0], [1, 0], [0, 1, 2], [[0, 1], [2, 3]], [[3, 1], [0, 2]]]))
    dims = st.sampled_from([None, *range(len(shape))])
    return Layout(spread=Spread(mesh, tuple(draw(dims) for _ in range(np.array(mesh).ndim))))


def layouts(shape: tuple[int, ...]) -> st.SearchStrategy[Layout]:
    return st.one_of(part_layouts(shape), part_layouts(shape), spreads(shape))


@given(data=st.data())
@examples(20)
def test_every_layout_to_every_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1, most=7))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int8", "complex128"]))
    source, target = data.draw(layouts(shape)), data.draw(layouts(shape))
    path = tmp_path_factory.mktemp("any")
    array = (np.arange(math.prod(shape)) % 251 - 125).reshape(shape).astype(NUMPY_DTYPES[dtype])
    reports = saved(path, *({"x": value} for value in source.values(array)))
    raise_first(reports)
    assert sum(report.bytes_written for report in reports) == array.nbytes
    values = target.values(np.zeros_like(array))
    raise_first(loaded(path, *({"x": value} for value in values)))
    for found, expected in zip(target.found(values), target.expected(array), strict=True):
        assert_same(found, expected)
    assert_same(to_array(load_merged_state_dict(path)["x"]), array)


@given(data=st.data())
@examples(30)
def test_a_range_becomes_few_boxes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1, most=7).filter(len))
    cut = data.draw(st.integers(1, math.prod(shape)))
    path = tmp_path_factory.mktemp("few")
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    spans = [(0, cut), (cut, array.size)]
    raise_first(saved(path, *({"x": Part(whole(shape), span).weight(array)} for span in spans)))
    stored = {(shard.global_offset, shard.local_shape) for shard in read_metadata(path).state_dict_metadata["x"]}
    boxes = [cut_flat_range(shape, *span) for span in spans]
    assert all(len(each) <= 2 * len(shape) - 1 for each in boxes)
    assert stored == {(box.offset, box.shape) for each in boxes for box in each}


def test_a_range_in_the_middle_of_a_part_is_written_by_its_rank(tmp_path: Path) -> None:
    array = np.arange(4 * 3 * 10, dtype=np.float32).reshape(4, 3, 10)
    box = Box((1, 0, 2), (3, 3, 5))  # the range 7:38 of it: 3 elements of a row, a row, a plane, a row, 3 elements
    others = [Part(Box((0, 0, 0), (1, 3, 10))), Part(Box((1, 0, 0), (3, 3, 2))), Part(Box((1, 0, 7), (3, 3, 3)))]
    spans = [Part(box, (0, 7)), Part(box, (7, 38)), Part(box, (38, 45))]
    reports = saved(tmp_path, *({"x": part.weight(array)} for part in (*spans, *others)))
    raise_first(reports)
    assert [report.bytes_written for report in reports] == [28, 124, 28, 120, 72, 108]
    stored = {i.global_offset: i.local_shape for i in read_metadata(tmp_path).storage_metadata}
    by_rank = {
        index.global_offset: info.file_name[0] for index, info in read_metadata(tmp_path).storage_metadata.items()
    }
    assert {offset: stored[offset] for offset in stored if by_rank[offset] == "1"} == {
        (1, 1, 4): (1, 1, 3),
        (1, 2, 2): (1, 1, 5),
        (2, 0, 2): (1, 3, 5),
        (3, 0, 2): (1, 1, 5),
        (3, 1, 2): (1, 1, 3),
    }
    assert_same(to_array(load_merged_state_dict(tmp_path)["x"]), array)


def test_overlapping_parts_are_written_once(tmp_path: Path) -> None:
    array = np.arange(20, dtype=np.float32).reshape(5, 4)
    parts = [rows(0, 3), rows(1, 5), Part(whole((5, 4)), (6, 15))]
    reports = saved(tmp_path, *({"x": part.weight(array)} for part in parts))
    raise_first(reports)
    assert sum(report.bytes_written for report in reports) == array.nbytes
    assert_same(to_array(load_merged_state_dict(tmp_path)["x"]), array)


def test_a_part_and_whole_tensors_under_one_key(tmp_path: Path) -> None:
    array = np.arange(20, dtype=np.float32).reshape(5, 4)
    spread = Spread([0, 1, 2], (0,))
    raise_first(
        saved(tmp_path, {"x": rows(0, 2).weight(array)}, *({"x": dist_tensor(array, spread, r)} for r in (1, 2)))
    )
    targets = [tensor_of(np.zeros_like(array)), rows(1, 4).weight(np.zeros_like(array))]
    raise_first(loaded(tmp_path, *({"x": target} for target in targets)))
    assert_same(to_array(targets[0]), array)
    assert_same(to_array(targets[1].local_tensor), array[1:4])


# -- what a part may be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_shapes_of_any_kind_of_numbers(tmp_path: Path, kind: Any) -> None:
    array = np.arange(6, dtype=np.float32)
    span = slice(np.int64(1), np.int64(5))
    for i, fields in enumerate([(kind([6]), kind([6]), kind([0])), (kind([6]), kind([6]), kind([0]), True, span)]):
        local = tensor_of(array if i == 0 else array[1:5])
        state = {"x": ShardedWeight("x", local, *fields)}
        if i == 0:
            save_state_dict(state, tmp_path)
        else:
            local.zero_()
            load_state_dict(state, tmp_path)
            assert_same(to_array(local), array[1:5])


def test_anything_with_these_attributes(tmp_path: Path) -> None:
    def part(local: Any) -> Any:
        fields = {"local_shape": (2, 3), "global_shape": (2, 3), "global_offset": (0, 0)}
        return SimpleNamespace(local_tensor=local, is_flattened=False, flattened_range=None, **fields)

    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    target = paddle.zeros([2, 3])
    with pytest.raises(UnsupportedValueError, match="x: a types.SimpleNamespace"):
        save_state_dict({"x": SimpleNamespace(local_tensor=target)}, tmp_path)
    save_state_dict({"x": part(tensor_of(array))}, tmp_path)
    load_state_dict({"x": part(target)}, tmp_path)
    assert_same(to_array(target), array)


@pytest.mark.parametrize("offset", [(), (0,)])
def test_scalar(tmp_path: Path, offset: tuple[int, ...]) -> None:
    save_state_dict({"x": ShardedWeight("x", paddle.to_tensor(3.5), (), (), offset)}, tmp_path)
    target = paddle.to_tensor(0.0)
    load_state_dict({"x": ShardedWeight("x", target, (), (), offset)}, tmp_path)
    assert float(target) == 3.5


def test_tensor_without_elements(tmp_path: Path) -> None:
    save_state_dict({"x": ShardedWeight("x", paddle.zeros([0, 4]), (0, 4), (0, 4), (0, 0))}, tmp_path)
    assert tuple(load_merged_state_dict(tmp_path)["x"].shape) == (0, 4)
    load_state_dict({"x": ShardedWeight("x", paddle.zeros([0, 4]), (0, 4), (0, 4), (0, 0))}, tmp_path)


@pytest.mark.parametrize("part", [Part(whole((5, 4)), (7, 7)), Part(Box((5, 0), (0, 4)))], ids=["range", "box"])
def test_a_rank_that_has_nothing(tmp_path: Path, part: Part) -> None:
    array = np.arange(20, dtype=np.float32).reshape(5, 4)
    raise_first(saved(tmp_path, {"x": part.weight(array)}, {"x": rows(0, 5).weight(array)}))
    targets = [rows(0, 5).weight(np.zeros_like(array)), part.weight(array)]
    raise_first(loaded(tmp_path, *({"x": target} for target in targets)))
    assert_same(to_array(targets[0].local_tensor), array)


VIEWS = {"transposed": lambda x: x.T, "columns": lambda x: x[:, 1:3], "every other": lambda x: x[::2, 1::2]}


@pytest.mark.parametrize("view", VIEWS)
def test_local_tensor_that_is_a_view(tmp_path: Path, view: str) -> None:
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    shape = VIEWS[view](array).shape

    def parts(tensor: Any) -> list[dict[str, Any]]:
        local = VIEWS[view](tensor)
        above = ShardedWeight("x", local, shape, (2 * shape[0], shape[1]), (0, 0))
        below = ShardedWeight("x", local, shape, (2 * shape[0], shape[1]), (shape[0], 0))
        return [{"x": above}, {"x": below}]

    raise_first(saved(tmp_path, *parts(tensor_of(array))))
    assert_same(to_array(load_merged_state_dict(tmp_path)["x"]), np.concatenate([VIEWS[view](array)] * 2))
    target = paddle.zeros([6, 4])
    raise_first(loaded(tmp_path, *parts(target)))
    expected = np.zeros_like(array)
    VIEWS[view](expected)[...] = VIEWS[view](array)
    assert_same(to_array(target), expected)


def test_range_in_a_slice_of_a_longer_buffer(tmp_path: Path) -> None:
    buffer = paddle.zeros([64])
    local = paddle.slice(buffer, axes=[0], starts=[0], ends=[7])  # how Paddle leaves its padding out
    save_state_dict({"x": paddle.arange(12, dtype="float32").reshape([3, 4])}, tmp_path)
    load_state_dict({"x": ShardedWeight("x", local, (3, 4), (3, 4), (0, 0), True, slice(5, 12))}, tmp_path)
    assert buffer.tolist() == [5, 6, 7, 8, 9, 10, 11, *[0] * 57]


def test_save_in_background(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    weight = Part(whole((3, 4)), (0, 12)).weight(array)
    saving = save_state_dict({"x": weight}, tmp_path, async_save=True)
    weight.local_tensor.zero_()
    saving.result(60)
    assert_same(to_array(load_merged_state_dict(tmp_path)["x"]), array)


def test_parts_that_change_between_saves(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32)
    whole_part, rest = Part(Box((0,), (12,))), Part(Box((4,), (8,)))
    for parts in ([whole_part, rest], [rest, whole_part]):
        raise_first(saved(tmp_path, *({"x": part.weight(array)} for part in parts)))
        assert_same(to_array(load_merged_state_dict(tmp_path)["x"]), array)


def test_the_same_tensor_as_a_part_and_then_as_a_whole(tmp_path: Path) -> None:
    tensor = paddle.arange(4, dtype="float32")
    save_state_dict({"a": tensor, "b": ShardedWeight("b", tensor, (2, 2), (2, 2), (0, 0))}, tmp_path)
    save_state_dict({"a": tensor, "b": tensor}, tmp_path)
    merged = load_merged_state_dict(tmp_path)
    assert [tuple(merged[key].shape) for key in "ab"] == [(4,), (4,)]


# -- what is refused ---------------------------------------------------------------------------------------------------

WRONG = {
    "too far": ((2, 4), (5, 4), (4, 0), None, [2, 4], r"part of shape \[2, 4\] at \[4, 0\]"),
    "before the start": ((2, 4), (5, 4), (-1, 0), None, [2, 4], r"at \[-1, 0\]"),
    "other dimensions": ((8,), (5, 4), (0,), None, [8], r"part of shape \[8\]"),
    "other offset": ((2, 4), (5, 4), (0,), None, [2, 4], r"at \[0\]"),
    "too few elements": ((2, 4), (5, 4), (0, 0), None, [2, 3], r"shape \[2, 3\], 6 elements; 8 are due"),
    "range too long": ((2, 4), (5, 4), (0, 0), slice(3, 9), [6], "elements 3:9 of a part of 8"),
    "range backwards": ((2, 4), (5, 4), (0, 0), slice(5, 3), [2], "elements 5:3"),
    "range with a step": ((2, 4), (5, 4), (0, 0), slice(0, 8, 2), [4], "not a slice with a stop and without a step"),
    "range without an end": ((2, 4), (5, 4), (0, 0), slice(0, None), [8], "not a slice with a stop"),
    "range of other length": ((2, 4), (5, 4), (0, 0), slice(1, 5), [5], "5 elements; 4 are due"),
}


@pytest.mark.parametrize("case", WRONG)
def test_parts_that_do_not_fit(tmp_path: Path, case: str) -> None:
    local, shape, offset, span, found, message = WRONG[case]
    weight = ShardedWeight("x", paddle.ones(found), local, shape, offset, span is not None, span)
    with pytest.raises(UnsupportedValueError, match=f"layer.x.*{message}"):
        save_state_dict({"layer": {"x": weight}}, tmp_path / "saved")
    assert not list(tmp_path.glob("saved/*"))
    save_state_dict({"layer": {"x": paddle.zeros([5, 4])}}, tmp_path)
    with pytest.raises(StateDictMismatchError, match=f"layer.x.*{message}"):
        load_state_dict({"layer": {"x": weight}}, tmp_path)


def test_flattened_without_a_range(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"x: .*flattened_range is not a slice"):
        save_state_dict({"x": ShardedWeight("x", paddle.ones([4]), (2, 2), (2, 2), (0, 0), True, None)}, tmp_path)


def test_range_of_a_strided_tensor(tmp_path: Path) -> None:
    weight = ShardedWeight("x", paddle.ones([8])[::2], (2, 2), (2, 2), (0, 0), True, slice(0, 4))
    with pytest.raises(UnsupportedValueError, match=r"x: .*contiguous"):
        save_state_dict({"x": weight}, tmp_path)


def test_tensor_without_memory(tmp_path: Path) -> None:
    weight = ShardedWeight("x", paddle.Tensor(), (2, 2), (2, 2), (0, 0))
    weight.local_tensor.get_tensor()._set_dims([2, 2])
    with pytest.raises(UnsupportedValueError, match=r"x: .*never initialized"):
        save_state_dict({"x": weight}, tmp_path)


DIFFERENT = {
    "shapes": (rows(0, 5).weight, lambda array: ShardedWeight("x", paddle.ones([1, 4]), (1, 4), (6, 4), (5, 0))),
    "dtypes": (rows(0, 3).weight, lambda array: rows(2, 5).weight(array.astype(np.float64))),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_do_not_agree(tmp_path: Path, what: str) -> None:
    array = np.arange(20, dtype=np.float32).reshape(5, 4)
    errors = saved(tmp_path, *({"x": make(array)} for make in DIFFERENT[what]))
    assert [type(error) for error in errors] == [UnsupportedValueError] * 2
    assert all("x" in str(error) for error in errors)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    "parts",
    [(rows(0, 2), rows(3, 5)), (rows(0, 4), rows(0, 4)), (Part(whole((5, 4)), (0, 9)), Part(whole((5, 4)), (10, 20)))],
    ids=["hole", "end", "element"],
)
def test_regions_that_nobody_has(tmp_path: Path, parts: tuple[Part, ...]) -> None:
    array = np.arange(20, dtype=np.float32).reshape(5, 4)
    errors = saved(tmp_path, *({"x": part.weight(array)} for part in parts))
    assert [type(error) for error in errors] == [UnsupportedValueError] * 2
    assert all("x" in str(error) for error in errors)
    assert not list(tmp_path.glob("*.safetensors"))


def test_parts_of_a_distributed_tensor_that_paddle_puts_in_the_same_place(tmp_path: Path) -> None:
    """``sharded_state_dict()`` of a layer of DistTensors says of each rank's part that it starts at 0."""
    array = np.arange(20, dtype=np.float32).reshape(5, 4)
    layers = [paddle.nn.Layer(), paddle.nn.Layer()]
    for rank, layer in enumerate(layers):
        layer.register_buffer("x", dist_tensor(array, Spread([0, 1], (0,)), rank))
    errors = saved(tmp_path, *(layer.sharded_state_dict() for layer in layers))
    assert [type(error) for error in errors] == [UnsupportedValueError] * 2


def test_targets_that_the_checkpoint_does_not_fit(tmp_path: Path) -> None:
    array = np.arange(20, dtype=np.float32).reshape(5, 4)
    save_state_dict({"x": tensor_of(array)}, tmp_path)
    longer = Part(Box((0, 0), (2, 4))).weight(np.zeros((6, 4), np.float32))
    with pytest.raises(StateDictMismatchError, match="x"):
        load_state_dict({"x": longer}, tmp_path)
    double = Part(whole((5, 4)), (3, 9)).weight(array.astype(np.float64) * 0)
    with pytest.raises(StateDictMismatchError, match="x"):
        load_state_dict({"x": double}, tmp_path)
    load_state_dict({"x": double}, tmp_path, options=LoadOptions(cast=True))
    assert to_array(double.local_tensor).tolist() == list(range(3, 9))


# -- layers and optimizers ---------------------------------------------------------------------------------------------


class Net(paddle.nn.Layer):
    """Layers of which two share their weight, and one is of bfloat16 and so has master weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = paddle.nn.Linear(4, 4)
        self.half = paddle.nn.Linear(4, 3).to(dtype="bfloat16")
        self.last = paddle.nn.Linear(4, 4, bias_attr=False)
        self.last.weight = self.up.weight


def job(start: float) -> tuple[Net, Any]:
    """A model and its optimizer, all of whose numbers follow from one."""
    net = Net()
    optimizer = paddle.optimizer.AdamW(0.1, parameters=net.parameters(), multi_precision=True)
    make_accumulators(optimizer)
    for i, tensor in enumerate(tensors_of(net, optimizer)):
        tensor.set_value(
            (paddle.arange(tensor.size, dtype="float32") + start + i).reshape(tensor.shape).astype(tensor.dtype)
        )
    return net, optimizer


def tensors_of(net: Net, optimizer: Any) -> list[Any]:
    """All tensors of a job, in one order."""
    kinds = sorted(optimizer._accumulators)
    accumulators = [tensor for kind in kinds for tensor in optimizer._accumulators[kind].values()]
    return [*net.parameters(), *accumulators, *optimizer._master_weights.values()]


def parts_of(net: Net, optimizer: Any) -> dict[str, Any]:
    model = net.sharded_state_dict()
    return {"model": model, "optimizer": optimizer.sharded_state_dict(model)}


def objects_of(net: Net, optimizer: Any) -> dict[str, Any]:
    return {"model": net, "optimizer": optimizer}


def state_dicts_of(net: Net, optimizer: Any) -> dict[str, Any]:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (parts_of, parts_of),
        (parts_of, objects_of),
        (objects_of, parts_of),
        (parts_of, state_dicts_of),
        (state_dicts_of, parts_of),
    ],
)
def test_parts_and_objects_of_one_job(tmp_path: Path, source: Any, target: Any) -> None:
    first, second = job(1), job(50)
    save_state_dict(source(*first), tmp_path)
    load_state_dict(target(*second), tmp_path)
    found, expected = tensors_of(*second), tensors_of(*first)
    assert len(found) == 4 + 4 * 4 + 2
    for tensor, other in zip(found, expected, strict=True):
        assert_same(to_array(tensor), to_array(other))


def test_tied_parts_must_agree(tmp_path: Path) -> None:
    weight = paddle.arange(12, dtype="float32")
    keys = ("first", "second")

    def tied(tensor: Any, span: slice) -> dict[str, Any]:
        return {key: ShardedWeight(key, tensor, (3, 4), (3, 4), (0, 0), True, span) for key in keys}

    halves = [(weight[:5], slice(0, 5)), (weight[5:], slice(5, 12))]
    raise_first(saved(tmp_path / "tied", *(tied(*half) for half in halves)))
    target = paddle.zeros([12])
    load_state_dict(tied(target, slice(0, 12)), tmp_path / "tied")
    assert target.tolist() == list(range(12))
    save_state_dict({key: weight.reshape([3, 4]) + i for i, key in enumerate(keys)}, tmp_path / "apart")
    with pytest.raises(StateDictMismatchError, match="second"):
        load_state_dict(tied(target, slice(0, 12)), tmp_path / "apart")


class Lazy:
    """Like a ShardedWeight whose tensor is made when it is asked for."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.local_shape = self.global_shape = (1000,)
        self.global_offset, self.is_flattened, self.flattened_range = (0,), False, None

    @property
    def local_tensor(self) -> Any:
        return paddle.full([1000], self.value)


def test_a_tensor_that_is_made_on_demand_lives_as_long_as_it_is_read(tmp_path: Path) -> None:
    save_state_dict({f"{i}": Lazy(i) for i in range(50)}, tmp_path)
    for key, tensor in load_merged_state_dict(tmp_path).items():
        assert (tensor.numpy() == float(key)).all()


@pytest.mark.parametrize("local", [None, np.zeros(3), [1, 2]])
def test_what_is_no_tensor_is_refused(tmp_path: Path, local: Any) -> None:
    odd = type("Odd", (), {**vars(Lazy(0)), "local_tensor": local})()
    with pytest.raises(UnsupportedValueError, match=r"odd: .* dense paddle.Tensor"):
        save_state_dict({"odd": odd}, tmp_path)


def test_a_dist_tensor_in_it_counts_by_its_local_value(tmp_path: Path) -> None:
    dist = paddle.distributed
    mesh = dist.ProcessMesh([0], dim_names=["x"])
    whole = dist.shard_tensor(paddle.arange(12, dtype="float32").reshape([4, 3]), mesh, [dist.Shard(0)])
    fields = {"local_tensor": whole, "local_shape": (4, 3), "global_shape": (4, 3), "global_offset": (0, 0)}
    part = type("Part", (), {**fields, "is_flattened": False, "flattened_range": None})()
    save_state_dict({"w": part}, tmp_path)
    assert load_merged_state_dict(tmp_path)["w"].numpy().tolist() == np.arange(12).reshape(4, 3).tolist()
