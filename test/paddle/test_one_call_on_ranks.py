"""Saving and loading by one call on ranks: who writes what, whose buffers count, other numbers of ranks, errors."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dist_ckpt import load, read_metadata, save
from test.paddle import cases_one_call as cases
from test.paddle.cases_one_call import arrays, assert_equal, job, numpy_of, train
from test.paddle.layouts import Spread, part_of
from test.paddle.versions import FROM_LOCAL
from test.ranks.fresh import fresh_ranks, logs_of
from test.ranks.pool import RankPool

RANKS = 4


def ranks_of(path: Path) -> dict[int, int]:
    """Bytes of each rank's data files."""
    sizes: dict[int, int] = {}
    for file in path.glob("*.safetensors"):
        rank = int(file.name.partition("_")[0])
        sizes[rank] = sizes.get(rank, 0) + file.stat().st_size
    return sizes


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A checkpoint of four ranks, and what each of them had."""
    path = tmp_path_factory.mktemp("saved")
    return path, pool.run(cases.train_and_save, str(path), RANKS, False, ranks=RANKS)


def test_ranks_share_the_work(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    path, found = saved
    sizes = ranks_of(path)
    assert set(sizes) == set(range(RANKS))
    assert max(sizes.values()) < 1.02 * sum(sizes.values()) / RANKS
    total = found[0]["written"][1]
    assert sum(rank["written"][0] for rank in found) == total
    assert total < 1.01 * sum(array.nbytes for array in found[0]["arrays"].values()), "nothing is written twice"
    shards = read_metadata(path).state_dict_metadata["model.large.weight"]
    assert len(shards) > 1
    assert sum(np.prod(shard.local_shape) for shard in shards) == cases.ROWS * cases.COLUMNS


def test_buffers_and_others_are_the_first_ranks(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    path, found = saved
    assert [rank["arrays"]["norm._mean"].max() for rank in found] == [0, 1, 2, 3]
    assert [rank["id"] for rank in found] == [0] * RANKS
    assert {line.split(":")[0] for line in found[0]["warnings"]} == {"ema", "model.norm._mean"}
    state = load(path)
    assert (state["model"]["norm._mean"].abs().max(), state["ema"].tolist()) == (0, [0, 0, 0])
    assert state["rank"] == {0: 0, 1: 1, 2: 2, 3: 3}


def test_models_that_differ_are_never_mixed(pool: RankPool, tmp_path: Path) -> None:
    """A large weight of which the ranks have others, beside an equal one that is larger still; and by itself."""
    assert pool.run(cases.save_models_that_differ, str(tmp_path), 2, ranks=2) == ["UnsupportedValueError"] * 2
    assert load(tmp_path / "a few")["model"]["0.weight"].unique().tolist() == [0]
    assert not (tmp_path / "most").exists() or not list((tmp_path / "most").iterdir())


def test_what_is_not_trained_is_shared_out_unless_it_differs(pool: RankPool, tmp_path: Path) -> None:
    report = pool.run(cases.save_frozen, str(tmp_path), 2, ranks=2)
    assert max(report) < 1.02 * sum(report) / 2
    state = load(tmp_path)["model"]
    assert [state[name].unique().tolist() for name in ("bias", "statistic", "buffer")] == [[0], [0], [0]]


def test_four_ranks_to_one(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    path, found = saved
    first = found[0]
    state = load(path)
    assert_equal({**numpy_of(state["model"]), **numpy_of(state["optimizer"])}, first["arrays"])
    model, optimizer, schedule = job(8)
    load(path, model, optimizer)
    assert_equal(arrays(model, optimizer), first["arrays"])
    np.testing.assert_allclose(train(model, optimizer, schedule, 2, first=2), first["losses"], rtol=1e-5)


def test_four_ranks_to_two(pool: RankPool, saved: tuple[Path, list[dict[str, Any]]]) -> None:
    path, found = saved
    for rank in pool.run(cases.load_and_train, str(path), False, ranks=2):
        assert (rank["before"]["large.weight"] != found[0]["arrays"]["large.weight"]).any()
        assert_equal(rank["arrays"], found[0]["arrays"])
        assert rank["losses"] == found[0]["losses"]
        assert rank["epoch"] == 2
        assert rank["others"].pop("ema").tolist() == [0, 0, 0]
        assert rank["others"] == {"epoch": 3, "rank": {0: 0, 1: 1, 2: 2, 3: 3}}


def test_one_rank_of_many_loads_alone(pool: RankPool, saved: tuple[Path, list[dict[str, Any]]]) -> None:
    path, found = saved
    (rank,) = pool.run(cases.load_and_train, str(path), False, ranks=[5], timeout=60)
    assert_equal(rank["arrays"], found[0]["arrays"])


def test_a_job_of_one_to_two_ranks(pool: RankPool, tmp_path: Path) -> None:
    model, optimizer, schedule = job(7)
    train(model, optimizer, schedule, 2)
    save(tmp_path, model, optimizer, {"ema": paddle.ones([3])})
    for rank in pool.run(cases.load_and_train, str(tmp_path), False, ranks=2):
        assert_equal(rank["arrays"], arrays(model, optimizer))


def test_data_parallel_training_goes_on(tmp_path: Path) -> None:
    ends = [fresh_ranks(2, cases.train_and_save, str(tmp_path), 2, True)]
    ends.append(fresh_ranks(2, cases.load_and_train, str(tmp_path), True))
    assert [end.exit_code for job in ends for end in job] == [0] * 4, logs_of(itertools.chain(*ends))
    saved, loaded = ([end.result for end in job] for job in ends)
    assert set(ranks_of(tmp_path)) == {0, 1}
    for rank in loaded:
        assert_equal(rank["arrays"], saved[0]["arrays"])
        assert rank["losses"] == saved[0]["losses"]


def test_a_group_of_fewer_ranks(pool: RankPool, tmp_path: Path) -> None:
    (first,) = [mean for mean in pool.run(cases.save_in_group_of_last, str(tmp_path), [5, 2]) if mean is not None]
    assert load(tmp_path)["model"]["_mean"].tolist() == first == [2.0, 2.0]
    assert set(ranks_of(tmp_path)) <= {2, 5}
    (outside,) = pool.run(cases.save_outside_of_group, str(tmp_path), 2, ranks=[3])
    assert (outside.error, "not in the process group" in outside.message) == ("ValueError", True)


def test_plans_of_other_functions_are_not_mixed_up_with_it(pool: RankPool, tmp_path: Path) -> None:
    pool.run(cases.save_in_turn, str(tmp_path), RANKS, ranks=RANKS)
    shards = {
        path.name: len(read_metadata(path).state_dict_metadata["model.large.weight"]) > 1 for path in tmp_path.iterdir()
    }
    assert shards == {"together0": False, "one_call0": True, "together1": False, "one_call1": True}


def test_master_weights_are_divided_too(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(cases.save_in_lower_precision, str(tmp_path), 2, ranks=2)
    sizes = ranks_of(tmp_path)
    assert max(sizes.values()) < 1.02 * sum(sizes.values()) / 2
    state = load(tmp_path)["optimizer"]
    masters = [state["weight.master_weight"].numpy(), state["bias.master_weight"].numpy()]
    for master, expected in zip(masters, found[0].values(), strict=True):
        assert np.array_equal(master, expected)


def test_distributed_models_pass_through(pool: RankPool, tmp_path: Path) -> None:
    written = pool.run(cases.save_sharded, str(tmp_path), RANKS, ranks=RANKS)
    rows = [128, 128, 128, 64] if FROM_LOCAL else [128, 96, 128, 96]  # a rank that has few writes the bias as well
    assert [nbytes for nbytes, _ in written] == rows
    whole = np.arange(104, dtype=np.float32).reshape(13, 8)
    assert np.array_equal(load(tmp_path)["model"]["weight"].numpy(), whole)
    ((part, bias),) = pool.run(cases.load_sharded, str(tmp_path), RANKS, ranks=[2], timeout=60)
    assert np.array_equal(part, part_of(whole, Spread([0, 1, 2, 3], (0,)), 2))
    assert np.array_equal(bias, whole[0])
    parts = pool.run(cases.load_sharded, str(tmp_path), 2, ranks=2)
    assert np.array_equal(np.concatenate([part for part, _ in parts]), whole)
    for found in pool.run(cases.load_whole, str(tmp_path), ranks=2):
        assert np.array_equal(found, whole)


@pytest.mark.parametrize("wrong", [[0], [2], [0, 1, 2, 3]])
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("model", "TypeError"),
        ("optimizer", "TypeError"),
        ("others", "TypeError"),
        ("reserved", "ValueError"),
        ("path", "TypeError"),
        ("value", "UnsupportedValueError"),
    ],
)
def test_all_ranks_hear_of_what_is_wrong(
    pool: RankPool, tmp_path: Path, wrong: list[int], how: str, error: str
) -> None:
    outcomes = pool.run(cases.save_wrongly, str(tmp_path), RANKS, wrong, how, ranks=RANKS, timeout=60)
    assert [outcome.error for outcome in outcomes] == [error] * RANKS
    name = {"reserved": "others", "value": "callback"}.get(how, how)
    assert all(name in outcome.message for outcome in outcomes)
    assert not any(tmp_path.iterdir())
