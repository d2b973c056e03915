"""Exports that the safetensors library reads."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    CheckpointNotFoundError,
    ExportReport,
    LoadOptions,
    UnsupportedValueError,
    export,
    read_metadata,
)
from paddle_dist_ckpt.exporting import safetensors
from paddle_dist_ckpt.exporting.formats import ExportRequest
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from paddle_dist_ckpt.wiring import export_with
from test.jobs import (
    all_ok,
    data_files,
    errors_of,
    files_in,
    load_whole,
    make_array,
    same_bits,
    save_alone,
    save_on,
    split_all,
)

CODES = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
ARRAYS = {
    "bf16": make_array((40, 70), "bfloat16"),
    "flag": make_array((5,), "bool"),
    "fp8": make_array((33,), "float8_e4m3fn"),
    "large": make_array((700, 9000)),  # 25 MB: several windows
    "none": make_array((0, 3), "int16"),
    "scalar": make_array((), "int64"),
    "wide": make_array((7, 5), "complex64"),
}


def saved(folder: Path, arrays: Mapping[str, np.ndarray] = ARRAYS, **values: Any) -> None:
    """The arrays and values, nested in ``model`` and ``extra``, by two ranks; what has rows is cut."""
    save_on([{"model": model, "extra": values} for model in split_all(arrays)], folder)


def opened(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor that the safetensors library finds, checked against the index if there is one."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:  # refuses gaps, overlaps, and what is behind the last tensor
            names = list(file.keys())
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert sorted(set(header) - {"__metadata__"}) == sorted(names)
        for name in names:
            entry = header[name]
            start, stop = entry["data_offsets"]
            kind = CODES.get(entry["dtype"])
            if kind is None:
                with safe_open(path, "numpy") as file:
                    found[name] = file.get_tensor(name)
            else:  # which the library cannot give to numpy
                raw = data[8 + length + start : 8 + length + stop]
                found[name] = np.frombuffer(raw, kind).reshape(entry["shape"])
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        assert set(content["weight_map"]) == set(found)
        assert content["metadata"]["total_size"] == sum(array.nbytes for array in found.values())
        for name, file_name in content["weight_map"].items():
            with safe_open(folder / file_name, "numpy") as file:
                assert name in file.keys()  # noqa: SIM118
    return found


def check(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    found = opened(folder)
    assert set(found) == set(arrays)
    for key, array in arrays.items():
        assert same_bits(found[key], array), key


def test_one_file(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", step=3)
    report = export(tmp_path / "ckpt", tmp_path / "out")
    check(tmp_path / "out", {f"model.{key}": array for key, array in ARRAYS.items()})
    assert report == ExportReport(
        str(tmp_path / "out"),
        "safetensors",
        ("model.safetensors",),
        len(ARRAYS),
        sum(len(data) for data in files_in(tmp_path / "out").values()),
        ("extra.step",),
        report.seconds,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]


def test_several_files_with_an_index(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")
    report = export(tmp_path / "ckpt", tmp_path / "out", prefix="model", max_shard_bytes=3000)
    check(tmp_path / "out", ARRAYS)
    assert len(report.files) > 3
    assert report.files[0] == f"model-00001-of-{len(report.files) - 1:05}.safetensors"
    assert report.files[-1] == "model.safetensors.index.json"


def test_some_keys(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out", prefix="model", keys=["model.f*", "model.scalar"])
    check(tmp_path / "out", {key: ARRAYS[key] for key in ("flag", "fp8", "scalar")})


def test_what_is_selected_has_the_key_that_selects_it(tmp_path: Path) -> None:
    arrays = [make_array((3,), seed=seed) for seed in range(2)]
    save_alone({"a.b": arrays[0], "a": {"b": arrays[1]}}, tmp_path / "ckpt")
    for key, array in {r"a\.b": arrays[0], "a.b": arrays[1]}.items():
        found = load_whole(tmp_path / "ckpt", keys=[key], flat=True)
        assert list(found) == [key]
        assert same_bits(found[key], array)
        export(tmp_path / "ckpt", tmp_path / str(len(key)), keys=[key])
        check(tmp_path / str(len(key)), {key: array})
    export(tmp_path / "ckpt", tmp_path / "native", format="native", keys=[r"a\.b"])
    assert list(load_whole(tmp_path / "native", flat=True)) == ["a.b"]  # in which it is the only one


def test_floats_are_converted_and_nothing_else(tmp_path: Path) -> None:
    arrays = {
        "a": np.linspace(-3, 3, 5000, dtype=np.float32).reshape(50, 100),
        "b": make_array((7,), "int32"),
        "large": np.linspace(-1, 1, 3_000_000, dtype=np.float32).reshape(3000, 1000),  # in several pieces
        "nothing": np.zeros((0, 3), np.float32),
    }
    saved(tmp_path / "ckpt", arrays)
    export(tmp_path / "ckpt", tmp_path / "out", prefix="model", dtype="bfloat16")
    floats = {key: arrays[key].astype(ml_dtypes.bfloat16) for key in ("a", "large", "nothing")}
    check(tmp_path / "out", {**floats, "b": arrays["b"]})


def test_uint16_comes_back_as_uint16(tmp_path: Path) -> None:
    """And not as bfloat16, as files of PaddleNLP's mean it."""
    saved(tmp_path / "ckpt", {"a": np.arange(6, dtype=np.uint16)})
    export(tmp_path / "ckpt", tmp_path / "out", prefix="model")
    (shard,) = read_metadata(tmp_path / "out").state_dict_metadata["a"]
    assert shard.dtype == "uint16"


