"""Targets that share memory: tied weights, or a tensor and views of it. What they get must agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..core.columns import IntArray

if TYPE_CHECKING:
    from .targets import Targets

__all__ = ["SharedMemory", "find_shared_memory"]


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemory:
    """A stretch of memory that several targets reach into. The targets are read to buffers of their own first.

    Attributes:
        rows: The targets.
        offsets: Where in the stretch each one's first element is, in bytes.
        nbytes: Bytes of the stretch.
    """

    rows: list[int]
    offsets: list[int]
    nbytes: int

    def agrees(self, targets: Targets) -> bool:
        """Whether the data of each target are what the memory has after those of all are written there."""
        buffers = [targets.array(row) for row in self.rows]
        cells = [targets.cells[targets.cell[row]] for row in self.rows]
        memories = {
            (offset, buffer.nbytes, piece.strides and (piece.box.shape, piece.strides))
            for offset, buffer, (_, piece) in zip(self.offsets, buffers, cells, strict=True)
        }
        if len(memories) == 1:  # the same elements in the same order
            return all(buffer.tobytes() == buffers[0].tobytes() for buffer in buffers[1:])
        trial = np.empty(self.nbytes, np.uint8)
        views = [
            np.ndarray(piece.box.shape, geometry.dtype.raw, trial.data, offset, piece.strides)
            for offset, (geometry, piece) in zip(self.offsets, cells, strict=True)
        ]
        for buffer, view in zip(buffers, views, strict=True):
            view[...] = buffer
        return all(view.tobytes() == buffer.tobytes() for buffer, view in zip(buffers, views, strict=True))


def find_shared_memory(targets: Targets, rows: IntArray) -> list[SharedMemory]:
    """Find those among some targets, of different paths, whose memory overlaps.

    Targets that merely lie between each other's rows are taken for sharing; that costs memory and does no harm.
    """
    on_device = targets.on_device[rows]
    return [*_find(targets, rows[~on_device]), *_find(targets, rows[on_device])]


def _find(targets: Targets, rows: IntArray) -> list[SharedMemory]:
    """Those among rows that are all on the host, or all on a device."""
    address, (start, stop) = targets.address[rows], (column[rows] for column in targets.stretches)
    order = np.argsort(start, kind="stable")
    rows, address, start, stop = rows[order], address[order], start[order], np.maximum.accumulate(stop[order])
    fresh = np.concatenate([np.ones(min(1, len(rows)), bool), start[1:] >= stop[:-1]])
    firsts = np.flatnonzero(fresh)
    lasts = np.append(firsts[1:], len(rows))
    shared = []
    for first, last in zip(firsts[lasts - firsts > 1].tolist(), lasts[lasts - firsts > 1].tolist(), strict=True):
        group = rows[first:last].tolist()
        if len({targets.path(row) for row in group}) > 1:
            offsets = (address[first:last] - start[first]).tolist()
            shared.append(SharedMemory(group, offsets, int(stop[last - 1] - start[first])))
    return shared
