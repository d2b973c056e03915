"""The tree of a state_dict, taken apart and put together."""

from __future__ import annotations

import collections
import enum
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.errors import UnsupportedValueError
from paddle_dist_ckpt.testing import NumpyAdapter, run_ranks
from paddle_dist_ckpt.tree.building import assign, build_tree
from paddle_dist_ckpt.tree.state_dict import Leaves, flatten
from test.jobs import little_memory
from test.strategies import equal, examples


class Tensor:
    """Stands for a tensor; equal only to itself."""


class Adapter(NumpyAdapter):
    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Tensor)


ADAPTER = Adapter()


def paths(state_dict: dict[Any, Any]) -> list[str]:
    found = flatten(state_dict, ADAPTER)
    return [*found.tensor_paths, *found.value_paths]


@pytest.mark.parametrize("given", [Adapter(), None, [1]])
def test_what_is_no_dict_is_refused_and_for_an_object_with_a_state_it_says_what_to_pass(given: Any) -> None:
    if isinstance(given, Adapter):
        given.state_dict = dict  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=f"^state_dict must be a dict, not {type(given).__name__}") as caught:
        flatten(given, ADAPTER)
    assert ("; pass {'model': model, 'optimizer': optimizer}" in str(caught.value)) == isinstance(given, Adapter)


def pairs(found: Leaves) -> list[tuple[str, Any]]:
    return [
        *zip(found.tensor_paths, found.tensors, strict=True),
        *zip(found.value_paths, found.values, strict=True),
    ]


def in_order(tree: Any) -> Any:
    """The same with every dict sorted: tensors and values are told apart, so their order is not kept."""
    if isinstance(tree, dict):
        return {key: in_order(tree[key]) for key in sorted(tree, key=repr)}
    return type(tree)(map(in_order, tree)) if type(tree) in (list, tuple) else tree


def test_containers_of_tensors_are_taken_apart_and_others_are_leaves() -> None:
    t = Tensor()
    state = {"a": {"b.c": t, 5: {}}, "l": [1, t, (t, [])], "v": [1, {"x": (2,)}], "odd": {1.5: 1}, "e": {}}
    found = flatten(state, ADAPTER)
    assert found.tensor_paths == ["/a/b.c", "/l/~l1", "/l/~l2/~t0"]
    assert all(tensor is t for tensor in found.tensors)
    assert list(zip(found.value_paths, found.values, strict=True)) == [
        ("/a/~i5", {}),
        ("/l/~l0", 1),
        ("/l/~l2/~t1", []),
        ("/v", [1, {"x": (2,)}]),
        ("/odd", {1.5: 1}),
        ("/e", {}),
    ]


def test_items_of_long_lists_and_dicts_are_not_asked_about_one_by_one() -> None:
    asked = list[Any]()

    class Asking(Adapter):
        def is_object(self, value: Any) -> bool:
            asked.append(value)
            return False

    numbers = [*range(10_000)]
    names = {f"k{number}": number for number in numbers}
    found = flatten({"lists": [numbers, {"inner": numbers}], "mixed": [*numbers, object()], "names": names}, Asking())
    assert found.value_paths == ["/lists", "/mixed", *(f"/names/{name}" for name in names)]
    assert sum(type(value) is int for value in asked) == 10_000, "those beside something else, once"


state_keys = st.one_of(st.text(max_size=3), st.text(st.sampled_from("~/.0i"), max_size=3), st.integers(-3, 3))
leaves = st.one_of(
    st.builds(Tensor), st.none(), st.integers(), st.just([]), st.just({}), st.just(()), st.text(max_size=2)
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(state_keys, inner, max_size=3),
    ),
    max_leaves=10,
)


@examples(25)
@given(st.dictionaries(state_keys, trees, max_size=4))
def test_a_state_dict_comes_back_from_its_leaves(state: dict[Any, Any]) -> None:
    found = flatten(state, ADAPTER)
    assert len({path for path, _ in pairs(found)}) == len(pairs(found))
    assert all(map(ADAPTER.is_tensor, found.tensors))
    assert not any(map(ADAPTER.is_tensor, found.values))
    assert equal(in_order(build_tree(pairs(found))), in_order(state))


@examples(25)
@given(st.dictionaries(state_keys, trees, max_size=4))
def test_assign_sets_every_leaf_where_it_was(state: dict[Any, Any]) -> None:
    found = flatten(state, ADAPTER)
    values = {path: ("new", i) for i, (path, _) in enumerate(pairs(found))}
    expected = build_tree(values.items())
    assign(state, values)
    assert equal(in_order(state), in_order(expected))


