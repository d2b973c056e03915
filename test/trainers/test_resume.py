"""Jobs of PaddleFormers' Trainer, saved on one layout of ranks and resumed on another."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from paddle_dist_ckpt import list_checkpoints, verify
from test.trainers.jobs import (
    CUT,
    FOLDERS,
    KINDS,
    LAYOUTS,
    PLACES,
    STEPS,
    Job,
    Jobs,
    Run,
    assert_resumed,
    differences,
    whole,
)

PAIRS = [
    (kind, source, target)
    for kind, source, target in itertools.product(KINDS, LAYOUTS, LAYOUTS)
    if {"trained": CUT not in (source, target), "elementwise": CUT in (source, target)}.get(kind, True)
]


@pytest.mark.parametrize(("kind", "layout"), PLACES)
def test_all_layouts_compute_the_same(jobs: Jobs, kind: str, layout: str) -> None:
    """Else what follows would compare nothing."""
    _, expected = jobs.trained(kind, "one", False)
    _, outcomes = jobs.trained(kind, layout, False)
    assert not differences(whole(outcomes), whole(expected))
    assert all(len(set(outcome.losses)) == STEPS for outcome in outcomes)
    if layout != CUT:
        assert all(outcome.losses == expected[0].losses for outcome in outcomes)


@pytest.mark.parametrize(("kind", "layout"), PLACES)
def test_saves_do_not_disturb(jobs: Jobs, kind: str, layout: str) -> None:
    _, expected = jobs.trained(kind, layout, False)
    folder, outcomes = jobs.trained(kind, layout, True)
    assert [outcome.losses for outcome in outcomes] == [outcome.losses for outcome in expected]
    assert not differences(whole(outcomes), whole(expected))
    for step, name in itertools.product((2, STEPS), FOLDERS):
        part = folder / f"checkpoint-{step}" / name
        assert [path.name for path in part.glob("*.metadata")] == ["0.metadata"]
        assert list_checkpoints(part) == [0]
        assert verify(part).ok


@pytest.mark.parametrize(("writer", "reader"), [("Paddle", "Paddle"), ("Paddle", "ours"), ("ours", "ours")])
@pytest.mark.parametrize(("kind", "source", "target"), PAIRS)
def test_resume(
    run: Run, jobs: Jobs, tmp_path: Path, kind: str, source: str, target: str, writer: str, reader: str
) -> None:
    folder, _ = jobs.trained(kind, source, writer == "ours")
    _, expected = jobs.trained(kind, target, False)
    outcomes = run("train", Job(target, str(tmp_path), str(folder / "checkpoint-2"), reader == "ours", **KINDS[kind]))
    assert_resumed(outcomes, expected)
