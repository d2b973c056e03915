"""Saves and loads of state_dicts: what users call. What is done is in saving and loading; see :mod:`.wiring`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, overload

from .arguments import checked, refuse_unused, takes
from .folder.selection import Selection, checked_keys
from .options import LoadOptions, SaveOptions
from .reports import LoadReport, SaveReport
from .saving.async_save import AsyncSave
from .wiring import checked_id, connected, enter_with, load_whole, load_with, naming_folder, paddles, save_with

__all__ = ["load_merged_state_dict", "load_state_dict", "save_state_dict"]

_MERGED = (
    "tensors are returned under the keys, of the types and in the shapes that are stored, or that recipes and an "
    "aoa_config make; load_state_dict fills others"
)


@overload
def save_state_dict(
    state_dict: dict[Any, Any],
    path: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    async_save: Literal[False] = False,
    *,
    options: SaveOptions | None = None,
) -> SaveReport: ...


@overload
def save_state_dict(
    state_dict: dict[Any, Any],
    path: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    *,
    async_save: Literal[True],
    options: SaveOptions | None = None,
) -> AsyncSave: ...


@overload
def save_state_dict(
    state_dict: dict[Any, Any],
    path: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    async_save: bool = False,
    *,
    options: SaveOptions | None = None,
) -> SaveReport | AsyncSave: ...


@takes(SaveOptions)
def save_state_dict(
    state_dict: dict[Any, Any],
    path: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    async_save: bool = False,
    *,
    options: SaveOptions | None = None,
) -> SaveReport | AsyncSave:
    """Save a state_dict whose tensors are spread over ranks, together with the other ranks of the group.

    Every rank of the group calls it with its own state_dict. Every byte of every global tensor is written exactly once;
    the checkpoint appears in the folder atomically, complete or not at all.

    Args:
        state_dict: Dicts with str or int keys, lists and tuples, nested as you like, of: paddle Tensors (plain ones,
            which are taken for replicas, and DistTensors), ShardedWeights and numpy arrays; values, which are None,
            bool, int, float, complex, str, bytes, numpy scalars, and lists, tuples and dicts of these, meant to be
            equal on all ranks (see ``SaveOptions.check_replicas``); :class:`PerRank` for a value of which each rank has
            its own; and objects with ``state_dict()`` and ``set_state_dict()`` or ``load_state_dict()``, such as a
            layer, an optimizer, a scheduler, a DistModel.
        path: The folder: a str, a PathLike, or a :class:`Storage`.
        process_group: The Paddle group whose ranks save together; None for the default group.
        coordinator_rank: Global rank of the coordinator, which plans and commits; must be the same on every rank.
        unique_id: The checkpoint's number in the folder. None takes the newest number + 1. An existing one is replaced
            atomically.
        async_save: Return as soon as the data to be written has been copied. Writing and the commit continue in the
            background, without collectives; the process does not exit before they are done.
        options: See :class:`SaveOptions`.

    Returns:
        What was saved, in bytes and seconds; with ``async_save`` a handle whose ``result()`` returns that report, or
        raises what went wrong.

    Raises:
        UnsupportedValueError: the state_dict holds something that cannot be stored, or the ranks' parts do not make up
            whole tensors. Nothing was written.
        RankFailureError: a rank failed. The folder's checkpoints are as before; or, if the connection was lost at the
            very end, the new one may be committed: :func:`list_checkpoints` tells.
        DurabilityUnknownError: the checkpoint is committed, but a crash of the machine might undo that.
        CheckpointTimeoutError: a rank did not join the call, or went silent.
        TypeError, ValueError: an argument is invalid.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import save_state_dict
        >>> model = paddle.nn.Linear(4, 2)
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> report = save_state_dict({"model": model, "optimizer": optimizer, "step": 100}, "checkpoint")
        >>> report.unique_id
        0
    """
    options, check = enter_with(options, SaveOptions)
    with naming_folder(path):
        ranks = connected(process_group, coordinator_rank, options)
    find = paddles(ranks, state_dict, check=check)
    return save_with(ranks, find, path, unique_id, async_save, options)


@takes(LoadOptions)
def load_state_dict(
    state_dict: dict[Any, Any],
    path: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    offload: bool = False,
    *,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Fill a state_dict in place from a checkpoint, whatever layout it was saved with.

    Every rank of the group calls it with its own state_dict, and reads only what it needs. Tensors and numpy arrays are
    filled in place, and so are the tensors of layers, optimizers and DistModels; other objects get their stored state
    through ``set_state_dict()`` or ``load_state_dict()``. None takes the whole stored value, or a subtree of values;
    any other value is replaced by the stored one, and a :class:`PerRank` by what the rank of the same number has saved.
    An empty dict gets the values that are stored there, if there are values alone.

    Args:
        state_dict: What to fill: all that :func:`save_state_dict` takes. It may ask for only a part of the checkpoint.
        path: The folder: a str, a PathLike, or a :class:`Storage`.
        process_group: The Paddle group whose ranks load together; None for the default group.
        coordinator_rank: Global rank of the coordinator, which reads `.metadata`; must be the same on every rank.
        unique_id: Which checkpoint; None for the newest.
        offload: Exchange data between ranks in host memory even if the group's collectives run on a device: through a
            gloo group of the same ranks, the job's own or one created for this. Targets stay where they are.
        options: See :class:`LoadOptions`.

    Returns:
        What was loaded, in bytes and seconds.

    Raises:
        StateDictMismatchError: keys, shapes or dtypes do not fit; lists every problem. Nothing was touched.
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointCorruptedError, RankFailureError: stored bytes are not what was written, or cannot be read. The
            message says whether targets were touched.
        CheckpointReplacedError: other saves replaced the checkpoint four times meanwhile. Nothing was touched, or the
            message says so.
        CheckpointTimeoutError: a rank did not join the call, or went silent.
        TypeError, ValueError: an argument is invalid.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import load_state_dict, save_state_dict
        >>> saved = save_state_dict({"model": paddle.nn.Linear(4, 2), "step": 100}, "checkpoint")
        >>> state = {"model": paddle.nn.Linear(4, 2), "step": None}
        >>> report = load_state_dict(state, "checkpoint")  # fills the layer's own tensors
        >>> state["step"], report.unused_keys
        (100, ())
    """
    options, check = enter_with(options, LoadOptions)
    with naming_folder(path):
        ranks = connected(process_group, coordinator_rank, options)
    find = paddles(ranks, state_dict, options.staging_bytes, check)
    return load_with(ranks, find, path, unique_id, options, offload)


