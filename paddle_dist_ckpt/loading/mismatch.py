"""Which wanted tensors cannot be filled from what is stored for them, and why."""

from __future__ import annotations

import numpy as np

from ..core.columns import IntArray
from ..core.dtypes import can_cast
from ..core.grouping import group_rows
from ..core.local_tensors import LocalTensors
from ..core.shards import ShardTable
from ..core.tensors import Geometry

__all__ = ["find_mismatches"]


def find_mismatches(tensors: LocalTensors, table: ShardTable, place: IntArray, cast: bool) -> dict[int, str]:
    """The wanted tensors that do not fit, with the reasons. Tensors that are alike, and stored alike, are judged once.

    Args:
        tensors: The wanted tensors.
        table: What is stored.
        place: The place of each in the table, -1 for one of which there is nothing, ``[tensors]``.
        cast: Whether dtypes are converted.
    """
    found = np.flatnonzero(place >= 0)
    geometry = np.array(tensors.geometry, np.int64)[found]
    columns = np.column_stack([geometry, table.layout_of[place[found]], table.dtype_of[place[found]]])
    first, alike = group_rows(columns)
    reasons = [_reason(tensors.geometries[geometry[i]], table, int(place[found[i]]), cast) for i in first.tolist()]
    unfit = np.flatnonzero(np.array([reason is not None for reason in reasons], bool)[alike])
    return {int(found[i]): reasons[alike[i]] or "" for i in unfit.tolist()}


def _reason(geometry: Geometry, table: ShardTable, tensor: int, cast: bool) -> str | None:
    """Why a tensor cannot be filled from what is stored, if it cannot."""
    stored, layout = table.dtypes[tensor], table.layouts[table.layout_of[tensor]]
    if not geometry.writable:
        return "the target array is read-only"
    if layout.shape != geometry.shape:
        return f"the target has shape {list(geometry.shape)}, the checkpoint {list(layout.shape)}"
    if stored is not geometry.dtype and not (cast and can_cast(stored, geometry.dtype)):
        more = ", a cast that is not done" if cast else ""
        return f"the target has dtype {geometry.dtype.name}, the checkpoint {stored.name}{more}"
    if geometry.reduction is not None and geometry.reduction.operation == "prod":
        return "loading into a partial tensor of products is not supported"
    return None
