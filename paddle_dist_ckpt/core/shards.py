"""The table of a checkpoint's shards, in columns: which tensors there are, how each is cut, where each shard lies.

Tensors are in ascending order of their paths, the shards of a tensor in ascending order of their offsets. The shards of
one file stand in it by item size, largest first, and in the table's order among equals, without gaps, so their byte
offsets follow from the table and are never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import compress

import numpy as np

from .boxes import Boxes
from .cached import cached_property
from .columns import IntArray, edges_of, narrow, numbered, places_within, sums_by
from .dtypes import DType
from .layouts import Layout, LayoutBoxes

__all__ = ["Kind", "ShardTable", "by_file"]

_TOGETHER = 1 << 16  # shards of which something is calculated together
_FROM_OTHERS = ("index", "first_shard", "shard_tensor", "shard_bytes", "file_order", "_file_edges", "data_offsets")


class Kind(IntEnum):
    """What a table entry is: a tensor, a numpy array (handled like one), or a value too large for `.metadata`."""

    TENSOR = 0
    ARRAY = 1
    VALUE = 2


def by_file(file: IntArray, itemsize: IntArray) -> IntArray:
    """The order of shards that has them file by file, and in each the larger items first, as files hold them.

    Equal ones stay as they stand. All are ``[n]``; ``file`` may also be the rank that writes each.
    """
    sizes, size = numbered(itemsize)
    key = np.multiply(file, len(sizes), dtype=np.int64)
    key += len(sizes) - 1
    key -= size
    del size  # there may be very many
    if key.max(initial=0) < 1 << 16:
        key = key.astype(np.uint16)  # which numpy sorts in linear time
    order: IntArray = np.argsort(key, kind="stable")
    return order


@dataclass(frozen=True, eq=False)
class ShardTable:
    """Every tensor and shard of a checkpoint, or of some of its tensors. Columns of very many shards are narrow.

    Attributes:
        paths: The tensors' paths, ascending.
        dtypes: Their element types.
        kinds: Their :class:`Kind`, ``[tensors]``.
        layouts: The different layouts.
        layout_of: Which layout each tensor has, ``[tensors]``.
        shard_file: The file each shard is in, ``[shards]``, tensor by tensor.
        names: The framework's variable names of the tensors, None where there is none.
        positions: Where each shard starts in its file, ``[shards]``, in a checkpoint of another format; None in one of
            ours, where it follows from the rest.
    """

    paths: list[str]
    dtypes: list[DType]
    kinds: IntArray
    layouts: list[Layout]
    layout_of: IntArray
    shard_file: IntArray
    names: list[str | None]
    positions: IntArray | None = None

    @cached_property
    def layout_counts(self) -> IntArray:
        """How many boxes each layout has, ``[layouts]``."""
        return np.array([len(layout.parts) for layout in self.layouts], np.int64)

    @cached_property
    def first_layout_row(self) -> IntArray:
        """Where each layout's boxes start among the boxes of all layouts, and their end, ``[layouts + 1]``."""
        return edges_of(self.layout_counts)

    @cached_property
    def first_shard(self) -> IntArray:
        """Where each tensor's shards start among all, ``[tensors + 1]``."""
        return edges_of(self.layout_counts[self.layout_of])

    @cached_property
    def shard_tensor(self) -> IntArray:
        """The tensor of each shard, ``[shards]``."""
        return narrow(np.repeat(np.arange(len(self.paths)), np.diff(self.first_shard)))

    @cached_property
    def index(self) -> dict[str, int]:
        """Where each path stands."""
        return {path: i for i, path in enumerate(self.paths)}

    @property
    def shard_layout_row(self) -> IntArray:
        """For each shard the place of its box among the boxes of all layouts, one after the other, ``[shards]``."""
        return places_within(np.diff(self.first_shard), self.first_layout_row[self.layout_of])

    def layout_row_of(self, shards: IntArray) -> IntArray:
        """The same of some shards."""
        tensor = self.shard_tensor[shards]
        return shards - self.first_shard[tensor] + self.first_layout_row[self.layout_of[tensor]]

    @cached_property
    def shard_bytes(self) -> IntArray:
        """Size of each shard, ``[shards]``."""
        volumes = np.concatenate([np.zeros(0, np.int64), *(layout.parts.volumes for layout in self.layouts)])
        sizes = np.empty(int(self.first_shard[-1]), np.int64)
        for start in range(0, len(sizes), _TOGETHER):
            some = np.arange(start, min(start + _TOGETHER, len(sizes)))
            sizes[some] = volumes[self.layout_row_of(some)] * self.itemsizes[self.shard_tensor[some]]
        return narrow(sizes)

    def shape_of(self, tensor: int) -> tuple[int, ...]:
        """The global shape of a tensor."""
        return self.layouts[self.layout_of[tensor]].shape

    @cached_property
    def dtype_list(self) -> list[DType]:
        """The different element types."""
        return list(dict.fromkeys(self.dtypes))

    @cached_property
    def dtype_of(self) -> IntArray:
        """Which of :attr:`dtype_list` each tensor has, ``[tensors]``."""
        number = {dtype: i for i, dtype in enumerate(self.dtype_list)}
        return narrow(np.fromiter(map(number.__getitem__, self.dtypes), np.int64, len(self.dtypes)))

    @cached_property
    def itemsizes(self) -> IntArray:
        """Item size of each tensor, ``[tensors]``."""
        return narrow(np.array([dtype.itemsize for dtype in self.dtype_list], np.int64)[self.dtype_of])

    def layout_boxes(self, dimensions: int) -> LayoutBoxes:
        """The boxes of all layouts, one layout after the other, in so many dimensions."""
        return LayoutBoxes(self.layouts, dimensions)

    def shard_boxes(self, dimensions: int) -> Boxes:
        """The box of every shard, in so many dimensions."""
        if len(self.layouts) == len(self.paths) == 1:
            return Boxes.joined([self.layouts[0].boxes], dimensions)  # of which there may be very many
        return Boxes.joined([layout.boxes for layout in self.layouts], dimensions).take(self.shard_layout_row)

    @cached_property
    def file_order(self) -> IntArray:
        """The shards by file and, within a file, in the order in which they stand in it, ``[shards]``."""
        return narrow(by_file(self.shard_file, np.repeat(self.itemsizes, np.diff(self.first_shard))))

    @cached_property
    def _file_edges(self) -> IntArray:
        return np.searchsorted(self.shard_file[self.file_order], np.arange(int(self.shard_file.max(initial=-1)) + 2))

    def in_file(self, file: int) -> IntArray:
        """The shards of a file, in the order in which they stand in it."""
        first, last = self._file_edges[file : file + 2].tolist() if file + 1 < len(self._file_edges) else (0, 0)
        return self.file_order[first:last]

    @cached_property
    def data_offsets(self) -> IntArray:
        """Where each shard's bytes start in its file's data section, ``[shards]``."""
        if self.positions is not None:
            return self.positions
        offsets, _ = self.blocks(1)
        return offsets

    def file_bytes(self, files: int) -> IntArray:
        """Bytes of each file's data section, ``[files]``."""
        return sums_by(self.shard_file, self.shard_bytes, files)

    def blocks(self, block_bytes: int, files: int = 0) -> tuple[IntArray, IntArray]:
        """For each shard the number of its first block in its file, and for each file how many blocks it has.

        Args:
            block_bytes: Bytes of a block, of which a shard starts a new one.
            files: How many files there are, unless those that have shards will do.
        """
        order = self.file_order
        file = self.shard_file[order]
        ends = np.zeros(len(order) + 1, np.int64)  # of runs of blocks; calculated in place, for there may be very many
        counts = ends[1:]
        counts[:] = self.shard_bytes[order]
        np.negative(counts, out=counts)  # rounds up
        counts //= block_bytes
        np.negative(counts, out=counts)
        np.cumsum(counts, out=counts)
        edges = ends[np.searchsorted(file, np.arange(max(files, int(file.max(initial=-1)) + 1) + 1))]
        ends[:-1] -= edges[file]
        first = np.empty(len(order), np.int64)
        first[order] = ends[:-1]
        return narrow(first), np.diff(edges)

    def forget(self) -> None:
        """Free the columns that follow from others, which are made again if they are asked for."""
        for name in _FROM_OTHERS:
            self.__dict__.pop(name, None)

    def select(self, tensors: Sequence[int] | IntArray) -> tuple[ShardTable, IntArray]:
        """The table of some tensors (ascending), and the shards of this table that it has. Files keep their numbers."""
        chosen, paths, dtypes = np.array(tensors, np.int64), self.paths, self.dtypes
        if len(chosen) < len(paths):
            are_chosen = np.zeros(len(paths), bool)
            are_chosen[chosen] = True
            paths, dtypes = list(compress(paths, are_chosen)), list(compress(dtypes, are_chosen))
        shards = places_within(np.diff(self.first_shard)[chosen], self.first_shard[chosen])
        used, layout_of = numbered(self.layout_of[chosen])
        table = ShardTable(
            paths,
            dtypes,
            self.kinds[chosen],
            [self.layouts[i] for i in used],
            layout_of,
            self.shard_file[shards],
            [None] * len(chosen),
        )
        return table, shards
