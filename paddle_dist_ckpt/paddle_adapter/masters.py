"""Master weights that a load has left, beside parameters that it has filled.

The first step of an optimizer makes the float32 master weight of a bfloat16 or float16 parameter from the parameter.
To load into a fresh optimizer they are made earlier, from what the parameter has at first; and each step sets the
parameter to its master weight. So where a checkpoint has parameters only, what it has would be gone after one step.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import paddle

from ..tree.objects import ObjectKind, OpenedObject
from .objects import masters_of
from .static_program import variables_by_address
from .wrappers import unwrapped

__all__ = ["renew_masters"]

_MASTER = re.compile(r"(.+)_fp32_master_\d+")


def renew_masters(opened: Sequence[OpenedObject], filled: Collection[int]) -> None:
    """Set the master weights of optimizers and programs that were not filled to their parameters that were.

    Args:
        opened: All objects that were in the state_dict, which have been given their states.
        filled: The ids of the tensors that were filled.
    """
    known = {*filled, *(id(parameter) for one in opened for parameter in _filled_by_copies(one, filled))}
    for one in opened:
        for parameter, master in _masters(one):
            if id(parameter) in known and id(master) not in known:
                _set_to(master, parameter)


def _filled_by_copies(opened: OpenedObject, filled: Collection[int]) -> Iterator[Any]:
    """The parameters of a layer that were given what was filled, where that is copies in another dtype."""
    layer = unwrapped(opened.value)
    if isinstance(layer, paddle.nn.Layer):
        for key, parameter in layer.named_parameters():
            if id(opened.state.get(key)) in filled:
                yield parameter


def _masters(opened: OpenedObject) -> Iterable[tuple[Any, Any]]:
    """The parameters of an object that have a master weight, with it."""
    if opened.kind is ObjectKind.PROGRAM:
        return _masters_in_program(opened.state)
    return masters_of(opened.value) if opened.kind is ObjectKind.OPTIMIZER else ()


def _set_to(master: Any, parameter: Any) -> None:
    """Set a master weight to its parameter, each in its own memory."""
    parameter, master = (one._local_value() if one.is_dist() else one for one in (parameter, master))
    if parameter.shape == master.shape and parameter._is_initialized() and master._is_initialized():
        with paddle.no_grad():
            paddle.assign(parameter.cast(master.dtype), master)


def _masters_in_program(state: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The parameters of a program that have a master weight, with it."""
    found = ((match[1], one) for key, one in state.items() if (match := _MASTER.fullmatch(str(key))) is not None)
    masters = dict(found)
    if not masters:
        return
    names = variables_by_address()
    for key, tensor in state.items():
        if isinstance(tensor, paddle.Tensor) and tensor._is_initialized() and not _MASTER.fullmatch(str(key)):
            master = masters.get(names.get(tensor.data_ptr(), ""))
            if master is not None:
                yield tensor, master
