"""What is decoded of files that anybody may have written: in bounded memory, with one kind of error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from ..errors import CheckpointCorruptedError
from .memory import Bytes1D

__all__ = ["MOST_COST", "decoding", "finite_float", "has_few_of_one_hash", "hash_of", "json_cost", "lacks_memory"]

_ENDURED = (
    *(msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError, SystemError),
)
_COSTS = {ord("["): 72, ord("{"): 240, ord(","): 40, ord('"'): 12}
"""At most how many bytes of memory each of these characters of JSON stands for: an object, and the place for it."""
MOST_COST = 96
"""At most how many bytes of memory one byte of JSON stands for: that is in a list of empty objects."""
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
        reason = "there is not enough memory to decode it" if isinstance(error, MemoryError) else str(error)
        raise CheckpointCorruptedError(f"{what}: {reason or type(error).__name__}"[:1000]) from error


def lacks_memory(error: BaseException | None) -> bool:
    """Whether there was not enough memory, to begin with: what could not be decoded may be as it was written."""
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def finite_float(text: str) -> float:
    """A number of JSON, for msgspec's ``float_hook``: msgspec itself takes up to 11 us for a large or a small one, such
    as 1e300, and Python a tenth of a microsecond to half of one for any.

    Raises:
        ValueError: it is larger than any float.
    """
    number = float(text)
    if math.isinf(number):
        raise ValueError("Number out of range")
    return number


def json_cost(json: bytes | memoryview) -> int:
    """At most how many bytes of memory the objects take that are decoded from JSON, without the contents of strings.

    They may be many times the JSON: 3 bytes of brackets become a list of 72 bytes. The result follows from the JSON
    alone, since writers and readers must count alike. Where it is more than the JSON has bytes, signs in strings are
    left out.

    Raises:
        CheckpointCorruptedError: there is a zero byte in it, of which files with holes have any number.
    """
    if len(json) <= _SHORT:
        text = bytes(json)
        cost = sum(weight * text.count(sign) for sign, weight in _COSTS.items())
    else:
        data, cost = np.frombuffer(json, np.uint8), 0
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            if not piece.all():
                raise CheckpointCorruptedError("a zero byte in JSON")
            cost += _cost(piece)
    return cost if cost <= len(json) else _cost_outside_strings(json)


def _cost_outside_strings(json: bytes | memoryview) -> int:
    """The same sum, of signs that are not in strings. A pair of backslashes may lie on both sides of a piece's end."""
    cost, inside, left = 0, False, b""
    for start in range(0, len(json), _PIECE):
        text = (left + bytes(json[start : start + _PIECE])).replace(rb"\\", b"")
        left = b"\\" if text.endswith(b"\\") else b""
        text = text[: len(text) - len(left)].replace(rb"\"", b"")
        if not inside and b'"' not in text:
            cost += sum(weight * text.count(sign) for sign, weight in _COSTS.items())
            continue
        signs = np.frombuffer(text, np.uint8)
        quotes = signs == ord('"')
        within = np.bitwise_xor.accumulate(quotes.view(np.uint8)).view(bool) ^ inside  # of bools numpy 1.24.0 errs
        inside = bool(within[-1]) if len(within) else inside
        cost += _cost(signs[~within | quotes])
    return cost


def _cost(json: Bytes1D) -> int:
    return sum(weight * int(np.count_nonzero(json == sign)) for sign, weight in _COSTS.items())


def hash_of(numbers: tuple[int, ...]) -> int:
    """A hash that nobody knows before, as that of a text is: tuples of numbers can be chosen to have one, all of them,
    and a dict of these takes time in the square of their number."""
    return hash(str(numbers))


def has_few_of_one_hash(keys: Collection[Hashable]) -> bool:
    """Whether a dict of these keys is fast: many numbers, or tuples of numbers, can be chosen to have one hash."""
    if len(keys) <= _MOST_OF_ONE_HASH or set(map(type, keys)) <= {str, bytes}:
        return True
    return max(Counter(map(hash, keys)).values()) <= _MOST_OF_ONE_HASH
