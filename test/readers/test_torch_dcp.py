"""Checkpoints of torch.distributed.checkpoint are read; what is damaged, or would run code, is refused."""

from __future__ import annotations

import io
import math
import pickle
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.errors import CheckpointCorruptedError, UnsupportedValueError
from paddle_dist_ckpt.readers.catalog import Catalog, Reader
from paddle_dist_ckpt.readers.torch_dcp import TorchDCPReader
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing.catalogs import read_catalog
from paddle_dist_ckpt.testing.reader_conformance import ForeignCheckpoint, ReaderTests, check_catalog
from paddle_dist_ckpt.tree.paths import ListIndex, TupleIndex
from test.jobs import CountingStorage
from test.pace import slowness
from test.readers.golden import GOLDEN, golden_checkpoint
from test.readers.measured import measured
from test.readers.torch_writer import DCP, DTYPES, Call, DCPWriter, Global, Outside, pickled, saved, tensor
from test.torture.budgets import cost_of
from test.torture.hostile_files import problem_of

GOLDEN_VALUES = {"lr": 0.125, "note": "hello"}
ARRAY = np.arange(24, dtype=np.float32).reshape(4, 6)


def read(path: Path, writer: DCPWriter | None = None) -> Catalog:
    """The catalog of what a writer has made, or of what is in a folder, checked."""
    for name, content in (writer.all_files if writer else {}).items():
        (path / name).write_bytes(content)
    storage = LocalStorage(path)
    catalog = TorchDCPReader().read(storage, storage.names(), 0)
    check_catalog(storage, catalog)
    return catalog


class TestOfTorch213(ReaderTests):
    """What torch 2.13 wrote on two ranks."""

    @pytest.fixture
    def reader(self) -> Reader:
        return TorchDCPReader()

    @pytest.fixture
    def checkpoint(self) -> ForeignCheckpoint:
        return golden_checkpoint("torch-dcp-2.13", values=GOLDEN_VALUES)


class TestOfOldTorch(ReaderTests):
    """A checkpoint with the names of torch 2.0, zips without their 64-bit end, and no order of bytes."""

    @pytest.fixture
    def reader(self) -> Reader:
        return TorchDCPReader()

    @pytest.fixture
    def checkpoint(self) -> ForeignCheckpoint:
        writer = DCPWriter(old=True)
        writer.add("model.w", "float32", ARRAY, [np.s_[0:3, :], np.s_[3:4, 0:2], np.s_[3:4, 2:6]])
        writer.add_value("step", 7)
        return ForeignCheckpoint(writer.all_files, {"model.w": ARRAY}, {"step": 7})


# -- what is read


