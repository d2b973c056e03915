"""The `.metadata` codec: what was written comes back; whatever else is refused, cheaply and by the right error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import Column, pack_column
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.layouts import Layout
from paddle_dist_ckpt.core.shards import Kind, ShardTable
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointError, UnsupportedValueError
from paddle_dist_ckpt.files import codec
from paddle_dist_ckpt.files.codec import decode_head, decode_metadata, decode_note, encode_metadata
from paddle_dist_ckpt.files.metadata import (
    FileInfo,
    LocalTensorIndex,
    LocalTensorMetadata,
    Metadata,
    StorageInfo,
)
from paddle_dist_ckpt.files.tables import TableRecord, table_from_record, table_to_record
from paddle_dist_ckpt.tree.paths import ListIndex
from paddle_dist_ckpt.tree.values import to_jsonable
from test.core.test_shards import tables
from test.jobs import little_memory
from test.report.samples import large_metadata
from test.strategies import examples

MEBI = 1 << 20
Body = dict[str, Any]


def make(table: ShardTable, files: int = 4, values: dict[str, Any] | None = None, user: Any = None) -> Metadata:
    shards = np.bincount(table.shard_file, minlength=files).tolist()
    infos = [
        FileInfo(f"{i}_3.0123456789abcdef.0.safetensors", 4096 + i + size + 64 * shards[i], f"{i:016x}")
        for i, size in enumerate(table.file_bytes(files).tolist())
    ]
    records = [(path, to_jsonable(value, path)) for path, value in sorted((values or {}).items())]
    return Metadata(
        unique_id=3,
        save_id="0123456789abcdef",
        world_size=2,
        block_bytes=MEBI,
        created="2024-01-02T03:04:05+00:00",
        library="paddle_dist_ckpt 1.0",
        paddle_version="3.3.1",
        user_tree=to_jsonable(user or {}, "user_metadata"),
        files=infos,
        table=table,
        value_records=records,
    )


def small() -> Metadata:
    """Two tensors that share a grid of two boxes, a third whole, an encoded value, and two values."""
    halves = Layout.from_cuts((4, 6), [[2], []])
    layouts = [
        halves,
        Layout.from_cuts((3,), [[]]),
        Layout((4, 4), Boxes.of([Box((0, 0), (2, 4)), Box((2, 1), (2, 3))], 2)),
    ]
    table = ShardTable(
        ["/model/a.b", "/model/a/b", "/opt/~l0", "/zz"],
        [DTYPES["float32"], DTYPES["bfloat16"], DTYPES["int64"], DTYPES["uint8"]],
        np.array([Kind.TENSOR, Kind.ARRAY, Kind.TENSOR, Kind.VALUE]),
        layouts,
        np.array([0, 0, 1, 2]),
        np.array([0, 1, 0, 1, 1, 0, 0]),
        ["linear_0.w_0", None, None, None],
    )
    return make(table, 2, {"/lr": 0.5, "/steps": (1, {2: None})}, {"note": (1, 2)})


def encode(metadata: Metadata) -> bytes:
    return encode_metadata(metadata)


def sealed(body: Any, **head: Any) -> bytes:
    """A file whose checksum and length fit this body and first line, however odd they are."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    line = {
        "format": "paddle_dist_ckpt.metadata",
        "version": [1, 0],
        "required_features": [],
        "save": "0123456789abcdef",
        "body_bytes": len(data),
        **head,
    }
    blank = msgspec.json.encode({**line, "xxh3_64": "0" * 16}) + b"\n" + data + b"\n"
    return blank.replace(b"0" * 16 + b'"}\n', xxhash.xxh3_64_hexdigest(blank).encode() + b'"}\n', 1)


def small_body() -> Body:
    body: Body = msgspec.json.decode(encode(small()).split(b"\n")[1])
    return body


def use_everything(metadata: Metadata) -> None:
    """Look at all that a reader looks at."""
    files = len(metadata.files)
    metadata.table.blocks(metadata.block_bytes, files)
    metadata.table.file_bytes(files)
    _ = metadata.values, metadata.state_dict_metadata, metadata.storage_metadata, metadata.flat_mapping
    _ = metadata.variable_names


