"""Loading all of a checkpoint, together with other ranks, whole into the memory of one of them or of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..control.rounds import ask
from ..core.dtypes import dtype_named
from ..core.messages import encode, prepare
from ..core.shards import Kind
from ..files.metadata import Metadata
from ..tree.building import build_tree
from ..tree.paths import plain_key
from ..tree.state_dict import Leaves
from .load import LeavesLoad
from .merged import add_leaf
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
    leaves = Leaves(value_paths=list(contents.values), values=[None] * len(contents.values))

    def scan() -> Leaves:
        for path, kind, dtype, shape in contents.entries:
            add_leaf(leaves, path, Kind(kind), shape, dtype_named(dtype), context.adapter.empty, plain_key(path))
        return leaves

    values: dict[str, Any] = {}
    read: Callable[[int | None], Metadata] | None = None if metadata is None else (lambda _: metadata)
    LeavesLoad(scan, lambda found, _: values.update(found), context, 0, read=read).run()
    values.update(zip(leaves.tensor_paths, leaves.tensors, strict=True))
    tree: dict[Any, Any] = build_tree(values.items())
    return tree
