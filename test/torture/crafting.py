"""Checkpoints as somebody may make them who knows the format and means harm: with checksums that are right."""

from __future__ import annotations

import base64
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from paddle_dist_ckpt.files.runs import digest_of_zeros

__all__ = [
    "SAVE",
    "Entry",
    "column",
    "digest_around",
    "dumped",
    "metadata_around",
    "write_checkpoint",
    "write_data_file",
    "write_metadata",
]

SAVE = "5cb516fe1c9e0692"
ITEM_BYTES = {"uint8": 1, "float32": 4, "complex128": 16}
_COMMON = {"save": SAVE, "unique_id": 0, "world_size": 1, "created": "2026-11-21T00:25:03+00:00", "library": "x"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor: its kind (0, or 2 for a value), dtype, shape and cuts; its bytes, or none if they are a hole."""

    shape: Sequence[int]
    cuts: Sequence[Sequence[int]]
    dtype: str = "float32"
    kind: int = 0
    data: bytes = b""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def shards(self) -> list[int]:
        """The sizes of its shards."""
        sizes = np.full(1, ITEM_BYTES[self.dtype], np.int64)
        for n, places in zip(self.shape, self.cuts, strict=True):
            sizes = np.multiply.outer(sizes, np.diff([0, *places, n])).reshape(-1)
        return sizes.tolist()


def dumped(value: Any) -> bytes:
    """JSON without blanks."""
    return json.dumps(value, separators=(",", ":")).encode()


def column(values: Any, dtype: str = "<u1") -> list[str]:
    """A column of integers."""
    return [dtype, base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode()]


def digest_around(data: bytes, at: int) -> str:
    """The digest of data in which it stands itself, from byte ``at`` on."""
    return xxhash.xxh3_64_hexdigest(data[:at] + b"0" * 16 + data[at + 16 :])


def write_metadata(folder: Path, body: bytes, save: str = SAVE) -> None:
    """A file `.metadata` with this second line."""
    (folder / "0.metadata").write_bytes(metadata_around(body, save))


def metadata_around(body: bytes, save: str = SAVE) -> bytes:
    """A `.metadata` with this second line."""
    features = ["per_rank"] if b"/~r" in body else []
    head = {"format": "paddle_dist_ckpt.metadata", "version": [1, 0], "required_features": features, "save": save}
    data = dumped({**head, "body_bytes": len(body), "xxh3_64": "0" * 16}) + b"\n" + body + b"\n"
    at = data.index(b"\n") - 18
    return data[:at] + digest_around(data, at).encode() + data[at + 16 :]


def write_data_file(path: Path, hashes: Sequence[int] | np.ndarray, info: bytes, entries: bytes, size: int) -> str:
    """The header of a data file, and a hole for its data section of so many bytes; returns the header's digest.

    ``entries`` is their JSON without braces.
    """
    coded = base64.b64encode(np.asarray(hashes, "<u8").tobytes()).decode()
    text = dumped({"__metadata__": {"xxh3_64": "0" * 16, "hashes": coded, "info": info.decode()}})
    text = text[:-1] + (b"," + entries if entries else b"") + b"}"
    text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
    header = bytearray(len(text).to_bytes(8, "little") + text)
    at = 8 + len('{"__metadata__":{"xxh3_64":"')
    digest = digest_around(bytes(header), at)
    header[at : at + 16] = digest.encode()
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    return digest


@functools.lru_cache
def _digest_of_hole(page: bytes, nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(page + bytes(nbytes - len(page))) if page else digest_of_zeros(nbytes)


def write_checkpoint(
    folder: Path,
    entries: Mapping[str, Entry],
    values: Sequence[tuple[str, bytes]] = (),
    block_bytes: int = 1 << 20,
    edit: Callable[[dict[str, Any]], None] = lambda body: None,
    header_entries: bool = True,
    page: bytes = b"",
) -> None:
    """A checkpoint of one file. ``values`` are JSON; ``edit`` may change the body of `.metadata` and of the header.

    Blocks of holes begin with ``page``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = sorted(entries)
    order = sorted(paths, key=lambda path: -ITEM_BYTES[entries[path].dtype])  # as they stand in the file
    dtypes = sorted({entry.dtype for entry in entries.values()})
    table = {
        "paths": paths,
        "dtypes": dtypes,
        "dtype": column([dtypes.index(entries[path].dtype) for path in paths]),
        "kind": column([entries[path].kind for path in paths]),
        "layouts": [{"shape": list(entries[path].shape), "cuts": list(entries[path].cuts)} for path in paths],
        "layout": column(range(len(paths)), "<u4"),
        "shard_file": column(np.zeros(sum(len(entries[path].shards) for path in paths), np.uint8)),
    }
    name, size = f"0_0.{SAVE}.0.safetensors", sum(entry.nbytes for entry in entries.values())
    common = {**_COMMON, "block_bytes": block_bytes, "paddle": None, "tensors": table}
    info = {"format": "paddle_dist_ckpt.data", "version": [1, 0], "rank": 0, "part": 0, "parts": 1, "writers": [0]}
    info = {**info, **common, "values": "VALUES"}
    body = {**common, "user_metadata": None, "files": [[name, 0, ""]], "values": "VALUES"}
    edit(info)
    edit(body)
    coded = b"[" + b",".join(b"[%s,%s]" % (dumped(path), value) for path, value in values) + b"]"
    hashes: list[int] = []
    records, pages, at = [], list[int](), 0
    for path in order:
        entry = entries[path]
        for number, nbytes in enumerate(entry.shards):
            for start in range(0, nbytes, block_bytes):
                block = entry.data[start : min(start + block_bytes, nbytes)]
                zeros = min(block_bytes, nbytes - start)
                hashes.append(xxhash.xxh3_64_intdigest(block) if entry.data else _digest_of_hole(page, zeros))
                pages.append(at + start)
            if header_entries:
                place = {"dtype": "U8", "shape": [nbytes], "data_offsets": [at, at + nbytes]}
                records.append(dumped({f"{path}[{number}]": place})[1:-1])
            at += nbytes
    file = folder / name
    digest = write_data_file(file, hashes, dumped(info).replace(b'"VALUES"', coded), b",".join(records), size)
    with file.open("r+b") as stream:
        stream.seek(-size, 2)
        for path in order:
            if entries[path].data:
                stream.write(entries[path].data)
            else:
                stream.seek(entries[path].nbytes, 1)
        for start in pages if page else ():
            stream.seek(start - size, 2)
            stream.write(page)
    body["files"][0][1:] = [file.stat().st_size, digest]
    write_metadata(folder, dumped(body).replace(b'"VALUES"', coded))
