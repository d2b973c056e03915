"""Jobs of PaddleFormers' Trainer, saved on one layout of ranks and resumed on another."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paddle_dist_ckpt import list_checkpoints, verify
from test.trainers.jobs import FOLDERS, LAYOUTS, STEPS, Job, Outcome, differences, whole

pytestmark = pytest.mark.skipif(find_spec("paddleformers") is None, reason="needs PaddleFormers: make test-trainers")

CUT = "tensor2"  # has no kernels for the model's loss
KINDS = {
    "trained": {},
    "elementwise": {"elementwise": True},
    "bfloat16": {"elementwise": True, "bf16": True},
}
PLACES = [(kind, layout) for kind, layout in itertools.product(KINDS, LAYOUTS) if kind != "trained" or layout != CUT]
PAIRS = [
    (kind, source, target)
    for kind, source, target in itertools.product(KINDS, LAYOUTS, LAYOUTS)
    if {"trained": CUT not in (source, target), "elementwise": CUT in (source, target)}.get(kind, True)
]
WRITERS = {"Paddle": False, "ours": True}

Saved = Callable[[str, str, bool], tuple[Path, list[Outcome]]]


@pytest.fixture(scope="module")
def saved(run: Any, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Gives the folder and the outcomes of a job that was not interrupted: its kind, its layout, and whether ours."""
    jobs: dict[tuple[str, str, bool], tuple[Path, list[Outcome]]] = {}

    def job(kind: str, layout: str, ours: bool) -> tuple[Path, list[Outcome]]:
        key = kind, layout, ours
        if key not in jobs:
            folder = tmp_path_factory.mktemp("job")
            jobs[key] = folder, run("train", Job(layout, str(folder), ours=ours, **KINDS[kind]))
        return jobs[key]

    return job


@pytest.mark.parametrize(("kind", "layout"), PLACES)
def test_all_layouts_compute_the_same(saved: Saved, kind: str, layout: str) -> None:
    """Else what follows would compare nothing."""
    source = "one"
    _, expected = saved(kind, source, False)
    _, outcomes = saved(kind, layout, False)
    assert not differences(whole(outcomes), whole(expected))
    assert all(len(set(outcome.losses)) == STEPS for outcome in outcomes)
    if layout != CUT:
        assert all(outcome.losses == expected[0].losses for outcome in outcomes)


@pytest.mark.parametrize(("kind", "layout"), PLACES)
def test_saves_do_not_disturb(saved: Saved, kind: str, layout: str) -> None:
    _, expected = saved(kind, layout, False)
    folder, outcomes = saved(kind, layout, True)
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
    run: Any, saved: Saved, tmp_path: Path, kind: str, source: str, target: str, writer: str, reader: str
) -> None:
    folder, _ = saved(kind, source, WRITERS[writer])
    _, expected = saved(kind, target, False)
    job = Job(target, str(tmp_path), str(folder / "checkpoint-2"), ours=WRITERS[reader], **KINDS[kind])
    outcomes = run("train", job)
    assert [outcome.losses for outcome in outcomes] == [outcome.losses[2:] for outcome in expected]
    assert not differences(whole(outcomes), whole(expected))
