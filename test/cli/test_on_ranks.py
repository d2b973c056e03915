"""The command line on launched ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from test.cli.commands import save_model
from test.jobs import data_files, make_array
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
