"""Targets that share memory, and targets for which there is nothing: what a load fills and what it leaves alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.tensors import Reduction
from paddle_dist_ckpt.errors import StateDictMismatchError
from paddle_dist_ckpt.options import LoadOptions
from paddle_dist_ckpt.recipe_calls import concat, stored
from paddle_dist_ckpt.testing import NumpyAdapter, ShardedArray, shard_array
from test.jobs import (
    blank_like,
    check_pieces,
    errors_of,
    load_alone,
    load_on,
    make_array,
    rows_of,
    same_bits,
    save_alone,
    sharded,
    try_load,
)

EXCHANGES = ("auto", "always", "never")
LAX = LoadOptions(strict=False)
MATRIX = make_array((30, 40))

Views = Callable[[np.ndarray], dict[str, np.ndarray]]

VIEWS: dict[str, Views] = {
    "a part": lambda w: {"w": w, "v": w[10:]},
    "rows and a column": lambda w: {"w": w, "v": w[5:9], "c": w[:, 3]},
    "transposed": lambda w: {"w": w, "v": w.T},
    "backwards": lambda w: {"w": w, "v": w[::-1]},
    "parts that overlap": lambda w: {"w": w[:20], "v": w[10:]},
    "another dtype": lambda w: {"w": w, "v": w.view("int32")},
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_one_memory_are_filled_if_the_checkpoint_agrees(tmp_path: Path, name: str, exchange: Any) -> None:
    stored = {key: view.copy() for key, view in VIEWS[name](MATRIX).items()}
    save_alone(stored, tmp_path)
    targets = [VIEWS[name](blank_like(MATRIX)) for _ in range(2)]
    load_on([dict(views) for views in targets], tmp_path, options=LoadOptions(exchange=exchange, timeout=60))
    for views in targets:
        assert all(same_bits(view.copy(), stored[key]) for key, view in views.items())


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_beside_views_of_one_memory_all_others_are_filled_as_ever(tmp_path: Path, exchange: Any) -> None:
    """Also those that are not contiguous."""
    stored = {"w": MATRIX, "v": MATRIX[10:], "t": make_array((6, 5), seed=1)}
    save_alone(stored, tmp_path)
    states: list[dict[str, np.ndarray]] = []
    for _ in range(2):
        memory = blank_like(MATRIX)
        states.append({"w": memory, "v": memory[10:], "t": np.zeros((5, 6), np.float32).T})
    load_on([dict(state) for state in states], tmp_path, options=LoadOptions(exchange=exchange, timeout=60))
    assert all(same_bits(state[key], array) for state in states for key, array in stored.items())


def in_steps(memory: np.ndarray, shape: tuple[int, ...], steps: tuple[int, ...]) -> np.ndarray:
    """A view with so many elements from one to the next in each dimension."""
    strides = tuple(step * memory.itemsize for step in steps)
    return np.lib.stride_tricks.as_strided(memory, shape, strides)


@pytest.mark.parametrize("steps", [(0, 1), (1, 1), (4, 2), (2, 4), (-1, 1)])
def test_a_target_whose_elements_share_memory_is_a_mismatch(tmp_path: Path, steps: tuple[int, int]) -> None:
    save_alone({"w": make_array((4, 3))}, tmp_path)
    memory = np.zeros(40, np.float32)
    with pytest.raises(StateDictMismatchError, match="w: elements of the target share memory with each other"):
        load_alone({"w": in_steps(memory[10:], (4, 3), steps)}, tmp_path)
    assert not memory.any()


@pytest.mark.parametrize("steps", [(3, 1), (1, 4), (-3, 1), (5, -2), (3, 4), (2, 9)])
def test_a_target_whose_elements_lie_apart_is_filled(tmp_path: Path, steps: tuple[int, int]) -> None:
    array = make_array((4, 3))
    save_alone({"w": array}, tmp_path)
    target = in_steps(np.zeros(60, np.float32)[20:], (4, 3), steps)
    load_alone({"w": target}, tmp_path)
    assert same_bits(target.copy(), array)


def test_an_addend_that_becomes_zero_overwrites_no_other_target(tmp_path: Path) -> None:
    array = make_array((8,))
    save_alone({"a": array, "b": array}, tmp_path)

    def addends(start: int) -> list[dict[str, Any]]:
        found = []
        for rank in range(2):
            memory = blank_like(np.zeros(24, np.float32))
            addend = ShardedArray(
                (8,), DTYPES["float32"], [Box((0,), (8,))], [memory[8:16]], False, Reduction("sum", rank, 2)
            )
            found.append({"a": addend, "b": memory[start : start + 8]})
        return found

    with pytest.raises(StateDictMismatchError, match=r"a: a sum's addend .* shares memory"):
        load_on(addends(8), tmp_path)
    states = addends(8)
    load_on(states[1:], tmp_path, options=LAX)
    assert same_bits(states[1]["b"], array)
    for beside in (0, 16):
        states = addends(beside)
        load_on(states, tmp_path)
        assert all(same_bits(state["b"], array) for state in states)
        assert same_bits(states[0]["a"].pieces[0], array)
        assert not states[1]["a"].pieces[0].any()


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_one_memory_are_a_mismatch_if_the_checkpoint_differs(tmp_path: Path, name: str) -> None:
    stored = {key: view.copy() for key, view in VIEWS[name](MATRIX).items()}
    stored["v"][...] = make_array(stored["v"].shape, stored["v"].dtype.name, 7)
    save_alone(stored, tmp_path)
    memory = blank_like(MATRIX)
    with pytest.raises(StateDictMismatchError, match="shares memory with"):
        load_alone(dict(VIEWS[name](memory)), tmp_path)
    assert same_bits(memory, blank_like(MATRIX))

    report = load_alone(dict(VIEWS[name](memory)), tmp_path, None, LAX)
    assert report.skipped
    assert same_bits(memory, blank_like(MATRIX))


def test_targets_whose_rows_lie_between_each_other_are_both_filled(tmp_path: Path) -> None:
    left, right = make_array((30, 15)), make_array((30, 25), seed=1)
    save_alone({"a": left, "b": right}, tmp_path)
    memory = blank_like(MATRIX)
    report = load_alone({"a": memory[:, :15], "b": memory[:, 15:]}, tmp_path)
    assert not report.skipped
    assert same_bits(memory, np.hstack([left, right]))


def test_only_targets_whose_data_differ_are_named(tmp_path: Path) -> None:
    names = ("q", "q2", "k", "v", "whole", "row")
    values = dict(zip(names, (1, 7, 2, 3, 4, 3), strict=True))
    shapes = {"whole": (4, 5), "row": (1, 2)}
    save_alone({name: np.full(shapes.get(name, (3, 2)), values[name], np.float32) for name in names}, tmp_path)
    fused, other = np.zeros((3, 6), np.float32), np.zeros((4, 5), np.float32)
    state = {"q": fused[:, :2], "q2": fused[:, :2], "k": fused[:, 2:4], "v": fused[:, 4:]}
    state |= {"whole": other, "row": fused[2:, 4:]}
    with pytest.raises(StateDictMismatchError) as caught:
        load_alone(dict(state), tmp_path)
    assert list(caught.value.problems) == [
        f"{a}: shares memory with {b}, but the stored data differ" for a, b in (("q", "q2"), ("q2", "q"))
    ]
    assert not fused.any()
    report = load_alone(dict(state), tmp_path, None, LAX)
    assert report.skipped_keys == ("q", "q2")
    assert fused.tolist() == [[0, 0, 2, 2, 3, 3]] * 3
    assert (other == 4).all()


def test_each_target_is_named_with_those_that_have_some_of_its_elements(tmp_path: Path) -> None:
    memory = np.zeros((6, 4), np.float32)
    state = {
        "scalar": memory[5, :1].reshape(()),
        "w": memory,
        "a": memory[:2],
        "b": memory.T[:, 5:],
        "c": memory[3:4].view("int16"),
        "good": memory[4],
    }
    saved = {
        "w": np.ones((6, 4), "f4"),
        "good": np.ones(4, "f4"),
        "c": np.ones((1, 8), "i2"),
        "scalar": np.array(4, "f4"),
    }
    save_alone({**saved, "a": np.full((2, 4), 2, "f4"), "b": np.full((4, 1), 3, "f4")}, tmp_path)
    report = load_alone(dict(state), tmp_path, None, LAX)
    others = {line.partition(":")[0]: line.partition("with ")[2].partition(", but")[0] for line in report.skipped}
    assert others == {"w": "a", "a": "w", "b": "scalar, w", "c": "w", "scalar": "b, w"}
    assert memory.tolist() == [[0] * 4] * 4 + [[1] * 4] + [[0] * 4]


@pytest.mark.parametrize("overlapping", [True, False])
def test_very_many_targets_of_one_memory_are_compared_in_little_time(tmp_path: Path, overlapping: bool) -> None:
    count, memory = 2000, np.zeros(4000, np.float32)
    state = {f"v{i}": memory[i : i + 100] if overlapping else memory[:100] for i in range(count)}
    save_alone({f"v{i}": np.full(100, i, np.float32) for i in range(count)}, tmp_path)
    start = time.process_time()
    report = load_alone(dict(state), tmp_path, None, LAX)
    assert time.process_time() - start < 10
    assert len(report.skipped) == count
    assert max(map(len, report.skipped)) < 120
    assert not memory.any()


def test_a_target_in_several_parts_is_named_once(tmp_path: Path) -> None:
    save_alone({"w": make_array((3, 4)), "v": make_array((1, 2), seed=1), "u": make_array((2, 4), seed=2)}, tmp_path)
    first, second = blank_like(make_array((1, 2))), blank_like(make_array((2, 4)))
    boxes = [Box((0, 2), (1, 2)), Box((1, 0), (2, 4))]
    target = ShardedArray((3, 4), DTYPES["float32"], boxes, [first, second])
    states: list[dict[str, Any]] = [{"w": target, "v": first, "u": second}, {}]
    for error in errors_of(try_load(states, tmp_path), StateDictMismatchError):
        assert sorted(error.problems) == [
            f"{a}: shares memory with {b}, but the stored data differ (rank 0)"
            for a, b in (("u", "w"), ("v", "w"), ("w", "u, v"))
        ]


# -- a tensor in several parts, one of which is not loaded


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_tensor_made_of_several_is_left_whole(tmp_path: Path, exchange: Any) -> None:
    save_alone({name: make_array((1, 30), seed=i) for i, name in enumerate("abvx")}, tmp_path)
    memory, other = blank_like(make_array((2, 30))), blank_like(make_array((1, 30)))
    recipes = {"w": concat(stored("a"), stored("b"))}
    options = LoadOptions(strict=False, recipes=recipes, exchange=exchange, timeout=60)
    report, _ = load_on([{"w": memory, "v": memory[:1], "x": other}, {}], tmp_path, options=options)
    assert report.skipped_keys == ("w", "v")
    assert same_bits(memory, blank_like(memory))
    assert same_bits(other, make_array((1, 30), seed=3))


def test_a_tensor_of_several_boxes_is_left_whole(tmp_path: Path) -> None:
    save_alone({"w": make_array((3, 4)), "v": make_array((1, 2), seed=1)}, tmp_path)
    first, second = blank_like(make_array((1, 2))), blank_like(make_array((2, 4)))
    target = ShardedArray((3, 4), DTYPES["float32"], [Box((0, 2), (1, 2)), Box((1, 0), (2, 4))], [first, second])
    report = load_alone({"w": target, "v": first}, tmp_path, None, LAX)
    assert report.skipped_keys == ("w", "v")
    assert same_bits(first, blank_like(first))
    assert same_bits(second, blank_like(second))


def test_a_tensor_of_which_one_box_is_uncovered_is_left_whole(tmp_path: Path) -> None:
    save_alone({"w": make_array((10, 4))}, tmp_path)
    pieces = [blank_like(make_array((2, 4))) for _ in range(2)]
    target = ShardedArray((10, 4), DTYPES["float32"], [Box((0, 0), (2, 4)), Box((9, 0), (2, 4))], pieces)
    report = load_alone({"w": target}, tmp_path, None, LAX)
    assert report.skipped_keys == ("w",)
    assert all(same_bits(piece, blank_like(piece)) for piece in pieces)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_distributed_tensor_that_one_rank_leaves_is_left_on_all(tmp_path: Path, exchange: Any) -> None:
    array, options = make_array((4, 30)), LoadOptions(strict=False, exchange=exchange, timeout=60)
    save_alone({"w": array, "plain": make_array((2, 30), seed=1), "all": array}, tmp_path)
    parts, others = [[blank_like(array[:2]) for _ in range(2)] for _ in range(2)]
    wholly = sharded(array, [rows_of(array.shape, rank, 2) for rank in range(2)], fill=False)
    states = [
        {"w": ShardedArray((4, 30), DTYPES["float32"], [Box((2 * rank, 0), (2, 30))], [parts[rank]]), "all": wholly}
        for rank in range(2)
    ]
    reports = load_on([states[0] | {"plain": parts[0]}, states[1] | {"plain": others[1]}], tmp_path, options=options)
    assert reports[0].skipped_keys == ("w", "plain")
    assert reports[1].skipped == ("w: shares memory with plain, but the stored data differ (rank 0)",)
    assert all(same_bits(part, blank_like(part)) for part in parts)
    assert same_bits(others[1], make_array((2, 30), seed=1)), "a plain tensor is the rank's own"
    check_pieces(wholly, array)


def test_a_distributed_tensor_of_which_one_part_is_not_stored_is_left_on_all(tmp_path: Path) -> None:
    save_alone({"odd": make_array((10, 4))}, tmp_path)
    pieces = [blank_like(make_array((2, 4))) for _ in range(2)]
    good = ShardedArray((10, 4), DTYPES["float32"], [Box((0, 0), (2, 4))], [pieces[0]])
    reports = load_on([{"odd": good}, {"odd": uncovered(pieces[1])}, {}], tmp_path, options=LAX)
    assert [report.skipped_keys for report in reports] == [("odd",), ("odd",), ()]
    assert reports[0].skipped == (f"{reports[1].skipped[0]} (rank 1)",)
    assert all(same_bits(piece, blank_like(piece)) for piece in pieces)


def test_what_one_rank_leaves_is_told_from_another_tensor_of_the_same_flat_key(tmp_path: Path) -> None:
    array = make_array((4, 30))
    save_alone({"a.b": array, "a": {"b": array}}, tmp_path)
    states = [{"a.b": rows_on(array, rank), "a": {"b": rows_on(array, rank)}} for rank in range(2)]
    states[1]["a.b"] = rows_on(array.astype(np.float64), 1)  # another dtype
    reports = load_on(states, tmp_path, options=LAX)
    assert reports[0].skipped == (f"{reports[1].skipped[0]} (rank 1)",)
    assert not any(state["a.b"].pieces[0].any() for state in states)
    for rank, state in enumerate(states):
        assert same_bits(state["a"]["b"].pieces[0], array[2 * rank : 2 * rank + 2])


def test_what_one_rank_leaves_is_found_where_others_nest_it_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = list[Any]()  # what was called filled: from such parameters master weights are set
    monkeypatch.setattr(NumpyAdapter, "change", lambda _, tensors: changed.extend(tensors))
    array = make_array((4, 30))
    save_alone({"a": {"b": array}}, tmp_path)
    good, bad = rows_on(array, 0), rows_on(array.astype(np.float64), 1)
    reports = load_on([{"a": {"b": good}}, {"a.b": bad}], tmp_path, options=LAX)
    assert reports[0].skipped == (f"{reports[1].skipped[0]} (rank 1)",)
    assert not good.pieces[0].any()
    assert changed == []


@pytest.mark.parametrize("options", [LAX, LoadOptions(allow_missing=["a.b"], timeout=60)], ids=["lax", "missing"])
def test_what_one_rank_does_not_find_by_what_else_it_wants_is_left_on_all(tmp_path: Path, options: LoadOptions) -> None:
    array = make_array((4, 30))
    save_alone({"a": {"b": array}}, tmp_path)
    states: list[dict[str, Any]] = [{"a.b": rows_on(array, rank)} for rank in range(2)]
    states[1]["a"] = {"b": blank_like(array)}  # two of one flat key, so only this one is found
    reports = load_on([*states, {}], tmp_path, options=options)
    assert [report.skipped_keys for report in reports] == [("a.b",), ("a.b",), ()]
    assert "for other ranks do not find it" in reports[0].skipped[0]
    assert [len(report.skipped) for report in reports] == [1, 1, 0]
    assert not any(state["a.b"].pieces[0].any() for state in states)
    assert same_bits(states[1]["a"]["b"], array)


def rows_on(array: np.ndarray, rank: int) -> ShardedArray:
    """A rank's half of a tensor, to be filled."""
    return shard_array(array, [Box((2 * rank, 0), (2, 30))], fill=False)


