"""Paddle's own distributed checkpoints are read as they were written."""

from __future__ import annotations

import pickle
import re
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import read_metadata, verify
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointNotFoundError, UnsupportedValueError
from paddle_dist_ckpt.readers.catalog import Catalog
from paddle_dist_ckpt.readers.paddle import PaddleReader
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing.catalogs import read_catalog
from paddle_dist_ckpt.testing.faults import FaultyStorage
from paddle_dist_ckpt.testing.reader_conformance import ForeignCheckpoint, ReaderTests, check_catalog
from test.cli.commands import answer
from test.jobs import CountingStorage
from test.pace import slowness
from test.readers.golden import GOLDEN, expected_arrays, golden_checkpoint
from test.strategies import some

FOLDERS = sorted(path.name for path in GOLDEN.glob("paddle-*"))
READER = PaddleReader()


class TestOfPaddle(ReaderTests):
    """Checkpoints of different versions and kinds."""

    @pytest.fixture
    def reader(self) -> PaddleReader:
        return READER

    @pytest.fixture(params=["paddle-2.6.2", "paddle-3.3.1-flattened", "paddle-3.3.1-safetensors"])
    def checkpoint(self, request: pytest.FixtureRequest) -> ForeignCheckpoint:
        return golden_checkpoint(request.param)


@pytest.mark.parametrize("name", FOLDERS)
def test_each_golden_is_read_as_it_was_written(name: str) -> None:
    storage = LocalStorage(GOLDEN / name)
    names = storage.names()
    assert READER.found(names) == [0]
    catalog = READER.read(storage, names, 0)
    check_catalog(storage, catalog)
    arrays, expected = read_catalog(storage, catalog), expected_arrays(name)
    assert arrays.keys() == expected.keys()
    for key, array in expected.items():
        assert arrays[key].tobytes() == array.tobytes(), key
    assert (catalog.format, catalog.unique_id, catalog.world_size, catalog.values) == ("paddle", 0, 2, [])
    dtypes = {tensor.path[-1]: tensor.dtype.name for tensor in catalog.tensors}
    assert dtypes.get("layers.0.mlp.weight_bf16", "bfloat16") == "bfloat16"
    if "nested" in name:
        assert ("optimizer", "head.w_0_moment1_0") in [tensor.path for tensor in catalog.tensors]
    assert all((tensor.name is None) == ("safetensors" in name) for tensor in catalog.tensors)


def test_a_flattened_range_is_several_boxes_one_behind_the_other() -> None:
    storage = LocalStorage(GOLDEN / "paddle-3.3.1-flattened")
    (tensor,) = READER.read(storage, storage.names(), 0).tensors
    assert [piece.box for piece in tensor.pieces] == [
        Box((0, 0), (3, 5)),
        Box((3, 0), (1, 2)),
        Box((3, 2), (1, 3)),
        Box((4, 0), (3, 5)),
    ]
    first, second, third, fourth = tensor.pieces
    assert second.position - first.position == 15 * 4
    assert (third.file, fourth.position - third.position) == (1, 3 * 4)


def test_checkpoints_are_found_by_their_own_names() -> None:
    names = ["3.metadata", "0_3.distcp", "12.metadata", "0_12.safetensors", "flex-ckpt.auto_generated.metadata"]
    assert READER.found(names) == [3, 12]
    for other in (
        ["3.metadata"],
        ["0_3.distcp"],
        ["3.metadata", "0_4.distcp", "0_3.distcp.tmp"],
        ["03.metadata", "0_03.distcp"],
        ["4.metadata", "0_4.be8af92b1c5edefe.0.safetensors"],
        ["flex-ckpt.auto_generated.metadata", "0_0.distcp"],
    ):
        assert READER.found(other) == [], other


# What Paddle's metadata look like, to write others: pickled under the names of Paddle's classes.


