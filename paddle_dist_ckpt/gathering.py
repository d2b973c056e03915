"""The state that ranks have at the moment, whole on one of them or on all, and back; without files.

The options are those of torch's ``get_state_dict`` and ``set_state_dict`` (``torch.distributed.checkpoint.state_dict``)
with ``full_state_dict``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from .arguments import as_integer, takes
from .control.rounds import check_same
from .core.protocols import ControlSession
from .loading.collecting import collect, keys_of_own
from .loading.load import load
from .loading.reading import LoadContext
from .loading.staging import piece_bytes
from .loading.whole import load_on
from .options import LoadOptions, SaveOptions
from .reports import LoadReport
from .saving.present import Filled, present
from .tree.building import build_tree
from .tree.own_values import with_own
from .tree.state_dict import Leaves, flatten
from .wiring import arranger_of, check_bool, connected, enter_with

__all__ = ["gather_state_dict", "scatter_state_dict"]


@takes(SaveOptions)
def gather_state_dict(
    state_dict: dict[Any, Any],
    rank: int | None = None,
    process_group: Any = None,
    *,
    frozen: bool = True,
    offload: bool = False,
    options: SaveOptions | None = None,
) -> dict[Any, Any]:
    """The whole tensors of a state_dict that is spread over ranks, on one of them or on all.

    Every rank of the group calls it with its own state_dict. What comes back is what ``load_merged_state_dict`` would
    return after ``save_state_dict``, but nothing is written: ranks send each other what they lack, in rounds of some
    64 MiB, so ranks that get nothing need memory for two rounds (128 MiB), whatever the size of the whole.

    Args:
        state_dict: What :func:`save_state_dict` takes: tensors, arrays, values and objects, such as
            ``{"model": model, "optimizer": optimizer}``.
        rank: Global rank of the one that gets it; None for all. The same on every rank.
        process_group: The Paddle group whose ranks call; None for the default group.
        frozen: Whether parameters that are not trained (``stop_gradient``) are in it, with what an optimizer has for
            them. The same on every rank.
        offload: Put the tensors in host memory even if Paddle's current device is another.
        options: ``timeout``, ``no_dist``, ``check_replicas`` and ``progress`` are used.

    Returns:
        New tensors, numpy arrays and values, nested as in ``state_dict``, and an optimizer's entries under the names of
        its parameters (``fc.weight.moment1``); empty on ranks that are not to get it.

    Raises:
        UnsupportedValueError: see :func:`save_state_dict`.
        RankFailureError, CheckpointTimeoutError: another rank failed, did not join, or went silent.
        CheckpointError: a rank has no memory for it.
        TypeError, ValueError: an argument is invalid, or ranks passed different ones.

    Example:
        >>> whole = gather_state_dict({"model": model}, rank=0, offload=True)  # doctest: +SKIP
    """
    from .paddle_adapter import PaddleAdapter
    from .paddle_adapter.frozen import without_frozen

    options, check = enter_with(options, SaveOptions)
    ranks = connected(process_group, 0, options)
    reading = LoadOptions(timeout=options.timeout, exchange="always", progress=options.progress, separate_folders=True)
    with ranks.session("gather_state_dict", options.timeout) as made, made as session:
        check()
        check_bool("offload", offload)
        receiver = _agree(session, rank, frozen)
        adapter = PaddleAdapter(ranks.rank)

        def find() -> dict[Any, Any]:
            if frozen:
                return state_dict
            leaves = without_frozen(flatten(state_dict, adapter))
            found = zip((*leaves.tensor_paths, *leaves.value_paths), (*leaves.tensors, *leaves.values), strict=True)
            tree: dict[Any, Any] = build_tree(found)
            return tree

        shown = present(find, session, ranks.transport, adapter, options.check_replicas)
        into = PaddleAdapter(ranks.rank, piece_bytes(reading.staging_bytes), "cpu" if offload else None)
        context = LoadContext(shown.storage, session, ranks.transport, into, reading)
        return load_on(receiver, context, shown.metadata)


@takes(LoadOptions)
def scatter_state_dict(
    whole: dict[Any, Any] | None,
    state_dict: dict[Any, Any],
    rank: int | None = None,
    process_group: Any = None,
    *,
    frozen: bool = True,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Fill a state_dict that is spread over ranks from whole tensors that one of them has, or all.

    Every rank of the group calls it with its own state_dict, which is filled in place as by :func:`load_state_dict`:
    each rank gets its part of what is distributed, and objects are given their states. Everything is checked before
    anything is touched.

    Args:
        whole: What :func:`gather_state_dict` or ``load_merged_state_dict`` returned, or a state_dict of whole tensors
            from elsewhere. With ``rank``, that of this rank alone counts. It may share memory with what is filled: what
            would be overwritten is copied first. For a :class:`PerRank` it has a dict by rank.
        state_dict: What to fill, such as ``{"model": model, "optimizer": optimizer}``; may ask for a part of ``whole``.
        rank: Global rank of the one that has it; None if all have. The same on every rank.
        process_group: The Paddle group whose ranks call; None for the default group.
        frozen: Whether parameters that are not trained (``stop_gradient``), and what an optimizer has for them, are
            filled; with False they are left as they are, whether ``whole`` has them or not. The same on every rank.
        options: See :class:`LoadOptions`; ``exchange`` is not used.

    Returns:
        What was filled, in bytes and seconds.

    Raises:
        StateDictMismatchError: keys, shapes or dtypes do not fit; lists every problem. Nothing was touched.
        UnsupportedValueError: ``whole`` holds what cannot be passed on; see :func:`save_state_dict`.
        RankFailureError, CheckpointTimeoutError: another rank failed, did not join, or went silent. The message says
            whether targets were touched.
        TypeError, ValueError: an argument is invalid, or ranks passed different ones.

    Example:
        >>> scatter_state_dict(whole, {"model": model}, rank=0)  # doctest: +SKIP
    """
    from .paddle_adapter import PaddleAdapter
    from .paddle_adapter.frozen import without_frozen

    options, check = enter_with(options, LoadOptions)
    ranks = connected(process_group, 0, options)
    reading = dataclasses.replace(options, exchange="always", separate_folders=True)
    with ranks.session("scatter_state_dict", options.timeout) as made, made as session:
        check()
        sender = _agree(session, rank, frozen)
        adapter = PaddleAdapter(ranks.rank, piece_bytes(options.staging_bytes))

        @functools.cache
        def wanted() -> Leaves:
            leaves = flatten(state_dict, adapter)
            return leaves if frozen else without_frozen(leaves)

        def own() -> list[str]:
            return keys_of_own(wanted(), options.key_map)  # on all ranks, which may make accumulators together

        own_of_all = _together(session, own)  # who has the values need not have one there itself

        def find() -> dict[Any, Any]:
            if sender is not None and session.rank != sender:
                return {}
            if not isinstance(whole, dict):
                raise TypeError(f"whole must be a dict, not {type(whole).__name__}")
            return with_own(whole, own_of_all, session.ranks, options.per_rank)

        renamed = options.key_map is not None or bool(options.recipes) or options.aoa_config is not None
        filled = Filled(lambda: collect(wanted(), adapter, LoadOptions())[0].tensors, renamed)
        shown = present(find, session, ranks.transport, PaddleAdapter(ranks.rank), "auto", filled)
        arranger = arranger_of(options, others=len(session.ranks) > 1)
        context = LoadContext(shown.storage, session, ranks.transport, adapter, reading, arranger=arranger)
        metadata = shown.metadata
        return load(state_dict, context, 0, wanted, None if metadata is None else (lambda _: metadata), thaws=frozen)


