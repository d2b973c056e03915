"""Static-graph programs: the state of a DistModel, and the names of the variables behind a program's tensors.

``DistModel.state_dict()`` gives new tensors over the memory of the program's variables. They are called by throw-away
names; the variables' own names are found by the memory, in the scope in which programs run.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import paddle
from paddle.distributed.auto_parallel import api

from ..errors import UnsupportedValueError

__all__ = [
    "JOINED",
    "OFFLOADED",
    "SCHEDULER",
    "SLICE",
    "all_of_program",
    "is_program",
    "program_layer",
    "program_scheduler",
    "program_state",
    "set_program_state",
    "variables_by_address",
]

_DIST_MODEL: Any = getattr(api, "DistModel", ())
SLICE = "slice@"
"""So the names begin of a rank's parts of what tensor fusion has joined, or group sharding's stage 3 has cut, which do
not say what parts they are."""
OFFLOADED = "offload_buffer"
"""So the names begin of the buffer that has a rank's master weights in group sharding's stage 2 with offload=True."""
JOINED = "fuse_params_"
"""So the names begin of a rank's pieces of the buffers in which fully_shard() joins parameters."""
_CONSTANT = re.compile(r"(eager_tmp|generated_tensor)_\d+(\.dist)?")
_SHARED = "shared_"  # so the names begin of copies of parameters that several pipeline stages use
SCHEDULER = "LR_Scheduler"  # where states of optimizers and programs have that of their learning rate's scheduler


def is_program(value: Any) -> bool:
    """Whether it is a DistModel, which ``paddle.distributed.to_static`` makes."""
    return isinstance(value, _DIST_MODEL)


def program_state(model: Any, key: str, of_any_mode: bool = False) -> dict[str, Any]:
    """The state of a DistModel: parameters under structured names, all others under their variables' names.

    What Paddle leaves out is added: other names of tied parameters, and the state of the learning rate's scheduler.
    What layers do not have in their states is left out. The tensors are the program's memory.

    Args:
        model: The DistModel.
        key: What it is called.
        of_any_mode: Whether all of it is asked for, and not only what it has in its mode: parameters, but to train.

    Raises:
        UnsupportedValueError: it has no state yet, or ranks have different parts of it under one name.
    """
    engine = getattr(model, "_engine", None)
    if getattr(model, "_mode", None) is None or getattr(engine, "_executor", True) is None:
        raise UnsupportedValueError(
            f"{key}: this DistModel has no state yet: only train() moves the layer's parameters into the program; call "
            "it first, and then eval() or predict() if you need these"
        )
    try:
        state = all_of_program(model) if of_any_mode else dict(model.state_dict())
    except Exception as error:
        raise UnsupportedValueError(
            f"{key}: this DistModel has no state ({type(error).__name__}: {error}); was it set to train() before?"
        ) from error
    fused = next((name for name in state if SLICE in name), None)
    if fused is not None:
        raise UnsupportedValueError(
            f"{key}: this DistModel has {fused!r}, a part of a buffer in which sharding's enable_tensor_fusion joins "
            "parameters; ranks have different parts under one such name, and nothing says which. Train without it"
        )
    _leave_out_constants(model, state)
    _name_shared(model, state)
    _add_tied(model, state)
    scheduler = program_scheduler(model)
    if scheduler is not None and SCHEDULER not in state:
        state[SCHEDULER] = scheduler.state_dict()
    return state


def all_of_program(model: Any) -> dict[str, Any]:
    """What Paddle gives of a DistModel in train mode, in whatever mode it is. That is left as it is, for another thread
    that runs the model: it would take a step."""
    in_training = copy.copy(model)
    in_training._engine = copy.copy(model._engine)
    in_training._engine._mode = in_training._mode = "train"
    return dict(in_training.state_dict())


def _leave_out_constants(model: Any, state: dict[str, Any]) -> None:
    """Leave out other tensors that the layer uses, such as buffers that are not persistable: each run makes them anew,
    and by its numbers for them another run may call others. What the loss has in its state is left, though."""
    loss = getattr(getattr(model, "_engine", None), "_loss", None)
    kept = {one.name for one in loss.state_dict().values()} if isinstance(loss, paddle.nn.Layer) else set()
    for name in [name for name in state if _CONSTANT.fullmatch(name) and name not in kept]:
        del state[name]


def _name_shared(model: Any, state: dict[str, Any]) -> None:
    """Give a later pipeline stage's copy of a parameter, as ``auto_parallel_sync_shared_params`` makes it, the key that
    the parameter has in the layer; the stage itself does not have that. Both are stepped alike."""
    for name, key in getattr(model, "_parameter_to_structured_name", {}).items():
        if key not in state and f"{_SHARED}{name}" in state:
            state[key] = state.pop(f"{_SHARED}{name}")


def _add_tied(model: Any, state: dict[str, Any]) -> None:
    """Add tied parameters under all names that the layer has for them, as its own state has them; Paddle has the last
    one only."""
    chosen = getattr(model, "_parameter_to_structured_name", {})
    for name, parameter in getattr(model, "_structured_to_parameter_name", {}).items():
        if name not in state and (known := chosen.get(parameter)) in state:
            state[name] = state[known]


def program_layer(model: Any) -> Any | None:
    """The layer that a DistModel was made of. What it says of its parameters holds, but they have no memory."""
    return getattr(getattr(model, "_engine", None), "_model", None)


def program_scheduler(model: Any) -> Any | None:
    """The scheduler of a DistModel's learning rate, if it has one."""
    optimizer = getattr(getattr(model, "_engine", None), "_optimizer", None)
    optimizer = getattr(optimizer, "_inner_opt", optimizer)  # that of shard_optimizer
    found = getattr(optimizer, "_learning_rate", None)
    return found if isinstance(found, paddle.optimizer.lr.LRScheduler) else None


def set_program_state(model: Any, state: dict[str, Any]) -> None:
    """Give a DistModel back what :func:`program_state` gave, each tensor under the name of its variable."""
    names = variables_by_address()
    tensors = {key: one for key, one in state.items() if isinstance(one, paddle.Tensor)}
    model.set_state_dict({names.get(one.data_ptr(), key): one for key, one in tensors.items()})


def variables_by_address() -> dict[int, str]:
    """The names of the variables that programs have, by where their memory starts."""
    scope = paddle.static.global_scope()
    if not hasattr(scope, "local_var_names"):  # before Paddle 3.0
        return {}
    found: dict[int, str] = {}
    for name in sorted(scope.local_var_names(), reverse=True):
        variable = scope.find_var(name)
        try:
            tensor = variable.get_tensor()
            address = tensor._ptr() if tensor._is_initialized() else 0
        except (AttributeError, RuntimeError, ValueError):  # it holds something else
            continue
        if address:
            found[address] = name
    return found