def refused(data: bytes, error: type[Exception] = CheckpointCorruptedError) -> None:
    """The file, or the first look at what it holds, raises this error and nothing else, without much memory."""
    with little_memory(), pytest.raises(error):
        use_everything(decode_metadata(data, "3.metadata", 3))


def same_table(a: ShardTable, b: ShardTable) -> bool:
    columns = ("kinds", "layout_of", "shard_file")
    return (
        (a.paths, a.dtypes, a.names) == (b.paths, b.dtypes, b.names)
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)
        and len(a.layouts) == len(b.layouts)
        and all(
            x.shape == y.shape and np.array_equal(x.boxes.table, y.boxes.table)
            for x, y in zip(a.layouts, b.layouts, strict=True)
        )
    )


FIELDS = [name for name in Metadata.__struct_fields__ if name not in ("table", "cost")]


@examples(25)
@given(
    tables(), st.dictionaries(st.text(max_size=3).map(lambda t: f"/v/{t}".replace("~", "")), st.floats(), max_size=3)
)
def test_metadata_come_back(table: ShardTable, values: dict[str, Any]) -> None:
    values = {path: value for path, value in values.items() if path.count("/") == 2}
    written = make(table, 4, values, {"a": (1, None)})
    read = decode_metadata(encode(written), "3.metadata", 3)
    assert all(getattr(read, name) == getattr(written, name) for name in FIELDS)
    assert same_table(read.table, table)


def test_what_users_see_of_a_checkpoint() -> None:
    metadata = decode_metadata(encode(small()), "3.metadata", 3)
    first, second = (file.name for file in metadata.files)
    assert metadata.state_dict_metadata == {
        "model.a\\.b": [
            LocalTensorMetadata((0, 0), (2, 6), "float32", (4, 6)),
            LocalTensorMetadata((2, 0), (2, 6), "float32", (4, 6)),
        ],
        "model.a.b": [
            LocalTensorMetadata((0, 0), (2, 6), "bfloat16", (4, 6)),
            LocalTensorMetadata((2, 0), (2, 6), "bfloat16", (4, 6)),
        ],
        "opt.0": [LocalTensorMetadata((0,), (3,), "int64", (3,))],
    }
    assert metadata.storage_metadata == {
        LocalTensorIndex("model.a\\.b", (0, 0), (2, 6)): StorageInfo(first, 0, 48),
        LocalTensorIndex("model.a\\.b", (2, 0), (2, 6)): StorageInfo(second, 24, 48),
        LocalTensorIndex("model.a.b", (0, 0), (2, 6)): StorageInfo(first, 48, 24),
        LocalTensorIndex("model.a.b", (2, 0), (2, 6)): StorageInfo(second, 72, 24),
        LocalTensorIndex("opt.0", (0,), (3,)): StorageInfo(second, 0, 24),
        LocalTensorIndex("zz", (0, 0), (2, 4)): StorageInfo(first, 72, 8),
        LocalTensorIndex("zz", (2, 1), (2, 3)): StorageInfo(first, 80, 6),
    }
    assert metadata.flat_mapping == {
        "model.a\\.b": ("model", "a.b"),
        "model.a.b": ("model", "a", "b"),
        "opt.0": ("opt", ListIndex(0)),
        "zz": ("zz",),
        "lr": ("lr",),
        "steps": ("steps",),
    }
    assert metadata.values == {"lr": 0.5, "steps": (1, {2: None})}
    assert metadata.variable_names == {"model.a\\.b": "linear_0.w_0"}
    assert metadata.user_metadata == {"note": (1, 2)}
    assert metadata.key("/opt/~l0") == "opt.0"


def test_metadata_are_told_in_a_line() -> None:
    found = repr(large_metadata(2000))
    assert found.startswith("<Metadata: unique_id=7, save_id='0123456789abcdef', format='native', world_size=64, ")
    assert found.endswith(" tensors=2000, values=1, files=64>")


