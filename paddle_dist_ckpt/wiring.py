"""Puts the parts together for one save or load: the ranks that take part, the folder, the framework's tensors."""

from __future__ import annotations

import operator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .files.names import MOST_IDS
from .loading.context import LoadContext
from .loading.load import load
from .loading.staging import piece_bytes
from .options import LoadOptions, SaveOptions
from .reports import LoadReport, SaveReport
from .saving.async_save import AsyncSave
from .saving.context import SaveContext
from .saving.save import After, save, save_in_background
from .saving.save_memory import SaveMemory
from .storage import as_storage

if TYPE_CHECKING:  # paddle is imported only when it is used
    from .paddle_adapter import Ranks

__all__ = ["checked_id", "load_with", "save_with"]


def save_with(
    ranks: Ranks,
    state_dict: dict[Any, Any],
    path: Any,
    unique_id: int | None,
    in_background: bool,
    options: SaveOptions,
    after: After | None = None,
    replace_newest: bool = False,
) -> SaveReport | AsyncSave:
    """Save together with other ranks. See :func:`paddle_dist_ckpt.save_state_dict`.

    Args:
        ranks: Who takes part.
        state_dict: This rank's.
        path: The folder.
        unique_id: The checkpoint's number, or None.
        in_background: Whether to return when the snapshot is taken.
        options: How to save.
        after: What every rank does after the commit, in the same session.
        replace_newest: Without a number, replace the newest checkpoint, by the coordinator's listing.
    """
    from .paddle_adapter import PaddleAdapter

    kind = "save_state_dict(async_save=True)" if in_background else "save_state_dict"
    with ExitStack() as opened:
        session = opened.enter_context(ranks.hub.session(kind, options.timeout))
        unique_id = checked_id(unique_id)  # here, so that the other ranks hear of it
        if not isinstance(in_background, bool):
            raise TypeError(f"async_save must be a bool, not {in_background!r}")
        memory = ranks.memory.setdefault("save", SaveMemory())
        adapter = PaddleAdapter(ranks.rank)
        context = SaveContext(
            as_storage(path), session, ranks.transport, adapter, memory, replace_newest=replace_newest
        )
        if in_background:
            return save_in_background(state_dict, opened, context, unique_id, options, after)
        return save(state_dict, context, unique_id, options, after)


def load_with(
    ranks: Ranks,
    state_dict: dict[Any, Any],
    path: Any,
    unique_id: int | None,
    options: LoadOptions,
    offload: bool = False,
) -> LoadReport:
    """Load together with other ranks. See :func:`paddle_dist_ckpt.load_state_dict`."""
    from .paddle_adapter import PaddleAdapter

    with ranks.hub.session("load_state_dict", options.timeout) as session:
        adapter = PaddleAdapter(ranks.rank, piece_bytes=piece_bytes(options.staging_bytes))
        if not isinstance(offload, bool):  # here, so that the other ranks hear of it
            raise TypeError(f"offload must be a bool, not {offload!r}")
        transport = ranks.host_transport if offload else ranks.transport
        context = LoadContext(as_storage(path), session, transport, adapter, offload=offload)
        return load(state_dict, context, checked_id(unique_id), options)


def checked_id(unique_id: int | None) -> int | None:
    """Return a unique_id that may be one.

    Raises:
        ValueError: it may not.
    """
    if unique_id is None:
        return None
    try:
        number = None if isinstance(unique_id, bool) else operator.index(unique_id)
    except TypeError:
        number = None
    if number is None or not 0 <= number < MOST_IDS:
        raise ValueError(f"unique_id must be None or an integer from 0 to below 10**18, not {unique_id!r}")
    return number
