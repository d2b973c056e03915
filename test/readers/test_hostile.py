"""Checkpoints that were made to do harm: what is small takes little, whatever it says, and is refused by name."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import re
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    CheckpointNotFoundError,
    LoadOptions,
    StateDictMismatchError,
    UnsupportedValueError,
    export,
    list_checkpoints,
    read_metadata,
)
from paddle_dist_ckpt.core.layouts import shared_layouts
from test.jobs import load_whole, try_load
from test.one_hash import colliding
from test.pace import check_all_depths, slowness
from test.readers.golden import GOLDEN
from test.readers.torch_writer import DCP, Call, DCPWriter, Global, pickled, saved, tensor
from test.strategies import some
from test.torture.budgets import bytes_on_disk, cost_of
from test.torture.hostile_files import problem_of

_START = b"\x80\x04"
_MIB = 1 << 20
REFUSED = (CheckpointCorruptedError, UnsupportedValueError, CheckpointNotFoundError)


def text(value: str) -> bytes:
    """A text as an instruction."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """An integer as an instruction."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def get(place: int) -> bytes:
    """What is in the memo, as an instruction."""
    return b"j" + struct.pack("<I", place)


def shared_dicts(levels: int) -> bytes:
    """Dicts, each of which has the next one twice."""
    parts = [b"N\x940"]
    parts += [b"}(" + text("a") + get(i) + text("b") + get(i) + b"u\x940" for i in range(levels)]
    return b"".join(parts)[:-1]


def behind_a_tensor(rest: bytes) -> Callable[[Path], None]:
    """A file with a gigabyte that is skipped, and then this."""

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(_START + b"\x8e" + struct.pack("<Q", 1 << 30))
            file.seek(1 << 30, os.SEEK_CUR)
            file.write(b"0" + rest + b".")

    return write


def in_holes(operation: bytes, nbytes: int, count: int) -> Callable[[Path], None]:
    """A file with a list of byte strings or texts, all but their lengths in holes."""

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(_START + b"}" + text("v") + b"](")
            for _ in range(count):
                file.write(operation + struct.pack("<I", nbytes))
                file.seek(nbytes, os.SEEK_CUR)
            file.write(b"es.")

    return write


def far_place(path: Path) -> None:
    """A file of texts, and the place in the memo that is as far away as there are bytes before it."""
    filler = (text("a" * 65_000) + b"0") * 600
    path.write_bytes(_START + filler + b"}r" + struct.pack("<I", len(filler)) + b".")


