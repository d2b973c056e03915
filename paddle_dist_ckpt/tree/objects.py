"""Objects in a state_dict that have a state_dict of their own: how they are opened, and how they are set."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import CheckpointError, UnsupportedValueError

__all__ = ["ObjectKind", "OpenedObject", "is_stateful", "set_state", "state_of"]

_MOST_TEXT = 1000  # characters of an error
_SETTERS = ("set_state_dict", "load_state_dict")


class ObjectKind(Enum):
    """What is asked of a checkpoint for an object.

    Attributes:
        FIXED: The entries that its state_dict has now, and no others.
        OPTIMIZER: Likewise; its entries, but for parameters, are named after the parameters.
        PROGRAM: Likewise; of its values, which are not tensors, none need be stored.
        FREE: All values and numpy arrays that are stored for it, whatever it has now; and the tensors that it has now.
    """

    FIXED = "fixed"
    OPTIMIZER = "optimizer"
    PROGRAM = "program"
    FREE = "free"


@dataclass(frozen=True, slots=True, eq=False)
class OpenedObject:
    """An object that was found in a state_dict.

    Attributes:
        path: Where.
        value: It.
        kind: What kind it is of.
        state: Its state_dict.
    """

    path: str
    value: Any
    kind: ObjectKind
    state: dict[Any, Any]


def is_stateful(value: Any) -> bool:
    """Whether a value is an object with ``state_dict()`` and with ``set_state_dict()`` or ``load_state_dict()``."""
    kind = type(value)
    return hasattr(kind, "state_dict") and any(hasattr(kind, name) for name in _SETTERS)


def state_of(value: Any, key: str) -> dict[Any, Any]:
    """An object's state_dict.

    Raises:
        CheckpointError: the object does not give it.
        UnsupportedValueError: it is not a dict.
    """
    try:
        state = value.state_dict()
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        said = type(error).__name__
        with suppress(Exception):  # it may have no text
            said += f": {error}"[:_MOST_TEXT]
        raise CheckpointError(f"{key}: state_dict() of this {type(value).__name__} failed: {said}") from error
    if not isinstance(state, dict):
        raise UnsupportedValueError(
            f"{key}: state_dict() of this {type(value).__name__} returned a {type(state).__name__}; a dict is due"
        )
    return state


def set_state(value: Any, state: dict[Any, Any]) -> None:
    """Give an object its state back."""
    name = next(name for name in _SETTERS if hasattr(value, name))
    getattr(value, name)(state)