def test_an_empty_checkpoint_comes_back() -> None:
    none = np.zeros(0, np.int64)
    metadata = decode_metadata(encode(make(ShardTable([], [], none, [], none, none, []), 0)), "3.metadata", 3)
    use_everything(metadata)
    assert metadata.state_dict_metadata == {}


def test_the_helper_seals_what_the_writer_writes() -> None:
    assert encode(small()) == sealed(small_body())


def test_metadata_of_many_shards_are_small() -> None:
    ranks, tensors = 256, 2_000
    layout = Layout.from_cuts((4096, 1024), [list(range(16, 4096, 16)), []])
    paths = sorted(f"/model/layers.{i // 10}.block.{i % 10}.weight" for i in range(tensors))
    table = ShardTable(
        paths,
        [DTYPES["bfloat16"]] * tensors,
        np.zeros(tensors, np.int64),
        [layout],
        np.zeros(tensors, np.int64),
        np.tile(np.arange(ranks), tensors),
        [None] * tensors,
    )
    data = encode(make(table, ranks))
    assert len(data) <= 5_000_000
    assert same_table(decode_metadata(data, "3.metadata", 3).table, table)


def test_irregular_shards_take_at_most_24_bytes_each() -> None:
    count = 50_000
    offsets = np.stack([np.arange(count) * 70_000, np.arange(count) % 300], axis=1)
    boxes = Boxes(offsets, np.tile([60_000, 300], (count, 1)))
    layout = Layout((count * 70_000, 1000), boxes)
    none = np.zeros(1, np.int64)
    table = ShardTable(["/w"], [DTYPES["uint8"]], none, [layout], none, np.arange(count) % 256, [None])
    assert len(encode(make(table, 256))) - len(encode(make(small().table, 256))) <= 24 * count


def test_one_tensor_may_be_cut_in_very_many_shards_unless_each_has_very_many_dimensions() -> None:
    def cut_along_the_first(count: int, dimensions: int) -> TableRecord:
        cuts = [list(range(1, count)), *([()] * (dimensions - 1))]
        layout = Layout.from_cuts((count, *([1] * (dimensions - 1))), cuts)
        none = np.zeros(1, np.int64)
        return table_to_record(
            ShardTable(["/w"], [DTYPES["uint8"]], none, [layout], none, np.zeros(count, np.int64), [None])
        )

    assert len(table_from_record(cut_along_the_first(600_000, 1), 1).shard_file) == 600_000
    with pytest.raises(CheckpointCorruptedError, match="more dimensions than tensors are cut in"):
        table_from_record(cut_along_the_first(80_000, 32), 1)


READERS = pytest.mark.parametrize("read", [decode_metadata, decode_note])


@READERS
def test_every_flipped_bit_is_noticed(read: Callable[[bytes, str, int], object]) -> None:
    """A flip in the major version cannot be told from a file of another version, so it gets that error."""
    data = encode(small())
    major = data.index(b'"version":[') + 11
    for i in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[i] ^= 1 << bit
            with pytest.raises(CheckpointError) as caught:
                read(bytes(flipped), "3.metadata", 3)
            assert type(caught.value) is CheckpointCorruptedError or i == major, (i, bit, caught.value)


def test_every_byte_is_needed_and_none_more() -> None:
    data = encode(small())
    for length in range(len(data)):
        with pytest.raises(CheckpointCorruptedError):
            decode_metadata(data[:length], "3.metadata", 3)
    for more in (b"\n", b"x", b"\0" * 100):
        refused(data + more)
        at = data.index(b"\n") - 18
        blank = data[:at] + b"0" * 16 + data[at + 16 :] + more
        refused(blank.replace(b"0" * 16, xxhash.xxh3_64_hexdigest(blank).encode(), 1))


def test_errors_name_the_file() -> None:
    for data in (b"", b"{}", encode(small())[:-2], sealed(b"{}"), sealed({**small_body(), "files": []})):
        with pytest.raises(CheckpointCorruptedError, match=r"3\.metadata"):
            decode_metadata(data, "3.metadata", 3)