_TUPLE = b"cbuiltins\ntuple\n\x940"
PICKLES: dict[str, tuple[bytes | Callable[[Path], None], str]] = {
    "a place in the memo far away": (behind_a_tensor(b"}r" + struct.pack("<I", 1 << 29)), "in the memo"),
    "a place in the memo as far away as its size": (far_place, "has room for"),
    "long byte strings in holes": (in_holes(b"B", 15 << 20, 20), "larger than the file"),
    "long texts in holes": (in_holes(b"X", 15 << 20, 20), "larger than the file"),
    "texts in holes": (in_holes(b"X", 65_000, 4000), "has room for"),
    "other characters": (_START + b"](" + (b"\x8c\xfc\xf0\x9f\x98\x80" + b"a" * 248) * 100_000 + b"e.", "has room for"),
    "copies of what is as long as it": (
        _START
        + _TUPLE
        + b"]("
        + b"N" * 4000
        + b"e\x940"
        + (text("a" * 65_000) + b"0") * 450
        + b"]("
        + (get(0) + get(1) + b"\x85R") * 7000
        + b"e.",
        "has room for",
    ),
    "tuples of more numbers than may be": (
        _START + b"}" + text("v") + b"}(" + number(1) + number(2) + number(3) + b"\x87Nus.",
        "a key of more than 2 numbers",
    ),
    "copies": (
        behind_a_tensor(
            b"](" + b"N" * 60_000 + b"e\x940" + _TUPLE + b"(" + (get(1) + get(0) + b"\x85R") * 1000 + b"1}"
        ),
        "copies more",
    ),
    "tuples in tuples": (_START + b")" + b"\x85" * _MIB + b"0}.", "has room for"),
    "dicts that share": (_START + shared_dicts(60) + b".", "has room for"),
    "dicts that share, behind a tensor": (behind_a_tensor(shared_dicts(60)), "has room for"),
    "a text in many places": (
        _START + text("x" * 65_000) + b"\x940}" + text("v") + b"](" + get(0) * 30_000 + b"es.",
        "has room for",
    ),
    "an integer in many places": (
        _START + b"\x8a\xff" + b"\x11" * 255 + b"\x940}" + text("v") + b"](" + get(0) * 60_000 + b"es.",
        "has room for",
    ),
    "a long key above many": (
        _START
        + b"}"
        + text("p" * 3900)
        + b"}("
        + b"".join(b"M" + struct.pack("<H", i) + b"N" for i in range(60_000))
        + b"us.",
        "has room for",
    ),
    "keys of one hash": (
        _START
        + b"}"
        + text("v")
        + b"}("
        + b"".join(number(x) + number(y) + b"\x86N" for x, y in colliding(9000))
        + b"us.",
        "a key that is int",
    ),
    "a name that repeats itself": (
        _START
        + b"}("
        + text("UnpackBigParamInfor@@")
        + b"}"
        + text("k")
        + b"}("
        + text("OriginShape")
        + b"K\x01\x85"
        + text("slices")
        + b"]"
        + text("a")
        + b"2\x86" * 50
        + b"ausu.",
        "lacks its slice",
    ),
}


def costs_little(folder: Path, message: str) -> None:
    """Assert that a folder is refused, in little time and memory."""
    cost = cost_of(read_metadata, folder / "nothing", folder)
    assert problem_of(cost, bytes_on_disk(folder)) is None
    assert {kind.__name__ for kind in REFUSED} & set(cost.kinds), cost
    assert re.search(message, cost.outcome), cost
    assert len(cost.outcome) < 4096


@pytest.mark.parametrize("name", some(PICKLES, 6))
def test_a_pickle_that_asks_for_much(name: str, tmp_path: Path) -> None:
    content, message = PICKLES[name]
    if isinstance(content, bytes):
        (tmp_path / "a.pdparams").write_bytes(content)
    else:
        content(tmp_path / "a.pdparams")
    costs_little(tmp_path, message)


def test_tuples_that_share_take_as_long_at_all_depths_of_the_caller(tmp_path: Path) -> None:
    tuples = b"N\x940" + b"".join(2 * get(i) + b"\x86\x940" for i in range(12))
    (tmp_path / "a.pdparams").write_bytes(_START + tuples + b"}" + text("v") + get(12) + b"s.")
    check_all_depths(lambda: read_metadata(tmp_path))


def test_paths_of_one_hash_are_read_soon(tmp_path: Path) -> None:
    entries = b"".join(number(x) + b"}" + number(y) + b"Ns" for x, y in colliding(9000))
    (tmp_path / "a.pdparams").write_bytes(_START + b"}(" + entries + b"u.")
    start = time.process_time()
    assert len(read_metadata(tmp_path).values) == 9000
    assert time.process_time() - start < 2 * slowness()


def test_values_of_a_static_program_of_one_hash_are_read_soon(tmp_path: Path) -> None:
    entries = b"".join(number(x) + b"}" + number(y) + b"Ns" for x, y in colliding(9000))
    (tmp_path / "a_dist0.pdparams").write_bytes(_START + b"}(" + entries + b"u.")
    (tmp_path / "a_dist0.pdattr").write_bytes(pickle.dumps({}, 4))
    start = time.process_time()
    assert len(read_metadata(tmp_path).values) == 9000
    assert time.process_time() - start < 2 * slowness()


