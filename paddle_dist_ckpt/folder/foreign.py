"""Tells our files from those that others wrote, by their first bytes and by their names."""

from __future__ import annotations

import io
import re
from collections.abc import Collection
from contextlib import closing
from enum import Enum, auto

import numpy as np

from ..errors import CheckpointCorruptedError
from ..files.codec import HEAD_START, MAX_HEAD_BYTES
from ..storage.base import Storage
from ..storage.capabilities import is_part

__all__ = ["Format", "foreign_id", "is_beside_paddles", "look", "part_text"]

_PIECE = 16 << 20
_PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_FOREIGN = re.compile(r"(?:0|[1-9][0-9]{0,17})_(0|[1-9][0-9]{0,17})\.(?:distcp|safetensors)")
_PART = re.compile(
    r"(?:0|[1-9][0-9]*|__[0-9]+)?\.metadata|.*\.distcp|.*\.(?:safetensors|pdparams|pdopt)\.index\.json", re.DOTALL
)


class Format(Enum):
    """What a file of the name of a `.metadata` file can be."""

    MISSING = auto()
    OURS = auto()
    PADDLE = auto()
    """A pickle, as Paddle's own ``save_state_dict`` writes it."""
    FOLDER = auto()
    """Not a file at all."""
    UNKNOWN = auto()


def _format_of(data: bytes) -> Format:
    """The format of a file that begins with these bytes."""
    if data.startswith(HEAD_START):
        return Format.OURS
    return Format.PADDLE if data.startswith(_PICKLE) else Format.UNKNOWN


def look(storage: Storage, name: str, whole: bool = False) -> tuple[Format, bytes]:
    """The format of a file, and its first bytes (``MAX_HEAD_BYTES`` at the most); or all, if it is ours.

    Raises:
        CheckpointCorruptedError: there is not enough memory for it: how large it is, whoever has made it says.
    """
    try:
        data = storage.read(name, MAX_HEAD_BYTES)
        found = _format_of(data)
        if whole and found is Format.OURS and len(data) == MAX_HEAD_BYTES:
            data = _text(storage, name)
    except FileNotFoundError:
        return Format.MISSING, b""
    except IsADirectoryError:
        return Format.FOLDER, b""
    except MemoryError as error:
        raise CheckpointCorruptedError(f"{storage.location}/{name}: there is not enough memory to read it") from error
    return found, data


def _text(storage: Storage, name: str) -> bytes:
    """What a file of text holds, to its first zero byte: there is none in it, but any number in a file with a hole."""
    text = io.BytesIO()  # which gives away what it holds without a copy
    with closing(storage.open(name)) as file:
        for start in range(0, file.size, _PIECE):
            piece = np.empty(min(_PIECE, file.size - start), np.uint8)
            try:
                file.read_into([piece], start)
            except EOFError:  # it was made shorter just now
                break
            text.write(piece.data)
            if not piece.all():
                break
    return text.getvalue()


def foreign_id(name: str) -> int | None:
    """The id in the name of a data file that Paddle's own functions write, None for any other name."""
    match = _FOREIGN.fullmatch(name)
    return int(match[1]) if match else None


def is_beside_paddles(names: Collection[str], unique_id: int | None) -> bool:
    """Whether among these names are data files of Paddle's of an id, of a kind that this library does not write."""
    return any(name.endswith(".distcp") and foreign_id(name) == unique_id for name in names)


def part_text(storage: Storage, names: Collection[str]) -> str | None:
    """What to say of a path to a file that is only a part of what others write; None if it is no such path."""
    name = next(iter(names), "")
    if not is_part(storage) or len(names) != 1 or not _PART.fullmatch(name):
        return None
    return f"{storage.location}/{name} is a part of a checkpoint: pass the folder {storage.location}"
