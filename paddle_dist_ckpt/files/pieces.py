"""Cuts entries of a data file in pieces to be read whole, all but holes where zeros were written.

A hole is known by a few looks, however large it is: what is looked at is halved until it is one, or a piece. So what is
not on the disk costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.columns import IntArray, places_within
from .runs import CHUNK_BYTES, OpenFile, digest_of_zeros

__all__ = ["Pieces"]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of entries, ascending: either of whole blocks that fit in a chunk, or one block.

    Attributes:
        entry: Of which entry each is, ``[pieces]``.
        starts: Where each starts in the data section, ``[pieces]``.
        stops: Where it ends, ``[pieces]``.
        blocks: The number of its first block in the file, ``[pieces]``.
        zeros: How many bytes are in none, as they are holes and zeros were written.
    """

    entry: IntArray
    starts: IntArray
    stops: IntArray
    blocks: IntArray
    zeros: int

    @classmethod
    def of(
        cls,
        file: OpenFile,
        block_bytes: int,
        starts: IntArray,
        sizes: IntArray,
        first_blocks: IntArray,
        skip_zeros: bool = True,
    ) -> Pieces:
        """Cut entries.

        Args:
            file: The file.
            block_bytes: Bytes of a block.
            starts: Where each entry starts in the data section, ascending, ``[entries]``.
            sizes: Its bytes, ``[entries]``.
            first_blocks: The number of its first block, ``[entries]``.
            skip_zeros: Whether holes are of no interest where zeros were written.
        """
        step = max(block_bytes, CHUNK_BYTES)
        entry, low, high = np.arange(len(sizes)), starts, starts + sizes
        large = np.flatnonzero(sizes > step)
        if skip_zeros and len(large) and file.holes is not None and not file.holes.none:
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
        return cls(entry, begin, end, blocks, int(sizes.sum() - (end - begin).sum()))


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
    if file.hashes is None:
        return True
    found = file.hashes[blocks]
    last = digest_of_zeros(nbytes - (len(found) - 1) * block_bytes)
    return bool((found[:-1] == digest_of_zeros(block_bytes)).all()) and int(found[-1]) == last
