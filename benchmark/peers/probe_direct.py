"""The plain probe, past the page cache: two threads, each with a buffer of huge pages that starts at a page."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
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

_THREADS = 2
_PAGE = 4096


def save(state: State, path: Path) -> None:
    """See :class:`benchmark.peers.Peer`."""
    save_by(state, path, _write)


def _write(file: int, name: Path, data: Array) -> list[int]:
    starts = range(0, len(data), CHUNK_BYTES)
    hashes = [0] * len(starts)
    direct = os.open(name, os.O_WRONLY | os.O_DIRECT)
    try:

        def run(mine: Sequence[int]) -> None:
            memory = mmap.mmap(-1, CHUNK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            buffer = np.frombuffer(memory, np.uint8)
            for start in mine:
                chunk = data[start : start + CHUNK_BYTES]
                bounce = buffer[: len(chunk)]
                bounce[:] = chunk
                hashes[start // CHUNK_BYTES] = xxhash.xxh3_64_intdigest(bounce.data)
                whole = len(chunk) // _PAGE * _PAGE
                write_all(direct, bounce[:whole].data, start)
                write_all(file, bounce[whole:].data, start + whole)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(run, [starts[i::_THREADS] for i in range(_THREADS)]))
    finally:
        os.close(direct)
    return hashes
