"""Arguments and options that several commands have."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ..visible import visible

__all__ = ["CheckpointPath", "Identifier", "Json", "Yes", "alone_only", "confirm", "is_terminal"]

CheckpointPath = Annotated[str, typer.Argument(metavar="PATH", help="The checkpoint's folder.", show_default=False)]
Identifier = Annotated[
    int | None,
    typer.Option("--id", metavar="N", min=0, help="Which checkpoint of the folder; without it the newest."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def confirm(question: str, yes: bool) -> None:
    """Ask before something is destroyed.

    Raises:
        typer.BadParameter: nobody is there who could answer, and ``--yes`` was not given.
        typer.Exit: the answer is no.
    """
    if yes:
        return
    if not is_terminal():
        raise typer.BadParameter("stdin is no terminal, so nobody can be asked; pass --yes", param_hint="--yes")
    if not typer.confirm(visible(question, None), err=True):
        typer.echo("nothing was done", err=True)
        raise typer.Exit(2)


def is_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin is not None and sys.stdin.isatty()  # none: it was closed before the command began


def alone_only(command: str) -> None:
    """Refuse to run several times at once, as ranks of a launched job.

    Raises:
        ValueError: this process is one of several.
    """
    if os.environ.get("PADDLE_TRAINERS_NUM", "1") != "1":
        raise ValueError(f"{command} works in one process; start it without paddle.distributed.launch")
