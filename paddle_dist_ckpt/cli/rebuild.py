"""``rebuild``: makes a lost ``.metadata`` again."""

from __future__ import annotations

from typing import Annotated

import typer

from .arguments import CheckpointPath, Json, alone_only
from .documents import print_json
from .output import count, human_bytes, say

__all__ = ["rebuild"]


def rebuild(
    path: CheckpointPath,
    save: Annotated[
        str | None,
        typer.Option(
            "--save", metavar="HEX", help="Which save, if several qualify: the second part of its files' names."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Make a lost or damaged .metadata again from the data files.

    They carry all that it held. Every byte of them is verified first. The checkpoint gets its old number again, or the
    next free one if that is taken. Nothing is removed, and no readable .metadata replaced.

    \b
    Example:
      paddle-dist-ckpt rebuild checkpoints
    """
    from ..folder.rebuild import rebuild as rebuild_folder
    from ..storage import as_storage

    alone_only("rebuild")
    storage = as_storage(path)
    found = rebuild_folder(storage, save, False if json else None)
    if json:
        facts = {"unique_id": found.unique_id, "save_id": found.save_id, "files": len(found.files)}
        print_json({"path": storage.location, **facts})
    else:
        size = human_bytes(sum(info.size for info in found.files))
        say(f"recovered checkpoint {found.unique_id} of {found.created}: {count(len(found.files), 'file')}, {size}")
