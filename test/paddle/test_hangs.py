"""A system call that does not return on one of several processes: all are told, in time, in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from paddle_dist_ckpt import list_checkpoints
from test.paddle import cases_hangs as cases
from test.paddle.outcomes import Outcome
from test.ranks.pool import RankPool
from test.stalls import BOUND

RANKS = 3
SOON = 60.0
"""Seconds, on a busy machine, too: a fifth of the timeout."""


def assert_told(outcomes: Sequence[Outcome], rank: int, doing: str) -> None:
    assert [outcome.error for outcome in outcomes] == ["CheckpointTimeoutError"] * RANKS
    assert {outcome.ranks for outcome in outcomes} == {(rank,)}
    assert all(outcome.seconds < SOON for outcome in outcomes)
    (message,) = {outcome.message.partition("\n")[0] for outcome in outcomes}
    assert doing in message
    assert f"for {BOUND:g} s on rank {rank}" in message
    assert f"/{rank}_" in message, "the file's name"


@pytest.mark.parametrize(("hangs", "in_background"), [(0, False), (2, True)])
def test_an_fsync_that_hangs(pool: RankPool, tmp_path: Path, hangs: int, in_background: bool) -> None:
    folder = str(tmp_path)
    assert {one.result for one in pool.run(cases.save, folder, RANKS, 1, None, False, BOUND, ranks=RANKS)} == {0}
    outcomes = pool.run(cases.save, folder, RANKS, 2, hangs, in_background, BOUND, ranks=RANKS)
    assert_told(outcomes, hangs, "fsync of")
    assert list_checkpoints(folder) == [0]
    assert {one.result for one in pool.run(cases.load, folder, RANKS, None, BOUND, ranks=RANKS)} == {1}
    outcomes = pool.run(cases.save, folder, RANKS, 3, None, in_background, BOUND, ranks=RANKS)
    assert {one.result for one in outcomes} == {1}
    assert not list(tmp_path.glob("*.claim*")), "the next save of the same ranks cleans up at once"
    assert len(list(tmp_path.glob("*.safetensors"))) == 2 * RANKS


def test_a_read_that_hangs(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    pool.run(cases.save, folder, RANKS, 1, None, False, BOUND, ranks=RANKS)
    for hangs in (0, 1):
        assert_told(pool.run(cases.load, folder, RANKS, hangs, BOUND, ranks=RANKS), hangs, "a read of")
    assert {one.result for one in pool.run(cases.load, folder, RANKS, None, BOUND, ranks=RANKS)} == {1}
    (outcome,) = pool.run(cases.load_alone, folder, BOUND, ranks=1)
    assert outcome.error == "CheckpointTimeoutError"


def test_a_manager_of_which_a_step_hangs(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(cases.save_steps, str(tmp_path), RANKS, 1, BOUND, ranks=RANKS)
    assert_told([outcome for outcome, _ in results], 1, "fsync of")
    assert [steps for _, steps in results] == [[1, 3]] * RANKS
