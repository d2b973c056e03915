"""What a load fills: the pieces of this rank's tensors, and buffers for what must be looked at before it is used."""

from __future__ import annotations

from collections.abc import Container, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box, whole
from ..core.columns import IntArray, Mask, narrow
from ..core.decoding import decoding
from ..core.device_memory import Copies, DeviceAccess, DeviceArray, write_all
from ..core.dtypes import arithmetic_dtype, can_cast, cast_array
from ..core.garbage import no_collections
from ..core.grouping import group_rows
from ..core.local_tensors import LocalShards, LocalTensors, device_arrays, overlaps_itself, reach_of
from ..core.memory import Bytes1D, address_of, array_at, zeros_of
from ..core.packs import PACK_COUNT
from ..core.shards import Kind, ShardTable
from ..core.tensors import Geometry, LocalShard, TensorView
from ..errors import CheckpointError
from ..files.reader import Consumer, view_at
from ..files.room import Room
from ..planning.recipe_parts import WRONG_DTYPE, not_cast
from ..tree.paths import plain_key
from ..tree.values import begins_a_dict, decode_jsonable, from_jsonable
from .messages import Mismatch
from .part_targets import PartTargets
from .resize import Resizing
from .shared_memory import SharedMemory, find_shared_memory
from .wording import OVERLAPS_ITSELF, TRANSPOSE, some_of

__all__ = ["Targets"]

_AT_ONCE = PACK_COUNT  # rows that are sent one after the other: so many stay in a core's cache meanwhile

Array = npt.NDArray[Any]


