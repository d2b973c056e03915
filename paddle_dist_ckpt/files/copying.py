"""Copies entries of a data file to another one. Nothing of a block is written before the block is verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.buffers import Buffers
from ..core.columns import IntArray
from ..core.memory import Bytes1D
from ..core.threads import run_all
from ..storage.base import WritableFile
from .pieces import Pieces
from .runs import OpenFile, Segments

__all__ = ["copy_entries"]


def copy_entries(
    file: OpenFile,
    target: WritableFile,
    keeps_holes: bool,
    block_bytes: int,
    starts: IntArray,
    sizes: IntArray,
    first_blocks: IntArray,
    key: Callable[[int], str],
    threads: int,
    progress: Callable[[int], None],
) -> None:
    """Copy entries of a file to where they stand in it.

    Args:
        file: The file.
        target: The file to write.
        keeps_holes: Whether that has zeros wherever nothing is written, so that holes need not be.
        block_bytes: Bytes of a block.
        starts: Where each entry starts in the data section, ascending, ``[entries]``.
        sizes: Its bytes, ``[entries]``.
        first_blocks: The number of its first block, ``[entries]``.
        key: What to call an entry in a message.
        threads: How many threads read and write.
        progress: Told how many bytes were copied, as they are.

    Raises:
        CheckpointCorruptedError: a block is not what was written.
        OSError: reading or writing failed.
    """
    pieces = Pieces.of(file, block_bytes, starts, sizes, first_blocks, keeps_holes)
    copies = _Copying(
        file,
        block_bytes,
        pieces.starts,
        pieces.stops,
        pieces.blocks,
        lambda piece: key(int(pieces.entry[piece])),
        target,
        keeps_holes,
    )
    progress(pieces.zeros)
    run_all(copies.tasks(Buffers(threads), progress, joined=False), threads, lambda: None)


@dataclass(frozen=True, slots=True, eq=False)
class _Copying(Segments):
    """Segments that are written where they stand. Those of one run have nothing between them."""

    target: WritableFile
    keeps_holes: bool

    def take(self, first: int, last: int, data: Bytes1D) -> None:
        """See :class:`Segments`."""
        self.target.write(data, self.file.data_start + int(self.starts[first]))

    def take_zeros(self, first: int, last: int) -> None:
        """See :class:`Segments`."""
        if not self.keeps_holes:
            Segments.take_zeros(self, first, last)
