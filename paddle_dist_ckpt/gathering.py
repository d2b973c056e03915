"""The state that ranks have at the moment, whole on one of them or on all, and back; without files.

The options are those of torch's ``get_state_dict`` and ``set_state_dict`` (``torch.distributed.checkpoint.state_dict``)
with ``full_state_dict``.
"""

from __future__ import annotations

from typing import Any

from .options import LoadOptions, SaveOptions, checked
from .reports import LoadReport
from .wiring import connected, gather_with, scatter_with

__all__ = ["gather_state_dict", "scatter_state_dict"]


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
    64 MiB, so ranks that get nothing need no more memory than that.

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
        RankFailureError, CheckpointTimeoutError: another rank failed, or did not come, or fell silent.
        CheckpointError: a rank has no memory for it.
        TypeError, ValueError: an argument is not what it should be, or ranks passed different ones.

    Example:
        >>> whole = gather_state_dict({"model": model}, rank=0, offload=True)  # doctest: +SKIP
    """
    options = checked("options", options, SaveOptions) or SaveOptions()
    ranks = connected(process_group, 0, options)
    return gather_with(ranks, state_dict, rank, frozen, offload, options)


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
            from elsewhere. With ``rank``, that of this rank alone counts.
        state_dict: What to fill, such as ``{"model": model, "optimizer": optimizer}``; may ask for a part of ``whole``.
        rank: Global rank of the one that has it; None if all have. The same on every rank.
        process_group: The Paddle group whose ranks call; None for the default group.
        frozen: Whether parameters that are not trained (``stop_gradient``), and what an optimizer has for them, are
            filled; with False they are left as they are, and need not be in ``whole``. The same on every rank.
        options: See :class:`LoadOptions`; ``exchange`` is not used.

    Returns:
        What was filled, in bytes and seconds.

    Raises:
        StateDictMismatchError: keys, shapes or dtypes do not fit; lists every problem. Nothing was touched.
        UnsupportedValueError: ``whole`` holds what cannot be passed on; see :func:`save_state_dict`.
        RankFailureError, CheckpointTimeoutError: another rank failed, or did not come, or fell silent. The message says
            whether targets were touched.
        TypeError, ValueError: an argument is not what it should be, or ranks passed different ones.

    Example:
        >>> scatter_state_dict(whole, {"model": model}, rank=0)  # doctest: +SKIP
    """
    options = checked("options", options, LoadOptions) or LoadOptions()
    ranks = connected(process_group, 0, options)
    return scatter_with(ranks, whole, state_dict, rank, frozen, options)