def test_the_golden_checkpoint_says_who_wrote_it_and_how_to_verify_it() -> None:
    catalog = read(GOLDEN / "torch-dcp-2.13")
    assert (catalog.world_size, catalog.version, catalog.unique_id) == (2, "torch.distributed.checkpoint 1.0.0", 0)
    assert len(catalog.checksums) == sum(len(tensor.pieces) for tensor in catalog.tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes_are_read_as_what_they_are(dtype: str, tmp_path: Path) -> None:
    array = np.arange(6).astype(DTYPES[dtype][1]).reshape(2, 3)
    writer = DCPWriter()
    writer.add("w", dtype, array)
    catalog = read(tmp_path, writer)
    assert [tensor.dtype.name for tensor in catalog.tensors] == [dtype]
    assert read_catalog(LocalStorage(tmp_path), catalog)["w"].tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e8m0fnu", "complex32", "qint8"])
def test_other_dtypes_are_named(dtype: str, tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.describe("layer.w", dtype, (1,), [((0,), (1,))])
    writer.add("b", "float32", ARRAY)
    catalog = read(tmp_path, writer)
    assert catalog.left_out == [(("layer.w",), f".metadata: 'layer.w' has the dtype '{dtype}', which cannot be held")]
    assert [tensor.path for tensor in catalog.tensors] == [("b",)]


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
def test_enumerations_are_read_as_python_3_11_2_has_them(module: str, tmp_path: Path) -> None:
    class Writer(DCPWriter):
        def properties(self, dtype: str) -> Call:
            *before, encoding, pinned = (made := super().properties(dtype)).state
            member = Call(Global(module, "getattr"), (encoding.function, "TORCH_CONTIGUOUS_FORMAT"))
            return Call(made.function, (), (*before, member, pinned))

    writer = Writer()
    writer.add("w", "float32", ARRAY)
    assert [found.path for found in read(tmp_path, writer).tensors] == [("w",)]
    for wrong in ((Global("torch", "Size"), "__class__"), (Global(f"{DCP}.metadata", "_MEM_FORMAT_ENCODING"), 1)):
        (tmp_path / ".metadata").write_bytes(pickled(Call(Global(module, "getattr"), wrong)))
        with pytest.raises(UnsupportedValueError, match="asks for an attribute of something else"):
            read(tmp_path)


def test_plans_that_megatron_leaves_in_the_metadata_do_not_matter(tmp_path: Path) -> None:
    class Writer(DCPWriter):
        @property
        def metadata(self) -> bytes:
            told = {"state_dict_metadata": self.tensors, "planner_data": None, "storage_data": self.ranges}
            return pickled(self.record("Metadata", **told, mcore_data={"w": {}}, all_local_plans=[plan]))

    def planned(kind: str, **state: Any) -> Call:
        return Call(Global(f"{DCP}.planner", kind), (), state)

    writer = Writer()
    writer.add("w", "float32", ARRAY)
    writer.add_value("v", 3)
    described = writer.tensors["w"].state
    items = [
        planned(
            "WriteItem",
            index=next(iter(writer.ranges)),
            type=Call(Global(f"{DCP}.planner", "WriteItemType"), (2,)),
            bytes_io_data=None,
            tensor_data=planned("TensorWriteData", chunk=described["chunks"][0], size=described["size"]),
        ),
        planned("WriteItem", bytes_io_data=planned("BytesIOWriteData", nbytes=10), tensor_data=None),
    ]
    megatron = Global("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan")
    plan = Call(megatron, (), {"items": items, "planner_data": planned("SavePlan", items=[]), "mcore_data": {"w": {}}})
    catalog = read(tmp_path, writer)
    assert [found.path for found in catalog.tensors] == [("w",)]
    assert catalog.values == [(("v",), 3)]


def test_keys_have_the_paths_that_they_were_made_of(tmp_path: Path) -> None:
    writer = DCPWriter(paths={"optim.state.0.exp_avg": ("optim", "state", "0", "exp_avg"), "groups.1": ("groups", 1)})
    writer.add("optim.state.0.exp_avg", "float32", ARRAY)
    writer.add_value("groups.1", [1, 2])
    writer.add_value("other.key", None)
    catalog = read(tmp_path, writer)
    assert [tensor.path for tensor in catalog.tensors] == [("optim", "state", "0", "exp_avg")]
    assert catalog.values == [(("groups", ListIndex(1)), [1, 2]), (("other.key",), None)]


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(2**70), 0.5, "ü", b"", b"\x00\xff", [], {}, (1, [2, (3,)], {"a": b"x", 4: None})],
)
def test_plain_values_are_read(value: Any, tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.add_value("v", value)
    (found,) = read(tmp_path, writer).values
    assert found == (("v",), value)
    assert repr(found[1]) == repr(value)


def test_long_texts_and_bytes_are_read(tmp_path: Path) -> None:
    writer = DCPWriter()
    text, data = "ü" * 100_000, bytes(range(256)) * 1000
    writer.add_value("v", {"text": text, "data": data})
    assert read(tmp_path, writer).values == [(("v", "text"), text), (("v", "data"), data)]


def test_dicts_are_taken_apart_as_those_of_a_state_dict_are(tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.add_value("v", {"a": {"b": 1, 2: [{"c": 3}]}, "empty": {}, "mixed": {None: 1}})
    assert read(tmp_path, writer).values == [
        (("v", "a", "b"), 1),
        (("v", "a", 2), [{"c": 3}]),
        (("v", "empty"), {}),
        (("v", "mixed"), {None: 1}),
    ]


def test_numpy_scalars_are_read_as_numbers(tmp_path: Path) -> None:
    writer = DCPWriter()
    dtype = Call(Global("numpy", "dtype"), ("f4", False, True), (3, "<", None, None, None, -1, -1, 0))
    writer.add_value("lr", Call(Global("numpy._core.multiarray", "scalar"), (dtype, np.float32(0.5).tobytes())))
    assert read(tmp_path, writer).values == [(("lr",), 0.5)]


def test_tensors_inside_of_values_are_tensors(tmp_path: Path) -> None:
    writer = DCPWriter(paths={"rng": ("rng",)})
    value = ({"a": tensor("int16", (2, 2), "1"), "b": [1, 2]}, tensor("float32", (3,), "0", offset=5, size=8), "x")
    memory = np.arange(8, dtype=np.float32)
    writer.add_value("rng", value, memory.tobytes(), np.arange(4, dtype=np.int16).tobytes())
    catalog = read(tmp_path, writer)
    arrays = read_catalog(LocalStorage(tmp_path), catalog)
    assert [tensor.path for tensor in catalog.tensors] == [("rng", TupleIndex(0), "a"), ("rng", TupleIndex(1))]
    assert arrays["rng.0.a"].tobytes() == np.arange(4, dtype=np.int16).tobytes()
    assert arrays["rng.1"].tobytes() == memory[5:].tobytes()
    assert catalog.values == [(("rng", TupleIndex(0), "b"), [1, 2]), (("rng", TupleIndex(2)), "x")]
    assert len(catalog.checksums) == 2


def test_a_state_dict_that_is_kept_whole_is_read(tmp_path: Path) -> None:
    """With ``DefaultSavePlanner(flatten_state_dict=False)`` a module's is one value; it has `_metadata` on itself."""
    writer = DCPWriter()
    items = pickled({"weight": tensor("float32", (2, 3)), "step": 3}).removeprefix(b"\x80\x02}")[:-1]
    attributes = pickled({"_metadata": {"": {"version": 1}}})[2:-1]
    writer.tensors["model"] = writer.record("BytesStorageMetadata")
    data = np.arange(6, dtype=np.float32).tobytes()
    whole = b"\x80\x02ccollections\nOrderedDict\n)R" + items + attributes + b"b."
    writer.put("model", None, saved(None, data, pickle=whole))
    catalog = read(tmp_path, writer)
    assert [found.path for found in catalog.tensors] == [("model", "weight")]
    assert read_catalog(LocalStorage(tmp_path), catalog)["model.weight"].tobytes() == data
    assert catalog.values == [(("model", "step"), 3)]


def test_parameters_and_strides_of_one_element_are_read(tmp_path: Path) -> None:
    writer = DCPWriter()
    hooks = Call(Global("collections", "OrderedDict"))
    part = tensor("float32", (1, 4), stride=(77, 1))
    writer.put("w", (0, 0), saved(Call(Global("torch._utils", "_rebuild_parameter"), (part, True, hooks)), bytes(16)))
    writer.describe("w", "float32", (1, 4), [((0, 0), (1, 4))])
    assert [len(tensor.pieces) for tensor in read(tmp_path, writer).tensors] == [1]


@pytest.mark.parametrize("count", [1, 2])
def test_files_of_safetensors_are_called_so(count: int, tmp_path: Path) -> None:
    writer = DCPWriter()
    text = b'{"w":{"dtype":"F32","shape":[4,6],"data_offsets":[0,96]}}'
    content = len(text).to_bytes(8, "little") + text + ARRAY.tobytes()
    for i in range(count):  # torch says of each that it is the whole file
        writer.files.clear()
        writer.put(f"w{i}", (0, 0), content)
        writer.describe(f"w{i}", "float32", (4, 6), [((0, 0), (4, 6))])
    with pytest.raises(
        UnsupportedValueError, match=r"^__0_0.distcp is a file of safetensors: .*SAFETENSORS are not read"
    ):
        read(tmp_path, writer)


def test_transposed_tensors_are_read(tmp_path: Path) -> None:
    """Whole ones, chunks, images whose channels lie together, and those in values."""
    image = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    writer = DCPWriter()
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6), stride=(1, 4)), ARRAY.T.tobytes()))
    writer.describe("w", "float32", (4, 6), [((0, 0), (4, 6))])
    for start in (0, 2):
        part = ARRAY[start : start + 2]
        content = saved(tensor("float32", (2, 6), stride=(1, 2)), part.T.tobytes())
        writer.put("c", (start, 0), content, f"__{start}_0.distcp")
    writer.describe("c", "float32", (4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 6))])
    lying = image.transpose(0, 2, 3, 1)
    writer.put("i", (0, 0, 0, 0), saved(tensor("float32", image.shape, stride=(60, 1, 15, 3)), lying.tobytes()))
    writer.describe("i", "float32", image.shape, [((0,) * 4, image.shape)])
    writer.add_value("v", {"t": tensor("float32", (4, 6), stride=(1, 4))}, ARRAY.T.tobytes())
    catalog = read(tmp_path, writer)
    assert catalog.left_out == []
    arrays = {key: array.view(np.float32) for key, array in read_catalog(LocalStorage(tmp_path), catalog).items()}
    assert np.array_equal(arrays["i"], image)
    assert all(np.array_equal(arrays[key], ARRAY) for key in ("w", "c", "v.t"))
    offsets = {tensor.path: tensor.offsets for tensor in catalog.tensors}
    assert offsets == {("w",): [(0, 0)], ("c",): [(0, 0), (2, 0)], ("i",): [(0,) * 4], ("v", "t"): [(0, 0)]}


