"""The header of a data file, in pieces: it is nearly as large as the file if that has very many tiny entries."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import xxhash

from ..core.decoding import decoding
from ..core.memory import Bytes1D
from ..errors import CheckpointCorruptedError
from ..storage.base import ReadableFile
from .codec import NO_DIGEST

__all__ = [
    "DIGEST_AT",
    "MAX_HEADER_BYTES",
    "EntryRecord",
    "HeaderMetadata",
    "entries_text",
    "header_pieces",
    "read_header_digests",
    "read_header_metadata",
]

MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
DIGEST_AT = 8 + len('{"__metadata__":{"xxh3_64":"')
_PIECE = 1 << 20
_TOGETHER = 1 << 12  # entries
_AFTER_STRINGS = b":,}] \t\r\n"


class EntryRecord(msgspec.Struct, frozen=True, gc=False):
    """An entry of a header, as safetensors has it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class HeaderDigests(msgspec.Struct, frozen=True):
    """The digests in a header: see :mod:`.datafile`."""

    xxh3_64: str
    hashes: bytes


class HeaderMetadata(HeaderDigests, frozen=True):
    """What a header has beside the entries."""

    info: str


_Record = TypeVar("_Record", bound=HeaderDigests)


class _Header(msgspec.Struct, Generic[_Record], frozen=True):
    metadata: _Record = msgspec.field(name="__metadata__")


class _Entries(msgspec.Struct, frozen=True):
    """Entries that nobody asks for."""


# Made here, not by the first thread that decodes: msgspec may crash if two threads have it look at a type at once.
_DIGESTS_DECODER = msgspec.json.Decoder(_Header[HeaderDigests])
_METADATA_DECODER = msgspec.json.Decoder(_Header[HeaderMetadata])
_ENTRIES_DECODER = msgspec.json.Decoder(_Entries)


def entries_text(items: Iterable[tuple[str, Any]]) -> bytes:
    """What a header has by names that differ, in JSON without the braces. Some are looked at together, for there may be
    very many."""
    rest = iter(items)
    some = iter(lambda: msgspec.json.encode(dict(itertools.islice(rest, _TOGETHER)))[1:-1], b"")
    return b",".join(some)


def read_header_metadata(file: ReadableFile, name: str) -> tuple[HeaderMetadata, int]:
    """What a data file's header has beside the entries, and how long the header is."""
    return _read(file, name, _METADATA_DECODER)


def read_header_digests(file: ReadableFile, name: str) -> tuple[HeaderDigests, int]:
    """The digests alone, in half the memory: what a header says of its file is as large as the keys in it."""
    return _read(file, name, _DIGESTS_DECODER)


def _read(file: ReadableFile, name: str, decoder: msgspec.json.Decoder[_Header[_Record]]) -> tuple[_Record, int]:
    """The entries, which take nearly all of a header of many, are decoded some after others, and not kept."""
    record: _Record | None = None
    with decoding(f"{name}: its header is damaged, or of another format"):
        digest, size, text = xxhash.xxh3_64(), 0, bytearray()
        for piece, size in header_pieces(file, digest):  # noqa: B007
            seen = max(0, len(text) - 3)
            text += piece[0 if text else 8 :].data
            end = _end_of_an_entry(text, seen)
            if end:
                rest = text[end + 1 :]
                text[end:] = b"}"
                record = _decoded(text, record, decoder)
                text = bytearray(b"{") + rest
        record = _decoded(text, record, decoder)
        if digest.hexdigest() != record.xxh3_64:
            raise CheckpointCorruptedError("it was damaged after it was written")
    return record, size


def _end_of_an_entry(text: bytearray, start: int) -> int:
    """Where the last entry ends that is seen from ``start`` on to have one behind it, or 0.

    Within a string the quote would be escaped; one at a string's end has one of ``_AFTER_STRINGS`` behind it. (So may
    one before a key, which is passed over.)
    """
    end = text.rfind(b'},"', start)
    while end >= 0 and text[end + 3 : end + 4] in _AFTER_STRINGS:  # or the text ends there
        end = text.rfind(b'},"', start, end)
    return end + 1


def _decoded(text: bytearray, record: _Record | None, decoder: msgspec.json.Decoder[_Header[_Record]]) -> _Record:
    """What the first part of a header has; after that, look whether others are what they should be."""
    if record is None:
        return decoder.decode(text).metadata
    _ENTRIES_DECODER.decode(text)
    return record


def header_pieces(file: ReadableFile, digest: xxhash.xxh3_64) -> Iterator[tuple[Bytes1D, int]]:
    """The length and the text that a file begins with, in pieces, each with the bytes of all; of one with a hole there,
    no more than before the hole. At the end ``digest`` is the header's own.

    Raises:
        CheckpointCorruptedError: the file has no header of this format.
    """
    try:
        length = np.zeros(8, np.uint8)
        file.read_into([length], 0)
        size = int.from_bytes(length.tobytes(), "little")
        if not 2 <= size <= min(MAX_HEADER_BYTES, file.size - 8):
            raise CheckpointCorruptedError(f"this is not a whole safetensors file, or it has a header of {size} bytes")
        for start in range(0, 8 + size, _PIECE):
            piece = np.empty(min(_PIECE, 8 + size - start), np.uint8)
            file.read_into([piece], start)
            if not piece[0 if start else 8 :].all():
                raise CheckpointCorruptedError("a zero byte in text")
            at = len(piece) if start else DIGEST_AT
            for part in (piece[:at].data, NO_DIGEST.encode()[: len(piece) - at], piece[at + len(NO_DIGEST) :].data):
                digest.update(part)
            yield piece, 8 + size
    except EOFError as error:
        raise CheckpointCorruptedError(f"cut short: {error}") from error