@READERS
def test_another_id_than_the_file_name_says_is_refused(read: Callable[[bytes, str, int], object]) -> None:
    with pytest.raises(CheckpointCorruptedError, match="renamed"):
        read(encode(small()), "4.metadata", 4)


@READERS
def test_lines_of_different_saves_are_refused(read: Callable[[bytes, str, int], object]) -> None:
    data = sealed({**small_body(), "save": "fedcba9876543210"})
    with pytest.raises(CheckpointCorruptedError, match="different saves"):
        read(data, "3.metadata", 3)


def test_a_note_has_what_the_user_said_within_a_budget() -> None:
    note = decode_note(encode(small()), "3.metadata", 3)
    assert note.save_id == small().save_id
    assert note.user_metadata(lambda save_id: 0) == {"note": (1, 2)}
    many = sealed({**small_body(), "user_metadata": [[]] * (1 << 20)})
    with pytest.raises(CheckpointCorruptedError, match="more objects than its size has room for"):
        decode_note(many, "3.metadata", 3).user_metadata(lambda save_id: 0)
    assert len(decode_note(many, "3.metadata", 3).user_metadata(lambda save_id: 1 << 30)) == 1 << 20


def test_other_formats_are_told_apart() -> None:
    assert decode_head(b"\x80\x04\x95", "0.metadata") is None
    assert decode_head(b'{"format":"other"}\n', "0.metadata") is None
    assert decode_head(b"", "0.metadata") is None
    head = decode_head(encode(small())[:4096], "3.metadata")
    assert head is not None
    assert head.save == "0123456789abcdef"


def test_what_a_later_minor_version_adds_is_ignored() -> None:
    body = small_body()
    body["added"] = {"later": [1]}
    body["tensors"]["added"] = 5
    body["tensors"]["layouts"][0]["added"] = None
    body["files"] = [[*file, "added"] for file in body["files"]]
    metadata = decode_metadata(sealed(body, version=[1, 7], added=True), "3.metadata", 3)
    assert same_table(metadata.table, small().table)


@pytest.mark.parametrize("head", [{"version": [2, 0]}, {"version": [0, 9]}, {"required_features": ["zstd"]}])
def test_an_unknown_version_or_feature_is_refused_as_such(head: dict[str, Any]) -> None:
    for data in (sealed(small_body(), **head), sealed(b'{"unlike": "anything"}', **head)):
        with pytest.raises(CheckpointError, match="newer paddle_dist_ckpt") as caught:
            decode_metadata(data, "3.metadata", 3)
        assert type(caught.value) is CheckpointError


@pytest.mark.parametrize(
    "head",
    [
        {"version": [1]},
        {"version": "1.0"},
        {"version": None},
        {"required_features": None},
        {"required_features": [1]},
        {"body_bytes": -1},
        {"body_bytes": 10**30},
        {"body_bytes": "1"},
        {"save": None},
        {"save": "fedcba9876543210"},
        {"more": "x" * 5000},
    ],
    ids=str,
)
def test_a_hostile_first_line_is_refused(head: dict[str, Any]) -> None:
    refused(sealed(small_body(), **head))


def column(values: list[int]) -> Any:
    return msgspec.to_builtins(pack_column(values))


def raw_column(dtype: str, data: bytes) -> Any:
    return msgspec.to_builtins(Column(dtype, data))


def change(*place: str | int) -> Callable[[Any], Body]:
    """A maker of bodies that have another value in this place."""

    def changed(value: Any) -> Body:
        body: Any = small_body()
        inner = body
        for part in place[:-1]:
            inner = inner[part]
        inner[place[-1]] = value
        return body

    return changed