@dataclass
class Metadata:
    state_dict_metadata: Any = None
    storage_metadata: Any = None
    flat_mapping: Any = None


@dataclass(frozen=True)
class LocalTensorMetadata:
    global_offset: Any
    local_shape: Any
    dtype: Any = "float32"
    global_shape: Any = None
    is_flattened: bool = False
    flattened_range: Any = None


@dataclass(frozen=True)
class LocalTensorIndex:
    tensor_key: Any
    global_offset: Any
    is_flattened: bool = False
    flattened_range: Any = None
    replica_id: Any = None
    local_shape: Any = None


def write(
    path: Path, metadata: Metadata, files: dict[str, dict[str, Any]], unique_id: int = 0, protocol: int = 4
) -> LocalStorage:
    """A checkpoint of these metadata and data files."""
    data = pickle.dumps(metadata, 2).replace(f"c{__name__}\n".encode(), b"cpaddle.distributed.checkpoint.metadata\n")
    (path / f"{unique_id}.metadata").write_bytes(data)
    for name, arrays in files.items():
        (path / name).write_bytes(pickle.dumps(arrays, protocol))
    return LocalStorage(path)


def read(storage: LocalStorage, unique_id: int = 0) -> Catalog:
    """The catalog, checked."""
    catalog = READER.read(storage, storage.names(), unique_id)
    check_catalog(storage, catalog)
    return catalog


WEIGHT = np.arange(24, dtype=np.float32).reshape(6, 4)


def halves(**changes: Any) -> tuple[Metadata, dict[str, dict[str, Any]]]:
    """A tensor of two shards, one in each file, with other things said of the second."""
    what = {"offset": (3, 0), "shape": (3, 4), "dtype": "float32", "file": "1_0.distcp", "data": WEIGHT[3:], **changes}
    first, second = (
        LocalTensorMetadata((0, 0), (3, 4)),
        LocalTensorMetadata(what["offset"], what["shape"], what["dtype"]),
    )
    metadata = Metadata(
        {"w": [first, second]},
        {LocalTensorIndex("w", (0, 0)): "0_0.distcp", LocalTensorIndex("w", what["offset"]): what["file"]},
        what.get("mapping"),
    )
    return metadata, {"0_0.distcp": {"w": WEIGHT[:3]}, "1_0.distcp": {"w": what["data"]}}


def test_shards_that_others_describe_are_read(tmp_path: Path) -> None:
    storage = write(tmp_path, *halves(mapping={"w": ("model", "layer", "w")}))
    catalog = read(storage)
    (tensor,) = catalog.tensors
    assert (tensor.path, tensor.shape, tensor.name) == (("model", "layer", "w"), (6, 4), None)
    assert np.array_equal(read_catalog(storage, catalog)["model.layer.w"].view(np.float32), WEIGHT)


def saved_again(path: Path, files: dict[str, dict[str, Any]]) -> LocalStorage:
    """What is left if Paddle saves these files to where metadata of ``w``, in two parts, and of ``b`` are."""
    metadata, _ = halves(mapping={"w": ("model", "w"), "b": ("model", "b")})
    metadata.state_dict_metadata["b"] = [LocalTensorMetadata((0,), (2,))]
    metadata.storage_metadata[LocalTensorIndex("b", (0,))] = "1_0.distcp"
    return write(path, metadata, files)


def test_a_key_that_a_later_save_had_not_is_left_out(tmp_path: Path) -> None:
    storage = saved_again(tmp_path, {"0_0.distcp": {"w": WEIGHT[:3]}, "1_0.distcp": {"w": WEIGHT[3:]}})
    catalog = read(storage)
    assert [tensor.path for tensor in catalog.tensors] == [("model", "w")]
    ((path, reason),) = catalog.left_out
    assert [path] == catalog.lost == [("model", "b")]
    assert re.match(r"1_0.distcp has no 'b'; Paddle leaves a \.metadata that it finds", reason)
    report = verify(storage)
    assert not report.ok
    assert report.problems == (f"model.b: {reason}",)
    assert answer("verify", tmp_path, code=1)["problems"] == [{"file": None, "text": f"model.b: {reason}"}]


