"""The plain probe, with the kernel told after each chunk to begin writing it to the disk (``sync_file_range``)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import xxhash

from benchmark.peers.probe import (
    CHUNK_BYTES,
    State,
    build,
    load,
    local_arrays,
    save_by,
    setup,
    versions,
    write_all,
    zero,
)
from benchmark.states import Array

__all__ = ["build", "load", "local_arrays", "save", "setup", "versions", "zero"]

_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_libc = ctypes.CDLL(None, use_errno=True)


def save(state: State, path: Path) -> None:
    """See :class:`benchmark.peers.Peer`."""
    save_by(state, path, _write)


def _write(file: int, name: Path, data: Array) -> list[int]:
    hashes = []
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES].data
        hashes.append(xxhash.xxh3_64_intdigest(chunk))
        write_all(file, chunk, start)
        _libc.sync_file_range(file, ctypes.c_int64(start), ctypes.c_int64(len(chunk)), _START_WRITING)
    return hashes
