"""Cuts entries of a data file in pieces to be read whole, all but holes where zeros were written.

A hole is known by a few looks, however large it is: what is looked at is halved until it is one, or a piece. So what is
not on the disk costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..core.columns import IntArray, places_within
from .metadata import Metadata
from .runs import CHUNK_BYTES, OpenFile, digest_of_zeros

__all__ = ["FileEntries", "Pieces"]

_MOST_ENTRIES = 1 << 16  # that are cut at a time


@dataclass(frozen=True, slots=True, eq=False)
class FileEntries:
    """Entries of a data file, in columns.

    Attributes:
        file: The file.
        block_bytes: Bytes of a block.
        starts: Where each entry starts in the data section, ascending, ``[entries]``.
        sizes: Its bytes, ``[entries]``.
        first_blocks: The number of its first block, ``[entries]``.
        key: What to call an entry in a message.
    """

    file: OpenFile
    block_bytes: int
    starts: IntArray
    sizes: IntArray
    first_blocks: IntArray
    key: Callable[[int], str]

    @classmethod
    def of(cls, metadata: Metadata, number: int, file: OpenFile) -> Iterator[FileEntries]:
        """All entries of the data file of this number, so many at a time."""
        table, shards, (first_blocks, _) = metadata.table, metadata.table.in_file(number), metadata.blocks

        def key(some: IntArray, entry: int) -> str:
            return metadata.key(table.paths[int(table.shard_tensor[some[entry]])])

        for start in range(0, len(shards), _MOST_ENTRIES):
            some = shards[start : start + _MOST_ENTRIES]
            starts, sizes = table.data_offsets[some].astype(np.int64), table.shard_bytes[some].astype(np.int64)
            blocks = first_blocks[some].astype(np.int64)
            yield cls(file, metadata.block_bytes, starts, sizes, blocks, partial(key, some))


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of entries, ascending: either of whole blocks that fit in a chunk, or one block.

    Attributes:
        entries: The entries.
        entry: Of which entry each is, ``[pieces]``.
        starts: Where each starts in the data section, ``[pieces]``.
        stops: Where it ends, ``[pieces]``.
        blocks: The number of its first block in the file, ``[pieces]``.
        zeros: How many bytes are in none, as they are holes and zeros were written.
    """

    entries: FileEntries
    entry: IntArray
    starts: IntArray
    stops: IntArray
    blocks: IntArray
    zeros: int

    @classmethod
    def of(cls, entries: FileEntries, skip_zeros: bool = True) -> Pieces:
        """Cut entries; ``skip_zeros`` says whether holes are of no interest where zeros were written."""
        file, block_bytes, starts, sizes = entries.file, entries.block_bytes, entries.starts, entries.sizes
        first_blocks = entries.first_blocks
        step = max(block_bytes, CHUNK_BYTES)
        entry, low, high = np.arange(len(sizes)), starts, starts + sizes
        large = np.flatnonzero(sizes > step)
        if skip_zeros and len(large) and not file.holes.none:
            rows = np.stack([large, starts[large], sizes[large], first_blocks[large]], 1)
            spans = [
                (i, start + first, start + last)
                for i, start, size, block in rows.tolist()
                for first, last in _not_zeros(file, block_bytes, start, size, block, step)
            ]
            others = np.stack([np.delete(column, large) for column in (entry, low, high)])
            entry, low, high = np.concatenate([others, np.array(spans, np.int64).reshape(-1, 3).T], 1)
            order = np.argsort(low, kind="stable")
            entry, low, high = entry[order], low[order], high[order]
        counts = -(-(high - low) // step)
        span = np.repeat(np.arange(len(low)), counts)
        begin = low[span] + places_within(counts) * step
        end = np.minimum(begin + step, high[span])
        entry = entry[span]
        blocks = first_blocks[entry] + (begin - starts[entry]) // block_bytes
        return cls(entries, entry, begin, end, blocks, int(sizes.sum() - (end - begin).sum()))

    def columns(self) -> tuple[OpenFile, int, IntArray, IntArray, IntArray, Callable[[int], str]]:
        """What makes :class:`.runs.Segments` of them."""
        entries = self.entries
        return entries.file, entries.block_bytes, self.starts, self.stops, self.blocks, self._key

    def _key(self, piece: int) -> str:
        return self.entries.key(int(self.entry[piece]))


def _not_zeros(
    file: OpenFile, block_bytes: int, start: int, nbytes: int, first_block: int, step: int
) -> list[tuple[int, int]]:
    """Which bytes of an entry are to be read, in spans that start at multiples of ``step``."""
    found, left = list[tuple[int, int]](), [(0, nbytes)]
    while left:
        low, high = left.pop()
        if file.is_hole(start + low, high - low):
            blocks = slice(first_block + low // block_bytes, first_block - (-high // block_bytes))
            if not _are_zeros(file, block_bytes, blocks, high - low):
                found.append((low, high))
        elif high - low <= step:
            found.append((low, high))
        else:
            middle = low + -(-(high - low) // (2 * step)) * step
            left += [(middle, high), (low, middle)]
    return found


def _are_zeros(file: OpenFile, block_bytes: int, blocks: slice, nbytes: int) -> bool:
    """Whether zeros were written to all of these blocks, which have so many bytes together."""
    assert file.hashes is not None, "pieces are of files that this library has written"
    found = file.hashes[blocks]
    last = digest_of_zeros(nbytes - (len(found) - 1) * block_bytes)
    return bool((found[:-1] == digest_of_zeros(block_bytes)).all()) and int(found[-1]) == last
