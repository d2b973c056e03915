"""Exports: whole tensors of a checkpoint, or of a job's state_dict, in formats that others read."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from .arguments import as_integer, checked, refuse_unused, takes
from .core.dtypes import DTYPES
from .core.text import encodable
from .exporting.formats import FORMATS, ExportRequest
from .folder.selection import checked_keys
from .options import LoadOptions, SaveOptions
from .recipes import dtype_name
from .reports import ExportReport
from .state_exports import export_state_with
from .storage import local_path
from .wiring import checked_id, connected, enter_with, export_with, members, refuse

__all__ = ["export", "export_request", "export_state_dict"]

_NOT_USED = ("key_map", "cast", "resize")
_INSTEAD = (
    "tensors are written under the keys and in the shapes that are stored, or that recipes make (dtype=... converts "
    "them); a state_dict that was loaded with it can be written by export_state_dict"
)


@takes(LoadOptions)
def export(
    path: Any,
    out: str | os.PathLike[str],
    format: str = "safetensors",
    *,
    unique_id: int | None = None,
    prefix: str | None = None,
    keys: str | Collection[str] | None = None,
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
    process_group: Any = None,
    options: LoadOptions | None = None,
) -> ExportReport:
    """Write the whole tensors of a checkpoint in a format that others read.

    Values that the format has no place for are left out, and reported.

    The bytes are streamed, in memory of a few windows of 16 MiB, and one of 256 MiB where recipes transpose. In a job,
    all ranks of the group call it, and each writes some of the files. ``out`` appears whole or not at all. Needs Paddle
    only in a job of several ranks, and for an ``aoa_config``.

    Args:
        path: The checkpoint's folder: a str, a PathLike, or a :class:`Storage`.
        out: The folder to make, or the file; it must not exist, or be an empty folder. In a job, all ranks must see it.
        format: ``"safetensors"``: as Hugging Face lays it out, ``model.safetensors``, or several files with an index.
            ``"paddle"``: as Paddle's own ``dist.save_state_dict`` writes it, which its ``load_state_dict`` reads on any
            ranks. ``"pdparams"``: one file with the nested state_dict, values too, for ``paddle.load``; of
            :class:`PerRank` values a dict by rank. ``"native"``: a checkpoint of this library, with id 0.
        unique_id: Which checkpoint; None for the newest.
        prefix: Export what is below these whole parts of the path, joined by dots; names are without them. Of what is
            made by recipes, and ``keys`` too, the keys are meant for which it is made.
        keys: Flat keys, or patterns as fnmatch has them; with a prefix too, both must hold.
        dtype: Convert floating-point tensors to this type, such as ``"bfloat16"`` or ``paddle.bfloat16``; None leaves
            all bits as they are.
        max_shard_bytes: The most bytes of tensors in a file, if there are several. A larger tensor has its own.
        process_group: The Paddle group whose ranks export together; None for the default group.
        options: ``timeout``, ``progress_timeout``, ``no_dist``, ``progress`` and ``separate_folders`` are used;
            ``recipes`` and ``aoa_config``, which make all that they can and leave the other tensors as they are, as in
            :func:`load_merged_state_dict`, with ``strict`` and ``allow_missing`` for these. ``key_map``, ``cast`` and
            ``resize`` are refused.

    Returns:
        What was written.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint, or nothing in it matches.
        CheckpointCorruptedError: stored bytes are not what was written.
        CheckpointReplacedError: another save replaced the checkpoint meanwhile.
        StateDictMismatchError: recipes do not fit the checkpoint.
        UnsupportedValueError: the format cannot hold something; or, with ``dtype``, a finite value.
        TypeError, ValueError: an argument is invalid, or ``out`` is there already.
        RankFailureError, CheckpointTimeoutError: another rank failed or went silent.
        DurabilityUnknownError: ``out`` is there, but a crash of the machine might undo that.
        OSError: this process, alone, could not read or write.

    Whatever else is raised, there is no ``out``; or all of it, if the connection was lost at the very end, or the disk
    stopped answering then.

    Example:
        >>> export("checkpoints", "for_others", prefix="model", dtype="bfloat16")  # doctest: +SKIP
        >>> transposed = {"model.{layer}.weight": stored("model.{layer}.weight").T}  # doctest: +SKIP
        >>> export("checkpoints", "for_torch", options=LoadOptions(recipes=transposed))  # doctest: +SKIP
    """
    options, check = enter_with(options, LoadOptions)
    ranks = members(process_group, options)
    try:
        check()
        refuse_unused("export", options, _NOT_USED, _INSTEAD)
        request = export_request(out, format, unique_id, prefix, keys, dtype, max_shard_bytes)
    except Exception as error:
        refuse(ranks, options, error, "export")
    return export_with(ranks, path, request, options)


@takes(SaveOptions)
def export_state_dict(
    state_dict: dict[Any, Any],
    out: str | os.PathLike[str],
    format: str = "safetensors",
    process_group: Any = None,
    coordinator_rank: int = 0,
    *,
    prefix: str | None = None,
    keys: str | Collection[str] | None = None,
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
    options: SaveOptions | None = None,
) -> ExportReport:
    """Write the whole tensors of a state_dict that is spread over ranks in a format that others read.

    Every rank of the group calls it with its own state_dict. It is saved to a hidden folder beside ``out``, as
    :func:`save_state_dict` does it, and exported from there, so for a while it takes twice the room.

    Args:
        state_dict: See :func:`save_state_dict`.
        out: See :func:`export`, as for the arguments that are not explained here. All ranks must see it.
        format: See :func:`export`.
        process_group: The Paddle group whose ranks export together; None for the default group.
        coordinator_rank: Global rank of the one that plans; the same on every rank, or all raise at once.
        prefix: See :func:`export`.
        keys: See :func:`export`.
        dtype: See :func:`export`.
        max_shard_bytes: See :func:`export`.
        options: See :class:`SaveOptions`.

    Returns:
        What was written.

    Raises:
        What :func:`save_state_dict` and :func:`export` raise. Of ``out`` holds what holds of :func:`export`.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import export_state_dict
        >>> report = export_state_dict({"model": {"w": paddle.ones([2, 3])}}, "exported", prefix="model")
        >>> report.files, report.tensors
        (('model.safetensors',), 1)
    """
    options, check = enter_with(options, SaveOptions)
    ranks = connected(process_group, coordinator_rank, options)
    try:
        check()
        request = export_request(out, format, None, prefix, keys, dtype, max_shard_bytes)
    except Exception as error:
        refuse(ranks, options, error, "export_state_dict")
    return export_state_with(ranks, state_dict, request, options)


def export_request(
    out: str | os.PathLike[str],
    format: str = "safetensors",
    unique_id: int | None = None,
    prefix: str | None = None,
    keys: str | Collection[str] | None = None,
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
    stem: str = "model",
    of_torch: bool = True,
) -> ExportRequest:
    """What :func:`export` is asked for, checked; for ``stem`` and ``of_torch`` see :class:`ExportRequest`.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    if not isinstance(stem, str) or not stem or stem.startswith(".") or "/" in stem or "\0" in stem:
        raise ValueError(f"the names of files cannot begin with {stem!r}")
    checked("prefix", prefix, str)
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, not {format!r}")
    dtype, floats = dtype_name(dtype), [name for name, known in DTYPES.items() if known.category == "float"]
    if checked("dtype", dtype, str) is not None and dtype not in floats:
        raise ValueError(f"dtype must be None or a floating-point type ({', '.join(floats)}), not {dtype!r}")
    if (as_integer(max_shard_bytes) or 0) < 1:
        raise ValueError(f"max_shard_bytes must be an integer of bytes above 0, not {max_shard_bytes!r}")
    wanted = checked_keys(keys)
    place, number = local_path(out, "out"), checked_id(unique_id)
    if place != encodable(place):
        raise ValueError(f"out must be a path of text in UTF-8, which {place!r} is not, for other ranks are sent it")
    patterns = None if wanted is None else sorted(wanted)  # a set has another order in each process
    return ExportRequest(place, format, number, prefix, patterns, dtype, int(max_shard_bytes), stem, of_torch)
