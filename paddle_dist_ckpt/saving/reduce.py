"""Adds up the addends of partial tensors before they are saved, each box on the rank that will write it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..control.verified import agree_on_collectives
from ..core.box import Box
from ..core.device_memory import DeviceArray
from ..core.dtypes import arithmetic_dtype
from ..core.memory import Bytes1D
from ..core.protocols import ControlSession, Transfers, Transport
from ..core.tensors import Geometry
from ..errors import CollectiveError
from ..tree.paths import plain_key
from .describe import LocalState
from .messages import Transfer

__all__ = ["awaited", "reduce_partials"]

_CHUNK_BYTES = 16 << 20
_DEVICE_BYTES = 64 << 20
_ALIGNMENT = 16
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


@contextmanager
def awaited(
    session: ControlSession, name: str, transfers: Sequence[Transfer], tell: Callable[[Exception], bytes]
) -> Iterator[None]:
    """Do what other ranks wait for in collectives, if there is anything to transfer: of an error they hear at once.

    Not of one of the collectives: these are over by then.

    Args:
        session: The ranks.
        name: The name of the round that is the next one.
        transfers: All transfers.
        tell: Raises the error, or what is to be said of it.
    """
    try:
        yield
    except CollectiveError:
        raise
    except Exception as error:
        if transfers:
            session.gather_scatter(name, functools.partial(tell, error), lambda messages: messages)
        raise


def reduce_partials(
    session: ControlSession,
    transport: Transport,
    transfers: Sequence[Transfer],
    state: LocalState,
    written: Sequence[tuple[int, Box]],
) -> dict[tuple[int, Box], Array]:
    """The reduced boxes of partial tensors that this rank writes, as raw items.

    All ranks call it. Which operations ranks can rely on they find out first, unless no rank has anything to send.

    Args:
        session: The save's.
        transport: How the bytes travel.
        transfers: All transfers of the save, in the plan's order; the same on every rank.
        state: What this rank has.
        written: What this rank writes of partial tensors: the number of its shard, and the box in global coordinates.
    """
    results: dict[tuple[int, Box], Array] = {}

    def copy_own() -> None:  # before any collective: where there is no memory for it, these can still be used later
        results.update({(row, box): _on_host(state.part(row, box), state) for row, box in written})

    if transfers:  # which is so on all ranks
        agree_on_collectives(session, transport, copy_own)
    else:
        copy_own()
    if transfers or written:
        session.run_collectives(
            transport, lambda given: _reduce_partials(transfers, session.rank, state, results, given)
        )
    return results


def _reduce_partials(
    transfers: Sequence[Transfer],
    rank: int,
    state: LocalState,
    results: Mapping[tuple[int, Box], Array],
    collectives: Transfers,
) -> None:
    """Exchange addends in chunks and reduce them, source by source in ascending order, into what this rank has of the
    ``results``."""
    streams: dict[int, dict[int, list[Transfer]]] = {}
    for transfer in transfers:
        streams.setdefault(transfer.source, {}).setdefault(transfer.destination, []).append(transfer)
    for source, by_destination in sorted(streams.items()):
        sizes = {destination: sum(map(_padded, stream)) for destination, stream in by_destination.items()}
        for start in range(0, max(sizes.values()), _CHUNK_BYTES):
            stops = {d: min(start + _CHUNK_BYTES, max(start, size)) for d, size in sizes.items()}
            largest = max(stops.values()) - start
            into = np.empty(stops.get(rank, start) - start, np.uint8)
            parts = {}
            if rank == source:
                parts = {d: _packed(by_destination[d], state, start, stop) for d, stop in stops.items()}
            what = functools.partial(_keys, by_destination.get(rank, []), state)
            collectives.exchange(parts, {source: into}, [(source, largest)], _DEVICE_BYTES, what)
            _apply(by_destination.get(rank, []), into, start, results, state)
    for (row, _), array in results.items():
        _finish(array, state.shard(row)[0])


def _on_host(part: Array | DeviceArray, state: LocalState) -> Array:
    """A contiguous copy."""
    return part.to_host(state.copies) if isinstance(part, DeviceArray) else np.array(part, order="C")


def _padded(transfer: Transfer) -> int:
    """Its bytes in a stream: up to a multiple of the largest item, so that no window cuts an item."""
    return -(-transfer.nbytes // _ALIGNMENT) * _ALIGNMENT


def _in_window(stream: Sequence[Transfer], start: int, stop: int) -> Iterator[tuple[Transfer, int, int, int]]:
    """The transfers that have bytes in a window of their stream: which of their bytes, and where in the window."""
    at = 0
    for transfer in stream:
        low, high = max(at, start), min(at + transfer.nbytes, stop)
        if low < high:
            yield transfer, low - at, high - at, low - start
        at += _padded(transfer)


def _packed(stream: Sequence[Transfer], state: LocalState, start: int, stop: int) -> Bytes1D:
    packed = np.empty(stop - start, np.uint8)
    for transfer, low, high, place in _in_window(stream, start, stop):
        part = state.part(transfer.source_row, transfer.box)
        state.read(part, low, high, packed[place : place + high - low])
    return packed


def _keys(stream: Sequence[Transfer], state: LocalState, source: int) -> str:
    """What comes in a stream."""
    rows = dict.fromkeys(state.shards.tensor[transfer.destination_row] for transfer in stream)
    return ", ".join(plain_key(state.tensors.paths[row]) for row in rows)


def _apply(
    stream: Sequence[Transfer],
    data: Bytes1D,
    start: int,
    results: Mapping[tuple[int, Box], Array],
    state: LocalState,
) -> None:
    for transfer, low, high, place in _in_window(stream, start, start + len(data)):
        geometry, _ = state.shard(transfer.destination_row)
        assert geometry.reduction is not None
        operation: Any = OPERATIONS[geometry.reduction.operation]
        dtype = arithmetic_dtype(geometry.dtype)
        mine = results[transfer.destination_row, transfer.box].reshape(-1).view(np.uint8)[low:high].view(dtype)
        theirs = data[place : place + high - low].view(dtype)
        mine[...] = operation(mine, theirs).astype(dtype)


def _finish(array: Array, geometry: Geometry) -> None:
    assert geometry.reduction is not None
    if geometry.reduction.operation == "avg":
        numbers = array.reshape(-1).view(np.uint8).view(arithmetic_dtype(geometry.dtype))
        numbers[...] = (numbers / numbers.dtype.type(geometry.reduction.count)).astype(numbers.dtype)
