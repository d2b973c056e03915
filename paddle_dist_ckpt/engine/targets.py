"""What a load fills: the boxes of this rank's tensors, and buffers for what must be looked at before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box
from ..core.dtypes import DTYPES, DType, can_cast, cast_array
from ..core.paths import plain_key
from ..core.shards import Kind, ShardTable
from ..core.state_dict import Leaf
from ..core.tensors import LocalShard, TensorAdapter, TensorView
from ..errors import CheckpointCorruptedError, CheckpointError, UnsupportedValueError
from .reader import Consumer, view_at
from .shared_memory import SharedMemory, find_shared_memory

__all__ = ["Target", "Targets", "Wishes", "check_value_rows", "collect"]

Array = npt.NDArray[Any]


@dataclass(slots=True, eq=False)
class Target:
    """A box of a tensor to be filled.

    Attributes:
        path: The tensor's path.
        tensor: Its place in the table.
        offset: Where the box starts in the global tensor.
        array: Where the data go, raw items of type ``wanted``.
        stored: The stored element type.
        wanted: The target's.
        staged: Whether ``array`` is a buffer that is looked at before anything else is touched.
    """

    path: str
    tensor: int
    offset: tuple[int, ...]
    array: Array
    stored: DType
    wanted: DType
    staged: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The box's shape."""
        return tuple(self.array.shape)

    def consumer(self, box: Box, entry_box: Box) -> Consumer:
        """The consumer of a part.

        Args:
            box: The part, counted from this target's corner.
            entry_box: The same part, counted from the stored shard's corner.
        """
        part = view_at(self.array, box.slices)
        if self.stored is self.wanted:
            return Consumer(entry_box, part)

        def convert(source: Array, place: tuple[slice, ...]) -> None:
            if not cast_array(np.asarray(source), self.stored, view_at(part, place), self.wanted):
                raise CheckpointError(
                    f"{plain_key(self.path)}: a finite {self.stored.name} value is too large for {self.wanted.name}"
                )

        return Consumer(entry_box, part, convert)


@dataclass(slots=True)
class Targets:
    """All that this rank wants of a checkpoint.

    Attributes:
        rows: The boxes to be filled.
        zeros: Memory of addends that are to become zero (see :meth:`_add_partial`).
        shared: Memory that several keys have.
        problems: What does not fit, a line each.
    """

    rows: list[Target] = field(default_factory=list)
    zeros: list[Array] = field(default_factory=list)
    shared: list[SharedMemory] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add_tensor(self, path: str, view: TensorView, table: ShardTable, cast: bool) -> None:
        """Add a tensor's boxes, or the reason why it does not fit."""
        tensor = table.index[path]
        stored, layout = table.dtypes[tensor], table.layouts[table.layout_of[tensor]]
        if not view.writable:
            self.problems.append(f"{plain_key(path)}: the target array is read-only")
        elif layout.shape != view.shape:
            self.problems.append(
                f"{plain_key(path)}: the target has shape {list(view.shape)}, the checkpoint {list(layout.shape)}"
            )
        elif stored is not view.dtype and not (cast and can_cast(stored, view.dtype)):
            more = ", a cast that is not done" if cast else ""
            self.problems.append(
                f"{plain_key(path)}: the target has dtype {view.dtype.name}, the checkpoint {stored.name}{more}"
            )
        elif view.reduction is not None:
            self._add_partial(path, view, tensor, stored)
        else:
            self._add_shards(path, view, view.shards, tensor, stored)

    def _add_shards(
        self, path: str, view: TensorView, shards: Sequence[LocalShard], tensor: int, stored: DType
    ) -> None:
        self.rows += [Target(path, tensor, s.offset, s.array, stored, view.dtype) for s in shards if s.array.size]

    def _add_partial(self, path: str, view: TensorView, tensor: int, stored: DType) -> None:
        """The addend at position 0 of a sum gets the value and the others zeros; where equal addends reduce to
        themselves, as for max or avg, each gets the value."""
        assert view.reduction is not None
        if view.reduction.operation == "prod":
            self.problems.append(f"{plain_key(path)}: loading into a partial tensor of products is not supported")
        elif view.reduction.operation == "sum" and view.reduction.position > 0:
            self.zeros += [shard.array for shard in view.shards]
        else:
            self._add_shards(path, view, view.shards, tensor, stored)

    def add_value(self, path: str, table: ShardTable) -> None:
        """Add a buffer for a value that is stored as an entry."""
        tensor = table.index[path]
        size = table.layouts[table.layout_of[tensor]].shape
        buffer = np.empty(size, np.uint8)
        self.rows.append(Target(path, tensor, (0,), buffer, DTYPES["uint8"], DTYPES["uint8"], True))

    def stage_shared(self) -> None:
        """Give targets that share memory buffers of their own, to be compared before the memory is filled."""
        self.shared = find_shared_memory(self.rows)

    def compare_shared(self) -> list[str]:
        """The problems with targets that share memory: stored data that differ. Such memory is not filled."""
        problems: list[str] = []
        agreeing = []
        for shared in self.shared:
            differing = shared.differing()
            if not differing:
                agreeing.append(shared)
            others = ", ".join(sorted({plain_key(target.path) for target in shared.targets}))
            problems += [
                f"{plain_key(target.path)}: shares memory with others of {others}, but the stored data differ"
                for target in differing
            ]
        self.shared = agreeing
        return problems

    def finish(self) -> None:
        """Fill what is not filled from files: shared memory from buffers, addends of zero."""
        for shared in self.shared:
            shared.fill()
        for array in self.zeros:
            array[...] = 0


@dataclass(slots=True)
class Wishes:
    """What a load's caller has: tensors by path, values' paths with what is there now, and what cannot be loaded.

    A value is there as ``"none"``, ``"dict"`` or ``"other"``.
    """

    views: dict[str, TensorView] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def collect(leaves: Sequence[Leaf], adapter: TensorAdapter) -> Wishes:
    """Look at a load's targets."""
    wishes = Wishes()
    for leaf in leaves:
        if leaf.is_tensor:
            try:
                wishes.views[leaf.path] = adapter.view(leaf.value, plain_key(leaf.path))
            except UnsupportedValueError as error:
                wishes.problems.append(str(error))
        else:
            present = "none" if leaf.value is None else "dict" if isinstance(leaf.value, dict) else "other"
            wishes.values[leaf.path] = present
    return wishes


def check_value_rows(table: ShardTable) -> None:
    """Refuse values that a hostile file claims to be of another shape than bytes in a row."""
    for t in np.flatnonzero(table.kinds == Kind.VALUE).tolist():
        if table.dtypes[t].name != "uint8" or len(table.layouts[table.layout_of[t]].shape) != 1:
            raise CheckpointCorruptedError(f"{plain_key(table.paths[t])}: a stored value that is not a row of bytes")
