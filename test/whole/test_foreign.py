"""Checkpoints of other formats go through everything that ours go through."""

from __future__ import annotations

import gc
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    CheckpointNotFoundError,
    LoadOptions,
    StateDictMismatchError,
    copy_checkpoint,
    export,
    list_checkpoints,
    read_metadata,
    verify,
)
from paddle_dist_ckpt.core.dtypes import DTYPES, arithmetic_dtype
from paddle_dist_ckpt.files.names import step_name
from paddle_dist_ckpt.folder.selection import Selection, unread
from test.jobs import alike, another_host, check_pieces, load_on, load_whole, save_alone, split_rows, try_load
from test.readers.golden import GOLDEN, expected_arrays
from test.readers.torch_writer import DCPWriter, saved, tensor

FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))


def arrays_of(folder: str) -> dict[str, np.ndarray]:
    """What a golden checkpoint holds, by flat key, in its true types."""
    dtypes = {key: parts[0].dtype for key, parts in read_metadata(GOLDEN / folder).state_dict_metadata.items()}
    return {
        key: array.view(arithmetic_dtype(DTYPES[dtypes[key]]))
        for key, array in expected_arrays(GOLDEN / folder).items()
    }


def nested(folder: str, leaves: dict[str, Any]) -> dict[Any, Any]:
    """Leaves by flat key as the state_dict that the checkpoint was saved from."""
    state: dict[Any, Any] = {}
    for key, parts in read_metadata(GOLDEN / folder).flat_mapping.items():
        if key in leaves:
            at = state
            for part in parts[:-1]:
                at = at.setdefault(part, {})
            at[parts[-1]] = leaves[key]
    return state


@pytest.mark.parametrize("folder", FOLDERS)
def test_whole(folder: str) -> None:
    found = load_whole(GOLDEN / folder, flat=True)
    for key, array in arrays_of(folder).items():
        assert found[key].dtype == array.dtype
        assert found[key].tobytes() == array.tobytes(), key
    assert list_checkpoints(GOLDEN / folder) == [0]


