"""What earlier commits have saved is loaded, checked, exported, copied, and gone on with, as what is saved now."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dist_ckpt import (
    CheckpointManager,
    PerRank,
    copy_checkpoint,
    delete_checkpoint,
    export,
    list_checkpoints,
    load_merged_state_dict,
    load_state_dict,
    read_metadata,
    rebuild_metadata,
    save_state_dict,
    verify,
)
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks, shard_array
from test.golden.make_earlier import ROWS, STEPS, trained, values
from test.readers.golden import expected_arrays

FOLDERS = sorted(Path(__file__).parent.joinpath("native").iterdir())
WITH_OBJECTS = [folder for folder in FOLDERS if (folder / "steps").exists()]
all_earlier = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
all_with_objects = pytest.mark.parametrize("folder", WITH_OBJECTS, ids=lambda folder: folder.name)


def expect(folder: Path, unique_id: int, as_id: int | None = None, of: Path | None = None) -> None:
    """A checkpoint has what the golden one of this id has."""
    assert verify(folder, as_id if as_id is not None else unique_id).ok
    loaded = load_merged_state_dict(folder, unique_id=as_id if as_id is not None else unique_id)
    assert np.array_equal(loaded["rows"].numpy(), ROWS + 100 * unique_id)
    assert str(loaded["half"].dtype).endswith("bfloat16")
    assert np.array_equal(loaded["half"].astype("float32").numpy(), ROWS[:2])
    assert (loaded["scalar"].shape, float(loaded["scalar"])) == ([], 2.5)
    assert loaded["none"].shape == [0, 4]
    assert loaded["array"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["values"] == {**values(), "epoch": 3 + unique_id}
    assert type(loaded["values"]["pair"]) is tuple
    if (of or folder) in WITH_OBJECTS:
        assert loaded["own"] == {0: {"rank": 0}, 1: {"rank": 1}}


def test_there_are_some() -> None:
    assert len(FOLDERS) == 4
    assert len(WITH_OBJECTS) == 3


@all_earlier
def test_it_is_listed_checked_and_loaded_whole(folder: Path) -> None:
    assert list_checkpoints(folder) == [0, 1]
    assert read_metadata(folder).world_size == 2
    for unique_id in (0, 1):
        expect(folder, unique_id)


@all_earlier
def test_a_model_and_its_optimizer_are_filled(folder: Path) -> None:
    expected = expected_arrays(f"native/{folder.name}")
    net = paddle.nn.Linear(4, 2)
    optimizer = paddle.optimizer.AdamW(0.5, parameters=net.parameters())
    state = {"model": net, "optimizer": optimizer, "values": None}
    load_state_dict(state, folder, unique_id=0)
    assert state["values"] == values()
    for name, parameter in net.state_dict().items():
        assert np.array_equal(parameter.numpy(), expected[name])
    # The last part of a variable's name, which counts, is another one in each run: linear_0.w_0.
    filled = {key.partition(".")[2]: each.numpy() for key, each in optimizer.state_dict().items() if "." in key}
    saved = {key.partition(".")[2]: array for key, array in expected.items() if "." in key}
    assert len(saved) == 8
    assert filled.keys() == saved.keys()
    for key, array in saved.items():
        assert np.array_equal(filled[key], array), key


@all_earlier
def test_ranks_of_another_layout_load_it(folder: Path) -> None:
    def load(rank: SimulatedRank) -> list[Any]:
        columns = shard_array(ROWS, [Box((0, rank.rank), (6, 1))], fill=False)
        state = {"rows": columns, "array": np.zeros(5, np.int64)}
        rank.load(state, folder, 1)
        return [columns.pieces[0], state["array"]]

    for number, result in enumerate(run_ranks(4, load)):
        if isinstance(result, BaseException):
            raise result
        assert np.array_equal(result[0], ROWS[:, number : number + 1] + 100)
        assert result[1].tolist() == [0, 1, 2, 3, 4]


@all_earlier
def test_it_is_copied_exported_and_deleted(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy_checkpoint(folder, copy, unique_id=0)
    copy_checkpoint(folder, copy, unique_id=1)
    expect(copy, 0, of=folder)
    delete_checkpoint(copy, 0)
    assert list_checkpoints(copy) == [1]
    expect(copy, 1, of=folder)
    assert save_state_dict({"x": np.arange(3)}, copy).unique_id == 2
    expect(copy, 1, of=folder)
    export(folder, tmp_path / "export", unique_id=0, prefix="model")
    weight = load_merged_state_dict(tmp_path / "export")["weight"]
    assert np.array_equal(weight.numpy(), expected_arrays(f"native/{folder.name}")["weight"])


@all_earlier
def test_its_metadata_can_be_made_again(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("[01]_1.*.safetensors"):
        shutil.copy(file, tmp_path)
    assert rebuild_metadata(tmp_path).unique_id == 1
    expect(tmp_path, 1, of=folder)


@all_with_objects
def test_each_rank_gets_its_own_value(folder: Path) -> None:
    def load(rank: SimulatedRank) -> Any:
        state = {"own": PerRank(None)}
        rank.load(state, folder, 0)
        return state["own"]

    assert [PerRank({"rank": number}) for number in (0, 1)] == run_ranks(2, load)


@all_with_objects
def test_a_manager_goes_on_with_its_steps(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "steps"
    shutil.copytree(folder / "steps", root)
    manager = CheckpointManager(root, keep_last=2, best=("loss", "min"))
    assert (manager.all_steps(), manager.best_step()) == ([2, *STEPS[-2:]], 2)
    for step in (2, None):
        state: dict[str, Any] = {"rows": paddle.zeros([6, 4]), "step": None}
        found = manager.restore(state, step)
        assert found == state["step"] == (step or STEPS[-1])
        assert np.array_equal(state["rows"].numpy(), ROWS + found)
    manager.save(5, {"rows": paddle.zeros([6, 4]), "step": 5}, metrics={"loss": 9.0})
    manager.close()
    assert CheckpointManager(root).all_steps() == [2, 4, 5]


def test_what_was_trained_then_is_trained_now() -> None:
    """So the expected arrays are those of the model, and not of something that only looks like it."""
    net, _ = trained()
    for folder in FOLDERS:
        assert np.allclose(net.weight.numpy(), expected_arrays(f"native/{folder.name}")["weight"])
