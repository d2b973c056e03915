"""What is decoded of files that anybody may have written: in bounded memory, with one kind of error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from ..errors import CheckpointCorruptedError
from .memory import Bytes1D

__all__ = ["decoding", "has_few_of_one_hash", "is_too_dense"]

_ENDURED = (
    *(msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError, SystemError),
)
_COSTS = {ord("["): 72, ord("{"): 240, ord(","): 40, ord('"'): 12}
"""Bytes of memory that each of these characters of JSON stands for, at the most: for an object, and a place for it."""
_RATIO = 26.5  # bytes of memory for each of JSON; lists of tuples or of dicts of numbers need up to 26
_MORE = 3 << 20
_SHORT = 16 << 10
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


def is_too_dense(json: bytes | memoryview) -> bool:
    """Whether JSON makes so many objects of so few bytes that it is refused, by readers and by writers: nothing but
    brackets, say, of which 3 bytes make a list of 72.

    Raises:
        CheckpointCorruptedError: there is a zero byte in it, of which files with holes have any number.
    """
    data = np.frombuffer(json, np.uint8)
    most = _MORE + _RATIO * len(data)
    if len(data) <= _SHORT:
        return False
    cost = 0
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        if not piece.all():
            raise CheckpointCorruptedError("a zero byte in JSON")
        cost += _cost(piece)
    return cost > most and _cost_outside_strings(data) > most


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
