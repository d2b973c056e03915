"""Training that goes on with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.paddle import cases_training as cases
from test.paddle.versions import FROM_LOCAL, lacks
from test.ranks.fresh import fresh_ranks


def run(ranks: int, *args: Any) -> list[float]:
    ends = fresh_ranks(ranks, cases.train, *args)
    assert [end.exit_code for end in ends] == [0] * ranks, "\n".join(end.log for end in ends if end.exit_code)
    return list(ends[0].result)


@lacks(FROM_LOCAL, "has keys that are numbers of the run in state_dict() of shard_optimizer")
@pytest.mark.parametrize(
    ("source", "source_ranks", "destination", "ranks"), [("dp2_mp2", 4, "mp2", 2), ("mp2", 2, "dp2_mp2", 4)]
)
def test_losses_go_on(tmp_path: Path, source: str, source_ranks: int, destination: str, ranks: int) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run(source_ranks, source, 1, 0, None, 3, first)
    here = run(source_ranks, source, 2, 1, first, 4, second)
    there = run(ranks, destination, 3, 1, first, 4, None)
    np.testing.assert_allclose(there, here, rtol=1e-4)
