"""What can be done with the checkpoints of a folder by one process that needs no tensors, and no Paddle."""

from __future__ import annotations

from typing import Any

from .arguments import checked, takes
from .files.metadata import Metadata
from .folder.checkpoint import read_checkpoint
from .folder.copy import copy
from .folder.delete import delete
from .folder.nothing import listed_ids
from .folder.rebuild import rebuild
from .folder.verify import verify_checkpoint
from .options import LoadOptions
from .reports import VerifyReport
from .storage import as_source, as_storage
from .wiring import checked_id, folder_of, source_of

__all__ = [
    "copy_checkpoint",
    "delete_checkpoint",
    "list_checkpoints",
    "read_metadata",
    "rebuild_metadata",
    "verify",
]


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
        CheckpointCorruptedError: a file is missing, a block is not what was written, or a value in `.metadata` cannot
            be decoded. Nothing is left in ``out``.
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
    bound = options.progress_timeout
    with folder_of(as_storage, path, bound) as source, folder_of(as_storage, out, bound) as to:
        return copy(source, to, checked_id(unique_id), options.progress)