def ranks_of_one_hash(doublings: int) -> list[list[int]]:
    """Lists of different ranks whose tuples have one hash: for each three ranks there are two choices, after which it
    is the same. Of many beginnings two are so close that the third rank makes up for what they differ by."""
    mask, first, second, hashed = 2**64 - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse, rng, found = pow(second, -1, 1 << 64), np.random.default_rng(1), [list[int]()]

    def after(so_far: Any, ranks: Any) -> Any:
        lane = so_far + ranks * np.uint64(second)
        return ((lane << np.uint64(31)) | (lane >> np.uint64(33))) * np.uint64(first)

    for stage in range(doublings):
        pairs = rng.integers(0, 1 << 24, (2, 1 << 19), np.uint64) + np.array(
            [[2 * stage], [2 * stage + 1]], np.uint64
        ) * (1 << 24)
        ends = after(after(np.full(1, hashed, np.uint64), pairs[0]), pairs[1]) * np.uint64(inverse)
        order = np.argsort(ends)
        gaps = np.diff(ends[order])
        closest = int(gaps.argmin())
        low, high = pairs[:, order[closest]].tolist(), pairs[:, order[closest + 1]].tolist()
        third = (1 << 30) + stage
        choices = [[*low, third + int(gaps[closest])], [*high, third]]
        for rank in choices[0]:
            lane = (hashed + rank * second) & mask
            hashed = (lane << 31 | lane >> 33) * first & mask
        found = [[*ranks, *choice] for ranks in found for choice in choices]
    assert len(set(map(hash, map(tuple, found)))) == 1
    return found


def test_groups_of_ranks_of_one_hash_are_read_soon(tmp_path: Path) -> None:
    groups = ranks_of_one_hash(13)
    told = {
        f"{i:05}": {"process_shape": [len(ranks)], "process_group": ranks, "dims_mapping": [-1]}
        for i, ranks in enumerate(groups)
    }
    (tmp_path / "a_dist0.pdattr").write_bytes(pickle.dumps(told, 4))
    (tmp_path / "a_dist0.pdparams").write_bytes(pickle.dumps({"00000": np.zeros(2, np.float32)}, 4))
    start = time.process_time()
    assert read_metadata(tmp_path).table.paths == ["/00000"]
    assert time.process_time() - start < 2 * slowness()


def test_layouts_of_one_hash_are_told_apart_soon() -> None:
    shapes = colliding(9000)
    start = time.process_time()
    layouts, layout_of = shared_layouts((shape, ()) for shape in [*shapes, *shapes])
    assert time.process_time() - start < 2 * slowness()
    assert [layout.shape for layout in layouts] == shapes
    assert layout_of.tolist() == [*range(9000), *range(9000)]


def write_all(folder: Path, files: dict[str, bytes]) -> None:
    """Write files."""
    for name, content in files.items():
        (folder / name).write_bytes(content)


def repeated(times: int) -> Any:
    """A small value with a very long text."""
    value: Any = ("a", "b")
    for _ in range(times):
        value = (value, value)
    return value


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"relative_path": repeated(40)}, "no name of a file"),
        ({"transform_descriptors": repeated(40)}, "is stored through"),
    ],
)
def test_what_torch_is_told_is_shown_in_short(told: dict[str, Any], message: str, tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.describe("a", "float32", (1,), [((0,), (1,))])
    writer.put("a", (0,), saved(tensor("float32", (1,)), b"1234"), **told)
    write_all(tmp_path, writer.all_files)
    costs_little(tmp_path, message)


def test_a_text_in_many_places_of_a_value_of_torch(tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.tensors["v"] = writer.record("BytesStorageMetadata")
    pickle_of_list = b"\x80\x02]" + text("y" * 60_000) + b"q\x01a(" + b"h\x01" * 60_000 + b"e."
    writer.put("v", None, saved(None, pickle=pickle_of_list))
    write_all(tmp_path, writer.all_files)
    costs_little(tmp_path, "has room for")


@pytest.mark.parametrize("crc32", [0, 1])
def test_a_pickle_of_torch_that_is_a_hole(crc32: int, tmp_path: Path) -> None:
    """Its CRC-32, if it has one, would take minutes."""
    writer, name = DCPWriter(), b"archive/data.pkl"
    writer.tensors["a"] = writer.record("BytesStorageMetadata")
    content = pickled({"x": 1})
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0, 0, 0, 0, crc32, 0xFFFFFFFF, 0xFFFFFFFF, len(name), 0) + name
    nbytes = 64 << 30
    extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes)
    entry = struct.pack(
        "<4s6H3L5H2L", b"PK\1\2", 45, 45, 0, 0, 0, 0, crc32, *[0xFFFFFFFF] * 2, len(name), len(extra), 0, 0, 0, 0, 0
    )
    entry += name + extra
    at = len(local) + nbytes
    tail = entry + struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(entry), at)
    tail += struct.pack("<4sLQL", b"PK\6\7", 0, at + len(entry), 1)
    tail += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    writer.put("a", None, b"")
    for stored in writer.ranges.values():
        stored.state["length"] = at + len(tail)
    (tmp_path / ".metadata").write_bytes(writer.metadata)
    with (tmp_path / "__0_0.distcp").open("wb") as file:
        file.write(local + content)
        file.seek(at)
        file.write(tail)
    if crc32:
        costs_little(tmp_path, "has room for")
    else:
        cost = cost_of(lambda folder: len(read_metadata(folder).values), tmp_path / "nothing", tmp_path)
        assert cost.outcome == "1"
        assert problem_of(cost, bytes_on_disk(tmp_path)) is None


