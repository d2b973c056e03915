"""Paddle's own objects: the state of an optimizer without taking a step, and layers and optimizers given theirs back.

An optimizer's first step makes its accumulators. To load into a fresh optimizer they have to be there before, and
``state_dict()`` of an optimizer from ``shard_optimizer`` gets them by a step with gradients of zero, which changes the
parameters under weight decay. Here they are made as the step makes them, and nothing else happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.amp import AmpScaler
from paddle.base import framework
from paddle.base.layer_helper import LayerHelper
from paddle.distributed.auto_parallel import api

from ..errors import UnsupportedValueError
from ..tree.objects import is_stateful, set_state
from .static_program import SCHEDULER, SLICE, is_program, program_scheduler, set_program_state
from .wrappers import INNER, STEPS, is_look_ahead, is_of_paddle, is_wrapper, refusal, unwrapped, without_data_parallel

__all__ = [
    "MASTERS",
    "check_optimizer",
    "frozen_of",
    "in_own_dtypes",
    "is_defined_by_user",
    "is_object",
    "is_optimizer",
    "make_accumulators",
    "needs_all_entries",
    "optimizer_state",
    "own_tensors",
    "parameters_of",
    "restore",
    "state_of_parameter",
]

_SHARD_OPTIMIZER: Any = getattr(api, "_ShardOptimizer", ())
MASTERS = "master_weights"


def is_object(value: Any) -> bool:
    """Whether it is an object with a state_dict, also one that only passes on what it wraps, or one to be refused."""
    return is_stateful(value) or is_wrapper(value) or refusal(value) is not None


def is_optimizer(value: Any) -> bool:
    """Whether it is one of Paddle's optimizers, or what fleet or ``paddle.distributed.shard_optimizer`` made of one."""
    return isinstance(unwrapped(value), (paddle.optimizer.Optimizer, _SHARD_OPTIMIZER))


def is_defined_by_user(value: Any) -> bool:
    """Whether a layer's or an optimizer's ``state_dict`` and ``set_state_dict`` are both of classes outside Paddle."""
    value = unwrapped(value)
    if not is_optimizer(value) and not isinstance(value, paddle.nn.Layer):
        return False
    bases = type(_inner(value) if is_optimizer(value) else value).__mro__
    makers = [next(one for one in bases if name in vars(one)) for name in ("state_dict", "set_state_dict")]
    return not any(map(is_of_paddle, makers))


def _inner(optimizer: Any) -> Any:
    """The optimizer that holds the state."""
    optimizer = unwrapped(optimizer)
    return unwrapped(optimizer._inner_opt) if isinstance(optimizer, _SHARD_OPTIMIZER) else optimizer


# -- accumulators


def make_accumulators(optimizer: Any, thawed: Collection[int] = ()) -> None:
    """Make the accumulators and master weights that the first step would make for all parameters that are trained, and
    for those of these ids, which may be frozen.

    Parameters, learning rate and what exists already are left as they are. Accumulators of distributed parameters are
    distributed likewise. Ranks that share parameters must call it together. Optimizers that have no such accumulators
    are left alone.
    """
    optimizer = unwrapped(optimizer)
    create, groups = getattr(optimizer, "_create_accumulators", None), getattr(optimizer, "_param_groups", None)
    if create is None or not groups or not paddle.in_dynamic_mode():
        return
    owner = _inner(optimizer)
    if getattr(owner, "helper", None) is None:  # Paddle 2.6 makes it in the first step only
        owner.helper = LayerHelper(type(owner).__name__)
    masters = dict(getattr(owner, "_master_weights", {}))
    block = framework.default_main_program().global_block()
    held = _names_in_held(owner, parameters_of(optimizer))
    with paddle.no_grad():
        for is_held, group in itertools.product((True, False), groups if isinstance(groups[0], dict) else [None]):
            parameters = [
                each
                for each in (groups if group is None else group["params"])
                if (each.name in held) is is_held and _is_due(owner, each, thawed)
            ]
            if parameters:
                with nullcontext() if is_held else _nothing_held(owner):
                    create(block, parameters if group is None else {**group, "params": parameters})
                for parameter in parameters:
                    if not isinstance(optimizer, paddle.optimizer.Optimizer):  # in Paddle 2.6, that of shard_optimizer
                        optimizer._shard_accumulator(parameter)
                    _distribute(owner, parameter)
    if masters:  # shard_optimizer replaces those that exist by new tensors
        owner._master_weights.update(masters)
    _name_accumulators(owner)


def _names_in_held(optimizer: Any, parameters: Sequence[Any]) -> set[str]:
    """The names of the parameters for which Paddle may hold back a state that was set."""
    names = {one.name for one in parameters}
    held = getattr(optimizer, "_accumulators_holder", {})
    ends = ((name, [end for end, letter in enumerate(name) if letter == "_"]) for name in held)
    return {next((name[:end] for end in reversed(some) if name[:end] in names), "") for name, some in ends}


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
    if (parameter.stop_gradient and id(parameter) not in thawed) or parameter.name in getattr(
        optimizer, "_already_create_accumulator", ()
    ):
        return False
    names = _names(optimizer, parameter)
    if any(name in accumulators for accumulators in optimizer._accumulators.values() for name in names):
        return False
    return bool(parameter._is_initialized())


