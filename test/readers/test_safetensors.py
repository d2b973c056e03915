"""Safetensors of others are read: single files, folders with an index, unified checkpoints; what is damaged is not."""

from __future__ import annotations

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from paddle_dist_ckpt import read_metadata, verify
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointError, UnsupportedValueError
from paddle_dist_ckpt.readers.catalog import Catalog, Reader
from paddle_dist_ckpt.readers.safetensors import SafetensorsReader
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing.catalogs import read_catalog
from paddle_dist_ckpt.testing.reader_conformance import ForeignCheckpoint, ReaderTests, check_catalog
from test.jobs import CountingStorage
from test.readers.golden import golden_checkpoint

INDEX = "model.safetensors.index.json"


def read(path: Path) -> Catalog:
    """The catalog of a folder, checked."""
    storage = LocalStorage(path)
    catalog = SafetensorsReader().read(storage, storage.names(), 0)
    check_catalog(storage, catalog)
    return catalog


def paths_of(catalog: Catalog) -> list[tuple[Any, ...]]:
    """The paths of its tensors, sorted."""
    return sorted(tensor.path for tensor in catalog.tensors)


def file_of(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file of any header, which may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: Any, *offsets: int) -> dict[str, Any]:
    """An entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


class TestOfHuggingFace(ReaderTests):
    """A folder with an index."""

    @pytest.fixture
    def reader(self) -> Reader:
        return SafetensorsReader()

    @pytest.fixture
    def checkpoint(self) -> ForeignCheckpoint:
        return golden_checkpoint("hf-safetensors")


class TestOfOneFile(ReaderTests):
    """A single file."""

    @pytest.fixture
    def reader(self) -> Reader:
        return SafetensorsReader()

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> ForeignCheckpoint:
        arrays = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "empty": np.zeros((0, 4)), "s": np.array(1.5)}
        save_file(arrays, tmp_path / "any.safetensors")
        return ForeignCheckpoint({"any.safetensors": (tmp_path / "any.safetensors").read_bytes()}, arrays)


class TestOfPaddleNLP(ReaderTests):
    """A unified checkpoint: model, optimizer and master weights, each with an index."""

    @pytest.fixture
    def reader(self) -> Reader:
        return SafetensorsReader()

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> ForeignCheckpoint:
        state = unified_state()
        for kind, arrays in state.items():
            write_unified(tmp_path, kind, arrays)
        arrays = {f"{kind}.{key}": array for kind, part in state.items() for key, array in part.items()}
        return ForeignCheckpoint.of_folder(tmp_path, arrays=arrays)


def unified_state() -> dict[str, dict[str, np.ndarray]]:
    """What a unified checkpoint may have."""
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    return {
        "model": {"llama.embed.weight": weight.astype(np.float16), "norm": np.ones(3, np.float16)},
        "optimizer": {"llama.embed.weight/moment1_0": weight, "llama.embed.weight/beta1_pow_acc_0": np.ones(1)},
        "master_weights": {"llama.embed.weight": weight + 1},
    }


def write_unified(path: Path, kind: str, arrays: dict[str, np.ndarray]) -> None:
    """One kind of state, over several files, with its index."""
    weight_map = {}
    for i, (key, array) in enumerate(arrays.items()):
        weight_map[key] = f"{kind}-{i + 1:05d}-of-{len(arrays):05d}.safetensors"
        save_file({key: array}, path / weight_map[key], {"format": "np"})
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map, "master_weights": True, "type": "lora"}
    (path / f"{kind}.safetensors.index.json").write_text(json.dumps(index, indent=4))


ONE = entry("U8", [1], 0, 1)


# -- kinds of files


def test_a_kind_of_state_alone_has_no_parent(tmp_path: Path) -> None:
    write_unified(tmp_path, "peft_model", {"lora_A": np.ones(2)})
    assert paths_of(read(tmp_path)) == [("lora_A",)]
    write_unified(tmp_path, "optimizer", {"lora_A/moment1_0": np.ones(2)})
    assert paths_of(read(tmp_path)) == [("optimizer", "lora_A/moment1_0"), ("peft_model", "lora_A")]


def test_kinds_of_state_need_no_index(tmp_path: Path) -> None:
    save_file({"w": np.ones(2)}, tmp_path / "model.safetensors")
    save_file({"w/moment1_0": np.ones(2)}, tmp_path / "optimizer.safetensors")
    save_file({"w": np.ones(2)}, tmp_path / "master_weights-00001-of-00002.safetensors")
    save_file({"v": np.ones(2)}, tmp_path / "master_weights-00002-of-00002.safetensors")
    assert paths_of(read(tmp_path)) == [
        ("master_weights", "v"),
        ("master_weights", "w"),
        ("model", "w"),
        ("optimizer", "w/moment1_0"),
    ]


def test_files_without_an_index_make_up_one_checkpoint(tmp_path: Path) -> None:
    save_file({"a": np.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(3)}, tmp_path / "two.safetensors")
    arrays = read_catalog(LocalStorage(tmp_path), read(tmp_path))
    assert {key: array.shape for key, array in arrays.items()} == {"a": (2,), "b": (3,)}


def test_without_an_index_a_key_may_be_in_one_file_only(tmp_path: Path) -> None:
    save_file({"a": np.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": np.ones(2)}, tmp_path / "two.safetensors")
    with pytest.raises(UnsupportedValueError, match=r"'a' is in several files.*one.safetensors, two.safetensors"):
        read(tmp_path)


def test_an_index_says_which_file_is_meant_and_files_that_it_does_not_name_are_left_out(tmp_path: Path) -> None:
    save_file({"tied": np.ones(2), "more": np.ones(1)}, tmp_path / "a.safetensors")
    save_file({"tied": np.zeros(2), "b": np.ones(1)}, tmp_path / "b.safetensors")
    save_file({"tied": np.ones(9)}, tmp_path / "consolidated.safetensors")
    weight_map = {"tied": "b.safetensors", "more": "a.safetensors", "b": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    arrays = read_catalog(LocalStorage(tmp_path), read(tmp_path))
    assert sorted(arrays) == ["b", "more", "tied"]
    assert not arrays["tied"].any()


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["model-00001-of-00002"], "model-00002-of-00002"),
        (["model-00002-of-00002"], "model-00001-of-00002"),
        (["model-00000-of-00002"], "model-00001-of-00002"),
        (["model-00001-of-000003", "model-00003-of-000003"], "model-00002-of-000003"),
        (["model-00001-of-00002.fp16", "model-00002-of-00002"], "model-00002-of-00002.fp16"),
        (["model-00001-of-00002", "model-00002-of-00003"], "model-00002-of-00002"),
        (["shard-00001-model-00001-of-00002", "shard-00002-model-00001-of-00002"], "shard-*-model-00002-of-00002"),
        (["model-1-of-999999999", "model-3-of-999999999"], "model-2-of-999999999"),
    ],
)
def test_files_that_count_themselves_are_all_there(names: list[str], missing: str, tmp_path: Path) -> None:
    for i, name in enumerate(names):
        save_file({str(i): np.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointCorruptedError, match=rf"^{re.escape(missing)}\.safetensors"):
        read(tmp_path)


def test_a_file_that_is_one_of_several_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.safetensors"
    save_file({"a": np.ones(2)}, path)
    for seconds in (None, 60):
        assert list(read_metadata(path, progress_timeout=seconds).state_dict_metadata) == ["a"]
        with pytest.raises(CheckpointCorruptedError, match=r"model-00002-of-00002.safetensors is missing"):
            read_metadata(tmp_path, progress_timeout=seconds)


@pytest.mark.parametrize(
    "names",
    [
        ["model-00000-of-00002", "model-00001-of-00002"],
        ["model-1-of-2", "model-00002-of-2"],
        ["shard-00001-model-00001-of-00002", "shard-00002-model-00002-of-00002"],
        ["a-of-00003", "part-of-3"],
    ],
)
def test_files_that_are_all_there_need_no_index(names: list[str], tmp_path: Path) -> None:
    for i, name in enumerate(names):
        save_file({str(i): np.ones(2)}, tmp_path / f"{name}.safetensors")
    assert paths_of(read(tmp_path)) == [("0",), ("1",)]


def write_both(path: Path, parts: int) -> None:
    """A single file, and an index of two of which so many are there."""
    save_file({"a": np.zeros(2), "b": np.zeros(2)}, path / "model.safetensors")
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for key, name in list(zip("ab", names, strict=True))[:parts]:
        save_file({key: np.ones(2)}, path / name)
    (path / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_of_a_single_file_and_an_index_the_one_that_is_whole_is_taken(
    parts: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_both(tmp_path, parts)
    arrays = read_catalog(LocalStorage(tmp_path), read(tmp_path))
    assert sorted(arrays) == ["a", "b"]
    assert all(array.any() == (parts == 2) for array in arrays.values())
    taken = INDEX if parts == 2 else "model.safetensors"
    assert f"holds model.safetensors and {INDEX}, which names other files; {taken} is taken" in caplog.text


def test_what_ranks_had_of_an_optimizer_is_read_beside_an_index_of_no_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As PaddleNLP and PaddleFormers save it with ignore_merge_optimizer. A key that ranks share is left out."""
    write_unified(tmp_path, "model", {"a": np.ones(2), "b": np.ones(2)})
    notes = {"quant_ckpt_resume_times": 0, "optim_shard_num": 2}
    (tmp_path / "optimizer.safetensors.index.json").write_text(json.dumps(notes))
    save_file({"a/moment1_0": np.ones(2)}, tmp_path / "optimizer.tp00_shard00.safetensors_shard_0001")
    save_file({"a/moment2_0": np.ones(2)}, tmp_path / "optimizer.tp00_shard00.safetensors_shard_0002")
    save_file({"b/moment1_0": np.ones(1)}, tmp_path / "optimizer.tp00_shard01.safetensors_shard_0001")
    for rank in (0, 1):
        save_file({"b": np.ones(1)}, tmp_path / f"master_weights.tp0{rank}_shard01.safetensors_shard_0001")
    catalog = read(tmp_path)
    optimizer = [("optimizer", f"{key}_0") for key in ("a/moment1", "a/moment2", "b/moment1")]
    assert paths_of(catalog) == [("model", "a"), ("model", "b"), *optimizer]
    assert [path for path, reason in catalog.left_out if "in several files" in reason] == [("master_weights", "b")]
    for file in tmp_path.glob("optimizer*_shard_*"):
        file.unlink()
    assert ("model", "a") in paths_of(read(tmp_path))
    assert "optimizer.safetensors.index.json tells of an optimizer, of which no file is here" in caplog.text