def test_a_key_that_only_a_later_save_had_is_left_out(tmp_path: Path) -> None:
    metadata, files = halves(mapping={"w": ("model", "w")})
    files["1_0.distcp"] |= {"moment": WEIGHT, "other": WEIGHT}
    storage = write(tmp_path, metadata, files)
    catalog = read(storage)
    assert [tensor.path for tensor in catalog.tensors] == [("model", "w")]
    assert [path for path, _ in catalog.left_out] == [("moment",), ("other",)]
    assert not catalog.lost
    assert all(re.match(r"1_0.distcp has it, but 0.metadata does not", reason) for _, reason in catalog.left_out)
    assert verify(storage).ok


def test_a_key_that_only_a_later_save_had_may_be_a_container_here(tmp_path: Path) -> None:
    metadata, files = halves(mapping={"w": ("model", "w")})
    files["1_0.distcp"]["model"] = WEIGHT
    catalog = read(write(tmp_path, metadata, files))
    assert [tensor.path for tensor in catalog.tensors] == [("model", "w")]
    assert not catalog.left_out
    assert set(read_metadata(tmp_path).state_dict_metadata) == {"model.w"}


@pytest.mark.parametrize(
    "files",
    [
        {"0_0.distcp": {"w": WEIGHT[:3]}, "1_0.distcp": {"b": np.ones(2, np.float32)}},  # half of a tensor
        {"0_0.distcp": {"w": WEIGHT[:3]}, "1_0.distcp": {"other": WEIGHT}},  # of another checkpoint
        {"0_0.distcp": {}, "1_0.distcp": {}},
    ],
)
def test_what_no_later_save_leaves_is_damage(files: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorruptedError, match="_0.distcp has no '[bw]'"):
        read(saved_again(tmp_path, files))


def test_a_shard_in_fortrans_order_is_read(tmp_path: Path) -> None:
    storage = write(tmp_path, *halves(data=np.asfortranarray(WEIGHT[3:])))
    catalog = read(storage)
    (tensor,) = catalog.tensors
    assert (len(tensor.pieces), tensor.offsets) == (1 + 4, [(0, 0), (3, 0)])
    assert np.array_equal(read_catalog(storage, catalog)["w"].view(np.float32), WEIGHT)


