"""Master weights that a load has left, beside parameters that it has filled.

The first step of an optimizer makes the float32 master weight of a bfloat16 or float16 parameter from the parameter.
To load into a fresh optimizer they are made earlier, from what the parameter has at first; and each step sets the
parameter to its master weight. So where a checkpoint has parameters only, what it has would be gone after one step.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import paddle

from ..core.box import Box, whole
from ..tree.objects import ObjectKind, OpenedObject
from ..tree.state_dict import Leaves
from .objects import masters_of
from .placement import layout_of, local_box, mesh_coordinate
from .wrappers import unwrapped

__all__ = ["renew_masters"]

_logger = logging.getLogger("paddle_dist_ckpt")
_MASTER = re.compile(r"(.+?)(?:\.dist)?_fp32_master_\d+(?:\.dist)?")


def renew_masters(leaves: Leaves, names: Sequence[str | None], filled: Collection[int], rank: int) -> None:
    """Set the master weights that were not filled to their parameters that were.

    Args:
        leaves: What is in the state_dict, whose objects have been given their states.
        names: The names of the variables of its tensors.
        filled: The ids of the tensors that were filled.
        rank: This process's.
    """
    known = {*filled, *(id(parameter) for one in leaves.objects for parameter in _filled_by_copies(one, filled))}
    pairs = [pair for one in leaves.objects if one.kind is ObjectKind.OPTIMIZER for pair in masters_of(one.value)]
    for parameter, master in (*pairs, *_named_alike(leaves, names)):
        if id(parameter) in known and id(master) not in known:
            known.add(id(master))
            _set_to(master, parameter, rank)


def _filled_by_copies(opened: OpenedObject, filled: Collection[int]) -> Iterator[Any]:
    """The parameters of a layer that were given what was filled, where that is copies in another dtype."""
    layer = unwrapped(opened.value)
    if isinstance(layer, paddle.nn.Layer):
        for key, parameter in layer.named_parameters():
            if id(opened.state.get(key)) in filled:
                yield parameter


def _named_alike(leaves: Leaves, names: Sequence[str | None]) -> Iterator[tuple[Any, Any]]:
    """The master weights among the tensors, by their variables' names, with the only parameter of such a name: in
    programs, and in dicts that optimizers give."""
    masters, others = dict[str, Any](), dict[str, dict[int, Any]]()
    for tensor, name in zip(leaves.tensors, names, strict=True):
        if name is None or not isinstance(tensor, paddle.Tensor):
            continue
        match = _MASTER.fullmatch(name)
        if match is not None:
            masters[match[1]] = tensor
        else:
            others.setdefault(name.removesuffix(".dist"), {})[id(tensor)] = tensor
    for name, master in masters.items():
        if len(parameters := others.get(name, {})) == 1:
            yield next(iter(parameters.values())), master


def _set_to(master: Any, parameter: Any, rank: int) -> None:
    """Set this rank's part of a master weight to that of its parameter, each in its own memory."""
    own, wanted = _box(parameter, rank), _box(master, rank)
    if wanted is None or not wanted.size:
        return
    if own is None or not _holds(own, wanted):
        _logger.warning(
            "%s: not loaded, and this rank has not the part of %s that it is of; a step sets the parameter to it",
            master.name, parameter.name,
        )  # fmt: skip
        return
    source, target = (one._local_value() if one.is_dist() else one for one in (parameter, master))
    with paddle.no_grad():
        cast = source.cast(target.dtype)
        paddle.assign(cast if own == wanted else cast[wanted.relative_to(own.offset).slices], target)


def _box(tensor: Any, rank: int) -> Box | None:
    """Where what this rank has of a tensor lies in all of it; None if it has nothing."""
    if not tensor.is_dist():
        return whole(tensor.shape) if tensor._is_initialized() else None
    mesh, placements = layout_of(tensor, tensor.name)
    coordinate = mesh_coordinate(mesh, rank)
    return None if coordinate is None else local_box(tensor.shape, mesh.shape, coordinate, placements, tensor.name)


def _holds(box: Box, part: Box) -> bool:
    """Whether a part is all in a box."""
    return len(box.shape) == len(part.shape) and all(
        a <= b and b + n <= a + m for a, m, b, n in zip(*box, *part, strict=True)
    )
