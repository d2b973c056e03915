"""Jobs of PaddleNLP's AutoTrainer, in semi-auto parallel mode, saved on one layout of ranks and resumed on another."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import list_checkpoints, load_merged_state_dict, verify
from test.ranks.remote import RankError
from test.trainers.jobs import AUTO_LAYOUTS, CUT, KINDS, STEPS, Job, Jobs, Outcome, Run, differences, whole

STATIC: dict[str, Any] = {"arguments": {"to_static": True}}
PAIRS = list(itertools.product(AUTO_LAYOUTS, AUTO_LAYOUTS))
PADDLE_CANNOT = pytest.mark.xfail(
    strict=True, reason="on one rank, Paddle leaves DistTensors of which two ranks have saved pieces as they were"
)
of_kind = pytest.mark.parametrize("kind", ["trained", "bfloat16"])
in_layout = pytest.mark.parametrize("layout", AUTO_LAYOUTS)


@pytest.fixture(scope="module")
def jobs(run_auto: Run, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(run_auto, lambda: tmp_path_factory.mktemp("job"))


@in_layout
@of_kind
def test_all_layouts_compute_the_same(jobs: Jobs, kind: str, layout: str) -> None:
    """Else what follows would compare nothing."""
    _, expected = jobs.trained(kind, "one", False)
    _, outcomes = jobs.trained(kind, layout, False)
    assert_equal(outcomes, expected[0].losses, expected, exact=kind == "bfloat16" or layout != CUT)
    assert all(len(set(outcome.losses)) == STEPS for outcome in outcomes)
    assert len(whole(outcomes)) == 21 * (6 if kind == "bfloat16" else 5)
    cut = {key for key, part in outcomes[0].parts.items() if part.box != part.shape}
    assert bool(cut) == (layout != "one")
    assert any("moment1" in key for key in cut) or layout == "one"


@in_layout
@of_kind
def test_saves_do_not_disturb(jobs: Jobs, kind: str, layout: str) -> None:
    _, expected = jobs.trained(kind, layout, False)
    folder, outcomes = jobs.trained(kind, layout, True)
    assert_equal(outcomes, expected[0].losses, expected)
    for step in (2, STEPS):
        part = folder / f"checkpoint-{step}" / "dist_ckpt"
        assert list_checkpoints(part) == [0]
        assert verify(part).ok


@pytest.mark.parametrize("writer", ["Paddle", "ours"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
@of_kind
def test_resume(run_auto: Run, jobs: Jobs, tmp_path: Path, kind: str, source: str, target: str, writer: str) -> None:
    folder, _ = jobs.trained(kind, source, writer == "ours")
    _, expected = jobs.trained(kind, target, False)
    outcomes = run_auto("train", Job(target, str(tmp_path), str(folder / "checkpoint-2"), **KINDS[kind]))
    rounded = kind == "trained" and source != target and CUT in (source, target)
    assert_equal(outcomes, expected[0].losses[2:], expected, exact=not rounded)


@in_layout
def test_paddle_refuses_nested_states(run_auto: Run, jobs: Jobs, tmp_path: Path, layout: str) -> None:
    """That is why the job that is compared with, below, gives Paddle a flat one."""
    begin = str(jobs.trained("trained", layout, False)[0] / "checkpoint-2")
    with pytest.raises(RankError, match="check_resumable_locally"):
        run_auto("train_as_paddle", Job(layout, str(tmp_path), begin, ours=False))


@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(*pair, marks=PADDLE_CANNOT) if pair[1] == "one" != pair[0] else pair for pair in PAIRS],
)
def test_resume_is_paddles(run_auto: Run, jobs: Jobs, tmp_path: Path, source: str, target: str) -> None:
    begin = str(jobs.trained("trained", source, False)[0] / "checkpoint-2")
    expected = run_auto("train", Job(target, str(tmp_path / "Paddle"), begin, ours=False))
    outcomes = run_auto("train", Job(target, str(tmp_path / "ours"), begin))
    assert_equal(outcomes, expected[0].losses, expected)


@in_layout
@of_kind
def test_nothing_loaded_is_seen(run_auto: Run, jobs: Jobs, tmp_path: Path, kind: str, layout: str) -> None:
    """The trainer goes on at the step that it was at, and the losses tell that it has not what was trained."""
    folder, expected = jobs.trained(kind, layout, True)
    begin = str(folder / "checkpoint-2")
    outcomes = run_auto("train_unloaded", Job(layout, str(tmp_path), begin, **KINDS[kind]))
    assert not np.isclose(outcomes[0].losses, expected[0].losses[2:], rtol=1e-4).any()
    assert len(differences(whole(outcomes), whole(expected))) == len(whole(expected))


@pytest.mark.parametrize(
    ("source", "target", "before", "after"),
    [
        ("one", "tensor2", STATIC, STATIC),
        ("tensor2", "sharding2", STATIC, STATIC),
        ("sharding2", "one", STATIC, STATIC),
        ("tensor2", "sharding2", {}, STATIC),
        ("sharding2", "tensor2", STATIC, {}),
    ],
)
def test_resume_in_static_mode(
    run_auto: Run, jobs: Jobs, tmp_path: Path, source: str, target: str, before: Any, after: Any
) -> None:
    folder, _ = jobs.trained("trained", source, True, **before)
    _, expected = jobs.trained("trained", target, False)
    outcomes = run_auto("train", Job(target, str(tmp_path), str(folder / "checkpoint-2"), **after))
    assert_equal(outcomes, expected[0].losses[2:], expected, exact=False)


@in_layout
def test_save_model(run_auto: Run, tmp_path: Path, layout: str) -> None:
    outcomes = run_auto("save_model", Job(layout, str(tmp_path / "job")), str(tmp_path / "final"))
    assert verify(tmp_path / "final" / "model").ok
    stored = {key: value.numpy() for key, value in load_merged_state_dict(tmp_path / "final" / "model").items()}
    expected = {key: value for key, value in whole(outcomes).items() if " " not in key}
    assert not differences(stored, expected)


def assert_equal(outcomes: list[Outcome], losses: list[float], expected: list[Outcome], exact: bool = True) -> None:
    """Compare the losses and the whole tensors of a job, bit for bit or but for rounding."""
    found, wanted = whole(outcomes), whole(expected)
    assert found.keys() == wanted.keys()
    assert all(outcome.losses == pytest.approx(losses, rel=1e-6) for outcome in outcomes)
    if exact:
        assert not differences(found, wanted)
    else:
        assert all(np.allclose(found[key], wanted[key], rtol=0, atol=1e-5) for key in wanted)
