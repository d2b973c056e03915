"""Parameters that are not trained, and what an optimizer keeps for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from paddle.base.framework import EagerParamBase

from ..tree.objects import ObjectKind
from ..tree.state_dict import Leaves
from .masters import copies_of
from .optimizers import parameters_of, state_of_parameter

__all__ = ["without_frozen"]


def without_frozen(leaves: Leaves) -> Leaves:
    """Leaves without parameters that are not trained, and without the accumulators that optimizers have for these."""
    left_out = {
        id(one)
        for opened in leaves.objects
        if opened.kind is ObjectKind.OPTIMIZER
        for parameter in parameters_of(opened.value)
        if _is_frozen(parameter)
        for one in state_of_parameter(opened.value, parameter)
    }
    for opened in leaves.objects:
        left_out |= {id(copy) for parameter, copy in copies_of(opened.value, opened.state) if _is_frozen(parameter)}
    trained, frozen = dict[str, Any](), dict[str, Any]()
    for path, one in zip(leaves.tensor_paths, leaves.tensors, strict=True):
        (frozen if _is_frozen(one) or id(one) in left_out else trained)[path] = one
    return dataclasses.replace(leaves, tensor_paths=list(trained), tensors=list(trained.values()), kept=frozen)


def _is_frozen(tensor: Any) -> bool:
    tensor = getattr(tensor, "local_tensor", tensor)
    return isinstance(tensor, EagerParamBase) and bool(tensor.stop_gradient)