tensors = {
    name: change("tensors", name)
    for name in ("paths", "dtypes", "dtype", "kind", "layouts", "layout", "shard_file", "names")
}
layout = change("tensors", "layouts", 0)
HOSTILE_BODIES = {
    "no object": [],
    "null": None,
    "nothing in it": {},
    "id of another": change("unique_id")(4),
    "id as text": change("unique_id")("3"),
    "no blocks": change("block_bytes")(0),
    "negative blocks": change("block_bytes")(-4096),
    "huge blocks": change("block_bytes")(2**50),
    "endless blocks": change("block_bytes")(10**30),
    "uneven blocks": change("block_bytes")(5000),
    "negative world": change("world_size")(-1),
    "no world": change("world_size")(0),
    "world as a fraction": change("world_size")(1.5),
    "save of another": change("save")("fedcba9876543210"),
    "files missing": change("files")([]),
    "negative file size": change("files", 0, 1)(-1),
    "file in another folder": change("files", 0, 0)("../x"),
    "file is the folder": change("files", 0, 0)(".."),
    "file with no name": change("files", 0, 0)(""),
    "file name with NUL": change("files", 0, 0)("a\0b"),
    "file that is another .metadata": change("files", 0, 0)("999.metadata"),
    "file that is a claim": change("files", 0, 0)("3.0123456789abcdef.claim"),
    "file of another save": change("files", 0, 0)("0_3.fedcba9876543210.0.safetensors"),
    "a file twice": change("files", 1)(small_body()["files"][0]),
    "file record cut short": change("files", 0)(["x"]),
    "a file without a digest": change("files", 0, 2)(""),
    "a hostile user_metadata": change("user_metadata")({"nope": 1}),
    "values of wrong type": change("values")({}),
    "a value without a path": change("values", 0)([0.5]),
    "a value's path is no path": change("values", 0, 0)("lr"),
    "a value's path is odd": change("values", 0, 0)("/~x"),
    "a value twice": change("values")([["/lr", 1], ["/lr", 2]]),
    "a value where a tensor is": change("values")([["/zz", 1]]),
    "a value below a tensor": change("values")([["/zz/below", 1]]),
    "a value above a tensor": change("values")([["/model", 1]]),
    "very many containers": change("values")([[f"/v{i:03d}{'/a' * 250}", 1] for i in range(400)]),
    "a value in a place that no list has": change("values")([["/list/~l1000000000", 1]]),
    "a hostile value": change("values")([["/lr", {"int": "zz"}]]),
    "a paths column too short": tensors["paths"](["/a"]),
    "paths out of order": tensors["paths"](["/model/a/b", "/model/a.b", "/opt/~l0", "/zz"]),
    "paths twice": tensors["paths"](["/a", "/a", "/b", "/c"]),
    "paths below paths": tensors["paths"](["/a", "/a/b", "/b", "/c"]),
    "an index in no list": tensors["paths"](["/a", "/b", "/c", "/l/~l1000000000"]),
    "an index in no tuple": tensors["paths"](["/a", "/b", "/c", "/l/~t9999999"]),
    "an index in a list larger than all": tensors["paths"](["/a", "/b", "/c", "/l/~l9"]),
    "an index in a tuple larger than all": tensors["paths"](["/a", "/b", "/c", "/l/~t9"]),
    "no paths": tensors["paths"](["a", "b", "c", "d"]),
    "a path that begins with another sign": tensors["paths"](["!a", "/b", "/c", "/d"]),
    "odd paths": tensors["paths"](["/a", "/b", "/c", "/~l-1"]),
    "unknown dtype": tensors["dtypes"](["float4", "bfloat16", "int64", "uint8"]),
    "dtypes missing": tensors["dtypes"]([]),
    "dtype out of bounds": tensors["dtype"](column([0, 1, 2, 4])),
    "dtype column short": tensors["dtype"](column([0])),
    "kind out of bounds": tensors["kind"](column([0, 1, 2, 3])),
    "a layout out of bounds": tensors["layout"](column([0, 0, 1, 3])),
    "a layout unused": tensors["layout"](column([0, 0, 1, 1])),
    "a file out of bounds": tensors["shard_file"](column([0, 1, 0, 1, 1, 0, 2])),
    "shards missing": tensors["shard_file"](column([0] * 6)),
    "shards too many": tensors["shard_file"](column([0] * 8)),
    "shards and no layouts": tensors["shard_file"](column([0] * 1_000_000)),
    "a column of floats": tensors["shard_file"](raw_column("<f4", bytes(28))),
    "a column of nothing": tensors["shard_file"](raw_column("", bytes(7))),
    "a column of letters": tensors["shard_file"](raw_column("<ux", bytes(7))),
    "a column of halves": tensors["shard_file"](raw_column("<u2", bytes(7))),
    "a column that is no base64": tensors["shard_file"](["<u1", "!!!!"]),
    "a column without data": tensors["shard_file"](["<u1"]),
    "names missing": tensors["names"](["a"]),
    "names of wrong type": tensors["names"]([1, 2, 3, 4]),
    "a huge shape": layout({"shape": [10**12, 10**12], "cuts": [[], [1]]}),
    "an endless shape": layout({"shape": [10**30], "cuts": [[1]]}),
    "an endless empty shape": layout({"shape": [0, 10**30], "cuts": [[], [1]]}),
    "a negative shape": layout({"shape": [-4, 6], "cuts": [[2], []]}),
    "a shape of text": layout({"shape": ["4"], "cuts": [[2]]}),
    "too many dimensions": layout({"shape": [1] * 10_000, "cuts": [[]] * 10_000}),
    "cuts out of order": layout({"shape": [4, 6], "cuts": [[2, 1], []]}),
    "cuts outside": layout({"shape": [4, 6], "cuts": [[4], []]}),
    "cuts of another dimension": layout({"shape": [4, 6], "cuts": [[2]]}),
    "too many cuts": layout({"shape": [2**40] * 3, "cuts": [list(range(1, 1000))] * 3}),
    "cuts in pairs": layout({"shape": [2] * 30, "cuts": [[1]] * 30}),
    "a huge count": layout({"shape": [4, 6], "count": 10**15}),
    "a huge count with columns": layout(
        {"shape": [4], "count": 10**15, "offsets": [column([0])], "extents": [column([4])]}
    ),
    "a huge count without dimensions": layout({"shape": [], "count": 10**15}),
    "a negative count": layout({"shape": [4, 6], "count": -1}),
    "boxes outside": layout(
        {
            "shape": [4, 6],
            "count": 2,
            "offsets": [column([0, 3]), column([0, 0])],
            "extents": [column([2, 2]), column([6, 6])],
        }
    ),
    "boxes out of order": layout(
        {
            "shape": [4, 6],
            "count": 2,
            "offsets": [column([2, 0]), column([0, 0])],
            "extents": [column([2, 2]), column([6, 6])],
        }
    ),
    "layouts missing": tensors["layouts"]([]),
    "layouts of wrong type": tensors["layouts"]([[1]]),
}