def test_a_range_of_elements_in_fortrans_order_is_refused(tmp_path: Path) -> None:
    shard = LocalTensorMetadata((0, 0), (6, 4), is_flattened=True, flattened_range=(0, 24))
    index = LocalTensorIndex("w", (0, 0), is_flattened=True, flattened_range=(0, 24))
    metadata = Metadata({"w": [shard]}, {index: "0_0.distcp"})
    storage = write(tmp_path, metadata, {"0_0.distcp": {"w": np.asfortranarray(WEIGHT)}})
    with pytest.raises(
        CheckpointCorruptedError, match="0_0.distcp: 'w' is a range of elements, which are in no C order"
    ):
        read(storage)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"file": "../1_0.distcp"}, CheckpointCorruptedError, "no name of a file"),
        ({"file": "/etc/passwd"}, CheckpointCorruptedError, "no name of a file"),
        ({"file": "2_0.distcp"}, CheckpointCorruptedError, "2_0.distcp"),
        ({"file": 7}, CheckpointCorruptedError, "no name of a file"),
        ({"offset": (2, 0)}, CheckpointCorruptedError, "overlap"),
        ({"offset": (-3, 0)}, CheckpointCorruptedError, "0.metadata"),
        ({"offset": (3,)}, CheckpointCorruptedError, "0.metadata"),
        ({"offset": (2**70, 0)}, CheckpointCorruptedError, "0.metadata"),
        ({"offset": (2**61, 0)}, UnsupportedValueError, "0.metadata: 'w'"),
        ({"offset": "ab"}, CheckpointCorruptedError, "0.metadata"),
        ({"shape": (3, 5)}, CheckpointCorruptedError, r"1_0.distcp: 'w' has the shape \[3, 4\], where \[3, 5\] is"),
        ({"shape": None}, CheckpointCorruptedError, "0.metadata"),
        ({"dtype": "int32"}, CheckpointCorruptedError, "float32, where int32 is due"),
        ({"dtype": "float4"}, UnsupportedValueError, "'w' has the dtype 'float4'"),
        ({"dtype": 5}, CheckpointCorruptedError, "0.metadata"),
        ({"data": WEIGHT[3:].astype(np.float64)}, CheckpointCorruptedError, "float64"),
        ({"data": WEIGHT[3:].astype(">f4")}, UnsupportedValueError, "1_0.distcp: 'w' has elements whose bytes"),
        ({"data": np.array([None])}, UnsupportedValueError, "1_0.distcp: 'w' has elements of numpy's dtype 'O8'"),
        ({"data": np.zeros(3, "f4,i4")}, UnsupportedValueError, "1_0.distcp: 'w' has elements of numpy's dtype 'V'"),
        ({"data": 3}, CheckpointCorruptedError, "'w' is no tensor"),
        ({"mapping": {"w": ()}}, UnsupportedValueError, "0 levels deep"),
        ({"mapping": {"w": ("a",) * 100}}, UnsupportedValueError, "100 levels deep"),
        ({"mapping": {"w": "w"}}, CheckpointCorruptedError, "0.metadata"),
        ({"mapping": []}, None, None),
    ],
)
def test_what_does_not_fit_together_is_refused(
    changes: dict[str, Any], error: type[Exception] | None, message: str | None, tmp_path: Path
) -> None:
    storage = write(tmp_path, *halves(**changes))
    if error is None:
        read(storage)
    else:
        with pytest.raises(error, match=message):
            read(storage)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([WEIGHT[3:]], "1_0.distcp: it holds no dict"),
        ({"w": WEIGHT[3:], "StructuredToParameterName@@": 3}, "1_0.distcp: its names of variables are no dict"),
        ({0: WEIGHT[3:]}, "1_0.distcp: 0 is no tensor"),
    ],
)
def test_data_files_of_something_else_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    metadata, files = halves()
    storage = write(tmp_path, metadata, {**files, "1_0.distcp": content})
    with pytest.raises(CheckpointCorruptedError, match=message):
        read(storage)


def test_a_file_for_what_is_not_described_is_refused(tmp_path: Path) -> None:
    """Without an error, a load of all there is would have lost it."""
    metadata, files = halves()
    metadata.storage_metadata[LocalTensorIndex("other", (0, 0))] = "0_0.distcp"
    with pytest.raises(CheckpointCorruptedError, match="0.metadata has a file for 'other', but no shape"):
        read(write(tmp_path, metadata, files))
    metadata, files = halves()
    places = metadata.storage_metadata
    places[LocalTensorIndex("w", (4, 0))] = places.pop(LocalTensorIndex("w", (3, 0)))
    with pytest.raises(
        CheckpointCorruptedError, match="0.metadata has a file for a shard of 'w' that it does not know"
    ):
        read(write(tmp_path, metadata, files))


@pytest.mark.parametrize(
    ("elements", "count"), [((0, 20), 24), ((4, 24), 24), ((0, 28), 28), ((8, 4), 0)], ids=lambda value: str(value)
)
def test_a_range_of_elements_that_does_not_fit_is_refused(
    elements: tuple[int, int], count: int, tmp_path: Path
) -> None:
    shard = LocalTensorMetadata((0, 0), (6, 4), is_flattened=True, flattened_range=elements)
    index = LocalTensorIndex("w", (0, 0), is_flattened=True, flattened_range=elements)
    data = {"0_0.distcp": {"w": np.zeros(count, np.float32)}}
    with pytest.raises(CheckpointCorruptedError, match=f"0_0.distcp: 'w' has {count} elements, where {elements[0]} to"):
        read(write(tmp_path, Metadata({"w": [shard]}, {index: "0_0.distcp"}), data))