def test_many_pickles_of_torch_that_end_in_holes(tmp_path: Path) -> None:
    writer = DCPWriter()
    content = saved(None, pickle=pickled({"x": 1}) + bytes(16 << 20))
    head, tail = content[:4096], content[-4096:]
    for i in range(150):
        writer.tensors[f"{i}"] = writer.record("BytesStorageMetadata")
        writer.put(f"{i}", None, b"")
    with (tmp_path / "__0_0.distcp").open("wb") as file:
        for stored in writer.ranges.values():
            stored.state |= {"offset": file.tell(), "length": len(content)}
            file.write(head)
            file.seek(len(content) - len(head) - len(tail), os.SEEK_CUR)
            file.write(tail)
    (tmp_path / ".metadata").write_bytes(writer.metadata)
    costs_little(tmp_path, "has room for")


def test_chunks_of_one_hash(tmp_path: Path) -> None:
    writer, offsets = DCPWriter(), colliding(3000)
    writer.describe("a", "float32", (1 << 10, 1 << 37), [(offset, (1, 1)) for offset in offsets])
    for offset in offsets:
        size = Call(Global("torch", "Size"), (offset,))
        info = {"relative_path": "__0_0.distcp", "offset": 0, "length": 1}
        index = writer.record("MetadataIndex", fqn="a", index=0, offset=size)
        writer.ranges[index] = Call(Global(f"{DCP}.filesystem", "_StorageInfo"), (), info)
    write_all(tmp_path, {"__0_0.distcp": b"x", **writer.all_files})
    costs_little(tmp_path, "in common")


@pytest.mark.parametrize(
    "case", some(["one chunk again and again", "one tensor of many keys", "one path of many keys"], 2)
)
def test_records_of_torch_are_counted(case: str, tmp_path: Path) -> None:
    writer = DCPWriter()
    if case == "one chunk again and again":
        writer.describe("w", "float32", (4,), [((1 << 55,) * 64, (1 << 55,) * 64)])
        writer.tensors["w"].state["chunks"] *= 30_000
    elif case == "one tensor of many keys":
        writer.describe("w", "float32", (0,), [])
        writer.tensors = {str(i): writer.tensors["w"] for i in range(70_000)}
    else:
        for i in range(9000):
            writer.describe(str(i), "float32", (0,), [])
        path = (99_999_999,) * 64
        writer.paths = dict.fromkeys(writer.tensors, path)
    write_all(tmp_path, {"__0_0.distcp": b"x", **writer.all_files})
    costs_little(tmp_path, "has room for")


