"""What ranks must agree on, and what is said of those that do not."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import list_checkpoints, read_metadata, rebuild_metadata
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError, RankFailureError, UnsupportedValueError
from paddle_dist_ckpt.options import LoadOptions, SaveOptions
from paddle_dist_ckpt.saving.present import present
from paddle_dist_ckpt.saving.save import After
from paddle_dist_ckpt.testing import NumpyAdapter, ShardedArray, SimulatedRank, run_ranks
from paddle_dist_ckpt.wiring import save_with
from test.jobs import (
    Counter,
    alike,
    all_ok,
    errors_of,
    files_in,
    load_whole,
    make_array,
    same_bits,
    save_alone,
    save_on,
    try_save,
    without_times,
)
from test.waiting import PATIENCE

# -- options


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("exchange", "never", "always"),
        ("exchange", "auto", "always"),
        ("exchange", "always", "never"),
        ("strict", True, False),
        ("cast", False, True),
    ],
)
def test_options_that_differ_are_refused_before_anything_is_touched(
    tmp_path: Path, name: str, ours: Any, theirs: Any
) -> None:
    save_on([{"a": make_array((50,))}] * 2, tmp_path)
    targets = [np.zeros(50, "float32") for _ in range(3)]

    def work(rank: SimulatedRank) -> Any:
        options = LoadOptions(timeout=60, **{name: theirs if rank.rank == 2 else ours})
        return rank.load({"a": targets[rank.rank]}, tmp_path, None, options)

    for error in errors_of(run_ranks(3, work), ValueError):
        assert f"rank 2 passed {name}={theirs!r}, rank 0 {name}={ours!r}" in str(error)
    assert not any(target.any() for target in targets)


# -- containers


T = np.arange(3)


@pytest.mark.parametrize(
    ("first", "second"),
    [((T,), [T]), ([T], (T,)), ({"0": T}, [T]), ({"k": T}, [T]), ({0: T}, [T]), ({"0": T}, (T,)), ([(T,)], [[T]])],
    ids=lambda container: re.sub(r"array\(.*?\)", "T", repr(container)),
)
def test_containers_of_different_kinds_under_one_key_are_refused(tmp_path: Path, first: Any, second: Any) -> None:
    for error in errors_of(try_save([{"h": first}, {"h": second}], tmp_path), UnsupportedValueError):
        assert "h" in str(error)
        assert "on one rank" in str(error)
    assert not files_in(tmp_path)


def test_containers_of_one_kind_may_hold_other_things_on_each_rank(tmp_path: Path) -> None:
    a, b = make_array((3,)), make_array((4,), seed=1)
    save_on([{"h": {"a": a}, "i": [a], "t": (a,)}, {"h": {"b": b}, "i": [a, b], "t": (a, b)}], tmp_path)
    assert alike(load_whole(tmp_path), {"h": {"a": a, "b": b}, "i": [a, b], "t": (a, b)})


def test_a_numpy_array_here_and_a_tensor_there_are_refused(tmp_path: Path) -> None:
    array = make_array((10,), "float64")
    tensor = ShardedArray((10,), DTYPES["float64"], [Box((0,), (10,))], [array.copy()], plain=True)
    for error in errors_of(try_save([{"a": array}, {"a": tensor}], tmp_path), UnsupportedValueError):
        assert "a: kind is a numpy array on rank 0, a tensor on rank 1" in str(error)


# -- replicas


@pytest.mark.parametrize("coordinator", [0, 1, 2])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_ranks_that_differ_from_the_saved_one_are_named(tmp_path: Path, coordinator: int, odd: int) -> None:
    states = [{"w": np.full(3, float(rank == odd)), "n": rank == odd} for rank in range(3)]
    (report, *_) = save_on(states, tmp_path, coordinator=coordinator)
    others = [rank for rank in range(3) if (rank == odd) != (coordinator == odd)]
    assert len(report.warnings) == 2
    for warning in report.warnings:
        assert f"of rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} differ" in warning
    assert alike(load_whole(tmp_path), states[coordinator])


@pytest.mark.parametrize("coordinator", [0, 1])
def test_a_variable_has_the_name_that_the_coordinator_has_for_it(
    tmp_path: Path, coordinator: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, arrays = NumpyAdapter.view, [make_array((2,)) for _ in range(2)]
    names = {id(array): f"of rank {rank}" for rank, array in enumerate(arrays)}
    monkeypatch.setattr(
        NumpyAdapter, "view", lambda self, value, path: plain(self, value, path)._replace(name=names[id(value)])
    )
    save_on([{"w": array} for array in arrays], tmp_path, coordinator=coordinator)
    assert read_metadata(tmp_path).variable_names == {"w": f"of rank {coordinator}"}


# -- tensors without elements


@pytest.mark.parametrize("boxes", ["cut", "none", "one rank's"])
def test_a_tensor_without_elements_has_one_box_which_is_the_whole_of_it(tmp_path: Path, boxes: str) -> None:
    def state(rank: int) -> dict[str, Any]:
        mine = [Box((0, 4 * rank), (0, 4))] if boxes == "cut" or (boxes == "one rank's" and rank) else []
        empty = ShardedArray((0, 8), DTYPES["float64"], mine, [np.zeros((0, 4)) for _ in mine])
        return {"e": empty, "w": make_array((3,))}

    save_on([state(0), state(1)], tmp_path)
    metadata = read_metadata(tmp_path)
    (box,) = metadata.state_dict_metadata["e"]
    assert tuple(box.global_offset) == (0, 0)
    assert tuple(box.local_shape) == (0, 8)
    assert same_bits(load_whole(tmp_path)["e"], np.zeros((0, 8)))

    original = without_times(tmp_path / "0.metadata")
    (tmp_path / "0.metadata").unlink()
    rebuild_metadata(tmp_path)
    assert (tmp_path / "0.metadata").read_bytes() == original


# -- calls


def saves_after_a_missed_one(folder: Path, states: Sequence[Sequence[dict[str, Any]]]) -> list[list[Any]]:
    """What each rank's saves come to when rank 1 leaves out the first. ``states`` has a state a rank, save by save."""
    meeting = threading.Barrier(2)

    def save_all(rank: SimulatedRank) -> list[Any]:
        outcomes: list[Any] = []
        for number, state in enumerate(states):
            meeting.wait(PATIENCE)
            if number == 0 and rank.rank == 1:
                continue
            try:
                options = SaveOptions(timeout=60 if number else 0.5)
                outcomes.append(rank.save(state[rank.rank], folder, options=options))
            except CheckpointError as error:
                outcomes.append(error)
        return outcomes

    return all_ok(run_ranks(2, save_all))


