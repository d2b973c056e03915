"""The contents of one tensor or value: items, edges of what is large, statistics in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.box import Box
from ..core.dtypes import DType, arithmetic_dtype
from ..core.memory import zeros_of
from ..core.shards import Kind
from ..errors import CheckpointCorruptedError, CheckpointNotFoundError
from ..files.metadata import Metadata
from ..folder.boxes import BoxReader, read_values
from ..storage.base import Storage
from .regions import edges, windows

__all__ = ["find_tensor", "read_edges", "read_region", "read_value", "statistics"]

_EDGE_ITEMS = 3


@dataclass(frozen=True, slots=True)
class Statistics:
    """What is known of the items of a region. Complex items count by their magnitude.

    Attributes:
        elements: How many items there are.
        nan: How many are NaN.
        infinite: How many are infinite.
        zero: How many are zero.
        min: The smallest finite one; None if there is none, as for the others.
        max: The largest finite one.
        mean: The mean of the finite ones.
        norm: The square root of the sum of the finite ones' squares.
    """

    elements: int
    nan: int
    infinite: int
    zero: int
    min: float | None
    max: float | None
    mean: float | None
    norm: float | None


@dataclass(frozen=True, slots=True)
class TensorContent:
    """A tensor of a checkpoint: its place in the table, its flat key, its shape and element type."""

    row: int
    key: str
    shape: tuple[int, ...]
    dtype: DType


def find_tensor(metadata: Metadata, key: str) -> TensorContent | None:
    """The tensor of a flat key; None if that is the key of a value.

    Raises:
        CheckpointNotFoundError: there is no such key; says which are like it.
    """
    table = metadata.table
    path = next((path for path in _paths(metadata) if metadata.key(path) == key), None)
    if path is None:
        import difflib

        keys = [metadata.key(path) for path in _paths(metadata)]
        near = difflib.get_close_matches(key, keys, n=3, cutoff=0.5) or keys[:3]
        raise CheckpointNotFoundError(
            f"checkpoint {metadata.unique_id} has no key {key!r}; there are, for example: {', '.join(near) or 'none'}"
        )
    row = table.index.get(path)
    if row is None or table.kinds[row] == Kind.VALUE:
        return None
    return TensorContent(row, key, table.layouts[table.layout_of[row]].shape, table.dtypes[row])


def read_value(storage: Storage, metadata: Metadata, key: str) -> Any:
    """The value of a flat key, wherever it is stored."""
    if key in metadata.values:
        return metadata.values[key]
    table = metadata.table
    row = next(row for row, path in enumerate(table.paths) if metadata.key(path) == key)
    (value,) = read_values(storage, metadata, [row])
    if isinstance(value, CheckpointCorruptedError):
        raise value
    return value


def read_region(storage: Storage, metadata: Metadata, tensor: TensorContent, box: Box) -> np.ndarray:
    """The items of a region, of the region's shape, as raw items."""
    with BoxReader(storage, metadata, [tensor.row], [box]) as reader:
        items = zeros_of(box.shape, tensor.dtype.raw, tensor.key)
        reader.read([0], [items])
    return items


def read_edges(storage: Storage, metadata: Metadata, tensor: TensorContent, box: Box) -> np.ndarray:
    """A small array that numpy, if told to leave out the middle of it, prints like the region; see :func:`edges`."""
    small = np.zeros([min(n, 2 * _EDGE_ITEMS + 1) for n in box.shape], tensor.dtype.raw)
    parts = list(edges(box, _EDGE_ITEMS))
    targets = [small[Box(place, part.shape).slices] for part, place in parts]
    with BoxReader(storage, metadata, [tensor.row] * len(parts), [part for part, _ in parts]) as reader:
        reader.read(range(len(parts)), targets)
    return small


def statistics(
    storage: Storage, metadata: Metadata, tensor: TensorContent, box: Box, progress: Callable[[int], None]
) -> Statistics:
    """The statistics of a region, read in windows of 16 MiB."""
    parts = list(windows(box, tensor.dtype.itemsize))
    nan = infinite = zero = finite = 0
    low: list[Any] = []
    high: list[Any] = []
    total = squares = 0.0
    with BoxReader(storage, metadata, [tensor.row] * len(parts), parts) as reader:
        for row, part in enumerate(parts):
            raw = np.empty(part.shape, tensor.dtype.raw)
            reader.read([row], [raw], threads=2)
            progress(raw.nbytes)
            values = raw.view(arithmetic_dtype(tensor.dtype)).reshape(-1)
            if values.dtype.kind not in "biufc":  # bfloat16 and float8, which numpy itself does not know
                values = values.astype(np.float32)
            if values.dtype.kind == "c":
                values = np.abs(values)
            if values.dtype.kind == "f":
                nan += int(np.isnan(values).sum())
                infinite += int(np.isinf(values).sum())
                values = values[np.isfinite(values)]
            zero += int(values.size - np.count_nonzero(values))
            finite += values.size
            if values.size:
                low.append(values.min().item())
                high.append(values.max().item())
                wide = values.astype(np.float64, copy=False)
                total += float(wide.sum())
                squares += float(np.dot(wide, wide))
    if not finite:
        return Statistics(box.size, nan, infinite, zero, None, None, None, None)
    return Statistics(box.size, nan, infinite, zero, min(low), max(high), total / finite, math.sqrt(squares))


def _paths(metadata: Metadata) -> list[str]:
    return [*metadata.table.paths, *(path for path, _ in metadata.value_records)]
