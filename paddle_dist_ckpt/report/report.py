"""``report``: writes the page of a checkpoint."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from ..folder.checkpoint import read_checkpoint
from ..storage import LocalStorage, Storage, as_source, local_path
from .facts import facts_of
from .page import page_of

__all__ = ["report"]


def report(path: Any, out: str | os.PathLike[str], unique_id: int | None = None) -> Path:
    """Write a page for looking at a checkpoint: one HTML file that needs no other and no network.

    Only the checkpoint's metadata are read, and the sizes of its files.

    Args:
        path: The checkpoint's folder, or its only file (str, PathLike or Storage).
        out: The file to write; one that is there is replaced when the page is whole.
        unique_id: The checkpoint's number; the newest if it is None.

    Returns:
        Where the page is.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointCorruptedError: its metadata are damaged.
        OSError: the file cannot be written.
    """
    storage = as_source(path)
    metadata = read_checkpoint(storage, unique_id)
    sizes = [_size(storage, info.name) for info in metadata.files]
    page = page_of(facts_of(metadata, storage.location, sizes))
    target = Path(out).expanduser()
    local_path(target, "out")
    temporary = f".{target.name}.{secrets.token_hex(8)}.tmp"
    LocalStorage(target.parent).publish(target.name, page.encode(), temporary, replace=True)
    return target


def _size(storage: Storage, name: str) -> int | str:
    """How large a file is, or why that is not known."""
    try:
        return storage.size(name)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return error.strerror or type(error).__name__