def test_a_sum_of_which_one_rank_leaves_its_addend_is_left_on_all(tmp_path: Path) -> None:
    save_alone({"a": make_array((8,)), "b": make_array((8,), seed=1)}, tmp_path)
    memory = [np.full(8, 10 + rank, np.float32) for rank in range(2)]
    states: list[dict[str, Any]] = [
        {"a": ShardedArray((8,), DTYPES["float32"], [Box((0,), (8,))], [one], False, Reduction("sum", rank, 2))}
        for rank, one in enumerate(memory)
    ]
    reports = load_on([states[0] | {"b": memory[0]}, states[1]], tmp_path, options=LAX)
    assert reports[1].skipped_keys == ("a",)
    assert [one.tolist() for one in memory] == [[10] * 8, [11] * 8]


# -- targets for which there is nothing


def uncovered(memory: np.ndarray) -> ShardedArray:
    """A target that says to lie where no stored shard does, as only a mistaken framework could."""
    return ShardedArray((10, 4), DTYPES["float32"], [Box((9, 0), (2, 4))], [memory])


def test_an_uncovered_target_does_not_stand_in_the_way_of_one_with_the_same_memory(tmp_path: Path) -> None:
    good = make_array((2, 4))
    save_alone({"good": good, "odd": make_array((10, 4), seed=1)}, tmp_path)
    memory = blank_like(good)
    report = load_alone({"good": memory, "odd": uncovered(memory)}, tmp_path, None, LAX)
    assert len(report.skipped) == 1
    assert report.skipped[0].startswith("odd: ")
    assert same_bits(memory, good)


