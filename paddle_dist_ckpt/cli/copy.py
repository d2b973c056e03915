"""``copy``: copies a checkpoint to another folder."""

from __future__ import annotations

from typing import Annotated

import typer

from .arguments import CheckpointPath, Identifier, Json, alone_only
from .documents import print_json
from .output import count, human_bytes, say

__all__ = ["copy"]


def copy(
    path: CheckpointPath,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to copy to; it may hold other checkpoints.")],
    unique_id: Identifier = None,
    json: Json = False,
) -> None:
    """Copy a checkpoint to another folder, and verify it on the way.

    Every block is verified before it is written. The copy is seen when all of it is there and durable, and not before;
    what fails leaves no file behind. It keeps its number, which must be free in OUT.

    \b
    Example:
      paddle-dist-ckpt copy checkpoints /archive/run-7 --id 3
    """
    from ..folder_calls import copy_checkpoint
    from ..options import LoadOptions
    from ..storage import local_path

    alone_only("copy")
    found = copy_checkpoint(path, out, unique_id, options=LoadOptions(progress=False if json else None))
    size = sum(info.size for info in found.files)
    if json:
        print_json({"path": local_path(out), "unique_id": found.unique_id, "files": len(found.files), "bytes": size})
    else:
        say(f"copied checkpoint {found.unique_id} to {out}: {count(len(found.files), 'file')}, {human_bytes(size)}")
