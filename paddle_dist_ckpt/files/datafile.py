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
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..core.box import Box
from ..core.cached import cached_property
from ..core.columns import IntArray, edges_of
from ..core.decoding import decoding, finite_float, hash_of
from ..core.dtypes import DType
from ..core.memory import Bytes1D
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..storage.base import ReadableFile
from .codec import NO_DIGEST, VERSION, check_block_bytes, digest_around
from .header import DIGEST_AT, MAX_HEADER_BYTES, EntryRecord, entries_text, read_header_digests, read_header_metadata
from .metadata import FileInfo
from .room import Room, record_cost
from .tables import TableRecord

__all__ = [
    "FORMAT",
    "DataFileInfo",
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
PART_HEADER_BYTES = 60 << 20
_ALIGNMENT = 4096
_HASHES_AT = DIGEST_AT + len(NO_DIGEST) + len('","hashes":"')
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class EntryKind:
    """What entries that are alike have in common: element type and the shard's shape."""

    dtype: DType
    shape: tuple[int, ...]

    def __hash__(self) -> int:
        return hash_of(self.shape)  # shapes may be a stranger's

    @property
    def nbytes(self) -> int:
        """Size of such an entry in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class FileTable:
    """The entries of a data file, in order, and what follows from them alone: it can be used for several saves.

    Entries go by item size, largest first, so that every entry is aligned to its items.

    Attributes:
        names: Their names in the file.
        kinds: The different kinds of them.
        kind: Which kind each is, ``[n]``.
        block_bytes: Bytes of a block.
    """

    names: list[str]
    kinds: list[EntryKind]
    kind: IntArray
    block_bytes: int

    @cached_property
    def sizes(self) -> IntArray:
        """Size of each entry in bytes, ``[n]``."""
        return np.array([kind.nbytes for kind in self.kinds], np.int64)[self.kind]

    @cached_property
    def starts(self) -> IntArray:
        """Where each entry starts in the data section, and behind the last its end, ``[n + 1]``."""
        return edges_of(self.sizes)

    @cached_property
    def offsets(self) -> list[int]:
        """The same, to be looked at one by one."""
        found: list[int] = self.starts.tolist()
        return found

    @property
    def nbytes(self) -> int:
        """Size of the data section."""
        return int(self.starts[-1])

    @cached_property
    def first_block(self) -> IntArray:
        """The number of each entry's first block among all of the file, and behind the last the total, ``[n + 1]``."""
        return edges_of(-(-self.sizes // self.block_bytes))

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return int(self.first_block[-1])

    @cached_property
    def text(self) -> bytes:
        """The entries in JSON, without the braces around them."""
        codes = [(kind.dtype.safetensors, _stored_shape(kind)) for kind in self.kinds]
        of_entry = map(codes.__getitem__, self.kind.tolist())
        columns = zip(self.names, of_entry, itertools.pairwise(self.starts.tolist()), strict=True)
        return entries_text((name, EntryRecord(code, shape, span)) for name, (code, shape), span in columns)


def _stored_shape(kind: EntryKind) -> tuple[int, ...]:
    return kind.shape if kind.dtype.view_items == 1 else (*kind.shape, kind.dtype.view_items)


class DataFileInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a data file says of itself, and of the save that it belongs to. The members are in the order of the file.

    Attributes:
        format: Tells that it is a data file of this library.
        version: Of the format.
        save_id, unique_id, world_size, block_bytes, created, library, paddle_version: See :class:`.metadata.SaveInfo`.
        rank: Who wrote it.
        part: Its number among the files of that rank, of which there are ``parts``.
        tensors: The tensors and shards that are in it.
        values: Values of the rank, by path, in their JSON; in its part 0 only.
        writers: All ranks that wrote files; like ``user_metadata`` in the coordinator's part 0 only.
    """

    format: str
    version: tuple[int, int]
    save_id: str = msgspec.field(name="save")
    unique_id: int
    world_size: int
    rank: int
    part: int
    parts: int
    block_bytes: int
    created: str
    library: str
    paddle_version: str | None = msgspec.field(name="paddle")
    tensors: TableRecord
    values: list[tuple[str, msgspec.Raw]] = []
    writers: list[int] | None = None
    user_metadata: Any = None


# Made here, not by the first thread that decodes: msgspec may crash if two threads have it look at a type at once.
_INFO_DECODER = msgspec.json.Decoder(DataFileInfo, float_hook=finite_float)


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


class FileLayout:
    """Where everything goes in one data file.

    Args:
        table: The entries.
        info: What its header says beside them.

    Attributes:
        table: The entries.
        data_start: Where the first entry starts, a multiple of a page.
        size: The file's size.
    """

    def __init__(self, table: FileTable, info: DataFileInfo) -> None:
        metadata = {"xxh3_64": NO_DIGEST, "hashes": "", "info": msgspec.json.encode(info).decode()}
        self._head = bytes(8) + msgspec.json.encode({"__metadata__": metadata})[:-1]
        self._tail = (b"," if table.text else b"", table.text, b"}")
        hashes = -(-8 * table.blocks // 3) * 4  # in base64
        self._nbytes = len(self._head) + hashes + sum(map(len, self._tail))
        self.data_start = -(-self._nbytes // _ALIGNMENT) * _ALIGNMENT
        if self.data_start > MAX_HEADER_BYTES:
            raise UnsupportedValueError(
                f"{table.names[0] if table.names else 'the values'} and what else goes in one file need a header of "
                f"{self.data_start} bytes, of which {MAX_HEADER_BYTES} are possible; larger block_bytes make it smaller"
            )
        self.table, self.size = table, self.data_start + table.nbytes

    def fill_header(self, header: Bytes1D, hashes: Hashes) -> str:
        """Write the header, with the blocks' digests in it, into memory for the part of the file before the first
        entry, ``[data_start]``; returns the header's own digest."""
        digests, at = base64.b64encode(hashes.astype("<u8").tobytes()), 0
        for part in (self._head[:_HASHES_AT], digests, self._head[_HASHES_AT:], *self._tail):
            header[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        header[at:] = ord(" ")
        text = header.data
        text[:8] = (self.data_start - 8).to_bytes(8, "little")
        digest = header_digest(text)
        text[DIGEST_AT : DIGEST_AT + len(NO_DIGEST)] = digest.encode()
        return digest


def header_digest(header: bytes | bytearray | memoryview) -> str:
    """The digest of a header, which the header itself and `.metadata` have."""
    return digest_around(header, DIGEST_AT)


def split_in_parts(table: FileTable, limit: int = PART_HEADER_BYTES) -> list[FileTable]:
    """Cut the entries into runs, at least one, whose headers have about ``limit`` bytes at the most."""
    dimensions = np.array([len(kind.shape) for kind in table.kinds], np.int64)[table.kind]
    lengths = np.array([len(name.encode()) for name in table.names], np.int64)
    costs = 256 + 3 * lengths + 60 * dimensions + 11 * np.diff(table.first_block)
    if int(costs.sum()) <= limit:
        return [table]
    cuts, used = [0], 0
    for i, cost in enumerate(costs.tolist()):
        if i > cuts[-1] and used + cost > limit:
            cuts.append(i)
            used = 0
        used += cost
    spans = [slice(start, stop) for start, stop in itertools.pairwise([*cuts, len(costs)])]
    return [FileTable(table.names[s], table.kinds, table.kind[s], table.block_bytes) for s in spans]


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
    record, data_start = read_header_digests(file, expected.name)
    if record.xxh3_64 != expected.digest:
        raise CheckpointCorruptedError(f"{expected.name}: its header is that of another save")
    hashes = record.hashes
    if len(hashes) != 8 * blocks:
        raise CheckpointCorruptedError(f"{expected.name} has {len(hashes) // 8} checksums where {blocks} are due")
    return np.frombuffer(hashes, "<u8"), data_start


def read_info(file: ReadableFile, name: str, room: Room | None = None) -> tuple[DataFileInfo, Hashes, FileInfo, int]:
    """What a data file says of itself, without a `.metadata` to compare it with.

    Args:
        file: The file.
        name: Its name.
        room: For what this and other files say of themselves; None if there are no others.

    Returns:
        The information, the blocks' digests, the file's record for `.metadata`, and where its data start.

    Raises:
        CheckpointCorruptedError: its header is not that of a data file of this format. (Its data are not looked at.)
    """
    record, data_start = read_header_metadata(file, name)
    with decoding(f"{name}: its header cannot be understood"):
        text = record.info.encode()
        (room or Room()).spend(record_cost(text), len(text))
        info = _INFO_DECODER.decode(text)
    if info.format != FORMAT or info.version[0] != VERSION[0] or len(record.hashes) % 8:
        raise CheckpointCorruptedError(f"{name} is not a {FORMAT} file of version 1")
    check_block_bytes(info.block_bytes)
    # In order, not as a set: integers can be made to have one hash, all of them.
    if any(rank == other for rank, other in itertools.pairwise(sorted(info.writers or ()))):
        raise CheckpointCorruptedError(f"{name} names a rank that wrote files twice")
    return info, np.frombuffer(record.hashes, "<u8"), FileInfo(name, file.size, record.xxh3_64), data_start
