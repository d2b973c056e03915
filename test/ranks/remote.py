"""Exceptions of a rank as plain data, and calls as names, so that both can cross a process boundary."""

from __future__ import annotations

import importlib
import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["RankError", "RankLostError", "RemoteError", "function_name", "load_function"]

_OS_ERROR_ATTRIBUTES = ("errno", "filename", "strerror")


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An exception that a function raised on one rank.

    Attributes:
        rank: The rank that raised it.
        type_name: Name of the exception's class, without its module.
        message: ``str()`` of the exception.
        traceback: The printed traceback, with the exceptions that caused it.
        attributes: Its public attributes. Exceptions among them are `RemoteError` too, and what cannot be pickled is
            replaced by its ``repr()``.
    """

    rank: int
    type_name: str
    message: str
    traceback: str
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RemoteError:
        """Describe ``error`` as raised by ``rank``."""
        names = [name for name in vars(error) if not name.startswith("_")]
        if isinstance(error, OSError):
            names.extend(_OS_ERROR_ATTRIBUTES)
        attributes = {name: _portable(rank, getattr(error, name)) for name in names}
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(rank, type(error).__name__, str(error), text, attributes)


class RankError(Exception):
    """A function raised on one or more ranks.

    Attributes:
        errors: What was raised, by rank, in the order of the ranks.
    """

    def __init__(self, call: str, called: int, errors: Iterable[RemoteError]) -> None:
        self.errors: dict[int, RemoteError] = {error.rank: error for error in errors}
        parts = [f"{call} raised on {len(self.errors)} of {called} ranks"]
        parts.extend(f"--- rank {rank}\n{error.traceback.rstrip()}" for rank, error in self.errors.items())
        super().__init__("\n".join(parts))


class RankLostError(Exception):
    """A rank died or stayed silent past its timeout. The message ends with what it wrote to its log.

    Attributes:
        ranks: The ranks that were lost.
    """

    def __init__(self, message: str, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)


def function_name(function: Callable[..., Any] | str) -> str:
    """Return ``module:function``, the name under which a rank finds ``function``.

    Raises:
        ValueError: It is a lambda or is defined inside another function, so that no other process can import it.
    """
    if isinstance(function, str):
        return function
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name:
        raise ValueError(f"{name} cannot be imported by a rank; define it at the top level of a module")
    return name


def load_function(name: str) -> Callable[..., Any]:
    """Import what `function_name` named."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is {found!r}, expected a function")
    return found


def _portable(rank: int, value: Any) -> Any:
    """Make ``value`` fit to be pickled here and unpickled by a process that may lack its class."""
    if isinstance(value, BaseException):
        return RemoteError.of(rank, value)
    if isinstance(value, Mapping):
        return {key: _portable(rank, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_portable(rank, item) for item in value)
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return repr(value)
    return value
