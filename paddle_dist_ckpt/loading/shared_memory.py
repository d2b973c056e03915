"""Targets that share memory: tied weights, or a tensor and views of it. What they get must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..core.columns import IntArray
from ..core.memory import Bytes1D

if TYPE_CHECKING:
    from .targets import Targets

__all__ = ["SharedMemory", "find_shared_memory"]

_AT_ONE_BYTE = 7  # targets that are told of those that share it

Array = npt.NDArray[Any]


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

    def disagreeing(self, targets: Targets) -> dict[int, list[int]]:
        """The targets whose data differ from that of others in bytes that they share.

        The time it takes is proportional to the targets' bytes, however many share one.

        Returns:
            For each of these targets, some of the others that share its first such byte.
        """
        pairs = [pair for pair in zip(self.rows, self.offsets, strict=True) if targets.filled[pair[0]]]
        rows, offsets = [row for row, _ in pairs], [offset for _, offset in pairs]
        buffers = [targets.array(row) for row in rows]
        cells = [targets.cells[targets.cell[row]] for row in rows]
        memories = {
            (offset, buffer.nbytes, piece.strides and (piece.box.shape, piece.strides))
            for offset, buffer, (_, piece) in zip(offsets, buffers, cells, strict=True)
        }
        if len(memories) <= 1:  # the same elements in the same order
            agree = all(buffer.tobytes() == buffers[0].tobytes() for buffer in buffers[1:])
            return {} if agree else _others(dict.fromkeys(rows, 0), {0: rows[:_AT_ONE_BYTE]})
        trial = np.empty(self.nbytes, np.uint8)
        views = [
            np.ndarray(piece.box.shape, geometry.dtype.raw, trial.data, offset, piece.strides)
            for offset, (geometry, piece) in zip(offsets, cells, strict=True)
        ]
        for buffer, view in zip(buffers, views, strict=True):
            view[...] = buffer
        changed = [i for i, view in enumerate(views) if view.tobytes() != buffers[i].tobytes()]
        if not changed:
            return {}
        # Where data differ, those of some target are not what was written last.
        marks = np.zeros(self.nbytes, np.uint8)
        marked = [_bytes_of(view, marks, offset) for view, offset in zip(views, offsets, strict=True)]
        for i in changed:
            own = buffers[i].reshape(-1).view(np.uint8).reshape(marked[i].shape)
            marked[i] |= own != _bytes_of(views[i], trial, offsets[i])
        return _meeting(rows, offsets, marked, marks)


def _meeting(
    rows: Sequence[int], offsets: Sequence[int], marked: Sequence[Array], marks: Bytes1D
) -> dict[int, list[int]]:
    """The targets that have marked bytes, each with some of the others that have its first one.

    ``marked`` is what each target has of ``marks``, which are used up. So that the work is bounded, a byte counts down
    who is told of it.
    """
    first: dict[int, int] = {}
    for i, mine in enumerate(marked):
        if mine.any():
            place = np.unravel_index(int(mine.argmax()), mine.shape)
            first[i] = offsets[i] + sum(int(at) * step for at, step in zip(place, mine.strides, strict=True))
    marks[:] = 0
    marks[list(first.values())] = _AT_ONE_BYTE
    at_byte: dict[int, list[int]] = {place: [] for place in first.values()}
    for i in first:
        where = marked[i].nonzero()
        marked[i][where] -= 1
        for place in (offsets[i] + np.stack(where, axis=-1) @ np.array(marked[i].strides)).tolist():
            at_byte[place].append(rows[i])
    return _others({rows[i]: place for i, place in first.items()}, at_byte)


def _bytes_of(view: Array, memory: Bytes1D, offset: int) -> Array:
    """What a view has of its memory, or of as much other memory; the bytes of an element are a dimension."""
    return np.ndarray((*view.shape, view.itemsize), np.uint8, memory.data, offset, (*view.strides, 1))


def _others(first: Mapping[int, int], at_byte: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """The other targets at the byte of each target."""
    return {row: [other for other in at_byte[place] if other != row] for row, place in first.items()}


def find_shared_memory(targets: Targets, rows: IntArray) -> list[SharedMemory]:
    """Find those among some targets, of different paths, whose memory overlaps.

    Targets that merely lie between each other's rows are taken for sharing; that costs memory and does no harm.
    """
    on_device = targets.on_device[rows]
    return [shared for of_kind in (~on_device, on_device) for shared in _find(targets, rows[of_kind])]


def _find(targets: Targets, rows: IntArray) -> list[SharedMemory]:
    """Those among rows that are all on the host, or all on a device."""
    start, stop = (column[rows] for column in targets.stretches)
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    np.maximum.accumulate(stop, out=stop)  # in place, for there may be very many
    fresh = np.concatenate([np.ones(min(1, len(rows)), bool), start[1:] >= stop[:-1]])
    if fresh.all():  # as nearly always
        return []
    rows = rows[order]
    address = targets.address[rows]
    firsts = np.flatnonzero(fresh)
    lasts = np.append(firsts[1:], len(rows))
    shared = []
    for first, last in zip(firsts[lasts - firsts > 1].tolist(), lasts[lasts - firsts > 1].tolist(), strict=True):
        group = rows[first:last].tolist()
        if len({targets.path(row) for row in group}) > 1:
            offsets = (address[first:last] - start[first]).tolist()
            shared.append(SharedMemory(group, offsets, int(stop[last - 1] - start[first])))
    return shared