def test_a_warning_names_what_an_index_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for key, name in zip("ab", names, strict=True):
        save_file({key: np.ones(2)}, tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": names[0]}}))
    assert paths_of(read(tmp_path)) == [("a",)]
    assert caplog.text.rstrip().endswith(f"not read, for {INDEX} does not name it: {names[1]}")


def test_an_index_of_the_single_file_alone_is_no_second_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"a": np.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert paths_of(read(tmp_path)) == [("a",)]
    assert not caplog.records


def test_two_indexes_of_one_kind_are_refused(tmp_path: Path) -> None:
    for prefix in ("model", "model.fp16"):
        save_file({"a": np.ones(2)}, tmp_path / f"{prefix}.safetensors")
        text = json.dumps({"weight_map": {"a": f"{prefix}.safetensors"}})
        (tmp_path / f"{prefix}.safetensors.index.json").write_text(text)
    with pytest.raises(UnsupportedValueError, match="several indexes: model.fp16.safetensors.index.json, model.saf"):
        read(tmp_path)


def test_data_files_of_other_formats_are_not_claimed() -> None:
    found = SafetensorsReader().found
    assert found(["0.metadata", "0_0.safetensors"]) == []
    assert found(["12.metadata", "0_12.safetensors", "1_12.safetensors"]) == []
    assert found([".metadata", "__0_0.distcp"]) == []
    assert found(["0_4.be8af92b1c5edefe.0.safetensors"]) == []
    assert found(["0.metadata", "0_0.safetensors", INDEX]) == [0]


@pytest.mark.parametrize("name", ["flex-ckpt.auto_generated.metadata", "notes.metadata", ".metadata", "0.metadata"])
def test_a_metadata_beside_hides_only_files_of_its_own(name: str, tmp_path: Path) -> None:
    save_file({"a": np.ones(2)}, tmp_path / "model.safetensors")
    save_file({"b": np.ones(2)}, tmp_path / "0_0.safetensors")
    (tmp_path / name).write_bytes(b"anything")
    assert paths_of(read(tmp_path)) == [("a",)] + [("b",)] * (name != "0.metadata")


# -- an index that is wrong


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "no index"),
        (b"[]", "no index"),
        (b'{"weight_map": 1}', "no index"),
        (b'{"weight_map": {"a": 1}}', "no index"),
        (b'{"weight_map": {"\xff": "a.safetensors"}}', "no index"),
        (b'{"x": ' + b"[" * 100_000, "no index"),
        (b'{"weight_map": {"a": "a.safetensors", "a": "a.safetensors"}}', "a name twice"),
        (b'{"weight_map": {"a": "b.safetensors"}, "weight_map": {"a": "a.safetensors"}}', "a name twice"),
        (b'{"metadata": {}}', "no index"),
        (b'{"weight_map": {"a": "../a.safetensors"}}', "no name of a file"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "no name of a file"),
        (b'{"weight_map": {"a": ".."}}', "no name of a file"),
        (b'{"weight_map": {"a": "b.safetensors"}}', "missing"),
        (b'{"weight_map": {"b": "a.safetensors"}}', "a.safetensors has no 'b'"),
    ],
)
def test_an_index_that_is_wrong_is_refused(index: bytes, message: str, tmp_path: Path) -> None:
    save_file({"a": np.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_bytes(index)
    with pytest.raises(CheckpointCorruptedError, match=message):
        read(tmp_path)


def test_a_key_that_an_index_alone_has_is_left_out(tmp_path: Path) -> None:
    """Also if another file has it: nobody knows whether it is meant."""
    save_file({"a": np.ones(2)}, tmp_path / "a.safetensors")
    save_file({"b": np.ones(2), "d": np.ones(2)}, tmp_path / "b.safetensors")
    weight_map = {"a": "a.safetensors", "b": "b.safetensors", "c": "a.safetensors", "d": "a.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    catalog = read(tmp_path)
    assert paths_of(catalog) == [("a",), ("b",)]
    texts = [f"a.safetensors has no '{key}', which an index says is in it" for key in "cd"]
    assert catalog.left_out == [(("c",), texts[0]), (("d",), texts[1])]
    assert catalog.lost == [("c",), ("d",)]
    assert verify(tmp_path).problems == (f"c: {texts[0]}", f"d: {texts[1]}")


# -- headers


def test_all_dtypes_are_read_as_what_they_are(tmp_path: Path) -> None:
    dtypes = [dtype for dtype in DTYPES.values() if dtype.view_items == 1]
    header, at = {}, 0
    for dtype in dtypes:
        header[dtype.name] = entry(dtype.safetensors, [3], at, at + 3 * dtype.itemsize)
        at += 3 * dtype.itemsize
    data = random.Random(0).randbytes(at)
    content = file_of(header, data)
    assert len(deserialize(content)) == len(dtypes)
    (tmp_path / "a.safetensors").write_bytes(content)
    catalog = read(tmp_path)
    assert {tensor.path[0]: tensor.dtype.name for tensor in catalog.tensors} == {d.name: d.name for d in dtypes}
    arrays = read_catalog(LocalStorage(tmp_path), catalog)
    assert b"".join(arrays[dtype.name].tobytes() for dtype in dtypes) == data


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("F8_E8M0", 8)])
def test_dtypes_that_cannot_be_held_are_left_out(dtype: str, bits: int, tmp_path: Path) -> None:
    header = {"a": ONE, "w": entry(dtype, [2, 4], 1, 1 + bits), "z": entry("U8", [1], 1 + bits, 2 + bits)}
    content = file_of(header, bytes(2 + bits))
    assert len(deserialize(content)) == 3
    (tmp_path / "a.safetensors").write_bytes(content)
    catalog = read(tmp_path)
    assert catalog.left_out == [(("w",), f"a.safetensors: 'w' has the dtype '{dtype}', which cannot be held")]
    assert [(tensor.path[0], tensor.pieces[0].position) for tensor in catalog.tensors] == [
        ("a", len(content) - 2 - bits),
        ("z", len(content) - 1),
    ]
    header["w"]["shape"] = [2, 3]
    (tmp_path / "a.safetensors").write_bytes(file_of(header, bytes(2 + bits)))
    with pytest.raises(CheckpointCorruptedError, match="'w' has .* bytes"):
        read(tmp_path)


def test_what_an_index_says_is_left_out_as_well(tmp_path: Path) -> None:
    """But a key that it says is in another file, where it can be held, is not."""
    header = {"q": entry("F4", [2], 0, 1), "w": entry("F4", [2], 1, 2)}
    (tmp_path / "a.safetensors").write_bytes(file_of(header, b"xx"))
    save_file({"w": np.ones(2), "b": np.ones(1)}, tmp_path / "b.safetensors")
    weight_map = {"q": "a.safetensors", "w": "b.safetensors", "b": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    catalog = read(tmp_path)
    assert paths_of(catalog) == [("b",), ("w",)]
    assert [path for path, _ in catalog.left_out] == [("q",)]


@pytest.mark.parametrize("dtype", ["C128", "I4", "bf16"])
def test_other_dtypes_are_named(dtype: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(file_of({"layer.w": entry(dtype, [2], 0, 1)}, b"x"))
    with pytest.raises(UnsupportedValueError, match=f"a.safetensors: 'layer.w' has the dtype '{dtype}'"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("told", "others", "expected"),
    [
        ({"format": "np"}, [], "bfloat16"),
        ({"format": "np"}, ["F32"], "bfloat16"),
        ({"format": "np"}, ["BF16"], "uint16"),
        ({"format": "pt"}, [], "uint16"),
        ({"format": "paddle"}, [], "uint16"),
        ({"by": "np"}, [], "uint16"),
        (None, [], "uint16"),
    ],
)
def test_uint16_of_numpy_is_what_paddle_takes_it_for(
    told: dict[str, str] | None, others: list[str], expected: str, tmp_path: Path
) -> None:
    header, at = {} if told is None else {"__metadata__": told}, 4
    header["w"] = entry("U16", [2], 0, at)
    for other in others:
        header[other] = entry(other, [1], at, at := at + {"F32": 4, "BF16": 2}[other])
    (tmp_path / "model.safetensors").write_bytes(file_of(header, bytes(at)))
    assert {tensor.path[0]: tensor.dtype.name for tensor in read(tmp_path).tensors}["w"] == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"model_type": "llama", "torch_dtype": "bfloat16"}', "bfloat16"),
        ('{"dtype": "bfloat16"}', "bfloat16"),
        ('{"torch_dtype": "float32"}', "uint16"),
        ('{"dtype": ["bfloat16"]}', "uint16"),
        ('{"dtype"', "uint16"),
    ],
)
@pytest.mark.parametrize("told", [None, {"format": "pt"}])
def test_uint16_is_what_the_configuration_says(
    config: str, expected: str, told: dict[str, str] | None, tmp_path: Path
) -> None:
    """As PaddleFormers saves a model of bfloat16 in the background."""
    save_file({"w": np.ones(2, np.uint16)}, tmp_path / "model.safetensors", told)
    (tmp_path / "config.json").write_text(config)
    assert [tensor.dtype.name for tensor in read(tmp_path).tensors] == [expected]
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert read_metadata(path).state_dict_metadata["w"][0].dtype == expected
    header: Any = {"w": entry("U16", [2], 0, 4), "b": entry("BF16", [1], 4, 6)}
    (tmp_path / "model.safetensors").write_bytes(file_of(header, bytes(6)))
    assert {tensor.path[0]: tensor.dtype.name for tensor in read(tmp_path).tensors} == {"w": "uint16", "b": "bfloat16"}


