"""Of all readers, the right one finds each checkpoint first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddle_dist_ckpt.readers import READERS
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
