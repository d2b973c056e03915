"""Entries that are stored under other keys: LoadOptions.key_map."""

from __future__ import annotations

import fnmatch
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import CheckpointError, LoadOptions, LoadReport, PerRank, StateDictMismatchError, export, stored
from paddle_dist_ckpt.core.box import whole
from paddle_dist_ckpt.loading.key_map import matcher
from paddle_dist_ckpt.testing import ShardedArray, run_ranks, shard_array
from test.jobs import Counter, all_ok, load_whole, save_alone, saved_by_two
from test.pace import slowness

LARGE = "x" * 10_000  # an entry of a data file


def loaded(path: Path, target: dict[str, Any], key_map: Any, **more: Any) -> LoadReport:
    """Load alone; the target is filled."""
    options = LoadOptions(timeout=60, key_map=key_map, **more)
    (report,) = all_ok(run_ranks(1, lambda rank: rank.load(target, path, options=options)))
    return report


STATE: dict[str, Any] = {
    "net": {"fc.weight": np.arange(6.0), "fc.bias": np.ones(2), "deep": {"text": LARGE, "list": [1, (2, 3)]}},
    "epoch": 3,
}


@pytest.mark.parametrize(
    "key_map",
    [
        {"model": "net", "steps.epoch": "epoch"},
        {"model.fc.weight": "net.fc.weight", "model.fc": "net.fc", "model": "net", "steps.epoch": "epoch"},
        lambda key: key.replace("model", "net").replace("steps.epoch", "epoch"),
    ],
)
def test_tensors_and_values_of_other_containers(tmp_path: Path, key_map: Any) -> None:
    saved_by_two(tmp_path, STATE)
    target: dict[str, Any] = {
        "model": {"fc.weight": np.zeros(6), "fc.bias": np.zeros(2), "deep": {"text": None, "list": []}},
        "steps": {"epoch": 0},
    }
    report = loaded(tmp_path, target, key_map)
    assert target["model"]["fc.weight"].tolist() == STATE["net"]["fc.weight"].tolist()
    assert target["model"]["fc.bias"].tolist() == [1, 1]
    assert target["model"]["deep"] == STATE["net"]["deep"]
    assert target["steps"]["epoch"] == 3
    assert report.unused_keys == ()


def test_exchanged_and_one_for_several(tmp_path: Path) -> None:
    saved_by_two(tmp_path, {"a": np.zeros(2), "b": np.ones(2), "x": LARGE, "y": "y"})
    target = {"a": np.full(2, 9.0), "b": np.full(2, 9.0), "c": np.full(2, 9.0), "x": "", "y": "", "z": ""}
    loaded(tmp_path, target, {"a": "b", "b": "a", "c": "b", "x": "y", "y": "x", "z": "x"})
    assert [target[key].tolist() for key in "abc"] == [[1, 1], [0, 0], [1, 1]]
    assert (target["x"], target["y"], target["z"]) == ("y", LARGE, LARGE)


def test_none_leaves_an_entry_as_it_is(tmp_path: Path) -> None:
    saved_by_two(tmp_path, {"a": np.zeros(2), "v": 1, "w": np.ones(2), "counter": Counter()})
    own = Counter()
    own.state = {"n": 8}
    target = {"a": np.full(2, 9.0), "b": np.full(2, 9.0), "v": 7, "gone": {"x": 1}, "counter": own}
    report = loaded(tmp_path, target, {"a": None, "b": "a", "v": None, "gone": None, "counter": None})
    assert target["a"].tolist() == [9, 9]
    assert target["b"].tolist() == [0, 0]
    assert (target["v"], target["gone"], own.state) == (7, {"x": 1}, {"n": 8})
    assert set(report.unused_keys) == {"v", "w", "counter.n"}