def test_nothing_else_is_opened_than_what_belongs_to_it(tmp_path: Path) -> None:
    write(tmp_path, *halves(), unique_id=7)
    for name in ("0_0.distcp", "1_0.distcp"):
        (tmp_path / name).rename(tmp_path / name.replace("_0", "_7"))
    metadata, files = halves()
    moved = {index: file.replace("_0.", "_12.") for index, file in metadata.storage_metadata.items()}
    write(tmp_path, Metadata(metadata.state_dict_metadata, moved), {}, unique_id=12)
    for name, arrays in files.items():
        (tmp_path / name.replace("_0.", "_12.")).write_bytes(pickle.dumps(arrays))
    opened: list[str] = []
    storage = FaultyStorage(tmp_path, lambda operation, name: opened.append(name) if operation == "open" else None)
    assert READER.found(storage.names()) == [7, 12]
    catalog = READER.read(storage, storage.names(), 12)
    assert set(opened) == {"12.metadata", "0_12.distcp", "1_12.distcp"}
    assert [file.name for file in catalog.files] == ["0_12.distcp", "1_12.distcp"]
    with pytest.raises(CheckpointNotFoundError):
        READER.read(storage, storage.names(), 1)


@pytest.mark.parametrize("name", ["0.metadata", "1_0.distcp"])
def test_a_folder_in_place_of_a_file_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    storage = write(tmp_path, *halves())
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointCorruptedError, match=name):
        read(storage)


def test_metadata_that_would_run_code_are_refused(tmp_path: Path) -> None:
    storage = write(tmp_path, *halves())
    (tmp_path / "0.metadata").write_bytes(b"cposix\nsystem\n(S'touch /tmp/run'\ntR.")
    with pytest.raises(UnsupportedValueError, match="0.metadata: asks for posix.system, which is not read"):
        read(storage)


def test_large_data_are_not_read(tmp_path: Path) -> None:
    arrays = {f"w{i}": np.full((100, 1000), i, np.float32) for i in range(20)}
    metadata = Metadata(
        {key: [LocalTensorMetadata((0, 0), (100, 1000))] for key in arrays},
        {LocalTensorIndex(key, (0, 0)): "0_0.distcp" for key in arrays},
    )
    storage, log = write(tmp_path, metadata, {"0_0.distcp": arrays}), list[tuple[str, int, int]]()
    found = READER.read(CountingStorage(tmp_path, log), storage.names(), 0)
    assert sum(stop - start for _, start, stop in log) < 20 * 4096 + storage.size("0.metadata") + 8192
    assert all((read_catalog(storage, found)[key].view(np.float32) == arrays[key]).all() for key in arrays)


def many(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...], copies: bool) -> Metadata:
    """One tensor of many shards, each in a file of its own, or copies in one file."""
    shards = [LocalTensorMetadata(offset, extent, global_shape=shape) for offset, extent in boxes]
    places = {
        LocalTensorIndex("w", offset, replica_id=i if copies else None): f"{0 if copies else i}_0.distcp"
        for i, (offset, _) in enumerate(boxes)
    }
    return Metadata({"w": shards}, places)


