"""How strict a load is: keys that may be missing, and stored ones that nothing asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import LoadOptions, LoadReport, PerRank, StateDictMismatchError, stored
from paddle_dist_ckpt.core.box import whole
from paddle_dist_ckpt.testing import run_ranks, shard_array
from test.jobs import Counter, all_ok, errors_of, load_whole, saved_by_two
from test.readers.torch_writer import DCPWriter, saved, tensor

LARGE = "x" * 10_000  # an entry of a data file
STATE: dict[str, Any] = {"net": {"weight": np.arange(6.0), "bias": np.ones(2)}, "text": LARGE, "epoch": 3, "e": {}}


def outcomes(path: Path, targets: list[dict[str, Any]], *options: LoadOptions) -> list[Any]:
    each = options if len(options) > 1 else options * len(targets)
    return run_ranks(len(targets), lambda rank: rank.load(targets[rank.rank], path, options=each[rank.rank]))


def loaded(path: Path, targets: list[dict[str, Any]], **options: Any) -> list[LoadReport]:
    return all_ok(outcomes(path, targets, LoadOptions(timeout=60, **options)))


def problems(path: Path, targets: list[dict[str, Any]], **options: Any) -> list[str]:
    errors = errors_of(outcomes(path, targets, LoadOptions(timeout=60, **options)), StateDictMismatchError)
    assert len({error.problems for error in errors}) == 1
    return list(errors[0].problems)


def blank(**more: Any) -> dict[str, Any]:
    return {"net": {"weight": np.zeros(6), "bias": np.zeros(2)}, "text": None, "epoch": 0, "e": {}, **more}


# -- strict="all"


def test_what_asks_for_everything_is_loaded(tmp_path: Path) -> None:
    saved_by_two(tmp_path, STATE)
    target = blank()
    loaded(tmp_path, [target], strict="all")
    assert target["net"]["weight"].tolist() == STATE["net"]["weight"].tolist()
    assert (target["text"], target["epoch"]) == (LARGE, 3)


def test_all_that_nothing_asks_for_is_listed_and_nothing_touched(tmp_path: Path) -> None:
    saved_by_two(tmp_path, STATE)
    target = {"net": {"weight": np.zeros(6), "gone": np.zeros(1)}}
    found = problems(tmp_path, [target, {"epoch": 0}], strict="all")
    assert len(found) == 4
    assert {line for line in found if "nothing asks" in line} == {
        f"{key}: stored, but nothing asks for it" for key in ("e", "net.bias", "text")
    }
    assert any(line.startswith("net.gone: ") and line.endswith("(rank 0)") for line in found)
    assert not target["net"]["weight"].any()
    with pytest.raises(StateDictMismatchError, match=r"strict=True lets stored keys be unused"):
        all_ok(outcomes(tmp_path, [{"epoch": 0}], LoadOptions(strict="all")))


def test_what_is_stored_and_cannot_be_read_is_listed_too(tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.put("gaps", (0, 0), saved(tensor("float32", (4, 6), stride=(7, 1), size=28), bytes(112)))
    writer.describe("gaps", "float32", (4, 6), [((0, 0), (4, 6))])
    writer.add_value("step", 5, b"")
    for name, content in writer.all_files.items():
        (tmp_path / name).write_bytes(content)
    assert problems(tmp_path, [{"step": 0}], strict="all") == ["gaps: stored, but nothing asks for it"]
    (report,) = loaded(tmp_path, [{"step": 0}])
    assert report.unused_keys == ("gaps",)
    wanted = {"step": 0, "gaps": np.zeros((4, 6), np.float32)}
    assert loaded(tmp_path, [wanted], strict=False)[0].unused_keys == (), "it is asked for"
    (problem,) = problems(tmp_path, [wanted], allow_missing=["gaps"])
    assert problem.startswith("gaps: "), "it is not missing"


@pytest.mark.parametrize("recipes", [None, {"made": stored("parts.0").T}])
@pytest.mark.parametrize("flat", [False, True])
def test_what_is_not_stored_whole_is_left_out_of_a_merged_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flat: bool, recipes: Any
) -> None:
    writer = DCPWriter()
    writer.add("parts.0", "float32", np.ones((4, 6), np.float32), [(slice(0, 2), slice(None))])
    writer.add("whole", "float32", np.ones((4, 6), np.float32))
    for name, content in writer.all_files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(StateDictMismatchError, match="exactly once"):
        load_whole(tmp_path, flat=flat, options=LoadOptions(recipes=recipes))
    merged = load_whole(tmp_path, flat=flat, options=LoadOptions(strict=False, recipes=recipes))
    assert merged.keys() == {"whole"}
    assert merged["whole"].all()
    key = "parts.0" if recipes is None else "made"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"left out: {key}: the checkpoint does not hold the region [0:4,0:6]")


@pytest.mark.parametrize("value", [{"x": 1}, {"0": 1}, 5, [1, 2], LARGE])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("nested", [None, list, lambda tensors: {"x": tensors[0], "y": {"z": tensors[0]}}])
def test_an_object_gets_its_state_as_stored_whatever_tensors_it_has(
    tmp_path: Path, nested: Any, strict: bool, value: Any
) -> None:
    counter, targets = Counter(), [Counter(), Counter()]
    counter.state = {"n": 1, "w": value}
    saved_by_two(tmp_path, {"counter": counter})
    for target in targets:
        own = [shard_array(np.zeros(2), [whole((2,))])]
        target.state = {"n": 0, "w": own[0] if nested is None else nested(own)}
    states = [{"counter": target} for target in targets]
    before = [target.state for target in targets]
    results = outcomes(tmp_path, states, LoadOptions(timeout=60, strict=strict, allow_missing=["*"]))
    for result, target, old in zip(results, targets, before, strict=True):
        if isinstance(result, LoadReport):
            assert result.skipped, "a tensor has stayed as it is"
            assert target.state["n"] == 1
            found = target.state["w"]
            assert ({key: found[key] for key in value} if isinstance(value, dict) else found) == value
            assert not isinstance(found, dict) or all(type(key) is str for key in found)
        else:
            assert strict
            assert isinstance(result, StateDictMismatchError)
            assert target.state is old


def test_what_one_rank_asks_for_is_asked_for(tmp_path: Path) -> None:
    saved_by_two(tmp_path, STATE)
    whole = blank()
    targets: list[dict[str, Any]] = [{"net": whole["net"]}, {"text": None, "epoch": 0, "e": {}}]
    loaded(tmp_path, targets, strict="all")
    assert targets[1]["epoch"] == 3


def test_what_does_not_fit_is_said_once(tmp_path: Path) -> None:
    saved_by_two(tmp_path, {"a": 1, "b": np.ones(3)})
    found = problems(tmp_path, [{"a": np.zeros(2), "b": np.zeros(2)}], strict="all")
    assert [line.partition(":")[0] for line in found] == ["a", "b"]


def test_some_keys_may_be_unused(tmp_path: Path) -> None:
    saved_by_two(tmp_path, STATE)
    target = {"net": {"weight": np.zeros(6)}, "epoch": 0}
    report = loaded(tmp_path, [target], strict="all", allow_unused=["*.bias", "text", "[e]"])[0]
    assert sorted(report.unused_keys) == ["e", "net.bias", "text"]
    assert problems(tmp_path, [target], strict="all", allow_unused=("text", "e", "bias"))[0].startswith("net.bias: ")


def test_what_objects_and_ranks_of_their_own_take_is_used(tmp_path: Path) -> None:
    own = [{"o": Counter(), "r": PerRank(rank)} for rank in range(2)]
    all_ok(run_ranks(2, lambda rank: rank.save(own[rank.rank], tmp_path)))
    loaded(tmp_path, own, strict="all")
    assert own[1]["r"].value == 1
    assert problems(tmp_path, [{"r": PerRank(None)}, {"r": PerRank(None)}], strict="all")[0].startswith("o.n: ")


def test_a_part_is_still_loaded_whole(tmp_path: Path) -> None:
    """What is selected there is all that is asked for."""
    saved_by_two(tmp_path, STATE)
    found = load_whole(tmp_path, keys=["epoch"], options=LoadOptions(strict="all"))
    assert found == {"epoch": 3}


# -- allow_missing


def test_some_keys_may_be_missing(tmp_path: Path) -> None:
    saved_by_two(tmp_path, STATE)
    target = blank(head={"weight": np.full(3, 7.0)}, new=5, lr=Counter(), own=PerRank(4), none=None)
    reports = loaded(tmp_path, [target, blank()], allow_missing=["head.*", "n*", "lr", "own"], strict="all")
    assert target["head"]["weight"].tolist() == [7, 7, 7]
    assert (target["new"], target["own"].value, target["lr"].state, target["none"]) == (5, 4, {"n": 0}, None)
    assert target["epoch"] == 3
    assert {line.partition(":")[0] for line in reports[0].skipped} == {"head.weight", "new", "lr", "own", "none"}
    assert all(line.endswith("left as it is, for the checkpoint does not have it") for line in reports[0].skipped)
    assert reports[1].skipped == ()


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"heads.weight": np.zeros(3)}, "heads.weight"),  # matches no pattern
        ({"head.Weight": np.zeros(3)}, "head.Weight"),  # in another case
        ({"epoch": np.zeros(3)}, "epoch"),  # there, but a value
        ({"text": {"a": 1}}, "text.a"),
        ({"net": {"weight": np.zeros(5), "bias": np.zeros(2)}}, "net.weight"),  # there, in another shape
        ({"net": 3}, "net"),  # there, as a container
        ({"net": {"weight": 3, "bias": np.zeros(2)}}, "net.weight"),  # there, as a tensor
    ],
)
def test_others_may_not_and_what_is_there_has_to_fit(tmp_path: Path, more: dict[str, Any], key: str) -> None:
    saved_by_two(tmp_path, STATE)
    allowed = ["head.weight", "epoch", "net*"]
    found = problems(tmp_path, [{**blank(), **more}], allow_missing=allowed)
    assert [line.partition(":")[0] for line in found] == [key]


# -- the options


@pytest.mark.parametrize("strict", ["none", "ALL", 1, None, "", ["all"]])
def test_levels(strict: Any) -> None:
    with pytest.raises(TypeError, match="strict must be True, False or 'all'"):
        LoadOptions(strict=strict)
    assert LoadOptions(strict="all").strict == "all"


@pytest.mark.parametrize("name", ["allow_missing", "allow_unused"])
@pytest.mark.parametrize("patterns", ["*.bias", None, [1], {"a": 1}, 5, b"a"])
def test_patterns(name: str, patterns: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be a list or tuple of patterns of keys"):
        LoadOptions(**{name: patterns})


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("strict", "all", True),
        ("strict", "all", False),
        ("allow_missing", ("a", "b"), ("a",)),
        ("allow_unused", ("a",), ()),
    ],
)
def test_they_are_the_same_on_all_ranks(tmp_path: Path, name: str, one: Any, other: Any) -> None:
    saved_by_two(tmp_path, STATE)
    both = [LoadOptions(timeout=60, **{name: value}) for value in (one, other)]
    for error in errors_of(outcomes(tmp_path, [blank(), blank()], *both), ValueError):
        assert f"rank 1 passed {name}=" in str(error)
    same = [LoadOptions(timeout=60, allow_missing=["a"]), LoadOptions(timeout=60, allow_missing=("a",))]
    all_ok(outcomes(tmp_path, [blank(), blank()], *same))