def test_a_key_that_is_missing_does_not_fall_back(tmp_path: Path) -> None:
    saved_by_two(tmp_path, {"a": np.zeros(2), "v": 1})
    for strict in (True, False):
        target = {"a": np.full(2, 9.0), "b": np.full(2, 9.0), "v": 7}
        options = LoadOptions(timeout=60, strict=strict, key_map={"a": "nowhere", "b": "a", "v": "none"})
        (result,) = run_ranks(1, lambda rank, t=target, o=options: rank.load(t, tmp_path, options=o))
        assert target["a"].tolist() == [9, 9]
        assert target["v"] == 7
        if strict:
            assert isinstance(result, StateDictMismatchError)
            assert len(result.problems) == 2
        else:
            assert isinstance(result, LoadReport)
            assert len(result.skipped) == 2
            assert target["b"].tolist() == [0, 0]


def test_objects_subtrees_and_ranks_own_values(tmp_path: Path) -> None:
    counter = Counter()
    counter.state = {"n": 5, "table": np.arange(3), "text": LARGE}
    all_ok(
        run_ranks(
            2,
            lambda rank: rank.save(
                {"old": {"counter": counter, "seed": PerRank(rank.rank)}, "v": {"p": [1]}}, tmp_path
            ),
        )
    )
    found = [Counter(), Counter()]
    targets = [{"new": {"counter": found[i], "seed": PerRank(None)}, "w": None} for i in range(2)]
    options = LoadOptions(timeout=60, key_map={"new": "old", "w": "v"})
    all_ok(run_ranks(2, lambda rank: rank.load(targets[rank.rank], tmp_path, options=options)))
    for i, target in enumerate(targets):
        assert target["new"]["seed"].value == i
        assert target["w"] == {"p": [1]}
        state = found[i].state
        assert (state["n"], state["table"].tolist(), state["text"]) == (5, [0, 1, 2], LARGE)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["", "one.pdparams"])
@pytest.mark.parametrize(
    ("key_map", "found"),
    [
        ({"counter.t": None}, 0.0),
        ({"counter.t": "x"}, 2.0),
        (lambda key: "x" if key == "counter.t" else key, 2.0),
        ({"counter": "other", "other": "counter", "counter.t": "x"}, 2.0),
    ],
)
def test_a_tensor_of_an_object_that_takes_all_that_is_stored(
    tmp_path: Path, key_map: Any, found: float, name: str, strict: bool
) -> None:
    save_alone({"counter": with_tensor(1.0), "other": with_tensor(3.0), "x": tensor(2.0)}, tmp_path)
    if name:
        export(tmp_path, tmp_path / name, "pdparams")
    target = {"counter": with_tensor(0.0), "other": with_tensor(0.0)}
    own = target["counter"].state["t"]
    report = loaded(tmp_path / name, target, key_map, strict=strict)
    assert own.pieces[0].tolist() == [found] * 2
    assert target["counter"].state["table"] == [1]
    assert target["counter"].state["t"] is own
    assert report.skipped == ()


@pytest.mark.parametrize(
    ("key_map", "more", "key"),
    [({"other": "counter"}, {"counter": 0.0}, "other.t"), ({"x": "counter.t"}, {"x": 0.0}, "counter.t")],
)
def test_a_tensor_that_an_object_does_not_have_is_missed_there_whoever_else_wants_it(
    tmp_path: Path, key_map: Any, more: dict[str, float], key: str
) -> None:
    save_alone({"counter": with_tensor(1.0)}, tmp_path)
    asked = {name: tensor(value) if name == "x" else with_tensor(value) for name, value in more.items()}
    with pytest.raises(StateDictMismatchError) as caught:
        loaded(tmp_path, {key.partition(".")[0]: holder([0]), **asked}, key_map)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{key}: the state_dict has no such entry in its object")


