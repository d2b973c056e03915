"""Adds up the addends of partial tensors before they are saved, each box on the rank that will write it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box
from ..core.dtypes import DType, arithmetic_dtype
from ..core.ports import Transport
from ..core.tensors import LocalShard, TensorView
from ..errors import UnsupportedValueError
from ..formats.datafile import Entry
from .messages import Transfer
from .writer import gather

__all__ = ["OPERATIONS", "reduce_partials"]

_CHUNK_BYTES = 16 << 20
OPERATIONS = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "any": np.logical_or,
    "all": np.logical_and,
}
Array = npt.NDArray[Any]


def reduce_partials(
    transfers: Sequence[Transfer],
    rank: int,
    shards: Sequence[LocalShard],
    views: Sequence[TensorView],
    written: Sequence[tuple[int, Box]],
    transport: Transport,
) -> dict[tuple[int, Box], Array]:
    """Exchange addends in chunks and reduce them, one after the other in the plan's order.

    All ranks process the transfers that concern them in one global order, so they cannot wait for each other in a ring.

    Args:
        transfers: Those that concern this rank, in the plan's order.
        rank: This rank.
        shards: This rank's local shards.
        views: The tensor of each of them.
        written: What this rank writes: its shard's number and the box, in global coordinates.
        transport: How the bytes travel.

    Returns:
        The reduced values, as raw items, for each written box of a partial tensor.
    """
    results = {
        (row, box): np.ascontiguousarray(_part(shards[row], box)) for row, box in written if views[row].reduction
    }
    for row, box in results:
        results[row, box] = results[row, box].copy()
    for transfer in transfers:
        box = Box(*transfer.box)
        if transfer.source == rank:
            _send(_part(shards[transfer.source_row], box), views[transfer.source_row].dtype, transfer, transport)
        else:
            view = views[transfer.destination_row]
            _receive(results[transfer.destination_row, box], view, transfer, transport)
    for (row, _), array in results.items():
        _finish(array, views[row])
    return results


def _part(shard: LocalShard, box: Box) -> Array:
    part: Array = shard.array[box.relative_to(shard.offset).slices]
    return np.asarray(part)


def _chunks(nbytes: int) -> list[tuple[int, int]]:
    return [(start, min(start + _CHUNK_BYTES, nbytes)) for start in range(0, nbytes, _CHUNK_BYTES)]


def _send(part: Array, dtype: DType, transfer: Transfer, transport: Transport) -> None:
    entry = Entry("", dtype, part.shape, part)
    for start, stop in _chunks(entry.nbytes):
        chunk = np.empty(stop - start, np.uint8)
        gather(entry, start, stop, chunk)
        transport.send(chunk, transfer.destination)


def _receive(result: Array, view: TensorView, transfer: Transfer, transport: Transport) -> None:
    assert view.reduction is not None
    operation: Any = OPERATIONS[view.reduction.operation]
    numbers = result.reshape(-1).view(np.uint8)
    dtype = arithmetic_dtype(view.dtype)
    for start, stop in _chunks(len(numbers)):
        chunk = np.empty(stop - start, np.uint8)
        transport.recv(chunk, transfer.source)
        mine = numbers[start:stop].view(dtype)
        mine[...] = operation(mine, chunk.view(dtype)).astype(dtype)


def _finish(array: Array, view: TensorView) -> None:
    assert view.reduction is not None
    if view.reduction.operation == "avg":
        if view.dtype.category not in ("float", "complex"):
            raise UnsupportedValueError(f"the average of {view.dtype.name} addends is not defined")
        numbers = array.reshape(-1).view(np.uint8).view(arithmetic_dtype(view.dtype))
        numbers[...] = (numbers / numbers.dtype.type(view.reduction.count)).astype(numbers.dtype)
