"""Data files: any safetensors reader opens them; damaged or foreign ones are refused."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import DTYPES, DType, arithmetic_dtype
from paddle_dist_ckpt.core.shards import ShardTable
from paddle_dist_ckpt.errors import CheckpointCorruptedError, UnsupportedValueError
from paddle_dist_ckpt.files.datafile import (
    DataFileInfo,
    EntryKind,
    FileLayout,
    FileTable,
    Hashes,
    escaped_key,
    header_digest,
    read_header,
    read_info,
    slice_suffix,
    split_in_parts,
)
from paddle_dist_ckpt.files.holes import HoleBudget
from paddle_dist_ckpt.files.metadata import FileInfo
from paddle_dist_ckpt.files.room import Room
from paddle_dist_ckpt.files.runs import open_data_file
from paddle_dist_ckpt.files.tables import table_to_record
from paddle_dist_ckpt.storage import LocalStorage
from test.pace import slowness
from test.strategies import boxes_in, examples, shapes

BLOCK = 4096
NONE = np.zeros(0, np.int64)
EMPTY = table_to_record(ShardTable([], [], NONE, [], NONE, NONE, []))
INFO = DataFileInfo(
    format="paddle_dist_ckpt.data",
    version=(1, 0),
    save_id="0123456789abcdef",
    unique_id=3,
    world_size=2,
    rank=1,
    part=0,
    parts=1,
    block_bytes=BLOCK,
    created="2024-01-02T03:04:05+00:00",
    library="paddle_dist_ckpt 1.0",
    paddle_version=None,
    tensors=EMPTY,
    values=[("/lr", msgspec.Raw(b"0.5")), ('/quote"\u00e9', msgspec.Raw(b'{"bytes":"AA=="}'))],
)


@dataclass(frozen=True)
class Entry:
    """An entry with its data."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    array: np.ndarray

    @property
    def nbytes(self) -> int:
        return EntryKind(self.dtype, self.shape).nbytes


def table_of(entries: Sequence[Entry], block_bytes: int = BLOCK) -> FileTable:
    kinds = list(dict.fromkeys(EntryKind(entry.dtype, entry.shape) for entry in entries))
    kind = [kinds.index(EntryKind(entry.dtype, entry.shape)) for entry in entries]
    return FileTable([entry.name for entry in entries], kinds, np.array(kind, np.int64), block_bytes)


def layout_of(entries: Sequence[Entry], info: DataFileInfo) -> FileLayout:
    return FileLayout(table_of(entries, info.block_bytes), info)


def starts_of(layout: FileLayout) -> list[int]:
    """Where each entry starts in the file."""
    return [layout.data_start + offset for offset in layout.table.offsets[:-1]]


def make_entry(name: str, dtype: str, shape: tuple[int, ...], seed: int = 0) -> Entry:
    known = DTYPES[dtype]
    data = np.random.default_rng([seed, *name.encode()]).integers(
        0, 2 if dtype == "bool" else 120, math.prod(shape) * known.itemsize
    )
    return Entry(name, known, shape, data.astype(np.uint8).view(known.raw).reshape(shape))


def by_item_size(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def filled_header(layout: FileLayout, hashes: Hashes) -> bytes:
    header = np.full(layout.data_start, 0xAA, np.uint8)
    digest = layout.fill_header(header, hashes)
    assert digest == header_digest(header.tobytes())
    return header.tobytes()


def write(path: Path, entries: Sequence[Entry], info: DataFileInfo = INFO) -> tuple[FileLayout, np.ndarray]:
    """Write a file in the plainest way; returns its layout and the digests of its blocks."""
    layout = layout_of(entries, info)
    hashes = np.zeros(layout.table.blocks, np.uint64)
    content = bytearray(layout.size)
    for entry, start, block in zip(entries, starts_of(layout), layout.table.first_block, strict=False):
        data = entry.array.tobytes()
        content[start : start + len(data)] = data
        for i, at in enumerate(range(0, len(data), info.block_bytes)):
            hashes[block + i] = xxhash.xxh3_64_intdigest(data[at : at + info.block_bytes])
    header = filled_header(layout, hashes)
    content[: len(header)] = header
    path.write_bytes(content)
    return layout, hashes


def read_back(path: Path) -> dict[str, np.ndarray]:
    with safetensors.safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def info_of(path: Path) -> FileInfo:
    """What `.metadata` says of a file."""
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    return FileInfo(path.name, len(data), header_digest(data[:length]))


def opened(path: Path) -> Any:
    return LocalStorage(path.parent).open(path.name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 0), (40, 70), (2, 1, 3, 1)])