@pytest.mark.parametrize("options", [{"per_rank": "by_rank"}, {"strict": False}])
def test_values_of_ranks_that_are_left_are_named_as_they_are_wanted(tmp_path: Path, options: dict[str, Any]) -> None:
    all_ok(run_ranks(1, lambda rank: rank.save({"seed": PerRank(7), "counter": holder(PerRank(8))}, tmp_path)))
    key_map, counters = {"a": "seed", "b": "seed", "other": "counter"}, [holder(PerRank(i)) for i in range(2)]
    states = [{"a": PerRank(i), "b": PerRank(-i), "other": counters[i]} for i in range(2)]
    load = LoadOptions(timeout=60, key_map=key_map, **options)
    _, report = all_ok(run_ranks(2, lambda rank: rank.load(states[rank.rank], tmp_path, options=load)))
    assert set(report.skipped_keys) == {"a", "b", "other.table"}
    assert (states[1]["a"].value, states[1]["b"].value, counters[1].state["table"].value) == (1, -1, 1)


@pytest.mark.parametrize("text", ["a", LARGE])
@pytest.mark.parametrize("meant", ["other", None])
def test_an_object_in_another_that_is_stored_elsewhere(tmp_path: Path, meant: str | None, text: str) -> None:
    outer, stored_inner, other = holder(1), holder(np.ones(2)), holder(np.full(2, 2.0))
    stored_inner.state |= {"text": f"inner {text}", "more": 1}
    other.state["text"] = f"other {text}"
    outer.state["inner"] = stored_inner
    save_alone({"outer": outer, "other": other}, tmp_path)
    inner, target = holder(np.zeros(2)), holder(0)
    target.state["inner"] = inner
    report = loaded(tmp_path, {"outer": target}, {"outer.inner": meant})
    assert target.state["table"] == 1
    assert target.state["inner"] is inner
    assert inner.state.keys() == ({"table"} if meant is None else {"table", "text"})
    assert inner.state["table"].tolist() == ([0, 0] if meant is None else [2, 2])
    assert inner.state.get("text") in (None, f"other {text}")
    assert set(report.unused_keys) >= {f"outer.inner.{name}" for name in stored_inner.state}


@pytest.mark.parametrize(
    ("entry", "hint"), [("model.haed", ""), ("model.", "no dot or star at the end: 'model'"), ("model.*", ": 'model'")]
)
def test_an_entry_that_matches_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, entry: str, hint: str) -> None:
    saved_by_two(tmp_path, {"model": {"head": np.ones(2), "body": np.ones(2)}})
    key_map = {entry: "x", "model.body": "model.body", "model": "model"}
    said = f"key_map: {entry!r} matches none of the wanted keys"
    for strict in (True, False):
        target = {"model": {"head": np.zeros(2), "body": np.zeros(2)}}
        caplog.clear()
        loaded(tmp_path, target, key_map, strict=strict)
        assert target["model"]["head"].tolist() == [1, 1]
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert said in warning
        assert hint in warning
    with pytest.raises(StateDictMismatchError) as caught:
        loaded(tmp_path, target, key_map, strict="all")
    (problem,) = caught.value.problems
    assert said in problem
    assert hint in problem
    with pytest.raises(StateDictMismatchError, match=re.escape(said)):  # beside what does not fit
        loaded(tmp_path, {"other": np.zeros(2)}, {entry: "x", "other": "other"})