def test_members_of_a_zip_that_overlap(tmp_path: Path) -> None:
    writer = DCPWriter()
    writer.describe("a", "uint8", (100,), [((0,), (100,))])
    content = bytearray(saved(tensor("uint8", (100,)), bytes(100)))
    entry = content.index(b"PK\1\2", content.index(b"archive/data/0", content.index(b"PK\1\2")) - 46)
    struct.pack_into("<2L", content, entry + 20, 120, 120)  # and so reaches into the member behind it
    writer.put("a", (0,), bytes(content))
    write_all(tmp_path, writer.all_files)
    costs_little(tmp_path, "not where its directory says")


def test_one_array_in_two_parts_of_a_tensor(tmp_path: Path) -> None:
    module = "paddle.distributed.checkpoint.metadata"

    def record(kind: str, **fields: Any) -> Call:
        return Call(Global(module, kind), (), fields)

    shards = [record("LocalTensorMetadata", global_offset=(i,), local_shape=(1,), dtype="float32") for i in range(2)]
    places = {record("LocalTensorIndex", tensor_key="w", global_offset=(i,)): "0_0.distcp" for i in range(2)}
    metadata = record("Metadata", state_dict_metadata={"w": shards}, storage_metadata=places, flat_mapping=None)
    (tmp_path / "0.metadata").write_bytes(pickled(metadata))
    (tmp_path / "0_0.distcp").write_bytes(pickle.dumps({"w": np.zeros(1, np.float32)}, 4))
    costs_little(tmp_path, "0.metadata: 'w' has one place in two parts of it, in '0_0.distcp'")


def paddle_shard(dimensions: int) -> Call:
    """What Paddle's metadata say of a shard."""
    place = (1 << 50,) * dimensions
    fields = {"global_offset": place, "local_shape": place, "dtype": "float32"}
    return Call(Global("paddle.distributed.checkpoint.metadata", "LocalTensorMetadata"), (), fields)


@pytest.mark.parametrize(
    "case", some(["one shard again and again", "one shard of many keys", "shards of many dimensions"], 2)
)
def test_shards_of_paddle_are_counted(case: str, tmp_path: Path) -> None:
    shards: dict[str, list[Call]]
    if case == "one shard again and again":
        shards = {"w": [paddle_shard(32)] * 30_000}
    elif case == "one shard of many keys":
        same = [paddle_shard(1)]
        shards = {str(i): same for i in range(60_000)}
    else:
        first = paddle_shard(32)
        others = [Call(first.function, (), dict(first.state)) for _ in range(13_000)]
        shards = {str(i): [shard] for i, shard in enumerate(others)}
    told = {"state_dict_metadata": shards, "storage_metadata": {}, "flat_mapping": None}
    metadata = Call(Global("paddle.distributed.checkpoint.metadata", "Metadata"), (), told)
    (tmp_path / "0.metadata").write_bytes(pickled(metadata))
    (tmp_path / "0_0.distcp").write_bytes(pickle.dumps({}, 4))
    costs_little(tmp_path, "what has been read so far .* has room for")


@pytest.mark.parametrize("shared", [True, False])
def test_variables_of_many_dimensions_are_counted(shared: bool, tmp_path: Path) -> None:
    lists = b"](" + b"K\x01" * 32 + b"e\x940](K\x00e\x940](" + b")" * 32 + b"e\x940"
    fields = ("process_shape", "process_group", "dims_mapping")
    told = b"}(" + b"".join(text(name) + get(place) for place, name in enumerate(fields)) + b"u"
    names = [b"\x8c\x05%05x" % i for i in range(160_000 if shared else 20_000)]
    variables = b"".join(name + (get(3) if shared else told) for name in names)
    (tmp_path / "m_dist0.pdattr").write_bytes(_START + lists + told + b"\x940}(" + variables + b"u.")
    (tmp_path / "m_dist0.pdparams").write_bytes(pickle.dumps({"w": np.zeros(3, np.float32)}, 4))
    if shared:
        cost = cost_of(read_metadata, tmp_path / "nothing", tmp_path)
        assert problem_of(cost, bytes_on_disk(tmp_path)) is None
    else:
        costs_little(tmp_path, "has room for")


