"""``report``: writes the page of a checkpoint."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from ..files.metadata import Metadata
from ..files.names import metadata_id, parse_claim, parse_data_file
from ..folder.checkpoint import Restarts, read_checkpoint
from ..storage import LocalStorage, Storage, as_source, local_path
from .facts import facts_of
from .page import page_of

__all__ = ["report"]

_BEGINS, _OURS = b"<!doctype html>", b'<meta name="generator" content="paddle-dist-ckpt report">'
_MOST_BEFORE = 256  # bytes of a page, before it has said whose it is


def report(path: Any, out: str | os.PathLike[str], unique_id: int | None = None) -> Path:
    """Write a page for looking at a checkpoint: one HTML file that needs no other and no network.

    Only the checkpoint's metadata are read, and the sizes of its files.

    Args:
        path: The checkpoint's folder, or its only file (str, PathLike or Storage).
        out: The file to write; a page of this function's that is there is replaced when the new one is whole.
        unique_id: The checkpoint's number; the newest if it is None.

    Returns:
        Where the page is.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointCorruptedError: its metadata are damaged.
        CheckpointReplacedError: it kept being replaced meanwhile.
        FileExistsError: ``out`` is there, and no such page; an empty file may be.
        ValueError: it has the name of a checkpoint's file, whether that is there or not.
        OSError: the file cannot be written.
    """
    storage = as_source(path)
    metadata, sizes = _metadata_and_sizes(storage, unique_id)
    page = page_of(facts_of(metadata, storage.location, sizes))
    local_path(out, "out")
    target = Path(os.path.expanduser(out))  # as it is shown: not made absolute
    replace = _is_replaceable(target)
    temporary = f".{target.name}.{secrets.token_hex(8)}.tmp"
    try:
        published = LocalStorage(target.parent).publish(target.name, page.encode(), temporary, replace)
    except OSError as error:
        error.filename = str(target)  # which is what was asked for, and not the name on the way
        raise
    if not published:
        raise FileExistsError(f"{target} appeared meanwhile; give the page another name")
    return target


def _metadata_and_sizes(storage: Storage, unique_id: int | None) -> tuple[Metadata, list[int | str]]:
    """What a checkpoint says of itself, and how large its files are: of one and the same save."""
    restarts = Restarts(storage)
    while True:
        metadata = read_checkpoint(storage, unique_id)
        sizes = [_size(storage, info.name) for info in metadata.files]
        if sizes == [info.size for info in metadata.files] or not restarts.due(metadata):
            return metadata, sizes


def _is_replaceable(target: Path) -> bool:
    """Whether a page is there to be replaced, rather than nothing; refuse to put one in the place of anything else."""
    if any(parse(target.name) is not None for parse in (metadata_id, parse_data_file, parse_claim)):
        # Even where there is none: it would be taken for a damaged checkpoint.
        raise ValueError(f"{target} is the name of a file of a checkpoint's; give the page another name")
    if not (target.is_symlink() or target.exists()):
        return False
    if target.is_symlink() or not target.is_file():
        what = "no regular file"
    elif not _is_page(target):  # but a checkpoint of another format, say
        what = "no page of a checkpoint"
    else:
        return True
    raise FileExistsError(f"{target} is there, and {what}; give the page another name")


def _is_page(target: Path) -> bool:
    """Whether a file is a page that was made here, or empty."""
    with target.open("rb") as file:
        start = file.read(_MOST_BEFORE)
    return not start or (start.startswith(_BEGINS) and _OURS in start)


def _size(storage: Storage, name: str) -> int | str:
    """How large a file is, or why that is not known."""
    try:
        return storage.size(name)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return error.strerror or type(error).__name__