def test_chunks_and_tensors_without_elements_need_no_bytes(tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.describe("empty", "float32", (0, 3), [((0, 0), (0, 3))])
    writer.add("w", "float32", ARRAY)
    writer.describe("w", "float32", ARRAY.shape, [((0, 0), ARRAY.shape), ((4, 0), (0, 6)), ((4, 0), (0, 6))])
    assert [len(tensor.pieces) for tensor in read(tmp_path, writer).tensors] == [0, 1]


def test_a_part_may_be_missing(tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.add("w", "float32", ARRAY, [np.s_[0:1, :]])
    writer.describe("w", "float32", (4, 6), [((0, 0), (1, 6))])
    (found,) = read(tmp_path, writer).tensors
    assert found.shape == (4, 6)
    assert [piece.box.shape for piece in found.pieces] == [(1, 6)]


def test_little_of_large_tensors_is_read(tmp_path: Path) -> None:
    writer = DCPWriter()
    for i in range(5):
        writer.add(f"w{i}", "float32", np.zeros(1 << 18, np.float32))
    read(tmp_path, writer)
    log: list[tuple[str, int, int]] = []
    storage = CountingStorage(tmp_path, log)
    TorchDCPReader().read(storage, storage.names(), 0)
    assert sum(stop - start for _, start, stop in log) < 128 << 10
    assert len(log) < 5 * 4, "requests of a remote storage"


def test_a_checksum_of_zero_is_none(tmp_path: Path) -> None:
    content = bytearray(saved(tensor("float32", (2,)), bytes(8)))
    for signature, at in ((b"PK\3\4", 14), (b"PK\1\2", 16)):
        start = content.find(signature)
        while start >= 0:
            content[start + at : start + at + 4] = bytes(4)
            start = content.find(signature, start + 4)
    writer = DCPWriter()
    writer.put("w", (0,), bytes(content))
    writer.describe("w", "float32", (2,), [((0,), (2,))])
    assert read(tmp_path, writer).checksums == []


def as_torch_pickles(content: bytes) -> bytes:
    """What ``torch.save`` has of a BytesIO that was read to some place: a pickle of protocol 2."""
    buffer = io.BytesIO(content)
    buffer.read(2)
    return pickle.dumps(buffer, 2)


@pytest.mark.parametrize("content", [b"", b"abc", bytes(range(256)), b"\xff" * 100_000], ids=len)
def test_what_is_in_a_bytes_io_is_read_as_bytes(tmp_path: Path, content: bytes) -> None:
    """As TransformerEngine has the extra state of a layer."""
    writer = DCPWriter()
    writer.tensors["layer._extra_state"] = writer.record("BytesStorageMetadata")
    writer.put("layer._extra_state", None, saved(None, pickle=as_torch_pickles(content)))
    empty = Call(Global("_io", "BytesIO"))
    writer.add_value("v", {"state": [empty, Call(Global("_io", "BytesIO"), (), (b"in a list", 0, None))]})
    catalog = read(tmp_path, writer)
    assert catalog.left_out == []
    assert catalog.values == [(("layer._extra_state",), content), (("v", "state"), [b"", b"in a list"])]


def test_bytes_take_what_they_have_on_the_disk_and_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.readers.budget._FREE", 50_000)
    writer = DCPWriter()
    content = bytes(range(256)) * (1 << 12)
    writer.tensors["v"] = writer.record("BytesStorageMetadata")
    writer.put("v", None, saved(None, pickle=as_torch_pickles(content)))
    assert read(tmp_path, writer).values == [(("v",), content)]


# -- what is not read


def with_gaps(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6), stride=(7, 1), size=28), bytes(28 * 4)))


