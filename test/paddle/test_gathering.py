"""What ranks have, whole on one of them or on all, and back into another layout; errors on every rank."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_dist_ckpt import (
    LoadOptions,
    PerRank,
    StateDictMismatchError,
    gather_state_dict,
    model_state_dict,
    scatter_state_dict,
)
from paddle_dist_ckpt.saving import apart
from test.paddle import cases_gathering as cases
from test.paddle.versions import FROM_LOCAL, lacks
from test.ranks.pool import RankPool

can_compare = lacks(FROM_LOCAL, "cannot make every DistTensor whole by itself, to compare with")

RANKS = cases.RANKS


@can_compare
@pytest.mark.parametrize(("receiver", "frozen"), [(1, True), (None, False)], ids=["one_rank", "all_but_frozen"])
def test_whole_and_back_into_other_layouts(pool: RankPool, receiver: int | None, frozen: bool) -> None:
    results = pool.run(cases.round_trip, receiver, frozen, ranks=RANKS)
    expected = results[0]["expected"]
    left_out = set() if frozen else {"frozen.weight", "norm._mean", "norm._variance"}
    assert "cut.weight.moment1" in expected
    for rank, result in enumerate(results):
        gathered = result["gathered"]
        if receiver in (None, rank):
            tensors = {**gathered["model"], **gathered["optimizer"]}
            assert tensors.pop("LR_Scheduler")["last_epoch"] == 3
            assert tensors.keys() == expected.keys() - left_out
            assert all(np.array_equal(value, expected[key]) for key, value in tensors.items())
            assert gathered["mine"] == {0: 0, 1: 1}
            assert (gathered["epoch"], gathered["more"][1][1]) == (3, "x")
        else:
            assert gathered == {}
        for before, after in result["found"]:
            for key, value in after.items():
                assert np.array_equal(value, (before if key in left_out else expected)[key]), key
        assert not np.array_equal(before["frozen.weight"], expected["frozen.weight"])
        assert result["steps"] == [3, 3]
        assert result["mine"] == [rank, rank]
        for epoch, (nothing, (tensor, text)) in result["others"]:
            assert (epoch, nothing, tensor.tolist(), text) == (3, None, [3, 3], "x")
        assert result["unchanged"]


def test_only_the_receiving_rank_has_it_whole(pool: RankPool) -> None:
    nothing, gathered = pool.run(cases.odd_tensors, ranks=RANKS)
    assert nothing == {}
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = {
        "partial": np.full(3, 3, np.float32),
        "half": np.ones((3, 2), ml_dtypes.bfloat16),
        "empty": np.empty((0, 4), np.float32),
        "strided": weight.T,
        "array": np.arange(3, dtype=np.uint16),
        "flattened": weight,
        "mine": np.ones(4, np.float32),
    }
    assert gathered.pop("text") == "long " * 2000
    assert gathered.keys() == expected.keys()
    for key, value in expected.items():
        assert gathered[key].dtype == value.dtype, key
        assert np.array_equal(gathered[key], value), key


def test_values_that_one_rank_alone_has_come_back(pool: RankPool) -> None:
    for rank, targets in enumerate(pool.run(cases.own_of_some_ranks, ranks=RANKS)):
        mine = PerRank(10 + rank)
        assert targets == [{f"stage{rank}": {"rng": mine, "both": mine}, "both": mine}] * 3


def test_in_several_rounds(pool: RankPool) -> None:
    assert [right for right, _ in pool.run(cases.large, 0, 40, ranks=RANKS)] == [True, False]


EXPECTED = {
    "ranks": ("ValueError", "rank 1 passed rank=1, rank 0 rank=0; all ranks must pass the same"),
    "no rank": ("ValueError", "rank must be None or one of the ranks [0, 1], not 7"),
    "a bool": ("TypeError", "frozen must be a bool"),
    "offload": ("TypeError", "offload must be a bool"),
    "a value": ("UnsupportedValueError", "odd"),
    "a part": ("UnsupportedValueError", "marked is_distributed"),
    "replicas": ("UnsupportedValueError", "most plain tensors of the same keys"),
    "shape": ("StateDictMismatchError", "model.cut.weight"),
    "missing": ("StateDictMismatchError", "optimizer.cut.weight.moment1"),
    "memory": ("CheckpointError", "w: no memory for a tensor of 8 bytes (no room)"),
    "no dict": ("TypeError", "whole must be a dict, not NoneType"),
}


@can_compare
def test_what_goes_wrong_is_raised_on_every_rank(pool: RankPool) -> None:
    results = pool.run(cases.failures, ranks=RANKS)
    for outcomes in results:
        for name, (error, text) in EXPECTED.items():
            outcome = outcomes[name]
            assert error in (outcome.error, *outcome.causes), (name, outcome)
            assert text in outcome.message, (name, outcome)
            assert outcome.seconds < 30
        assert outcomes["untouched"].result is True
    assert [outcomes["afterwards"].result for outcomes in results] == [[], ["x"]]
    assert [outcomes["one rank's own"].error for outcomes in results] == ["KeyError", None]
    assert np.array_equal(results[1]["one rank's own"].result, np.zeros((3, 3), np.float32)), "the coordinator's"


# -- one process


@pytest.mark.parametrize("shape", [[0], [0, 4]])
def test_a_tensor_without_elements_is_missed(shape: list[int]) -> None:
    target = {"a": paddle.zeros([2]), "none": paddle.zeros(shape)}
    with pytest.raises(StateDictMismatchError, match="none: the state_dict has a tensor, .* it is missing"):
        scatter_state_dict({"a": paddle.ones([2])}, target)
    scatter_state_dict({"a": paddle.ones([2]), "none": paddle.zeros(shape)}, target)
    assert target["a"].tolist() == [1, 1]


def test_alone() -> None:
    model = paddle.nn.Linear(3, 2)
    optimizer = paddle.optimizer.Adam(parameters=model.parameters())
    whole = gather_state_dict({"model": model, "optimizer": optimizer, "step": 4})
    assert {"weight.moment1", "bias.beta1_pow_acc"} < whole["optimizer"].keys()
    expected = model.weight.numpy().copy()
    model.weight.set_value(paddle.zeros([3, 2]))
    assert np.array_equal(whole["model"]["weight"].numpy(), expected), "what is gathered is a copy"
    target = {"model": model, "optimizer": optimizer, "step": None}
    scatter_state_dict(whole, target, rank=0)
    assert np.array_equal(model.weight.numpy(), expected)
    assert target["step"] == 4


def test_lists_of_objects_that_have_values_alone_come_back() -> None:
    """Such as optimizers without accumulators, or schedulers: what is gathered of them is a list of values."""
    model = paddle.nn.Linear(3, 2)

    def make(epochs: int) -> dict[str, Any]:
        scheduler, other = (paddle.optimizer.lr.StepDecay(0.1, step_size=2) for _ in range(2))
        scheduler.step(epochs)
        other.step(epochs + 1)
        return {"optimizer": [paddle.optimizer.SGD(scheduler, parameters=model.parameters())], "lr": [other]}

    saved, target = make(3), make(0)
    scatter_state_dict(gather_state_dict(saved), target)
    assert (target["optimizer"][0]._learning_rate.last_epoch, target["lr"][0].last_epoch) == (3, 4)


def test_the_state_itself_may_be_what_is_given() -> None:
    """Of plain tensors a state_dict is whole."""
    model = paddle.nn.Linear(3, 2)
    expected = model.weight.numpy().copy()
    scatter_state_dict({"model": dict(model.state_dict())}, {"model": model})
    assert np.array_equal(model.weight.numpy(), expected)


def test_accumulators_of_parameters_that_are_no_longer_trained_are_left_out_too() -> None:
    model = paddle.nn.Linear(3, 2)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    gather_state_dict(state)  # which makes the accumulators
    model.weight.stop_gradient = True
    whole = gather_state_dict(state, frozen=False)
    assert set(whole["model"]) == {"bias"}
    assert {key.partition(".")[0] for key in whole["optimizer"]} == {"bias"}
    scatter_state_dict(whole, state, frozen=False)
    with pytest.raises(StateDictMismatchError, match=r"model\.weight"):
        scatter_state_dict(whole, state)


# -- what is given shares memory with what is filled


@pytest.mark.parametrize("rows", [3, 2 << 20], ids=["small", "8_MB"])
def test_tensors_that_change_places(rows: int) -> None:
    a, b = paddle.full([rows], 1.0), paddle.full([rows], 2.0)
    scatter_state_dict({"a": b, "b": a}, {"a": a, "b": b})
    assert bool((a == 2).all()), "what b had"
    assert bool((b == 1).all()), "what a had"
    stored = LoadOptions(key_map={"a": "b", "b": "a"})
    scatter_state_dict({"a": a, "b": b}, {"a": a, "b": b}, options=stored)
    assert bool((a == 1).all())
    assert bool((b == 2).all())


@pytest.mark.parametrize("step", [1, -1])
def test_views_that_overlap(step: int) -> None:
    base = np.arange(2 << 20, dtype=np.float32)
    expected = base[:-1][::step].copy()
    scatter_state_dict({"x": base[:-1][::step]}, {"x": base[1:]})
    assert np.array_equal(base[1:], expected)


def test_what_is_filled_with_itself_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_copy", lambda *_: pytest.fail("a copy"))
    model = paddle.nn.Linear(3, 2)
    scatter_state_dict({"model": dict(model.state_dict())}, {"model": model})


@can_compare
def test_tensors_that_change_places_on_ranks(pool: RankPool) -> None:
    assert pool.run(cases.swapped, ranks=RANKS) == [(True, True)] * RANKS


# -- parameters that are not trained, in a whole that has them


class Own(paddle.nn.Layer):
    """A model whose class has both methods, with a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 2)
        self.b.weight.stop_gradient = True

    def state_dict(self, *args: Any, **more: Any) -> Any:
        return super().state_dict(*args, **more)

    def set_state_dict(self, *args: Any, **more: Any) -> Any:
        return super().set_state_dict(*args, **more)