def test_the_safetensors_library_reads_every_dtype(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    entries = [make_entry("w", dtype, shape), make_entry("b", "uint8", (3,))]
    write(tmp_path / "f", entries)
    known = DTYPES[dtype]
    with safetensors.safe_open(tmp_path / "f", "numpy") as file:
        stored = file.get_slice("w")
        assert stored.get_dtype() == known.safetensors
        assert tuple(stored.get_shape()) == (shape if known.view_items == 1 else (*shape, known.view_items))
        assert np.array_equal(file.get_tensor("b"), entries[1].array)
        if known.name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):  # which numpy itself lacks
            found = file.get_tensor("w")
            assert found.tobytes() == entries[0].array.tobytes()
            if known.view_items == 1:
                assert found.dtype == arithmetic_dtype(known)


def test_the_safetensors_library_reads_many_entries_at_once(tmp_path: Path) -> None:
    names = ["int64", "complex64", "float32", "uint16", "int8", "bool"]
    entries = by_item_size([make_entry(f"{name}.{i}[0:3]", name, (3, i)) for name in names for i in range(5)])
    write(tmp_path / "f", entries)
    found = safetensors.numpy.load_file(tmp_path / "f")
    assert {name: array.tobytes() for name, array in found.items()} == {e.name: e.array.tobytes() for e in entries}


def test_a_file_of_no_entries_is_a_safetensors_file(tmp_path: Path) -> None:
    layout, hashes = write(tmp_path / "f", [])
    assert read_back(tmp_path / "f") == {}
    assert layout.size == (tmp_path / "f").stat().st_size
    file = opened(tmp_path / "f")
    assert len(read_header(file, info_of(tmp_path / "f"), 0)[0]) == len(hashes) == 0
    file.close()


