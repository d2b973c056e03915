"""What PaddleFormers' Trainer has saved, in flex and unified checkpoints, loaded by a program that has no Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.trainers.jobs import KINDS, STEPS, Job, Jobs, Run, assert_resumed, differences, whole

UNIFIED = {"save_checkpoint_format": "unified_checkpoint", "load_checkpoint_format": "unified_checkpoint"}


@pytest.mark.parametrize("config", ["", "async_save", "ignore_merge_optimizer"])
@pytest.mark.parametrize(("kind", "source"), [("trained", "one"), ("bfloat16", "one"), ("bfloat16", "sharding2")])
@pytest.mark.parametrize("target", ["one", "sharding2"])
def test_a_unified_checkpoint_is_loaded(
    run: Run, jobs: Jobs, tmp_path: Path, kind: str, source: str, target: str, config: str
) -> None:
    """With the key_map and the recipes of the documentation."""
    folder, expected = jobs.trained(kind, source, True, arguments={**UNIFIED, "unified_checkpoint_config": config})
    job = Job(target, str(tmp_path), arguments=UNIFIED, **KINDS[kind])
    found = run("load_unified", job, str(folder / f"checkpoint-{STEPS}"))
    assert not differences(whole(found), whole(expected))


@pytest.mark.parametrize(("kind", "source"), [("trained", "one"), ("bfloat16", "sharding2 of version 2")])
@pytest.mark.parametrize("target", ["one", "sharding2"])
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "Paddle's"])
def test_a_flex_checkpoint_is_loaded(
    run: Run, jobs: Jobs, tmp_path: Path, kind: str, source: str, target: str, ours: bool
) -> None:
    """With the key_map of the documentation."""
    folder, expected = jobs.trained(kind, source, ours)
    found = run("load_flex", Job(target, str(tmp_path), **KINDS[kind]), str(folder / f"checkpoint-{STEPS}"))
    assert not differences(whole(found), whole(expected))


@pytest.mark.parametrize("layout", ["one", "sharding2"])
def test_the_trainer_resumes_from_it(run: Run, jobs: Jobs, tmp_path: Path, layout: str) -> None:
    folder, expected = jobs.trained("bfloat16", layout, True, arguments=UNIFIED)
    job = Job(layout, str(tmp_path), str(folder / "checkpoint-2"), arguments=UNIFIED, **KINDS["bfloat16"])
    assert_resumed(run("train", job), expected)
