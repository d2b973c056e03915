"""``delete``: removes a checkpoint from its folder."""

from __future__ import annotations

from typing import Annotated

import typer

from .arguments import CheckpointPath, Json, Yes, alone_only, confirm
from .documents import print_json
from .output import count, human_bytes, say

__all__ = ["delete"]


def delete(
    path: CheckpointPath,
    unique_id: Annotated[int, typer.Argument(metavar="ID", min=0, help="Which checkpoint, as inspect shows it.")],
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove a checkpoint from its folder, after asking.

    Its .metadata goes first, for good; then its data files, but for those that another checkpoint of the folder refers
    to. If the process is killed on the way, a later save to the folder removes what is left, from five minutes after
    that on. Nothing is removed while somebody is saving to the folder, or if another save has taken the number since
    the question was asked.

    \b
    Example:
      paddle-dist-ckpt delete checkpoints 3 --yes
    """
    from ..folder.delete import check_native, delete_with_files
    from ..folder_calls import read_metadata
    from ..storage import as_storage

    alone_only("delete")
    metadata = read_metadata(path, unique_id)
    check_native(metadata, path)
    size = sum(info.size for info in metadata.files)
    what = f"checkpoint {unique_id} of {metadata.created} in {path}"
    confirm(f"Delete {what}, {count(len(metadata.files), 'file')}, {human_bytes(size)}?", yes)
    storage = as_storage(path)
    here = set(storage.names())  # others are in folders of other hosts
    found, finished = delete_with_files(storage, unique_id, metadata.save_id)
    removed = [info for info in found.files if info.name in here]
    size = sum(info.size for info in removed)
    if json:
        freed = size if finished else 0
        facts = {"unique_id": unique_id, "files": len(removed), "bytes": freed, "unfinished": not finished}
        print_json({"path": storage.location, **facts})
    elif finished:
        say(f"deleted {what}, {human_bytes(size)}")
    if not finished:
        say(f"deleted {what}, but data files could not be removed; they are left to a later save", err=True)
        raise typer.Exit(1)
