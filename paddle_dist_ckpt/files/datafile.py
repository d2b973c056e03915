"""Data files: safetensors whose header also carries checksums and all that a lost `.metadata` can be made from.

A file's header has the entries (one a shard, named by its flat key and its slice) and under ``__metadata__``:

    xxh3_64   digest of the header (everything before the first entry) with zeros in its own place
    hashes    base64 of little-endian xxh3_64 digests, one for every block of every entry, entry by entry
    info      JSON (:class:`DataFileInfo`)

Hashes are known only when the data have been written, so :class:`FileLayout` reserves their place: base64 of a known
length, at a known position. The header's own digest is also in `.metadata`.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..core.box import Box
from ..core.columns import IntArray
from ..core.dtypes import DType
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..storage.base import ReadableFile
from ..tree.values import DECODE_ERRORS
from .codec import VERSION, TableRecord, check_block_bytes
from .metadata import FileInfo, SaveInfo

__all__ = [
    "FORMAT",
    "DataFileInfo",
    "Entries",
    "EntryKind",
    "FileLayout",
    "FileTable",
    "Hashes",
    "escaped_key",
    "header_digest",
    "read_header",
    "read_info",
    "slice_suffix",
    "split_in_parts",
]

FORMAT = "paddle_dist_ckpt.data"
MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
PART_HEADER_BYTES = 60 << 20
_ALIGNMENT = 4096
_NO_DIGEST = "0" * 16
_DIGEST_AT = 8 + len('{"__metadata__":{"xxh3_64":"')
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class EntryKind:
    """What entries that are alike have in common: element type and the shard's shape."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of such an entry in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries of a data file, in order.

    Attributes:
        names: Their names in the file.
        kinds: The different kinds of them.
        kind: Which kind each is, ``[n]``.
    """

    names: list[str]
    kinds: list[EntryKind]
    kind: IntArray

    @cached_property
    def sizes(self) -> IntArray:
        """Size of each entry in bytes, ``[n]``."""
        return np.array([kind.nbytes for kind in self.kinds], np.int64)[self.kind]

    def part(self, start: int, stop: int) -> Entries:
        """The entries from number ``start`` to before ``stop``."""
        return Entries(self.names[start:stop], self.kinds, self.kind[start:stop])


class DataFileInfo(SaveInfo, frozen=True, kw_only=True):
    """What a data file says of itself, and of the save that it belongs to.

    Attributes:
        format: Tells that it is a data file of this library.
        version: Of the format.
        rank: Who wrote it.
        part: Its number among the files of that rank, of which there are ``parts``.
        tensors: The tensors and shards that are in it.
        values: Values of the rank; in its part 0 only.
        writers: All ranks that wrote files; like ``user_metadata`` in the coordinator's part 0 only.
    """

    format: str
    version: tuple[int, int]
    rank: int
    part: int
    parts: int
    tensors: TableRecord
    values: list[tuple[str, Any]] = msgspec.field(default_factory=list)
    writers: list[int] | None = None
    user_metadata: Any = None

    def to_json(self) -> bytes:
        """This as JSON, with its members in the order that they have in every file; what is empty is left out."""
        members = {
            "format": self.format,
            "version": self.version,
            "save": self.save_id,
            "unique_id": self.unique_id,
            "world_size": self.world_size,
            "rank": self.rank,
            "part": self.part,
            "parts": self.parts,
            "block_bytes": self.block_bytes,
            "created": self.created,
            "library": self.library,
            "paddle": self.paddle_version,
            "tensors": self.tensors,
            **({"values": self.values} if self.values else {}),
            **({"writers": self.writers} if self.writers is not None else {}),
            **({"user_metadata": self.user_metadata} if self.user_metadata is not None else {}),
        }
        return msgspec.json.encode(members)


class _EntryRecord(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _HeaderMetadata(msgspec.Struct, frozen=True):
    xxh3_64: str
    hashes: bytes
    info: str


class _Header(msgspec.Struct, frozen=True):
    metadata: _HeaderMetadata = msgspec.field(name="__metadata__")


# Made here, not by the first thread that decodes: msgspec may crash if two threads have it look at a type at once.
_HEADER_DECODER = msgspec.json.Decoder(_Header)
_INFO_DECODER = msgspec.json.Decoder(DataFileInfo)


def escaped_key(key: str) -> str:
    """The first part of an entry's name: the flat key, such that different shards have different names.

    ``%`` and ``[`` become ``%25`` and ``%5B``; an empty key becomes ``%``, and the one name that safetensors keeps for
    itself ``%__metadata__``.
    """
    if "%" in key or "[" in key:
        key = key.replace("%", "%25").replace("[", "%5B")
    return "%" + key if key in ("", "__metadata__") else key


def slice_suffix(box: Box, global_shape: Sequence[int]) -> str:
    """The second part of an entry's name: the shard as a numpy-like slice, nothing for a whole tensor."""
    return "" if box.shape == tuple(global_shape) else str(box)


@dataclass(frozen=True, eq=False)
class FileTable:
    """The part of a data file's layout that follows from its entries alone, and so can be used for several saves.

    Entries go by item size, largest first, so that every entry is aligned to its items.
    """

    entries: Entries
    block_bytes: int

    @cached_property
    def ends(self) -> IntArray:
        """Where each entry ends in the data section, ``[n]``."""
        return np.cumsum(self.entries.sizes)

    @property
    def nbytes(self) -> int:
        """Size of the data section."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @cached_property
    def first_block(self) -> list[int]:
        """The number of each entry's first block among all of the file, and behind the last the total."""
        return [0, *np.cumsum(-(-self.entries.sizes // self.block_bytes)).tolist()]

    @cached_property
    def offsets(self) -> list[int]:
        """Where each entry starts in the data section, and behind the last its end."""
        return [0, *self.ends.tolist()]

    @cached_property
    def text(self) -> bytes:
        """The entries in JSON, without the braces around them."""
        records = {}
        codes = [(kind.dtype.safetensors, _stored_shape(kind)) for kind in self.entries.kinds]
        offsets = self.offsets
        for i, (name, kind) in enumerate(zip(self.entries.names, self.entries.kind.tolist(), strict=True)):
            code, shape = codes[kind]
            records[name] = _EntryRecord(code, shape, (offsets[i], offsets[i + 1]))
        return msgspec.json.encode(records)[1:-1]


def _stored_shape(kind: EntryKind) -> tuple[int, ...]:
    return kind.shape if kind.dtype.view_items == 1 else (*kind.shape, kind.dtype.view_items)


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """Where everything goes in one data file.

    Attributes:
        table: What it holds.
        data_start: Where the first entry starts, a multiple of a page.
    """

    table: FileTable
    data_start: int
    _template: bytes
    _hashes_at: int

    @classmethod
    def of(cls, table: FileTable, info: DataFileInfo) -> FileLayout:
        """Lay out a file.

        Args:
            table: What it shall hold.
            info: What its header says beside the entries.
        """
        hashes = base64.b64encode(bytes(8 * table.first_block[-1])).decode("ascii")
        metadata = {"xxh3_64": _NO_DIGEST, "hashes": hashes, "info": info.to_json().decode()}
        entries = table.text
        head = msgspec.json.encode({"__metadata__": metadata})
        text = head[:-1] + (b"," + entries if entries else b"") + b"}"
        data_start = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT
        if data_start > MAX_HEADER_BYTES:
            names = table.entries.names
            raise UnsupportedValueError(
                f"{names[0] if names else 'the values'} and what else goes in one file need a header of "
                f"{data_start} bytes, of which {MAX_HEADER_BYTES} are possible; larger block_bytes make it smaller"
            )
        template = (data_start - 8).to_bytes(8, "little") + text.ljust(data_start - 8)
        return cls(table, data_start, template, _DIGEST_AT + len(_NO_DIGEST) + len('","hashes":"'))

    @property
    def size(self) -> int:
        """The file's size."""
        return self.data_start + self.table.nbytes

    def header(self, hashes: Hashes) -> bytearray:
        """The header with the blocks' digests in it; also the part of the file before the first entry."""
        text = base64.b64encode(hashes.astype("<u8").tobytes())
        at = self._hashes_at
        header = bytearray(self._template)
        header[at : at + len(text)] = text
        header[_DIGEST_AT : _DIGEST_AT + len(_NO_DIGEST)] = header_digest(header).encode()
        return header


def header_digest(header: bytes | bytearray) -> str:
    """The digest of a header, which the header itself and `.metadata` have; taken with zeros in its own place."""
    digest, view = xxhash.xxh3_64(), memoryview(header)
    for part in (view[:_DIGEST_AT], _NO_DIGEST.encode(), view[_DIGEST_AT + len(_NO_DIGEST) :]):
        digest.update(part)
    return digest.hexdigest()


def split_in_parts(entries: Entries, block_bytes: int, limit: int = PART_HEADER_BYTES) -> list[Entries]:
    """Cut the entries into runs, at least one, whose headers have about ``limit`` bytes at the most."""
    blocks = -(-entries.sizes // block_bytes)
    dimensions = np.array([len(kind.shape) for kind in entries.kinds], np.int64)[entries.kind]
    lengths = np.array([len(name.encode()) for name in entries.names], np.int64)
    costs = 256 + 3 * lengths + 60 * dimensions + 11 * blocks
    if int(costs.sum()) <= limit:
        return [entries]
    cuts, used = [0], 0
    for i, cost in enumerate(costs.tolist()):
        if i > cuts[-1] and used + cost > limit:
            cuts.append(i)
            used = 0
        used += cost
    return [entries.part(start, stop) for start, stop in itertools.pairwise([*cuts, len(costs)])]


def read_header(file: ReadableFile, expected: FileInfo, blocks: int) -> tuple[Hashes, int]:
    """Check an open data file against what `.metadata` says of it; returns its digests and where its data start.

    Args:
        file: The file.
        expected: Its name, size and header digest.
        blocks: How many blocks its entries have.

    Raises:
        CheckpointCorruptedError: it is not the file that was written.
    """
    if file.size != expected.size:
        raise CheckpointCorruptedError(f"{expected.name} has {file.size} bytes; {expected.size} were written")
    header = _header_bytes(file, expected.name)
    record = _parse(header, expected.name)
    if record.xxh3_64 != expected.digest:
        raise CheckpointCorruptedError(f"{expected.name}: its header is that of another save")
    hashes = record.hashes
    if len(hashes) != 8 * blocks:
        raise CheckpointCorruptedError(f"{expected.name} has {len(hashes) // 8} checksums where {blocks} are due")
    return np.frombuffer(hashes, "<u8"), len(header)


def read_info(file: ReadableFile, name: str) -> tuple[DataFileInfo, Hashes, FileInfo, int]:
    """What a data file says of itself, without a `.metadata` to compare it with.

    Returns:
        The information, the blocks' digests, the file's record for `.metadata`, and where its data start.

    Raises:
        CheckpointCorruptedError: its header is not that of a data file of this format. (Its data are not looked at.)
    """
    header = _header_bytes(file, name)
    record = _parse(header, name)
    try:
        info = _INFO_DECODER.decode(record.info)
    except DECODE_ERRORS as error:
        raise CheckpointCorruptedError(f"{name}: its header cannot be understood: {error}") from error
    if info.format != FORMAT or info.version[0] != VERSION[0] or len(record.hashes) % 8:
        raise CheckpointCorruptedError(f"{name} is not a {FORMAT} file of version 1")
    check_block_bytes(info.block_bytes)
    known = FileInfo(name, file.size, record.xxh3_64)
    return info, np.frombuffer(record.hashes, "<u8"), known, len(header)


def _header_bytes(file: ReadableFile, name: str) -> bytearray:
    length = np.zeros(8, np.uint8)
    try:
        file.read_into([length], 0)
        size = int.from_bytes(length.tobytes(), "little")
        if not 2 <= size <= min(MAX_HEADER_BYTES, file.size - 8):
            raise CheckpointCorruptedError(f"{name} is not a whole safetensors file: its header has {size} bytes")
        header = bytearray(8 + size)
        file.read_into([np.frombuffer(header, np.uint8)], 0)
    except EOFError as error:
        raise CheckpointCorruptedError(f"{name} is cut short: {error}") from error
    return header


def _parse(header: bytearray, name: str) -> _HeaderMetadata:
    try:
        record = _HEADER_DECODER.decode(memoryview(header)[8:]).metadata
    except DECODE_ERRORS as error:
        raise CheckpointCorruptedError(f"{name}: its header is damaged, or of another format: {error}") from error
    if header_digest(header) != record.xxh3_64:
        raise CheckpointCorruptedError(f"{name}: its header was damaged after it was written")
    return record
