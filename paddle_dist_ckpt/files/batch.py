"""Reads many small entries of one file together, and hands out their parts without an object for each.

Entries of at most one block that stand close to each other are read as one run. Each is verified where it lies in the
buffer. Items of one kind, that is with equal boxes in entries and targets of equal shapes, are then cut out of all
their entries in one numpy operation, and what is contiguous in its target is copied there by address.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..core.box import Box, flat_range
from ..core.buffers import Buffers
from ..core.columns import IntArray
from ..core.dtypes import DType
from ..core.memory import Bytes1D, address_of, array_at, copy_each
from ..errors import CheckpointCorruptedError
from .reader import CHUNK_BYTES, GAP_BYTES, OpenFile, view_at

__all__ = ["Batch", "ItemKind", "KindTable", "batch_tasks"]

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
    def nbytes(self) -> int:
        """Size of an item."""
        return self.entry_box.size * self.dtype.itemsize

    @property
    def from_byte(self) -> int | None:
        """Where in its entry an item starts if it is contiguous there."""
        elements = flat_range(self.entry_box, self.entry_shape)
        return elements[0] * self.dtype.itemsize if elements is not None else None

    @property
    def to_byte(self) -> int | None:
        """Where in its target an item starts if it is contiguous there."""
        elements = flat_range(self.target_box, self.target_shape) if self.strides is None else None
        return elements[0] * self.dtype.itemsize if elements is not None else None


@dataclass(frozen=True, slots=True, eq=False)
class KindTable:
    """The kinds of all batches of a load."""

    kinds: list[ItemKind]

    @property
    def entry_bytes(self) -> IntArray:
        """Size of the entry of each kind."""
        sizes = [Box((), kind.entry_shape).size * kind.dtype.itemsize for kind in self.kinds]
        return np.array(sizes, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Items of one file, in the order of their entries. An entry of which several items are wanted is there repeatedly.

    Attributes:
        file: The file.
        starts: Where each item's entry starts in the data section, ``[items]``, ascending.
        blocks: Its one block, ``[items]``.
        kind: Which of ``kinds`` each item is, ``[items]``.
        addresses: Where each item's target starts in memory, ``[items]``. The memory must stay alive.
        kinds: The kinds.
        names: What to call an item's entry in errors.
    """

    file: OpenFile
    starts: IntArray
    blocks: IntArray
    kind: IntArray
    addresses: IntArray
    kinds: KindTable
    names: Callable[[int], str]


def batch_tasks(
    batches: Sequence[Batch], buffers: Buffers, progress: Callable[[int], None]
) -> list[Callable[[], None]]:
    """Tasks that read, verify and hand out. They may be run at the same time.

    Args:
        batches: What to read.
        buffers: Of which each task uses one.
        progress: Told how many bytes were read, as they are.

    Returns:
        The tasks. They raise CheckpointCorruptedError if an entry is not what was written, and name it and the file;
        OSError if reading failed.
    """
    return [task for batch in batches for task in _tasks(batch, buffers, progress)]


def _tasks(batch: Batch, buffers: Buffers, progress: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """A task for each run of entries: neighbours, as far as they start in one chunk of the file."""
    stops = batch.starts + batch.kinds.entry_bytes[batch.kind]
    far = batch.starts[1:] - stops[:-1] > GAP_BYTES
    other = batch.starts[1:] // CHUNK_BYTES != batch.starts[:-1] // CHUNK_BYTES
    again = batch.starts[1:] == batch.starts[:-1]
    bounds = [0, *(np.flatnonzero((far | other) & ~again) + 1).tolist(), len(batch.starts)]
    for first, last in itertools.pairwise(bounds):
        yield functools.partial(_read_run, batch, first, last, buffers, progress)


def _read_run(batch: Batch, first: int, last: int, buffers: Buffers, progress: Callable[[int], None]) -> None:
    starts, kind = batch.starts[first:last], batch.kind[first:last]
    low = int(starts[0])
    size = int(starts[-1]) + int(batch.kinds.entry_bytes[kind[-1]]) - low
    with buffers.borrow(size) as buffer:
        try:
            batch.file.file.read_into([buffer], batch.file.data_start + low, batch.file.once)
        except EOFError as error:
            raise CheckpointCorruptedError(f"{batch.names(first)}: {error}") from error
        _verify(batch, first, starts - low, batch.kinds.entry_bytes[kind], buffer)
        for number in np.unique(kind).tolist():
            items = np.flatnonzero(kind == number)
            targets = batch.addresses[first:last][items]
            _hand_out(batch.kinds.kinds[number], starts[items] - low, targets, buffer)
    progress(size)


def _verify(batch: Batch, first: int, starts: IntArray, sizes: IntArray, buffer: Bytes1D) -> None:
    digest, view = xxhash.xxh3_64_intdigest, buffer.data
    stops = (starts + sizes).tolist()
    found = [digest(view[start:stop]) for start, stop in zip(starts.tolist(), stops, strict=True)]
    expected = batch.file.hashes[batch.blocks[first : first + len(found)]].tolist()
    if found == expected:
        return
    i = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    place = batch.file.data_start + int(batch.starts[first + i])
    raise CheckpointCorruptedError(
        f"{batch.names(first + i)}: the checksum of {int(sizes[i])} bytes at {place} of {batch.file.name} does not "
        "match; the file was damaged after it was written"
    )


def _hand_out(kind: ItemKind, starts: IntArray, targets: IntArray, buffer: Bytes1D) -> None:
    """Copy all items of one kind from the buffer, in which their entries have these starts, to their targets."""
    from_byte, to_byte, nbytes = kind.from_byte, kind.to_byte, kind.nbytes
    if from_byte is not None and to_byte is not None:
        base = address_of(buffer) + from_byte
        copy_each(targets + to_byte, starts + base, nbytes)
        return
    parts = _cut_out(kind, starts, buffer)
    if to_byte is not None:
        base = address_of(parts)
        copy_each(targets + to_byte, base + np.arange(len(targets)) * nbytes, nbytes)
        return
    for i, target in enumerate(targets.tolist()):
        array = array_at(target, kind.target_shape, kind.strides, kind.dtype.raw, None)
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
