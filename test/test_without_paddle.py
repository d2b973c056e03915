"""Everything but the adapter works where paddle cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib.abc
import os
import sys


class NoPaddle(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "paddle":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoPaddle())
try:
    import paddle
except ImportError:
    pass
else:
    raise AssertionError("paddle is not blocked")

import numpy as np

import paddle_dist_ckpt as ckpt
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.testing import run_ranks, shard_array

path = sys.argv[1]
weight = np.arange(60, dtype=np.float32).reshape(10, 6)
rows = [Box((0, 0), (4, 6)), Box((4, 0), (6, 6))]
columns = [Box((0, 0), (10, 1)), Box((0, 1), (10, 5))]


def save(rank):
    state = {"model": {"w": shard_array(weight, [rows[rank.rank]])}, "steps": (7, {1: None}), "a": np.arange(3)}
    return rank.save(state, path)


def load(rank):
    state = {
        "model": {"w": shard_array(weight, [columns[rank.rank]], fill=False)},
        "steps": None,
        "a": np.zeros(3, np.int64),
    }
    rank.load(state, path)
    return state


def loaded_well():
    for rank, state in enumerate(run_ranks(2, load)):
        if isinstance(state, BaseException):
            raise state
        assert np.array_equal(state["model"]["w"].pieces[0], weight[columns[rank].slices])
        assert state["steps"] == (7, {1: None})
        assert state["a"].tolist() == [0, 1, 2]
    return True


for report in run_ranks(2, save):
    if isinstance(report, BaseException):
        raise report
    assert report.unique_id == 0
assert loaded_well()
assert ckpt.list_checkpoints(path) == [0]
before = ckpt.read_metadata(path)
assert [shard.global_offset for shard in before.state_dict_metadata["model.w"]] == [(0, 0), (4, 0)]
assert ckpt.verify(path).ok

os.remove(os.path.join(path, "0.metadata"))
assert ckpt.list_checkpoints(path) == []
rebuilt = ckpt.rebuild_metadata(path)
assert rebuilt.state_dict_metadata == before.state_dict_metadata
assert rebuilt.storage_metadata == before.storage_metadata
assert rebuilt.values == before.values
assert ckpt.list_checkpoints(path) == [0]
assert ckpt.verify(path).ok
assert loaded_well()

for needs_it in (lambda: ckpt.save_state_dict({"a": 1}, path), lambda: ckpt.load(path), ckpt.rng_state, ckpt.install):
    try:
        needs_it()
    except ModuleNotFoundError as error:
        assert error.name == "paddle" and "install paddlepaddle or paddlepaddle-gpu" in str(error), error
    else:
        raise AssertionError("it did without paddle")

assert not any(name.partition(".")[0] == "paddle" for name in sys.modules)
print("done")
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def test_checkpoints_without_paddle(tmp_path: Path) -> None:
    result = run(PROGRAM, str(tmp_path / "ckpt"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "done"


def test_importing_the_package_does_not_import_paddle() -> None:
    result = run("import sys, paddle_dist_ckpt, paddle_dist_ckpt.testing; print('paddle' in sys.modules)")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "False"


def test_every_public_name_is_there_and_sorted() -> None:
    import paddle_dist_ckpt

    assert paddle_dist_ckpt.__all__ == sorted(paddle_dist_ckpt.__all__)
    assert all(hasattr(paddle_dist_ckpt, name) for name in paddle_dist_ckpt.__all__)