@pytest.mark.parametrize("entry", ["counter.n", "counter.table", "counter.deep.n", "counter.deep"])
@pytest.mark.parametrize("meant", [None, "x"])
def test_what_goes_with_its_object_matches_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, entry: str, meant: str | None
) -> None:
    counter = holder(np.arange(3))
    counter.state |= {"n": 1, "deep": {"n": 2}}
    save_alone({"counter": counter, "x": 7}, tmp_path)
    target = holder(np.zeros(3))
    target.state |= {"n": 0, "deep": {"n": 0}}
    loaded(tmp_path, {"counter": target}, {entry: meant})
    assert (target.state["n"], target.state["deep"], target.state["table"].tolist()) == (1, {"n": 2}, [0, 1, 2])
    assert f"key_map: {entry!r} matches none of the wanted keys" in caplog.text
    with pytest.raises(StateDictMismatchError, match=f"{entry!r} matches none of the wanted keys"):
        loaded(tmp_path, {"counter": target}, {entry: meant}, strict="all", allow_unused=["x"])
    caplog.clear()
    loaded(tmp_path, {"counter": target}, {"counter": None})
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("leaves", [True, False])
def test_what_a_function_says_of_entries_that_go_with_their_object_matches_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, leaves: bool
) -> None:
    counter, other = holder(np.arange(3)), holder(np.ones(3))
    save_alone({"counter": counter, "other": other}, tmp_path)
    target = {"counter": holder(np.zeros(3))}

    def moved(key: str) -> str | None:
        return None if leaves and key.startswith("counter.") else key.replace("counter.", "other.")

    loaded(tmp_path, target, moved)
    assert target["counter"].state["table"].tolist() == [0, 1, 2]
    said = "key_map: 'counter.table' matches none of the wanted keys (what an object has goes with it: 'counter')"
    assert said in caplog.text
    with pytest.raises(StateDictMismatchError, match=re.escape(said)):
        loaded(tmp_path, target, moved, strict="all", allow_unused=["other*"])


@pytest.mark.parametrize(
    ("key_map", "found"),
    [
        (lambda key: None, 9),
        (lambda key: f"other.{key}", 2),
        (lambda key: key.replace("counter", "other.counter"), 2),
        ({"counter": "other.counter"}.__getitem__, 2),  # which knows of no other key
        (lambda key: {"counter": "other.counter"}.get(key, key), 2),
        (lambda key: None if key == "counter" else key, 9),
    ],
)
def test_a_function_that_says_the_same_of_an_object_and_its_entries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key_map: Any, found: int
) -> None:
    save_alone({"counter": holder(np.ones(1)), "other": {"counter": holder(np.full(1, 2.0))}}, tmp_path)
    target = {"counter": holder(np.full(1, 9.0))}
    loaded(tmp_path, target, key_map)
    assert target["counter"].state["table"].tolist() == [found]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_an_entry_that_matches_on_one_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_by_two(tmp_path, {"a": np.ones(2), "b": np.ones(2)})
    options = LoadOptions(timeout=60, key_map={"x": "a", "y": "b"})
    targets = [{"x": np.zeros(2)}, {"y": np.zeros(2)}]
    all_ok(run_ranks(2, lambda rank: rank.load(targets[rank.rank], tmp_path, options=options)))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    options = LoadOptions(timeout=60, strict="all", key_map={"x": "a", "y": "b", "z": "c"})
    for result in run_ranks(2, lambda rank: rank.load(targets[rank.rank], tmp_path, options=options)):
        assert isinstance(result, StateDictMismatchError)
        assert result.problems == ("key_map: 'z' matches none of the wanted keys",)


def test_a_key_that_two_have_unless_they_are_escaped_is_that_of_none(tmp_path: Path) -> None:
    save_alone({"a.b": {"c": np.ones(2)}, "a": {"b.c": np.full(2, 2.0)}, "a.b.c": np.full(2, 3.0)}, tmp_path)
    target = {"x": np.zeros(2), "y": np.zeros(2), "z": np.zeros(2)}
    loaded(tmp_path, target, {"x": "a\\.b.c", "y": "a.b\\.c", "z": "a\\.b\\.c"})
    assert [array[0] for array in target.values()] == [1, 2, 3]
    for options in (LoadOptions(timeout=60, key_map={"x": "a.b.c"}), LoadOptions(recipes={"x": stored("a.b.c")})):
        (result,) = run_ranks(1, lambda rank, o=options: rank.load({"x": np.zeros(2)}, tmp_path, options=o))
        assert isinstance(result, StateDictMismatchError)
        assert re.search(r"^x: .*the checkpoint.* missing", result.problems[0])


def test_a_missing_entry_is_named_as_it_was_looked_up(tmp_path: Path) -> None:
    saved_by_two(tmp_path, {"model": {"weight": np.ones(2)}})
    with pytest.raises(StateDictMismatchError) as caught:
        loaded(tmp_path, {"model": {"weight": np.zeros(2)}}, {"model": "modle"})
    (problem,) = caught.value.problems
    assert "missing (looked up as 'modle.weight')" in problem


