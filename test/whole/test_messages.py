"""What errors and warnings say: what was expected, what was found, what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    CheckpointNotFoundError,
    LoadOptions,
    SaveOptions,
    StateDictMismatchError,
    list_checkpoints,
    read_metadata,
    rebuild_metadata,
    save_state_dict,
    verify,
)
from paddle_dist_ckpt.storage import as_storage
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from test.jobs import another_host, errors_of, load_alone, load_whole, save_alone


@pytest.mark.parametrize("path", ["", "s3://bucket/folder", "a\0b"])
def test_a_path_that_names_no_local_folder(path: str) -> None:
    with pytest.raises(ValueError, match="path must name a local folder"):
        as_storage(path)


def test_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no folder .*nowhere"):
        read_metadata(tmp_path / "nowhere")


def test_a_file_instead_of_its_folder(tmp_path: Path) -> None:
    save_alone({"n": 1}, tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"0\.metadata is a file; pass the folder"):
        rebuild_metadata(tmp_path / "0.metadata")
    assert read_metadata(tmp_path / "0.metadata").values == {"n": 1}
    assert list_checkpoints(tmp_path / "0.metadata") == [0]
    (tmp_path / "notes.txt").write_text("hello")
    for call in (read_metadata, verify):
        with pytest.raises(CheckpointNotFoundError, match=r"notes\.txt is of no format that is known"):
            call(tmp_path / "notes.txt")


def test_the_ids_that_there_are_are_named(tmp_path: Path) -> None:
    for unique_id in (3, 5):
        save_alone({"n": 1}, tmp_path, unique_id)
    with pytest.raises(CheckpointNotFoundError, match="with unique_id 7; it has those with the ids 3, 5"):
        read_metadata(tmp_path, 7)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:300], lambda data: data.replace(b"/n", b"/m")], ids=["cut", "flip"]
)
def test_what_to_do_about_a_damaged_metadata_file(tmp_path: Path, damage: Any) -> None:
    save_alone({"n": 1}, tmp_path)
    file = tmp_path / "0.metadata"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointCorruptedError, match=r"0\.metadata.*rebuild_metadata can make"):
        read_metadata(tmp_path)


def mismatch(saved: dict[str, Any], target: dict[str, Any], folder: Path) -> str:
    save_alone(saved, folder)
    with pytest.raises(StateDictMismatchError) as caught:
        load_alone(target, folder)
    return str(caught.value)


def test_none_for_a_tensor_is_told_what_it_takes(tmp_path: Path) -> None:
    text = mismatch({"w": np.zeros((3, 2), "f4")}, {"w": None}, tmp_path)
    assert "w: the state_dict has None, in the checkpoint it is a tensor of shape [3, 2] and dtype float32" in text
    assert "cast" not in text


def test_casting_is_proposed_where_it_helps(tmp_path: Path) -> None:
    assert "LoadOptions(cast=True)" in mismatch({"w": np.zeros(3, "f4")}, {"w": np.zeros(3, "f8")}, tmp_path)


def test_a_flat_target_that_is_not_found_is_told_how_it_is_nested(tmp_path: Path) -> None:
    stored = {"model": {"linear_0.w_0_moment1_0": np.zeros(3)}}
    text = mismatch(stored, {"model.linear_0.w_0_moment1_0": np.zeros(3)}, tmp_path)
    assert "nested otherwise, as state_dict['model']['linear_0.w_0_moment1_0']" in text


def test_a_near_miss_is_proposed_and_a_far_one_is_not(tmp_path: Path) -> None:
    text = mismatch({"weight": np.zeros(3), "w": np.zeros(3)}, {"weigth": np.zeros(3), "new": np.zeros(3)}, tmp_path)
    assert "weigth: the state_dict has a tensor, in the checkpoint it is missing; is 'weight' meant?" in text
    assert "new: the state_dict has a tensor, in the checkpoint it is missing\n" in text


def test_damaged_data_are_found_with_their_folder(tmp_path: Path) -> None:
    save_alone({"w": np.zeros(1000)}, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointCorruptedError, match=f"w: .*{file}") as caught:
        load_alone({"w": np.zeros(1000)}, tmp_path)
    assert "Targets are partly written" in str(caught.value)
    with pytest.raises(CheckpointCorruptedError) as caught:
        load_whole(tmp_path)
    assert "Targets" not in str(caught.value)


def test_ranks_of_one_host_have_one_folder_unless_they_are_to_have_several(tmp_path: Path) -> None:
    def save(rank: SimulatedRank, **more: Any) -> Any:
        return rank.save({f"n{rank.rank}": np.arange(3)}, tmp_path / str(rank.rank // 2), 0, SaveOptions(**more))

    def load(rank: SimulatedRank, **more: Any) -> Any:
        state = {f"n{rank.rank}": np.zeros(3, int)}
        rank.load(state, tmp_path / str(rank.rank // 2), None, LoadOptions(**more))
        return state[f"n{rank.rank}"].tolist()

    def check_refused(work: Any) -> None:
        for error in errors_of(run_ranks(4, work), ValueError):
            assert f"rank 0, 1: {tmp_path / '0'}; rank 2, 3: {tmp_path / '1'}\n" in str(error)
            assert "separate_folders=True" in str(error)

    check_refused(save)
    assert [list(folder.iterdir()) for folder in tmp_path.iterdir()] == [[], []], "nothing was written"
    for report in run_ranks(4, lambda rank: save(rank, separate_folders=True)):
        assert report.warnings == ()
    check_refused(load)
    assert run_ranks(4, lambda rank: load(rank, separate_folders=True)) == [[0, 1, 2]] * 4


def test_ranks_of_other_hosts_and_other_names_of_one_folder_are_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    paths = [tmp_path / "a", tmp_path / "link", another_host(tmp_path / "b", 1), another_host(tmp_path / "b", 1)]

    def work(rank: SimulatedRank) -> Any:
        rank.save({f"n{rank.rank}": np.arange(3)}, paths[rank.rank], 0)
        state = {f"n{rank.rank}": np.zeros(3, int)}
        rank.load(state, paths[rank.rank])
        return state[f"n{rank.rank}"].tolist()

    (tmp_path / "a").mkdir()
    assert run_ranks(4, work) == [[0, 1, 2]] * 4


def test_a_rank_that_does_not_compare_is_not_said_to_differ(tmp_path: Path) -> None:
    def save(rank: SimulatedRank) -> Any:
        options = SaveOptions(check_replicas="off" if rank.rank else "warn", timeout=60)
        return rank.save({"w": np.arange(3)}, tmp_path, options=options)

    assert [report.warnings for report in run_ranks(2, save)] == [(), ()]


def test_the_ranks_that_differ_are_named(tmp_path: Path) -> None:
    def save(rank: SimulatedRank) -> Any:
        return rank.save({"w": np.arange(3) + (rank.rank == 2), "v": rank.rank == 1}, tmp_path)

    first, second = run_ranks(3, save)[0].warnings
    assert first.startswith("v: the plain tensors or values of rank 1 differ")
    assert second.startswith("w: the plain tensors or values of rank 2 differ")


def test_options_of_wrong_types() -> None:
    for wrong in ({"strict": "false"}, {"cast": 1}, {"progress": "yes"}, {"no_dist": None}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            LoadOptions(**wrong)
    with pytest.raises(TypeError, match="progress"):
        SaveOptions(progress=0)


def test_an_id_may_be_any_integer(tmp_path: Path) -> None:
    assert save_state_dict({"n": 1}, tmp_path, unique_id=np.int64(5)).unique_id == 5  # type: ignore[arg-type]
    for wrong in (-1, 10**18, True, 1.0, "1"):
        with pytest.raises(ValueError, match="unique_id must be None or an integer"):
            read_metadata(tmp_path, wrong)  # type: ignore[arg-type]
