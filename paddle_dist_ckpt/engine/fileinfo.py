"""What a data file's header says beside its entries: all from which a lost `.metadata` can be made again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ..core.box import Box
from ..core.codec import VERSION, table_to_record
from ..core.shards import LayoutCollection, ShardTable
from ..core.values import to_jsonable
from ..formats.datafile import FORMAT, DataFileInfo
from ..options import SaveOptions
from ..version import __version__
from .context import Context
from .describe import LocalState
from .messages import SaveOrder

__all__ = ["LIBRARY", "data_file_info"]

LIBRARY = f"paddle_dist_ckpt {__version__}"


def data_file_info(
    state: LocalState,
    items: Sequence[tuple[int, Box]],
    order: SaveOrder,
    context: Context,
    part: int,
    parts: int,
    options: SaveOptions,
) -> DataFileInfo:
    """The information of one file.

    Args:
        state: What this rank has.
        items: What the file holds: the number of the local shard, and the box in global coordinates.
        order: What this rank writes.
        context: Who saves.
        part: The file's number among this rank's.
        parts: How many files this rank writes.
        options: How to save.
    """
    is_first_of_all = part == 0 and context.is_coordinator
    user = options.user_metadata if is_first_of_all else None
    values = order.values if part == 0 else []
    return DataFileInfo(
        format=FORMAT,
        version=VERSION,
        save=order.save_id,
        unique_id=order.unique_id,
        world_size=len(context.session.ranks),
        rank=context.session.rank,
        part=part,
        parts=parts,
        block_bytes=options.block_bytes,
        created=order.created,
        library=LIBRARY,
        paddle=context.adapter.version,
        tensors=table_to_record(_table(state, items)),
        values=[(path, msgspec.Raw(state.json[path])) for path in values],
        writers=order.writers if is_first_of_all else None,
        user_metadata=to_jsonable(dict(user), "user_metadata") if user is not None else None,
    )


def _table(state: LocalState, items: Sequence[tuple[int, Box]]) -> ShardTable:
    """The tensors of a file, with just the shards that are in it."""
    boxes: dict[int, list[Box]] = {}
    for row, box in items:
        boxes.setdefault(state.owners[row], []).append(box)
    owners = sorted(boxes, key=lambda owner: state.paths[owner])
    collection = LayoutCollection()
    layout_of = [collection.add_boxes(state.views[owner].shape, tuple(sorted(boxes[owner]))) for owner in owners]
    return ShardTable(
        [state.paths[owner] for owner in owners],
        [state.views[owner].dtype for owner in owners],
        np.array([state.views[owner].kind for owner in owners], np.int64),
        collection.layouts,
        np.array(layout_of, np.int64),
        np.zeros(len(items), np.int64),
        [state.views[owner].name for owner in owners],
    )
