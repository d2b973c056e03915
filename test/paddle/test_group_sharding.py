"""Group sharding's stages 2 and 3 (``group_sharded_parallel``): training goes on bit for bit, whoever saved."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from test.paddle import cases_group_sharding as cases
from test.ranks.pool import RankPool

pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.sharded_weight")  # Paddle has it from 3.3 on


def test_training_goes_on_bit_for_bit(pool: RankPool, tmp_path: Path) -> None:
    """In each stage from each, and from and to an optimizer that every rank has whole; with master weights."""
    runs = {stage: pool.run(cases.train, stage, str(tmp_path / stage), ranks=cases.RANKS) for stage in cases.STAGES}
    for source, target in itertools.product(cases.STAGES, cases.STAGES):
        if (source, target) == ("none", "none"):
            continue
        found = pool.run(cases.resume, target, str(tmp_path / source), ranks=cases.RANKS)
        for (losses, parameters), (expected_losses, expected) in zip(found, runs[target], strict=True):
            assert losses == expected_losses, (source, target)
            assert all(np.array_equal(parameters[key], expected[key]) for key in expected), (source, target)


@pytest.mark.parametrize("stage", ["stage 2", "stage 3"])
def test_weights_alone_last_longer_than_a_step(pool: RankPool, tmp_path: Path, stage: str) -> None:
    """Although master weights are there as soon as the stage is."""
    expected = pool.run(cases.save_weights, str(tmp_path), ranks=cases.RANKS)[0]
    for found, skipped in pool.run(cases.load_weights, stage, str(tmp_path), ranks=cases.RANKS):
        assert all(np.array_equal(found[key], value) for key, value in expected.items())
        assert any("_0: set to its parameter" in line for line in skipped)


@pytest.mark.parametrize("stage", ["stage 2", "stage 3"])
def test_objects_are_refused_with_what_to_pass(pool: RankPool, tmp_path: Path, stage: str) -> None:
    for texts in pool.run(cases.refusals, stage, str(tmp_path), ranks=cases.RANKS):
        assert "sharded_state_dict()" in texts[0]
        if stage == "stage 3":
            assert "0.weight: the tensor has no memory; group sharding's stage 3 has cut it" in texts[1]
            assert "0.bias" not in texts[1]
        else:
            assert len(texts) == 1, "each rank has the whole model"


@pytest.mark.parametrize("stage", ["stage 2", "stage 3"])
def test_what_is_offloaded_is_refused(pool: RankPool, tmp_path: Path, stage: str) -> None:
    """The weights that are stepped are in a buffer that says of none where it has it, or beside the parameters.

    Of the buffers one rank's was saved, with a warning, and could not be loaded. The step after a load undid it where
    they are beside the parameters.
    """
    for texts in pool.run(cases.refusals_of_offloaded, stage, str(tmp_path), ranks=cases.RANKS):
        assert len(texts) == (6 if stage == "stage 2" else 4)
        assert all("offload=True" in text for text in texts)
        if stage == "stage 3":
            assert all("0.weight: group sharding's stage 3 with offload=True steps weights" in text for text in texts)
            assert all("0.bias: " in text for text in texts), "which is not cut"
