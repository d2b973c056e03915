"""Hands out the parts of many small entries without an object for each.

Items of one kind, that is with equal boxes in entries and targets of equal shapes, are cut out of all entries of a run
in one numpy operation, and what is contiguous in its target is copied there by address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box, flat_range
from ..core.columns import IntArray
from ..core.dtypes import DType
from ..core.memory import Bytes1D, address_of, array_at, copy_each
from .reader import view_at
from .runs import Segments

__all__ = ["Batch", "ItemKind"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class ItemKind:
    """What items that are alike have in common.

    Attributes:
        dtype: Element type of entry and target.
        entry_shape: Shape of the stored shard.
        entry_box: The item, counted from the shard's corner.
        target_shape: Shape of the target.
        target_box: The item, counted from the target's corner.
        strides: The target's, in bytes; None if it is contiguous.
    """

    dtype: DType
    entry_shape: tuple[int, ...]
    entry_box: Box
    target_shape: tuple[int, ...]
    target_box: Box
    strides: tuple[int, ...] | None

    @property
    def entry_bytes(self) -> int:
        """Size of the entry."""
        return Box((), self.entry_shape).size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Segments):
    """Items of one file, in the order of their entries.

    The segments are the items' entries, of one block each; one of which several items are wanted is there repeatedly.

    Attributes:
        kind: Which of ``kinds`` each item is, ``[items]``.
        addresses: Where each item's target starts in memory, ``[items]``. The memory must stay alive.
        kinds: The kinds.
    """

    kind: IntArray
    addresses: IntArray
    kinds: Sequence[ItemKind]

    def take(self, first: int, last: int, data: Bytes1D) -> None:
        """See :class:`Segments`."""
        starts, kind = self.starts[first:last] - self.starts[first], self.kind[first:last]
        for number in np.unique(kind).tolist():
            items = np.flatnonzero(kind == number)
            _hand_out(self.kinds[number], starts[items], self.addresses[first:last][items], data)


def _hand_out(kind: ItemKind, starts: IntArray, targets: IntArray, buffer: Bytes1D) -> None:
    """Copy all items of one kind from the buffer, in which their entries have these starts, to their targets."""
    itemsize = kind.dtype.itemsize
    nbytes = kind.entry_box.size * itemsize
    source = flat_range(kind.entry_box, kind.entry_shape)
    target = flat_range(kind.target_box, kind.target_shape) if kind.strides is None else None
    if source is not None and target is not None:
        copy_each(targets + target[0] * itemsize, starts + (address_of(buffer) + source[0] * itemsize), nbytes)
        return
    parts = _cut_out(kind, starts, buffer)
    if target is not None:
        copy_each(targets + target[0] * itemsize, address_of(parts) + np.arange(len(targets)) * nbytes, nbytes)
        return
    for i, address in enumerate(targets.tolist()):
        array = array_at(address, kind.target_shape, kind.strides, kind.dtype.raw, None)
        view_at(array, kind.target_box.slices)[...] = parts[i]


def _cut_out(kind: ItemKind, starts: IntArray, buffer: Bytes1D) -> Array:
    """The items of some entries as one contiguous array, ``[items, *box]``."""
    steps = np.diff(starts)
    raw, shape, place = kind.dtype.raw, kind.entry_shape, kind.entry_box.slices
    if len(steps) and (steps == steps[0]).all():
        inner = np.empty(shape, raw).strides
        entries: Array = np.ndarray((len(starts), *shape), raw, buffer.data, int(starts[0]), (int(steps[0]), *inner))
        return np.ascontiguousarray(view_at(entries, (slice(None), *place)))
    parts: Array = np.empty((len(starts), *kind.entry_box.shape), raw)
    for i, start in enumerate(starts.tolist()):
        parts[i] = view_at(np.ndarray(shape, raw, buffer.data, start), place)
    return parts