def test_uint16_of_a_file_alone_is_what_it_is(tmp_path: Path) -> None:
    save_file({"w": np.ones(2, np.uint16)}, tmp_path / "model.safetensors")
    assert read_metadata(tmp_path / "model.safetensors").state_dict_metadata["w"][0].dtype == "uint16"


def test_uint16_beside_bfloat16_in_another_file_is_what_it_is(tmp_path: Path) -> None:
    """Who can write bfloat16 means uint16 by that, in whatever file it is."""
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    save_file({"a": np.ones(2, np.uint16)}, tmp_path / "model-00001-of-00002.safetensors", {"format": "pt"})
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(file_of({"b": entry("BF16", [1], 0, 2)}, bytes(2)))
    assert {tensor.path[0]: tensor.dtype.name for tensor in read(tmp_path).tensors} == {"a": "uint16", "b": "bfloat16"}


@pytest.mark.parametrize(("labels", "expected"), [(20_000, "bfloat16"), (500_000, "uint16")])
def test_a_large_configuration_has_no_model_refused(labels: int, expected: str, tmp_path: Path) -> None:
    """It is read once, and what takes more time than its size has room for says nothing."""
    config = {"torch_dtype": "bfloat16", "label2id": {str(i): i for i in range(labels)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for i in range(30):
        save_file({f"w{i}": np.ones(2, np.uint16)}, tmp_path / f"{i}.safetensors")
    assert {tensor.dtype.name for tensor in read(tmp_path).tensors} == {expected}


def test_each_file_says_for_itself_whether_its_uint16_is_bfloat16(tmp_path: Path) -> None:
    save_file({"a": np.ones(2, np.uint16)}, tmp_path / "model-00001-of-00002.safetensors", {"format": "np"})
    save_file({"b": np.ones(2, np.uint16)}, tmp_path / "model-00002-of-00002.safetensors", {"format": "pt"})
    assert {tensor.path[0]: tensor.dtype.name for tensor in read(tmp_path).tensors} == {"a": "bfloat16", "b": "uint16"}


TEXT = json.dumps(ONE)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 0),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 100_000_001) + b"{}",
        file_of(b"[]"),
        file_of(b"{} x"),
        file_of(b"{}\0"),
        file_of(b'{"a":' + b"[" * 100_000),
        file_of(b'{"\xff":' + TEXT.encode() + b"}", b"x"),
        file_of(b'{"\\ud800":' + TEXT.encode() + b"}", b"x"),
        file_of({"a": ONE}),
        file_of({"a": ONE}, b"xx"),
        file_of({"a": entry("U8", [1], 1, 2)}, b"xx"),
        file_of({"a": ONE, "b": entry("U8", [1], 2, 3)}, b"xxx"),
        file_of({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xxx"),
        file_of({"a": entry("U8", [2], 0, 1)}, b"x"),
        file_of({"a": entry("U8", [-1, -1], 0, 1)}, b"x"),
        file_of({"a": entry("U8", [1.0], 0, 1)}, b"x"),
        file_of({"a": entry("U8", None, 0, 1)}, b"x"),
        file_of({"a": entry("U8", [True], 0, 1)}, b"x"),
        file_of({"a": entry("U8", [1], 0, 1, 1)}, b"x"),
        file_of({"a": entry("U8", [1], 1, 0)}, b"x"),
        file_of({"a": {"dtype": "U8", "shape": [1]}}, b"x"),
        file_of({"__metadata__": {"a": 1}}),
        file_of(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        file_of(b'{"__metadata__":{},"__metadata__":{}}'),
    ],
)
def test_what_the_library_refuses_is_refused_here_too(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(SafetensorError):
        deserialize(content)
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointCorruptedError, match="a.safetensors"):
        read(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        file_of(f'{{"a":{TEXT},"a":{TEXT}}}'.encode(), b"x"),
        file_of(f'{{"a":{TEXT},"\\u0061":{TEXT}}}'.encode(), b"x"),
        file_of(b'{"__metadata__":{"a":"1","a":"2"}}'),
    ],
)
def test_a_name_that_is_there_twice_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointCorruptedError, match="a name twice"):
        read(tmp_path)