def test_a_value_that_the_type_cannot_hold(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", {"a": np.array([1.0, 1e6], np.float32)})
    with pytest.raises(UnsupportedValueError, match=r"model\.a.*float16"):
        export(tmp_path / "ckpt", tmp_path / "out", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_what_the_format_cannot_hold(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", {"z": make_array((3,), "complex128")})
    with pytest.raises(UnsupportedValueError, match=r"model\.z.*complex128"):
        export(tmp_path / "ckpt", tmp_path / "out")
    saved(tmp_path / "other", {"__metadata__": make_array((3,))}, step=1)
    with pytest.raises(UnsupportedValueError, match="__metadata__"):
        export(tmp_path / "other", tmp_path / "out", prefix="model")
    with pytest.raises(UnsupportedValueError, match=r"extra\.step"):
        export(tmp_path / "other", tmp_path / "out", keys="extra.step")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "other"]


def test_a_place_that_is_taken(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o2750)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda self: True)
        with pytest.raises(ValueError, match="out is the root of a filesystem"):
            export(tmp_path / "ckpt", tmp_path / "out")
    export(tmp_path / "ckpt", tmp_path / "out", keys="*.flag")  # an empty folder is filled
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o2750
    before = files_in(tmp_path / "out")
    for place in ("out", "ckpt", "out/model.safetensors"):
        with pytest.raises(ValueError, match="is there already"):
            export(tmp_path / "ckpt", tmp_path / place)
    assert files_in(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"format": "onnx"}, ValueError),
        ({"dtype": "int8"}, ValueError),
        ({"dtype": "half"}, ValueError),
        ({"dtype": 16}, TypeError),
        ({"max_shard_bytes": 0}, ValueError),
        ({"max_shard_bytes": 1.5}, ValueError),
        ({"keys": 3}, TypeError),
        ({"prefix": 3}, TypeError),
        ({"keys": "no such key"}, CheckpointNotFoundError),
        ({"unique_id": 7}, CheckpointNotFoundError),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], error: type[Exception]) -> None:
    saved(tmp_path / "ckpt", {"a": make_array((3,))})
    with pytest.raises(error):
        export(tmp_path / "ckpt", tmp_path / "out", **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_place_whose_name_is_no_utf_8_is_refused_at_once(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", {"a": make_array((3,))})
    with pytest.raises(ValueError, match="out must be a path of text in UTF-8"):
        export(tmp_path / "ckpt", tmp_path / "\udcff")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_damaged_block_is_found_and_nothing_is_left(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")
    path = data_files(tmp_path / "ckpt")[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorruptedError, match="does not match"):
        export(tmp_path / "ckpt", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def request(out: Path, **changes: Any) -> ExportRequest:
    settings = {"format": "safetensors", "unique_id": None, "prefix": "model", "keys": None, "dtype": None}
    return ExportRequest(out=str(out), **{**settings, "max_shard_bytes": 3000, **changes})


def test_ranks_share_the_files(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")

    def work(rank: SimulatedRank) -> ExportReport:
        return export_with(rank.connection, tmp_path / "ckpt", request(tmp_path / "out"), LoadOptions(timeout=60))

    reports = all_ok(run_ranks(3, work))
    check(tmp_path / "out", ARRAYS)
    assert len({report.files for report in reports}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]


def test_ranks_that_ask_for_different_things(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")

    def work(rank: SimulatedRank) -> ExportReport:
        wanted = request(tmp_path / "out", dtype="float16" if rank.rank == 1 else None)
        return export_with(rank.connection, tmp_path / "ckpt", wanted, LoadOptions(timeout=60))

    errors_of(run_ranks(2, work), ValueError)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_ranks_of_one_host_that_export_from_different_folders(tmp_path: Path) -> None:
    """Of other formats nothing but the folder tells a checkpoint from another, of as many bytes in the same places."""
    for step in (1, 2):
        save_alone({f"w{i}": np.full(5, step, np.float32) for i in range(4)}, tmp_path / f"native-{step}")
        export(tmp_path / f"native-{step}", tmp_path / f"step-{step}", prefix=None)
    wanted = request(tmp_path / "out", prefix=None, max_shard_bytes=20)

    def work(rank: SimulatedRank) -> ExportReport:
        return export_with(rank.connection, tmp_path / f"step-{rank.rank + 1}", wanted, options)

    options = LoadOptions(timeout=60)
    for error in errors_of(run_ranks(2, work), ValueError):
        assert "ranks of one host have different folders" in str(error)
        assert str(tmp_path / "step-2") in str(error)
    assert not (tmp_path / "out").exists()
    options = LoadOptions(timeout=60, separate_folders=True)
    all_ok(run_ranks(2, work))


def test_a_header_that_no_reader_would_take_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_alone({f"tensor {i}": make_array((2,)) for i in range(100)}, tmp_path / "ckpt")
    monkeypatch.setattr(safetensors, "_MAX_HEADER_BYTES", 1000)
    with pytest.raises(UnsupportedValueError, match=r"model.safetensors needs a header of \d+ bytes; 1000 are"):
        export(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