def frozen_of(optimizer: Any) -> list[Any]:
    """The parameters of an optimizer that are frozen, and for which it has no accumulators, or not yet."""
    owner = _inner(optimizer)
    if not hasattr(owner, "_accumulators") or is_look_ahead(owner):
        return []
    return [one for one in parameters_of(optimizer) if one.stop_gradient and _is_due(owner, one, [id(one)])]


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


def optimizer_state(optimizer: Any) -> dict[str, Any]:
    """All state of an optimizer as Paddle names and nests it, also of one that never took a step.

    The tensors are its own, not copies; the dicts are copies. To that of a LookAhead is added what Paddle leaves out:
    the state of the optimizer in it, and the number of steps.
    """
    make_accumulators(optimizer)
    owner = _inner(optimizer)
    state = dict(owner.state_dict())  # that of shard_optimizer may take a step
    if isinstance(state.get(MASTERS), dict):
        state[MASTERS] = dict(state[MASTERS])
    if is_look_ahead(owner):
        steps = owner._global_step_var
        state |= {INNER: optimizer_state(owner.inner_optimizer), STEPS: 0 if steps is None else int(steps)}
    return state


def check_optimizer(optimizer: Any, key: str) -> None:
    """Refuse optimizers whose state is elsewhere, or is not told apart from that of other ranks.

    Raises:
        UnsupportedValueError: this is one.
    """
    owner = _inner(optimizer)
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
    names = (name for by_name in (masters, *accumulators) for name in by_name)
    if any(name.startswith(SLICE) for name in names) or any(hasattr(one, "fw_storage") for one in parameters_of(owner)):
        raise UnsupportedValueError(
            f"{key}: this optimizer has slices of parameters, as group sharding's stage 3 makes them on each rank, and "
            "they do not say of what; save the model alone, or shard by fleet's stage 1 or by "
            "paddle.distributed.shard_optimizer"
        )
    if getattr(owner, "enable_tensor_fusion", False):
        raise UnsupportedValueError(
            f"{key}: this optimizer joins parameters in buffers, of which each rank steps a piece, and what it has for "
            "its piece does not say of what; train without _enable_tensor_fusion(), or save the model alone"
        )


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters that an optimizer steps; of a sharded one, those that it steps on this rank."""
    groups = getattr(unwrapped(optimizer), "_param_groups", None) or []
    return [one for group in groups for one in (group["params"] if isinstance(group, dict) else [group])]


def state_of_parameter(optimizer: Any, parameter: Any) -> list[Any]:
    """What an optimizer has for one of its parameters: accumulators, and a master weight."""
    owner = _inner(optimizer)
    names = _names(owner, parameter)
    masters = [one for name, one in getattr(owner, "_master_weights", {}).items() if name in names]
    inner = state_of_parameter(owner.inner_optimizer, parameter) if is_look_ahead(owner) else []
    tables = getattr(owner, "_accumulators", {}).values()
    return [*masters, *inner, *(one for by_name in tables for name, one in by_name.items() if name in names)]


def needs_all_entries(value: Any) -> bool:
    """Whether it is a scheduler or a scaler of Paddle's, which refuses a state without an entry that it has now."""
    value = unwrapped(value)
    return is_of_paddle(type(value)) and isinstance(value, (paddle.optimizer.lr.LRScheduler, AmpScaler))


# -- given back


def restore(value: Any, state: dict[str, Any]) -> list[str]:
    """Give an object its state back, whose tensors were filled in place.

    Returns:
        The entries that its class adds to ``state_dict()``, and which Paddle's ``set_state_dict()`` does not take.

    Raises:
        UnsupportedValueError: so are copies of parameters or buffers, which have kept what they had.
    """
    value = unwrapped(value)
    if isinstance(value, paddle.DataParallel) and not _overrides(value, paddle.DataParallel):
        value = without_data_parallel(value)
    if isinstance(value, paddle.nn.Layer):
        return _restore_layer(value, state)
    if is_optimizer(value):
        return _restore_optimizer(value, state)
    if is_program(value):
        set_program_state(value, state)
        _restore_rate(program_scheduler(value), state)
    elif isinstance(value, paddle.optimizer.lr.LRScheduler):
        _restore_scheduler(value, state)
    else:
        set_state(value, state)
    return []