def test_assign_keeps_dicts_and_lists_and_replaces_tuples() -> None:
    inner, items = {"x": 1}, [1, 2]
    state = {"d": inner, "l": items, "t": ({"y": 1}, 2)}
    kept = state["t"][0]
    assign(state, {"/d/x": 5, "/l/~l1": 6, "/t/~t1": 7})
    assert state == {"d": {"x": 5}, "l": [1, 6], "t": ({"y": 1}, 7)}
    assert state["d"] is inner
    assert state["l"] is items
    assert state["t"][0] is kept


def test_subclasses_of_dict_are_taken_apart_too() -> None:
    assert paths(collections.OrderedDict(b=Tensor(), a=collections.defaultdict(int, x=1))) == ["/b", "/a/x"]


def test_build_tree_fills_places_that_no_path_names() -> None:
    assert build_tree([("/a/~l2", 1), ("/b/~t1", 2)]) == {"a": [None, None, 1], "b": (None, 2)}
    assert build_tree([("", 5)]) == 5
    assert build_tree([]) == {}


def test_build_tree_takes_little_more_memory_than_the_tree() -> None:
    leaves = [(f"/k{i}/v", i) for i in range(20_000)]
    tracemalloc.start()
    tree = build_tree(leaves)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree["k7"] == {"v": 7}
    with little_memory(11 * size // 10):
        build_tree(leaves)


def test_dicts_are_leaves_as_they_are() -> None:
    ordered = collections.OrderedDict(x=1)
    assert build_tree([("/a", {"x": 1}), ("/b/~l0", {}), ("/c", ordered)]) == {"a": {"x": 1}, "b": [{}], "c": ordered}
    with pytest.raises(ValueError, match="/a/y"):
        build_tree([("/a", {"x": 1}), ("/a/y", 2)])
    state = {"a": {}, "b": {"x": 1}}
    kept = state["a"]
    assign(state, {"/a": {"z": 2}, "/b": {"y": 3}})
    assert state == {"a": {"z": 2}, "b": {"y": 3}}
    assert state["a"] is kept


@pytest.mark.parametrize("order", [("/a", "/a/b"), ("/a/b", "/a")])
def test_build_tree_refuses_a_leaf_that_is_a_container(order: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="/a"):
        build_tree((path, 1) for path in order)


@pytest.mark.parametrize("state", [None, [], "x", [("a", 1)]])
def test_what_is_no_dict_is_refused(state: Any) -> None:
    with pytest.raises(TypeError, match="state_dict"):
        flatten(state, ADAPTER)


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("key", [1.5, None, True, (1,), b"x", Colour.RED, np.int64(3)])
def test_keys_above_a_tensor_are_str_or_int(key: Any) -> None:
    for state in ({key: Tensor()}, {"model": {key: Tensor()}}, {"model": {key: [{"x": Tensor()}]}}):
        with pytest.raises(UnsupportedValueError) as caught:
            flatten(state, ADAPTER)
        assert repr(key) in str(caught.value)


def test_a_namedtuple_of_tensors_is_refused_by_name() -> None:
    pair = collections.namedtuple("pair", "x y")
    with pytest.raises(UnsupportedValueError, match=r"^model\.p"):
        flatten({"model": {"p": pair(Tensor(), 1)}}, ADAPTER)


@pytest.mark.parametrize("levels", [200, 210])
def test_a_tree_deeper_than_can_be_read_is_refused(levels: int) -> None:
    tree: Any = Tensor()
    for _ in range(levels):
        tree = {"k": tree}
    if levels == 200:
        assert paths(tree) == ["/k" * levels]
    else:
        with pytest.raises(UnsupportedValueError, match="nested deeper than 200 levels"):
            paths(tree)


def test_a_tree_without_an_end_is_refused() -> None:
    endless: dict[str, Any] = {"t": Tensor()}
    endless["self"] = endless
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        flatten(endless, ADAPTER)
    items: list[Any] = [Tensor()]
    items.append(items)
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        flatten({"items": items}, ADAPTER)


AWKWARD = ["\ud800", 10**5_000, -(2**70), "", "~", "/", "a\\b", "\0", "__metadata__", "%", "[0:1]"]


@pytest.mark.parametrize("key", AWKWARD, ids=map(str, range(len(AWKWARD))))
def test_an_awkward_key_comes_back_or_is_refused_by_the_right_error(key: Any, tmp_path: Path) -> None:
    def save_and_load(rank: Any) -> None:
        rank.save({key: np.arange(3), "other": {key: 7}}, tmp_path)
        loaded = {key: np.zeros(3, np.int64), "other": {key: None}}
        rank.load(loaded, tmp_path)
        assert loaded[key].tolist() == [0, 1, 2]
        assert loaded["other"][key] == 7

    (result,) = run_ranks(1, save_and_load)
    assert result is None or isinstance(result, UnsupportedValueError), repr(result)[:300]
