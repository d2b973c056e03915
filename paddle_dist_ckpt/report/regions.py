"""Which region of a tensor lies in which file, once for all tensors that are cut and spread alike."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..core.columns import IntArray
from ..core.layouts import Layout
from ..core.shards import ShardTable

__all__ = ["RegionColumns", "regions_of"]

_MOST_NUMBERS = 600_000  # on the whole page, of the regions' places and files
_MOST_SHARDS = 20_000  # of one tensor


@dataclass(frozen=True, slots=True)
class LayoutColumns:
    """How a tensor is cut: by the grid that ``cuts`` make, in row-major order, or box by box.

    Attributes:
        shape: The tensor's shape.
        cuts: For each dimension where the grid's boxes but the first start; None where they are not a grid, or where
            the page does not say how they lie.
        offset: Of boxes that are not a grid where they start, a list a dimension.
        extent: How far they reach.
    """

    shape: list[int]
    cuts: list[list[int]] | None
    offset: list[list[int]]
    extent: list[list[int]]


@dataclass(frozen=True, slots=True)
class RegionColumns:
    """The layouts, and the different ways in which tensors of a layout are spread over files.

    Attributes:
        layouts: The layouts.
        files: For each way the number of the file that each of the layout's boxes is in.
    """

    layouts: list[LayoutColumns]
    files: list[list[int]]


@dataclass(slots=True)
class _Found:
    """What has been found so far, and how many more numbers the page has room for."""

    room: int
    layouts: list[LayoutColumns] = field(default_factory=list)
    bare: dict[int, int] = field(default_factory=dict)  # layouts of which only the shape is said, by the table's number
    full: dict[int, int] = field(default_factory=dict)
    files: list[list[int]] = field(default_factory=list)
    ways: dict[tuple[int, bytes], int] = field(default_factory=dict)

    def shape_only(self, number: int, layout: Layout) -> int:
        """A layout's place, whether or not the page says how its boxes lie."""
        known = self.full.get(number, self.bare.get(number))
        if known is None:
            known = self.bare[number] = len(self.layouts)
            self.layouts.append(LayoutColumns(list(layout.shape), None, [], []))
        return known

    def whole(self, number: int, layout: Layout) -> int:
        """The place of a layout of which the page says how its boxes lie."""
        known = self.full.get(number)
        if known is None:
            known = self.full[number] = len(self.layouts)
            self.layouts.append(_layout_columns(layout))
            self.room -= 2 * layout.boxes.offset.size if self.layouts[-1].cuts is None else 0
        return known

    def way(self, number: int, files: IntArray) -> int:
        """The number of a way to spread a layout over files."""
        key = number, files.tobytes()
        known = self.ways.get(key)
        if known is None:
            known = self.ways[key] = len(self.files)
            self.files.append(files.tolist())
            self.room -= len(files)
        return known


def regions_of(
    table: ShardTable, named: IntArray, tensor_bytes: IntArray, room: int = _MOST_NUMBERS
) -> tuple[RegionColumns, list[int], list[int], list[list[int]]]:
    """The regions of some tensors. Where a page has no room for those of all, the largest tensors go first.

    Args:
        table: The checkpoint's.
        named: The tensors.
        tensor_bytes: Bytes of all tensors.
        room: How many numbers the page may have of them.

    Returns:
        The regions; and for each of the tensors its layout, its way (-1 where it is left out), and where each of its
        shards starts in its file (empty where it is left out).
    """
    found = _Found(room)
    layout, cut = [-1] * len(named), [-1] * len(named)
    start: list[list[int]] = [[] for _ in named]
    first, layout_of, starts = table.first_shard.tolist(), table.layout_of.tolist(), table.data_offsets
    for place in np.argsort(-tensor_bytes[named], kind="stable").tolist():
        tensor = int(named[place])
        number, shards = layout_of[tensor], slice(first[tensor], first[tensor + 1])
        count = shards.stop - shards.start
        if count > min(_MOST_SHARDS, found.room):
            layout[place] = found.shape_only(number, table.layouts[number])
            continue
        layout[place] = found.whole(number, table.layouts[number])
        cut[place] = found.way(layout[place], table.shard_file[shards])
        if count <= found.room:
            start[place] = starts[shards].tolist()
            found.room -= count
    return RegionColumns(found.layouts, found.files), layout, cut, start


def _layout_columns(layout: Layout) -> LayoutColumns:
    cuts, boxes = layout.cuts(), layout.boxes
    if cuts is not None:
        return LayoutColumns(list(layout.shape), cuts, [], [])
    return LayoutColumns(list(layout.shape), None, boxes.offset.T.tolist(), boxes.shape.T.tolist())
