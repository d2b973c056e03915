"""Master weights that a load has left, beside parameters that it has filled.

The first step of an optimizer makes the float32 master weight of a bfloat16 or float16 parameter from the parameter.
To load into a fresh optimizer they are made earlier, from what the parameter has at first; and each step sets the
parameter to its master weight. So where a checkpoint has parameters only, what it has would be gone after one step.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import paddle

from ..core.box import Box, intersect, whole
from ..tree.names import SHARDED_MASTER
from ..tree.objects import ObjectKind, OpenedObject
from ..tree.paths import plain_key
from ..tree.state_dict import Leaves
from .objects import own_tensors
from .optimizers import MASTERS, parameters_of
from .placement import layout_of, local_box, mesh_coordinate
from .sharded_weight import WeightPart, is_sharded_weight
from .static_program import all_of_program, is_program, program_layer
from .wrappers import INNER, unwrapped, without_data_parallel

__all__ = ["copies_of", "renew_masters", "renew_masters_of_program"]

Names = Callable[[Sequence[Any]], Sequence[str | None]]

_logger = logging.getLogger("paddle_dist_ckpt")
_MASTER = re.compile(r"(.+?)(?:\.dist)?_fp32_master_\d+(?:\.dist)?")


def renew_masters(
    leaves: Leaves, filled: Collection[int], lacking: Collection[int], names: Names, rank: int
) -> set[int]:
    """Set master weights to their parameters; returns the ids of those that were set.

    Args:
        leaves: What is in the state_dict, whose objects have not been given their states yet.
        filled: The ids of the tensors that were filled.
        lacking: The ids of those for which nothing was stored, of which master weights are set.
        names: Gives the names of the variables of tensors.
        rank: This process's.
    """
    pairs = [pair for one in leaves.objects if one.kind is ObjectKind.OPTIMIZER for pair in _of_optimizer(one)]
    below = tuple(f"{one.path}/" for one in leaves.objects if one.kind is ObjectKind.OPTIMIZER)
    entries = zip(leaves.tensor_paths, leaves.tensors, strict=True)
    pairs += _named_alike([tensor for path, tensor in entries if not path.startswith(below)], names)
    copies = {id(parameter): copy for one in leaves.objects for parameter, copy in copies_of(one.value, one.state)}
    found = [(copies.get(id(parameter), parameter), master) for parameter, master in pairs]
    due = [(source, master) for source, master in found if id(source) in filled and id(master) in lacking]
    done = {id(master) for source, master in due if _set_to(master, source, rank)}
    for parameter, master in _of_one_key(leaves):
        source, target = parameter.local_tensor, master.local_tensor
        if id(source) in filled and id(target) in lacking and _set_part(target, parameter, master):
            done.add(id(target))
    return done


def renew_masters_of_program(model: Any, names: Names, rank: int) -> None:
    """Set the master weights of a program that is not in train mode, and of which a load has filled the parameters
    alone, to these, where they are other numbers."""
    if is_program(model) and model._mode != "train":
        for parameter, master in _named_alike(list(all_of_program(model).values()), names):
            _set_to(master, parameter, rank, if_other=True)


def _of_optimizer(opened: OpenedObject) -> Iterator[tuple[Any, Any]]:
    """The parameters of an optimizer that have a master weight in its state, with it."""
    optimizer, state = unwrapped(opened.value), opened.state
    while True:
        masters = state.get(MASTERS, {})
        for parameter in parameters_of(optimizer):
            if parameter.name in masters:
                yield parameter, masters[parameter.name]
        if INNER not in state:
            return
        optimizer, state = unwrapped(optimizer).inner_optimizer, state[INNER]


def copies_of(value: Any, state: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The parameters and buffers of which a layer's state has copies, in another dtype, with these; those of the layer
    that a program was made of, with the program's variables."""
    layer = program_layer(value) if is_program(value) else without_data_parallel(unwrapped(value))
    if isinstance(layer, paddle.nn.Layer):
        for key, parameter in own_tensors(layer).items():
            copy = state.get(key)
            if copy is not None and copy is not parameter:
                yield parameter, copy


