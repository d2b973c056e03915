"""``report``: one HTML page that shows a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from .arguments import CheckpointPath, Identifier, Json, alone_only
from .documents import print_json
from .output import human_bytes, say

__all__ = ["report"]


def report(
    path: CheckpointPath,
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="The page to write; an earlier one is replaced.")
    ] = "report.html",
    unique_id: Identifier = None,
    json: Json = False,
) -> None:
    """Write a page that shows a checkpoint: what is in it, and where.

    The page is one HTML file, which needs nothing else and no network. It draws which rank and file hold which region
    of a tensor, bytes by layer, the balance of ranks and files, and how long each phase of the save took; tensors and
    values can be searched. Only metadata are read, no tensor's data.

    \b
    Examples:
      paddle-dist-ckpt report checkpoints -o report.html
      paddle-dist-ckpt report checkpoints --id 1200 -o step-1200.html
    """
    from ..report.report import report as write_report

    alone_only("report")
    if out == "-":
        raise typer.BadParameter(
            "the page is written to a file, not to stdout; ./- is one of that name", param_hint="--out"
        )
    page = write_report(path, out, unique_id)
    size = page.stat().st_size
    if json:
        print_json({"path": str(page.absolute()), "bytes": size})
    else:
        say(f"{page}: {human_bytes(size)}")