class Targets:
    """All memory of this rank that a load fills, in columns with a row for each target: a local shard of a tensor, or a
    buffer for a stored value.

    Args:
        parts: What the state_dict asks for. Its tensors get the buffers for stored values as well.
        table: What the checkpoint has of it.
        left_out: Stored values that are not read.
        devices: How to reach the memory of devices; None if no tensor is there.
        resizing: Which tensors may be of another length than what is stored.

    Attributes:
        cells: The different targets: the geometry of the tensor, and which local shard of it.
        tensor: The place of each target's tensor in the table, ``[rows]``.
        cell: Which of the cells it is, ``[rows]``.
        nbytes: Its size, ``[rows]``.
        address: Where its data go, ``[rows]``.
        staged: Whether it goes to a buffer that is looked at before anything else is touched, ``[rows]``.
        on_device: Whether its tensor is in a device's memory, ``[rows]``.
        filled: Whether it is filled, as far as is known, ``[rows]``.
        problems: What does not fit.
    """

    def __init__(
        self,
        parts: PartTargets,
        table: ShardTable,
        left_out: Container[str],
        devices: DeviceAccess | None,
        resizing: Resizing,
    ) -> None:
        self._table, self._devices = table, devices
        self.problems: list[Mismatch] = []
        self._buffers: dict[int, Bytes1D] = {}  # the memory in which a row is filled, if that is not its tensor's
        self._shared: list[SharedMemory] = []
        tensors = self._tensors = parts.tensors
        if parts.stored == table.paths:  # as nearly always; this is seen faster
            place = np.arange(len(table.paths))
        else:
            place = np.array([-1 if path is None else table.index.get(path, -1) for path in parts.stored], np.int64)
            table.forget()  # the index takes as much memory as the paths
        asked: Mask = np.zeros(len(table.paths), bool)
        asked[place[place >= 0]] = True  # also for what does not fit, which stays as it is
        refused = resizing.fit(tensors, table, place, parts.made)
        cast = np.array(parts.cast, bool)
        refused = {**_find_mismatches(tensors, table, place, cast), **refused, **parts.refused}
        self.problems += [Mismatch.at(tensors.paths[tensor], reason) for tensor, reason in refused.items()]
        if refused:
            place[self._are_at({tensors.paths[tensor] for tensor in refused})] = -1
        self._values = self._add_values(left_out, asked)
        self._first_value = first_value = len(place)
        place = np.append(place, np.array([t for t, _ in self._values], np.int64))

        pieces = LocalShards(tensors.geometries, np.array(tensors.geometry, np.int64))
        self.cells = pieces.cells
        # The addend at position 0 of a sum gets the value and the others zeros; where equal addends reduce to
        # themselves, as for max or avg, each gets the value.
        is_zero = np.array([_becomes_zero(geometry) for geometry, _ in self.cells], bool)[pieces.cell]
        is_empty = np.array([0 in piece.box.shape for _, piece in self.cells], bool)[pieces.cell]
        found = (place[pieces.tensor] >= 0) & ~is_empty
        rows, zeros = np.flatnonzero(found & ~is_zero), np.flatnonzero(found & is_zero)
        addresses = np.array(tensors.addresses, np.int64)
        self._owner: IntArray = narrow(pieces.tensor[rows])
        self.tensor: IntArray = narrow(place[self._owner])
        self.cell: IntArray = narrow(pieces.cell[rows])
        self._address: IntArray = addresses[rows]
        self.address = self._address.copy()
        self.staged = self._owner >= first_value
        self.on_device = np.array([geometry.on_device for geometry, _ in self.cells], bool)[self.cell]
        sizes = [piece.box.size * geometry.dtype.itemsize for geometry, piece in self.cells]
        self.nbytes = np.array(sizes, np.int64)[self.cell]
        self.filled: Mask = np.ones(len(rows), bool)
        columns = (pieces.tensor[zeros].tolist(), pieces.cell[zeros].tolist(), addresses[zeros].tolist())
        self._zeros = [(row[0], self._memory(*row)) for row in zip(*columns, strict=True)]
        if self._zeros:
            overwriting = [
                tensors.paths[columns[0][i]] for i in self._overwritten(pieces.cell[zeros], addresses[zeros])
            ]
            reason = "a sum's addend that becomes zero here, and it shares memory with another target"
            self.problems += [Mismatch.at(path, reason) for path in overwriting]
            self.leave(set(overwriting))

    def __len__(self) -> int:
        return len(self.tensor)

    def leave(self, paths: Set[str]) -> None:
        """Leave the tensors at these paths as they are, whole."""
        if paths:
            left = self._are_at(paths)
            left[self._first_value :] = False
            self.filled &= ~left[self._owner]
            self._zeros = [(tensor, memory) for tensor, memory in self._zeros if not left[tensor]]

    def _are_at(self, paths: Set[str]) -> Mask:
        """Which tensors, and parts of tensors, are at some paths, ``[tensors]``."""
        return np.array([path in paths for path in self._tensors.paths], bool)

    def _overwritten(self, cell: IntArray, address: IntArray) -> list[int]:
        """Which addends of zero, each one of the cells at an address, would write to memory that rows are read to."""
        reach = np.array([reach_of(geometry, piece) for geometry, piece in self.cells], np.int64).reshape(-1, 2)
        on_device = np.array([geometry.on_device for geometry, _ in self.cells], bool)[cell]
        first, end = self.stretches
        found: list[int] = []
        for kind in (False, True):
            zeros, rows = np.flatnonzero(on_device == kind), np.flatnonzero((self.on_device == kind) & ~self.staged)
            rows = rows[np.argsort(first[rows])]
            latest = np.maximum.accumulate(np.append(0, end[rows]))  # the last end of the rows before each
            before = np.searchsorted(first[rows], address[zeros] + reach[cell[zeros], 1], side="left")
            found += zeros[latest[before] > address[zeros] + reach[cell[zeros], 0]].tolist()
        return found

    @no_collections()
    def _add_values(self, left_out: Container[str], asked: Mask) -> list[tuple[int, int]]:
        """Add a buffer for each value that is stored as an entry, and for each array of which only the object is there
        that it belongs to; returns their places in the table and among the tensors, which own the buffers."""
        table, added = self._table, []
        for t in np.flatnonzero((table.kinds != Kind.TENSOR) & ~asked).tolist():
            if table.paths[t] not in left_out:
                shape, dtype = table.shape_of(t), table.dtypes[t]
                buffer: Array = zeros_of(shape, dtype.raw, plain_key(table.paths[t]))
                geometry = Geometry(Kind(int(table.kinds[t])), dtype, shape, True, (LocalShard(whole(shape)),))
                self._tensors.add(table.paths[t], TensorView(geometry, (address_of(buffer),), buffer, None))
                added.append((t, len(self._tensors.owners) - 1))
        return added

    def path(self, row: int) -> str:
        """The path of a row's tensor, as it is wanted; of a stored value, as it is stored."""
        return self._tensors.paths[self._owner[row]]

    def box(self, row: int) -> Box:
        """Where a row lies in its global tensor."""
        return self.cells[self.cell[row]][1].box

    def array(self, row: int) -> Array:
        """Where a row's data go, as raw items of the wanted type."""
        if row in self._buffers:
            geometry, piece = self.cells[self.cell[row]]
            return array_at(int(self.address[row]), piece.box.shape, None, geometry.dtype.raw, self._buffers[row])
        memory = self.memory(row)
        assert not isinstance(memory, DeviceArray), "it is given a buffer before"
        return memory

    def memory(self, row: int) -> Array | DeviceArray:
        """The memory of a row's tensor."""
        return self._memory(int(self._owner[row]), int(self.cell[row]), int(self._address[row]))

    def _memory(self, tensor: int, cell: int, address: int) -> Array | DeviceArray:
        (geometry, piece), owner = self.cells[cell], self._tensors.owners[tensor]
        if geometry.on_device:
            return device_arrays(self.cells, np.array([cell]), [owner], [address], self._devices)[0]
        return array_at(address, piece.box.shape, piece.strides, geometry.dtype.raw, owner)

    def strides(self, row: int) -> tuple[int, ...] | None:
        """Bytes from one element to the next where a row's data go; None if that is contiguous."""
        return None if row in self._buffers else self.cells[self.cell[row]][1].strides

    def are_in_one_piece(self, rows: IntArray) -> Mask:
        """Where the data of some rows go to contiguous memory, ``[n]``."""
        are: Mask = np.array([piece.strides is None for _, piece in self.cells], bool)[self.cell[rows]]
        if self._buffers and not are.all():
            are |= np.array([row in self._buffers for row in rows.tolist()], bool)
        return are

    def place(self, row: int, memory: Bytes1D) -> None:
        """Let a row be filled in host memory for the time being."""
        self._buffers[row] = memory
        self.address[row] = address_of(memory)

    def place_all(self, rows: IntArray, memory: Bytes1D, starts: IntArray) -> None:
        """Let rows be filled in host memory for the time being, each from one of the bytes ``starts`` on."""
        self.address[rows] = address_of(memory) + starts
        self._buffers.update(dict.fromkeys(rows.tolist(), memory))

    def send(self, rows: Sequence[int], copies: Copies) -> None:
        """Queue copies of rows to the device, from where they were placed, and undo that."""
        with no_collections():  # of many rows it makes several objects each
            for start in range(0, len(rows), _AT_ONCE):
                some = rows[start : start + _AT_ONCE]
                addresses, memories = self.address[np.array(some, np.int64)], [self._buffers.pop(row) for row in some]
                write_all(zip(self.device_memory(some), addresses.tolist(), strict=True), memories, copies)

    def device_memory(self, rows: Sequence[int]) -> list[DeviceArray]:
        """The memory of rows that are on devices."""
        where = np.array(rows, np.int64)
        owners = [self._tensors.owners[tensor] for tensor in self._owner[where].tolist()]
        return device_arrays(self.cells, self.cell[where], owners, self._address[where].tolist(), self._devices)

    @no_collections()
    def entries(self, room: Room) -> dict[str, Any]:
        """The values that were stored as entries, and the arrays of objects, after they are read, by path. Of values
        only this is left then: nobody else has their buffers, and each is freed as soon as it is parsed.

        Raises:
            CheckpointCorruptedError: a value is damaged, or there is no room for all of them.
        """
        table, owners, found = self._table, self._tensors.owners, dict[str, Any]()
        for t, tensor in self._values:
            buffer: Array = owners[tensor]
            if table.kinds[t] != Kind.VALUE:
                found[table.paths[t]] = buffer.view(arithmetic_dtype(table.dtypes[t]))
                continue
            with decoding(plain_key(table.paths[t])):
                room.take(buffer.data)
                value = decode_jsonable(buffer)
                owners[tensor] = None
                del buffer
                found[table.paths[t]] = value = from_jsonable(value, kept=False)
        return found

    def are_dicts(self) -> list[tuple[str, bool]]:
        """The values that were stored as entries, by path, and whether each is a dict, as its beginning tells."""
        values = ((t, tensor) for t, tensor in self._values if self._table.kinds[t] == Kind.VALUE)
        return [(self._table.paths[t], begins_a_dict(self._tensors.owners[tensor])) for t, tensor in values]

    def contents(self) -> list[tuple[str, tuple[object, ...]]]:
        """What was read of values that are stored as entries, and of objects' arrays, by path; equal if these are."""
        table = self._table
        values = ((t, self._tensors.owners[tensor]) for t, tensor in self._values)
        return [
            (table.paths[t], (table.dtypes[t].name, buffer.shape, buffer.reshape(-1).view(np.uint8).data))
            for t, buffer in values
        ]

    def consumer(self, row: int, box: Box, entry_box: Box) -> Consumer:
        """The consumer of a part, a box from the target's corner, and the same from the stored shard's corner."""
        part = view_at(self.array(row), box.slices)
        stored, wanted = self._table.dtypes[self.tensor[row]], self.cells[self.cell[row]][0].dtype
        if stored is wanted:
            return Consumer(entry_box, part)

        def convert(source: Array, place: tuple[slice, ...]) -> None:
            if not cast_array(np.asarray(source), stored, view_at(part, place), wanted):
                raise CheckpointError(
                    f"{plain_key(self.path(row))}: a finite {stored.name} value is too large for {wanted.name}"
                )

        return Consumer(entry_box, part, convert)

    @property
    def stretches(self) -> tuple[IntArray, IntArray]:
        """The first address of each row's memory, and the one behind its last byte, ``[rows]`` each."""
        reach = np.array([reach_of(geometry, piece) for geometry, piece in self.cells], np.int64).reshape(-1, 2)
        return self.address + reach[self.cell, 0], self.address + reach[self.cell, 1]

    def stage_shared(self) -> None:
        """Give buffers to those that are filled and share memory with others."""
        self._shared = find_shared_memory(self, np.flatnonzero(self.filled & ~self.staged))
        for row in (row for shared in self._shared for row in shared.rows):
            self.place(row, np.empty(self.nbytes[row], np.uint8))
            self.staged[row] = True

    def compare_shared(self) -> list[Mismatch]:
        """The problems with targets that share memory: stored data that differ. Their tensors are left as they are."""
        others: dict[str, set[str]] = {}
        for shared in self._shared:
            for row, found in shared.disagreeing(self).items():
                others.setdefault(self.path(row), set()).update(map(self.path, found))
        self.leave(others.keys())
        return [Mismatch.at(path, _shared_text(found - {path})) for path, found in others.items()]

    def finish(self, copies: Copies) -> None:
        """Fill what is not filled from files: shared memory from buffers, addends of zero."""
        for row in (row for shared in self._shared for row in shared.rows if self.filled[row]):
            memory = self.memory(row)
            if isinstance(memory, DeviceArray):
                write_all([(memory, int(self.address[row]))], self._buffers[row], copies)
                copies.mark().wait()
            else:
                memory[...] = self.array(row)
        for _, memory in self._zeros:
            if isinstance(memory, DeviceArray):
                memory.clear(copies)
            else:
                memory[...] = 0