def _named_alike(tensors: Sequence[Any], names: Names) -> Iterator[tuple[Any, Any]]:
    """Parameters and their master weights, found by their variables' names, as in programs and in optimizers' dicts.

    A name that several models have given to their own parameters is passed over.
    """
    masters, others = dict[str, dict[int, Any]](), dict[str, dict[int, Any]]()
    for tensor, name in zip(tensors, names(tensors), strict=True):
        if name is None or not isinstance(tensor, paddle.Tensor):
            continue
        match = _MASTER.fullmatch(name)
        table, key = (masters, match[1]) if match is not None else (others, name.removesuffix(".dist"))
        table.setdefault(key, {})[id(tensor)] = tensor
    for name, of_name in masters.items():
        parameters = others.get(name, {})
        if len(of_name) == len(parameters) == 1:
            yield *parameters.values(), *of_name.values()


def _of_one_key(leaves: Leaves) -> Iterator[tuple[Any, Any]]:
    """Parameters and their master weights among ShardedWeights, whose keys are the parameters' with an ending.

    A key that several tensors have, as in a state of two models, is passed over.
    """
    of_key = dict[str, list[Any]]()
    for weight in leaves.tensors:
        if is_sharded_weight(weight):
            of_key.setdefault(str(getattr(weight, "key", "")), []).append(weight)
    pairs = [(key.removesuffix(SHARDED_MASTER), key) for key in of_key if key.endswith(SHARDED_MASTER)]
    wanted, ends = {key for pair in pairs for key in pair}, Counter[str]()
    for path in leaves.tensor_paths if wanted else ():
        parts = plain_key(path).split(".")
        ends.update(end for i in range(len(parts)) if (end := ".".join(parts[i:])) in wanted)
    for key, of_master in pairs:
        parameters, masters = of_key.get(key, []), of_key[of_master]
        if ends[key] <= len(parameters) == 1 == len(masters):
            yield parameters[0], masters[0]


def _set_part(target: Any, parameter: Any, master: Any) -> bool:
    """Set a master weight that is a ShardedWeight to its parameter, if that is of the same box: all of it, or a range
    of its elements of which the parameter may be the same."""
    theirs, ours = (WeightPart.of(one, one.local_tensor.shape, None) for one in (parameter, master))
    source = parameter.local_tensor
    if ours[:3] != theirs[:3] or theirs.flat not in (None, ours.flat):
        _logger.warning("a master weight is left as it is, though its parameter was loaded: %s", master.key)
        return False
    with paddle.no_grad():
        if theirs.flat != ours.flat:
            assert ours.flat is not None
            source = source.flatten()[slice(*ours.flat)]
        paddle.assign(source.cast(target.dtype).reshape(target.shape), target)
    return True


def _set_to(master: Any, parameter: Any, rank: int, if_other: bool = False) -> bool:
    """Set this rank's part of a master weight, which may be nothing, to that of its parameter, each in its own memory,
    if this rank has that; where ``if_other``, only if it is not the parameter but for what that cannot hold."""
    own, wanted = _box(parameter, rank), _box(master, rank)
    if wanted is None or not wanted.size:
        return True
    if own is None or list(parameter.shape) != list(master.shape) or intersect(own, wanted) != wanted:
        _logger.warning("a master weight is left as it is, though its parameter was loaded: %s", master.name)
        return False
    source, target = (one._local_value() if one.is_dist() else one for one in (parameter, master))
    with paddle.no_grad():
        part = source if own == wanted else source[wanted.relative_to(own.offset).slices]
        if not if_other or not bool((part.cast(target.dtype) == target.cast(part.dtype).cast(target.dtype)).all()):
            paddle.assign(part.cast(target.dtype), target)
    return True


def _box(tensor: Any, rank: int) -> Box | None:
    """Where what this rank has of a tensor lies in all of it; None if it has nothing."""
    if not tensor.is_dist():
        return whole(tensor.shape) if tensor._is_initialized() else None
    mesh, placements = layout_of(tensor, tensor.name)
    coordinate = mesh_coordinate(mesh, rank)
    return None if coordinate is None else local_box(tensor.shape, mesh.shape, coordinate, placements, tensor.name)