def _restore_layer(layer: Any, state: dict[str, Any]) -> list[str]:
    """Give a layer its state back: what ``state_dict()`` returned, with the tensors filled in place.

    These are the layer's own, and there is nothing left to do, unless a hook on ``state_dict()`` has made copies of
    another dtype (``amp.decorate(save_dtype=...)``), or the class has its own ``state_dict`` or ``set_state_dict``.

    Returns:
        See :func:`restore`. Nothing of a class with its own ``set_state_dict``, which may have taken what Paddle's says
        is not expected.
    """
    filled = set(map(id, state.values()))
    own = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    has_setter = _overrides(layer, paddle.nn.Layer)
    if not has_setter and filled <= own:
        return []
    given = dict(state)  # which a class's own setter may take apart
    taken = layer.set_state_dict(in_own_dtypes(layer, state))
    missing, unexpected = taken if isinstance(taken, tuple) and len(taken) == 2 else ((), ())
    not_taken = [key for key in unexpected if key in given and id(given[key]) not in own]
    names = set(missing)  # a wrapper's setter says them without the wrapper's own name for what it wraps
    lost = [
        tensor
        for key, tensor in (own_tensors(layer).items() if names else ())
        if id(tensor) not in filled and not names.isdisjoint(key[at:] for at in _starts(key))
    ]
    copies = [key for key in not_taken if isinstance(given[key], paddle.Tensor)]
    if has_setter:  # it may have given them to what is no parameter, if they are not just like one
        shapes = [list(tensor.shape) for tensor in lost]
        copies = [key for key in copies if key in names or list(given[key].shape) in shapes]
    if lost and copies:
        raise UnsupportedValueError(
            f"its state_dict() has copies under names that its set_state_dict() passes over: "
            f"{', '.join(map(str, copies[:5]))}{', ...' * (len(copies) > 5)}"
        )
    return [] if has_setter else not_taken


def _starts(key: str) -> list[int]:
    """Where the parts of a key with dots start."""
    return [0, *(i + 1 for i, letter in enumerate(key) if letter == ".")]


def own_tensors(layer: Any) -> dict[str, Any]:
    """A layer's parameters and buffers by all keys that they have, where a hook on ``state_dict()`` is left out."""
    own = dict(layer._state_dict_impl(use_hook=False))
    return {key: tensor for key, tensor in own.items() if isinstance(tensor, paddle.Tensor)}


def in_own_dtypes(layer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The state with each tensor in its dtype in the layer; ``set_state_dict`` takes no other. For a class with its own
    it is the state itself."""
    if _overrides(layer, paddle.nn.Layer):
        return state
    by_key = own_tensors(layer)
    by_name = {tensor.name: tensor for tensor in by_key.values()}
    converted = dict(state)
    for key, value in state.items():
        if isinstance(value, paddle.Tensor):
            target = by_key.get(key, by_name.get(value.name))
            if target is not None and target.dtype != value.dtype:
                converted[key] = value.cast(target.dtype)
    return converted


def _restore_optimizer(optimizer: Any, state: dict[str, Any]) -> list[str]:
    """Give an optimizer its state back: what :func:`optimizer_state` returned, with the tensors filled in place.

    What is left to do is the learning rate's scheduler; for a LookAhead, the optimizer in it and the number of steps. A
    class with its own ``set_state_dict`` gets everything. Returns what :func:`restore` does.
    """
    not_taken = []
    owner = _inner(optimizer)
    if is_look_ahead(owner):
        state = dict(state)
        not_taken += _restore_optimizer(owner.inner_optimizer, state.pop(INNER, {}))
        _set_steps(owner, state.pop(STEPS, 0))
    if _overrides(owner, paddle.optimizer.Optimizer):
        owner.set_state_dict(dict(state))
        return not_taken
    _restore_rate(getattr(owner, "_learning_rate", None), state)
    if not is_of_paddle(type(owner)):  # a class that adds to the state, and does not take it back
        tables = [getattr(owner, "_master_weights", {}), *getattr(owner, "_accumulators", {}).values()]
        own = {id(tensor) for by_name in tables for tensor in by_name.values()}
        not_taken += [key for key, one in state.items() if key not in (SCHEDULER, MASTERS) and id(one) not in own]
    return not_taken


def _set_steps(optimizer: Any, steps: int) -> None:
    """Let a LookAhead have taken so many steps."""
    if optimizer._global_step_var is None and steps:
        optimizer._increment_global_var()  # which makes it
    if optimizer._global_step_var is not None:
        optimizer._global_step_var.set_value(paddle.full([1], steps, "int32"))


def _restore_rate(scheduler: Any, state: dict[str, Any]) -> None:
    """Give the scheduler of an optimizer's or program's learning rate, if it has one, its state out of theirs."""
    if state.get(SCHEDULER) and isinstance(scheduler, paddle.optimizer.lr.LRScheduler):
        _restore_scheduler(scheduler, state[SCHEDULER])


def _restore_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Give a scheduler its state back so that it goes on as it would have.

    ``CosineAnnealingWarmRestarts`` leaves out of its state where it is between two restarts. It follows from the epoch.
    """
    scheduler.set_state_dict(state)
    if isinstance(scheduler, paddle.optimizer.lr.CosineAnnealingWarmRestarts) and scheduler.last_epoch >= 0:
        since, length = scheduler.last_epoch, scheduler.T_0
        while since >= length:
            since, length = since - length, length * scheduler.T_mult
        scheduler.T_cur, scheduler.T_i = since, length


def _overrides(value: Any, base: Any) -> bool:
    """Whether an object's ``set_state_dict`` is another one than that of its base class."""
    return type(value).set_state_dict is not base.set_state_dict or "set_state_dict" in vars(value)
