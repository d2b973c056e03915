"""A model, its optimizer and all else, saved as objects or as state_dicts, and loaded as either, on other layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import read_metadata
from test.paddle import cases_objects as cases
from test.paddle.versions import RNG_STATE, SHARD_OPTIMIZER, SHARDING_STAGES, lacks
from test.ranks.pool import RankPool

Run = Callable[..., dict[str, Any]]
Trained = Callable[[str, str, bool], tuple[str, dict[str, Any]]]
RANKS = {"plain": 1, "mp1": 1, "mp2": 2, "dp2_mp2": 4}


@pytest.fixture(scope="module")
def run(pool: RankPool) -> Run:
    """Runs a job of a layout; returns what rank 0 finds."""

    def run_job(layout: str, *args: Any) -> dict[str, Any]:
        if True in args[4:5] and not SHARD_OPTIMIZER:
            pytest.skip("Paddle 2.6: what shard_optimizer returns is no Optimizer and has no state_dict of its own")
        return dict(pool.run(cases.train, layout, RANKS[layout], *args, ranks=RANKS[layout])[0])

    return run_job


@pytest.fixture(scope="module")
def trained(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Jobs that trained and saved, run once: the folder, and how the very same job goes on."""

    @functools.cache
    def train(source: str, how: str, sharded_optimizer: bool) -> tuple[str, dict[str, Any]]:
        folder = str(tmp_path_factory.mktemp("first"))
        run(source, 2, None, 3, (folder, how), sharded_optimizer)
        return folder, run(source, 4, (folder, "objects"), 3, None, sharded_optimizer)

    return train


@pytest.mark.parametrize(
    ("source", "how", "destination", "as_what", "sharded_optimizer"),
    [
        ("mp2", "objects", "plain", "objects", False),  # names with .dist, and names without
        ("mp2", "objects", "mp2", "objects", False),
        ("mp2", "objects", "dp2_mp2", "objects", True),
        ("mp2", "objects", "mp2", "objects", True),
        ("plain", "state_dicts", "mp2", "objects", False),
        ("plain", "state_dicts", "plain", "state_dicts", False),
    ],
)
def test_training_goes_on(
    run: Run, trained: Trained, source: str, how: str, destination: str, as_what: str, sharded_optimizer: bool
) -> None:
    folder, here = trained(source, how, sharded_optimizer)
    there = run(destination, 3, (folder, as_what), 3, None, sharded_optimizer)
    assert there["count"] == here["count"] == 6
    assert any((there["before"][name] != here["before"][name]).any() for name in there["before"])
    if as_what == "objects":  # a fresh optimizer's own state_dict() asks for no moments
        np.testing.assert_allclose(there["losses"], here["losses"], rtol=1e-5)
        for name, value in here["parameters"].items():
            np.testing.assert_allclose(there["parameters"][name], value, rtol=2e-4, atol=1e-6)
    if source == destination and as_what == "objects":
        assert there["losses"] == here["losses"]
        assert all((there["parameters"][name] == value).all() for name, value in here["parameters"].items())
    if source == destination and RNG_STATE:
        assert there["random"] == here["random"]


@pytest.mark.parametrize("sharded_optimizer", [False, True])
@pytest.mark.parametrize("destination", ["mp2", "plain", "dp2_mp2"])
def test_training_goes_on_with_a_layer_that_is_frozen_until_after_the_load(
    run: Run, trained: Trained, destination: str, sharded_optimizer: bool
) -> None:
    folder, here = trained("mp2", "objects", sharded_optimizer)
    there = run(destination, 3, (folder, "objects"), 3, None, sharded_optimizer, True)
    np.testing.assert_allclose(there["losses"], here["losses"], rtol=1e-5)
    if destination == "mp2":
        assert there["losses"] == here["losses"]
        assert sorted(there["placements"]) == sorted(here["placements"])


def test_keys_do_not_depend_on_the_run(run: Run, tmp_path: Path) -> None:
    for number, layout in enumerate(("plain", "mp2"), 1):
        run(layout, number, None, 1, (str(tmp_path / layout), "objects"))
    plain, sharded = (read_metadata(tmp_path / layout) for layout in ("plain", "mp2"))
    tensors = set(plain.state_dict_metadata)
    assert tensors == set(sharded.state_dict_metadata)
    assert {"optimizer.up.weight.moment1", "optimizer.down.bias.beta1_pow_acc", "model.up.weight"} <= tensors
    assert plain.variable_names["model.up.weight"] != sharded.variable_names["model.up.weight"]


def test_accumulators_are_distributed_as_a_step_distributes_them(run: Run, tmp_path: Path) -> None:
    folder = str(tmp_path)
    stepped = run("mp2", 2, None, 2, (folder, "objects"), True)
    loaded = run("mp2", 4, (folder, "objects"), 0, None, True)
    assert loaded["placements"] == stepped["placements"]
    assert len(loaded["placements"]) == 16
    assert all((loaded["parameters"][name] == value).all() for name, value in stepped["parameters"].items())


@lacks(SHARDING_STAGES, "has no sharding stages")
@pytest.mark.parametrize("as_dicts", [False, True], ids=["objects", "dicts"])
@pytest.mark.parametrize("stage", ["", "ShardingStage1"])
def test_parts_of_master_weights_follow_their_parameters(
    pool: RankPool, tmp_path: Path, stage: str, as_dicts: bool
) -> None:
    results = pool.run(cases.load_weights, str(tmp_path), stage, as_dicts, ranks=2)
    for (whole, *parts), (same, *others) in zip(*results, strict=True):
        assert np.array_equal(whole, same)
        master = np.concatenate([*parts, *others]) if stage else parts[0]
        assert np.array_equal(master, whole)