def test_after_a_missed_call_states_that_differ_are_not_saved_together(tmp_path: Path) -> None:
    equal, differing = [{"step": 3}, {"step": 3}], [{"step": 3}, {"step": 4}]
    first, second = saves_after_a_missed_one(tmp_path, [equal, equal, differing, equal, differing])
    assert isinstance(first[0], CheckpointTimeoutError)
    assert isinstance(first[1], RankFailureError)  # rank 1 is a call behind, which puts it in step
    for outcomes in (first[1:], second):
        assert isinstance(outcomes[1], UnsupportedValueError)
        assert "may be at different calls" in str(outcomes[1])
        assert (outcomes[2].unique_id, outcomes[2].warnings) == (0, ())
        assert outcomes[3].unique_id == 1  # all is well again, so a difference is worth no more than a warning
        assert len(outcomes[3].warnings) == 1


def test_far_more_containers_than_keys_speak_of_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.tree.paths._FEW_CONTAINERS", 3)
    save_alone({"a": {"b": {"c": 1}}}, tmp_path)
    with pytest.raises(CheckpointError, match="1 tensors and values are in far more dicts or lists of short keys"):
        save_alone({"a": {"b": {"c": {"d": 1}}}}, tmp_path)
    assert list_checkpoints(tmp_path) == [0]


@pytest.mark.parametrize("checks", [("error", "off"), ("off", "error"), ("warn", "error")])
def test_what_ranks_present_is_not_taken_for_replicas_by_different_rules(checks: tuple[str, str]) -> None:
    def offer(rank: SimulatedRank) -> Any:
        with rank.hub.session("gather_state_dict", 60) as session:
            state = {"a": np.full(3, rank.rank)}
            return present(lambda: state, session, rank.transport, NumpyAdapter(), checks[rank.rank])

    for error in errors_of(run_ranks(2, offer), ValueError):
        assert f"rank 1 passed check_replicas={checks[1]!r}, rank 0 check_replicas={checks[0]!r}" in str(error)


@pytest.mark.parametrize("behind", [[0], [1], [0, 1]])
def test_objects_whose_states_need_the_other_ranks_are_asked_on_all_at_once(tmp_path: Path, behind: list[int]) -> None:
    """Whichever ranks have something to be done first."""
    met, caught_up = threading.Barrier(2), list[int]()

    class Gathers(Counter):
        def state_dict(self) -> dict[str, Any]:
            met.wait(5.0)  # as in a collective
            return super().state_dict()

    def work(rank: SimulatedRank) -> Any:
        def find() -> tuple[dict[str, Any], NumpyAdapter]:
            return {"loader": Gathers()}, NumpyAdapter()

        after = After(lambda _: None, lambda: rank.rank in behind, lambda _: caught_up.append(rank.rank))
        return save_with(rank.connection, find, tmp_path, 0, False, SaveOptions(timeout=60), after)

    all_ok(run_ranks(2, work))
    assert sorted(caught_up) == [0, 1]
    assert load_whole(tmp_path)["loader"] == {"n": 0}
