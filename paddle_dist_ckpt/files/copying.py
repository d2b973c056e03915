"""Copies entries of a data file to another one. Nothing of a block is written before the block is verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.buffers import Buffers
from ..core.memory import Bytes1D
from ..core.threads import run_all
from ..storage.base import WritableFile
from .pieces import FileEntries, Pieces
from .runs import Segments

__all__ = ["copy_entries"]


def copy_entries(
    entries: FileEntries, target: WritableFile, keeps_holes: bool, threads: int, progress: Callable[[int], None]
) -> None:
    """Copy entries of a file to where they stand in it.

    Args:
        entries: The entries.
        target: The file to write.
        keeps_holes: Whether that has zeros wherever nothing is written, so that holes need not be.
        threads: How many threads read and write.
        progress: Told how many bytes were copied, as they are.

    Raises:
        CheckpointCorruptedError: a block is not what was written.
        OSError: reading or writing failed.
    """
    pieces = Pieces.of(entries, keeps_holes)
    copies = _Copying(*pieces.columns(), target, keeps_holes)
    progress(pieces.zeros)
    run_all(copies.tasks(Buffers(threads), progress, joined=False), threads, lambda: None)


@dataclass(frozen=True, slots=True, eq=False)
class _Copying(Segments):
    """Segments that are written where they stand. Those of one run have nothing between them."""

    target: WritableFile
    keeps_holes: bool

    def take(self, first: int, last: int, data: Bytes1D) -> None:
        self.target.write(data, self.file.data_start + int(self.starts[first]))

    def take_zeros(self, first: int, last: int) -> None:
        if not self.keeps_holes:
            Segments.take_zeros(self, first, last)
