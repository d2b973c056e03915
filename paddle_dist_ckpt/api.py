"""The entry points. They check arguments and wire the parts together; what is done is in saving and loading."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, Literal, overload

from .files.metadata import Metadata
from .folder.checkpoint import read_checkpoint
from .folder.copy import copy
from .folder.delete import delete
from .folder.nothing import listed_ids
from .folder.rebuild import rebuild
from .folder.selection import Selection, checked_keys
from .folder.verify import verify_checkpoint
from .options import LoadOptions, SaveOptions, checked, refuse_unused, takes
from .reports import LoadReport, SaveReport, VerifyReport
from .saving.async_save import AsyncSave
from .storage import as_source, as_storage, bounded
from .wiring import checked_id, connected, enter_with, folder_of, load_whole, load_with, paddles, save_with, source_of

__all__ = [
    "copy_checkpoint",
    "delete_checkpoint",
    "list_checkpoints",
    "load_merged_state_dict",
    "load_state_dict",
    "read_metadata",
    "rebuild_metadata",
    "save_state_dict",
    "verify",
]

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
    ranks = connected(process_group, coordinator_rank, options)
    find = paddles(ranks, state_dict, check=check, of_any_mode=True)
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


def read_metadata(path: Any, unique_id: int | None = None, *, progress_timeout: float | None = None) -> Metadata:
    """What a checkpoint holds and where. Reads the `.metadata` file alone, and does not need paddle.

    Args:
        path: The folder: a str, a PathLike, or a :class:`Storage`.
        unique_id: Which checkpoint; None for the newest.
        progress_timeout: How long, in seconds, a single file operation may take; see :class:`SaveOptions`.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointCorruptedError: the file is damaged.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import read_metadata, save_state_dict
        >>> report = save_state_dict({"w": paddle.ones([2, 3]), "step": 7}, "checkpoint")
        >>> metadata = read_metadata("checkpoint")
        >>> [shard.local_shape for shard in metadata.state_dict_metadata["w"]]
        [(2, 3)]
    """
    with folder_of(as_source, path, progress_timeout) as storage:
        return read_checkpoint(storage, checked_id(unique_id))


def rebuild_metadata(path: Any, save: str | None = None, *, progress_timeout: float | None = None) -> Metadata:
    """Recreate a lost `.metadata` from the data files, after checking every byte of them.

    Args:
        path: The folder: a str, a PathLike, or a :class:`Storage`.
        save: The random id of the save (the second part of its files' names), needed if several are complete.
        progress_timeout: How long, in seconds, a single file operation may take; see :class:`SaveOptions`.

    Returns:
        What was recovered, which is now committed under its old id, or under a new one if that is taken.

    Raises:
        CheckpointNotFoundError: no save without a `.metadata` has all its files; says what is missing.
        CheckpointCorruptedError: a block of data is damaged. (A file with a damaged header counts as missing.)
        CheckpointError: several saves qualify, and ``save`` does not name one.

    Examples:
        >>> import os, paddle
        >>> from paddle_dist_ckpt import rebuild_metadata, save_state_dict, verify
        >>> report = save_state_dict({"w": paddle.ones([2, 3])}, "checkpoint", unique_id=0)
        >>> os.remove("checkpoint/0.metadata")
        >>> rebuild_metadata("checkpoint").unique_id
        0
        >>> verify("checkpoint").ok
        True
    """
    with folder_of(as_storage, path, progress_timeout) as storage:
        return rebuild(storage, checked("save", save, str), progress=False)


def list_checkpoints(path: Any, *, progress_timeout: float | None = None) -> list[int]:
    """The ids of the committed checkpoints in a folder, ascending.

    If there is no checkpoint of this library's own format, those of other formats are listed. A checkpoint whose format
    has no numbers has the id 0. Of a :class:`CheckpointManager`'s root, whose checkpoints are in the folders of its
    steps, nothing is listed, and a warning in the log names the steps.

    Args:
        path: The folder: a str, a PathLike, or a :class:`Storage`.
        progress_timeout: How long, in seconds, a single file operation may take; see :class:`SaveOptions`.

    Raises:
        CheckpointNotFoundError: ``path`` leads through a file, as if it were a folder.
        OSError: the folder cannot be listed; a folder that is not there, and a file, have none.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import list_checkpoints, save_state_dict
        >>> for step in (0, 1):
        ...     report = save_state_dict({"w": paddle.ones([2, 3])}, "checkpoint")
        >>> list_checkpoints("checkpoint")
        [0, 1]
    """
    with folder_of(as_source, path, progress_timeout) as storage:
        return listed_ids(storage)


@takes(LoadOptions)
def verify(path: Any, unique_id: int | None = None, *, options: LoadOptions | None = None) -> VerifyReport:
    """Check every byte of a checkpoint against the checksums taken when it was written. Does not need paddle.

    Values are decoded just as a load decodes them. If the checkpoint is replaced meanwhile, the check starts over.

    Args:
        path: The folder: a str, a PathLike, or a :class:`Storage`.
        unique_id: Which checkpoint; None for the newest.
        options: ``progress`` and ``progress_timeout`` are used.

    Returns:
        Whether all is well, and otherwise every problem.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointCorruptedError: its `.metadata` is damaged, so that nothing can be said about the rest.
        CheckpointReplacedError: other saves replaced it four times meanwhile.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import save_state_dict, verify
        >>> report = save_state_dict({"w": paddle.ones([2, 3])}, "checkpoint")
        >>> found = verify("checkpoint")
        >>> found.ok, found.problems
        (True, ())
    """
    unique_id = checked_id(unique_id)
    options = checked("options", options, LoadOptions) or LoadOptions()
    with source_of(path, options) as storage:
        return verify_checkpoint(storage, unique_id, options.progress)


def delete_checkpoint(path: Any, unique_id: int, *, progress_timeout: float | None = None) -> Metadata:
    """Remove a committed checkpoint from its folder. Does not need paddle.

    Its `.metadata` goes first, for good; then the data files that no other checkpoint of the folder refers to. If this
    process dies on the way, or a file cannot be removed (a warning says so), a later save to the folder removes what is
    left. Files in the folders of other hosts are left there, and a warning says so as well.

    Args:
        path: The folder: a str, a PathLike, or a :class:`Storage`.
        unique_id: Which checkpoint.
        progress_timeout: How long, in seconds, a single file operation may take; see :class:`SaveOptions`.

    Returns:
        What the checkpoint held.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointError: somebody is saving to the folder; or a checkpoint there cannot be read, so that it is not known
            which files it needs. Nothing was removed.
        DurabilityUnknownError: the checkpoint is gone, but a crash of the machine might bring it back, so that its data
            files are still there.
        CheckpointTimeoutError: the disk hangs. Whether the checkpoint is still there, :func:`list_checkpoints` tells.
        ValueError: the checkpoint is of another format.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import delete_checkpoint, list_checkpoints, save_state_dict
        >>> report = save_state_dict({"w": paddle.ones([2, 3])}, "checkpoint", unique_id=3)
        >>> delete_checkpoint("checkpoint", 3).unique_id
        3
        >>> list_checkpoints("checkpoint")
        []
    """
    number = checked_id(unique_id)
    if number is None:
        raise ValueError("unique_id must name the checkpoint that is to be removed, not be None")
    with folder_of(as_storage, path, progress_timeout) as storage:
        return delete(storage, number)


@takes(LoadOptions)
def copy_checkpoint(
    path: Any, out: Any, unique_id: int | None = None, *, options: LoadOptions | None = None
) -> Metadata:
    """Copy a committed checkpoint to another folder. Does not need paddle.

    Every block is verified before it is written. Data files go first; the `.metadata`, by which the checkpoint becomes
    visible, is last, when they are durable. It keeps its number. Between local folders, holes in data files stay holes.

    Args:
        path: The folder: a str, a PathLike, or a :class:`Storage`.
        out: The folder to copy to, likewise; it is made if it is not there, and may hold other checkpoints.
        unique_id: Which checkpoint; None for the newest.
        options: ``progress`` and ``progress_timeout`` are used.

    Returns:
        What the checkpoint holds.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointCorruptedError: a file is missing, or a block is not what was written. Nothing is left in ``out``.
        CheckpointError: there is not enough room in ``out``, or somebody else is removing or copying these files there.
        ValueError: ``out`` has a checkpoint of that number, or this one already; or it is of another format.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import copy_checkpoint, list_checkpoints, save_state_dict
        >>> report = save_state_dict({"w": paddle.ones([2, 3])}, "checkpoint", unique_id=3)
        >>> copied = copy_checkpoint("checkpoint", "kept")
        >>> list_checkpoints("kept")
        [3]
    """
    options = checked("options", options, LoadOptions) or LoadOptions()
    bound, find_out = options.progress_timeout, functools.partial(as_storage, out)
    with bounded(functools.partial(as_storage, path), path, bound, 0) as source, bounded(find_out, out, bound, 0) as to:
        return copy(source, to, checked_id(unique_id), options.progress)
