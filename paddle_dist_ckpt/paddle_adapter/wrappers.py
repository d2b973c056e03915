"""Paddle's classes that hold an optimizer or a scaler and pass on what is asked of them, and those that are refused.

Classes are told by their names: fleet's are imported by those who use them, and stand in other modules in each version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

__all__ = [
    "INNER",
    "STEPS",
    "is_look_ahead",
    "is_of_paddle",
    "refusal",
    "unwrapped",
    "without_data_parallel",
]

INNER, STEPS = "inner_optimizer", "steps"
"""Where a LookAhead's state has that of the optimizer in it, and the number of steps."""

# The attribute with what is wrapped. Fleet's classes have neither state_dict() nor a setter of their own: they pass on
# every attribute that they do not have.
_WRAPPED = {
    "HybridParallelOptimizer": "_inner_opt",
    "HeterParallelOptimizer": "_inner_opt",
    "MixPrecisionOptimizer": "_inner_opt",
    "DygraphShardingOptimizer": "_inner_opt",
    "HybridParallelGradScaler": "_scaler",
    "MixPrecisionScaler": "_inner_scaler",
}
_IGNORES = (
    "set_state_dict() of Paddle's {name} ignores most of its state, so the object could not be restored; save what you "
    "need of its state_dict()"
)
_STATIC = (
    "Paddle's {name} works on static-graph programs, and has no state of its own; save the DistModel, or the program's "
    "variables as tensors"
)
_CUT = (
    "Paddle's {name} has parts of this rank's own of larger tensors, which do not say what they are parts of; save its "
    "sharded_state_dict()"
)
_CUT_AFTER_A_STEP = f"{_CUT}; to load it, take a step first, for it is empty before"
_MASKS = (
    "Paddle's {name} has masks by names that belong to one run, and in another may be those of other layers; save the "
    "optimizer that was decorated, and call asp.prune_model() after a load, which makes the masks of the pruned weights"
)
_PARTS = (
    "Paddle's {name} has no state_dict(); pass what it holds: its network, and the optimizer that it was prepared with"
)
_REFUSED = {
    "Model": _PARTS,
    "LBFGS": _IGNORES,
    "DistributedFusedLamb": _STATIC,
    "DGCMomentumOptimizer": _STATIC,
    "ExponentialMovingAverage": _STATIC,
    "GradientMergeOptimizer": _STATIC,
    "MetaOptimizerBase": _STATIC,
    "OptimizerWithSparsityGuarantee": _MASKS,
    "PipelineOptimizer": _STATIC,
    "RecomputeOptimizer": _STATIC,
    "ShardingOptimizerStage1": _STATIC,
    "DygraphShardingOptimizerV2": _CUT_AFTER_A_STEP,
    "FullyShardOptimizer": _CUT_AFTER_A_STEP,
    "GroupShardedOptimizerStage2": f"{_CUT}, which it has without offload=True",
}
_FUSED = (
    "{name} with tensor_fusion or comm_overlap keeps state of buffers in which parameters are fused as this layout has "
    "it; switch both off, or save its sharded_state_dict()"
)
_names: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()  # what `_paddles` has found


def _paddles(value: Any) -> frozenset[str]:
    """The names of those of Paddle's classes that a value is of."""
    kind = type(value)
    if kind not in _names:
        _names[kind] = frozenset(one.__name__ for one in kind.__mro__ if is_of_paddle(one))
    return _names[kind]


def is_of_paddle(kind: type) -> bool:
    """Whether it is one of Paddle's own classes; some have no text for their module, or none."""
    return str(getattr(kind, "__module__", "")).partition(".")[0] == "paddle"


def _found(table: Mapping[str, str], value: Any) -> str | None:
    """The name of one of Paddle's classes that a value is of and a table has."""
    return min(table.keys() & _paddles(value), default=None)


def unwrapped(value: Any) -> Any:
    """What a wrapper, or one in another, holds; anything else as it is."""
    while (name := _found(_WRAPPED, value)) is not None:
        value = getattr(value, _WRAPPED[name])
    return value


def without_data_parallel(layer: Any) -> Any:
    """The layer that Paddle's ``DataParallel`` holds, whose state it passes on; any other as it is."""
    while "DataParallel" in _paddles(layer):
        layer = layer._layers
    return layer


def is_look_ahead(value: Any) -> bool:
    """Whether it is Paddle's LookAhead, which steps an optimizer of its own and leaves that out of its state."""
    return "LookAhead" in _paddles(value)


def refusal(value: Any) -> str | None:
    """Why an object cannot be stored as it stands, and what to do instead; None if it can, for all that is known."""
    while True:
        refused, wrapper = _found(_REFUSED, value), _found(_WRAPPED, value)
        if refused is not None:
            return _REFUSED[refused].format(name=type(value).__name__)
        if wrapper == "DygraphShardingOptimizer" and any(map(vars(value).get, ("tensor_fusion", "comm_overlap"))):
            return _FUSED.format(name=type(value).__name__)
        if wrapper is not None:
            value = getattr(value, _WRAPPED[wrapper])
        elif is_look_ahead(value):
            value = value.inner_optimizer
        else:
            return None
