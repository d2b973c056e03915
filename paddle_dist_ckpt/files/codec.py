"""How the shard table and the `.metadata` file are stored.

The file is two lines. The first is a small JSON object: format, version, required features, the length of the second,
the xxh3_64 digest of the file. The second is the JSON body (:class:`_Body`). Decoding is typed, and every size in the
file is checked against what is really there before anything of that size is allocated. The documentation has the
specification.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from ..core.columns import Column, IntArray, column_size, narrow, pack_column, unpack_column
from ..core.decoding import MOST_COST, decoding, finite_float, json_cost
from ..core.dtypes import DTYPES
from ..core.garbage import no_collections
from ..core.layouts import Layout, LayoutRecord
from ..core.shards import Kind, ShardTable
from ..errors import CheckpointCorruptedError, CheckpointError
from ..tree.paths import Containers, ListIndex, TupleIndex, occurs, own_among, parse_path
from ..tree.values import from_jsonable
from .metadata import FileInfo, Metadata, SaveInfo, save_members
from .names import parse_data_file
from .room import Room, check_values_fit, is_too_much, record_cost
from .times import SaveTimes

__all__ = [
    "HEAD_START",
    "MAX_HEAD_BYTES",
    "NO_DIGEST",
    "VERSION",
    "Note",
    "TableRecord",
    "check_block_bytes",
    "check_room",
    "decode_head",
    "decode_metadata",
    "decode_note",
    "digest_around",
    "encode_metadata",
    "table_from_record",
    "table_to_record",
]

FORMAT = "paddle_dist_ckpt.metadata"
HEAD_START = b'{"format":"' + FORMAT.encode() + b'"'
"""How every `.metadata` file of this format begins."""
VERSION = (1, 0)
MAX_HEAD_BYTES = 4096
NO_DIGEST = "0" * 16
_MAX_PARTS = 256  # more than a state_dict that can be saved has levels
_LEAST_ENTRY = 48  # bytes that a shard needs in the header of its file, whatever its name and shape
_FEW_EDGES = 1 << 21  # offsets of shards, one a dimension
_EDGES = 4  # and for each shard
_INT64 = range(-(2**63), 2**63)
_MAX_TOTAL_BYTES = 2**60
PER_RANK = "per_rank"
FEATURES = frozenset({PER_RANK})


class _EncodedTable(NamedTuple):
    """A table in JSON, what that costs to be decoded, and whether ranks' own values are in it."""

    json: bytes
    cost: int
    has_own: bool


_TABLES: weakref.WeakKeyDictionary[ShardTable, _EncodedTable] = weakref.WeakKeyDictionary()


class TableRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A :class:`ShardTable` as it is stored or sent. ``names`` is empty where no tensor has one."""

    paths: list[str]
    dtypes: list[str]
    dtype: Column
    kind: Column
    layouts: list[LayoutRecord]
    layout: Column
    shard_file: Column
    names: list[str | None] = []


class Head(msgspec.Struct, frozen=True):
    """The first line of `.metadata`. ``xxh3_64`` is that of the whole file with zeros in its own place."""

    format: str
    version: tuple[int, int]
    required_features: list[str]
    save: str
    body_bytes: int
    xxh3_64: str


class _Body(SaveInfo, frozen=True, kw_only=True, omit_defaults=True):
    """The second line of `.metadata`. Readers do without ``times``, and older ones do not know it."""

    user_metadata: Any
    files: list[FileInfo]
    tensors: TableRecord
    values: list[tuple[str, Any]]
    times: SaveTimes | None = None


class Note(msgspec.Struct, frozen=True):
    """What is read of the second line where tensors and values are of no interest."""

    save_id: str = msgspec.field(name="save")
    unique_id: int
    user_tree: msgspec.Raw = msgspec.field(name="user_metadata")

    def user_metadata(self, on_disk: Callable[[str], int]) -> Any:
        """What ``SaveOptions.user_metadata`` held; for ``on_disk`` see :func:`decode_metadata`.

        Raises:
            CheckpointCorruptedError: it is damaged, or has more objects than there is room for.
        """
        with decoding("user_metadata"):
            Room(lambda: on_disk(self.save_id)).take(memoryview(self.user_tree))
            return from_jsonable(_USER_DECODER.decode(self.user_tree))


# Made here, not by the first thread that decodes: msgspec may crash if two threads have it look at a type at once.
_HEAD_DECODER = msgspec.json.Decoder(Head)
_BODY_DECODER = msgspec.json.Decoder(_Body, float_hook=finite_float)
_NOTE_DECODER = msgspec.json.Decoder(Note)
_USER_DECODER = msgspec.json.Decoder(float_hook=finite_float)


def table_to_record(table: ShardTable) -> TableRecord:
    """A table in the form in which it is stored."""
    used = [dtype.name for dtype in table.dtype_list]
    names = sorted(used)
    place = np.array([names.index(name) for name in used], np.int64)
    return TableRecord(
        paths=table.paths,
        dtypes=names,
        dtype=pack_column(place[table.dtype_of]),
        kind=pack_column(table.kinds),
        layouts=[layout.to_record() for layout in table.layouts],
        layout=pack_column(table.layout_of),
        shard_file=pack_column(table.shard_file),
        names=table.names if table.names.count(None) < len(table.names) else [],
    )


def table_from_record(record: TableRecord, files: int) -> ShardTable:
    """The table that was stored.

    Raises:
        CheckpointCorruptedError: it contradicts itself.
    """
    tensors = len(record.paths)
    unknown = [name for name in record.dtypes if name not in DTYPES]
    if unknown or len(record.names) not in (0, tensors):
        raise CheckpointCorruptedError(f"the tensor table is not well-formed (unknown dtypes: {unknown[:5]})")
    _check_paths(record.paths)
    dtype = unpack_column(record.dtype, tensors, len(record.dtypes), "column dtype")
    kinds = unpack_column(record.kind, tensors, len(Kind), "column kind")
    layout_of = unpack_column(record.layout, tensors, len(record.layouts), "column layout")
    shards = column_size(record.shard_file, "column shard_file")
    layouts = _bounded_layouts(record.layouts, layout_of, shards)
    shard_file = narrow(unpack_column(record.shard_file, shards, files, "column shard_file"))
    known = [DTYPES[name] for name in record.dtypes]
    names: list[str | None] = list(record.names) or [None] * tensors
    table = ShardTable(record.paths, [known[i] for i in dtype.tolist()], kinds, layouts, layout_of, shard_file, names)
    if float(table.shard_bytes.sum(dtype=np.float64)) > _MAX_TOTAL_BYTES:
        raise CheckpointCorruptedError("the tensor table claims more bytes than any storage has")
    return table


def check_block_bytes(size: int) -> None:
    """Refuse a block size that :class:`SaveOptions` would not let anybody write."""
    if not 4096 <= size <= 64 << 20 or size & (size - 1):
        raise CheckpointCorruptedError(f"checksums of blocks of {size} bytes")


def check_room(table: ShardTable, files: Sequence[FileInfo]) -> None:
    """Refuse a table of more shards, or larger ones, than its files have room for."""
    shards = np.bincount(table.shard_file, minlength=len(files)).tolist()
    for info, data_bytes, count in zip(files, table.file_bytes(len(files)).tolist(), shards, strict=True):
        if info.size < 8 + data_bytes + _LEAST_ENTRY * count:
            raise CheckpointCorruptedError(
                f"{info.name}: {info.size} bytes, too few for {count} shards of {data_bytes}"
            )


def _check_leaves(paths: Sequence[str]) -> None:
    """Refuse leaves that are twice there or below each other, and list places that whole lists do not have."""
    _check_paths(sorted(paths))
    containers = Containers.of(paths)
    if containers.too_many:
        raise CheckpointCorruptedError("more containers than paths of that length lead through")
    if containers.leaves:
        raise CheckpointCorruptedError("a path is a leaf and a container")
    if containers.mixed:
        raise CheckpointCorruptedError("a path is a dict and a list")
    if containers.too_long:
        raise CheckpointCorruptedError("lists with far more places than are stored")
    listed = occurs("~l", paths) or occurs("~t", paths)
    for path in [p for p in paths if "~l" in p or "~t" in p] if listed else []:
        if any(isinstance(part, (ListIndex, TupleIndex)) and part.at >= len(paths) for part in parse_path(path)):
            raise CheckpointCorruptedError(f"{path[:100]}: an index in a list that is larger than all that is stored")


def _check_paths(paths: Sequence[str]) -> None:
    if _are_plain(paths):
        return
    try:
        for path in paths:
            if path.count("/") > _MAX_PARTS:
                raise ValueError(f"a path of more than {_MAX_PARTS} parts: {path[:80]}")
            plain = "~" not in path and path.startswith("/")
            if not plain and any(type(part) is int and part not in _INT64 for part in parse_path(path)):
                raise ValueError(f"a key of more than 64 bits: {path[:80]}")
    except ValueError as error:
        raise CheckpointCorruptedError(str(error)[:200]) from error
    if any(a >= b for a, b in itertools.pairwise(paths)):
        raise CheckpointCorruptedError("the paths of the tensor table are not in ascending order")


def _are_plain(paths: Sequence[str]) -> bool:
    """A quick test for paths in ascending order that need no closer look; False says nothing."""
    return not paths or (
        paths[0] >= "/"
        and paths[-1] < "0"  # the character after "/"; so all between begin with "/"
        and all(map(operator.lt, paths, itertools.islice(paths, 1, None)))
        and max(map(len, paths)) <= _MAX_PARTS
        and not occurs("~", paths)
    )


def _bounded_layouts(records: list[LayoutRecord], layout_of: IntArray, shards: int) -> list[Layout]:
    """The layouts, if together they have just ``shards`` shards; no layout may be larger than what is left of them."""
    uses = np.bincount(layout_of, minlength=len(records)).tolist()
    if 0 in uses:
        raise CheckpointCorruptedError("the tensor table has a layout that no tensor uses")
    layouts, left = [], shards
    for record, count in zip(records, uses, strict=True):
        layout = Layout.from_record(record, left // count)
        left -= len(layout.parts) * count
        layouts.append(layout)
    if sum(len(layout.parts) * len(layout.shape) for layout in layouts) > _FEW_EDGES + _EDGES * shards:
        raise CheckpointCorruptedError("the tensor table has shards of more dimensions than tensors are cut in")
    if left:
        raise CheckpointCorruptedError(f"the tensor table has {shards} shards, its layouts {shards - left}")
    return layouts


def encode_metadata(metadata: Metadata, value_cost: int = 0) -> bytes:
    """The content of the `.metadata` file.

    Args:
        metadata: What it says.
        value_cost: What the values take to be decoded that are entries of data files, see :mod:`.room`.

    Raises:
        UnsupportedValueError: its values are so many and so small that it would be refused.
    """
    same = save_members(metadata) | {"user_metadata": metadata.user_tree, "files": metadata.files}
    table, values = _encoded(metadata.table), metadata.value_records
    tensors: Any = msgspec.Raw(table.json)
    body = msgspec.json.encode(_Body(**same, tensors=tensors, values=values, times=metadata.times))
    nbytes = len(body) + sum(info.size for info in metadata.files)
    at_most = len(body) + table.cost + 2 * MOST_COST * (len(body) - len(table.json))
    if is_too_much(value_cost + at_most, nbytes):  # otherwise it is not looked at all of it in each save
        check_values_fit(value_cost + record_cost(body), nbytes)
    features = [PER_RANK] if table.has_own else []
    head = Head(FORMAT, VERSION, features, metadata.save_id, len(body), NO_DIGEST)
    blank = msgspec.json.encode(head) + b"\n" + body + b"\n"
    at = blank.index(b"\n") - len(NO_DIGEST) - 2
    return blank[:at] + digest_around(blank, at).encode() + blank[at + len(NO_DIGEST) :]


def digest_around(data: bytes | bytearray | memoryview, at: int) -> str:
    """The xxh3_64 digest of data that have it themselves, from byte ``at`` on: taken with zeros in its own place."""
    digest, view = xxhash.xxh3_64(), memoryview(data)
    for part in (view[:at], NO_DIGEST.encode(), view[at + len(NO_DIGEST) :]):
        digest.update(part)
    return digest.hexdigest()


def _encoded(table: ShardTable) -> _EncodedTable:
    """It is kept for as long as the table lives, since saves of an unchanged state share a table."""
    found = _TABLES.get(table)
    if found is None:
        json = msgspec.json.encode(table_to_record(table))
        found = _TABLES[table] = _EncodedTable(json, json_cost(json), bool(own_among(table.paths)))
    return found


def decode_head(data: bytes, name: str) -> Head | None:
    """The first line of a `.metadata` file, or None if the file is of another format.

    Args:
        data: The file's first ``MAX_HEAD_BYTES`` bytes, or all of them.
        name: The file's name, for errors.

    Raises:
        CheckpointError: the file is of a version, or needs a feature, that this library does not know.
        CheckpointCorruptedError: the line is not what it should be.
    """
    if not data.startswith(HEAD_START):
        return None
    with decoding(f"{name}: its first line is damaged"):
        head = _HEAD_DECODER.decode(data[:MAX_HEAD_BYTES].split(b"\n", 1)[0])
    unknown = sorted(set(head.required_features) - FEATURES)
    if head.version[0] != VERSION[0] or unknown:
        raise CheckpointError(
            f"{name} has format version {head.version[0]}.{head.version[1]} and needs the features {unknown}; this "
            f"library reads version {VERSION[0]}.x. Use a newer paddle_dist_ckpt"
        )
    return head


def decode_metadata(
    data: bytes, name: str, unique_id: int, on_disk: Callable[[str], int] = lambda save_id: 0
) -> Metadata:
    """The checkpoint that a `.metadata` file describes.

    Args:
        data: The file's content.
        name: Its name, for errors.
        unique_id: The checkpoint's number.
        on_disk: How many bytes the data files of a save have that are really there; asked if there are many values.

    Raises:
        CheckpointError: see :func:`decode_head`.
        CheckpointCorruptedError: the file is not whole, or contradicts itself.
    """
    head, body = _lines(data, name)
    with decoding(name), no_collections():
        cost = record_cost(body) - len(body)
        Room(lambda: on_disk(head.save)).spend(cost, 0)
        record = _BODY_DECODER.decode(body)
        _check_identity(record, head, unique_id)
        return _metadata_of(record, cost)


def decode_note(data: bytes, name: str, unique_id: int) -> Note:
    """What a `.metadata` file says beside its tensors and values: :func:`decode_metadata` in a hundredth of the time.

    Raises:
        CheckpointError: see :func:`decode_head`.
        CheckpointCorruptedError: the file is not whole, or is another one's. What it says of tensors is not looked at.
    """
    head, body = _lines(data, name)
    with decoding(name):
        note = _NOTE_DECODER.decode(body)
        _check_identity(note, head, unique_id)
        return note


def _lines(data: bytes, name: str) -> tuple[Head, memoryview]:
    """The two lines of a `.metadata` file that is whole."""
    head = decode_head(data, name)
    if head is None:
        raise CheckpointCorruptedError(f"{name} is not a paddle_dist_ckpt .metadata file; it starts with {data[:24]!r}")
    start = data.index(b"\n") + 1 if b"\n" in data else len(data)
    body = memoryview(data)[start : start + head.body_bytes]
    if len(body) != head.body_bytes or data[start + len(body) :] != b"\n":
        raise CheckpointCorruptedError(f"{name} has {len(data)} bytes where {start + head.body_bytes + 1} are due")
    at = start - len(NO_DIGEST) - 3
    if data[at:start] != digest_around(data, at).encode() + b'"}\n':
        raise CheckpointCorruptedError(f"{name}: its checksum does not match; it was damaged after it was written")
    return head, body


def _check_identity(body: _Body | Note, head: Head, unique_id: int) -> None:
    if body.save_id != head.save:
        raise CheckpointCorruptedError("its two lines name different saves")
    if body.unique_id != unique_id:
        raise CheckpointCorruptedError(f"it says that its id is {body.unique_id}; was it renamed?")


def _metadata_of(body: _Body, cost: int) -> Metadata:
    check_block_bytes(body.block_bytes)
    # A digest is there for each, since a file without one is taken to be of another format, and not verified.
    # And whoever copies or removes a checkpoint must not touch other files.
    named = {f.name for f in body.files if (parsed := parse_data_file(f.name)) and parsed.save_id == body.save_id}
    if body.world_size < 1 or len(named) < len(body.files) or not all(f.digest for f in body.files):
        raise CheckpointCorruptedError("world size or file list out of bounds")
    msgspec.msgpack.encode((body.world_size, body.files, body.values))  # raises if numbers are too large for messages
    _check_leaves([*body.tensors.paths, *(path for path, _ in body.values)])
    table = table_from_record(body.tensors, len(body.files))
    check_room(table, body.files)
    if body.times is not None:
        body.times.check(body.world_size)
    metadata = Metadata(
        **save_members(body),
        user_tree=body.user_metadata,
        files=body.files,
        table=table,
        value_records=body.values,
        times=body.times,
        cost=cost,
    )
    _ = metadata.user_metadata  # raises if it is damaged
    return metadata
