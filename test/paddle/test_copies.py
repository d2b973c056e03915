"""One bit that is another on one rank, in what ranks have alike: DistTensors, ShardedWeights, a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.paddle import cases_copies as cases
from test.paddle.versions import FROM_LOCAL, lacks
from test.ranks.pool import RankPool

RANKS = 4
WHO = {
    "replicate": "rank {bad}, the minority, differs from ranks {others}",
    "weight": "rank {bad}, the minority, differs from ranks {others}",
    "grid": "rank {low} and rank {high} have different ones, none of them the most",
    "other grid": "rank {low} and rank {high} have different ones, none of them the most",
}


def _expected(how: str, bad: int) -> str:
    others = ", ".join(str(rank) for rank in range(RANKS) if rank != bad)
    twin = bad ^ 1 if how == "grid" else bad ^ 2
    return WHO[how].format(bad=bad, others=others, low=min(bad, twin), high=max(bad, twin))


@lacks(FROM_LOCAL, "makes no DistTensor of given local values")
@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("how", list(WHO))
def test_one_bit_of_a_copy(pool: RankPool, tmp_path: Path, how: str, bad: int) -> None:
    if how == "weight":
        pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.sharded_weight")
    same = pool.run(cases.save_copies, str(tmp_path), RANKS, how, -1, ranks=RANKS)
    assert [outcome.result for outcome in same] == [()] * RANKS
    for outcome in pool.run(cases.save_copies, str(tmp_path), RANKS, how, bad, ranks=RANKS):
        (warning,) = outcome.result
        assert f"w: {_expected(how, bad)}" in warning
    for outcome in pool.run(cases.save_copies, str(tmp_path), RANKS, how, bad, "error", ranks=RANKS):
        assert outcome.error == "UnsupportedValueError"
        assert f"w: {_expected(how, bad)}" in outcome.message
    # Some of the bits are in the tenth that is compared.
    for outcome in pool.run(cases.save_copies, str(tmp_path), RANKS, how, bad, "auto", True, ranks=RANKS):
        (warning,) = outcome.result
        assert f"w: {_expected(how, bad)}" in warning


@pytest.mark.parametrize("bad", [0, 2])
def test_one_bit_of_a_model(pool: RankPool, tmp_path: Path, bad: int) -> None:
    same = pool.run(cases.save_model, str(tmp_path), RANKS, -1, ranks=RANKS)
    assert [outcome.result for outcome in same] == [()] * RANKS
    for outcome in pool.run(cases.save_model, str(tmp_path), RANKS, bad, ranks=RANKS):
        (warning,) = outcome.result
        assert warning.startswith("model.0.weight: ")
        assert warning.endswith(f"(the minority: rank {bad})")
