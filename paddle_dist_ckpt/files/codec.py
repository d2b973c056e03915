"""How the `.metadata` file is stored.

The file is two lines. The first is a small JSON object: format, version, required features, the length of the second,
the xxh3_64 digest of the file. The second is the JSON body (:class:`_Body`). Decoding is typed, and every size in the
file is checked against what is really there before anything of that size is allocated. The documentation has the
specification.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import xxhash

from ..core.decoding import MOST_COST, decoding, finite_float, json_cost
from ..core.garbage import no_collections
from ..core.shards import ShardTable
from ..errors import CheckpointCorruptedError, CheckpointError
from ..tree.paths import own_among
from ..tree.values import from_jsonable
from .metadata import FileInfo, Metadata, SaveInfo, save_members
from .names import parse_data_file
from .room import Room, check_values_fit, is_too_much, record_cost
from .tables import TableRecord, check_leaves, check_room, table_from_record, table_to_record
from .times import SaveTimes

__all__ = [
    "HEAD_START",
    "MAX_HEAD_BYTES",
    "NO_DIGEST",
    "VERSION",
    "Note",
    "check_block_bytes",
    "checked_cost",
    "decode_head",
    "decode_metadata",
    "decode_note",
    "digest_around",
    "encode_metadata",
]

FORMAT = "paddle_dist_ckpt.metadata"
HEAD_START = b'{"format":"' + FORMAT.encode() + b'"'
"""How every `.metadata` file of this format begins."""
VERSION = (1, 0)
MAX_HEAD_BYTES = 4096
NO_DIGEST = "0" * 16
PER_RANK = "per_rank"
FEATURES = frozenset({PER_RANK})


class _EncodedTable(NamedTuple):
    """A table in JSON, what that costs to be decoded, and whether ranks' own values are in it."""

    json: bytes
    cost: int
    has_own: bool


_TABLES: weakref.WeakKeyDictionary[ShardTable, _EncodedTable] = weakref.WeakKeyDictionary()


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


def check_block_bytes(size: int) -> None:
    """Refuse a block size that :class:`SaveOptions` would not let anybody write."""
    if not 4096 <= size <= 64 << 20 or size & (size - 1):
        raise CheckpointCorruptedError(f"checksums of blocks of {size} bytes")


def encode_metadata(metadata: Metadata, value_cost: int = 0) -> bytes:
    """The content of the `.metadata` file.

    Args:
        metadata: What it says.
        value_cost: What the values take to be decoded that are entries of data files, see :mod:`.room`.

    Raises:
        UnsupportedValueError: its values are so many and so small that it would be refused.
    """
    table, body = _encoded(metadata.table), _body_of(metadata)
    nbytes = len(body) + sum(info.size for info in metadata.files)
    at_most = len(body) + table.cost + 2 * MOST_COST * (len(body) - len(table.json))
    if is_too_much(value_cost + at_most, nbytes):  # otherwise it is not looked at all of it in each save
        check_values_fit(value_cost + record_cost(body), nbytes)
    features = [PER_RANK] if table.has_own else []
    head = Head(FORMAT, VERSION, features, metadata.save_id, len(body), NO_DIGEST)
    blank = msgspec.json.encode(head) + b"\n" + body + b"\n"
    at = blank.index(b"\n") - len(NO_DIGEST) - 2
    return blank[:at] + digest_around(blank, at).encode() + blank[at + len(NO_DIGEST) :]


def checked_cost(metadata: Metadata) -> int:
    """What the values of a `.metadata` will take that is to be written (:attr:`Metadata.cost`).

    Raises:
        CheckpointCorruptedError: its paths contradict each other, so that nobody could read it.
    """
    check_leaves([*metadata.table.paths, *(path for path, _ in metadata.value_records)])
    body = _body_of(metadata)
    return record_cost(body) - len(body)


def _body_of(metadata: Metadata) -> bytes:
    """The second line."""
    same = save_members(metadata) | {"user_metadata": metadata.user_tree, "files": metadata.files}
    tensors: Any = msgspec.Raw(_encoded(metadata.table).json)
    return msgspec.json.encode(_Body(**same, tensors=tensors, values=metadata.value_records, times=metadata.times))


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
    check_leaves([*body.tensors.paths, *(path for path, _ in body.values)])
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
