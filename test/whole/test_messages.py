"""What errors and warnings say: what was expected, what was found, what to do."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    LoadOptions,
    PerRank,
    RankFailureError,
    SaveOptions,
    SaveReport,
    StateDictMismatchError,
    UnsupportedValueError,
    list_checkpoints,
    read_metadata,
    rebuild_metadata,
    save_state_dict,
    verify,
)
from paddle_dist_ckpt.control import NoTransport, SoloHub
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.reports import saved_line
from paddle_dist_ckpt.storage import as_storage
from paddle_dist_ckpt.storage.base import FolderIdentity
from paddle_dist_ckpt.storage.local import LocalStorage
from paddle_dist_ckpt.testing import FaultyStorage, SimulatedRank, run_ranks, shard_array
from test.jobs import Counter, another_host, errors_of, load_alone, load_whole, save_alone, try_load, try_save
from test.readers.golden import GOLDEN


@pytest.mark.parametrize("path", ["", "s3://bucket/folder", "a\0b"])
def test_a_path_that_names_no_local_folder(path: str) -> None:
    with pytest.raises(ValueError, match="path must name a local folder"):
        as_storage(path)


def test_a_path_that_cannot_be_told_to_the_system() -> None:
    with pytest.raises(ValueError, match=r"path 'x\\ud800' has characters .* cannot tell the system, .* utf-8$"):
        as_storage("x\ud800")
    program = "from paddle_dist_ckpt import list_checkpoints; list_checkpoints(chr(0x68C0))"
    env = {**os.environ, "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert ended.stderr.endswith("cannot tell the system, to which it speaks ascii: PYTHONUTF8=1 mends that\n")
    assert subprocess.run([sys.executable, "-c", program], env={**env, "PYTHONUTF8": "1"}).returncode == 0


def test_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no folder .*nowhere"):
        read_metadata(tmp_path / "nowhere")


def test_a_file_instead_of_its_folder(tmp_path: Path) -> None:
    save_alone({"n": 1}, tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"0\.metadata is a file; pass the folder"):
        rebuild_metadata(tmp_path / "0.metadata")
    assert read_metadata(tmp_path / "0.metadata").values == {"n": 1}
    assert list_checkpoints(tmp_path / "0.metadata") == [0]
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "0.0123456789abcdef.claim").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="somebody is saving to it or deleting there, or has not come to"):
        read_metadata(tmp_path / "dead")
    (tmp_path / "notes.txt").write_text("hello")
    for call in (read_metadata, verify):
        with pytest.raises(
            CheckpointNotFoundError, match=r"notes\.txt is of no format that is known; .*\.safetensors, "
        ):
            call(tmp_path / "notes.txt")
    save_alone({"n": 1}, tmp_path / "outer" / "below" / "inner")
    with pytest.raises(CheckpointNotFoundError, match="outer holds no committed checkpoint$"):
        read_metadata(tmp_path / "outer")


@pytest.mark.parametrize(
    "name",
    [
        *(".metadata", "0.metadata", "12.metadata", "__0.metadata", "0_0.distcp", "__0_0.distcp"),
        *("model.safetensors.index.json", "model_state.pdparams.index.json", "optimizer.pdopt.index.json"),
    ],
)
def test_a_part_of_what_others_write_instead_of_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pickle.dumps({}))
    for call in (read_metadata, verify, load_whole):
        with pytest.raises(CheckpointNotFoundError) as caught:
            call(tmp_path / name)
        assert str(caught.value) == f"{tmp_path}/{name} is a part of a checkpoint: pass the folder {tmp_path}"


def test_a_trainers_folder_instead_of_a_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="holds no committed checkpoint$"):
        read_metadata(tmp_path)
    for name in ("checkpoint-9/model.safetensors", "checkpoint-20/model_state/0.metadata", "checkpoint-100/.metadata"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    shown = "checkpoint-9, checkpoint-20/model_state, checkpoint-100"
    text = f"there are checkpoints in {shown}: pass {tmp_path}/checkpoint-100"
    with pytest.raises(CheckpointNotFoundError, match=f"; {re.escape(text)}$"):
        read_metadata(tmp_path)
    for i in range(200, 230):
        (tmp_path / f"checkpoint-{i}").mkdir()
        (tmp_path / f"checkpoint-{i}" / "model_state.pdparams").touch()
    with pytest.raises(
        CheckpointNotFoundError, match=r"in \.\.\., checkpoint-220, .*checkpoint-229: pass .*/checkpoint-229$"
    ):
        read_metadata(tmp_path)


OF_TORCH, OLD_OF_TORCH = b"PK\3\4" + bytes(60), b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
BINARY = bytes(16) + b"\6\0\0\0\x08\5\x10\3\x10\4" + bytes(8)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("pytorch_model.bin", OF_TORCH, "a zip file, as torch.save writes it, which is not read"),
        ("model.pt", OLD_OF_TORCH, "a file of torch.save, which is not read"),
        ("inference.pdiparams", BINARY, "in Paddle's binary format, that of .pdiparams"),
    ],
)
def test_files_that_are_not_read_are_called_what_they_are(name: str, content: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    for beside in ("config.json", "other.bin"):
        for path in (tmp_path, tmp_path / name):
            with pytest.raises(CheckpointNotFoundError, match=f"; its file {name} is {kind}"):
                read_metadata(path)
        (tmp_path / beside).write_text("{}")


@pytest.mark.parametrize("name", ["model.pdparams", "model.safetensors"])
@pytest.mark.parametrize("content", [OF_TORCH, OLD_OF_TORCH, BINARY])
def test_files_of_another_format_than_their_name_says(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    kinds = "a zip file|a file of torch.save|in Paddle's binary"
    with pytest.raises(UnsupportedValueError, match=f"^{re.escape(str(tmp_path))}: {name} is ({kinds})"):
        read_metadata(tmp_path)
    (tmp_path / name).write_bytes(bytes(100))
    with pytest.raises(CheckpointCorruptedError, match=f"^{re.escape(str(tmp_path))}: {name}"):
        read_metadata(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointCorruptedError, match=f"^{re.escape(str(tmp_path))}/{name}: "):
        read_metadata(tmp_path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html>\n<html><body>404</body></html>" * 20


@pytest.mark.parametrize(
    "name", ["model.pdparams", "model.safetensors", "0_0.distcp", "__0_0.distcp", "pytorch_model.bin"]
)
@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"", "empty; download"), (POINTER, "only Git LFS's pointer to"), (PAGE, "a page of HTML, as servers")],
    ids=["empty", "pointer", "page"],
)
def test_what_a_download_has_left_in_the_place_of_a_file_is_called_what_it_is(
    name: str, content: bytes, kind: str, tmp_path: Path
) -> None:
    if name.endswith(".distcp"):
        golden = GOLDEN / ("torch-dcp-2.13" if name.startswith("__") else "paddle-3.3.1")
        shutil.copytree(golden, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises((CheckpointCorruptedError, CheckpointNotFoundError), match=f"{name}(: it)? is {kind}"):
        read_metadata(tmp_path)


@pytest.mark.parametrize(("name", "which"), [("paddle-3.3.1", "0.metadata"), ("torch-dcp-2.13", ".metadata")])
def test_data_files_of_others_are_told_whose_metadata_is_missing(name: str, which: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / "a")
    (tmp_path / "a" / which).unlink()
    first = min((tmp_path / "a").glob("*.distcp")).name
    text = f"holds no committed checkpoint; it has 2 data files of another format, such as {first}, but no {which}: "
    with pytest.raises(CheckpointNotFoundError, match=re.escape(text)):
        read_metadata(tmp_path / "a")


def test_metadata_of_torchs_ranks_are_called_what_they_are(tmp_path: Path) -> None:
    """Which torch writes with use_collectives=False, and then no .metadata."""
    shutil.copytree(GOLDEN / "torch-dcp-2.13", tmp_path / "a")
    (tmp_path / "a" / ".metadata").rename(tmp_path / "a" / "__0.metadata")
    with pytest.raises(CheckpointNotFoundError, match=r"__0\.metadata what one rank saved, .*use_collectives=False, "):
        read_metadata(tmp_path / "a")


def test_no_rebuild_is_advised_for_what_paddle_wrote(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "paddle-3.3.1", tmp_path, dirs_exist_ok=True)
    (tmp_path / "0.metadata").write_bytes(b"")
    with pytest.raises(CheckpointCorruptedError, match=r"/0\.metadata is neither Paddle's .*: copy it here again$"):
        read_metadata(tmp_path)
    (tmp_path / "1.metadata").write_bytes(b"")
    with pytest.raises(CheckpointCorruptedError, match=r"/1\.metadata is no paddle.* rebuild_metadata can"):
        read_metadata(tmp_path)


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
            assert f"ranks 0, 1: {tmp_path / '0'}; ranks 2, 3: {tmp_path / '1'}\n" in str(error)
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


def test_a_disk_that_fails_is_not_called_a_folder_that_is_not_there(tmp_path: Path) -> None:
    save_alone({"w": np.arange(3)}, tmp_path / "a")

    class Failing(LocalStorage):
        def identity(self) -> FolderIdentity:
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.location)

    def work(rank: SimulatedRank) -> None:
        folder = tmp_path / "a"
        rank.load({"w": np.zeros(3, int)}, Failing(folder / ".." / "a") if rank.rank else folder)

    for error in errors_of(run_ranks(2, work), CheckpointError):
        assert "rank 1" in str(error)
        assert os.strerror(errno.EIO) in str(error)


def test_a_path_that_is_not_there_is_another_path_of_one_host(tmp_path: Path) -> None:
    save_alone({"w": np.arange(3)}, tmp_path / "a")

    def load(paths: list[Path], **more: Any) -> list[Any]:
        def work(rank: SimulatedRank) -> Any:
            state = {"w": np.zeros(3, int)}
            rank.load(state, paths[rank.rank], None, LoadOptions(**more))
            return state["w"].tolist()

        return run_ranks(4, work)

    a, b = tmp_path / "a", tmp_path / "b"
    for error in errors_of(load([a, b, a, b]), ValueError):
        assert f"ranks 0, 2: {a}; ranks 1, 3: {b} (is not there)\n" in str(error)
        assert "separate_folders=True" in str(error)
    for error in errors_of(load([b, b, a, a]), ValueError):
        assert f"ranks 2, 3: {a}; ranks 0, 1: {b} (is not there)\n" in str(error)
    assert load([a, b, a, b], separate_folders=True) == [[0, 1, 2]] * 4
    for error in errors_of(load([b, tmp_path / "c", b, b]), CheckpointNotFoundError):
        assert str(b) in str(error)


def test_ranks_of_one_host_that_do_not_see_a_folder_under_its_own_path_are_no_mistake(tmp_path: Path) -> None:
    save_alone({"w": np.arange(3)}, tmp_path)

    class Blind(LocalStorage):
        def identity(self) -> FolderIdentity:
            raise FileNotFoundError(self.location)

    def load(rank: SimulatedRank) -> Any:
        state = {"w": np.zeros(3, int)}
        rank.load(state, Blind(tmp_path) if rank.rank else tmp_path)
        return state["w"].tolist()

    assert run_ranks(2, load) == [[0, 1, 2]] * 2


def test_the_ranks_that_differ_are_named(tmp_path: Path) -> None:
    def save(rank: SimulatedRank) -> Any:
        return rank.save({"w": np.arange(3) + (rank.rank == 2), "v": rank.rank == 1}, tmp_path)

    first, second = run_ranks(3, save)[0].warnings
    assert first.startswith("v: the plain tensors or values of rank 1 differ")
    assert second.startswith("w: the plain tensors or values of rank 2 differ")


def test_of_many_replicas_that_differ_the_log_has_the_first_few(tmp_path: Path, caplog: Any) -> None:
    def save(rank: SimulatedRank) -> Any:
        return rank.save({f"n{i}": rank.rank for i in range(8)}, tmp_path)

    with caplog.at_level(logging.WARNING, "paddle_dist_ckpt"):
        reports = run_ranks(2, save)
    (record,) = caplog.records
    first, *lines = record.getMessage().splitlines()
    assert first == f"{tmp_path}: 8 plain tensors or values differ among ranks:"
    assert [line[:5] for line in lines[:5]] == [f"  n{i}:" for i in range(5)]
    assert lines[5:] == ["  ... and 3 more; the report's warnings have all"]
    assert len(reports[0].warnings) == 8


def test_a_save_and_a_load_log_a_short_line_each(tmp_path: Path, caplog: Any) -> None:
    state = {"w": np.zeros(4000), "v": np.zeros(812)}
    with caplog.at_level(logging.INFO, "paddle_dist_ckpt"):
        run_ranks(2, lambda rank: rank.save(state, tmp_path))
        load_alone({"w": np.zeros(4000)}, tmp_path)
    saved, loaded = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(rf"saved id 0 to {tmp_path}: 38\.5 kB in 2 files, \d+\.\d\d s", saved)
    assert re.fullmatch(rf"loaded id 0 from {tmp_path}: 32\.0 kB, \d+\.\d\d s; 1 not asked for", loaded)


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_951, "1.0 MB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_sizes_in_the_log(nbytes: int, size: str) -> None:
    report = SaveReport(path="p", unique_id=3, total_bytes=nbytes, bytes_written=0, files=1, seconds={"plan": 1.0})
    assert saved_line(report) == f"saved id 3 to p: {size} in 1 file, 1.00 s"


class Reader:
    pass


def test_what_cannot_be_stored_is_called_as_one_says_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        save_alone({"a": object(), "b": {1}, "c": Reader(), "d": Path()}, tmp_path)
    for said in ("a: an object cannot be", "b: a set cannot", f"c: a {__name__}.Reader cannot", "d: a pathlib."):
        assert f"\n{said}" in str(caught.value)
    assert "builtins" not in str(caught.value)
    assert "objects that have state_dict() and set_state_dict()" in str(caught.value)


def test_an_object_in_the_place_of_the_state_dict(tmp_path: Path) -> None:
    for call in (save_alone, load_alone):
        with pytest.raises(
            TypeError, match=r"not Counter; pass \{'model': model, .*\} or its state_dict\(\), or call save"
        ):
            call(Counter(), tmp_path)
        with pytest.raises(TypeError, match="not list$"):
            call([], tmp_path)


def test_a_tensor_that_is_distributed_on_some_ranks_only(tmp_path: Path) -> None:
    whole = np.zeros((4, 2))

    def save(rank: SimulatedRank) -> Any:
        return rank.save({"w": whole if rank.rank == 0 else shard_array(whole, [Box((0, 0), (4, 2))])}, tmp_path)

    for error in errors_of(run_ranks(2, save), UnsupportedValueError):
        assert "w: it is a plain tensor on rank 0, a distributed tensor on rank 1" in str(error)


def test_a_file_that_may_not_be_opened_is_not_said_to_be_damaged(tmp_path: Path) -> None:
    save_alone({"w": np.zeros(3)}, tmp_path)

    def hook(operation: str, name: str) -> None:
        if operation == "open":
            raise PermissionError(errno.EACCES, "Permission denied", f"{tmp_path}/{name}")

    storage = FaultyStorage(tmp_path, hook)
    with pytest.raises(CheckpointError) as caught:
        load_alone({"w": np.zeros(3)}, storage)
    errors = errors_of(try_load([{"w": np.zeros(3)}] * 2, storage), RankFailureError)
    for error in (caught.value, *errors):
        assert not isinstance(error, CheckpointCorruptedError)
        assert "1 data file of the checkpoint cannot be read:" in str(error)
        assert ": not damaged, as far as is known, but it cannot be opened: [Errno 13] Permission" in str(error)
        assert str(tmp_path) in str(error)
    assert [list(error.failures) for error in errors] == [[1]] * 2


def test_ranks_that_see_several_folders_are_told_so_if_nothing_is_found(tmp_path: Path) -> None:
    here, there = another_host(tmp_path / "here", 1), another_host(tmp_path / "there", 2)
    save_alone({"w": np.zeros(3)}, there)
    save_alone({"w": np.zeros(3)}, here)
    (tmp_path / "here/0.metadata").unlink()
    for error in errors_of(try_load([{"w": np.zeros(3)}] * 2, [here, there]), CheckpointNotFoundError):
        assert "the save did not complete" in str(error)
        line = f"rank 0: a folder {tmp_path}/here on host1; rank 1: a folder {tmp_path}/there on host2"
        assert f"The ranks do not see one folder: {line}. Is the path one of a shared" in str(error)
    for error in errors_of(try_load([{"w": np.zeros(3)}] * 2, [tmp_path / "nowhere"] * 2), CheckpointNotFoundError):
        assert "do not see one" not in str(error)
    shutil.rmtree(tmp_path / "here")
    for error in errors_of(try_load([{"w": np.zeros(3)}] * 2, [tmp_path / "here", there]), CheckpointNotFoundError):
        assert f"rank 0: no folder {tmp_path}/here; rank 1: a folder" in str(error)


def test_data_files_that_are_on_another_hosts_disk(tmp_path: Path) -> None:
    here, there = another_host(tmp_path / "here", 1), another_host(tmp_path / "there", 2)
    save_alone({"w": np.zeros(3)}, here)
    next((tmp_path / "here").glob("*.safetensors")).unlink()
    (tmp_path / "there").mkdir()
    for error in errors_of(try_load([{"w": np.zeros(3)}] * 2, [here, there]), CheckpointCorruptedError):
        assert "1 data file of the checkpoint cannot be read:" in str(error)
        assert "The ranks do not see one folder: rank 0: a folder" in str(error)


def test_a_snapshot_that_has_no_room_says_what_bounds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(size: int, inherited: bool = True) -> Any:
        raise MemoryError(f"{size:,} bytes of memory cannot be had")

    monkeypatch.setattr("paddle_dist_ckpt.saving.save_memory.fresh_pages", none)
    rank = SimulatedRank(0, (0,), SoloHub(), NoTransport())
    pending = rank.save_in_background({"w": np.zeros(3)}, tmp_path)
    with pytest.raises(MemoryError, match=r"cannot be had; .*SaveOptions\(snapshot_bytes=...\) bounds the copy"):
        pending.result()


def test_errors_of_the_system_name_the_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/0_0.*safetensors'"):
            save_alone({"w": np.ones(10_000)}, tmp_path)
        errors = errors_of(try_save([{"w": np.ones(10_000)}] * 2, tmp_path), RankFailureError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for error in errors:
        assert f"File too large: '{tmp_path}/" in str(error)


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


def test_a_tensor_in_a_value_of_each_rank(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        save_alone({"rng": PerRank(Reader())}, tmp_path)
    assert "\nrng: a test.whole.test_messages.Reader cannot" in str(caught.value)
    assert "a PerRank takes values alone" in str(caught.value)