@pytest.mark.parametrize("name", HOSTILE_BODIES)
def test_a_hostile_body_is_refused(name: str) -> None:
    refused(sealed(HOSTILE_BODIES[name]))


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe", b"nul", b"1" * 100_000])
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    refused(sealed(body))


@pytest.mark.parametrize("depth", [250, 600, 3_000, 50_000])
@pytest.mark.parametrize("place", ["user_metadata", "values"])
def test_deep_nesting_is_refused(place: str, depth: int) -> None:
    deep = b'{"tuple":[' * depth + b"]}" * depth
    content = deep if place == "user_metadata" else b'[["/deep",' + deep + b"]]"
    refused(sealed(msgspec.json.encode(change(place)("HERE")).replace(b'"HERE"', content)))


def test_layouts_that_no_tensor_uses_are_not_expanded() -> None:
    """A grid is small in the file and large in memory; only grids that account for shards may be expanded."""
    side = 300
    body = small_body()
    grid = {"shape": [side, side], "cuts": [list(range(1, side))] * 2}
    body["tensors"].update(
        paths=["/a"],
        dtype=column([0]),
        kind=column([0]),
        layout=column([0]),
        layouts=[grid] * 50,
        shard_file=column([0] * side**2),
        names=[],
    )
    refused(sealed(body))


json_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64), st.text(max_size=3), st.just([]), st.just({})
)


