"""Not a library: the least that a safe checkpoint has to do, as a measure of the machine.

Every rank writes its bytes from one buffer into one file in chunks, hashes each chunk while it is in the cache, and
syncs; a load reads into one buffer and checks the hashes. There are no tensors, no metadata and no talk between ranks,
so it cannot load another layout than was saved.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from benchmark.states import Array, TensorSpec

__all__ = ["build", "load", "local_arrays", "save", "setup", "versions", "zero"]

_CHUNK_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class State:
    """One rank's bytes, and whose they are."""

    rank: int
    specs: Sequence[TensorSpec]
    shapes: Sequence[tuple[int, ...]]
    data: Array


def setup(rank: int, world_size: int) -> None:
    """See :class:`benchmark.peers.Peer`."""


def versions() -> dict[str, str]:
    """Of the hash."""
    return {"xxhash": xxhash.VERSION}


def build(specs: Sequence[TensorSpec], rank: int, world_size: int) -> State:
    """See :class:`benchmark.peers.Peer`."""
    parts = [spec.local_part(rank, world_size) for spec in specs]
    data = np.concatenate([part.reshape(-1) for part in parts]).view(np.uint8)
    return State(rank, specs, [part.shape for part in parts], data)


def local_arrays(state: State) -> dict[str, Array]:
    """See :class:`benchmark.peers.Peer`."""
    sizes = [int(np.prod(shape)) for shape in state.shapes]
    parts = np.split(state.data.view(np.float32), np.cumsum(sizes)[:-1])
    return {spec.name: part.reshape(shape) for spec, shape, part in zip(state.specs, state.shapes, parts, strict=True)}


def zero(state: State) -> None:
    """See :class:`benchmark.peers.Peer`."""
    state.data[...] = 0


def save(state: State, path: Path) -> None:
    """Chunks, then their hashes, then how many there are."""
    path.mkdir(exist_ok=True)
    file = os.open(path / str(state.rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        hashes = []
        for start in range(0, len(state.data), _CHUNK_BYTES):
            chunk = state.data[start : start + _CHUNK_BYTES].data
            hashes.append(xxhash.xxh3_64_intdigest(chunk))
            _write(file, chunk, start)
        _write(file, np.array([*hashes, len(hashes)], np.uint64).view(np.uint8).data, len(state.data))
        os.fsync(file)
    finally:
        os.close(file)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(state: State, path: Path) -> None:
    """Read the first chunks, as many as the state needs."""
    file = os.open(path / str(state.rank), os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        count = int(np.frombuffer(os.pread(file, 8, size - 8), np.uint64)[0])
        end = size - 8 * (count + 1)  # of the chunks
        hashes = np.frombuffer(os.pread(file, 8 * count, end), np.uint64).tolist()
        spare = np.empty(_CHUNK_BYTES, np.uint8)
        for start in range(0, len(state.data), _CHUNK_BYTES):
            wanted = state.data[start : start + _CHUNK_BYTES]
            chunk = spare[: min(_CHUNK_BYTES, end - start)]
            target = wanted if len(wanted) == len(chunk) else chunk
            if os.preadv(file, [target.data], start) != len(target):
                raise EOFError(f"{path / str(state.rank)} is too short")
            if xxhash.xxh3_64_intdigest(target.data) != hashes[start // _CHUNK_BYTES]:
                raise ValueError(f"{path / str(state.rank)} is damaged at {start}")
            if target is chunk:
                wanted[...] = chunk[: len(wanted)]
    finally:
        os.close(file)


def _write(file: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written