MANY: dict[str, tuple[Callable[[], Metadata], str | None]] = {
    "tiles": (lambda: many([((i,), (4,)) for i in range(0, 4000, 4)], (4000,), False), None),
    "overlaps": (lambda: many([((i,), (4,)) for i in range(1000)], (1003,), False), "overlap"),
    "grid": (
        lambda: many([((i, j), (2, 2)) for i in range(0, 64, 2) for j in range(0, 64, 2)], (64, 64), False),
        None,
    ),
    "overlaps in a grid": (
        lambda: many([((i, j), (2, 2)) for i in range(0, 40, 2) for j in range(50)], (40, 51), False),
        "overlap",
    ),
    "replicas": (lambda: many([((0,), (4,))] * 4000, (4,), True), None),
    "gaps": (lambda: many([((i,), (4,)) for i in range(0, 8000, 8)], (8000,), False), None),
}


@pytest.mark.parametrize("name", some(MANY, 2))
def test_many_shards_take_time_and_memory_in_proportion(name: str, tmp_path: Path) -> None:
    make, message = MANY[name]
    metadata = make()
    shape = next(iter(metadata.state_dict_metadata.values()))[0].local_shape
    storage = write(tmp_path, metadata, {"0_0.distcp": {"w": np.zeros(shape, np.float32)}})
    for name in set(metadata.storage_metadata.values()) - {"0_0.distcp"}:
        (tmp_path / name).hardlink_to(tmp_path / "0_0.distcp")
    names, size = storage.names(), storage.size("0.metadata")

    def work() -> None:
        if message is None:
            READER.read(storage, names, 0)
        else:
            with pytest.raises(CheckpointCorruptedError, match=message):
                READER.read(storage, names, 0)

    start = time.process_time()
    work()
    assert time.process_time() - start < 2 + 1e-5 * size, "many times what it takes on a quiet machine"
    tracemalloc.start()
    try:
        work()
        assert tracemalloc.get_traced_memory()[1] < 30 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", ["shards", "paths"])
def test_what_is_referred_to_often_is_not_looked_at_often(what: str, tmp_path: Path) -> None:
    shards = [LocalTensorMetadata((0,), (4,))] * 10_000
    path = ("a",) * 10_000
    metadata = Metadata({f"w{i}": shards for i in range(10_000)}, {}, {})
    if what == "paths":
        metadata = Metadata({}, {}, {f"w{i}": path for i in range(10_000)})
    storage = write(tmp_path, metadata, {"0_0.distcp": {}})
    start = time.process_time()
    with pytest.raises(CheckpointCorruptedError, match="0.metadata: it is not as Paddle writes it .it refers to more"):
        read(storage)
    assert time.process_time() - start < 5 * slowness()


def test_what_the_installed_paddle_saves_is_read(tmp_path: Path) -> None:
    paddle = pytest.importorskip("paddle")
    weight = paddle.arange(12, dtype="float32").reshape([3, 4])
    small = "float8_e4m3fn" if hasattr(paddle, "float8_e4m3fn") else "float16"  # which Paddle 2.6 lacks
    state: dict[str, Any] = {
        "model": {"w": weight, "b": weight.astype("bfloat16"), "f8": weight.astype(small)},
        "scalar": paddle.to_tensor(2.5),
        "flags": weight > 3,
    }
    if small == "float16":  # nor does it save nested ones
        model = state.pop("model")
        state.update((f"model.{name}", value) for name, value in model.items())
    paddle.distributed.save_state_dict(state, str(tmp_path))
    storage = LocalStorage(tmp_path)
    catalog = read(storage)
    # Paddle 2.6 keeps the flat keys alone.
    assert {".".join(map(str, tensor.path)): (tensor.dtype.name, tensor.shape) for tensor in catalog.tensors} == {
        "model.w": ("float32", (3, 4)),
        "model.b": ("bfloat16", (3, 4)),
        "model.f8": (small, (3, 4)),
        "scalar": ("float32", ()),
        "flags": ("bool", (3, 4)),
    }
    arrays = read_catalog(storage, catalog)
    assert np.array_equal(arrays["model.w"].view(np.float32), weight.numpy())
    assert np.array_equal(arrays["model.b"], weight.astype("bfloat16").numpy().view(np.uint16))
    assert arrays["scalar"].view(np.float32) == 2.5