@pytest.mark.parametrize(
    ("wanted", "key_map", "call"),
    [
        ({"model": None}, None, "(path, prefix='model')"),
        ({"net": None}, {"net": "model"}, "(path, prefix='model')"),
        ({"model": {"weight": None}}, None, "(path, keys='model.weight')"),
    ],
)
def test_none_where_tensors_are_stored(tmp_path: Path, wanted: dict[str, Any], key_map: Any, call: str) -> None:
    saved_by_two(tmp_path, {"model": {"weight": np.ones(2)}})
    with pytest.raises(StateDictMismatchError) as caught:
        loaded(tmp_path, wanted, key_map)
    (problem,) = caught.value.problems
    assert "pass tensors or numpy arrays to be filled" in problem
    assert f"load_merged_state_dict{call}" in problem


def test_a_function_that_fails_or_returns_something_else(tmp_path: Path) -> None:
    saved_by_two(tmp_path, {"a": np.zeros(2)})

    def fails(key: str) -> str:
        raise KeyError(f"no idea of {key}")

    for function, text in ((fails, "no idea of a"), (lambda key: 7, "key_map('a') returned 7")):
        options = LoadOptions(timeout=60, key_map=function)
        target = {"a": np.ones(2)}
        results = run_ranks(2, lambda rank, t=target, o=options: rank.load(t, tmp_path, options=o))
        assert all(isinstance(result, Exception) for result in results)
        assert all(text in str(result) for result in results), results
        assert target["a"].tolist() == [1, 1]


@pytest.mark.parametrize("bad", [7, "model", {"a": 1}, {1: "a"}])
def test_bad_maps(bad: Any) -> None:
    with pytest.raises(TypeError, match="key_map"):
        LoadOptions(key_map=bad)


def test_merged_loads_have_the_keys_that_are_stored(tmp_path: Path) -> None:
    saved_by_two(tmp_path, {"a": np.zeros(2), "b": np.ones(2), "v": 1})
    for key_map in ({"a": None}, {"a": "b"}, {"v": None}, lambda key: "b"):
        merged = load_whole(tmp_path, options=LoadOptions(key_map=key_map))
        assert merged["a"].tolist() == [0, 0]
        assert (merged["b"].tolist(), merged["v"]) == ([1, 1], 1)


def test_what_is_wanted_twice_is_not_shared(tmp_path: Path) -> None:
    saved_by_two(tmp_path, {"a": list(range(3000)), "counter": holder(np.arange(4))})
    first, second = Counter(), Counter()
    target: dict[str, Any] = {"a": None, "b": None, "x": first, "y": second}
    loaded(tmp_path, target, {"b": "a", "x": "counter", "y": "counter"})
    assert target["a"] == target["b"] == list(range(3000))
    assert target["a"] is not target["b"]
    assert not np.shares_memory(first.state["table"], second.state["table"])


def holder(table: Any) -> Counter:
    counter = Counter()
    counter.state = {"table": table}
    return counter


def tensor(value: float) -> ShardedArray:
    return shard_array(np.full(2, value), [whole((2,))])


def with_tensor(value: float) -> Counter:
    counter = holder([1])
    counter.state["t"] = tensor(value)
    return counter


def test_views_of_one_memory_from_one_key_must_agree(tmp_path: Path) -> None:
    saved_by_two(tmp_path, {"a": np.array([1.0, 2.0, 3.0])})
    memory = np.zeros(4)
    options = LoadOptions(timeout=60, key_map={"b": "a"})
    (error,) = run_ranks(1, lambda rank: rank.load({"a": memory[:3], "b": memory[1:]}, tmp_path, options=options))
    assert isinstance(error, StateDictMismatchError)
    assert memory.tolist() == [0] * 4


