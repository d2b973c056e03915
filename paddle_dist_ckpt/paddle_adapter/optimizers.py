"""The state of Paddle's optimizers, also of one that has not taken a step.

An optimizer's first step makes its accumulators. To load into a fresh optimizer they have to be there before, and
``state_dict()`` of an optimizer from ``shard_optimizer`` gets them by a step with gradients of zero, which changes the
parameters under weight decay. Here they are made as the step makes them, and nothing else happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import paddle
import paddle.distributed as dist
from paddle.base import framework, unique_name
from paddle.base.layer_helper import LayerHelper
from paddle.distributed.auto_parallel import api

from ..errors import UnsupportedValueError
from ..tree.objects import state_of
from .static_program import JOINED, SLICE
from .wrappers import INNER, STEPS, is_look_ahead, unwrapped

__all__ = [
    "MASTERS",
    "check_optimizer",
    "frozen_of",
    "inner_optimizer",
    "is_optimizer",
    "make_accumulators",
    "optimizer_state",
    "parameters_of",
    "state_of_parameter",
]

_SHARD_OPTIMIZER: Any = getattr(api, "_ShardOptimizer", ())
MASTERS = "master_weights"
_unfinished: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Of optimizers the names of parameters for which making accumulators has begun. Where it failed, some are there."""


