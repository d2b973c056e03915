"""The command line on launched ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paddle_dist_ckpt import CheckpointError, LocalStorage
from paddle_dist_ckpt.cli.ranks import gathered, same_checkpoint
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from test.cli.commands import save_model
from test.jobs import data_files, errors_of, make_array
from test.ranks.launcher import forked


def test_two_ranks_verify(tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    arrays = {"a": make_array((400, 50)), "b": make_array((7,), "int64")}
    save_model(tmp_path / "a", arrays)
    changed = arrays["a"].copy()
    changed[[0, 399]] = np.nan
    save_model(tmp_path / "b", {**arrays, "a": changed})
    for path in data_files(tmp_path / "b"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    program = "from paddle_dist_ckpt.cli.main import main\n\nmain()\n"
    (code, first), (_, second) = forked(tmp_path, program, "verify", tmp_path / "b", "--json")
    assert "\n{" in f"\n{first}", first
    assert "\n{" not in f"\n{second}"
    found = json.loads(first[f"\n{first}".index("\n{") : first.rindex("\n}") + 2])
    assert (code, len(found["problems"])) == (1, 2)


def test_recipes_that_one_rank_cannot_read_end_it_on_all(tmp_path: Path) -> None:
    """As where the file is on one host only."""
    pytest.importorskip("paddle")
    save_model(tmp_path / "a", {"w": make_array((4, 5))})
    (tmp_path / "rules-0.py").write_text("recipes = {}")
    program = "import os, sys\nfrom paddle_dist_ckpt.cli.main import main\n\n"
    program += "sys.argv[-1] = sys.argv[-1].replace('RANK', os.environ['PADDLE_TRAINER_ID'])\nmain()\n"
    rules = tmp_path / "rules-RANK.py"
    (code, first), (other, second) = forked(tmp_path, program, "merge", tmp_path / "a", "out", "--recipes", rules)
    assert (code, other) == (2, 2)
    assert "rank 1: FileNotFoundError" in first, first
    assert "No such file or directory" in second, second


def test_ranks_that_see_other_checkpoints_say_so(tmp_path: Path) -> None:
    """As of folders of the same name on two hosts."""
    for name in "ab":
        save_model(tmp_path / name, {"w": make_array((4, 5))}, 3)

    def look(rank: SimulatedRank) -> list[int]:
        with rank.hub.session("verify", 60) as session:
            metadata = same_checkpoint(session, LocalStorage(tmp_path / "ab"[rank.rank]), None)
            return gathered(session, "problems", lambda: metadata.unique_id, int)

    for error in errors_of(run_ranks(2, look), CheckpointError):
        assert f"checkpoint 3 in {tmp_path / 'b'} is not the one that the other ranks see" in str(error)
