"""Mistakes of those who are new: a folder that is another one than they think, a path that is none."""

from __future__ import annotations

import io
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    CheckpointManager,
    CheckpointNotFoundError,
    LocalStorage,
    StateDictMismatchError,
    UnsupportedValueError,
    delete_checkpoint,
    export,
    list_checkpoints,
    load_merged_state_dict,
    read_metadata,
    rebuild_metadata,
    verify,
)
from paddle_dist_ckpt.core.progress import Progress
from paddle_dist_ckpt.manager.steps import Steps, step_folder
from paddle_dist_ckpt.storage import Folders, as_source, as_storage
from test.jobs import errors_of, load_alone, load_whole, save_alone, try_load, try_save


def _takers_of_paths(source: Path) -> tuple[Callable[[Any], object], ...]:
    """Calls that take a path; of one the folder to read is another one."""
    return (
        *(as_storage, as_source, LocalStorage, read_metadata, verify, list_checkpoints, load_merged_state_dict),
        *(lambda p: delete_checkpoint(p, 0), lambda p: save_alone({"n": 1}, p), lambda p: load_alone({"n": 1}, p)),
        *(lambda p: export(source, p), CheckpointManager, rebuild_metadata),
    )


@pytest.mark.parametrize("path", ["hdfs:/x", "s3://bucket/x", "file:///x", "gs:/b", Path("hdfs:/x")])
def test_a_url_is_refused_wherever_a_path_is_taken(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in _takers_of_paths(tmp_path):
        with pytest.raises(ValueError, match="looks like a URL"):
            call(path)
    assert os.listdir(tmp_path) == []


def test_a_path_that_stands_for_no_bytes_is_refused_wherever_one_is_taken(tmp_path: Path) -> None:
    for call in _takers_of_paths(tmp_path):
        with pytest.raises(ValueError, match=r"'.*/a\\udcff\\ud800' has characters") as caught:
            call(f"{tmp_path}/a\udcff\ud800")
        assert not isinstance(caught.value, UnicodeError)
    save_alone({"n": 1}, f"{tmp_path}/a\udcff")
    assert os.listdir(os.fsencode(tmp_path)) == [b"a\xff"]
    assert load_whole(f"{tmp_path}/a\udcff") == {"n": 1}


def test_a_folder_may_have_a_colon_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [LocalStorage(name).location for name in ("run:1", "./hdfs:/x", "a/b:/c", "c:/d")] == [
        f"{tmp_path}/{name}" for name in ("run:1", "hdfs:/x", "a/b:/c", "c:/d")
    ]


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_alone({"n": 1}, "~/run")
    assert list_checkpoints(tmp_path / "run") == list_checkpoints(Path("~/run")) == [0]
    assert export("~/run", "~/out", "native").path == f"{tmp_path}/out"


def test_a_save_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("file", "file/x", "file/x/y"):
        with pytest.raises(FileExistsError, match=f"it is a file, and a folder is needed there: '{tmp_path}/file'"):
            save_alone({"n": 1}, tmp_path / path)


def test_a_save_to_where_a_link_leads_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in ("link", "link/x/y"):
        with pytest.raises(FileExistsError, match=f"it is a link to {tmp_path}/nowhere, which is not there.*/link'"):
            save_alone({"n": 1}, tmp_path / path)
    assert os.listdir(tmp_path) == ["link"]


def test_a_mistake_of_all_ranks_is_raised_as_in_one_process(tmp_path: Path) -> None:
    saved = {"model": {"w": np.zeros(3)}, "n": 1}
    save_alone(saved, tmp_path / "c")
    _steps(tmp_path / "run", 5)
    for name in ("file", "cut/0.metadata"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    mistakes: tuple[tuple[Any, Any, Any, type[Exception], str], ...] = (
        (try_load, saved, "nowhere", CheckpointNotFoundError, "there is no folder /d/nowhere"),
        (try_load, saved, "file", CheckpointNotFoundError, "its file file is of no format that is known"),
        (try_load, saved, "run", CheckpointNotFoundError, "with step 5: pass /d/run/step-00000005, the latest"),
        (try_load, saved, "cut", CheckpointCorruptedError, "/d/cut/0.metadata is no paddle_dist_ckpt .metadata"),
        (try_load, {"w": np.zeros(3)}, "c", StateDictMismatchError, "is 'model.w' meant?"),
        (try_load, {"model": {"w": np.zeros(4)}}, "c", StateDictMismatchError, "shape [4], the checkpoint [3]"),
        (try_load, [1], "c", TypeError, "state_dict must be a dict, not list"),
        (try_save, [1], "x", TypeError, "state_dict must be a dict, not list"),
        (try_save, {"loader": object()}, "x", UnsupportedValueError, "loader: an object cannot be stored"),
        (try_save, {"e": np.zeros((0, 2**58), "u1")}, "x", UnsupportedValueError, "e: a tensor of shape [0, 28823"),
        (try_save, saved, "file", FileExistsError, "it is a file, and a folder is needed there: '/d/file'"),
        (try_save, saved, "file/x/y", FileExistsError, "it is a file, and a folder is needed there: '/d/file'"),
    )
    for call, state, name, kind, text in mistakes:
        for error in errors_of(call([state] * 3, tmp_path / name), kind):
            assert type(error) is kind
            assert text in str(error).replace(str(tmp_path), "/d")
            assert "failed in round" not in str(error)
    assert not list(tmp_path.glob("x/*"))


def test_what_no_checkpoint_can_have_is_refused_and_what_is_there_stays(tmp_path: Path) -> None:
    save_alone({"w": np.zeros(3)}, tmp_path)
    odd: list[tuple[int, ...]] = [(0, 2**58)]
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # before, numpy has no more than 32 dimensions either
        odd.append((1,) * 33)
    for shape in odd:
        with pytest.raises(UnsupportedValueError, match="e: a tensor of shape"):
            save_alone({"w": np.ones(3), "e": np.zeros(shape, "u1")}, tmp_path, 0)
        assert load_whole(tmp_path)["w"].tolist() == [0] * 3
    for shape in [(2**29, 0, 2**30), (2**57, 0), (1,) * 32]:
        save_alone({"e": np.zeros(shape, "u1")}, tmp_path, 0)
        assert load_whole(tmp_path)["e"].shape == shape


def _steps(root: Path, *steps: int) -> None:
    for step in steps:
        save_alone({"n": step}, step_folder(root, step), step)


def test_a_managers_folder_in_the_place_of_a_checkpoints_names_the_steps(tmp_path: Path) -> None:
    _steps(tmp_path, 5, 10)
    step_folder(tmp_path, 20).mkdir()  # not committed
    for call in (lambda: load_alone({"n": 0}, tmp_path), lambda: verify(tmp_path), lambda: read_metadata(tmp_path, 0)):
        with pytest.raises(CheckpointNotFoundError) as caught:
            call()
        latest = f"pass {tmp_path}/step-00000010, the latest, or call CheckpointManager('{tmp_path}').restore("
        assert f"with steps 5, 10: {latest}" in str(caught.value)
    _steps(tmp_path / "one", 7)
    with pytest.raises(CheckpointNotFoundError, match="with step 7: "):
        load_alone({"n": 0}, tmp_path / "one")


def test_the_checkpoint_of_a_step_that_was_asked_for_is_pointed_out(tmp_path: Path) -> None:
    _steps(tmp_path, 5, 10)
    with pytest.raises(CheckpointNotFoundError, match=f"pass {tmp_path}/step-00000005, step 5, or call"):
        read_metadata(tmp_path, 5)
    with pytest.raises(CheckpointNotFoundError, match=f"with steps 5, 10: pass {tmp_path}/step-00000010, the latest$"):
        rebuild_metadata(tmp_path)


def test_a_list_of_a_managers_folder_is_empty_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _steps(tmp_path / "run", 5, 10)
    (tmp_path / "empty").mkdir()
    step_folder(tmp_path / "began", 5).mkdir(parents=True)  # not committed
    for name in ("empty", "began", "nowhere"):
        assert list_checkpoints(tmp_path / name) == []
    assert not caplog.records
    assert list_checkpoints(tmp_path / "run") == []
    (record,) = caplog.records
    latest = f"pass {tmp_path}/run/step-00000010, the latest, or call CheckpointManager('{tmp_path}/run').all_steps()"
    assert record.getMessage().endswith(f"it is a CheckpointManager's folder with steps 5, 10: {latest}")
    save_alone({"n": 1}, tmp_path / "run")  # a checkpoint beside the steps
    assert "the steps of a CheckpointManager as well" in caplog.records[1].getMessage()
    assert list_checkpoints(tmp_path / "run") == [0]
    assert list_checkpoints(step_folder(tmp_path / "run", 10)) == [10]
    assert len(caplog.records) == 2


def test_a_manager_is_given_the_folder_of_the_steps(tmp_path: Path) -> None:
    _steps(tmp_path / "run", 5)
    save_alone({"n": 1}, tmp_path / "checkpoint")
    (tmp_path / "file").touch()
    wrong = {
        "run/step-00000005": f"the folder of all steps, and .* is that of one; pass {tmp_path}/run$",
        "checkpoint": "holds a checkpoint itself",
        "file": "is a file",
        "file/x": "is a file, or below one",
    }
    for name, text in wrong.items():
        with pytest.raises(ValueError, match=f"root must be .*{text}"):
            CheckpointManager(tmp_path / name)
    save_alone({"n": 1}, tmp_path / "run")  # a last checkpoint beside the steps is no mistake
    for name in ("run", "nowhere"):
        Steps(tmp_path / name).check_root(Folders())


def test_a_step_that_is_not_there_to_be_restored(tmp_path: Path) -> None:
    _steps(tmp_path, 5, 10)
    with CheckpointManager(tmp_path) as manager:
        for step in (6, 7):
            with pytest.raises(CheckpointNotFoundError, match=f"there is no folder .*; {tmp_path} has steps 5, 10$"):
                manager.restore({"n": 0}, step=step)
        assert manager.restore({"n": 0}, step=5) == 5
    with (
        CheckpointManager(tmp_path / "new") as manager,
        pytest.raises(CheckpointNotFoundError, match="no committed step$"),
    ):
        manager.restore({"n": 0}, step=6)


def test_data_files_without_metadata(tmp_path: Path) -> None:
    save_alone({"n": 1}, tmp_path)
    (tmp_path / "0.metadata").unlink()
    for unique_id in (None, 0):
        with pytest.raises(CheckpointNotFoundError) as caught:
            load_alone({"n": 0}, tmp_path, unique_id)
        assert "it has 1 data file, such as 0_0." in str(caught.value)
        assert "the save did not complete, or the .metadata is missing" in str(caught.value)
        assert "rebuild_metadata" in str(caught.value)
    save_alone({"n": 1}, tmp_path)  # makes another one, and removes nothing that somebody may want to have back
    with pytest.raises(CheckpointNotFoundError, match="its only one has the id 0"):
        load_alone({"n": 0}, tmp_path, 7)


def test_a_data_file_is_not_its_checkpoint(tmp_path: Path) -> None:
    save_alone({"n": np.ones(3)}, tmp_path, 5)
    (file,) = tmp_path.glob("*.safetensors")
    said = f"{file} is a data file of checkpoint 5: pass the folder {tmp_path}"
    for ask in (read_metadata, verify, load_merged_state_dict, lambda path: load_alone({"n": np.ones(3)}, path)):
        with pytest.raises(CheckpointNotFoundError) as caught:
            ask(file)  # type: ignore[operator]
        assert str(caught.value) == said
    (tmp_path / "5.metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"but no \.metadata for it"):
        read_metadata(file)


def test_data_files_of_a_save_that_goes_on(tmp_path: Path) -> None:
    save_alone({"n": 1}, tmp_path)
    save = next(tmp_path.glob("*.safetensors")).name.split(".")[1]
    (tmp_path / "0.metadata").rename(tmp_path / f"0.{save}.claim")
    with pytest.raises(CheckpointNotFoundError, match="of a save that goes on, or did not complete"):
        load_alone({"n": 0}, tmp_path)


def test_a_metadata_file_that_is_a_link_out_of_the_folder(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    save_alone({"n": 1}, folder)
    shutil.move(folder / "0.metadata", elsewhere)
    (folder / "0.metadata").symlink_to(elsewhere)
    for unique_id in (None, 0):
        with pytest.raises(CheckpointNotFoundError) as caught:
            load_alone({"n": 0}, folder, unique_id)
        assert f"0.metadata is not read, for it is a link to {elsewhere}, outside its folder" in str(caught.value)
        assert "LocalStorage(path, follow_links=True) reads it" in str(caught.value)
    load_alone({"n": 0}, LocalStorage(folder, follow_links=True))
    elsewhere.unlink()
    with pytest.raises(CheckpointNotFoundError, match="0.metadata is a link to something that is not there"):
        load_alone({"n": 0}, folder)


def test_what_paddles_own_function_has_saved_over_a_checkpoint_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_alone({"n": 1}, tmp_path)
    theirs = tmp_path / "0_0.distcp"  # which Paddle's save_state_dict writes, and leaves 0.metadata as it is
    theirs.touch()

    def warnings() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "paddle_dist_ckpt"):
            load_alone({"n": 0}, tmp_path)
        return [record.getMessage() for record in caplog.records]

    os.utime(theirs, (1, 1))  # ours has replaced Paddle's
    assert warnings() == []
    os.utime(theirs)
    (warning,) = warnings()
    assert (
        f"{tmp_path}: Paddle's own save_state_dict has written 0_0.distcp to this folder after checkpoint 0" in warning
    )


def test_a_bar_is_for_long_work_and_ends_in_the_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown(delay: float, *more: Any) -> str:
        monkeypatch.setattr("sys.stderr", stream := Terminal())
        monkeypatch.setattr("paddle_dist_ckpt.core.progress._LONG_SECONDS", delay)
        with Progress("save", 100, *more) as progress:
            progress(100)
        return stream.getvalue()

    logger = logging.getLogger("paddle_dist_ckpt")
    monkeypatch.setattr(logger, "level", logging.INFO)
    assert shown(60, None, True, True) == "", "short work"
    assert shown(0, None, False, True) == "", "another rank"
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    assert shown(0, None, True, True).rstrip(" ").endswith("\r"), "wiped, for the line comes"
    monkeypatch.setattr(logger, "level", logging.WARNING)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    assert shown(0, None, True, True).endswith("\n"), "nothing else comes"
    assert shown(60, True, True).endswith("\n"), "asked for"
