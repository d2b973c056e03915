"""Loading all of a checkpoint, together with other ranks, whole into the memory of one of them or of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..control.rounds import ask
from ..core.dtypes import dtype_named
from ..core.frames import with_room_for_frames
from ..core.messages import encode, prepare
from ..files.metadata import Metadata
from ..tree.building import build_tree
from ..tree.paths import plain_key
from ..tree.state_dict import Leaves
from .load_rounds import LeavesLoad
from .merged import NewLeaves, add_leaf
from .reading import LoadContext

__all__ = ["load_on"]


class _ReceiverRequest(msgspec.Struct, frozen=True, array_like=True):
    """Round ``contents``: whether this rank is to have it all."""

    receives: bool


class _ContentsAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Round ``contents``: what there is, for a rank that is to have it all: entries by path, kind, dtype and shape; the
    paths of the values that are none."""

    entries: list[tuple[str, int, str, tuple[int, ...]]]
    values: list[str]


prepare([_ReceiverRequest, _ContentsAnswer])


@with_room_for_frames
def load_on(receiver: int | None, context: LoadContext, metadata: Metadata | None) -> dict[Any, Any]:
    """Load everything on one rank of the session, or on all.

    Args:
        receiver: The rank; None for all.
        context: This rank's surroundings.
        metadata: On the coordinator, what there is.

    Returns:
        The state_dict; an empty one on ranks that are not to have it.
    """
    session = context.session
    receives = receiver is None or session.rank == receiver

    def answer(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        assert metadata is not None
        table = metadata.table
        columns = zip(table.paths, table.kinds.tolist(), table.dtypes, table.layout_of.tolist(), strict=True)
        entries = [(path, kind, dtype.name, table.layouts[layout].shape) for path, kind, dtype, layout in columns]
        everything = encode(_ContentsAnswer(entries, [path for path, _ in metadata.value_records]))
        nothing, asked = encode(_ContentsAnswer([], [])), encode(_ReceiverRequest(True))
        return {rank: everything if data == asked else nothing for rank, data in messages.items()}

    _, contents = ask(session, "contents", lambda: (None, _ReceiverRequest(receives)), _ContentsAnswer, answer)

    def add(leaves: Leaves) -> None:
        for path, kind, dtype, shape in contents.entries:
            add_leaf(leaves, path, kind, shape, dtype_named(dtype), context.adapter.empty, plain_key(path))
        leaves.value_paths.extend(contents.values)
        leaves.values.extend([None] * len(contents.values))

    holder = NewLeaves(add)
    LeavesLoad(holder, context, 0, None if metadata is None else (lambda _: metadata)).run()
    tree: dict[Any, Any] = build_tree(holder.take())
    return tree
