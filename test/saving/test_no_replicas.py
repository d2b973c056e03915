"""Plain tensors of equal keys of which most differ among ranks are no replicas; a few that differ are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.errors import UnsupportedValueError
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.testing.simulation import SimulatedRank, run_ranks
from test.jobs import errors_of, everything, load_whole, save_on, sharded, try_save

RANKS = 3
LARGE = 1 << 16


def own(rank: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.full(shape, float(rank))


def stage(rank: int) -> dict[str, Any]:
    return {"linear": {"weight": own(rank, 4, 4), "bias": np.zeros(4)}}


def norms(rank: int) -> dict[str, Any]:
    """Weights that are equal, and twice as many statistics that are not."""
    statistics = {f"{i}.{name}": own(rank, 8) for i in range(2) for name in ("mean", "variance")}
    return {f"{i}.weight": np.ones((8, 8)) for i in range(2)} | statistics


NO_REPLICAS = {
    "stage": stage,
    "one of them in the middle": lambda rank: stage(int(rank == 1)),
    "two of three": lambda rank: {"a": own(rank, 2, 2), "b": own(rank, 2, 2), "c": np.ones((2, 2))},
    "flat and large": lambda rank: {"flat": own(rank, LARGE), "same": np.ones(4)},
    "of two ranks": lambda rank: {"w": own(rank, 2, 2)} if rank else {},
    "few, but large": lambda rank: {"expert": own(rank, 100, 100), **{f"{i}.w": np.ones((50, 50)) for i in range(3)}},
    "beside zeros": lambda rank: {"w": own(rank, 3, 2), **{key: np.zeros((600, 1100)) for key in ("m1", "m2")}},
    "beside what one rank has": lambda rank: (
        {"w": own(rank, 2, 2)} | {f"{rank}.{i}": own(rank, 2, 2) for i in range(4)}
    ),
}
REPLICAS = {
    "norms": norms,
    "small and flat": lambda rank: {"mean": own(rank, LARGE - 1), "n": own(rank)},
    "beside ones": lambda rank: {"w": own(rank, 3, 2), **{key: np.ones((600, 1100)) for key in "ab"}},
    "one of two": lambda rank: {"a": own(rank, 2, 2), "b": np.ones((2, 2))},
    "queue beside distributed": lambda rank: {
        "queue": own(rank, 2, 2),
        **{key: sharded(np.ones((2, 2)), everything(np.ones((2, 2)))) for key in "ab"},
    },
}


@pytest.mark.parametrize("state", NO_REPLICAS.values(), ids=NO_REPLICAS)
@pytest.mark.parametrize("coordinator", [0, 2])
def test_most_differ(tmp_path: Path, state: Any, coordinator: int) -> None:
    states = [state(rank) for rank in range(RANKS)]
    for error in errors_of(try_save(states, tmp_path, coordinator=coordinator), UnsupportedValueError):
        assert "no replicas" in str(error)
        assert "check_replicas='warn'" in str(error)
        assert "differs on rank" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("state", NO_REPLICAS.values(), ids=NO_REPLICAS)
def test_most_differ_and_may(tmp_path: Path, state: Any) -> None:
    states = [state(rank) for rank in range(RANKS)]
    (report, *_) = save_on(states, tmp_path, options=SaveOptions(check_replicas="warn", timeout=60))
    assert report.warnings
    assert save_on(states, tmp_path, options=SaveOptions(check_replicas="off", timeout=60))[0].warnings == ()


@pytest.mark.parametrize("state", REPLICAS.values(), ids=REPLICAS)
def test_a_few_differ(tmp_path: Path, state: Any) -> None:
    states = [state(rank) for rank in range(RANKS)]
    (report, *_) = save_on(states, tmp_path)
    assert report.warnings
    assert load_whole(tmp_path).keys() == states[0].keys()


def test_keys_of_their_own_are_saved_all(tmp_path: Path) -> None:
    save_on([{f"stage{rank}": stage(rank)} for rank in range(RANKS)], tmp_path)
    loaded = load_whole(tmp_path)
    assert all((loaded[f"stage{rank}"]["linear"]["weight"] == rank).all() for rank in range(RANKS))


def test_in_the_background_the_call_itself_raises_and_nothing_is_lost(tmp_path: Path) -> None:
    def saves(rank: SimulatedRank) -> Any:
        state = norms(rank.rank)
        rank.save_in_background(state, tmp_path).result(60)
        state["0.weight"] += rank.rank
        state["1.weight"] += rank.rank
        with pytest.raises(UnsupportedValueError, match=r"no replicas(?s:.)*1.weight: differs on ranks 1, 2"):
            rank.save_in_background(state, tmp_path)
        state["1.weight"][:] = 5
        return rank.save_in_background(state, tmp_path).result(60).unique_id

    assert run_ranks(RANKS, saves) == [1] * RANKS
    assert (load_whole(tmp_path)["1.weight"] == 5).all()