@pytest.mark.parametrize("exchange", ["auto", "always"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_on_three_ranks(folder: str, exchange: Any) -> None:
    arrays = arrays_of(folder)
    cut = {key: split_rows(array, 3, fill=False) if array.ndim else None for key, array in arrays.items()}
    states = [
        nested(folder, {key: parts[rank] if (parts := cut[key]) else np.zeros_like(arrays[key]) for key in arrays})
        for rank in range(3)
    ]
    paths: Any = GOLDEN / folder
    if exchange == "always":  # and of the ranks only one has the files
        paths = [GOLDEN / folder, another_host("/nowhere", 1), another_host("/nowhere", 2)]
    load_on(states, paths, options=LoadOptions(exchange=exchange, timeout=60))
    for key, array in arrays.items():
        parts = cut[key]
        for rank in range(3):
            if parts is not None:
                check_pieces(parts[rank], array)


@pytest.mark.parametrize("folder", FOLDERS)
def test_verified_as_far_as_it_can_be(folder: str) -> None:
    report = verify(GOLDEN / folder)
    assert report.ok
    assert (report.verified_bytes > 0) == (folder == "torch-dcp-2.13")


def test_a_flipped_bit_where_the_format_has_checksums(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "torch-dcp-2.13", tmp_path / "ckpt")
    metadata = read_metadata(tmp_path / "ckpt")
    file, position, _, _ = metadata.checksums[0]
    path = tmp_path / "ckpt" / metadata.files[file].name
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    report = verify(tmp_path / "ckpt")
    assert not report.ok
    assert f"{path.name}: the CRC-32" in report.problems[0]


@pytest.mark.parametrize("folder", ["paddle-3.3.1", "hf-safetensors", "torch-dcp-2.13"])
def test_a_file_that_is_gone_or_short_is_named(tmp_path: Path, folder: str) -> None:
    shutil.copytree(GOLDEN / folder, tmp_path / "ckpt")
    name = read_metadata(tmp_path / "ckpt").files[0].name
    targets = {key: np.zeros_like(array) for key, array in arrays_of(folder).items()}
    path = tmp_path / "ckpt" / name
    path.write_bytes(path.read_bytes()[:-1])
    for error in try_load([nested(folder, targets)] * 2, tmp_path / "ckpt"):
        assert isinstance(error, CheckpointCorruptedError)
        assert name in str(error)
    path.unlink()
    for error in try_load([nested(folder, targets)] * 2, tmp_path / "ckpt"):
        assert isinstance(error, CheckpointCorruptedError | CheckpointNotFoundError)


def test_a_tensor_without_elements_that_is_not_there_is_not_missing(tmp_path: Path) -> None:
    """Paddle's own saves leave such tensors out. In a checkpoint of ours they are, as all others."""
    weight = arrays_of("paddle-3.3.1")["embedding.weight"]
    target = np.zeros_like(weight)
    load_on([{"embedding.weight": target, "empty": np.zeros((0, 3), np.float32)}], GOLDEN / "paddle-3.3.1")
    assert np.array_equal(target, weight)
    save_alone({"a": np.zeros(2)}, tmp_path)
    (error,) = try_load([{"empty": np.zeros((0, 3), np.float32)}], tmp_path)
    assert "empty: the state_dict has a tensor, in the checkpoint it is missing" in str(error)


def test_what_does_not_fit_is_told_as_of_ours() -> None:
    state = {"embedding.weight": np.zeros((3, 3), np.float32), "nothing": np.zeros(2, np.float32)}
    (error,) = try_load([state], GOLDEN / "paddle-3.3.1")
    assert isinstance(error, StateDictMismatchError)
    assert len(error.problems) == 2


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_save_takes_the_next_id_and_leaves_theirs_to_be_found(tmp_path: Path, folder: str) -> None:
    shutil.copytree(GOLDEN / folder, tmp_path / "ckpt")
    before = read_metadata(tmp_path / "ckpt")
    assert save_alone({"mine": np.arange(3)}, tmp_path / "ckpt").unique_id == 1
    assert save_alone({"mine": np.arange(4)}, tmp_path / "ckpt").unique_id == 2
    assert list_checkpoints(tmp_path / "ckpt") == [1, 2]
    theirs = read_metadata(tmp_path / "ckpt", 0)
    assert theirs.format == before.format != "native"
    assert theirs.state_dict_metadata == before.state_dict_metadata


@pytest.mark.parametrize("folder", ["torch-dcp-2.13", "hf-safetensors"])
def test_a_save_with_the_id_of_theirs_says_what_it_hides(
    tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(GOLDEN / folder, tmp_path / "ckpt")
    for i in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            save_alone({"mine": np.arange(3)}, tmp_path / "ckpt", 0)
        assert ("a checkpoint of another format as well, with the id 0" in caplog.text) == (i == 0)
    assert read_metadata(tmp_path / "ckpt").format == "native"


@pytest.mark.parametrize("folder", ["torch-dcp-2.13", "hf-safetensors"])
def test_a_copy_with_the_id_of_theirs_says_what_it_hides(
    tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(GOLDEN / folder, tmp_path / "theirs")
    for unique_id in (1, 0):
        save_alone({"mine": np.arange(3)}, tmp_path / "ours", unique_id)
        caplog.clear()
        copy_checkpoint(tmp_path / "ours", tmp_path / "theirs", unique_id)
        assert ("a checkpoint of another format as well, with the id 0" in caplog.text) == (unique_id == 0)


def test_files_of_a_checkpoint_of_paddle_are_no_other_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(GOLDEN / "paddle-3.3.1", tmp_path / "ckpt")
    (tmp_path / "ckpt" / "0.metadata").rename(tmp_path / "ckpt" / "3.metadata")
    (tmp_path / "ckpt" / "0_3.safetensors").touch()
    with caplog.at_level(logging.WARNING):
        save_alone({"mine": np.arange(3)}, tmp_path / "ckpt", 0)
    assert "of another format" not in caplog.text
    assert save_alone({"mine": np.arange(3)}, tmp_path / "ckpt").unique_id == 4


def test_a_save_with_the_id_of_a_checkpoint_of_paddle_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "paddle-3.3.1", tmp_path / "ckpt")
    with pytest.raises(ValueError, match="unique_id 0 is taken"):
        save_alone({"mine": np.arange(3)}, tmp_path / "ckpt", 0)


def test_ours_is_taken_before_others_which_their_number_finds(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "paddle-3.3.1", tmp_path / "ckpt")
    save_alone({"mine": np.arange(3)}, tmp_path / "ckpt")
    assert list_checkpoints(tmp_path / "ckpt") == [1]
    assert read_metadata(tmp_path / "ckpt").format == "native"
    assert read_metadata(tmp_path / "ckpt", 0).format == "paddle"
    with pytest.raises(CheckpointNotFoundError, match="unique_id 2"):
        read_metadata(tmp_path / "ckpt", 2)


def test_a_folder_of_several_formats_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(GOLDEN / "paddle-3.3.1", tmp_path / "ckpt")
    shutil.copytree(GOLDEN / "hf-safetensors", tmp_path / "ckpt", dirs_exist_ok=True)
    with caplog.at_level(logging.WARNING):
        assert read_metadata(tmp_path / "ckpt").format == "paddle"
    assert "holds several formats" in caplog.text
    assert "safetensors" in caplog.text


def test_a_file_beside_folders_with_checkpoints_is_not_taken_for_them_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the folder of a trainer's step, whose scheduler alone is in a file."""
    (tmp_path / "scheduler.pdparams").write_bytes(pickle.dumps({"last_epoch": 4}, protocol=4))
    with caplog.at_level(logging.WARNING):
        assert verify(tmp_path).ok
    assert not caplog.records
    save_alone({"mine": np.arange(3)}, tmp_path / "model_state", 0)
    shutil.copytree(GOLDEN / "paddle-3.3.1", tmp_path / "optimizer_state")
    for path, said in ((tmp_path, 1), (tmp_path / "scheduler.pdparams", 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert verify(path).ok
        assert [
            "is in scheduler.pdparams, and not in the checkpoints model_state, optimizer_state: pass" in text
            for text in caplog.messages
        ] == [True] * said


def test_a_file_beside_the_steps_of_a_manager_is_not_taken_for_them_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "final.pdparams").write_bytes(pickle.dumps({"epoch": 4}, protocol=4))
    for step in range(0, 48, 4):
        save_alone({"mine": np.arange(3)}, tmp_path / step_name(step), step)
    (tmp_path / step_name(49)).mkdir()
    with caplog.at_level(logging.WARNING):
        assert read_metadata(tmp_path).values == {"epoch": 4}
    shown = ", ".join(map(step_name, range(8, 48, 4)))
    assert [f"not in the checkpoints ..., {shown}: pass" in text for text in caplog.messages] == [True]


@pytest.mark.parametrize("enabled", [True, False])
def test_pythons_search_for_garbage_goes_on_as_before(tmp_path: Path, enabled: bool) -> None:
    shutil.copytree(GOLDEN / "paddle-3.3.1", tmp_path / "ckpt")
    try:
        if not enabled:
            gc.disable()
        read_metadata(tmp_path / "ckpt")
        assert gc.isenabled() == enabled
        (tmp_path / "ckpt" / "0.metadata").write_bytes(b"\x80\x04damaged")
        with pytest.raises(CheckpointCorruptedError):
            read_metadata(tmp_path / "ckpt")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_one_file_of_a_folder(tmp_path: Path) -> None:
    save_alone({"a": np.arange(6.0), "b": {"c": np.arange(3)}}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "one.pdparams", format="pdparams")
    export(tmp_path / "ckpt", tmp_path / "two", format="safetensors")
    shutil.copy(tmp_path / "two" / "model.safetensors", tmp_path / "three.safetensors")
    assert load_whole(tmp_path / "one.pdparams")["b"]["c"].tolist() == [0, 1, 2]
    assert load_whole(tmp_path / "three.safetensors")["b.c"].tolist() == [0, 1, 2]
    assert read_metadata(tmp_path / "one.pdparams").format == "pdparams"


@pytest.mark.parametrize("format", ["safetensors", "native"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_exported_from_any_format(tmp_path: Path, folder: str, format: str) -> None:
    export(GOLDEN / folder, tmp_path / "out", format=format)
    found = load_whole(tmp_path / "out", flat=True)
    for key, array in arrays_of(folder).items():
        assert found[key].tobytes() == array.tobytes(), key
    if format == "native":
        before, after = read_metadata(GOLDEN / folder), read_metadata(tmp_path / "out")
        assert after.format == "native"
        assert after.flat_mapping == before.flat_mapping
        assert after.variable_names == before.variable_names
        assert alike(load_whole(tmp_path / "out"), load_whole(GOLDEN / folder))
        assert verify(tmp_path / "out").ok


def test_of_very_much_that_is_left_out_the_log_names_some(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = DCPWriter()
    for number in range(50):
        writer.put(f"gaps.{number}", (0, 0), saved(tensor("float32", (4, 6), stride=(7, 1), size=28), bytes(112)))
        writer.describe(f"gaps.{number}", "float32", (4, 6), [((0, 0), (4, 6))])
    writer.add_value("step", 5, b"")
    for name, data in writer.all_files.items():
        (tmp_path / name).write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert load_whole(tmp_path) == {"step": 5}
    assert len(caplog.messages) == 21
    assert caplog.messages[-1] == "30 more keys are left out"


def test_keys_that_cannot_be_read_and_look_alike_are_told_apart(tmp_path: Path) -> None:
    save_alone({"n": 1}, tmp_path)
    metadata = msgspec.structs.replace(read_metadata(tmp_path), left_out={"/a.b": "gaps", "/a/b": "holes", "/c": "?"})
    assert unread(metadata, Selection()) == {r"a\.b": "gaps", "a.b": "holes", "c": "?"}
    assert unread(metadata, Selection(prefix="a")) == {"a.b": "holes"}


def test_what_cannot_be_read_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = DCPWriter()
    content = saved(tensor("float32", (4, 6), stride=(7, 1), size=28), bytes(112))
    writer.put("gaps", (0, 0), content)
    writer.describe("gaps", "float32", (4, 6), [((0, 0), (4, 6))])
    writer.add_value("step", 5, b"")
    for name, data in writer.all_files.items():
        (tmp_path / name).write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert load_whole(tmp_path) == {"step": 5}
    assert "gaps is left out" in caplog.text
    (error,) = try_load([{"step": None, "gaps": np.zeros((4, 6), np.float32)}], tmp_path)
    assert isinstance(error, StateDictMismatchError)
    assert "gaps: the state_dict has a tensor, in the checkpoint it is something that is not read" in str(error)
    assert "with gaps" in str(error)
    caplog.clear()
    report = export(tmp_path, tmp_path / "out", format="native")
    assert report.left_out == ("gaps",)
    assert "gaps is left out" in caplog.text
    assert load_whole(tmp_path / "out") == {"step": 5}
    caplog.clear()
    assert export(tmp_path, tmp_path / "some", format="native", keys="st*").left_out == ()
    assert not caplog.text
