"""Of all readers, the right one finds each checkpoint first; and what all of them read through."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from paddle_dist_ckpt.errors import CheckpointCorruptedError
from paddle_dist_ckpt.readers import READERS
from paddle_dist_ckpt.readers.budget import Budget
from paddle_dist_ckpt.readers.window import FileWindow, WindowedFile
from paddle_dist_ckpt.storage import LocalStorage
from test.readers.golden import GOLDEN

FOLDERS = sorted(path for path in GOLDEN.iterdir() if (path / "expected.npz").exists())


def first_format(names: list[str]) -> str | None:
    """The format of the first reader that finds something among these names."""
    return next((reader.format for reader in READERS if reader.found(names)), None)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_golden_checkpoints_are_of_the_format_that_their_names_say(folder: Path) -> None:
    formats = {"hf": "safetensors", "torch": "torch_dcp", "paddle": "paddle", "static": "paddle_static"}
    expected = formats[re.split("[-0-9]", folder.name)[0]]
    assert first_format([path.name for path in folder.iterdir()]) == expected


def test_formats_have_names_of_their_own() -> None:
    assert len({reader.format for reader in READERS}) == len({reader.title for reader in READERS}) == len(READERS)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], None),
        (["config.json", "vocab.txt"], None),
        ([".metadata", "__0_0.distcp"], "torch_dcp"),
        ([".metadata", "__0_0.distcp", "model.safetensors"], "torch_dcp"),
        (["model.safetensors", "flex-ckpt.auto_generated.metadata"], "safetensors"),
        (["0.metadata", "0_0.safetensors"], "paddle"),
        (["model.safetensors", "config.json"], "safetensors"),
        (["model.safetensors", "optimizer.pdopt"], "safetensors"),
        (["model.safetensors.index.json", "model-00001-of-00001.safetensors", "scheduler.pdparams"], "safetensors"),
        (["model_state.pdparams", "optimizer.pdopt"], "pdparams"),
    ],
)
def test_folders_are_told_apart_by_names(names: list[str], expected: str | None) -> None:
    assert first_format(names) == expected


@pytest.mark.parametrize(
    "ask",
    [
        lambda window: window.take(11),
        lambda window: window.skip(11),
        lambda window: window.skip(-1),
        lambda window: window.check(11),
        lambda window: [window.byte() for _ in range(11)],
        lambda window: window.line(100),
    ],
    ids=["take", "skip", "skip back", "check", "bytes", "line"],
)
def test_nothing_is_read_behind_the_end_of_a_window(ask: Callable[[FileWindow], object], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(60) + b"\n" + bytes(39))
    with WindowedFile(LocalStorage(tmp_path), "file", Budget()) as file:
        window = file.window(10, 60)
        assert (window.take(30), window.skip(10), window.left, window.taken) == (bytes(30), 40, 10, 30)
        with pytest.raises(CheckpointCorruptedError, match="^file: "):
            ask(window)
        window = file.window(10, 60)
        assert window.take(50) == bytes(50)
        assert window.left == 0


@pytest.mark.parametrize(("start", "stop"), [(-1, 10), (11, 10), (0, 101), (101, 101)])
def test_a_window_is_within_its_file(start: int, stop: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with WindowedFile(LocalStorage(tmp_path), "file", Budget()) as file:
        with pytest.raises(CheckpointCorruptedError, match=f"^file: it has 100 bytes, no range {start} to {stop}$"):
            file.window(start, stop)
        assert file.window(100, 100).left == 0


def test_a_file_that_has_become_shorter_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    with WindowedFile(LocalStorage(tmp_path), "file", Budget()) as file:
        os.truncate(tmp_path / "file", 40)
        for read in (file.read, file.read_large):
            with pytest.raises(CheckpointCorruptedError, match="^file: it has become shorter than 100 bytes$"):
                read(30, 20)
        assert file.read(30, 10) == b"x" * 10
