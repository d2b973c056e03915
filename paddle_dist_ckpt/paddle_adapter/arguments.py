"""What users pass to ``save`` and ``load``: models, optimizers, groups and places of Paddle, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.base import core
from paddle.distributed.communication.group import Group

from .device import name_of
from .optimizers import is_optimizer, optimizer_state
from .wrappers import refusal, without_data_parallel

__all__ = ["each", "first_rank", "layers", "optimizers", "place_of", "state_of"]

# Classes of their own in Paddle 2.6
_PLACES = (core.Place, paddle.CPUPlace, core.CUDAPlace, core.CUDAPinnedPlace, core.XPUPlace, core.CustomPlace)


def layers(value: Any) -> Any:
    """The ``model`` that a user passed, without wrappers of data parallelism: a layer, or a list or tuple of them.

    Raises:
        TypeError: it is something else.
    """
    _check("model", value, lambda one: isinstance(one, paddle.nn.Layer), "paddle.nn.Layer")
    return each(value, without_data_parallel)


def optimizers(value: Any) -> Any:
    """The ``optimizer`` that a user passed: one of Paddle's, or a list or tuple of them.

    Raises:
        TypeError: it is something else.
    """
    _check("optimizer", value, is_optimizer, "paddle.optimizer.Optimizer")
    return value


def each(value: Any, function: Callable[[Any], Any]) -> Any:
    """What the function gives for a value, or for each in a list or tuple."""
    return type(value)(map(function, value)) if isinstance(value, (list, tuple)) else function(value)


def _check(name: str, value: Any, is_one: Callable[[Any], bool], kind: str) -> None:
    several = type(value) in (list, tuple)
    for i, one in enumerate(value if several else [value]):
        if not is_one(one):
            which = f"{name}[{i}] must be a {kind}" if several else f"{name} must be a {kind} or a list of them"
            refused = refusal(one)
            raise TypeError(f"{which}, not {_kind_of(one)}" + (f". {refused}" if refused else ""))


def state_of(value: Any) -> dict[str, Any]:
    """The present state of a layer or an optimizer. The tensors are its own, not copies."""
    return optimizer_state(value) if is_optimizer(value) else dict(value.state_dict())


def first_rank(group: Any) -> int:
    """Global rank of the first rank of a Paddle group; None is the default group.

    Raises:
        TypeError: it is no group.
    """
    if group is None:
        return 0
    if not isinstance(group, Group):
        raise TypeError(f"group must be None or a paddle.distributed group, not {_kind_of(group)}")
    return int(group.ranks[0])


def place_of(map_location: Any) -> str | None:
    """The place that ``map_location`` names, as Paddle's functions take it; None means Paddle's current device.

    Raises:
        TypeError: it is neither None, nor a str, nor a Place.
        ValueError: this Paddle has no such place.
    """
    if map_location is None:
        return None
    if not isinstance(map_location, (str, *_PLACES)):
        raise TypeError(f"map_location must be None, 'cpu' or another device, or a Place, not {_kind_of(map_location)}")
    try:
        name = map_location if isinstance(map_location, str) else name_of(map_location)
        paddle.device._convert_to_place(name)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"map_location is {map_location!r}, which this Paddle does not have: {error}") from None
    return name


def _kind_of(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