@takes(LoadOptions)
def load_merged_state_dict(
    path: Any,
    prefix: str | None = None,
    unique_id: int | None = None,
    offload: bool = False,
    *,
    keys: str | Collection[str] | None = None,
    flat: bool = False,
    options: LoadOptions | None = None,
) -> dict[Any, Any]:
    """Load whole tensors into this process alone. Needs no process group, and no other rank.

    Args:
        path: The folder: a str, a PathLike, or a :class:`Storage`.
        prefix: Load only what is below this path (whole parts joined by dots), which is left out of the result's keys.
        unique_id: Which checkpoint; None for the newest.
        offload: Put the tensors in host memory even if Paddle's current device is another.
        keys: Flat keys, or patterns as in fnmatch; if there is a prefix too, both must match.
        flat: Return flat keys instead of the nesting that was saved.
        options: See :class:`LoadOptions`. ``key_map``, ``cast`` and ``resize``, which are about what is filled, are
            refused.

    Returns:
        The state_dict: paddle Tensors, numpy arrays, values.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint, or nothing in it matches.
        CheckpointCorruptedError: stored bytes are not what was written.
        StateDictMismatchError: recipes do not fit the checkpoint, or it has only a part of a tensor.
        ValueError: statements of an aoa_config cannot be carried out; or an option would have no effect.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import load_merged_state_dict, save_state_dict
        >>> report = save_state_dict({"model": paddle.nn.Linear(4, 2), "step": 100}, "checkpoint")
        >>> sorted(load_merged_state_dict("checkpoint", flat=True))
        ['model.bias', 'model.weight', 'step']
        >>> list(load_merged_state_dict("checkpoint", prefix="model")["weight"].shape)
        [4, 2]
    """
    options = checked("options", options, LoadOptions) or LoadOptions()
    refuse_unused("load_merged_state_dict", options, ("key_map", "cast", "resize"), _MERGED)
    unique_id = checked_id(unique_id)
    checked("prefix", prefix, str)
    return load_whole(
        path, unique_id, Selection(prefix, checked_keys(keys)), flat, options, place="cpu" if offload else None
    )
