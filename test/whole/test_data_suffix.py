"""Data files whose names do not end in .safetensors, which walkers of those do not see: all that is done with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from paddle_dist_ckpt import (
    CheckpointManager,
    SaveOptions,
    copy_checkpoint,
    delete_checkpoint,
    export,
    list_checkpoints,
    read_metadata,
    rebuild_metadata,
    verify,
)
from paddle_dist_ckpt.cli.main import app
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.manager.steps import step_folder
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks, shard_array
from test.jobs import all_ok, load_whole

SHARDS = SaveOptions(data_suffix=".shards", timeout=60)
ARRAY = np.arange(24, dtype=np.float32).reshape(6, 4)


def save(path: Path, unique_id: int | None = None, options: SaveOptions = SHARDS, factor: int = 1) -> None:
    """Save on two ranks, by rows."""

    def work(rank: SimulatedRank) -> None:
        part = shard_array(ARRAY * factor, [Box((3 * rank.rank, 0), (3, 4))])
        rank.save({"w": part, "large": "x" * 9000}, path, unique_id, options)

    all_ok(run_ranks(2, work))


def suffixes(path: Path) -> list[str]:
    return sorted(one.suffix for one in path.iterdir())


def test_all_that_is_done_with_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    for factor in (1, 2):  # the second replaces the first
        save(path, 3, factor=factor)
        assert suffixes(path) == [".metadata", ".shards", ".shards"]
    save(path)
    assert list_checkpoints(path) == [3, 4]
    assert np.array_equal(load_whole(path, 3)["w"], ARRAY * 2)
    assert verify(path).problems == ()
    assert all(info.name.endswith(".shards") for info in read_metadata(path).files)
    copy_checkpoint(path, tmp_path / "copy", 3)
    assert suffixes(tmp_path / "copy") == [".metadata", ".shards", ".shards"]
    export(path, tmp_path / "out", unique_id=3)
    assert np.array_equal(load_whole(tmp_path / "out")["w"], ARRAY * 2)
    delete_checkpoint(path, 4)
    assert suffixes(path) == [".metadata", ".shards", ".shards"]
    (path / "3.metadata").unlink()
    assert rebuild_metadata(path).unique_id == 3
    assert np.array_equal(load_whole(path)["w"], ARRAY * 2)
    shown = CliRunner().invoke(app, ["inspect", str(path)])
    assert shown.exit_code == 0, shown.output


def test_either_kind_replaces_the_other(tmp_path: Path) -> None:
    for options, suffix in ((SHARDS, ".shards"), (SaveOptions(timeout=60), ".safetensors"), (SHARDS, ".shards")):
        save(tmp_path, 0, options)
        assert suffixes(tmp_path) == [".metadata", suffix, suffix]


def test_any_safetensors_tool_opens_them(tmp_path: Path) -> None:
    save(tmp_path)
    found: dict[str, Any] = {}
    for path in tmp_path.glob("*.shards"):
        with safe_open(path, "numpy") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert np.array_equal(np.concatenate([found["w[0:3,0:4]"], found["w[3:6,0:4]"]]), ARRAY)


def test_what_a_dead_save_has_left_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 0)
    for path in tmp_path.glob("*.shards"):
        name = path.name.split(".")
        (tmp_path / f"{name[0]}.00000000000000aa.0.shards").write_bytes(path.read_bytes())
    claim = tmp_path / "0.00000000000000aa.claim"
    claim.write_text('{"save":"00000000000000aa","replaces":null,"removes":[]}')
    os.utime(claim, (1, 1))
    save(tmp_path, 1)
    assert not list(tmp_path.glob("*.00000000000000aa.*"))
    assert np.array_equal(load_whole(tmp_path, 0)["w"], ARRAY)


def test_a_manager_removes_old_steps(tmp_path: Path) -> None:
    options = SaveOptions(data_suffix=".shards", no_dist=True)
    with CheckpointManager(tmp_path, keep_last=1, async_save=False, options=options) as manager:
        for step in (1, 2):
            manager.save(step, {"w": ARRAY})
    assert not step_folder(tmp_path, 1).exists()
    assert ".shards" in suffixes(step_folder(tmp_path, 2))


def test_ranks_that_ask_for_different_ones_do_not_save(tmp_path: Path) -> None:
    def work(rank: SimulatedRank) -> None:
        options = SHARDS if rank.rank else SaveOptions(timeout=60)
        rank.save({"w": ARRAY}, tmp_path / "ckpt", options=options)

    for error in run_ranks(2, work):
        with pytest.raises(ValueError, match="rank 1 passed data_suffix='.shards', rank 0 data_suffix='.safetensors'"):
            raise error  # type: ignore[misc]


def test_the_default_is_the_first(tmp_path: Path) -> None:
    def work(rank: SimulatedRank) -> None:
        suffix: Any = ".safetensors" if rank.rank else None
        rank.save({"w": ARRAY}, tmp_path / "ckpt", options=SaveOptions(data_suffix=suffix, timeout=60))

    assert run_ranks(2, work) == [None, None]


@pytest.mark.parametrize("suffix", ["shards", ".distcp", "", 5])
def test_others_are_refused(suffix: Any) -> None:
    with pytest.raises(ValueError, match="data_suffix must be one of"):
        SaveOptions(data_suffix=suffix)