def _together(session: ControlSession, keys: Callable[[], list[str]]) -> list[str]:
    """Round ``own``: these keys of all ranks."""

    def merge(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        found = dict.fromkeys(key for _, message in sorted(messages.items()) for key in json.loads(message))
        return dict.fromkeys(messages, json.dumps([*found]).encode())

    merged: list[str] = json.loads(session.gather_scatter("own", lambda: json.dumps(keys()).encode(), merge))
    return merged


def _agree(session: ControlSession, rank: Any, frozen: bool) -> int | None:
    """Round ``arguments``: every rank of the session has passed the same ones.

    Returns:
        The rank, as Python's int.

    Raises:
        TypeError, ValueError: they are not what they should be, or differ; on every rank.
    """

    def own() -> bytes:
        check_bool("frozen", frozen)
        if rank is not None and as_integer(rank) not in session.ranks:
            raise ValueError(f"rank must be None or one of the ranks {list(session.ranks)}, not {rank!r}")
        return f"{as_integer(rank)} {frozen}".encode()

    def compare(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        passed = {rank: tuple(message.decode().split()) for rank, message in messages.items()}
        check_same(["rank", "frozen"], passed, session.coordinator, shown=str)
        return dict.fromkeys(messages, b"")

    session.gather_scatter("arguments", own, compare)
    return as_integer(rank)
