"""Loaded states under the names that this run has for them, as Paddle's own setters take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle

from ..core.text import counted
from ..errors import StateDictMismatchError, UnsupportedValueError
from ..tree.names import Names
from ..tree.objects import state_of
from ..tree.paths import parse_path
from ..tree.state_dict import flatten
from .masters import copies_of
from .objects import in_own_dtypes
from .optimizers import MASTERS, check_optimizer, frozen_of, make_accumulators, optimizer_state
from .static_program import SCHEDULER
from .tensors import PaddleAdapter
from .wrappers import is_look_ahead, refusal, unwrapped

__all__ = ["model_state_of_run", "optimizer_state_of_run"]

_TOP = "/optimizer/"
_NOTHING = object()
"""In the place of what was not loaded."""


def model_state_of_run(loaded: Mapping[str, Any], model: Any, frozen: bool, variable_names: bool) -> dict[str, Any]:
    """See :func:`paddle_dist_ckpt.model_state_dict`; ``model`` is a layer."""
    own, left_out = state_of(model, "model"), set[int]()
    if not frozen:
        pairs = [*((one, one) for one in model.parameters()), *copies_of(model, own)]
        left_out = {id(entry) for parameter, entry in pairs if parameter.stop_gradient}
    state, problems = {}, list[str]()
    for key, entry in own.items():
        if id(entry) not in left_out:
            state[key] = loaded.get(key, _NOTHING)
            problems += _problems(key, state[key], entry)
    _raise(problems, "model")
    state = in_own_dtypes(model, state)  # the model's own state may have copies in another one
    if not variable_names:
        return state
    return {own[key].name if isinstance(own[key], paddle.Tensor) else key: one for key, one in state.items()}


def optimizer_state_of_run(loaded: Mapping[str, Any], model: Any, optimizer: Any) -> dict[str, Any]:
    """See :func:`paddle_dist_ckpt.optimizer_state_dict`; ``model`` is a layer, or a list or tuple of them."""
    refused = refusal(optimizer)
    if refused is None and is_look_ahead(unwrapped(optimizer)):
        refused = "set_state_dict() of Paddle's LookAhead does not reach the optimizer in it; load the object itself"
    if refused is not None:
        raise UnsupportedValueError(f"optimizer: {refused}")
    check_optimizer(optimizer, "optimizer")
    _make_of_frozen(loaded, model, optimizer)
    own = optimizer_state(optimizer)
    leaves = flatten({"model": model, "optimizer": optimizer}, PaddleAdapter(0))
    stored = {
        id(tensor): [str(part) for part in parse_path("/" + path.removeprefix(_TOP))]
        for path, tensor in zip(leaves.tensor_paths, leaves.tensors, strict=True)
        if path.startswith(_TOP)
    }
    problems: list[str] = []

    def take(tensor: Any) -> Any:
        parts = stored[id(tensor)]
        found: Any = loaded
        for part in parts:
            found = found.get(part, _NOTHING) if isinstance(found, Mapping) else _NOTHING
        problems.extend(_problems(".".join(parts), found, tensor))
        return found

    state = {key: take(value) for key, value in own.items() if isinstance(value, paddle.Tensor)}
    masters = {name: take(tensor) for name, tensor in own.get(MASTERS, {}).items()}
    others = [key for key in own if key not in state and key not in (MASTERS, SCHEDULER)]
    for key in others:  # values that a user's class adds
        state[key] = loaded.get(key, _NOTHING)
        problems += _problems(key, state[key], own[key])
    if SCHEDULER in own and not isinstance(loaded.get(SCHEDULER), Mapping):
        problems.append(f"{SCHEDULER}: missing")
    _raise(problems, "optimizer")
    if masters:
        # Accumulators are found by the names of the master weights, which Paddle's setter replaces by these tensors.
        state[MASTERS] = {name: _named(masters[name], own[MASTERS][name].name) for name in masters}
    if SCHEDULER in own:
        state[SCHEDULER] = dict(loaded[SCHEDULER])
    return state


def _make_of_frozen(loaded: Mapping[str, Any], model: Any, optimizer: Any) -> None:
    """Make accumulators for parameters that are not trained now, if there are such for them, as a load does."""
    frozen = set(map(id, frozen_of(optimizer)))
    if not frozen:
        return
    leaves = flatten({"model": model, "optimizer": dict(loaded)}, PaddleAdapter(0))
    variables = Names(leaves.tensor_paths, [None] * len(leaves.tensor_paths)).variables.values()
    kept = {path for variable in variables for path in variable.parameters}
    pairs = zip(leaves.tensor_paths, leaves.tensors, strict=True)
    make_accumulators(optimizer, [id(one) for path, one in pairs if path in kept and id(one) in frozen])


def _named(tensor: Any, name: str) -> Any:
    """A copy of a tensor, of this name."""
    copied = tensor.clone().detach()
    copied.name = name
    return copied


def _problems(key: str, found: Any, tensor: Any) -> list[str]:
    """Why a tensor, or a value, cannot be set to what was found for it, if it cannot."""
    is_tensor = isinstance(tensor, paddle.Tensor)
    if is_tensor and tensor.is_dist():
        return [f"{key}: is distributed in this run; load the object itself, which reads this rank's part"]
    if found is _NOTHING:
        return [f"{key}: missing"]
    if not is_tensor:
        return []
    if not isinstance(found, paddle.Tensor):
        return [f"{key}: a tensor is due, not a {type(found).__name__}"]
    if found.shape != tensor.shape:
        return [f"{key}: this run has shape {list(tensor.shape)}, the loaded tensor {list(found.shape)}"]
    if found.dtype != tensor.dtype:
        return [f"{key}: this run has dtype {tensor.dtype}, the loaded tensor {found.dtype}"]
    return []


def _raise(problems: list[str], what: str) -> None:
    if problems:
        lines = "\n".join(problems)
        raise StateDictMismatchError(
            f"the loaded state does not fit the {what}; {counted(len(problems), 'problem')}:\n{lines}", problems
        )