def test_a_key_that_is_named_in_full_is_meant(tmp_path: Path) -> None:
    saved_by_two(tmp_path, {"m": {"fc.weight": np.ones(2)}, "o": {"fc.weight.moment1": np.ones(2)}})
    target = {"m": {"fc.weight": np.zeros(2)}, "o": {"fc.weight.moment1": np.zeros(2)}}
    options = LoadOptions(timeout=60, key_map={"o.fc.weight.moment1": "o.fc.weight.other"})
    (error,) = run_ranks(1, lambda rank: rank.load(target, tmp_path, options=options))
    assert isinstance(error, StateDictMismatchError)


def test_a_hint_names_what_may_be_meant(tmp_path: Path) -> None:
    saved_by_two(tmp_path, {"net": {"weight": np.zeros(2)}})
    options = LoadOptions(timeout=60, key_map={"weight": "net.weihgt"})
    (error,) = run_ranks(1, lambda rank: rank.load({"weight": np.ones(2)}, tmp_path, options=options))
    assert isinstance(error, CheckpointError)
    assert "net.weight" in str(error)


@pytest.mark.parametrize(
    ("stored_at", "wanted", "key_map"),
    [
        ({"x": 1}, {"": 0}, {"": "x"}),
        ({"x": {"a": 1}}, {"": {"a": 0}}, {"": "x"}),
        ({"x": 1, "": {"a": 0}}, {"y": 0, "": {"a": 1}}, {"y": "x", "": None}),
        ({"": {"a": 1}, "a": 0}, {"x": 0}, {"x": ".a"}),
    ],
)
def test_an_empty_key_is_a_key(
    tmp_path: Path, stored_at: dict[str, Any], wanted: dict[str, Any], key_map: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def arrays(tree: Any) -> Any:
        return {key: arrays(one) for key, one in tree.items()} if isinstance(tree, dict) else np.full(2, tree)

    def leaves(tree: Any) -> list[float]:
        return [x for one in tree.values() for x in leaves(one)] if isinstance(tree, dict) else tree.tolist()

    save_alone(arrays(stored_at), tmp_path)
    target = arrays(wanted)
    loaded(tmp_path, target, key_map)
    assert set(leaves(target)) == {1}
    assert "matches none" not in caplog.text


def test_what_is_missing_below_an_empty_key_is_not_taken_from_elsewhere(tmp_path: Path) -> None:
    save_alone({"a": np.ones(2)}, tmp_path)
    with pytest.raises(StateDictMismatchError, match="missing"):
        loaded(tmp_path, {"x": np.zeros(2)}, {"x": ".a"})


def test_a_function_that_fails_is_named(tmp_path: Path) -> None:
    save_alone({"w": np.ones(3)}, tmp_path)
    with pytest.raises(ValueError, match=r"key_map\('w'\) failed: ZeroDivisionError"):
        loaded(tmp_path, {"w": np.zeros(3)}, lambda key: str(1 / 0))


@pytest.mark.parametrize(
    ("patterns", "matched"),
    [
        ([], []),
        (["a", "a[0]", "x"], ["a"]),
        (["a.*", "b"], ["a.b", "b"]),
        (["?", "a[[]0]"], ["a", "a[0]", "b", "A", "\n"]),
        (["a.b", "a["], ["a.b"]),
    ],
)
def test_patterns_match_as_fnmatch_has_them(patterns: list[str], matched: list[str]) -> None:
    keys = ["a", "a.b", "a[0]", "b", "A", "\n", "a\n", ""]
    matches = matcher(patterns)
    assert [key for key in keys if matches(key)] == matched
    assert matched == [key for key in keys if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]


def test_as_many_patterns_as_keys_take_time_in_proportion() -> None:
    keys = [f"layers.{i}.weight" for i in range(20_000)]
    start = time.process_time()
    matches = matcher(keys)
    assert all(map(matches, keys))
    assert not any(matches(key + "_") for key in keys)
    assert time.process_time() - start < 0.5 * slowness()
