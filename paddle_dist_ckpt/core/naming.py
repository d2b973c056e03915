"""Errors that say which folder a call was about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CheckpointError

__all__ = ["naming"]


@contextmanager
def naming(location: str) -> Iterator[None]:
    """Have each of this library's errors that leaves the block begin with a folder's location, unless it has it
    anyway: one about a rank, a key or a value alone would not tell which of a program's calls has failed."""
    try:
        yield
    except CheckpointError as error:
        message = str(error.args[0]) if error.args else ""
        if location not in message:
            error.args = (f"{location}: {message}", *error.args[1:])
        raise
