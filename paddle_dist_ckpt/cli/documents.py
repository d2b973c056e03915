"""JSON documents, printed piece by piece: what a checkpoint holds may be much larger as text than it is in memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import typer

from ..core.text import encodable, value_text
from ..visible import escaped

__all__ = ["print_json"]

_MOST_LETTERS = 100_000  # of a value that JSON has no type for
_TOGETHER = 1000  # numbers, or as much of something else, that become text at once
_LETTERS_EACH = 64  # of a text weigh as much as a number
_FACTS = 20  # is about what a row of facts weighs
_PIECE = 1 << 16  # letters that are printed at once
_INT64 = range(-(2**63) + 1, 2**63)
_ALIKE = frozenset({int, bool, type(None)})
"""Types of values that are JSON as they are, if they are not too large, of which lists may have millions."""


def print_json(document: Any) -> None:
    """Print one JSON document, a dict or a dataclass. Numbers that JSON lacks are strings: NaN, Infinity, -Infinity."""
    if dataclasses.is_dataclass(document):
        document = {field.name: getattr(document, field.name) for field in dataclasses.fields(document)}
    waiting, letters = list[str](), 0
    for part in itertools.chain(_parts(document, ""), ["\n"]):
        waiting.append(part)
        letters += len(part)
        if letters > _PIECE:
            typer.echo("".join(waiting), nl=False)
            waiting, letters = [], 0
    typer.echo("".join(waiting), nl=False)


def _parts(value: Any, indent: str) -> Iterator[str]:
    """The text of a value, in parts that are small each; all its lines but the first are indented by so much."""
    if _is_facts(value) or _weight(value, _TOGETHER) <= _TOGETHER:
        yield _text(value, indent)
    elif isinstance(value, str):
        yield '"'
        for start in range(0, len(value), _PIECE):
            yield _text(value[start : start + _PIECE], indent)[1:-1]
        yield '"'
    else:
        begin, end = "{}" if isinstance(value, dict) else "[]"
        inner = f"{indent}  "
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
    if isinstance(value, (list, tuple)):
        items = value
    elif isinstance(value, dict) and _is_plain_dict(value):
        items = itertools.chain.from_iterable(value.items())
    else:
        return _FACTS if _is_facts(value) else 1
    total = 1
    for item in items:
        total += _weight(item, most - total)
        if total > most:
            break
    return total


def _text(value: Any, indent: str) -> str:
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(_plain(value)), indent=2).decode()
    lines = text.split("\n")
    as_is = text.isascii() and "\x7f" not in text  # JSON itself escapes the others
    return f"\n{indent}".join(lines if as_is else [escaped(line, _escape) for line in lines])


def _plain(value: Any) -> Any:
    """A value in what JSON has: what it lacks becomes text."""
    if isinstance(value, int) and value in _INT64:  # as nearly all where there are very many
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return encodable(value)
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and _is_plain_dict(value):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if _is_facts(value):
        import msgspec

        return _plain(msgspec.to_builtins(value, enc_hook=_plain))
    return value_text(value, _MOST_LETTERS)


def _is_plain_dict(value: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in value)


def _is_facts(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or hasattr(value, "__struct_fields__")


def _escape(character: str) -> str:
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
