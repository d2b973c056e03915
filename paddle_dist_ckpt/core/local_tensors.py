"""Tensors of one rank, and its shards of them, in columns: what a save describes and a load fills."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import UnsupportedValueError
from .columns import IntArray, edges_of, places_within
from .device_memory import ArrayForm, DeviceAccess, DeviceArray
from .garbage import no_collections
from .tensors import Geometry, LocalShard, TensorAdapter, TensorView, TensorViews

__all__ = ["LocalShards", "LocalTensors", "device_arrays", "overlaps_itself", "reach_of"]

_AT_ONCE = 256  # tensors that are looked at together: so many stay in a core's cache meanwhile
_MOST_COMPARED = 1 << 24  # elements that are compared, if it takes that to know whether some share memory


@dataclass(slots=True, eq=False)
class LocalTensors:
    """Tensors (and numpy arrays and large values) of this rank, in columns.

    Attributes:
        paths: Their paths, ``[tensors]``.
        names: The framework's names of the variables.
        geometries: The different geometries.
        geometry: Which one each tensor has.
        addresses: Where each local shard is, tensor by tensor, ``[shards]``.
        owners: What keeps the memory alive, ``[tensors]``.
    """

    paths: list[str] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    geometries: list[Geometry] = field(default_factory=list)
    geometry: list[int] = field(default_factory=list)
    addresses: array[int] = field(default_factory=lambda: array("q"))
    owners: list[Any] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _equal: dict[Geometry, int] = field(default_factory=dict)

    def with_owners(self, owners: Sequence[Any]) -> LocalTensors:
        """The first tensors, as many as there are owners, with these owners; a copy."""
        count = len(owners)
        used = 1 + max(self.geometry[:count], default=-1)  # what comes behind is of values
        shards = np.array([len(g.shards) for g in self.geometries], np.int64)[self.geometry[:count]]
        return LocalTensors(
            self.paths[:count],
            self.names[:count],
            self.geometries[:used],
            self.geometry[:count],
            self.addresses[: int(shards.sum())],
            list(owners),
        )

    def add(self, path: str, view: TensorView) -> None:
        """Append a tensor."""
        geometry, addresses, owner, name = view
        self.geometry.append(self._number(geometry))
        self.paths.append(path)
        self.names.append(name)
        self.addresses.extend(addresses)
        self.owners.append(owner)

    def look_at(self, paths: Sequence[str], values: Sequence[Any], adapter: TensorAdapter) -> dict[str, str]:
        """Append the tensors that the adapter takes. Returns what is wrong with others, a line each, by path."""
        problems: dict[str, str] = {}
        for start in range(0, len(values), _AT_ONCE):
            some, their_paths = values[start : start + _AT_ONCE], paths[start : start + _AT_ONCE]
            views = adapter.views(some, their_paths)
            if views is not None:
                self._add_all(their_paths, views)
                continue
            for path, value in zip(their_paths, some, strict=True):
                try:
                    self.add(path, adapter.view(value, path))
                except UnsupportedValueError as error:
                    problems[path] = str(error)
        return problems

    def _add_all(self, paths: Sequence[str], views: TensorViews) -> None:
        self.geometry.extend(map(self._number, views.geometries))
        self.paths.extend(paths)
        self.names.extend(views.names)
        self.addresses.extend(views.addresses)
        self.owners.extend(views.owners)

    def tied(self) -> list[list[str]]:
        """The paths of each tensor that has several."""
        owners = (owner[0] if type(owner) is tuple else owner for owner in self.owners)  # a tuple: of a part
        tokens = array("q", map(id, owners))
        if len(np.unique(tokens)) == len(tokens):
            return []
        found: dict[tuple[int, int], list[str]] = {}
        for path, *token in zip(self.paths, tokens, self.geometry, strict=True):
            found.setdefault((token[0], token[1]), []).append(path)
        return [paths for paths in found.values() if len(paths) > 1]

    def _number(self, geometry: Geometry) -> int:
        """Which of ``geometries`` it is; it becomes one if it is not."""
        number = self._numbers.get(id(geometry))
        if number is None:
            number = self._equal.setdefault(geometry, len(self.geometries))
            if number == len(self.geometries):
                self.geometries.append(geometry)  # and so stays alive, and its id its own
                self._numbers[id(geometry)] = number
        return number


class LocalShards:
    """A rank's shards of its tensors, tensor by tensor, in columns.

    Attributes:
        tensor: The tensor of each, ``[shards]``.
        cell: Which of ``cells`` it is, ``[shards]``.
        cells: The different ones, each with its tensor's geometry.
    """

    def __init__(self, geometries: Sequence[Geometry], geometry: IntArray) -> None:
        self.cells: list[tuple[Geometry, LocalShard]] = [(g, shard) for g in geometries for shard in g.shards]
        counts = np.array([len(g.shards) for g in geometries], np.int64)
        per_tensor = counts[geometry]
        self.tensor: IntArray = np.repeat(np.arange(len(geometry)), per_tensor)
        self.cell: IntArray = places_within(per_tensor, edges_of(counts)[geometry])


def reach_of(geometry: Geometry, piece: LocalShard) -> tuple[int, int]:
    """Where a piece's memory starts and ends, counted from its first element, in bytes."""
    itemsize, shape = geometry.dtype.itemsize, piece.box.shape
    if piece.strides is None or 0 in shape:
        return 0, piece.box.size * itemsize
    reach = [(n - 1) * stride for n, stride in zip(shape, piece.strides, strict=True)]
    return sum(min(0, r) for r in reach), sum(max(0, r) for r in reach) + itemsize


def overlaps_itself(geometry: Geometry, piece: LocalShard) -> bool:
    """Whether elements of a piece share memory with each other. Of very many that might, they are taken to do so."""
    if piece.strides is None or 0 in piece.box.shape:
        return False
    itemsize = reach = geometry.dtype.itemsize
    steps = sorted((abs(stride), n) for n, stride in zip(piece.box.shape, piece.strides, strict=True) if n > 1)
    for stride, n in steps:
        if stride < reach:
            break  # what is within one step reaches into the next, and may lie between what is there
        reach += stride * (n - 1)
    else:
        return False
    if piece.box.size > _MOST_COMPARED:
        return True
    starts = np.zeros(1, np.int64)
    for stride, n in steps:
        starts = (starts[:, None] + stride * np.arange(n)).reshape(-1)
    return bool((np.diff(np.sort(starts)) < itemsize).any())


def device_arrays(
    cells: Sequence[tuple[Geometry, LocalShard]],
    cell: IntArray,
    owners: Sequence[Any],
    addresses: Sequence[int],
    devices: DeviceAccess | None,
) -> list[DeviceArray]:
    """Local shards on devices: of each which of ``cells`` it is, what keeps its memory alive, and where it begins."""
    if not owners:
        return []
    assert devices is not None, "what is on a device can be reached"
    forms: dict[int, ArrayForm] = {}
    for number in np.unique(cell).tolist():
        geometry, shard = cells[number]
        forms[number] = ArrayForm(shard.box.shape, shard.strides, geometry.dtype.raw)
    with no_collections():
        numbers: list[int] = cell.tolist()
        memories = devices.memories_of(owners, numbers)
        starts = [address - memory.base for memory, address in zip(memories, addresses, strict=True)]
        return list(map(DeviceArray, memories, starts, map(forms.__getitem__, numbers)))
