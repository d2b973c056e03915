"""Exports in this library's own format: checkpoints again, of whole tensors."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paddle_dist_ckpt import (
    ExportReport,
    LoadOptions,
    PerRank,
    SaveOptions,
    UnsupportedValueError,
    export,
    list_checkpoints,
    read_metadata,
    rebuild_metadata,
    verify,
)
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.exporting import native
from paddle_dist_ckpt.exporting.formats import ExportRequest
from paddle_dist_ckpt.testing import NumpyAdapter, SimulatedRank, run_ranks
from paddle_dist_ckpt.wiring import export_with
from test.jobs import (
    alike,
    all_ok,
    blank_like,
    check_pieces,
    files_in,
    load_on,
    load_whole,
    make_array,
    same_bits,
    save_alone,
    save_on,
    split_all,
    split_rows,
)
from test.strategies import some

ARRAYS = {dtype: make_array((20, 30), dtype) for dtype in DTYPES} | {
    "large": make_array((700, 9000)),  # 25 MB: several windows, and blocks that are in two of them
    "none": make_array((0, 3), "int16"),
    "scalar": make_array((), "int64"),
    "odd[1]%": make_array((5, 3), "bfloat16"),
}
VALUES = {"step": 7, "text": "x" * 10_000, "list": [1, (2.5, None)], "raw": b"\x00\xff", "rate": np.float32(0.1)}


def states(ranks: int = 2) -> list[dict[str, Any]]:
    """The arrays and values; what has rows is cut, and every rank has a value of its own."""
    return [
        {
            "model": model,
            "layers": [split_rows(make_array((8, 4), seed=i), ranks)[rank] for i in range(2)],
            "extra": dict(VALUES),
            "own": PerRank({"rank": rank}),
        }
        for rank, model in enumerate(split_all(ARRAYS, ranks))
    ]


def saved(folder: Path, ranks: int = 2) -> None:
    save_on(states(ranks), folder, options=SaveOptions(block_bytes=4096, timeout=60, user_metadata={"run": 5}))


def check(folder: Path) -> None:
    """All of it is there, bit by bit, hashed, and known to the metadata."""
    assert verify(folder).ok
    found, expected = load_whole(folder), states(1)[0]
    assert set(found["model"]) == set(ARRAYS)
    for key, array in ARRAYS.items():
        assert same_bits(found["model"][key], array), key
    assert alike(found["extra"], VALUES)
    for mine, theirs in zip(found["layers"], expected["layers"], strict=True):
        check_pieces(theirs, mine)


def test_all_of_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")
    report = export(tmp_path / "ckpt", tmp_path / "out", format="native")
    check(tmp_path / "out")
    before, after = read_metadata(tmp_path / "ckpt"), read_metadata(tmp_path / "out")
    assert list_checkpoints(tmp_path / "out") == [0]
    assert after.table.paths == before.table.paths
    assert after.table.dtypes == before.table.dtypes
    assert after.table.kinds.tolist() == before.table.kinds.tolist()
    assert after.table.names == before.table.names
    assert after.flat_mapping == before.flat_mapping
    assert after.value_records == before.value_records
    assert after.user_metadata == {"run": 5}
    assert after.world_size == before.world_size
    assert after.save_id != before.save_id
    files = files_in(tmp_path / "out")
    assert sorted(report.files) == sorted(files)
    assert report.total_bytes == sum(map(len, files.values()))
    assert report.tensors == len(ARRAYS) + 2
    assert report.left_out == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]


def test_it_is_loaded_on_other_ranks(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out", format="native")
    targets = [
        {"model": {"large": part}, "own": PerRank({"rank": None})}
        for part in split_rows(ARRAYS["large"], 2, fill=False, dimension=1)
    ]
    load_on(targets, tmp_path / "out")
    for rank, target in enumerate(targets):
        check_pieces(target["model"]["large"], ARRAYS["large"])
        assert target["own"].value == {"rank": rank}


def test_variable_names_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = NumpyAdapter.view
    names = {"/a": "w_0", "/b": "w_1"}
    monkeypatch.setattr(
        NumpyAdapter, "view", lambda self, value, path: plain(self, value, path)._replace(name=names[path])
    )
    save_alone({"a": make_array((2,)), "b": make_array((3,))}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out", format="native")
    assert read_metadata(tmp_path / "out").variable_names == {"a": "w_0", "b": "w_1"}
    export(tmp_path / "ckpt", tmp_path / "part", format="native", keys="b")
    assert read_metadata(tmp_path / "part").variable_names == {"b": "w_1"}


def test_values_beyond_the_room_in_the_metadata_become_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {f"{i:02}": "x" * 8 for i in range(40)}
    save_alone(values, tmp_path / "ckpt")
    monkeypatch.setattr(native, "INLINE_TOTAL_BYTES", 100)
    export(tmp_path / "ckpt", tmp_path / "out", format="native")
    assert len(read_metadata(tmp_path / "out").value_records) == 10
    assert load_whole(tmp_path / "out") == values


@pytest.mark.parametrize(("most", "ranks"), some(itertools.product([1, 3000, 1 << 30], [1, 3]), 3))
def test_files_and_ranks(tmp_path: Path, most: int, ranks: int) -> None:
    saved(tmp_path / "ckpt")
    request = ExportRequest(str(tmp_path / "out"), "native", None, None, None, None, most)

    def work(rank: SimulatedRank) -> ExportReport:
        return export_with(rank.connection, tmp_path / "ckpt", request, LoadOptions(timeout=60))

    reports = all_ok(run_ranks(ranks, work))
    check(tmp_path / "out")
    assert sorted(reports[-1].files) == sorted(files_in(tmp_path / "out"))
    if most == 1 << 30:
        assert len(reports[0].files) == (2 if ranks == 1 else 4)
    (tmp_path / "out" / "0.metadata").unlink()
    assert rebuild_metadata(tmp_path / "out").user_metadata == {"run": 5}
    check(tmp_path / "out")


def test_again_and_again(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    export(tmp_path / "a", tmp_path / "b", format="native", max_shard_bytes=5000)
    export(tmp_path / "b", tmp_path / "c", format="native")
    check(tmp_path / "c")
    save_alone({"next": 1}, tmp_path / "c")  # it is a folder to go on in
    assert list_checkpoints(tmp_path / "c") == [0, 1]


def test_a_part_of_it(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out", format="native", prefix="model", keys=["model.float*", "model.scalar"])
    found = load_whole(tmp_path / "out")
    assert set(found) == {"scalar", *(key for key in ARRAYS if key.startswith("float"))}
    for key, array in found.items():
        assert same_bits(array, ARRAYS[key]), key
    export(tmp_path / "ckpt", tmp_path / "values", format="native", prefix="extra")
    assert alike(load_whole(tmp_path / "values"), VALUES)
    assert verify(tmp_path / "values").ok


def test_floats_are_converted_and_nothing_else(tmp_path: Path) -> None:
    array = np.linspace(-3, 3, 5000, dtype=np.float32).reshape(50, 100)
    save_alone({"a": array, "b": make_array((7,), "int32"), "text": "x" * 5000}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out", format="native", dtype="bfloat16")
    found = load_whole(tmp_path / "out")
    assert same_bits(found["a"], array.astype(ml_dtypes.bfloat16))
    assert same_bits(found["b"], make_array((7,), "int32"))
    assert found["text"] == "x" * 5000
    assert verify(tmp_path / "out").ok


def test_nothing_at_all(tmp_path: Path) -> None:
    save_alone({}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out", format="native")
    assert load_whole(tmp_path / "out") == {}


def test_a_selection_that_is_no_checkpoint(tmp_path: Path) -> None:
    save_alone({"layers": [make_array((2,), seed=i) for i in range(9)]}, tmp_path / "ckpt")
    with pytest.raises(UnsupportedValueError, match="makes up no checkpoint"):
        export(tmp_path / "ckpt", tmp_path / "out", format="native", keys="layers.8")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_target_is_filled(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out", format="native")
    target = {"model": {key: blank_like(array) for key, array in ARRAYS.items()}}
    load_on([target], tmp_path / "out")
    for key, array in ARRAYS.items():
        assert same_bits(target["model"][key], array), key


def test_large_values_that_another_format_has_among_the_others(tmp_path: Path) -> None:
    state = {"a": make_array((3, 4)), "text": "x" * 100_000, "step": 3, "list": [list(range(3000)), "y"]}
    save_alone(state, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "one.pdparams", format="pdparams")
    export(tmp_path / "one.pdparams", tmp_path / "out", format="native", max_shard_bytes=20_000)
    assert [path for path, _ in read_metadata(tmp_path / "out").value_records] == ["/step"]
    found = load_whole(tmp_path / "out")
    assert same_bits(found.pop("a"), state.pop("a"))
    assert alike(found, state)
    assert verify(tmp_path / "out").ok
