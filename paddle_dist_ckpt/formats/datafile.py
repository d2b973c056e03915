"""Data files: safetensors whose header also carries checksums and all that a lost `.metadata` can be made from.

A file's header has the entries (one a shard, named by :func:`entry_name`) and under ``__metadata__``:

    xxh3_64   digest of the header (everything before the first entry) with zeros in its own place
    hashes    base64 of little-endian xxh3_64 digests, one for every block of every entry, entry by entry
    info      JSON (:class:`DataFileInfo`)

Hashes are known only when the data have been written, so :class:`FileLayout` reserves their place: base64 of a known
length, at a known position. The header's own digest is also in `.metadata`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..core.box import Box
from ..core.codec import VERSION, TableRecord, check_block_bytes
from ..core.dtypes import DType
from ..core.metadata import FileInfo
from ..core.ports import Bytes1D
from ..core.values import DECODE_ERRORS
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..storage.base import ReadableFile

__all__ = [
    "DataFileInfo",
    "Entry",
    "FileLayout",
    "block_count",
    "entry_name",
    "read_header",
    "read_info",
    "split_in_parts",
]

FORMAT = "paddle_dist_ckpt.data"
MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
PART_HEADER_BYTES = 60 << 20
_ALIGNMENT = 4096
_NO_DIGEST = "0" * 16
_DIGEST_AT = 8 + len('{"__metadata__":{"xxh3_64":"')
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One shard to be written.

    Attributes:
        name: Its name in the file.
        dtype: Element type.
        shape: The shard's shape.
        array: Its data as raw items, of that shape, contiguous or not.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    array: npt.NDArray[Any]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.array.nbytes


class DataFileInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a data file says of itself and of the save that it belongs to.

    ``writers`` (all ranks that wrote files) and ``user_metadata`` are in the coordinator's part 0 only, a rank's values
    in its own part 0.
    """

    format: str
    version: tuple[int, int]
    save: str
    unique_id: int
    world_size: int
    rank: int
    part: int
    parts: int
    block_bytes: int
    created: str
    library: str
    paddle: str | None
    tensors: TableRecord
    values: list[tuple[str, Any]] = []
    writers: list[int] | None = None
    user_metadata: Any = None


