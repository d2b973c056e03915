"""What PaddleFormers' Trainer has saved, in flex and unified checkpoints, loaded by a program that has no Trainer; and
the other way round, a manager in a callback of the Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.trainers.jobs import KINDS, STEPS, Job, Jobs, Outcome, Run, assert_resumed, differences, whole

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


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("trained", "one"), ("trained", "data2"), ("bfloat16", "sharding2"), ("bfloat16", "sharding2 of version 2")],
)
def test_a_manager_in_a_callback(run: Run, tmp_path: Path, kind: str, layout: str) -> None:
    """Restored when training begins, before a step was taken."""

    def train(name: str, first: int, steps: int) -> list[Outcome]:
        arguments = {"lr_scheduler_type": "constant", "save_strategy": "no", "max_steps": steps}
        job = Job(layout, str(tmp_path / "output"), arguments=arguments, **KINDS[kind])
        return run("train_with_manager", job, str(tmp_path / name), first)

    expected = train("uninterrupted", 0, 4)
    train("interrupted", 0, 2)
    assert_resumed(train("interrupted", 2, 2), expected)
