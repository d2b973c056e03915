"""Tuples of integers that have one hash, as a stranger may choose them."""

from __future__ import annotations

__all__ = ["colliding"]

_MASK = 2**64 - 1
_FIRST, _SECOND, _START = 11400714785074694791, 14029467366897019727, 2870177450012600261  # of CPython's hash of tuples


def _after(hashed: int, number: int) -> int:
    """The hash of a tuple so far, with one number more."""
    lane = (hashed + number * _SECOND) & _MASK
    return ((lane << 31 | lane >> 33) & _MASK) * _FIRST & _MASK


def colliding(count: int, *begin: int, below: int = 1 << 60) -> list[tuple[int, ...]]:
    """So many tuples that begin so, with two numbers more, the last one below a bound, that have one hash."""
    inverse, found, x = pow(_SECOND, -1, 1 << 64), list[tuple[int, ...]](), 0
    hashed = _START
    for number in begin:
        hashed = _after(hashed, number)
    while len(found) < count:
        x += 1
        y = (0x123456789ABCDEF - _after(hashed, x)) * inverse & _MASK
        if y < below:
            found.append((*begin, x, y))
    assert len(set(map(hash, found))) == 1
    return found
