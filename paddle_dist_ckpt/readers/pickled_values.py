"""What stands in a pickle that has been walked through, and what the names may stand for that it asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .pickle_machine import Machine

__all__ = [
    "ENDURED",
    "NOTHING",
    "Built",
    "Latin1",
    "Lying",
    "Record",
    "Recurring",
    "Refused",
    "filled",
    "ordered_dict",
    "record_of",
    "recorded",
]

ENDURED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""What damaged contents may raise in code that takes them for what they should be."""
NOTHING: Any = object()
"""What the memo has at places that have not been filled."""
_MOST_KEY, _MOST_NUMBERS = 16, 2  # parts of a tuple that is a key, and those whose hash does not change by the run
_HASHED = range(-(2**60), 2**60)  # larger integers may be made to have one hash
_HASHED_WITHIN = range(-(2**31), 2**31)  # and so may tuples of integers that are not this small and few
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60  # of floats between these a dozen may have one hash, and of all some hundred


class Refused(Exception):
    """What is not read, and what it is: becomes an UnsupportedValueError that names the file."""


@dataclass(slots=True, eq=False)
class Lying:
    """A string of bytes, by where it lies in the file.

    Attributes:
        position: Its first byte in the file; -1 if that is not known.
        nbytes: How many there are.
        form: ``"bytes"`` if they are what lies there, ``"text"`` if that is UTF-8 of a text, and ``"encoded"`` if it is
            UTF-8 of a text of which they are the encoding in Latin-1, as protocol 2 has byte strings of Python 3.
        data: The bytes themselves if there are few; None if they have not been read.
    """

    position: int
    nbytes: int
    form: Literal["bytes", "text", "encoded"] = "bytes"
    data: bytes | None = None


class Latin1(str):
    """A short byte string of Python 2, which is a text to Python 3, and where it lies."""

    __slots__ = ("position",)
    position: int

    @classmethod
    def at(cls, position: int, data: bytes) -> Latin1:
        """The text of these bytes."""
        text = cls(data.decode("latin1"))
        text.position = position
        return text


class Built:
    """What a name may stand for if a pickle gives it a state afterwards."""

    __slots__ = ()

    def build(self, state: Any) -> None:
        """Take the state. May raise :class:`Refused`, or any of :data:`ENDURED` where the state is damaged."""
        raise NotImplementedError


class Recurring:
    """What a name may stand for if pickles have very many calls of it, all in the same form: a function."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError

    def follow(self, machine: Machine, data: bytes, at: int) -> int:
        """Follow the instructions of one call, behind the one that got this from the memo, to the same effect.

        Args:
            machine: The machine, with this on its stack.
            data: What has been read ahead.
            at: Where the next instruction is in it.

        Returns:
            Where the instruction is that comes next: ``at`` if these are others, and nothing has been done.
        """
        raise NotImplementedError


class Record(Built):
    """An object of one of somebody else's classes, by the name of the class, with its state: a dict or a tuple."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = {}

    def build(self, state: Any) -> None:
        if type(state) not in (dict, tuple):
            raise TypeError(f"{type(state).__name__} for a {self.kind}")
        self.state = state

    def get(self, name: str) -> Any:
        """A field, None if it is not there."""
        if type(self.state) is not dict:
            raise TypeError(f"{type(self.state).__name__} for a {self.kind}")
        return self.state.get(name)


def recorded(kind: str) -> Callable[..., Record]:
    """What the name of a class stands for whose objects are records."""
    return lambda *_: Record(kind)


def record_of(value: Any, kind: str) -> Record:
    """A value that should be a record of this kind.

    Raises:
        TypeError: it is something else.
    """
    if type(value) is not Record or value.kind != kind:
        raise TypeError(f"{type(value).__name__} where a {kind} is due")
    return value


def ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    """What :class:`collections.OrderedDict` stands for."""
    if not isinstance(pairs, (list, tuple)) or any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in pairs):
        raise TypeError("an OrderedDict of what is no list of pairs")
    return filled({}, [part for pair in pairs for part in pair])


def filled(target: Any, items: list[Any]) -> dict[Any, Any]:
    """A dict with more entries, of which keys and values stand one behind the other."""
    if type(target) is not dict:
        raise TypeError(f"keys for {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[key if type(key) is str else _key(key)] = value
    return target


def _key(value: Any, nested: bool = False) -> Any:
    """A key whose hash takes little time, and which nobody can give the hash of many others."""
    kind = type(value)
    if kind is str or kind is bool or value is None or isinstance(value, Built):
        return value
    if kind is int and value in (_HASHED_WITHIN if nested else _HASHED):
        return value
    if kind is float and not nested and (value == 0 or _SMALLEST < abs(value) < _LARGEST):
        return value
    if kind is Latin1:
        return str(value)
    if kind is tuple and not nested and len(value) <= _MOST_KEY:
        if sum(not isinstance(part, (str, Built)) for part in value) <= _MOST_NUMBERS:
            return tuple(_key(part, nested=True) for part in value)
        raise Refused(f"has a dict with a key of more than {_MOST_NUMBERS} numbers, which is not read")
    raise Refused(f"has a dict with a key that is {kind.__name__}, which is not read")