def expanded(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6), stride=(0, 1), size=6), bytes(6 * 4)))


def conjugate(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6), marks={"conj": True}), ARRAY.tobytes()))


def compressed(writer: DCPWriter) -> None:
    content = saved(tensor("float32", (4, 6)), ARRAY.tobytes(), compression=zipfile.ZIP_DEFLATED)
    writer.put("w", (0, 0), content)


def big_endian(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6)), ARRAY.tobytes(), order=b"big"))


def transformed(writer: DCPWriter) -> None:
    content = saved(tensor("float32", (4, 6)), ARRAY.tobytes())
    writer.put("w", (0, 0), content, transform_descriptors=["zstd"])


def running_code(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(Call(Global("os", "system"), ("touch /tmp/pwned",))))


def sparse(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(Call(Global("torch._utils", "_rebuild_sparse_tensor"), ())))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_gaps, r"'w' is stored with gaps, or expanded \(shape \[4, 6\], strides \[7, 1\]\)"),
        (expanded, r"'w' is stored with gaps, or expanded \(shape \[4, 6\], strides \[0, 1\]\)"),
        (conjugate, "'w' is stored to be changed when it is loaded.*conj"),
        (compressed, "compressed"),
        (big_endian, "byte order"),
        (transformed, "'w' is stored through .'zstd'."),
        (running_code, "'w': .*asks for os.system"),
        (sparse, "'w': .*asks for torch._utils._rebuild_sparse_tensor"),
    ],
)
def test_what_cannot_be_held_is_named(make: Callable[[DCPWriter], None], message: str, tmp_path: Path) -> None:
    writer = DCPWriter()
    make(writer)
    writer.describe("w", "float32", (4, 6), [((0, 0), (4, 6))])
    writer.add_value("other", 5, b"")
    if make in (transformed, compressed, big_endian):  # which files of all kinds may be, and torch writes no such ones
        with pytest.raises(UnsupportedValueError, match=message):
            read(tmp_path, writer)
        return
    catalog = read(tmp_path, writer)
    ((path, reason),) = catalog.left_out
    assert path == ("w",)
    assert re.search(message, reason)
    assert (catalog.tensors, catalog.values) == ([], [(("other",), 5)])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Call(Global("__builtin__", "set"), ([1],)), "'v': .*asks for __builtin__.set"),
        (Global("torch", "float32"), "'v' holds a torch.dtype"),
        (Call(Global("os", "system"), ("x",)), "'v': .*asks for os.system"),
        (Call(Global("_codecs", "encode"), ("x", "rot13")), "'v': .*another encoding"),
        (Call(Global("numpy.core.multiarray", "_reconstruct"), (), (1, (1,), None, False, b"x")), "a numpy array"),
        (Call(Global("_io", "BytesIO"), (), (b"x", 0, {"a": 1})), "a BytesIO of something else"),
        (Call(Global("_io", "BytesIO"), (), ("x", 0, None)), "a BytesIO of something else"),
        (Call(Global("_io", "FileIO"), ("/etc/passwd",)), "'v': .*asks for _io.FileIO"),
        ({(1, 2): tensor("uint8", (1,))}, "'v' has a key above an array that is neither str nor int"),
    ],
)
def test_values_that_are_not_plain_are_named(value: Any, message: str, tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.add_value("v", value, b"x")
    ((path, reason),) = read(tmp_path, writer).left_out
    assert path == ("v",)
    assert re.search(message, reason)


def test_a_metadata_that_runs_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(UnsupportedValueError, match=r".metadata: asks for os.system"):
        read(tmp_path)


# -- what is wrong


def test_places_of_lists_that_would_take_any_memory_are_refused(tmp_path: Path) -> None:
    """A number of a few digits is a list of as many places, of 8 bytes each."""
    writer = DCPWriter(paths={f"k{i}": (f"a{i}", 700_000) for i in range(2)})
    writer.add_value("k0", 1)
    assert len(read(tmp_path, writer).values) == 1
    writer.add_value("k1", 1)
    with pytest.raises(CheckpointCorruptedError, match="lists with far more places than entries"):
        read(tmp_path, writer)


def two_dtypes(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("int32", (4, 6)), ARRAY.tobytes()))


