"""JSON documents, printed piece by piece: what a checkpoint holds may be much larger as text than it is in memory."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import typer

from ..core.garbage import no_collections
from ..core.text import encodable, value_text
from ..visible import escaped

__all__ = ["Lazy", "print_json"]

T = TypeVar("T")

_MOST_LETTERS = 100_000  # of a value that JSON has no type for
_TOGETHER = 1000  # numbers, or as much of something else, that become text at once
_LETTERS_EACH = 64  # of a text weigh as much as a number
_FACTS = 20  # is about what a row of facts weighs
_PIECE = 1 << 16  # letters that are printed at once
_MOST_INDENT = 64  # of lines: those of deep lists would be hundreds of blanks each
_INTEGERS = range(-(2**63), 2**64)  # those of tensors
_NUMBERS: dict[str, Callable[[Any], Any]] = {"b": bool, "i": int, "u": int, "f": float}
"""What makes Python's numbers of numpy's, by their kind; of others, and of longer ones, JSON has none."""
_ALIKE = frozenset({int, float, bool, type(None)})
"""Types of values that are about as much text each, of which lists may have millions."""


class Lazy(Sequence[T]):
    """A list of what a function makes of other items, each when it is asked for."""

    def __init__(self, items: Sequence[Any], make: Callable[[Any], T]) -> None:
        self._items, self._make = items, make

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        return list(map(self._make, self._items[place])) if isinstance(place, slice) else self._make(self._items[place])


_LISTS = (list, tuple, Lazy)


@no_collections()
def print_json(document: Any) -> None:
    """Print one JSON document, a dict or a dataclass. Numbers that JSON lacks are strings: NaN, Infinity, -Infinity."""
    waiting, letters = list[str](), 0
    for part in itertools.chain(_parts(_members(document), ""), ["\n"]):
        waiting.append(part)
        letters += len(part)
        if letters > _PIECE:
            typer.echo("".join(waiting), nl=False)
            waiting, letters = [], 0
    typer.echo("".join(waiting), nl=False)


def _parts(value: Any, indent: str) -> Iterator[str]:
    """The text of a value, in parts that are small each; all its lines but the first are indented by so much."""
    if _weight(value, _TOGETHER) <= _TOGETHER:
        yield _text(value, indent)
    elif isinstance(value, str):
        yield '"'
        for start in range(0, len(value), _PIECE):
            yield _text(value[start : start + _PIECE], indent)[1:-1]
        yield '"'
    else:
        value = _members(value)
        begin, end = "{}" if isinstance(value, dict) else "[]"
        inner = f"{indent}  "[:_MOST_INDENT]
        for some, is_much in _groups(value):
            yield begin
            begin = ","
            if not is_much:
                yield _text(some, indent)[1 : -2 - len(indent)]
                continue
            yield f"\n{inner}"
            (item,) = some
            if isinstance(some, dict):
                yield from _parts(item, inner)
                yield ": "
                item = some[item]
            yield from _parts(item, inner)
        yield f"\n{indent}{end}"


def _groups(value: Any) -> Iterator[tuple[Any, bool]]:
    """The items of a list or a dict, as such of several that weigh little together, or of one that weighs much; and
    which of both."""
    make, items = (dict, value.items()) if isinstance(value, dict) else (list, value)
    some: list[Any] = []
    total = 0
    for item in items:
        weight = sum(_weight(one, _TOGETHER) for one in item) if make is dict else _weight(item, _TOGETHER)
        if some and total + weight > _TOGETHER:
            yield make(some), total > _TOGETHER
            some, total = [], 0
        some.append(item)
        total += weight
    yield make(some), total > _TOGETHER


def _weight(value: Any, most: int) -> int:
    """How much text becomes of a value, in numbers; it is not looked at any further where it is more than ``most``."""
    if type(value) in _ALIKE:
        return 1
    if isinstance(value, str):
        return 1 + len(value) // _LETTERS_EACH
    items: Iterable[Any]
    if isinstance(value, _LISTS):
        items = value
    elif isinstance(value, dict) and _is_plain_dict(value):
        items = itertools.chain.from_iterable(value.items())
    elif hasattr(type(value), "__dataclass_fields__"):
        items = _members(value).values()
    else:
        return _FACTS if _names(value) else 1
    total = 1
    for item in items:
        total += _weight(item, most - total)
        if total > most:
            break
    return total


def _text(value: Any, indent: str) -> str:
    import msgspec

    spaces = b"\n" + b" " * (_MOST_INDENT - len(indent))
    formatted = msgspec.json.format(msgspec.json.encode(_plain(value)), indent=2)
    text = re.sub(spaces + b" +", spaces, formatted).decode()
    if not text.isascii() or "\x7f" in text:  # JSON itself escapes the others
        text = escaped(text, _escape)
    return text.replace("\n", f"\n{indent}")


def _plain(value: Any) -> Any:
    """A value in what JSON has: what it lacks becomes text."""
    if isinstance(value, int) and value in _INTEGERS:  # as nearly all where there are very many
        return value
    if isinstance(value, _LISTS):
        return [_plain(item) for item in value]
    if isinstance(value, float):  # or numpy.float64, which msgspec does not know
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return encodable(value)
    if value is None:
        return value
    if isinstance(value, dict) and _is_plain_dict(value):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if _names(value):
        return {name: _plain(item) for name, item in _members(value).items()}
    dtype = getattr(value, "dtype", None) if getattr(value, "shape", None) == () else None
    if dtype is not None and type(value).__module__ == "numpy" and dtype.kind in _NUMBERS and dtype.itemsize <= 8:
        return _plain(_NUMBERS[dtype.kind](value))
    return value_text(value, _MOST_LETTERS)


def _is_plain_dict(value: dict[Any, Any]) -> bool:
    """Whether JSON can have it: keys are texts, of which no two become the same there."""
    texts = all(isinstance(key, str) for key in value)
    return texts and (all(map(str.isascii, value)) or len(set(map(encodable, value))) == len(value))


def _members(value: Any) -> Any:
    """Facts as a dict, of which a member may be anything; all else as it is."""
    names = _names(value)
    return {name: getattr(value, name) for name in names} if names else value


def _names(value: Any) -> Collection[str]:
    """What the members of facts are called; nothing for what is none."""
    kind = type(value)
    return getattr(kind, "__dataclass_fields__", ()) or getattr(kind, "__struct_fields__", ())


def _escape(character: str) -> str:
    if character == "\n":  # between the lines, for in texts it is escaped
        return character
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
