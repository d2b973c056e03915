"""Targets that share memory: tied weights, or a tensor and views of it. What they get must agree."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..core.columns import IntArray
from ..core.memory import address_of
from ..core.tensors import Geometry, LocalShard

if TYPE_CHECKING:
    from .targets import Targets

__all__ = ["find_shared_memory"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemory:
    """A stretch of memory that several targets reach into. The targets are read to buffers of their own first.

    Attributes:
        rows: The targets.
        buffers: What each is read to.
        memories: The memory of each.
        low: The stretch's first address.
        high: The address behind it.
    """

    rows: list[int]
    buffers: list[Array]
    memories: list[Array]
    low: int
    high: int

    def differing(self) -> list[int]:
        """The targets that another one would overwrite with other data."""
        if not self.rows:
            return []
        first = self.memories[0]
        if all(_same_elements(first, memory) for memory in self.memories):
            data = self.buffers[0].tobytes()
            return [row for row, buffer in zip(self.rows, self.buffers, strict=True) if buffer.tobytes() != data]
        trial = np.empty(self.high - self.low, np.uint8)
        views = [self._moved(memory, trial) for memory in self.memories]
        for buffer, view in zip(self.buffers, views, strict=True):
            view[...] = buffer
        triples = zip(self.rows, self.buffers, views, strict=True)
        return [row for row, buffer, view in triples if view.tobytes() != buffer.tobytes()]

    def _moved(self, memory: Array, trial: npt.NDArray[np.uint8]) -> Array:
        """What ``memory`` would be if the stretch were ``trial``."""
        offset = address_of(memory) - self.low
        return np.ndarray(memory.shape, memory.dtype, trial.data, offset, memory.strides)

    def without(self, rows: Container[int]) -> SharedMemory:
        """The same without targets that are not read."""
        kept = [i for i, row in enumerate(self.rows) if row not in rows]
        buffers, memories = [self.buffers[i] for i in kept], [self.memories[i] for i in kept]
        return SharedMemory([self.rows[i] for i in kept], buffers, memories, self.low, self.high)

    def fill(self) -> None:
        """Fill the memory from the buffers."""
        for buffer, memory in zip(self.buffers, self.memories, strict=True):
            memory[...] = buffer


def find_shared_memory(targets: Targets) -> list[SharedMemory]:
    """Find targets of different paths whose memory overlaps, and give them buffers of their own.

    Targets that merely lie between each other's rows are taken for sharing; that costs memory and does no harm.
    """
    return [
        *_find(targets, np.flatnonzero(~targets.staged & ~targets.on_device), False),
        *_find(targets, np.flatnonzero(~targets.staged & targets.on_device), True),
    ]


def _find(targets: Targets, rows: IntArray, on_device: bool) -> list[SharedMemory]:
    """Those among rows that are all on the host, or all on a device, for whose memory host memory stands."""
    reach = np.array([_reach(geometry, piece) for geometry, piece in targets.cells], np.int64).reshape(-1, 2)
    address = targets.addresses_of(rows)
    start, stop = address + reach[targets.cell[rows], 0], address + reach[targets.cell[rows], 1]
    order = np.argsort(start, kind="stable")
    rows, start, stop = rows[order], start[order], np.maximum.accumulate(stop[order])
    fresh = np.concatenate([np.ones(min(1, len(rows)), bool), start[1:] >= stop[:-1]])
    firsts = np.flatnonzero(fresh)
    lasts = np.append(firsts[1:], len(rows))
    shared = []
    for first, last in zip(firsts[lasts - firsts > 1].tolist(), lasts[lasts - firsts > 1].tolist(), strict=True):
        group = rows[first:last].tolist()
        if len({targets.path(row) for row in group}) > 1:
            low, high = int(start[first]), int(stop[last - 1])
            if on_device:
                memories = _stand_ins(targets, group, start[first:last] - low, high - low)
                low = int(min(map(address_of, memories)))
                high += low - int(start[first])
            else:
                memories = [targets.array(row) for row in group]
            buffers = [targets.stage(row) for row in group]
            shared.append(SharedMemory(group, buffers, memories, low, high))
    return shared


def _stand_ins(targets: Targets, rows: Sequence[int], offsets: IntArray, nbytes: int) -> list[Array]:
    """Arrays that lie in a stretch of host memory as these rows lie in a device's, where no stride is negative."""
    stretch = np.zeros(nbytes, np.uint8)
    found = []
    for row, offset in zip(rows, offsets.tolist(), strict=True):
        geometry, piece = targets.cells[targets.cell[row]]
        found.append(np.ndarray(piece.box.shape, geometry.dtype.raw, stretch.data, offset, piece.strides))
    return found


def _reach(geometry: Geometry, piece: LocalShard) -> tuple[int, int]:
    """Where a piece's memory starts and ends, counted from its first element, in bytes."""
    itemsize, shape = geometry.dtype.itemsize, piece.box.shape
    if piece.strides is None:
        return 0, piece.box.size * itemsize
    reach = [(n - 1) * stride for n, stride in zip(shape, piece.strides, strict=True)]
    return sum(min(0, r) for r in reach), sum(max(0, r) for r in reach) + itemsize


def _same_elements(a: Array, b: Array) -> bool:
    """Whether two arrays have the same elements in the same order."""
    if address_of(a) != address_of(b) or a.nbytes != b.nbytes:
        return False
    return (a.flags.c_contiguous and b.flags.c_contiguous) or (a.shape == b.shape and a.strides == b.strides)
