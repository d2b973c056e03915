"""Jobs of PaddleFormers' SFTTrainer and DPOTrainer, resumed in other processes than those that saved them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from test.ranks.pool import RankPool
from test.trainers.jobs import Job, differences, whole


@pytest.mark.skipif(find_spec("paddleformers") is None, reason="needs paddleformers: make test-trainers")
@pytest.mark.parametrize("preferences", [False, True], ids=["SFT", "DPO"])
@pytest.mark.parametrize(("layout", "lora"), [("one", False), ("sharding2", True)])
def test_resume(tmp_path: Path, layout: str, preferences: bool, lora: bool) -> None:
    """Losses, weights, moments, random state, learning rates and what is logged are those of a job without a break."""
    runs = []
    for job in (
        Job(layout, str(tmp_path / "first"), lora=lora),
        Job(layout, str(tmp_path / "second"), str(tmp_path / "first/checkpoint-2"), lora=lora),
    ):
        with RankPool(1 if layout == "one" else 2) as pool:
            runs.append(pool.run("test.trainers.tuning:train", job, preferences))
    first, second = runs
    for (expected, random, log), (found, found_random, found_log) in zip(first, second, strict=True):
        assert len(set(expected.losses)) > 4
        assert (found.losses, found_random, found_log) == (expected.losses[4:], random, log)
    found, expected = (whole([outcome for outcome, _, _ in run]) for run in (second, first))
    assert not differences(found, expected)
