"""Digests of a file's blocks, taken from the file's bytes as they come by, in whatever pieces and order."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from ..core.columns import IntArray
from .datafile import FileTable

__all__ = ["BlockHashes"]


@dataclass(slots=True)
class _PartialBlock:
    """A block of which only some bytes have come: those before ``done`` are in the digest, others wait."""

    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    done: int = 0
    waiting: dict[int, bytes] = field(default_factory=dict)


class BlockHashes:
    """The digests of all blocks of a file. Several threads may add to them.

    Attributes:
        values: The digest of each block of which all bytes have come, ``[blocks]``.
    """

    def __init__(self, table: FileTable) -> None:
        self.values: npt.NDArray[np.uint64] = np.zeros(table.blocks, np.uint64)
        self._table = table
        self._open: dict[int, _PartialBlock] = {}
        self._lock = threading.Lock()

    def add(self, entry: int, at: int, data: memoryview) -> None:
        """Hash bytes of an entry. Every byte of it must come once.

        Args:
            entry: Which entry.
            at: Where in it the bytes start.
            data: The bytes. They may cease to be when this returns.
        """
        size, first, stop = self._table.block_bytes, int(self._table.first_block[entry]), at + len(data)
        nbytes = int(self._table.sizes[entry])
        for block in range(at // size, -(-stop // size)):
            start, end = block * size, min(block * size + size, nbytes)
            low, high = max(start, at), min(end, stop)
            part = data[low - at : high - at]
            if high - low == end - start:
                self.values[first + block] = xxhash.xxh3_64_intdigest(part)
            else:
                self._add_part(first + block, low - start, part, end - start)

    def add_small(self, entries: IntArray, window: memoryview, start: int) -> None:
        """Hash whole entries, of one block each, in a window that starts at byte ``start``."""
        places = self._table.starts[entries] - start
        parts = map(window.__getitem__, map(slice, places.tolist(), (places + self._table.sizes[entries]).tolist()))
        digests = np.fromiter(map(xxhash.xxh3_64_intdigest, parts), np.uint64, len(places))
        self.values[self._table.first_block[entries]] = digests

    def _add_part(self, block: int, at: int, part: memoryview | bytes, nbytes: int) -> None:
        """Hash a part of a block. One that comes before what stands before it is kept until that has come."""
        with self._lock:
            opened = self._open.setdefault(block, _PartialBlock())
            if opened.done != at:
                opened.waiting[at] = bytes(part)
                return
        while True:  # of the threads that work on this block only the one whose part is next gets here
            opened.digest.update(part)
            with self._lock:
                opened.done += len(part)
                if opened.done == nbytes:
                    del self._open[block]
                    self.values[block] = opened.digest.intdigest()
                    return
                if opened.done not in opened.waiting:
                    return
                part = opened.waiting.pop(opened.done)
