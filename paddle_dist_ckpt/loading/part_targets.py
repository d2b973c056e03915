"""What a rank fills for wanted tensors that are made of boxes of stored ones.

Each part becomes a tensor of its own, of the stored tensor's shape, whose local shards are what this rank wants of the
part's box: the same memory, looked at with the stored tensor's axes. What comes after sees nothing but such tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import ChainMap
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..core.box import Box, whole
from ..core.boxes import Boxes
from ..core.device_memory import contiguous_strides
from ..core.dtypes import DType, dtype_named
from ..core.local_tensors import LocalTensors, overlaps_itself
from ..core.parts import NEW, Arranged, Part, SourceTensor
from ..core.shards import ShardTable
from ..core.tensors import Geometry, LocalShard, TensorView
from ..planning.cover import covers_exactly
from ..planning.recipe_parts import FilledRecipe, Made, PartMaker, RecipeError, misfit
from ..tree.names import Names
from ..tree.paths import plain_key
from .messages import LoadAnswer, Mismatch
from .resize import LengthError, Resizing
from .wanted import WantedState
from .wording import MISSING, OVERLAPS_ITSELF

__all__ = ["PartTargets", "expand", "fitted_parts"]

_ALIKE = 4096  # different parts that are remembered: layers have them again and again, one long concat has them once


@dataclass(slots=True)
class PartTargets:
    """A rank's tensors as a load fills them: those that are stored as they are wanted, and parts.

    Attributes:
        tensors: The tensors and parts.
        stored: The path of the stored tensor for each of them; None for those that are not filled.
        cast: Whether each is converted if it is stored in another dtype.
        problems: What does not fit.
        made: The paths of those that are made of parts.
        missing: The paths of those of which something is not stored that need not be.
        refused: Why some tensors are not filled, by number, though something is stored for them.
    """

    tensors: LocalTensors
    stored: list[str | None]
    cast: list[bool]
    problems: list[Mismatch] = field(default_factory=list)
    made: Container[str] = ()
    missing: list[str] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


class _LocalPart(NamedTuple):
    """What a rank has of a part of a wanted tensor.

    Attributes:
        geometry: Of a tensor of the stored tensor's shape, of which the rank has that.
        starts: For each shard of it in which of the wanted tensor's shards it is, and where it starts there, in bytes.
    """

    geometry: Geometry
    starts: list[tuple[int, int]]


def expand(wanted: WantedState, answer: LoadAnswer, table: ShardTable, cast: bool, resizing: Resizing) -> PartTargets:
    """Find what is filled of a rank's tensors.

    Args:
        wanted: The tensors that are wanted, with the recipes of some. Others may have parts in the answer.
        answer: What the checkpoint has of it.
        table: The stored tensors in it.
        cast: Whether dtypes are converted.
        resizing: Which tensors may be of another length than what is made.
    """
    tensors, recipes = wanted.tensors, wanted.made.recipes
    elsewhere: dict[str, str | None] = {**answer.stored, **dict.fromkeys((*answer.unfit, *answer.skipped))}
    if not recipes and not answer.parts:
        stored = [elsewhere.get(path, path) for path in tensors.paths]
        return PartTargets(tensors, stored, [cast] * len(stored))
    result = PartTargets(LocalTensors(), [], [], made=ChainMap[str, Any](recipes, answer.parts))
    moved = dict[str, tuple[int, ...]]()
    making, shard = _Making(wanted, answer, table, cast, resizing), 0
    for i, path in enumerate(tensors.paths):
        number = tensors.geometry[i]
        geometry = tensors.geometries[number]
        addresses = tuple(tensors.addresses[shard : shard + len(geometry.shards)])
        shard += len(addresses)
        if path not in recipes and path not in answer.parts:
            result.tensors.add(path, TensorView(geometry, addresses, tensors.owners[i], tensors.names[i]))
            result.stored.append(elsewhere.get(path, path))
            result.cast.append(cast)
            continue
        if wanted.may_be_missing(plain_key(path)) and _lacks(path, recipes, answer):
            result.missing.append(path)
            continue
        try:
            made, fitted = making.made_for(path, number)
        except (RecipeError, LengthError) as error:
            result.problems.append(Mismatch.at(path, str(error)))
            continue
        if path in recipes and any(map(_moves, made.parts)):
            moved[path] = geometry.shape
        for part in made.parts:
            mine = making.local_part(number, fitted, part)
            if mine.starts:
                at = tuple(addresses[piece] + start for piece, start in mine.starts)
                result.tensors.add(path, TensorView(mine.geometry, at, tensors.owners[i], tensors.names[i]))
                result.stored.append(answer.sources[part.key])
                result.cast.append(True)
    if moved:
        _refuse_states(result, moved, Names(tensors.paths, tensors.names))
    return result


def _moves(part: Part) -> bool:
    """Whether elements of the stored tensor are in other places in the wanted one."""
    return part.axes != tuple(range(len(part.axes))) or part.box != part.place


def _refuse_states(result: PartTargets, moved: Mapping[str, tuple[int, ...]], names: Names) -> None:
    """Refuse states of an optimizer that are as large as their parameter and would be filled as they are stored, where
    a recipe moves the parameter's elements.

    Args:
        result: What is filled.
        moved: The shapes of these parameters, by path.
        names: What the wanted tensors are called.
    """
    tensors = result.tensors
    for i, (path, number) in enumerate(zip(tensors.paths, tensors.geometry, strict=True)):
        variable = names.variables.get(path)
        if variable is None or path in result.made or result.stored[i] is None:
            continue
        shape = tensors.geometries[number].shape
        parameter = next((one for one in variable.parameters if moved.get(one) == shape), None)
        if parameter is not None:
            key = plain_key(parameter)
            result.refused[i] = f"it needs a recipe as well, since one moves the elements of {key}, its parameter"


class _Making:
    """Finds what tensors are made of; for tensors that are alike once. The arguments are those of :func:`expand`."""

    def __init__(
        self, wanted: WantedState, answer: LoadAnswer, table: ShardTable, cast: bool, resizing: Resizing
    ) -> None:
        self._geometries, self._recipes = wanted.tensors.geometries, wanted.made.recipes
        self._answer, self._table, self._cast, self._resizing = answer, table, cast, resizing
        self._maker = PartMaker(self._find)
        self._overlaps = functools.cache(self._overlaps_itself)
        self._part_of_like = functools.lru_cache(_ALIKE)(self._part_of)

    def made_for(self, path: str, number: int) -> tuple[Made, Geometry]:
        """What a tensor with the geometry of this number is made of, and its geometry as if it ended where that does.

        Raises:
            RecipeError, LengthError: it cannot be made, or does not fit the tensor.
        """
        geometry = self._geometries[number]
        if path in self._recipes:
            made = self._maker.make(self._recipes[path])
        else:
            made = fitted_parts(self._answer.parts[path], geometry.dtype, self._find)
        fitted = self._resizing.fitted(path, geometry, made.shape)
        reason = misfit(made, fitted.shape, geometry.dtype, self._cast)
        if reason is not None:
            raise RecipeError(f"{reason} (of {', '.join(dict.fromkeys(part.key for part in made.parts))})")
        if self._overlaps(number):  # which the parts may not do, each by itself
            raise RecipeError(OVERLAPS_ITSELF)
        return made, fitted

    def local_part(self, number: int, fitted: Geometry, part: Part) -> _LocalPart:
        """What this rank has of a part of such a tensor."""
        shape = self._find(part.key).shape
        if fitted is self._geometries[number]:
            return self._part_of_like(number, shape, *part[1:])
        return _local_part(fitted, part, shape)

    def _find(self, key: str) -> SourceTensor:
        place = self._table.index.get(self._answer.sources.get(key, ""))
        if place is None:
            what = self._answer.absent.get(key, MISSING)
            raise RecipeError(f"it is made of {key}, which in the checkpoint is {what}")
        return SourceTensor(self._table.shape_of(place), self._table.dtypes[place])

    def _overlaps_itself(self, number: int) -> bool:
        geometry = self._geometries[number]
        return any(overlaps_itself(geometry, piece) for piece in geometry.shards)

    def _part_of(self, number: int, shape: tuple[int, ...], *part: Any) -> _LocalPart:
        return _local_part(self._geometries[number], Part("", *part), shape)


def _lacks(path: str, recipes: Mapping[str, FilledRecipe], answer: LoadAnswer) -> bool:
    """Whether something of which a tensor is made is not stored at all."""
    keys = recipes[path].keys if path in recipes else (part.key for part in answer.parts[path].parts)
    return any(answer.absent.get(key, "").startswith(MISSING) for key in keys)


def fitted_parts(arranged: Arranged, dtype: DType | None, find: Callable[[str], SourceTensor]) -> Made:
    """What parts make that were found for a tensor, of this element type; or of that of the first, if it is None.

    Raises:
        RecipeError: they do not fit what is stored, or something is missing.
    """
    shape, parts = arranged.shape, arranged.parts
    places = tuple(part.place for part in parts if part.place.size)
    sources = [find(part.key) for part in parts]
    if not all(map(_is_sound, parts, (source.shape for source in sources))) or not _tile(tuple(shape), places):
        raise RecipeError(f"its parts do not make up a tensor of shape {list(shape)}")
    for part, source in zip(parts, sources, strict=True):
        found = dtype_named(part.dtype) if part.dtype else source.dtype
        dtype = dtype or found
        if found is not dtype:
            return Made(shape, found, parts)
    return Made(shape, dtype or dtype_named(arranged.dtype or ""), parts)


def _is_sound(part: Part, stored: Sequence[int]) -> bool:
    """Whether a part's boxes are of one shape but for the order of the axes, and for such of one element that only one
    of them has; and the stored tensor has the one."""
    box, axes, place = part.box, part.axes, part.place
    if len(box.shape) != len(stored):
        return False
    if axes != tuple(range(len(stored))):
        if any(a != NEW and not 0 <= a < len(stored) for a in axes):
            return False
        gone = set(range(len(stored))).difference(axes)
        turned = len(stored) - len(gone) == sum(a != NEW for a in axes) and all(box.shape[d] == 1 for d in gone)
        if not turned or tuple(1 if a == NEW else box.shape[a] for a in axes) != place.shape:
            return False
    elif box.shape != place.shape:
        return False
    return all(0 <= low <= n - extent for low, extent, n in zip(box.offset, box.shape, stored, strict=True))


@functools.lru_cache(maxsize=64)  # all layers are alike; why no more, core.layouts says
def _tile(shape: tuple[int, ...], places: tuple[Box, ...]) -> bool:
    """Whether the places of parts make up a tensor, each element of which is in one of them."""
    if len(places) == 1:
        return places[0] == whole(shape)
    if any(len(place.shape) != len(shape) for place in places):
        return False
    groups, boxes = np.zeros(len(places), np.int64), Boxes.of(places, max(1, len(shape)))
    return bool(covers_exactly(groups, boxes, Boxes.of([whole(shape)], max(1, len(shape))))[0])


def _local_part(geometry: Geometry, part: Part, shape: tuple[int, ...]) -> _LocalPart:
    """What a rank that has a tensor of this geometry has of a part of it; ``shape`` is the stored tensor's."""
    itemsize = geometry.dtype.itemsize
    shards: list[LocalShard] = []
    starts: list[tuple[int, int]] = []
    for piece, shard in enumerate(geometry.shards):
        mine = part.within(shard.box)
        if mine is None:
            continue
        strides = shard.strides or contiguous_strides(shard.box.shape, itemsize)
        corner = mine.place.relative_to(shard.box.offset).offset
        turned = list(contiguous_strides(mine.box.shape, itemsize))  # which counts where there is one element alone
        for axis, stride in zip(mine.axes, strides, strict=True):
            if axis != NEW:
                turned[axis] = stride
        shards.append(LocalShard(mine.box, _unless_contiguous(mine.box, turned, itemsize)))
        starts.append((piece, sum(at * stride for at, stride in zip(corner, strides, strict=True))))
    return _LocalPart(dataclasses.replace(geometry, shape=shape, shards=tuple(shards)), starts)


def _unless_contiguous(box: Box, strides: Sequence[int], itemsize: int) -> tuple[int, ...] | None:
    """Strides; None if elements that have them stand one behind the other."""
    expected = contiguous_strides(box.shape, itemsize)
    same = all(n == 1 or a == b for n, a, b in zip(box.shape, strides, expected, strict=True))
    return None if same else tuple(strides)
