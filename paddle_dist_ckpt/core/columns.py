"""Columns of integers: many numbers of one kind together, in memory and in messages."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import CheckpointCorruptedError

__all__ = [
    "MANY",
    "Column",
    "IntArray",
    "Mask",
    "all_in_row",
    "all_of",
    "any_in_row",
    "column_size",
    "edges_of",
    "narrow",
    "numbered",
    "pack_column",
    "pack_signed",
    "pieces_of",
    "places_of_equals",
    "places_within",
    "run_edges",
    "sums_by",
    "unpack_column",
    "unpack_signed",
]

IntArray = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Column(msgspec.Struct, frozen=True, array_like=True):
    """Unsigned integers in the narrowest little-endian type that holds them; base64 where the codec is JSON."""

    dtype: str
    data: bytes


MANY = 1 << 16
"""Rows from which on columns take too much memory to be kept in 64 bits, or to be looked at together."""
_COLUMN_DTYPES = ("<u1", "<u2", "<u4", "<u8")
_SIGNED = (np.int8, np.int16, np.int32, np.int64)
_TOPS = [(int(np.iinfo(name).max), name) for name in _COLUMN_DTYPES]


def numbered(numbers: IntArray) -> tuple[IntArray, IntArray]:
    """The different ones among small numbers, ascending, and which of these each is: as np.unique, without sorting."""
    seen = np.bincount(numbers) > 0
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[numbers]


def pack_column(values: npt.ArrayLike) -> Column:
    """Non-negative integers as a column."""
    array = np.asarray(values, dtype=np.int64)
    top = int(array.max()) if array.size else 0
    dtype = next(name for most, name in _TOPS if top <= most)
    return Column(dtype, array.astype(dtype).tobytes())


def column_size(column: Column, what: str) -> int:
    """How many integers a column has.

    Raises:
        CheckpointCorruptedError: it is no column.
    """
    if column.dtype not in _COLUMN_DTYPES or len(column.data) % int(column.dtype[-1]):
        raise CheckpointCorruptedError(f"{what} is not a column of integers")
    return len(column.data) // int(column.dtype[-1])


def unpack_column(column: Column, size: int, bound: int, what: str) -> IntArray:
    """The integers of a column, checked to be ``size`` of them, each from 0 to below ``bound``.

    Raises:
        CheckpointCorruptedError: they are not.
    """
    found = column_size(column, what)
    if found != size:
        raise CheckpointCorruptedError(f"{what}: expected {size} integers, found {found}")
    raw = np.frombuffer(column.data, column.dtype)
    if raw.size and int(raw.max()) >= bound:
        raise CheckpointCorruptedError(f"{what}: a value of {int(raw.max())} where less than {bound} is allowed")
    return raw.astype(np.int64)


def all_of(column: Column) -> IntArray:
    """The integers of a column that a rank of this job has sent."""
    return np.frombuffer(column.data, column.dtype).astype(np.int64)


def all_in_row(flags: Mask) -> Mask:
    """Whether all of each row are true, ``[n]``; of rows this short, numpy's own ``all`` takes 20 times as long."""
    return functools.reduce(np.logical_and, flags.T, np.ones(len(flags), bool))


def any_in_row(flags: Mask) -> Mask:
    """Whether any of each row is true; see :func:`all_in_row`."""
    return functools.reduce(np.logical_or, flags.T, np.zeros(len(flags), bool))


def places_of_equals(values: IntArray) -> list[IntArray]:
    """The places of each different value, ascending, the smallest value first. Time is O(n log n)."""
    order = np.argsort(values, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(values[order])) + 1) if len(order) else []


def edges_of(counts: IntArray) -> IntArray:
    """Where runs of these lengths start, one behind the other, and behind the last the end, ``[runs + 1]``."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def run_edges(*columns: IntArray | Mask) -> IntArray:
    """Where runs of rows that are equal in these columns start, and behind the last the end, ``[runs + 1]``."""
    size = len(columns[0])
    if not size:
        return np.zeros(1, np.int64)
    changes = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.concatenate([[0], np.flatnonzero(changes) + 1, [size]])


def places_within(counts: IntArray, start: IntArray | int = 0) -> IntArray:
    """``start``, ``start + 1``, ... within each of some runs that stand one behind the other, ``[sum of counts]``."""
    places: IntArray = np.arange(int(counts.sum())) + np.repeat(start - (np.cumsum(counts) - counts), counts)
    return places


def pieces_of(count: int, most: int) -> Iterator[slice]:
    """So many rows as slices one behind the other, of ``most`` rows each."""
    return (slice(start, start + most) for start in range(0, count, most))


def sums_by(group: IntArray, values: IntArray, groups: int) -> IntArray:
    """The sum of the values of each group, ``[groups]``, exact. ``group`` says which each value is of, ``[n]``."""
    sums = np.zeros(groups, np.int64)
    for piece in pieces_of(len(group), MANY):  # numpy adds integers of 64 bits twelve times as fast as narrow ones
        np.add.at(sums, group[piece].astype(np.int64, copy=False), values[piece].astype(np.int64, copy=False))
    return sums


def narrow(values: IntArray, most: int | None = None) -> IntArray:
    """The same integers in the narrowest signed type that holds them; as they are if they are few.

    It is for columns that are kept. Who calculates with them widens some to 64 bits first.

    Args:
        values: The integers.
        most: None of them is larger, or below ``-most``, if that is known.
    """
    if len(values) < MANY:
        return values
    low, high = (int(values.min()), int(values.max())) if most is None else (-most, most)
    kind = next(k for k in _SIGNED if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    return values.astype(kind, copy=False)


def pack_signed(values: npt.ArrayLike) -> bytes:
    """Integers of any sign as bytes."""
    return np.ascontiguousarray(values, "<i8").tobytes()


def unpack_signed(data: bytes, columns: int) -> IntArray:
    """Rows of ``columns`` integers each."""
    return np.frombuffer(data, "<i8").reshape(-1, columns)