@pytest.mark.parametrize("key", ["", "a/b", "..", "\0", 'a": "', "\\", '\\"', "\\\\", "ü\U0001f600", "~1", "\n"])
def test_any_name_is_a_name(key: str, tmp_path: Path) -> None:
    save_file({key: np.ones(2), "other": np.ones(1)}, tmp_path / "a.safetensors", {key: 'x": {"y":'})
    assert paths_of(read(tmp_path)) == sorted([(key,), ("other",)])


def test_shapes_that_no_array_has_are_refused(tmp_path: Path) -> None:
    for shape in ([1] * 33, [0, 2**40, 2**40]):
        header = {"a": entry("U8", shape, 0, 0 if 0 in shape else 1)}
        (tmp_path / "a.safetensors").write_bytes(file_of(header, b"" if 0 in shape else b"x"))
        with pytest.raises(UnsupportedValueError, match="'a'"):
            read(tmp_path)


def test_headers_are_judged_as_the_library_judges_them(tmp_path: Path) -> None:
    """Whatever is made of a header: nothing is read that the library refuses, and what is read is the same."""
    arrays = {"a": np.arange(6, dtype=np.int16), "b.c": np.ones((2, 3)), "d": np.zeros((0, 2), np.uint8)}
    save_file(arrays, tmp_path / "a.safetensors", {"format": "np"})
    original = (tmp_path / "a.safetensors").read_bytes()
    end = 8 + int.from_bytes(original[:8], "little")
    generator = random.Random(1)
    both = 0
    for _ in range(2000):
        content = bytearray(original)
        for _ in range(generator.randrange(1, 3)):
            at = generator.randrange(end)
            content[at] = generator.choice(b'0123456789[]{},:" eE.-\\aU') if at >= 8 else generator.randrange(256)
        (tmp_path / "a.safetensors").write_bytes(content)
        try:
            theirs = {key: (info["dtype"], info["shape"]) for key, info in deserialize(bytes(content))}
        except SafetensorError:
            theirs = None
        try:
            ours = {t.path[0]: (t.dtype.safetensors, list(t.shape)) for t in read(tmp_path).tensors}
        except CheckpointError:
            continue
        assert ours == theirs, bytes(content[:end])
        both += 1
    assert both > 10


