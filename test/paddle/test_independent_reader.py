"""A reader that knows the format alone, and safetensors' own, get what this library has written."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from paddle_dist_ckpt import load_merged_state_dict, read_metadata
from paddle_dist_ckpt.tree.paths import format_path
from test.paddle import cases_conversions as cases
from test.paddle.independent_reader import BITS, read_checkpoint
from test.paddle.layouts import LAYOUTS, global_arrays
from test.paddle.tensors import to_array
from test.ranks.pool import RankPool

KNOWN = {"F64", "F32", "F16", "I64", "I8", "U8", "BOOL"}  # what safetensors hands to numpy


@pytest.fixture(params=["mp2_columns", "uneven4", "mixed4"])
def folder(pool: RankPool, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A checkpoint that some ranks have saved."""
    pool.run(cases.save, request.param, str(tmp_path), ranks=LAYOUTS[request.param].ranks)
    return tmp_path


def test_reader_is_short() -> None:
    lines = Path(__file__).with_name("independent_reader.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 60


def test_independent_reader(folder: Path) -> None:
    found = read_checkpoint(folder, 0)
    merged = load_merged_state_dict(folder, flat=True)
    paths = {key: format_path(parts) for key, parts in read_metadata(folder).flat_mapping.items()}
    assert sorted(found) == sorted(paths[key] for key in merged)
    for key, expected in merged.items():
        assert_equal(found[paths[key]], expected, key)


def assert_equal(found: Any, expected: Any, key: str) -> None:
    if not hasattr(expected, "is_dist"):
        assert type(found) is type(expected), key
        assert found == expected, key
        return
    name = str(expected.dtype).rpartition(".")[2]
    assert found.dtype == np.dtype(BITS.get(name, name)), key
    assert list(found.shape) == expected.shape, key
    if found.size:
        assert found.tobytes() == to_array(expected).tobytes(), key


def test_reader_against_what_was_saved(folder: Path) -> None:
    found = {
        path.rpartition("/")[2].removesuffix(".moment"): value for path, value in read_checkpoint(folder, 0).items()
    }
    for name, array in global_arrays().items():
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_safetensors_opens_every_file(folder: Path) -> None:
    arrays = {
        f"{('model', 'optimizer')[i % 2]}.{n}{('', '.moment')[i % 2]}": a
        for i, (n, a) in enumerate(global_arrays().items())
    }
    names = set()
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                names.add(name)
                key, _, where = name.partition("[")
                if key not in arrays or file.get_slice(name).get_dtype() not in KNOWN:
                    continue
                place = tuple(slice(*map(int, each.split(":"))) for each in where[:-1].split(",")) if where else ...
                assert file.get_tensor(name).tobytes() == arrays[key][place].tobytes()
    assert {name.partition("[")[0] for name in names} == {*arrays, "history.text"}


def test_safetensors_loads_files_whole(pool: RankPool, tmp_path: Path) -> None:
    pool.run("test.paddle.cases_failures:save_number", str(tmp_path), 2, 7, ranks=2)
    loaded = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        (size,) = struct.unpack("<Q", path.read_bytes()[:8])
        assert (size + 8) % 4096 == 0
        loaded.update(safetensors.numpy.load_file(path))
    assert sorted(loaded) == ["x[0:32,0:4096]", "x[32:64,0:4096]", "y"]
    assert all((array == 7).all() for array in loaded.values())