def test_flattened_shards_of_many_dimensions_are_counted(tmp_path: Path) -> None:
    module = "paddle.distributed.flex_checkpoint.dcp.metadata"
    shape, array = (2,) * 17, np.zeros(2**17 - 2, np.uint8)  # but for two elements, in 32 boxes
    told = {
        "global_offset": (0,) * 17,
        "local_shape": shape,
        "is_flattened": True,
        "flattened_range": (1, 2**17 - 1),
    }
    shard = {**told, "dtype": "uint8", "global_shape": shape}
    keys = [f"{i:03d}" for i in range(350)]
    shards = {key: [Call(Global(module, "LocalTensorMetadata"), (), shard)] for key in keys}
    places = {Call(Global(module, "LocalTensorIndex"), (), {**told, "tensor_key": key}): "0_0.distcp" for key in keys}
    fields = {"state_dict_metadata": shards, "storage_metadata": places, "flat_mapping": None}
    (tmp_path / "0.metadata").write_bytes(pickled(Call(Global(module, "Metadata"), (), fields)))
    (tmp_path / "0_0.distcp").write_bytes(pickle.dumps(dict.fromkeys(keys, array), 4))
    costs_little(tmp_path, "has room for")


@pytest.mark.parametrize("shape", [(1,) * 8 + (2,) * 24, (2,) * 64])
def test_slices_of_a_tensor_of_many_dimensions_are_counted(shape: tuple[int, ...], tmp_path: Path) -> None:
    slices = {f"{i:05x}": np.zeros(15, np.uint8) for i in range(20_000)}
    told = {"w": {"OriginShape": shape, "slices": list(slices)}}
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps({"UnpackBigParamInfor@@": told, **slices}, 4))
    costs_little(tmp_path, "has room for")


LARGE = b",".join([b"%d" % (1 << 60)] * 2_000_000)


def header_of(keys: Iterable[str], shape: bytes = b"0", metadata: bytes = b"{}") -> bytes:
    """The header of a safetensors file with a tensor of this shape and of no bytes under each key."""
    tensor_of = b'{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[0,0]}'
    return b'{"__metadata__":' + metadata + b"".join(b',"%s":%s' % (key.encode(), tensor_of) for key in keys) + b"}"


HEADERS: dict[str, Callable[[], bytes]] = {
    "a shape of large numbers": lambda: header_of(["a"], LARGE),
    "a shape of small numbers": lambda: header_of(["a"], b",".join([b"257"] * 1_900_000)),
    "a beginning of large numbers": lambda: header_of(
        ["a"], metadata=b'{"DCP_SHARDING_INFO":"{\\"a\\":{\\"saved_offsets\\":[' + LARGE + b']}}"}'
    ),
    "long keys": lambda: header_of(f"{i:06}" + "k" * 3900 for i in range(24_000)),
    "long keys with a wide character each": lambda: header_of(f"\U0001f600{i:06}" + "k" * 3900 for i in range(5000)),
}


def write_header(folder: Path, text: bytes) -> None:
    """A safetensors file of this header alone."""
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_safetensors_are_counted_by_their_length(name: str, tmp_path: Path) -> None:
    write_header(tmp_path, HEADERS[name]())
    costs_little(tmp_path, "has room for")


SHAPES: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "alike": lambda: [(1,)] * 27_000,
    "each of another shape": lambda: [(0, i + 1) for i in range(17_000)],
    "each of another shape of many dimensions": lambda: [
        tuple(2 if d in ones else 1 for d in range(32)) for ones in itertools.combinations(range(32), 3)
    ],
}


def write_tensors(folder: Path, shapes: Iterable[tuple[int, ...]]) -> None:
    """A safetensors file of tensors of bytes of these shapes."""
    header, end = {}, 0
    for i, shape in enumerate(shapes):
        begin, end = end, end + math.prod(shape)
        header[f"w{i}"] = {"dtype": "U8", "shape": shape, "data_offsets": [begin, end]}
    folder.mkdir()
    write_header(folder, json.dumps(header).encode())
    with (folder / "a.safetensors").open("ab") as file:
        file.write(bytes(end))