@examples(20)
@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), shapes(most=40, dimensions=3)), max_size=6))
def test_entries_stand_without_gaps_aligned_to_their_items(drawn: list[tuple[str, tuple[int, ...]]]) -> None:
    entries = by_item_size([Entry(f"e{i}", DTYPES[d], s, np.zeros(0)) for i, (d, s) in enumerate(drawn)])
    layout = layout_of(entries, INFO)
    header = filled_header(layout, np.zeros(layout.table.blocks, np.uint64))
    assert len(header) % 4096 == 0
    assert (
        starts_of(layout)
        == list(itertools.accumulate((e.nbytes for e in entries), initial=len(header)))[: len(entries)]
    )
    assert layout.size == len(header) + sum(e.nbytes for e in entries)
    assert all(start % e.dtype.itemsize == 0 for start, e in zip(starts_of(layout), entries, strict=True))
    blocks = [-(-e.nbytes // BLOCK) for e in entries]
    assert layout.table.first_block.tolist() == list(itertools.accumulate(blocks, initial=0))


@pytest.mark.parametrize(("nbytes", "blocks"), [(0, 0), (1, 1), (BLOCK, 1), (BLOCK + 1, 2)])
def test_a_block_starts_anew_with_each_entry(nbytes: int, blocks: int) -> None:
    table = FileTable(["a"], [EntryKind(DTYPES["uint8"], (nbytes,))], np.zeros(1, np.int64), BLOCK)
    assert table.first_block.tolist() == [0, blocks]


def test_the_digests_stand_where_the_header_says(tmp_path: Path) -> None:
    entries = [make_entry("a", "float64", (1000, 3)), make_entry("b", "int8", (BLOCK + 1,))]
    layout, hashes = write(tmp_path / "f", entries)
    data = (tmp_path / "f").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert set(header["__metadata__"]) == {"xxh3_64", "hashes", "info"}
    digest = header["__metadata__"]["xxh3_64"].encode()
    start = starts_of(layout)[0]
    assert digest.decode() == xxhash.xxh3_64_hexdigest(data[:start].replace(digest, b"0" * 16, 1))
    assert digest.decode() == header_digest(data[:start])
    decoded = np.frombuffer(msgspec.convert(header["__metadata__"]["hashes"], bytes), "<u8")
    assert decoded.tolist() == hashes.tolist()
    expected = [
        xxhash.xxh3_64_intdigest(entry.array.tobytes()[at : at + BLOCK])
        for entry in entries
        for at in range(0, entry.nbytes, BLOCK)
    ]
    assert decoded.tolist() == expected
    assert header["a"]["data_offsets"] == [0, 24_000]
    assert data[start : start + 24_000] == entries[0].array.tobytes()
    assert len(filled_header(layout, hashes)) == len(filled_header(layout, np.zeros_like(hashes)))


def test_headers_are_read_back(tmp_path: Path) -> None:
    layout, hashes = write(tmp_path / "f", [make_entry("a", "float64", (1000, 3))])
    file = opened(tmp_path / "f")
    found, start = read_header(file, info_of(tmp_path / "f"), 6)
    assert found.tolist() == hashes.tolist()
    assert start == starts_of(layout)[0]
    info, found, known, start = read_info(file, "f")
    file.close()
    assert info == INFO
    assert found.tolist() == hashes.tolist()
    assert known == info_of(tmp_path / "f")
    assert start == starts_of(layout)[0]


def test_what_files_say_of_themselves_is_counted_together(tmp_path: Path) -> None:
    write(tmp_path / "f", [make_entry("a", "float64", (2,))])
    with closing(opened(tmp_path / "f")) as file:
        read_info(file, "f", Room())
        with pytest.raises(CheckpointCorruptedError, match="more objects than its size has room for"):
            read_info(file, "f", Room(cost=48 << 20))


flat_keys = st.one_of(
    st.text(st.sampled_from("a%[]:,0125B_."), max_size=6), st.sampled_from(["", "%", "__metadata__", "%__metadata__"])
)


@st.composite
def named_shards(draw: st.DrawFn) -> tuple[str, Box, tuple[int, ...]]:
    shape = draw(shapes(least=1, most=12, dimensions=2))
    return draw(flat_keys), draw(st.one_of(st.just(whole(shape)), boxes_in(shape, least=1))), shape


def entry_name(key: str, box: Box, global_shape: tuple[int, ...]) -> str:
    return escaped_key(key) + slice_suffix(box, global_shape)


@examples(40)
@given(st.lists(named_shards(), max_size=8))
def test_different_shards_have_different_names(drawn: list[tuple[str, Box, tuple[int, ...]]]) -> None:
    global_shapes: dict[str, tuple[int, ...]] = {}
    shards = [s for s in drawn if global_shapes.setdefault(s[0], s[2]) == s[2]]  # one key has one global shape
    found = {entry_name(*shard) for shard in shards}
    assert len(found) == len({(key, box) for key, box, _ in shards})
    assert not found & {"", "__metadata__"}


def test_names_are_as_documented() -> None:
    assert entry_name("layers.0.weight", whole((4, 16)), (4, 16)) == "layers.0.weight"
    assert entry_name("layers.0.weight", Box((0, 8), (4, 8)), (4, 16)) == "layers.0.weight[0:4,8:16]"
    assert entry_name("a%b[0]", whole(()), ()) == "a%25b%5B0]"
    assert entry_name("", whole((2,)), (2,)) == "%"
    assert entry_name("__metadata__", whole((2,)), (2,)) == "%__metadata__"


@examples(25)
@given(st.lists(st.tuples(st.text(max_size=30), st.integers(0, 50 * BLOCK)), max_size=30), st.integers(0, 5000))
def test_parts_keep_order_and_their_headers_small(drawn: list[tuple[str, int]], limit: int) -> None:
    entries = [Entry(f"{name}{i}", DTYPES["uint8"], (n,), np.zeros(0)) for i, (name, n) in enumerate(drawn)]
    parts = split_in_parts(table_of(entries), limit)
    assert [name for part in parts for name in part.names] == [entry.name for entry in entries]
    assert [size for part in parts for size in part.sizes] == [entry.nbytes for entry in entries]
    assert len(parts) == 1 or all(part.names for part in parts)
    fixed = len(msgspec.json.encode(msgspec.json.encode(INFO).decode()))
    for part in parts:
        layout = FileLayout(part, INFO)
        header = filled_header(layout, np.zeros(layout.table.blocks, np.uint64)).rstrip(b" ")
        assert len(part.names) <= 1 or len(header) <= limit + fixed + 100


def test_a_rank_that_writes_several_parts(tmp_path: Path) -> None:
    entries = by_item_size([make_entry(f"tensor.{i}", "float32" if i % 2 else "int8", (100, i)) for i in range(40)])
    parts = split_in_parts(table_of(entries), limit=4000)
    assert len(parts) > 3
    found: dict[str, np.ndarray] = {}
    by_name = {entry.name: entry for entry in entries}
    for i, part in enumerate(parts):
        write(
            tmp_path / f"{i}",
            [by_name[name] for name in part.names],
            msgspec.structs.replace(INFO, part=i, parts=len(parts)),
        )
        found |= {name: array.view(DTYPES["uint8"].raw) for name, array in read_back(tmp_path / f"{i}").items()}
        file = opened(tmp_path / f"{i}")
        assert read_info(file, f"{i}")[0].part == i
        file.close()
    assert {name: array.tobytes() for name, array in found.items()} == {e.name: e.array.tobytes() for e in entries}


def test_a_header_that_no_reader_takes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.files.datafile.MAX_HEADER_BYTES", 2 * BLOCK)
    entries = [make_entry("w", "uint8", (blocks * BLOCK,)) for blocks in (100, 1000)]
    assert layout_of(entries[:1], INFO).data_start <= 2 * BLOCK
    with pytest.raises(UnsupportedValueError, match="w and what else .* larger block_bytes make it smaller"):
        layout_of(entries[1:], INFO)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "0_3.0123456789abcdef.0.safetensors"
    write(path, [make_entry("a", "float64", (1000, 3)), make_entry("b", "int8", (BLOCK + 1,))])
    return path


def refuse_header(path: Path, expected: FileInfo, blocks: int = 8) -> None:
    file = opened(path)
    with pytest.raises(CheckpointCorruptedError) as caught:
        read_header(file, expected, blocks)
    file.close()
    assert expected.name in str(caught.value)


def refuse_info(path: Path) -> None:
    file = opened(path)
    with pytest.raises(CheckpointCorruptedError, match=path.name):
        read_info(file, path.name)
    file.close()


def test_truncated_files_are_refused(written: Path) -> None:
    data, expected = written.read_bytes(), info_of(written)
    header = 8 + int.from_bytes(data[:8], "little")
    for size in (0, 1, 7, 8, 9, 100, header - 1, header, header + 100, len(data) - 1):
        written.write_bytes(data[:size])
        refuse_header(written, expected)
        if size < header:
            refuse_header(written, FileInfo(expected.name, size, expected.digest))
            refuse_info(written)
    written.write_bytes(data + b"\0")
    refuse_header(written, expected)


def test_every_flip_in_a_header_is_noticed(written: Path) -> None:
    """With a `.metadata` to compare with, and without."""
    data, expected = written.read_bytes(), info_of(written)
    size = 8 + int.from_bytes(data[:8], "little")
    for i in [*range(64), *range(64, size, 17), size - 1]:
        for bit in (0, 3, 7):
            flipped = bytearray(data[:size])
            flipped[i] ^= 1 << bit
            written.write_bytes(bytes(flipped) + data[size:])
            refuse_header(written, expected)
            refuse_info(written)


def test_a_file_of_another_format_has_the_size_that_was_seen(written: Path) -> None:
    storage, size = LocalStorage(written.parent), written.stat().st_size
    with closing(open_data_file(storage, FileInfo(written.name, size, ""), 0, HoleBudget()).file):
        pass
    for other in (size - 1, size + 1):
        with pytest.raises(CheckpointCorruptedError, match=f"has {size} bytes; {other} were written"):
            open_data_file(storage, FileInfo(written.name, other, ""), 0, HoleBudget())


def test_a_header_of_another_save_or_with_other_blocks_is_refused(written: Path) -> None:
    expected = info_of(written)
    refuse_header(written, expected, blocks=7)
    refuse_header(written, expected, blocks=9)
    refuse_header(written, FileInfo(expected.name, expected.size, "0" * 16))


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    array = np.arange(5)
    safetensors.numpy.save_file({"a": array}, path)
    refuse_info(path)
    safetensors.numpy.save_file({"a": array}, path, metadata={"format": "pt", "hashes": "AAAA"})
    refuse_info(path)
    refuse_header(path, info_of(path), 1)
    for content in (b"", b"PK\3\4" * 10, bytes(100), b"\xff" * 100, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{}"):
        path.write_bytes(content)
        refuse_info(path)


def header_of(metadata: Any) -> bytes:
    """A header whose digest fits, however odd the rest is."""
    if isinstance(metadata, dict):
        metadata = {"xxh3_64": "0" * 16, **metadata}
    text = msgspec.json.encode({"__metadata__": metadata})
    blank = len(text).to_bytes(8, "little") + text
    return blank.replace(b"0" * 16, xxhash.xxh3_64_hexdigest(blank).encode(), 1)


def test_the_helper_makes_headers_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(header_of({"hashes": "", "info": msgspec.json.encode(INFO).decode(), "later": "x"}))
    file = opened(tmp_path / "f")
    assert read_info(file, "f")[0] == INFO
    file.close()


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other.data"},
        {"version": [2, 0]},
        {"version": [1]},
        {"block_bytes": 0},
        {"block_bytes": -1},
        {"block_bytes": 2**60},
        {"rank": "0"},
        {"tensors": []},
        {"writers": [0, 1, 0]},
        {"values": [["/a"]]},
        {"save": None},
    ],
    ids=str,
)
def test_hostile_information_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    info = {**msgspec.json.decode(msgspec.json.encode(INFO)), **change}
    (tmp_path / "f").write_bytes(header_of({"hashes": "", "info": json.dumps(info)}))
    refuse_info(tmp_path / "f")


@pytest.mark.parametrize("again", [False, True])
def test_writers_of_one_hash_are_read_soon(again: bool, tmp_path: Path) -> None:
    writers = [i * (2**61 - 1) for i in range(20_000)]
    info = {**msgspec.json.decode(msgspec.json.encode(INFO)), "writers": writers + writers[5:6] * again}
    (tmp_path / "f").write_bytes(header_of({"hashes": "", "info": json.dumps(info)}))
    start = time.process_time()
    if again:
        refuse_info(tmp_path / "f")
    else:
        file = opened(tmp_path / "f")
        assert read_info(file, "f")[0].writers == writers
        file.close()
    assert time.process_time() - start < slowness()


@pytest.mark.parametrize(
    "metadata",
    [
        {"hashes": "", "info": "["},
        {"hashes": "", "info": "[" * 100_000},
        {"hashes": "", "info": {}},
        {"hashes": "AAAA", "info": json.dumps(msgspec.json.decode(msgspec.json.encode(INFO)))},
        {"hashes": "!", "info": json.dumps(msgspec.json.decode(msgspec.json.encode(INFO)))},
        {"info": json.dumps(msgspec.json.decode(msgspec.json.encode(INFO)))},
        [],
        None,
    ],
    ids=lambda metadata: str(metadata)[:30],
)
def test_hostile_headers_are_refused(metadata: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(header_of(metadata))
    refuse_info(tmp_path / "f")