def two_shapes(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (6, 4)), ARRAY.tobytes()))


def no_tensor(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(1))


def small_storage(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6)), ARRAY.tobytes()[:-4]))


def view_past_the_end(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6), offset=1, size=24), ARRAY.tobytes()))


def no_storage(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6), "7"), ARRAY.tobytes()))


def no_zip(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), b"x" * 300)


def no_pickle(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(None, ARRAY.tobytes(), pickle=b"x"))


def other_id(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(Outside(("module", 1, "0", "cpu", 2)), ARRAY.tobytes()))


def damaged_pickle(writer: DCPWriter) -> None:
    content = saved(tensor("float32", (4, 6)), ARRAY.tobytes())
    at = content.index(b"FloatStorage")
    writer.put("w", (0, 0), content[:at] + b"G" + content[at + 1 :])


def strides_of_one_dimension(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6), stride=(1,)), ARRAY.tobytes()))


def marks_without_names(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6), marks={1: True}), ARRAY.tobytes()))


def parameter_of_no_tensor(writer: DCPWriter) -> None:
    hooks = Call(Global("collections", "OrderedDict"))
    writer.put("w", (0, 0), saved(Call(Global("torch._utils", "_rebuild_parameter"), (5, True, hooks))))


def nowhere(writer: DCPWriter) -> None:
    writer.put("w", (1, 0), saved(tensor("float32", (4, 6)), ARRAY.tobytes()))


