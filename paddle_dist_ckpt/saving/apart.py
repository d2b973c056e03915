"""Copies what a rank presents of memory that is filled meanwhile: read later, it would no longer be what it was."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..core.columns import IntArray, Mask
from ..core.local_tensors import LocalShards, LocalTensors, reach_of
from ..core.memory import Bytes1D, address_of
from ..core.tensors import LocalShard, TensorView
from .describe import LocalState

__all__ = ["set_apart"]


def set_apart(state: LocalState, targets: LocalTensors, renamed: bool) -> LocalState:
    """The state with copies, in host memory, of those of its tensors of which targets overwrite something.

    Not of one that is the target of the same path, and nothing else: that is filled with what it has.

    Args:
        state: What is presented.
        targets: What is filled.
        renamed: Whether a target may be filled with what has another path.
    """
    number = np.array(state.tensors.geometry, np.int64)
    due = set(state.shards.tensor[_overwritten(state, targets, renamed)].tolist())
    if not due:
        return state
    tensors, first = LocalTensors(), 0
    for t, path in enumerate(state.tensors.paths):
        geometry, name, owner = state.tensors.geometries[number[t]], state.tensors.names[t], state.tensors.owners[t]
        stop = first + len(geometry.shards)
        addresses = tuple(state.tensors.addresses[first:stop])
        if t in due:
            copies = [_copy(state, row) for row in range(first, stop)]
            shards = tuple(shard._replace(strides=None) for shard in geometry.shards)
            geometry = dataclasses.replace(geometry, shards=shards, device=None)
            owner, addresses = copies, tuple(map(address_of, copies))
        tensors.add(path, TensorView(geometry, addresses, owner, name))
        first = stop
    return dataclasses.replace(state, tensors=tensors, known=None)


def _copy(state: LocalState, row: int) -> Bytes1D:
    array = state.array(row)
    copy = np.empty(array.nbytes, np.uint8)
    state.read(array, 0, array.nbytes, copy)
    return copy


def _overwritten(state: LocalState, targets: LocalTensors, renamed: bool) -> Mask:
    """Which of the state's shards overlap with targets, but for itself under the same path, ``[shards]``."""
    filled = LocalShards(targets.geometries, np.array(targets.geometry, np.int64))
    start, stop, on_device = _spans(state.tensors, state.shards)
    first, last, target_on_device = _spans(targets, filled)
    overlapping = np.zeros(len(start), np.int64)
    for device in (False, True):
        mine, others = on_device == device, (target_on_device == device) & (first < last)
        # A target overlaps unless it starts behind the shard, or ends before it.
        before = np.searchsorted(np.sort(last[others]), start[mine], side="right")
        overlapping[mine] = np.searchsorted(np.sort(first[others]), stop[mine], side="left") - before
    overlapping[start == stop] = 0
    columns = zip(filled.tensor.tolist(), filled.cell.tolist(), targets.addresses, strict=True)
    memories = {(targets.paths[tensor], address, *_kind(filled, cell)) for tensor, cell, address in columns}
    same = np.zeros(len(start), np.int64)
    for row in np.flatnonzero(overlapping).tolist() if not renamed else ():
        path, address = state.tensors.paths[state.shards.tensor[row]], state.tensors.addresses[row]
        same[row] = (path, address, *_kind(state.shards, int(state.shards.cell[row]))) in memories
    return np.asarray(overlapping > same)


def _kind(shards: LocalShards, cell: int) -> tuple[LocalShard, str]:
    """All by which shards at one address are the same part of a tensor."""
    geometry, shard = shards.cells[cell]
    return shard, geometry.dtype.name


def _spans(tensors: LocalTensors, shards: LocalShards) -> tuple[IntArray, IntArray, Mask]:
    """Where each shard's memory starts and ends, and whether that is on a device, ``[shards]``."""
    reach = np.array([reach_of(geometry, piece) for geometry, piece in shards.cells], np.int64).reshape(-1, 2)
    on_device = np.array([geometry.on_device for geometry, _ in shards.cells], bool)
    address = np.array(tensors.addresses, np.int64)
    return address + reach[shards.cell, 0], address + reach[shards.cell, 1], on_device[shards.cell]