def _converted(folder: Path) -> int:
    out = folder.with_name(f"{folder.name}-converted")
    export(folder, out, "native")
    return len(read_metadata(out).table.paths)


@pytest.mark.parametrize("read", [lambda folder: len(load_whole(folder)), _converted], ids=["loaded", "converted"])
@pytest.mark.parametrize("name", SHAPES)
def test_nearly_as_many_tiny_tensors_as_are_read_keep_the_budget(
    name: str, read: Callable[[Path], int], tmp_path: Path
) -> None:
    shapes = SHAPES[name]()
    write_tensors(tmp_path / "few", [(1,), (2,)])
    write_tensors(tmp_path / "many", shapes)
    cost = cost_of(read, tmp_path / "few", tmp_path / "many")
    assert cost.outcome == str(len(shapes))
    assert problem_of(cost, bytes_on_disk(tmp_path / "many")) is None


@pytest.mark.parametrize("name", SHAPES)
def test_twice_as_many_tiny_tensors_are_refused(name: str, tmp_path: Path) -> None:
    shapes = SHAPES[name]()
    write_tensors(tmp_path / "many", 2 * shapes)
    with pytest.raises(CheckpointCorruptedError, match="has room for"):
        read_metadata(tmp_path / "many")


@pytest.mark.parametrize("sign", ["w", "\u00fc", "\u6743", "\U0001f600"])
def test_headers_of_many_short_keys_are_read(sign: str, tmp_path: Path) -> None:
    write_header(tmp_path, header_of(f"layers.{i}.{sign * 10}" for i in range(12_000)))
    assert len(read_metadata(tmp_path).table.paths) == 12_000


LONGER = {"slashes": "/" * 500, "tildes": "~" * 500, "dots and a backslash": "." * 250 + r"\\"}


@pytest.mark.parametrize("count", [10_000, 24_000])
@pytest.mark.parametrize("name", LONGER)
def test_keys_that_are_longer_in_paths_and_flat_keys_keep_the_budget(name: str, count: int, tmp_path: Path) -> None:
    for folder, number in (("few", 2), ("many", count)):
        (tmp_path / folder).mkdir()
        write_header(tmp_path / folder, header_of(f"{i}{LONGER[name]}" for i in range(number)))
    cost = cost_of(lambda folder: len(load_whole(folder)), tmp_path / "few", tmp_path / "many")
    assert problem_of(cost, bytes_on_disk(tmp_path / "many")) is None
    assert cost.outcome == str(count) if count == 10_000 else "has room for" in cost.outcome


def test_names_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.pdparams")).write_bytes(pickle.dumps({"a": 1}, 4))
    costs_little(tmp_path, r"its file \\udcff.pdparams")
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps({"a": 1}, 4))
    assert read_metadata(tmp_path).values == {"a": 1}
    array = np.zeros(1, np.float32)
    named = {"a": array, "StructuredToParameterName@@": {"a": "\ud800"}}
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps(named, 4))
    costs_little(tmp_path, "variable's name that is no text")


@pytest.mark.parametrize("folder", ["paddle-3.3.1", "hf-safetensors", "torch-dcp-2.13", "static-3.3.1", "native-1.0"])
@pytest.mark.parametrize("kind", ["fifo", "endless"])
def test_what_is_no_file_is_not_waited_for(kind: str, folder: str, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in (GOLDEN / folder).iterdir()}
    write_all(tmp_path, files)
    for name in sorted(files)[:3]:
        if name in ("expected.npz", "rank_mapping.csv"):
            continue
        (tmp_path / name).unlink()
        if kind == "fifo":
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).symlink_to("/dev/zero")
        state = {"w": np.zeros(2, np.float32)}
        list_checkpoints(tmp_path)
        for error in try_load([dict(state), dict(state)], tmp_path, options=LoadOptions(timeout=30)):
            assert isinstance(error, (*REFUSED, StateDictMismatchError))
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(files[name])
