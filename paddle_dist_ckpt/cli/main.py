"""The command ``paddle-dist-ckpt``: its commands, and what becomes of errors."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import resource
import select
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..core.frames import with_room_for_frames
from ..version import __version__
from ..visible import visible_lines
from .cat import cat
from .convert import convert
from .copy import copy
from .delete import delete
from .diff import diff
from .inspect import inspect
from .merge import merge
from .prune import prune
from .rebuild import rebuild
from .recipes import recipes
from .report import report
from .verify import verify

__all__ = ["app", "main"]

# In the order in which --help lists them; each is a function in a module of its name.
_COMMANDS = (
    inspect,
    cat,
    report,
    verify,
    diff,
    recipes,
    copy,
    delete,
    prune,
    rebuild,
    merge,
    convert,
)

_HELP = """Look inside checkpoints, check, compare, copy and mend them. Needs neither Paddle (but for an
aoa_config) nor a GPU.

PATH is a checkpoint's folder: one of this library, or one that Paddle, PyTorch or Hugging Face have written.

\b
Exit codes:
  0    all is well
  1    problems or differences were found
  2    wrong use, no such checkpoint, or a failure
  130  interrupted
  141  nobody reads the output any more

Every command has --json, which prints one JSON document on stdout and nothing else there, and --help with an example.
Colours are for terminals only, and not where NO_COLOR is set.
"""


_ADVICE = (
    (r"\brebuild_metadata\b", "paddle-dist-ckpt rebuild"),
    (r", or call CheckpointManager\([^\n]*\)\.(restore\(state\)|all_steps\(\))", ""),
    (r"\bgive its unique_id\b", "pass its --id"),
    (r"\n\(LoadOptions\([^\n]*\)", ""),  # commands have no such option
)


class _Commands(TyperGroup):
    """Turns what commands raise into a line on stderr and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        if "--debug" in own:  # wherever it stands
            args = ["--debug", *(arg for arg in own if arg != "--debug"), *args[len(own) :]]
        return super().parse_args(ctx, args)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with _told("--debug" in args):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _told(ctx.params.get("debug")):
            return super().invoke(ctx)


@contextmanager
def _told(debug: Any) -> Iterator[None]:
    """Turn what is raised into a line on stderr, as far as that takes any, and an exit code, whether it does or not."""
    try:
        yield
    except (KeyboardInterrupt, typer.Abort):
        _try(lambda: typer.echo("interrupted", err=True), sys.stderr)
        raise typer.Exit(130) from None
    except Exception as error:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if isinstance(error, BrokenPipeError) and unread:  # or it is a storage's
            for stream in unread:
                _silence(stream)
            raise typer.Exit(141) from None
        if hasattr(error, "show"):  # wrong use, which typer explains
            _try(error.show, sys.stderr)
        elif hasattr(error, "exit_code"):
            raise
        else:
            text = traceback.format_exc().rstrip() if debug else f"error: {_with_commands(_text(error))}"
            _try(lambda: typer.echo(visible_lines(text), err=True), sys.stderr)
        if sys.stdout is not None:  # what it did not take is not tried again when Python ends
            _try(sys.stdout.flush, sys.stdout)
        raise typer.Exit(2) from None


def _try(write: Callable[[], object], stream: Any) -> None:
    """Write to a stream. If nobody reads it, or its disk is full, the exit code still says what has happened."""
    try:
        write()
    except OSError:
        _silence(stream)


def _is_unread(stream: Any) -> bool:
    """Whether a stream is a pipe, or a connection, whose reader wants no more of it."""
    try:
        waiting = select.poll()
        waiting.register(stream, 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in waiting.poll(0))
    except (OSError, ValueError, TypeError, AttributeError):  # it is none of these, or was closed from the start
        return False


def _silence(stream: Any) -> None:
    """Have no error come of what is still to be written to a stream; there is none if it was closed from the start."""
    with suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _text(error: Exception) -> str:
    """An error in words."""
    from ..errors import CheckpointError

    if isinstance(error, OSError) and error.strerror:
        hint = " (see ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) and "ulimit" not in str(error) else ""
        return (f"{error.strerror}: {error.filename}" if error.filename else error.strerror) + hint
    if isinstance(error, (CheckpointError, OSError, ValueError, TypeError)) and str(error):
        return str(error)
    if isinstance(error, MemoryError):
        return (f"not enough memory: {error}" if str(error) else "not enough memory") + " (--debug shows where)"
    return f"{type(error).__name__}: {error} (--debug shows where)"


def _with_commands(text: str) -> str:
    """A message with the commands that do what it advises programs to call."""
    for call, command in _ADVICE:
        text = re.sub(call, command, text)
    return text


def _advise_commands(record: logging.LogRecord) -> bool:
    """Have a line of the log advise commands rather than calls."""
    record.msg, record.args = _with_commands(record.getMessage()), None
    return True


app = typer.Typer(
    cls=_Commands,
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _command in _COMMANDS:
    app.command()(_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paddle-dist-ckpt {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    pass


def _allow_open_files() -> None:
    """Allow as many open files as this user may have: by default it is 1,024, and a large job's checkpoint has more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # as much as it was, then
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@with_room_for_frames
def main() -> None:
    """Run the command line of this process, and exit."""
    if isinstance(sys.stdout, io.TextIOWrapper) and isinstance(sys.stdout.buffer, io.RawIOBase):  # PYTHONUNBUFFERED
        # Python drops what such a stream does not take at once, as on a full disk, and says nothing.
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(sys.stdout.buffer), sys.stdout.encoding)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # whatever the names and texts in checkpoints hold
    logging.getLogger("paddle_dist_ckpt").addFilter(_advise_commands)
    _allow_open_files()
    app(prog_name="paddle-dist-ckpt")
