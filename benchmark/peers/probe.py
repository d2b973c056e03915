"""Not a library: the least that a safe checkpoint has to do, as a measure of the machine.

Every rank writes its bytes from one buffer into one file in chunks, hashes each chunk while it is in the cache, and
syncs; a load reads into one buffer and checks the hashes. There are no tensors, no metadata and no talk between ranks,
so it cannot load another layout than was saved. :mod:`.probe_range` and :mod:`.probe_direct` write in other ways.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from benchmark.states import Array, TensorSpec

__all__ = [
    "CHUNK_BYTES",
    "State",
    "build",
    "load",
    "local_arrays",
    "save",
    "save_by",
    "setup",
    "versions",
    "write_all",
    "zero",
]

CHUNK_BYTES = 2 << 20
Writer = Callable[[int, Path, Array], list[int]]


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
    """Through the page cache, all of it synced at the end."""
    save_by(state, path, write_chunks)


def save_by(state: State, path: Path, write: Writer) -> None:
    """Chunks, then their hashes, then how many there are; ``write`` does the chunks and returns the hashes."""
    path.mkdir(exist_ok=True)
    name = path / str(state.rank)
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        hashes = write(file, name, state.data)
        write_all(file, np.array([*hashes, len(hashes)], np.uint64).view(np.uint8).data, len(state.data))
        os.fsync(file)
    finally:
        os.close(file)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_chunks(file: int, name: Path, data: Array) -> list[int]:
    """Write and hash chunk by chunk."""
    hashes = []
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES].data
        hashes.append(xxhash.xxh3_64_intdigest(chunk))
        write_all(file, chunk, start)
    return hashes


def load(state: State, path: Path) -> None:
    """Read the first chunks, as many as the state needs."""
    file = os.open(path / str(state.rank), os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        count = int(np.frombuffer(os.pread(file, 8, size - 8), np.uint64)[0])
        end = size - 8 * (count + 1)  # of the chunks
        hashes = np.frombuffer(os.pread(file, 8 * count, end), np.uint64).tolist()
        spare = np.empty(CHUNK_BYTES, np.uint8)
        for start in range(0, len(state.data), CHUNK_BYTES):
            wanted = state.data[start : start + CHUNK_BYTES]
            chunk = spare[: min(CHUNK_BYTES, end - start)]
            target = wanted if len(wanted) == len(chunk) else chunk
            if os.preadv(file, [target.data], start) != len(target):
                raise EOFError(f"{path / str(state.rank)} is too short")
            if xxhash.xxh3_64_intdigest(target.data) != hashes[start // CHUNK_BYTES]:
                raise ValueError(f"{path / str(state.rank)} is damaged at {start}")
            if target is chunk:
                wanted[...] = chunk[: len(wanted)]
    finally:
        os.close(file)


def write_all(file: int, data: memoryview, start: int) -> None:
    """Write all of it, however often that takes."""
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written
