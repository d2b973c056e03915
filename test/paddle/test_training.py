"""Training that goes on with another number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from test.paddle import cases_training as cases
from test.paddle.versions import FROM_LOCAL, lacks
from test.ranks.pool import RankPool


@lacks(FROM_LOCAL, "has keys that are numbers of the run in state_dict() of shard_optimizer")
@pytest.mark.parametrize(
    ("source", "source_ranks", "destination", "ranks"), [("dp2_mp2", 4, "mp2", 2), ("mp2", 2, "dp2_mp2", 4)]
)
def test_losses_go_on(
    pool: RankPool, tmp_path: Path, source: str, source_ranks: int, destination: str, ranks: int
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    pool.run(cases.train, source, source_ranks, 1, 0, None, 3, first, ranks=source_ranks)
    here = pool.run(cases.train, source, source_ranks, 2, 1, first, 4, second, ranks=source_ranks)
    there = pool.run(cases.train, destination, ranks, 3, 1, first, 4, None, ranks=ranks)
    np.testing.assert_allclose(there[0], here[0], rtol=1e-4)
