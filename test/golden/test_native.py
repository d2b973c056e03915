"""Every released version of the native format can still be read, whole and verified."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from paddle_dist_ckpt import LoadOptions, read_metadata, rebuild_metadata, verify
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.files.codec import decode_metadata, encode_metadata
from paddle_dist_ckpt.files.datafile import EntryKind, FileLayout, FileTable, read_info
from paddle_dist_ckpt.folder.selection import Selection
from paddle_dist_ckpt.loading.merged import load_merged
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing import NumpyAdapter
from test.golden.make_native import global_arrays, values

FOLDERS = sorted(Path(__file__).parent.glob("native-*"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_it_is_read_as_it_was_written(folder: Path) -> None:
    loaded = load_merged(LocalStorage(folder), NumpyAdapter(), None, Selection(), False, LoadOptions())
    for key, expected in global_arrays().items():
        found = loaded["model"][key.removeprefix("model.")]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes(), key
    assert loaded["a.b"].tolist() == [0, 1, 2]
    assert loaded["a"]["b"].tolist() == [0, 1, 2, 3]
    expected_values = values()
    assert math.isnan(loaded["values"].pop("nan"))
    del expected_values["nan"]
    assert loaded["values"] == expected_values
    assert type(loaded["values"]["pair"]) is tuple


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_it_verifies_and_describes_itself(folder: Path) -> None:
    assert verify(folder).ok
    metadata = read_metadata(folder)
    assert (metadata.unique_id, metadata.world_size) == (4, 3)
    assert metadata.user_metadata == {"purpose": "golden"}
    assert len(metadata.state_dict_metadata["model.table"]) == 3
    assert metadata.flat_mapping["model.weight"] == ("model", "weight")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_its_metadata_can_be_made_again(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    rebuild_metadata(tmp_path)
    again, original = tmp_path / "4.metadata", folder / "4.metadata"
    assert again.read_bytes() == original.read_bytes()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_same_bytes_are_written_again(folder: Path) -> None:
    """What follows from a `.metadata` or a header that was read is that `.metadata` or header."""
    storage = LocalStorage(folder)
    data = storage.read("4.metadata")
    assert encode_metadata(decode_metadata(data, "4.metadata", 4)) == data
    dtypes = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.view_items == 1}
    for path in folder.glob("*.safetensors"):
        info, hashes, _, data_start = read_info(storage.open(path.name), path.name)
        header = path.read_bytes()[:data_start]
        entries = json.loads(header[8:])
        del entries["__metadata__"]
        kinds = [EntryKind(dtypes[entry["dtype"]], tuple(entry["shape"])) for entry in entries.values()]
        table = FileTable(list(entries), kinds, np.arange(len(kinds)), info.block_bytes)
        again = np.empty(data_start, np.uint8)
        FileLayout(table, info).fill_header(again, hashes)
        assert again.tobytes() == header


def test_there_is_one_for_every_version() -> None:
    assert [folder.name for folder in FOLDERS] == ["native-1.0"]
    assert np.isfinite(global_arrays()["model.weight"]).all()
