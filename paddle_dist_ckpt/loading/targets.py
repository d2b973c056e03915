"""What a load fills: the pieces of this rank's tensors, and buffers for what must be looked at before it is used."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box, whole
from ..core.columns import IntArray
from ..core.device_memory import Copies, DeviceArray, write_all
from ..core.dtypes import DType, arithmetic_dtype, cast_array
from ..core.local_tensors import LocalShards
from ..core.memory import address_of, array_at
from ..core.shards import Kind, ShardTable
from ..core.tensors import Geometry, LocalShard, TensorAdapter
from ..errors import CheckpointError
from ..files.reader import Consumer, view_at
from ..tree.paths import plain_key
from .mismatch import find_mismatches
from .shared_memory import find_shared_memory
from .wanted import WantedState

__all__ = ["Targets"]

Array = npt.NDArray[Any]


class Targets:
    """All memory of this rank that a load fills, in columns with a row for each target: a local shard of a tensor, or a
    buffer for a stored value.

    Args:
        wanted: What the state_dict asks for.
        table: What the checkpoint has of it.
        cast: Whether dtypes are converted.
        stored: The stored paths of tensors that are stored under another than the wanted one; None for those of which
            there is nothing.
        left_out: Stored values that are not read.
        adapter: Makes the memory of devices accessible.

    Attributes:
        cells: The different targets: the geometry of the tensor, and which local shard of it.
        tensor: The place of each target's tensor in the table, ``[rows]``.
        cell: Which of the cells it is, ``[rows]``.
        staged: Whether it goes to a buffer that is looked at before anything else is touched, ``[rows]``.
        on_device: Whether it is in a device's memory, ``[rows]``.
        zeros: Memory of addends that are to become zero (see :meth:`_without_addends`).
        shared: Memory that several keys have.
        problems: What does not fit, a line each.
    """

    def __init__(
        self,
        wanted: WantedState,
        table: ShardTable,
        cast: bool,
        stored: Mapping[str, str | None],
        left_out: Container[str],
        adapter: TensorAdapter,
    ) -> None:
        self._wanted, self._table, self._devices = wanted, table, adapter.devices
        self.problems: list[str] = []
        self.zeros: list[Array | DeviceArray] = []
        self._buffers: dict[int, Array] = {}
        tensors = wanted.tensors
        pieces = LocalShards(tensors.geometries, np.array(tensors.geometry, np.int64))
        self.cells = list(pieces.cells)
        places: dict[str | None, int] = {None: -1}
        places.update(table.index)
        place = np.array([places.get(stored.get(path, path), -1) for path in tensors.paths], np.int64)
        for tensor, reason in find_mismatches(tensors, table, place, cast).items():
            self.problems.append(f"{plain_key(tensors.paths[tensor])}: {reason}")
            place[tensor] = -1
        rows = np.flatnonzero(place[pieces.tensor] >= 0)
        not_empty = np.array([0 not in piece.box.shape for _, piece in self.cells], bool)
        rows = rows[not_empty[pieces.cell[rows]]]
        self._owner: IntArray = pieces.tensor[rows]
        self.tensor: IntArray = place[self._owner]
        self.cell: IntArray = pieces.cell[rows]
        self._address: IntArray = np.array(tensors.addresses, np.int64)[rows]
        self.staged = np.zeros(len(rows), bool)
        self._without_addends()
        on_device = np.array([geometry.on_device for geometry, _ in self.cells], bool)
        self.on_device: npt.NDArray[np.bool_] = on_device[self.cell]
        self._add_values(left_out, set(place.tolist()))
        self.shared = find_shared_memory(self)

    def __len__(self) -> int:
        return len(self.tensor)

    def _without_addends(self) -> None:
        """The addend at position 0 of a sum gets the value and the others zeros; where equal addends reduce to
        themselves, as for max or avg, each gets the value."""
        is_zero = np.array([_becomes_zero(geometry) for geometry, _ in self.cells], bool)
        if is_zero.any():
            zero = is_zero[self.cell]
            self.zeros = [self.memory(row) for row in np.flatnonzero(zero).tolist()]
            self._keep(np.flatnonzero(~zero))

    def _keep(self, rows: IntArray) -> None:
        for name in ("_owner", "tensor", "cell", "_address", "staged"):
            setattr(self, name, getattr(self, name)[rows])

    def _add_values(self, left_out: Container[str], filled: Container[int]) -> None:
        """Add a buffer for each value that is stored as an entry, and for each array of which only the object is there
        that it belongs to."""
        values = np.flatnonzero(self._table.kinds != Kind.TENSOR).tolist()
        added = [t for t in values if t not in filled and self._table.paths[t] not in left_out]
        first_row, first_cell = len(self), len(self.cells)
        for row, t in enumerate(added, first_row):
            shape, dtype = self._table.layouts[self._table.layout_of[t]].shape, self._table.dtypes[t]
            geometry = Geometry(Kind(int(self._table.kinds[t])), dtype, shape, True, (LocalShard(whole(shape)),))
            self.cells.append((geometry, geometry.shards[0]))
            self._buffers[row] = np.empty(shape, dtype.raw)
        count = len(added)
        self.tensor = np.append(self.tensor, np.array(added, np.int64))
        self.cell = np.append(self.cell, np.arange(first_cell, first_cell + count))
        self.staged = np.append(self.staged, np.ones(count, bool))
        self.on_device = np.append(self.on_device, np.zeros(count, bool))
        self._owner = np.append(self._owner, np.full(count, -1))
        self._address = np.append(self._address, np.zeros(count, np.int64))

    def path(self, row: int) -> str:
        """The path of a row's tensor, as it is wanted; of a stored value, as it is stored."""
        owner = self._owner[row]
        return self._table.paths[self.tensor[row]] if owner < 0 else self._wanted.tensors.paths[owner]

    def stored_path(self, row: int) -> str:
        """The path of a row's tensor in the checkpoint."""
        return self._table.paths[self.tensor[row]]

    def box(self, row: int) -> Box:
        """Where a row lies in its global tensor."""
        return self.cells[self.cell[row]][1].box

    def dtypes(self, row: int) -> tuple[DType, DType]:
        """The stored element type, and the wanted one."""
        return self._table.dtypes[self.tensor[row]], self.cells[self.cell[row]][0].dtype

    def array(self, row: int) -> Array:
        """Where a row's data go, as raw items of the wanted type."""
        if row in self._buffers:
            return self._buffers[row]
        memory = self.memory(row)
        assert not isinstance(memory, DeviceArray), "it is given a buffer before"
        return memory

    def memory(self, row: int) -> Array | DeviceArray:
        """The memory of a row's tensor."""
        geometry, piece = self.cells[self.cell[row]]
        owner = self._wanted.tensors.owners[self._owner[row]]
        if geometry.on_device:
            assert self._devices is not None, "what is on a device can be reached"
            data = self._devices.memory_of(owner)
            start = int(self._address[row]) - data.base
            return DeviceArray(data, start, piece.box.shape, piece.strides, geometry.dtype.raw)
        return array_at(int(self._address[row]), piece.box.shape, piece.strides, geometry.dtype.raw, owner)

    def addresses_of(self, rows: IntArray) -> IntArray:
        """Where the data of some rows go."""
        addresses: IntArray = self._address[rows]
        buffered = np.flatnonzero(self.staged[rows] | self.on_device[rows])
        for i, row in zip(buffered.tolist(), rows[buffered].tolist(), strict=True):
            if row in self._buffers:
                addresses[i] = address_of(self._buffers[row])
        return addresses

    def strides(self, row: int) -> tuple[int, ...] | None:
        """Bytes from one element to the next where a row's data go; None if that is contiguous."""
        return None if row in self._buffers else self.cells[self.cell[row]][1].strides

    def stage(self, row: int) -> Array:
        """Give a row a buffer of its own; returns the buffer."""
        geometry, piece = self.cells[self.cell[row]]
        buffer = self._buffers[row] = np.empty(piece.box.shape, geometry.dtype.raw)
        self.staged[row] = True
        return buffer

    def sizes(self, rows: IntArray) -> IntArray:
        """Bytes of some rows."""
        return self._cell_bytes[self.cell[rows]]

    @cached_property
    def _cell_bytes(self) -> IntArray:
        return np.array([piece.box.size * geometry.dtype.itemsize for geometry, piece in self.cells], np.int64)

    def place(self, row: int, memory: npt.NDArray[np.uint8]) -> None:
        """Let a row be filled in host memory for the time being."""
        geometry, piece = self.cells[self.cell[row]]
        self._buffers[row] = memory.view(geometry.dtype.raw).reshape(piece.box.shape)

    def displace(self, row: int) -> Array:
        """Undo :meth:`place`; returns what is there."""
        return self._buffers.pop(row)

    def device_memory(self, row: int) -> DeviceArray:
        """The memory of a row that is on a device."""
        memory = self.memory(row)
        assert isinstance(memory, DeviceArray)
        return memory

    def values(self) -> Mapping[str, bytes]:
        """The values that were stored as entries, after they are read: JSON by path."""
        return {path: buffer.tobytes() for path, buffer, kind in self._added() if kind == Kind.VALUE}

    def arrays(self) -> Mapping[str, Array]:
        """The arrays of objects, after they are read, by path."""
        return {path: buffer for path, buffer, kind in self._added() if kind == Kind.ARRAY}

    def _added(self) -> Iterator[tuple[str, Array, int]]:
        for row in np.flatnonzero(self._owner < 0).tolist():
            tensor = self.tensor[row]
            buffer = self._buffers[row].view(arithmetic_dtype(self._table.dtypes[tensor]))
            yield self._table.paths[tensor], buffer, int(self._table.kinds[tensor])

    def consumer(self, row: int, box: Box, entry_box: Box) -> Consumer:
        """The consumer of a part.

        Args:
            row: Which target.
            box: The part, counted from the target's corner.
            entry_box: The same part, counted from the stored shard's corner.
        """
        part = view_at(self.array(row), box.slices)
        stored, wanted = self.dtypes(row)
        if stored is wanted:
            return Consumer(entry_box, part)

        def convert(source: Array, place: tuple[slice, ...]) -> None:
            if not cast_array(np.asarray(source), stored, view_at(part, place), wanted):
                raise CheckpointError(
                    f"{plain_key(self.path(row))}: a finite {stored.name} value is too large for {wanted.name}"
                )

        return Consumer(entry_box, part, convert)

    def without_shared(self, rows: IntArray) -> None:
        """Forget that some rows, which are not read, share memory with others."""
        gone = set(rows.tolist())
        self.shared = [shared.without(gone) for shared in self.shared]

    def compare_shared(self) -> list[str]:
        """The problems with targets that share memory: stored data that differ. Such memory is not filled."""
        problems: list[str] = []
        agreeing = []
        for shared in self.shared:
            differing = shared.differing()
            if not differing:
                agreeing.append(shared)
            others = ", ".join(sorted({plain_key(self.path(row)) for row in shared.rows}))
            problems += [
                f"{plain_key(self.path(row))}: shares memory with others of {others}, but the stored data differ"
                for row in differing
            ]
        self.shared = agreeing
        return problems

    def finish(self, copies: Copies) -> None:
        """Fill what is not filled from files: shared memory from buffers, addends of zero."""
        for shared in self.shared:
            shared.fill()
            for row, filled in zip(shared.rows, shared.memories, strict=True):
                if self.on_device[row]:
                    write_all([(self.device_memory(row), np.ascontiguousarray(filled))], copies)
                    copies.mark().wait()
        for array in self.zeros:
            if isinstance(array, DeviceArray):
                array.clear(copies)
            else:
                array[...] = 0


def _becomes_zero(geometry: Geometry) -> bool:
    reduction = geometry.reduction
    return reduction is not None and reduction.operation == "sum" and reduction.position > 0
