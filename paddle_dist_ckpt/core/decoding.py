"""What is decoded of files that anybody may have written: in bounded memory, with one kind of error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from ..errors import CheckpointCorruptedError
from .memory import Bytes1D

__all__ = ["MOST_OF_RECORDS", "Room", "decoding", "has_few_of_one_hash", "objects_of"]

_ENDURED = (
    *(msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError, SystemError),
)
_COSTS = {ord("["): 72, ord("{"): 240, ord(","): 40, ord('"'): 12}
"""Bytes of memory that each of these characters of JSON stands for, at the most: for an object, and a place for it."""
MOST_OF_RECORDS = 16 << 20
"""Bytes that the objects of the values in one `.metadata` may take. A load has them several times."""
_MOST_OF_VALUES = 16 << 20
_SHORT = 4 << 10
_PIECE = 1 << 20
_MOST_OF_ONE_HASH = 64  # numbers that differ by a factor of 2**61 have one hash; there are 34 of such


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Whatever goes wrong within is the fault of the file that is decoded.

    Args:
        what: What is decoded, and how its errors begin.

    Raises:
        CheckpointCorruptedError: anything that damaged contents may raise in code that takes them for what they should
            be.
    """
    try:
        yield
    except CheckpointCorruptedError as error:
        raise CheckpointCorruptedError(f"{what}: {error}") from error
    except _ENDURED as error:
        raise CheckpointCorruptedError(f"{what}: {str(error) or type(error).__name__}"[:1000]) from error


class Room:
    """How much memory the objects may take that are made of JSON, together.

    So what is decoded takes no more than there is on the disk, and some more.

    Args:
        nbytes: Bytes that may be taken whatever there is on the disk.
    """

    def __init__(self, nbytes: int = _MOST_OF_VALUES) -> None:
        self._left = nbytes

    def grant(self, nbytes: int) -> None:
        """Allow more, for bytes that are on the disk and not in memory."""
        self._left += nbytes

    def take(self, json: bytes | memoryview) -> None:
        """Make sure that there is room for the objects of this.

        Raises:
            CheckpointCorruptedError: there is not; or there is a zero byte in it, of which files with holes have any
                number.
        """
        needed = objects_of(json, self._left)
        self._left -= needed
        if self._left < 0:
            raise CheckpointCorruptedError(
                f"more objects than its size has room for: {len(json):,} bytes of JSON make objects of up to "
                f"{needed:,} bytes, {-self._left:,} too many"
            )


def objects_of(json: bytes | memoryview, enough: int = 0) -> int:
    """The most bytes that the objects take which JSON makes: of nothing but brackets, say, 3 bytes make a list of 72.

    Args:
        json: The text.
        enough: If it is no more than this, it need not be known exactly.

    Raises:
        CheckpointCorruptedError: there is a zero byte in it.
    """
    if len(json) <= _SHORT:
        text = bytes(json)
        cost = sum(weight * text.count(sign) for sign, weight in _COSTS.items())
        return cost if cost <= enough else _cost_outside_strings(np.frombuffer(text, np.uint8))
    data = np.frombuffer(json, np.uint8)
    cost = 0
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        if not piece.all():
            raise CheckpointCorruptedError("a zero byte in JSON")
        cost += _cost(piece)
    return cost if cost <= enough else _cost_outside_strings(data)


def _cost_outside_strings(json: Bytes1D) -> int:
    """The same sum, of signs that are not in strings."""
    text = np.frombuffer(json.tobytes().replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    cost, inside = 0, False
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE]
        quotes = piece == ord('"')
        within = np.logical_xor.accumulate(quotes) ^ inside
        inside = bool(within[-1])
        cost += _cost(piece[~within | quotes])
    return cost


def _cost(json: Bytes1D) -> int:
    return sum(weight * int(np.count_nonzero(json == sign)) for sign, weight in _COSTS.items())


def has_few_of_one_hash(keys: Collection[Hashable]) -> bool:
    """Whether a dict of these keys is fast: many numbers, or tuples of numbers, can be chosen to have one hash."""
    if len(keys) <= _MOST_OF_ONE_HASH or set(map(type, keys)) <= {str, bytes}:
        return True
    return max(Counter(map(hash, keys)).values()) <= _MOST_OF_ONE_HASH
