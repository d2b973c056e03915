"""What users pass, checked alike wherever they pass it."""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

__all__ = ["as_integer", "as_number", "checked", "checked_integer", "checked_timeout", "refuse_unused", "takes"]

T = TypeVar("T")
P = ParamSpec("P")

_LONGEST_TIMEOUT = 1_000_000


def as_integer(value: Any) -> int | None:
    """An integer of some kind, Python's or numpy's, as Python's int; None if the value is none, or a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except Exception:  # a TypeError; whatever else tensors raise that have several elements
        return None


def checked_integer(name: str, value: Any) -> int:
    """An integer of some kind, as Python's int.

    Raises:
        TypeError: it is none.
    """
    number = as_integer(value)
    if number is None:
        raise TypeError(f"{name} must be an integer, not {value!r}")
    return number


def as_number(value: Any) -> float | None:
    """A real number of some kind, as Python's; None if the value is none, or a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    integer = as_integer(value)
    return float(value) if integer is None else integer


def checked(name: str, value: T | None, kind: type[T]) -> T | None:
    """Return an argument that may be None.

    Raises:
        TypeError: it is neither that nor of this type.
    """
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be {kind.__name__}, not {type(value).__name__}")
    return value


def refuse_unused(function: str, options: object, names: Sequence[str], advice: str) -> None:
    """Refuse options that say what is loaded, where a function would leave them aside.

    Args:
        function: The function's name.
        options: What it was called with.
        names: The options that have no effect in it.
        advice: What to do instead.

    Raises:
        ValueError: one of them is set.
    """
    given = [name for name in names if getattr(options, name)]
    if given:
        raise ValueError(f"{function} does not use LoadOptions({given[0]}=...): {advice}")


def takes(kind: type[Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator of a function that has ``options`` of this type, and no argument that is called as one of them: an
    option that is passed by itself says so."""
    names = {field.name for field in fields(kind)}

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            odd = [name for name in kwargs if name in names]
            if odd:
                given = ", ".join(f"{name}=..." for name in odd)
                raise TypeError(
                    f"{function.__name__} takes no argument {odd[0]!r}; pass options={kind.__name__}({given})"
                )
            return function(*args, **kwargs)

        return call

    return decorated


def checked_timeout(name: str, seconds: float) -> float:
    """Return a time to wait, as Python's number.

    Raises:
        ValueError: it is no number of seconds, or not in range.
    """
    number = as_number(seconds)
    if number is None or not 0 < number <= _LONGEST_TIMEOUT:
        allowed = f"a number of seconds above 0 and up to {_LONGEST_TIMEOUT:,}"
        raise ValueError(f"{name} must be {allowed}, not {seconds!r}")
    return number
