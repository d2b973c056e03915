"""What managers on all ranks must have in common, and what they call it."""

from __future__ import annotations

from typing import Any

import pytest

from paddle_dist_ckpt.manager.agreement import agree
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from test.jobs import all_ok, errors_of


@pytest.mark.parametrize("arguments", [{}, {"keep_last": 2, "save_interval_seconds": None}])
def test_all_ranks_are_told_what_the_coordinator_calls_it(arguments: dict[str, Any]) -> None:
    def work(rank: SimulatedRank) -> str:
        with rank.hub.session("CheckpointManager", 10) as session:
            return agree(session, arguments, f"run-{rank.rank}")

    names = all_ok(run_ranks(3, work))
    assert len(set(names)) == 1
    assert names[0].startswith("run-0 (")
    assert all_ok(run_ranks(3, work)) != names


def test_an_argument_that_differs_is_named() -> None:
    def work(rank: SimulatedRank) -> str:
        with rank.hub.session("CheckpointManager", 10) as session:
            return agree(session, {"best": None, "keep_last": rank.rank}, "run")

    for error in errors_of(run_ranks(2, work), ValueError):
        assert "keep_last is 0 on rank 0, 1 on rank 1" in str(error)