def outside(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6)), ARRAY.tobytes()), offset=10**6)


def elsewhere(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6)), ARRAY.tobytes()), relative_path="../__0_0.distcp")


def in_a_missing_file(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6)), ARRAY.tobytes()), relative_path="__9_9.distcp")


def with_bytes_of_another(writer: DCPWriter) -> None:
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6)), ARRAY.tobytes()))
    writer.add_value("v", 1)
    writer.put("v", None, b"", offset=100, length=200)


def swapped(writer: DCPWriter) -> None:
    content = saved(tensor("float32", (4, 6)), ARRAY.tobytes(), bytes(ARRAY.nbytes))
    at = content.index(b"PK\1\2")
    names = {b"data/0": b"data/1", b"data/1": b"data/0"}
    writer.put("w", (0, 0), content[:at] + re.sub(b"data/[01]", lambda found: names[found[0]], content[at:]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (two_dtypes, "'w' is not what .metadata says"),
        (two_shapes, "'w' is not what .metadata says"),
        (no_tensor, "'w' is not what .metadata says"),
        (small_storage, "'w' is damaged"),
        (view_past_the_end, "'w' is damaged"),
        (no_storage, "no member 'data/7'"),
        (no_zip, "no zip of torch.save"),
        (no_pickle, "no pickle"),
        (other_id, "no pickle, or a damaged one"),
        (damaged_pickle, "another CRC-32"),
        (strides_of_one_dimension, "a tensor of two numbers of dimensions"),
        (marks_without_names, "marks that are no names"),
        (parameter_of_no_tensor, "a parameter that is no tensor"),
        (nowhere, "'w'.* is in no file"),
        (outside, "the file has"),
        (elsewhere, "no name of a file"),
        (in_a_missing_file, "missing"),
        (with_bytes_of_another, "bytes of __0_0.distcp in common"),
        (swapped, "another member is where 'data/0' should be"),
    ],
)
def test_data_that_do_not_fit_are_refused(make: Callable[[DCPWriter], None], message: str, tmp_path: Path) -> None:
    writer = DCPWriter()
    make(writer)
    writer.describe("w", "float32", (4, 6), [((0, 0), (4, 6))])
    with pytest.raises(CheckpointCorruptedError, match=message):
        read(tmp_path, writer)