@st.composite
def mutated(draw: st.DrawFn) -> Body:
    """The small body with something replaced or missing somewhere."""
    body: Any = small_body()
    inner = body
    while True:
        places = list(inner) if isinstance(inner, dict) else range(len(inner))
        place = draw(st.sampled_from(list(places)))
        if isinstance(inner[place], (dict, list)) and inner[place] and draw(st.integers(0, 4)):
            inner = inner[place]
            continue
        if draw(st.booleans()):
            inner[place] = draw(json_leaves)
        else:
            del inner[place]
        return body


@examples(35)
@given(mutated())
def test_any_change_of_the_body_is_refused_or_harmless(body: Body) -> None:
    try:
        metadata = decode_metadata(sealed(body), "3.metadata", 3)
        use_everything(metadata)
    except CheckpointCorruptedError:
        return
    assert metadata.unique_id == 3


def test_files_too_small_for_what_they_are_said_to_hold_are_refused() -> None:
    body = small_body()
    for record in body["files"]:
        record[1] = 8
    refused(sealed(body))


def test_a_path_that_is_a_dict_and_a_list_is_refused() -> None:
    body = small_body()
    body["values"] = [["/x/~l0", 1], ["/x/a", 2]]
    refused(sealed(body))


def test_lists_with_far_more_places_than_leaves_are_refused() -> None:
    """Each of them is no longer than there are leaves, but all together are, as their square."""
    body = small_body()
    body["values"] = sorted([f"/x/~i{i}/~l1999", i] for i in range(2000))
    refused(sealed(body))
    body["values"] = [["/x/~l3", 1]]  # as there may be a few
    assert decode_metadata(sealed(body), "3.metadata", 3).value_records == [("/x/~l3", 1)]


def test_paths_of_very_many_parts_are_refused() -> None:
    body = small_body()
    body["values"] = [["/a" * 300, 1]]
    refused(sealed(body))


def test_what_values_cost_is_counted_where_it_might_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by looking at all that is said of tensors, in each save; the bound is never below what is counted."""
    counted = []
    count = codec.record_cost
    monkeypatch.setattr(codec, "record_cost", lambda body: counted.append(len(body)) or count(body))
    encode_metadata(small())
    assert counted == []
    lists: list[Any] = [[] for _ in range(200_000)]
    encode_metadata(make(small().table, values={"/lists": lists}))  # 0.6 MB, 42 in memory
    assert len(counted) == 1
    with pytest.raises(UnsupportedValueError, match="a great many small Python values"):
        encode_metadata(make(small().table, values={"/lists": lists * 3}))


@pytest.mark.parametrize(("containers", "refuses"), [(4, True), (5, False)])
def test_more_containers_than_are_allowed_are_refused(
    containers: int, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = small_body()
    body["values"] = [["/x/y/z", 1]]  # the root, model, model/a, opt, x, x/y
    assert decode_metadata(sealed(body), "3.metadata", 3).value_records == [("/x/y/z", 1)]
    monkeypatch.setattr("paddle_dist_ckpt.tree.paths._FEW_CONTAINERS", containers)
    monkeypatch.setattr("paddle_dist_ckpt.tree.paths._CHARACTERS", 36)  # one of these for the paths' 42
    with pytest.raises(CheckpointCorruptedError, match="more containers than") if refuses else nullcontext():
        decode_metadata(sealed(body), "3.metadata", 3)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_keys_of_more_than_64_bits_are_refused(number: int) -> None:
    body = small_body()
    body["values"] = [[f"/x/~i{number}", 1]]
    with pytest.raises(CheckpointCorruptedError, match="a key of more than 64 bits"):
        decode_metadata(sealed(body), "3.metadata", 3)


def test_shards_of_more_dimensions_than_tensors_are_cut_in_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode_metadata(encode(small()), "3.metadata", 3).world_size == 2
    monkeypatch.setattr("paddle_dist_ckpt.files.tables._FEW_EDGES", 0)
    monkeypatch.setattr("paddle_dist_ckpt.files.tables._EDGES", 1)  # there are 7 shards of two dimensions, but for one
    with pytest.raises(CheckpointCorruptedError, match="shards of more dimensions than tensors are cut in"):
        decode_metadata(encode(small()), "3.metadata", 3)