def test_the_memory_of_an_uncovered_target_between_others_is_left_alone(tmp_path: Path) -> None:
    good = make_array((2, 4))
    save_alone({"good": good, "odd": make_array((10, 4), seed=1)}, tmp_path)
    memory = blank_like(make_array((2, 8)))
    report = load_alone({"good": memory[:, :4], "odd": uncovered(memory[:, 4:])}, tmp_path, None, LAX)
    assert len(report.skipped) == 1
    assert same_bits(memory[:, :4].copy(), good)
    assert same_bits(memory[:, 4:].copy(), blank_like(good))


def test_none_stays_where_there_is_no_value_to_take(tmp_path: Path) -> None:
    save_alone({"a": 1, "tensors": {"w": np.arange(3)}, "values": {"x": 2}, "empty": {}}, tmp_path)
    state = {"a": None, "missing": None, "tensors": None, "values": None, "empty": None}
    report = load_alone(state, tmp_path, None, LAX)
    assert state == {"a": 1, "missing": None, "tensors": None, "values": {"x": 2}, "empty": {}}
    assert len(report.skipped) == 2


def test_a_target_whose_own_parts_differ_is_told_from_those_that_share_with_others(tmp_path: Path) -> None:
    memory, stored = np.zeros((1, 8), np.float32), make_array((2, 4))
    boxes = [Box((0, 0), (1, 4)), Box((1, 0), (1, 4))]
    target = ShardedArray((2, 4), DTYPES["float32"], boxes, [memory[:, :4], memory[:, 2:6]])
    save_alone({"w": stored, "v": stored[1:, 2:]}, tmp_path)
    with pytest.raises(StateDictMismatchError) as caught:
        load_alone({"w": target, "v": memory[:, 4:6]}, tmp_path)
    assert list(caught.value.problems) == ["w: elements of the target share memory with each other"]
    assert not memory.any()