class _EntryRecord(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _HeaderMetadata(msgspec.Struct, frozen=True):
    xxh3_64: str
    hashes: bytes
    info: str


class _Header(msgspec.Struct, frozen=True):
    metadata: _HeaderMetadata = msgspec.field(name="__metadata__")


def entry_name(key: str, box: Box, global_shape: Sequence[int]) -> str:
    """The name of a shard's entry: the flat key, and where it is not the whole tensor a numpy-like slice behind it.

    ``%`` and ``[`` in the key become ``%25`` and ``%5B``; an empty key becomes ``%``, and the one name that safetensors
    keeps for itself ``%__metadata__``. So different shards have different names.
    """
    return escaped_key(key) + slice_suffix(box, global_shape)


def escaped_key(key: str) -> str:
    """The first part of an entry's name."""
    if "%" in key or "[" in key:
        key = key.replace("%", "%25").replace("[", "%5B")
    return "%" + key if key in ("", "__metadata__") else key


def slice_suffix(box: Box, global_shape: Sequence[int]) -> str:
    """The second part of an entry's name, empty for a whole tensor."""
    return "" if box.shape == tuple(global_shape) else str(box)


def block_count(nbytes: int, block_bytes: int) -> int:
    """How many blocks an entry of that size has."""
    return -(-nbytes // block_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """Where everything goes in one data file.

    Attributes:
        entries: What it holds, in order.
        starts: Where each entry starts in the file.
        first_block: The number of each entry's first block among all of the file, and behind the last the total.
        data_start: Where the first entry starts, a multiple of a page.
        size: The file's size.
        block_bytes: Bytes of a block.
    """

    entries: Sequence[Entry]
    starts: list[int]
    first_block: list[int]
    data_start: int
    size: int
    block_bytes: int
    _template: bytes
    _hashes_at: int

    @classmethod
    def of(cls, entries: Sequence[Entry], info: DataFileInfo) -> FileLayout:
        """Lay out a file.

        Args:
            entries: What it shall hold, by item size, largest first, so that every entry is aligned to its items.
            info: What its header says beside them.
        """
        ends = np.cumsum([entry.nbytes for entry in entries], dtype=np.int64).tolist()
        offsets = [0, *ends][: len(entries)]
        blocks = np.cumsum([block_count(e.nbytes, info.block_bytes) for e in entries], dtype=np.int64).tolist()
        hashes = base64.b64encode(bytes(8 * (blocks[-1] if blocks else 0))).decode("ascii")
        metadata = {"xxh3_64": _NO_DIGEST, "hashes": hashes, "info": msgspec.json.encode(info).decode()}
        header: dict[str, Any] = {"__metadata__": metadata}
        for entry, start, end in zip(entries, offsets, ends, strict=True):
            shape = entry.shape if entry.dtype.view_items == 1 else (*entry.shape, entry.dtype.view_items)
            header[entry.name] = _EntryRecord(entry.dtype.safetensors, shape, (start, end))
        text = msgspec.json.encode(header)
        data_start = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT
        if data_start > MAX_HEADER_BYTES:
            raise UnsupportedValueError(
                f"{entries[0].name if entries else 'the values'} and what else goes in one file need a header of "
                f"{data_start} bytes, of which {MAX_HEADER_BYTES} are possible; larger block_bytes make it smaller"
            )
        template = (data_start - 8).to_bytes(8, "little") + text.ljust(data_start - 8)
        return cls(
            entries,
            [data_start + offset for offset in offsets],
            [0, *blocks],
            data_start,
            data_start + (ends[-1] if ends else 0),
            info.block_bytes,
            template,
            _DIGEST_AT + len(_NO_DIGEST) + len('","hashes":"'),
        )

    def header(self, hashes: Hashes) -> bytes:
        """The header with the blocks' digests in it; also the part of the file before the first entry."""
        text = base64.b64encode(hashes.astype("<u8").tobytes())
        at = self._hashes_at
        header = self._template[:at] + text + self._template[at + len(text) :]
        return _with_digest(header, header_digest(header))


def header_digest(header: bytes) -> str:
    """The digest by which a header knows itself, and `.metadata` the file: with zeros in the digest's own place."""
    return xxhash.xxh3_64_hexdigest(_with_digest(header, _NO_DIGEST))


def _with_digest(header: bytes, digest: str) -> bytes:
    return header[:_DIGEST_AT] + digest.encode() + header[_DIGEST_AT + len(_NO_DIGEST) :]


def split_in_parts(entries: Iterable[Entry], block_bytes: int, limit: int = PART_HEADER_BYTES) -> list[list[Entry]]:
    """The entries in runs, each of which makes a header of at most about ``limit`` bytes. At least one run."""
    parts: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        cost = 256 + 3 * len(entry.name.encode()) + 60 * len(entry.shape) + 11 * block_count(entry.nbytes, block_bytes)
        if parts[-1] and used + cost > limit:
            parts.append([])
            used = 0
        parts[-1].append(entry)
        used += cost
    return parts


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
        info = msgspec.json.decode(record.info, type=DataFileInfo)
    except DECODE_ERRORS as error:
        raise CheckpointCorruptedError(f"{name}: its header cannot be understood: {error}") from error
    if info.format != FORMAT or info.version[0] != VERSION[0] or len(record.hashes) % 8:
        raise CheckpointCorruptedError(f"{name} is not a {FORMAT} file of version 1")
    check_block_bytes(info.block_bytes)
    known = FileInfo(name, file.size, record.xxh3_64)
    return info, np.frombuffer(record.hashes, "<u8"), known, len(header)


def _header_bytes(file: ReadableFile, name: str) -> bytes:
    length = np.zeros(8, np.uint8)
    try:
        file.read_into([length], 0)
        size = int.from_bytes(length.tobytes(), "little")
        if not 2 <= size <= min(MAX_HEADER_BYTES, file.size - 8):
            raise CheckpointCorruptedError(f"{name} is not a whole safetensors file: its header has {size} bytes")
        text: Bytes1D = np.empty(size, np.uint8)
        file.read_into([text], 8)
    except EOFError as error:
        raise CheckpointCorruptedError(f"{name} is cut short: {error}") from error
    return length.tobytes() + text.tobytes()


def _parse(header: bytes, name: str) -> _HeaderMetadata:
    try:
        record = msgspec.json.decode(header[8:], type=_Header).metadata
    except DECODE_ERRORS as error:
        raise CheckpointCorruptedError(f"{name}: its header is damaged, or of another format: {error}") from error
    if header_digest(header) != record.xxh3_64:
        raise CheckpointCorruptedError(f"{name}: its header was damaged after it was written")
    return record
