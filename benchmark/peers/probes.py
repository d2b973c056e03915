"""Not libraries: the least that a safe checkpoint has to do, as a measure of the machine.

Every rank writes its bytes from one buffer into one file in chunks, hashes each chunk while it is in the cache, and
syncs; a load reads into one buffer and checks the hashes. There are no tensors, no metadata and no talk between ranks,
so it cannot load another layout than was saved.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from benchmark.peers.base import Checkpointer, huge_pages
from benchmark.states import Array, TensorSpec

__all__ = ["DirectProbe", "Probe", "RangeProbe"]

_CHUNK_BYTES = 2 << 20
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_THREADS = 2
_PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class _State:
    """One rank's bytes, and whose they are."""

    rank: int
    specs: Sequence[TensorSpec]
    shapes: Sequence[tuple[int, ...]]
    data: Array


class Probe(Checkpointer):
    """Through the page cache, all of it synced at the end."""

    def setup(self, rank: int, world_size: int) -> None:
        """See :class:`Checkpointer`."""

    def versions(self) -> dict[str, str]:
        """Of the hash."""
        return {"xxhash": xxhash.VERSION}

    def build(self, specs: Sequence[TensorSpec], rank: int, world_size: int) -> _State:
        parts = [spec.local_part(rank, world_size) for spec in specs]
        data = np.concatenate([part.reshape(-1) for part in parts]).view(np.uint8)
        return _State(rank, specs, [part.shape for part in parts], data)

    def local_arrays(self, state: _State) -> dict[str, Array]:
        sizes = [int(np.prod(shape)) for shape in state.shapes]
        parts = np.split(state.data.view(np.float32), np.cumsum(sizes)[:-1])
        return {
            spec.name: part.reshape(shape) for spec, shape, part in zip(state.specs, state.shapes, parts, strict=True)
        }

    def zero(self, state: _State) -> None:
        state.data[...] = 0

    def save(self, state: _State, path: Path) -> None:
        """Chunks, then their hashes, then how many there are."""
        path.mkdir(exist_ok=True)
        name = path / str(state.rank)
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            hashes = self.write_chunks(file, name, state.data)
            _write_all(file, np.array([*hashes, len(hashes)], np.uint64).view(np.uint8).data, len(state.data))
            os.fsync(file)
        finally:
            os.close(file)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def write_chunks(self, file: int, name: Path, data: Array) -> list[int]:
        """Write and hash chunk by chunk; returns the hashes."""
        hashes = []
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES].data
            hashes.append(xxhash.xxh3_64_intdigest(chunk))
            _write_all(file, chunk, start)
            self.chunk_written(file, start, len(chunk))
        return hashes

    def chunk_written(self, file: int, start: int, nbytes: int) -> None:
        """Called after each chunk."""

    def load(self, state: _State, path: Path) -> None:
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


class RangeProbe(Probe):
    """The plain probe, with the kernel told after each chunk to begin writing it to the disk (``sync_file_range``)."""

    def chunk_written(self, file: int, start: int, nbytes: int) -> None:
        _libc.sync_file_range(file, ctypes.c_int64(start), ctypes.c_int64(nbytes), _START_WRITING)


class DirectProbe(Probe):
    """The plain probe, past the page cache: two threads, each with a buffer of huge pages that starts at a page."""

    def write_chunks(self, file: int, name: Path, data: Array) -> list[int]:
        starts = range(0, len(data), _CHUNK_BYTES)
        hashes = [0] * len(starts)
        direct = os.open(name, os.O_WRONLY | os.O_DIRECT)

        def run(mine: Sequence[int]) -> None:
            buffer = huge_pages(_CHUNK_BYTES)
            for start in mine:
                chunk = data[start : start + _CHUNK_BYTES]
                bounce = buffer[: len(chunk)]
                bounce[:] = chunk
                hashes[start // _CHUNK_BYTES] = xxhash.xxh3_64_intdigest(bounce.data)
                whole = len(chunk) // _PAGE * _PAGE
                _write_all(direct, bounce[:whole].data, start)
                _write_all(file, bounce[whole:].data, start + whole)

        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(run, [starts[i::_THREADS] for i in range(_THREADS)]))
        finally:
            os.close(direct)
        return hashes


def _write_all(file: int, data: memoryview, start: int) -> None:
    """Write all of it, however often that takes."""
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written
