"""Models and optimizers that every rank has alike, as data-parallel training keeps them, and what a user calls them.

Plain tensors are divided among ranks once their contents have been compared. Parameters, and what an optimizer keeps
for them, need no comparison: they are handed to the engine as tensors of which each rank has all, so that the ranks
divide them. Buffers and other statistics, which differ among the ranks, stay plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import paddle
from paddle.base import core
from paddle.distributed.communication.group import Group

from ..tree.objects import ObjectKind
from .device import name_of
from .objects import is_optimizer, optimizer_state
from .tensors import PaddleAdapter

__all__ = ["ReplicaAdapter", "each", "first_rank", "layers", "optimizers", "place_of", "state_of"]

# Classes of their own in Paddle 2.6
_PLACES = (core.Place, paddle.CPUPlace, core.CUDAPlace, core.CUDAPinnedPlace, core.XPUPlace, core.CustomPlace)


class _Replica:
    """A whole tensor that other ranks have too; see :mod:`.sharded_weight` for the attributes."""

    __slots__ = ("global_offset", "global_shape", "local_shape", "local_tensor")
    is_flattened = False
    flattened_range = None

    def __init__(self, tensor: Any) -> None:
        self.local_tensor = tensor
        self.local_shape = self.global_shape = tensor.shape
        self.global_offset = [0] * len(tensor.shape)


class ReplicaAdapter(PaddleAdapter):
    """Lets ranks divide the parameters of some layers, and all tensors of some optimizers, when they save them.

    Args:
        rank: This process's global rank.
        replicated: These layers and optimizers.
    """

    def __init__(self, rank: int, replicated: Iterable[Any]) -> None:
        super().__init__(rank)
        self._replicated = {id(value): value for value in replicated}

    def open_object(self, value: Any, key: str) -> tuple[ObjectKind, dict[Any, Any]]:
        """See :class:`..core.tensors.TensorAdapter`."""
        kind, state = super().open_object(value, key)
        if id(value) not in self._replicated:
            return kind, state
        if kind is ObjectKind.OPTIMIZER:
            return kind, _divisible(state)
        named = {name: one for name, one in value.named_parameters() if not _may_be_statistic(one)}
        own = {id(parameter) for parameter in named.values()}
        # By name too, for a hook on state_dict() may have made copies; by id too, for a shared parameter has one name.
        return kind, {k: _divisible(v) if k in named or id(v) in own else v for k, v in state.items()}


def _may_be_statistic(parameter: Any) -> bool:
    """Whether it may be a running statistic, which differs among ranks.

    Paddle's layers (BatchNorm, SpectralNorm) keep theirs in parameters of one dimension that are not trained.
    """
    return bool(parameter.stop_gradient) and parameter.ndim < 2


def _divisible(value: Any) -> Any:
    """A tensor, or all tensors in a dict, as replicas. What is distributed says itself where it is."""
    if isinstance(value, dict):
        return {key: _divisible(child) for key, child in value.items()}
    if not isinstance(value, paddle.Tensor) or value.is_dist() or not value.is_dense():
        return value
    return value if getattr(value, "is_distributed", False) else _Replica(value)  # a plain part of one is refused


def layers(value: Any) -> Any:
    """The ``model`` that a user passed, without wrappers of data parallelism: a layer, or a list or tuple of them.

    Raises:
        TypeError: it is something else.
    """
    _check("model", value, lambda one: isinstance(one, paddle.nn.Layer), "paddle.nn.Layer")
    return each(value, _without_wrapper)


def _without_wrapper(layer: Any) -> Any:
    while isinstance(layer, paddle.DataParallel):
        layer = layer._layers
    return layer


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
            raise TypeError(f"{which}, not {_kind_of(one)}")


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
