"""Tensors that are longer or shorter than what is stored, along one axis: ``LoadOptions.resize``.

A vocabulary is padded so that tensor-parallel ranks can divide it, to another length for another number of them. What
both have is loaded: a longer tensor keeps what it has behind that, and what is stored beyond a shorter one is left out.
To the rest of a load such a tensor is one of the stored shape, of which this rank may have a little less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..core.box import Box
from ..core.columns import IntArray
from ..core.device_memory import contiguous_strides
from ..core.local_tensors import LocalTensors
from ..core.shards import ShardTable
from ..core.tensors import Geometry, LocalShard
from ..tree.paths import plain_key
from .key_map import matcher
from .messages import Mismatch

__all__ = ["Rules", "resize"]

Rules = Mapping[str, "int | tuple[int, int]"]


def resize(
    tensors: LocalTensors, table: ShardTable, place: IntArray, rules: Rules
) -> tuple[dict[int, str], list[Mismatch]]:
    """Make the geometries of tensors that a rule lets differ in length those of what is stored for them.

    Args:
        tensors: The wanted ones; changed in place.
        table: What is stored.
        place: The place of each tensor in the table, -1 for one of which there is nothing, ``[tensors]``.
        rules: The axis for each pattern of keys, perhaps with the length that has to be loaded.

    Returns:
        Why tensors that a rule matches cannot be loaded all the same, by their number; and what of those that can is
        left as it is, or left out.
    """
    refused: dict[int, str] = {}
    notes: list[Mismatch] = []
    found = [(matcher([pattern]), rule if isinstance(rule, tuple) else (rule, None)) for pattern, rule in rules.items()]
    for i, path in enumerate(tensors.paths) if found else ():
        rule = next((rule for matches, rule in found if matches(plain_key(path))), None)
        if rule is None or place[i] < 0:
            continue
        axis, length = rule
        geometry, shape = tensors.geometries[tensors.geometry[i]], table.shape_of(place[i])
        if geometry.shape != shape and not _differ_there_alone(geometry.shape, shape, axis):
            continue  # it does not fit
        reason = _refusal(geometry, shape, length, axis)
        if reason is not None:
            refused[i] = reason
        if reason is not None or geometry.shape == shape:
            continue
        wanted, stored = geometry.shape[axis], shape[axis]
        tensors.geometry[i] = len(tensors.geometries)
        tensors.geometries.append(_clipped(geometry, shape, axis))
        span = f"{min(wanted, stored)} to {max(wanted, stored)} of axis {axis}"
        what = "are not stored, and left as they are" if wanted > stored else "are stored, and left out"
        notes.append(Mismatch.at(path, f"{span} {what}"))
    return refused, notes


def _differ_there_alone(wanted: tuple[int, ...], stored: tuple[int, ...], axis: int) -> bool:
    """Whether two shapes differ in this axis and in no other."""
    return len(wanted) == len(stored) and [i for i, n in enumerate(wanted) if n != stored[i]] == [axis]


def _refusal(geometry: Geometry, shape: tuple[int, ...], length: int | None, axis: int) -> str | None:
    """Why a tensor cannot be filled from one of a shape that differs in this axis at the most, if it cannot."""
    if axis >= len(shape):
        return f"resize names axis {axis}, and it has {len(shape)}"
    wanted, stored = geometry.shape[axis], shape[axis]
    lengths = f"the target has length {wanted} along axis {axis}, the checkpoint {stored}"
    if geometry.reduction is not None and wanted != stored:
        return f"{lengths}, and a partial tensor cannot be resized"
    if length is None and wanted < stored:
        return f"{lengths}; resize={{...: ({axis}, n)}} leaves out what is stored beyond, if the first n are loaded"
    if length is not None and min(wanted, stored) < length:
        return f"{lengths}, and resize says that the first {length} have to be loaded"
    return None


def _clipped(geometry: Geometry, shape: tuple[int, ...], axis: int) -> Geometry:
    """A tensor's geometry as if the tensor ended along an axis where the shape does."""
    shards = []
    for box, strides in geometry.shards:
        extent = max(0, min(box.shape[axis], shape[axis] - box.offset[axis]))
        if extent == box.shape[axis]:
            shards.append(LocalShard(box, strides))
            continue
        less = Box(box.offset, (*box.shape[:axis], extent, *box.shape[axis + 1 :]))
        if strides is None and any(n != 1 for n in box.shape[:axis]):
            strides = contiguous_strides(box.shape, geometry.dtype.itemsize)
        shards.append(LocalShard(less, strides))
    return replace(geometry, shape=shape, shards=tuple(shards))
