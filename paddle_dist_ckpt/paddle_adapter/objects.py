"""Objects of Paddle that have a state: which they are, and how layers and optimizers are given theirs back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle
from paddle.amp import AmpScaler

from ..errors import UnsupportedValueError
from ..tree.objects import is_stateful, set_state
from .optimizers import MASTERS, inner_optimizer, is_optimizer
from .static_program import SCHEDULER, is_program, program_scheduler, set_program_state
from .wrappers import INNER, STEPS, is_look_ahead, is_of_paddle, refusal, unwrapped, without_data_parallel

__all__ = [
    "in_own_dtypes",
    "is_defined_by_user",
    "is_object",
    "may_be_disabled",
    "needs_all_entries",
    "own_tensors",
    "restore",
]


def is_object(value: Any) -> bool:
    """Whether it is an object with a state_dict, also one that only passes on what it wraps, or one to be refused."""
    return is_stateful(value) or unwrapped(value) is not value or refusal(value) is not None


def is_defined_by_user(value: Any) -> bool:
    """Whether a layer's or an optimizer's ``state_dict`` and ``set_state_dict`` are both of classes outside Paddle."""
    value = unwrapped(value)
    if not is_optimizer(value) and not isinstance(value, paddle.nn.Layer):
        return False
    bases = type(inner_optimizer(value) if is_optimizer(value) else value).__mro__
    makers = [next(one for one in bases if name in vars(one)) for name in ("state_dict", "set_state_dict")]
    return not any(map(is_of_paddle, makers))


def needs_all_entries(value: Any) -> bool:
    """Whether it is a scheduler or a scaler of Paddle's, which refuses a state without an entry that it has now."""
    value = unwrapped(value)
    return is_of_paddle(type(value)) and isinstance(value, (paddle.optimizer.lr.LRScheduler, AmpScaler))


def may_be_disabled(value: Any) -> bool:
    """Whether it is a scaler of Paddle's, which has an empty state while it is disabled."""
    return isinstance(unwrapped(value), AmpScaler)


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
    owner = inner_optimizer(optimizer)
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

    ``CosineAnnealingWarmRestarts`` leaves out of its state where it is between two restarts. It follows from the epoch;
    also in another scheduler, such as one of a user's that takes several in turn. What has it right keeps it: a user's
    may have stored it, with the parts of epochs that steps can be.
    """
    scheduler.set_state_dict(state)
    for one in _schedulers(scheduler):
        if isinstance(one, paddle.optimizer.lr.CosineAnnealingWarmRestarts) and one.last_epoch >= 0:
            since, length = one.last_epoch, one.T_0
            while since >= length:
                since, length = since - length, length * one.T_mult
            if one.T_i != length or not since <= one.T_cur < since + 1:
                one.T_cur, one.T_i = since, length


def _schedulers(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those that it has, also in dicts, lists and tuples."""
    seen, left = set[int](), [scheduler]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, paddle.optimizer.lr.LRScheduler):
            yield value
            value = vars(value)
        parts = dict.values(value) if isinstance(value, dict) else value
        left += [one for one in parts if isinstance(one, (paddle.optimizer.lr.LRScheduler, dict, list, tuple))]


def _overrides(value: Any, base: Any) -> bool:
    """Whether an object's ``set_state_dict`` is another one than that of its base class."""
    return type(value).set_state_dict is not base.set_state_dict or "set_state_dict" in vars(value)