def _find_mismatches(tensors: LocalTensors, table: ShardTable, place: IntArray, cast: Mask) -> dict[int, str]:
    """The wanted tensors that cannot be filled from what is stored for them, with the reasons.

    Tensors that are alike, and stored alike, are judged once. ``place`` is that of each in the table, -1 for one of
    which there is nothing, ``cast`` whether its dtype is converted, both ``[tensors]``.
    """
    found = np.flatnonzero(place >= 0)
    geometry = np.array(tensors.geometry, np.int64)[found]
    columns = np.column_stack([geometry, table.layout_of[place[found]], table.dtype_of[place[found]], cast[found]])
    first, alike = group_rows(columns)
    reasons = [
        _mismatch(tensors.geometries[geometry[i]], table, int(place[found[i]]), bool(cast[found[i]]))
        for i in first.tolist()
    ]
    unfit = np.flatnonzero(np.array([reason is not None for reason in reasons], bool)[alike])
    return {int(found[i]): reasons[alike[i]] or "" for i in unfit.tolist()}


def _mismatch(geometry: Geometry, table: ShardTable, tensor: int, cast: bool) -> str | None:
    """Why a tensor cannot be filled from what is stored, if it cannot."""
    stored, layout = table.dtypes[tensor], table.layouts[table.layout_of[tensor]]
    if not geometry.writable:
        return "the target array is read-only"
    if any(overlaps_itself(geometry, piece) for piece in geometry.shards):
        return OVERLAPS_ITSELF
    if layout.shape != geometry.shape:
        is_turned = len(layout.shape) == 2 and layout.shape == geometry.shape[::-1]
        shapes = f"the target has shape {list(geometry.shape)}, the checkpoint {list(layout.shape)}"
        return f"{shapes}{TRANSPOSE if is_turned else ''}"
    if stored is not geometry.dtype and not (cast and can_cast(stored, geometry.dtype)):
        return f"{WRONG_DTYPE} {geometry.dtype.name}, the checkpoint {stored.name}{not_cast(stored, geometry.dtype)}"
    if geometry.reduction is not None and geometry.reduction.operation == "prod":
        return "loading into a partial tensor of products is not supported"
    return None


def _shared_text(others: Set[str]) -> str:
    """Why a tensor cannot be filled that shares memory with others, perhaps with more than these."""
    if not others:
        return OVERLAPS_ITSELF
    shown = some_of(sorted(map(plain_key, others)), between=", ")
    return f"shares memory with {shown}, but the stored data differ"


def _becomes_zero(geometry: Geometry) -> bool:
    reduction = geometry.reduction
    return reduction is not None and reduction.operation == "sum" and reduction.position > 0