@pytest.mark.parametrize("strict", [True, "all"])
def test_a_whole_may_have_what_is_not_trained(strict: Any) -> None:
    whole = gather_state_dict({"model": Own()})
    model = Own()
    before = model.b.weight.numpy().copy()
    report = scatter_state_dict(whole, {"model": model}, frozen=False, options=LoadOptions(strict=strict))
    assert report.unused_keys == ()
    assert np.array_equal(model.b.weight.numpy(), before)
    assert np.array_equal(model.a.weight.numpy(), whole["model"]["a.weight"].numpy())
    with pytest.raises(StateDictMismatchError, match="nothing asks for it"):
        options = LoadOptions(strict="all")
        scatter_state_dict({**whole, "more": 1}, {"model": model}, frozen=False, options=options)


class Tied(paddle.nn.Layer):
    """A model with a weight that is not trained and has two keys; its state has copies of another dtype."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.a, self.b, self.c = (paddle.nn.Linear(2, 2, bias_attr=False) for _ in "abc")
        self.c.weight = self.b.weight
        self.b.weight.stop_gradient = True
        for parameter in self.parameters():
            parameter.set_value(paddle.full([2, 2], fill))
        self.register_state_dict_hook(
            lambda state: state.update({key: one.cast("float64") for key, one in state.items()})
        )


@pytest.mark.parametrize("wrapped", [False, True])
def test_copies_of_what_is_not_trained_are_left_out_too(wrapped: bool) -> None:
    """As of a layer from ``amp.decorate(save_dtype=...)``."""
    model, whole = Tied(1.0), gather_state_dict({"model": Tied(2.0)})
    state = {"model": paddle.DataParallel(model) if wrapped else model}
    assert set(gather_state_dict(state, frozen=False)["model"]) == {"a.weight"}
    assert set(model_state_dict(whole["model"], state["model"], frozen=False)) == {"a.weight"}
    scatter_state_dict(whole, state, frozen=False)
    assert [float(one.weight[0, 0]) for one in (model.a, model.b)] == [2.0, 1.0]


@pytest.mark.parametrize("frozen", [True, False])
def test_values_that_differ_are_not_given_to_one_dict_that_is_there_twice(frozen: bool) -> None:
    once = {"x": 0}
    state = {"a": once, "b": once, "w": paddle.zeros([1])}
    with pytest.raises(StateDictMismatchError, match="b.x: is the same as a.x"):
        scatter_state_dict({"a": {"x": 1}, "b": {"x": 2}, "w": paddle.ones([1])}, state, frozen=frozen)
    assert (once, state["w"].tolist()) == ({"x": 0}, [0])


# -- values of which each rank has its own


def test_own_values_of_other_ranks() -> None:
    target = {"more": [paddle.zeros([1]), PerRank(None)]}
    tensor = paddle.ones([1])
    with pytest.raises(ValueError, match="more.1: whole has values that ranks 0, 1 had as their own"):
        scatter_state_dict({"more": [tensor, {0: "a", 1: "b"}]}, target)
    scatter_state_dict({"more": [tensor, {3: "c", 5: "d"}]}, target, options=LoadOptions(per_rank="coordinator"))
    assert target["more"][1] == PerRank("c")
    by_rank = LoadOptions(per_rank="by_rank")
    report = scatter_state_dict({"more": [2 * tensor, {3: "e", 5: "f"}]}, target, options=by_rank)
    assert (target["more"][0].item(), target["more"][1]) == (2, PerRank("c")), "no rank 0 had its own"
    assert report.skipped_keys == ("more.1",)
    scatter_state_dict({"more": [tensor, {0: "g", 5: "h"}]}, target, options=by_rank)
    assert target["more"][1] == PerRank("g")


@pytest.mark.parametrize(
    ("whole", "state", "key_map"),
    [
        ({"old": {0: 5}}, {"new": PerRank(None)}, {"new": "old"}),
        ({"x": [{"old": {0: 5}}], "new": {0: 6}}, {"new": PerRank(None)}, lambda key: "x.0.old"),
        ({"x.new": {0: 5}}, {"x": {"new": PerRank(None)}}, None),
        ({"x": {"new": {0: 5}}}, {"x.new": PerRank(None)}, None),
        ({"new": {0: 5}}, {"new": PerRank(5)}, {"new": None}),
    ],
)
def test_own_values_under_other_keys(whole: Any, state: Any, key_map: Any) -> None:
    report = scatter_state_dict(whole, state, options=LoadOptions(key_map=key_map))
    assert report.skipped == ()
    ((_, found),) = state.items()
    assert (found["new"] if isinstance(found, dict) else found) == PerRank(5)


class Counter:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"own": PerRank(None), "n": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("key_map", [{"o": "x"}, {"o": "x"}.__getitem__, lambda key: {"o": "x"}.get(key, key)])
def test_own_values_of_an_object_under_another_key(key_map: Any) -> None:
    """They go with the object, of whose key alone a function may know."""
    counter = Counter()
    scatter_state_dict({"x": {"own": {0: 5}, "n": 1}}, {"o": counter}, options=LoadOptions(key_map=key_map))
    assert counter.state == {"own": PerRank(5), "n": 1}


def test_own_values_of_fewer_ranks_by_rank(pool: RankPool) -> None:
    """As those of a checkpoint that fewer ranks have saved: the others keep what they have."""
    assert pool.run(cases.own_of_fewer_ranks, ranks=RANKS) == [("a", ()), ("mine", ("more",))]


def test_a_rank_may_be_an_integer_of_numpy() -> None:
    assert gather_state_dict({"x": 5}, np.int64(0)) == {"x": 5}  # type: ignore[arg-type]


def test_a_rank_that_cannot_offer_its_files_fails_the_call_for_all(pool: RankPool) -> None:
    for outcome in pool.run(cases.a_rank_that_cannot_offer_its_files, ranks=RANKS):
        assert outcome.error == "RankFailureError"
        assert "in round 'present' on rank 1: MemoryError: no memory for addends" in outcome.message
        assert outcome.seconds < 30
