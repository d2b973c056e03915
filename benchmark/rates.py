"""How fast a machine copies, hashes, reads and writes: what the times of saves and loads are to be seen against."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["measure_rates"]

_BYTES, _WINDOW = 256 << 20, 2 << 20
_TIMES = 3


def measure_rates(folder: Path, nbytes: int = _BYTES) -> dict[str, float]:
    """GB/s of one thread, the best of a few times, by what it does; without what this file system cannot do."""
    import xxhash  # the environment that draws charts does not have it

    count = max(1, nbytes // _WINDOW)
    source, target = _pages(count * _WINDOW), _pages(count * _WINDOW)
    source[:], target[:] = 1, 0
    windows = [slice(i * _WINDOW, (i + 1) * _WINDOW) for i in range(count)]
    rates = {
        "memcpy": _rate(lambda: np.copyto(target, source), len(source)),
        "xxh3": _rate(lambda: [xxhash.xxh3_64_intdigest(source[one].data) for one in windows], len(source)),
    }
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place, "file")
        try:
            written = _rate(lambda: _write(path, source, windows, os.O_DIRECT), len(source))
        except OSError:  # not every file system can
            _write(path, source, windows, 0)
        else:
            rates["writes past the cache"] = written
        rates["reads from the cache"] = _rate(lambda: _read(path, target, windows), len(source), 1 + _TIMES)
    return rates


def _pages(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that starts at a page."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def _rate(work: Callable[[], object], nbytes: int, times: int = _TIMES) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return nbytes / best / 1e9


def _write(path: Path, data: npt.NDArray[np.uint8], windows: list[slice], flags: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
    try:
        for one in windows:
            if os.pwrite(file, data[one].data, one.start) < one.stop - one.start:
                raise OSError("a short write")
        os.fsync(file)
    finally:
        os.close(file)


def _read(path: Path, target: npt.NDArray[np.uint8], windows: list[slice]) -> None:
    """The first time brings the file into the cache."""
    file = os.open(path, os.O_RDONLY)
    try:
        for one in windows:
            os.preadv(file, [target[windows[0]].data], one.start)
    finally:
        os.close(file)