def test_little_more_than_the_header_is_read(tmp_path: Path) -> None:
    save_file({f"layer.{i}": np.zeros(1 << 17) for i in range(20)}, tmp_path / "a.safetensors")
    log: list[tuple[str, int, int]] = []
    storage = CountingStorage(tmp_path, log)
    assert len(SafetensorsReader().read(storage, storage.names(), 0).tensors) == 20
    assert sum(stop - start for _, start, stop in log) < 64 << 10


# -- shards of torch.distributed.checkpoint


def test_shards_that_say_where_they_belong_make_up_one_tensor(tmp_path: Path) -> None:
    array = np.arange(40).reshape(8, 5)
    for i, part in enumerate((array[:3], array[3:])):
        info = json.dumps({"w": {"saved_offsets": [3 * i, 0]}, "b": {"saved_offsets": [0]}})
        arrays = {"w": np.ascontiguousarray(part), "b": np.ones(2)}
        name = f"shard-{i:05d}-model-00001-of-00001.safetensors"
        save_file(arrays, tmp_path / name, {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"})
    catalog = read(tmp_path)
    found = read_catalog(LocalStorage(tmp_path), catalog)
    assert np.array_equal(found["w"].view(np.int64), array)
    assert found["b"].shape == (2,)
    (tensor,) = (tensor for tensor in catalog.tensors if tensor.path == ("w",))
    assert [piece.box for piece in tensor.pieces] == [Box((0, 0), (3, 5)), Box((3, 0), (5, 5))]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"w": {"saved_offsets": [1]}}, "overlap"),
        ({"w": {"saved_offsets": [0, 0]}}, "begins at"),
        ({"w": {"saved_offsets": [-1]}}, "begins at"),
        ({"w": {"saved_offsets": "x"}}, "cannot be read"),
        ([], "cannot be read"),
    ],
)
def test_shards_that_do_not_fit_are_refused(info: Any, message: str, tmp_path: Path) -> None:
    save_file({"w": np.ones(2)}, tmp_path / "a.safetensors", {"DCP_SHARDING_INFO": '{"w":{"saved_offsets":[0]}}'})
    save_file({"w": np.ones(2)}, tmp_path / "b.safetensors", {"DCP_SHARDING_INFO": json.dumps(info)})
    with pytest.raises(CheckpointCorruptedError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(("part", "offset"), [(np.ones(2, np.int64), [2]), (np.ones((1, 2)), [2, 0])])
def test_shards_of_different_dtypes_or_dimensions_are_refused(part: Any, offset: list[int], tmp_path: Path) -> None:
    for name, array, start in (("a", np.ones(2), [0]), ("b", part, offset)):
        info = json.dumps({"w": {"saved_offsets": start}})
        save_file({"w": array}, tmp_path / f"{name}.safetensors", {"DCP_SHARDING_INFO": info})
    with pytest.raises(CheckpointCorruptedError, match="b.safetensors: 'w' is of another dtype or rank than in a.safe"):
        read(tmp_path)


@pytest.mark.parametrize(("dtype", "shape"), [("I32", [2, 3]), ("F32", [3, 2])])
def test_a_file_that_differs_in_a_type_or_a_shape_alone_is_another_save(
    tmp_path: Path, dtype: str, shape: list[int]
) -> None:
    saves = []
    for header in ({"w": entry("F32", [2, 3], 0, 24)}, {"w": entry(dtype, shape, 0, 24)}):
        (tmp_path / "model.safetensors").write_bytes(file_of(header, bytes(24)))
        saves.append(read_metadata(tmp_path).save_id)
    assert saves[0] != saves[1]
