"""The stored tensors, and how the job that saved them had cut them, as far as their boxes tell.

A save of this library divides tensors further than ranks had them: replicas among the ranks that have them, and flat
ranges of elements into boxes. It divides rows, and leaves columns together.
"""

from __future__ import annotations

import functools
import math

from ..core.dtypes import DType
from ..core.layouts import Layout
from ..core.parts import SourceTensor
from ..core.shards import Kind
from ..files.metadata import Metadata

__all__ = ["stored_tensors"]

Offsets = list[tuple[int, ...]]
Columns = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a box starts in all dimensions but the first, and how far it reaches there."""


def stored_tensors(metadata: Metadata) -> dict[str, SourceTensor]:
    """All tensors of a checkpoint by flat key."""
    table, of_job = metadata.table, metadata.job_offsets
    cuts = [(_offsets_of(layout, metadata.format), layout) for layout in table.layouts]
    known = [(layout.shape, offsets, [] if offsets else _columns_of(layout)) for offsets, layout in cuts]

    @functools.cache  # nearly all are like others
    def like(number: int, dtype: DType) -> SourceTensor:
        shape, offsets, by_columns = known[number]
        return SourceTensor(shape, dtype, offsets, by_columns)

    columns = zip(metadata.path_of, table.dtypes, table.layout_of.tolist(), table.kinds.tolist(), strict=False)
    found = {key: like(number, dtype) for key, dtype, number, kind in columns if kind != Kind.VALUE}
    for path, offsets in of_job.items():
        key = metadata.key(path)
        found[key] = found[key]._replace(offsets=offsets)
    return found


def _offsets_of(layout: Layout, kind: str) -> Offsets:
    """Where the boxes start that ranks had of a tensor that is stored in this layout; empty if that is not known.

    Args:
        layout: The stored boxes.
        kind: The checkpoint's format. Others than this library's store tensors as ranks had them.
    """
    offsets: Offsets = list(map(tuple, layout.boxes.offset.tolist()))
    rows_are_whole = layout.shape[:1] > (1,) and all(offset[0] == 0 for offset in offsets)
    return offsets if kind != "native" or len(offsets) <= 1 or rows_are_whole else []


def _columns_of(layout: Layout) -> Offsets:
    """Where the columns start that ranks had together, with rows from 0; empty if that is not known.

    Of a flat range the first row and the last may be there in part, and those between have all columns that the rank
    had. So the columns of the widest boxes are those of ranks if they make up the tensor, and if some box has several
    rows of each: a part of one row alone may be anything.
    """
    if len(layout.shape) < 2:
        return []
    rows: dict[Columns, int] = {}  # the most that a box has of these columns
    for offset, shape in layout.boxes.to_list():
        columns = (offset[1:], shape[1:])
        rows[columns] = max(rows.get(columns, 0), shape[0])
    widest: list[Columns] = []
    left = math.prod(layout.shape[1:])
    for one in sorted(rows, key=lambda columns: -math.prod(columns[1])):
        if not any(_within(one, other) for other in widest):
            widest.append(one)
            left -= math.prod(one[1])
            if left < 0 or rows[one] < 2:
                return []
    return sorted((0, *offset) for offset, _ in widest) if left == 0 else []


def _within(one: Columns, other: Columns) -> bool:
    dimensions = zip(*one, *other, strict=True)
    return all(there <= here and here + n <= there + m for here, n, there, m in dimensions)