@pytest.mark.parametrize(
    ("shape", "chunks", "message"),
    [
        ((3, 6), [((0, 0), (4, 6))], "outside of its shape"),
        ((4, 6), [((0,), (4,))], "is in no file"),
        ((4, 6), [((0, 0), (4,))], "dimensions"),
        ((4, 2**63), [((0, 0), (4, 6))], "cannot be|damaged"),
        ((1,) * 65, [], "no list of at most 64 sizes"),
        ((-1,), [], "damaged"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(shape: Any, chunks: Any, message: str, tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.put("w", (0, 0), saved(tensor("float32", (4, 6)), ARRAY.tobytes()))
    writer.describe("w", "float32", shape, chunks)
    with pytest.raises(CheckpointCorruptedError, match=message):
        read(tmp_path, writer)


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.add("w", "float32", ARRAY, [np.s_[0:3, :], np.s_[2:4, :]])
    with pytest.raises(CheckpointCorruptedError, match="'w' has the parts .* which overlap"):
        read(tmp_path, writer)


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("x",), "b": ("x",)},
        {"a": ("x",), "b": ("x", "y")},
        {"a": ("x", 0), "b": ("x", "y")},
        {"a": ()},
        {"a": 1},
        {"a": (-1,)},
        {"a": (2**70,)},
        {"a": ("x",) * 65},
        {"a": (None,)},
    ],
)
def test_paths_that_cannot_be_are_refused(paths: Any, tmp_path: Path) -> None:
    writer = DCPWriter(paths=paths)
    writer.add_value("a", 1)
    writer.add_value("b", 2)
    with pytest.raises(CheckpointCorruptedError, match=r".metadata|there twice|entries below"):
        read(tmp_path, writer)


JUNK: list[Any] = [None, True, -1, 2**70, 0.5, "", "x", "\ud800", b"", [], {}, (), [[]], (1,), {"x": 1}]
JUNK += [Global("torch", "float32"), Call(Global("torch", "Size"), ((3,),)), tensor("float32", (4, 6))]
JUNK += [Call(Global("torch.distributed.checkpoint.metadata", "Metadata")), Call(Global("torch", "Size"), (3,))]


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """All places in what is to be pickled: what has it, and its key or index there."""
    if isinstance(value, Call):
        inner: Any = [(value, "args"), (value, "state")]
        return inner + places_in(list(value.args)) + places_in(value.state)
    if isinstance(value, dict):
        return [place for key, item in value.items() for place in [(value, key), *places_in(item)]]
    if isinstance(value, list):
        return [place for i, item in enumerate(value) for place in [(value, i), *places_in(item)]]
    return []


def test_whatever_stands_where_something_else_is_due_is_refused_or_harmless(tmp_path: Path) -> None:
    generator = random.Random(0)
    refused = 0
    for _ in range(600):
        writer = DCPWriter(paths={"w": ["w"], "v": ["v", 0]})
        writer.add("w", "float32", ARRAY, [np.s_[0:2, :], np.s_[2:4, :]])
        value = {"a": [1, tensor("uint8", (1,))]}
        writer.tensors["v"] = writer.record("BytesStorageMetadata")
        junk = generator.choice(JUNK)
        roots = [writer.tensors, list(writer.ranges.values()), list(writer.ranges), writer.paths, value]
        target, key = generator.choice(places_in(generator.choice(roots)))
        if not isinstance(target, Call):
            target[key] = junk
        elif key == "args":
            target.args = junk if isinstance(junk, tuple) else (junk,)
        else:
            target.state = junk
        writer.put("v", None, saved(value, b"x"))
        try:
            read(tmp_path, writer)
        except (CheckpointCorruptedError, UnsupportedValueError):
            refused += 1
    assert refused > 300


# -- bombs


def many_chunks(writer: DCPWriter) -> None:
    writer.describe("w", "float32", (1,), [((0,), (0,))])
    chunks = writer.tensors["w"].state["chunks"] * 5_000
    writer.tensors["w"].state["chunks"] = chunks
    writer.tensors |= {f"w{i}": writer.tensors["w"] for i in range(2000)}


def long_paths(writer: DCPWriter) -> None:
    path = ("x" * 60_000,)
    writer.paths = {}
    for i in range(3000):
        writer.paths[f"v{i}"] = path
        writer.describe(f"v{i}", "float32", (0,), [])


def shared_lists(writer: DCPWriter) -> None:
    value: Any = []
    for _ in range(40):
        value = [value, value]
    for i in range(50):
        writer.add_value(f"v{i}", value)


def deep_lists(writer: DCPWriter) -> None:
    value: Any = []
    for _ in range(200):
        value = [value]
    writer.add_value("v", value)


def cyclic_lists(writer: DCPWriter) -> None:
    writer.tensors["v"] = writer.record("BytesStorageMetadata")
    writer.put("v", None, saved(None, pickle=b"\x80\x02]q\x00h\x00a."))


def shared_numbers(writer: DCPWriter) -> None:
    """That are none, and so objects in JSON."""
    nan = b"G" + struct.pack(">d", math.nan) + b"q\1"
    writer.tensors["v"] = writer.record("BytesStorageMetadata")
    writer.put("v", None, saved(None, pickle=b"\x80\x02](" + nan + b"h\1" * 400_000 + b"e."))


def shared_tensors(writer: DCPWriter) -> None:
    parts = [tensor("uint8", (1,))] * 20_000
    writer.add_value("v", {"x" * 60_000: parts}, b"x")


def test_many_that_cannot_be_held_take_little_time_and_memory(tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.describe("w", "complex32", (1,), [((0,), (1,))])
    writer.tensors = dict.fromkeys(map(str, range(100_000)), writer.tensors["w"])
    (tmp_path / ".metadata").write_bytes(writer.metadata)
    (taken,) = measured([tmp_path])
    assert taken["error"] is None or "more time and memory" in taken["error"]
    assert taken["memory"] < 64 << 20
    assert taken["seconds"] < 2 * slowness()  # one, on a machine that has nothing else to do


@pytest.mark.parametrize(
    "make", [many_chunks, long_paths, shared_lists, deep_lists, cyclic_lists, shared_numbers, shared_tensors]
)
def test_bombs_are_refused_soon_and_with_little_memory(make: Callable[[DCPWriter], None], tmp_path: Path) -> None:
    writer = DCPWriter()
    make(writer)
    files = writer.all_files
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    storage = LocalStorage(tmp_path)

    def read_it(names: list[str]) -> None:
        assert TorchDCPReader().read(storage, names, 0).left_out

    cost = cost_of(read_it, [], list(files))
    assert problem_of(cost, sum(map(len, files.values()))) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"little", b"bittle", "another CRC-32 than was written"),
        (b"PK\3\4\x14\0\0\0\0\0", b"PK\3\4\x14\0\0\0\x08\0", "is compressed, and not as its directory says"),
    ],
)
def test_what_torch_never_writes_into_a_zip_is_damage(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    """And no reason to leave a key out, which a load of all there is would not miss."""
    content = saved(tensor("float32", (4, 6)), ARRAY.tobytes())
    assert old in content
    writer = DCPWriter()
    writer.put("w", (0, 0), content.replace(old, new))
    writer.describe("w", "float32", (4, 6), [((0, 0), (4, 6))])
    with pytest.raises(CheckpointCorruptedError, match=message):
        read(tmp_path, writer)


@pytest.fixture
def large_zip(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A zip that says sizes and places as those of more than 4 GiB have to be said."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 0)
    content = saved(tensor("float32", (4, 6)), ARRAY.tobytes())
    assert content.count(b"PK\6\6") == content.count(b"PK\6\7") == 1
    return content


def read_one(content: bytes, path: Path) -> Catalog:
    """A checkpoint of one tensor in this zip."""
    writer = DCPWriter()
    writer.put("w", (0, 0), content)
    writer.describe("w", "float32", (4, 6), [((0, 0), (4, 6))])
    return read(path, writer)


def test_zips_with_members_of_more_than_4_gib_are_read(large_zip: bytes, tmp_path: Path) -> None:
    catalog = read_one(large_zip, tmp_path)
    assert np.array_equal(read_catalog(LocalStorage(tmp_path), catalog)["w"].view(np.float32), ARRAY)


@pytest.mark.parametrize(
    ("record", "old", "new", "message"),
    [
        (b"PK\1\2", b"\1\0\x18\0", b"\2\0\x18\0", "a size is missing in its directory"),
        (b"PK\6\6", b"PK\6\6", b"PK\6\0", "its end is not where it says"),
        (b"PK\6\7", b"\1\0\0\0PK", b"\2\0\0\0PK", "it is divided"),
        (b"PK\5\6", b"\0\0\0\0", b"\0\0\1\0", "it does not end like one"),
    ],
)
def test_large_zips_that_are_damaged_are_refused(
    record: bytes, old: bytes, new: bytes, message: str, large_zip: bytes, tmp_path: Path
) -> None:
    at = large_zip.index(record)
    assert large_zip.count(old, at) >= 1
    with pytest.raises(CheckpointCorruptedError, match=message):
        read_one(large_zip[:at] + large_zip[at:].replace(old, new), tmp_path)


def test_an_error_in_a_directory_of_a_zip_is_refused(tmp_path: Path) -> None:
    """Every byte of a zip may be wrong; those of tensors' data and of what nobody reads do not matter."""
    content = saved(tensor("uint8", (4,)), b"data")
    reasons = set()
    for at in range(len(content)):
        for value in (0xFF, content[at] ^ 1):
            writer = DCPWriter()
            writer.put("w", (0,), content[:at] + bytes([value]) + content[at + 1 :])
            writer.describe("w", "uint8", (4,), [((0,), (4,))])
            try:
                catalog = read(tmp_path, writer)
            except (CheckpointCorruptedError, UnsupportedValueError) as error:
                reasons.add(type(error))
                continue
            if catalog.left_out:
                reasons.add(UnsupportedValueError)
            else:
                data = read_catalog(LocalStorage(tmp_path), catalog)["w"].tobytes()
                (checksum,) = catalog.checksums or [None]
                assert data == b"data" or checksum is None or zlib.crc32(data) != checksum.crc32
    assert reasons == {CheckpointCorruptedError, UnsupportedValueError}