def is_optimizer(value: Any) -> bool:
    """Whether it is one of Paddle's optimizers, or what fleet or ``paddle.distributed.shard_optimizer`` made of one."""
    return isinstance(unwrapped(value), (paddle.optimizer.Optimizer, _SHARD_OPTIMIZER))


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that holds the state."""
    optimizer = unwrapped(optimizer)
    return unwrapped(optimizer._inner_opt) if isinstance(optimizer, _SHARD_OPTIMIZER) else optimizer


# -- accumulators


def make_accumulators(optimizer: Any, thawed: Collection[int] = ()) -> None:
    """Make the accumulators and master weights that the first step would make for all parameters that are trained, and
    for those of these ids, which may be frozen.

    Parameters, learning rate and what exists already are left as they are. Accumulators of distributed parameters are
    distributed likewise. Ranks that share parameters must call it together. Optimizers that have no such accumulators
    are left alone. Of a LookAhead the optimizer in it gets its own, too.
    """
    optimizer = unwrapped(optimizer)
    if is_look_ahead(inner_optimizer(optimizer)):
        make_accumulators(inner_optimizer(optimizer).inner_optimizer, thawed)
    create, groups = getattr(optimizer, "_create_accumulators", None), getattr(optimizer, "_param_groups", None)
    if create is None or not groups or not paddle.in_dynamic_mode():
        return
    owner = inner_optimizer(optimizer)
    if getattr(owner, "helper", None) is None:  # Paddle 2.6 makes it in the first step only
        owner.helper = LayerHelper(type(owner).__name__)
    masters = dict(getattr(owner, "_master_weights", {}))
    block = framework.default_main_program().global_block()
    held = _names_in_held(owner, parameters_of(optimizer))
    with paddle.no_grad():
        for is_held, group in itertools.product((True, False), groups if isinstance(groups[0], dict) else [None]):
            for parameter in groups if group is None else group["params"]:
                if (parameter.name in held) is not is_held or not _is_due(owner, parameter, thawed):
                    continue
                _unfinished.setdefault(owner, set()).add(parameter.name)
                with _held_back(owner, held[parameter.name]) if is_held else _nothing_held(owner):
                    create(block, [parameter] if group is None else {**group, "params": [parameter]})
                if not isinstance(optimizer, paddle.optimizer.Optimizer):  # in Paddle 2.6, that of shard_optimizer
                    optimizer._shard_accumulator(parameter)
                _distribute(owner, parameter)
                _unfinished[owner].remove(parameter.name)
    if masters:  # shard_optimizer replaces those that exist by new tensors
        owner._master_weights.update(masters)
    _name_accumulators(owner)


def _names_in_held(optimizer: Any, parameters: Sequence[Any]) -> dict[str, list[str]]:
    """Of each parameter for which Paddle holds back a state that was set, by name, the names of what it has of that."""
    names = {one.name for one in parameters}
    found = dict[str, list[str]]()
    for name in getattr(optimizer, "_accumulators_holder", {}):
        ends = (end for end in range(len(name) - 1, 0, -1) if name[end] == "_")
        found.setdefault(next((name[:end] for end in ends if name[:end] in names), ""), []).append(name)
    return found


@contextmanager
def _held_back(optimizer: Any, names: Collection[str]) -> Iterator[None]:
    """Where making a parameter's accumulators fails midway, hold back again what Paddle took for one that is not there,
    and give its number again, by which Paddle asks for it."""
    held, numbers = optimizer._accumulators_holder, unique_name.generator.ids
    before = [(name, held[name], start := name.rpartition("_")[0], numbers.get(start, 0)) for name in names]
    try:
        yield
    except BaseException:
        made = {one.name for accumulators in optimizer._accumulators.values() for one in accumulators.values()}
        for name, value, start, number in before:
            if name not in made:
                held[name], numbers[start] = value, number
        raise


@contextmanager
def _nothing_held(optimizer: Any) -> Iterator[None]:
    """As long as Paddle holds anything back, it makes no accumulators for a parameter that has nothing in it, such as
    one that was never used; and what others left there, such as frozen ones, is kept for them."""
    held = getattr(optimizer, "_accumulators_holder", {})
    optimizer._accumulators_holder = {}
    try:
        yield
    finally:
        optimizer._accumulators_holder = held


def _is_due(optimizer: Any, parameter: Any, thawed: Collection[int]) -> bool:
    """Whether the first step would make accumulators for this parameter.

    A parameter without memory belongs to other ranks, which alone step it.
    """
    if parameter.stop_gradient and id(parameter) not in thawed:
        return False
    if parameter.name not in _unfinished.get(optimizer, ()):
        made = [getattr(optimizer, "_already_create_accumulator", ()), *optimizer._accumulators.values()]
        if any(name in one for one in made for name in _names(optimizer, parameter)):
            return False
    return bool(parameter._is_initialized())


def frozen_of(optimizer: Any) -> list[Any]:
    """The parameters of an optimizer that are frozen, and for which it has no accumulators, or not yet."""
    owner = inner_optimizer(optimizer)
    if not hasattr(owner, "_accumulators"):
        return []
    frozen = [one for one in parameters_of(optimizer) if one.stop_gradient and _is_due(owner, one, [id(one)])]
    if not is_look_ahead(owner):
        return frozen
    known = set(map(id, frozen))
    return frozen + [one for one in frozen_of(owner.inner_optimizer) if id(one) not in known]


def _names(optimizer: Any, parameter: Any) -> tuple[str, ...]:
    """The names under which a parameter's accumulators may be kept: its own, and its master weight's."""
    master = getattr(optimizer, "_master_weights", {}).get(parameter.name)
    return (parameter.name,) if master is None else (parameter.name, master.name)


def _name_accumulators(optimizer: Any) -> None:
    """Give accumulators back the names in place of which shard_optimizer of Paddle 2.6 numbers them."""
    for kind, accumulators in optimizer._accumulators.items():
        for name, accumulator in accumulators.items():
            if accumulator.name.startswith("generated_tensor_"):
                accumulator.name = f"{name}_{kind}_0"


def _distribute(optimizer: Any, parameter: Any) -> None:
    """Distribute a parameter's accumulators as the parameter is, and powers of the betas everywhere.

    Paddle's first step takes them as whole tensors, and distributes them on the way. Accumulators of another shape
    than the parameter's stay whole then, too.
    """
    if not parameter.is_dist():
        return
    mesh, everywhere = parameter.process_mesh, [dist.Replicate()] * len(parameter.process_mesh.shape)
    for kind, accumulators in optimizer._accumulators.items():
        for name in _names(optimizer, parameter):
            whole = accumulators.get(name)
            if whole is None or whole.is_dist() or ("beta" not in kind and whole.shape != parameter.shape):
                continue
            spread = dist.shard_tensor(whole, mesh, everywhere if "beta" in kind else parameter.placements)
            spread.name = whole.name
            accumulators[name] = spread


# -- state


def optimizer_state(optimizer: Any, key: str = "optimizer") -> dict[str, Any]:
    """All state of an optimizer as Paddle names and nests it, also of one that never took a step.

    The tensors are its own, not copies; the dicts are copies. To that of a LookAhead is added what Paddle leaves out:
    the state of the optimizer in it, and the number of steps.

    Args:
        optimizer: The optimizer.
        key: What it is called, in errors.

    Raises:
        CheckpointError, UnsupportedValueError: see :func:`..tree.objects.state_of`.
    """
    make_accumulators(optimizer)
    owner = inner_optimizer(optimizer)
    state = dict(state_of(owner, key))  # that of shard_optimizer may take a step
    if isinstance(state.get(MASTERS), dict):
        state[MASTERS] = dict(state[MASTERS])
    if is_look_ahead(owner):
        steps = owner._global_step_var
        state |= {INNER: optimizer_state(owner.inner_optimizer, key), STEPS: 0 if steps is None else int(steps)}
    return state


def check_optimizer(optimizer: Any, key: str) -> None:
    """Refuse optimizers whose state is elsewhere, or is not told apart from that of other ranks.

    Raises:
        UnsupportedValueError: this is one.
    """
    owner = inner_optimizer(optimizer)
    if is_look_ahead(owner):
        check_optimizer(owner.inner_optimizer, key)
    accumulators = getattr(owner, "_accumulators", {}).values()
    # A static-graph program has taken its variables over. Paddle's own state_dict() crashes then.
    if any(not isinstance(value, paddle.Tensor) for by_name in accumulators for value in by_name.values()):
        raise UnsupportedValueError(f"{key}: this optimizer belongs to a static-graph program; use the DistModel")
    if any(not one.is_dist() and getattr(one, "is_distributed", False) for one in parameters_of(optimizer)):
        raise UnsupportedValueError(
            f"{key}: this optimizer steps parameters that are marked is_distributed, which are one rank's parts of "
            "larger ones; use its sharded_state_dict(), which says which"
        )
    masters = getattr(owner, "_master_weights", {})
    names = [name for by_name in (masters, *accumulators) for name in by_name]
    if any(name.startswith(SLICE) for name in names) or any(hasattr(one, "fw_storage") for one in parameters_of(owner)):
        raise UnsupportedValueError(
            f"{key}: this optimizer has slices of parameters, as group sharding's stage 3 makes them on each rank, and "
            "they do not say of what. From Paddle 3.3 on its sharded_state_dict() says it, after the model's "
            "get_all_parameters(); or shard by fleet's stage 1, or by paddle.distributed.shard_optimizer"
        )
    if getattr(owner, "enable_tensor_fusion", False):
        raise UnsupportedValueError(
            f"{key}: this optimizer joins parameters in buffers, of which each rank steps a piece, and what it has for "
            "its piece does not say of what; train without _enable_tensor_fusion(), or save the model alone"
        )
    if any(name.startswith(JOINED) for name in names):
        raise UnsupportedValueError(
            f"{key}: this optimizer steps a rank's pieces of buffers in which fully_shard() joins parameters, and what "
            "it has for these does not say of what; train with fully_shard(..., enable_tensor_fusion_and_overlap=False)"
        )


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters that an optimizer steps; of a sharded one, those that it steps on this rank."""
    groups = getattr(unwrapped(optimizer), "_param_groups", None) or []
    return [one for group in groups for one in (group["params"] if isinstance(group, dict) else [group])]


def state_of_parameter(optimizer: Any, parameter: Any) -> list[Any]:
    """What an optimizer has for one of its parameters: accumulators, and a master weight."""
    owner = inner_optimizer(optimizer)
    names = _names(owner, parameter)
    masters = [one for name, one in getattr(owner, "_master_weights", {}).items() if name in names]
    inner = state_of_parameter(owner.inner_optimizer, parameter) if is_look_ahead(owner) else []
    tables = getattr(owner, "_accumulators", {}).values()
    return [*masters, *inner, *(one for by_name in tables for name, one in by_name.items() if name in names)]
