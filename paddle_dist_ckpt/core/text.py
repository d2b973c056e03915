"""Values of a checkpoint as a person can read them, no longer than is of use, and other small texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from ..visible import visible

__all__ = ["MOST_VALUE", "counted", "encodable", "kept_once", "key_text", "ranks_text", "value_text"]

MOST_VALUE = 2000
_MOST_DEPTH = 50
_MOST_BITS = 4096  # of an integer; Python refuses to write out 4,301 digits
_MOST_ITEMS, _MOST_FLOATS = 100, 10  # of an array; each float takes up to a microsecond
_MANY = 1 << 16  # texts of which it is worth to have none twice
_MOST_RANKS = 4  # in a row that are named one by one


def encodable(text: str) -> str:
    """Text as it can be sent and printed: a path, or what others have written, may have halves of surrogate pairs."""
    return text.encode(errors="backslashreplace").decode()


def counted(count: int, noun: str) -> str:
    """``1 problem``, ``2 problems``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def kept_once(texts: list[str], known: list[str]) -> list[str]:
    """The same texts. Of very many, those that are known, of which there are no equal ones, are in memory once."""
    if texts == known:
        return known
    if len(texts) < _MANY:
        return texts
    same = dict(zip(known, known, strict=True))
    return [same.get(text, text) for text in texts]


def value_text(value: object, most: int = MOST_VALUE) -> str:
    """A value as Python would write it, cut off after ``most`` characters.

    Whatever the value is, this does not fail, and takes no more time and memory than so many characters.
    """
    parts, size = list[str](), 0
    for part in _parts(value, most, 0):
        parts.append(part[: most + 1 - size])
        size += len(parts[-1])
        if size > most:
            parts[-1] = parts[-1][:-1] + "…"
            break
    return visible("".join(parts), None)


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 2`` or ``ranks 2, 3, 8-63``, ascending."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    named = [f"{run[0]}-{run[-1]}" if len(run) > _MOST_RANKS else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(named)}"


def key_text(key: object) -> str:
    """A dict's key: a text as it is, and any other as Python would write it."""
    return key if isinstance(key, str) else value_text(key)


def _parts(value: Any, most: int, depth: int) -> Iterator[str]:
    """The text of a value, part by part, each of them bounded."""
    if depth > _MOST_DEPTH:
        yield "(nested too deep to write out)"
    elif isinstance(value, (str, bytes)):
        yield repr(value[: most + 1])
    elif type(value) is list:
        yield from _items("[", ((item,) for item in value), "]", most, depth)
    elif type(value) is tuple:
        yield from _items("(", ((item,) for item in value), ",)" if len(value) == 1 else ")", most, depth)
    elif isinstance(value, dict):
        yield from _items("{", value.items(), "}", most, depth)
    else:
        yield _scalar_text(value, most)


def _items(begin: str, items: Iterable[tuple[Any, ...]], end: str, most: int, depth: int) -> Iterator[str]:
    yield begin
    for i, (first, *rest) in enumerate(items):
        if i:
            yield ", "
        yield from _parts(first, most, depth + 1)
        for value in rest:
            yield ": "
            yield from _parts(value, most, depth + 1)
    yield end


def _scalar_text(value: Any, most: int) -> str:
    import numpy as np  # late, since a command line that prints its help has no use for it

    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"(an integer of {value.bit_length():,} bits)"
    try:
        if isinstance(value, np.ndarray):
            return _array_text(value, most)
        return repr(value.item() if isinstance(value, np.generic) else value)
    except Exception as error:  # numpy has many for items that no array should have
        return f"(a {type(value).__name__} that cannot be written out: {type(error).__name__})"


def _array_text(array: Any, most: int) -> str:
    """An array in one line; of a large one the first items."""
    dtype = array.dtype
    name = repr(dtype.str) if dtype.kind in "SUMm" else _name(dtype)
    count = min(_MOST_FLOATS if dtype.kind in "fcV" else _MOST_ITEMS, 8 * most // max(1, dtype.itemsize))
    if 0 < array.size <= count:
        return f"array({_items_text(array)}, dtype={name})"
    some = [_items_text(array.reshape(-1)[:count])[1:-1], "…"] if array.size else []
    return f"array([{', '.join(filter(None, some))}], shape={array.shape}, dtype={name})"


@lru_cache  # not of times, which may be of very many types, and whose hashes take longer than their names
def _name(dtype: Any) -> str:
    return str(dtype.name) if dtype.isnative else repr(dtype.str)  # or two that differ by it would look alike


def _items_text(array: Any) -> str:
    """The items of an array, in brackets. Numpy itself takes ten times as long, and a value may have many arrays."""
    kind = array.dtype.kind
    if kind in "biuSU":  # Python's own, which have the same text
        return str(array.tolist())
    if array.ndim == 0:
        return _items_text(array.reshape(1))[1:-1]
    if array.ndim > 1:
        return f"[{', '.join(map(_items_text, array))}]"
    return f"[{', '.join([repr(str(item)) if kind in 'Mm' else str(item) for item in array])}]"
