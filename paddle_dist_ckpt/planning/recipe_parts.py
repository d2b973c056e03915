"""From a recipe to the boxes of stored tensors that it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..core.box import Box, whole
from ..core.dtypes import DTYPES, DType, arithmetic_dtype, can_cast
from ..core.parts import NEW, Part, SourceTensor, is_cast
from ..recipes import (
    Cast,
    Concat,
    Permuted,
    Recipe,
    Sliced,
    Source,
    SplitPart,
    Squeezed,
    Unsqueezed,
    fold,
    stored_keys,
    text_of,
)

__all__ = [
    "NOT_CAST",
    "WRONG_DTYPE",
    "FilledRecipe",
    "Made",
    "PartMaker",
    "RecipeError",
    "make_parts",
    "misfit",
    "not_cast",
    "recipe_of",
]

WRONG_DTYPE = "the target has dtype"
"""How a mismatch of dtypes begins."""
NOT_CAST = ", a cast that is not done"
"""How one ends that no cast mends."""

_LONGEST = 200  # of an expression in a message
_MOST_BOXES = 1 << 18  # of all operations of a recipe together; concat(x, x) time and again makes any number


class RecipeError(Exception):
    """A recipe and what is stored do not fit together; the message names the expression."""


class Made(NamedTuple):
    """What a recipe makes.

    Attributes:
        shape: The shape.
        dtype: The element type.
        parts: The parts, which tile the shape; none of them empty.
        cast: Whether the recipe casts, where the parts do not say it because there are none.
    """

    shape: tuple[int, ...]
    dtype: DType
    parts: list[Part]
    cast: bool = False

    @property
    def is_cast(self) -> bool:
        """Whether the element type is one that the recipe says."""
        return is_cast(self.parts, self.cast)


class FilledRecipe(NamedTuple):
    """The recipe of one wanted tensor.

    Attributes:
        written: The recipe as the user has written it, perhaps with placeholders.
        keys: The stored tensor's flat key for each of the keys that are written in it, see :func:`stored_keys`.
    """

    written: Recipe
    keys: tuple[str, ...]

    @property
    def recipe(self) -> Recipe:
        """The recipe with these keys."""
        return self.written.with_keys(dict(zip(stored_keys(self.written), self.keys, strict=True)).__getitem__)


class PartMaker:
    """Finds the parts that recipes stand for, once for all that are alike: written once, for all layers or experts, and
    of stored tensors of the same shapes and dtypes.

    Args:
        find: Gives what is stored under a flat key.
    """

    def __init__(self, find: Callable[[str], SourceTensor]) -> None:
        self._find = find
        # What is made, and of which of the stored tensors each part is; with the recipe, whose identity is in the key.
        self._made: dict[tuple[object, ...], tuple[Recipe, Made, list[int]]] = {}

    def make(self, filled: FilledRecipe) -> Made:
        """What a recipe makes. Raises what :func:`make_parts` raises, or the function that finds what is stored."""
        if isinstance(filled.written, Source):
            return _all_of_stored(filled.keys[0], self._find)
        written = stored_keys(filled.written)
        if filled.keys == tuple(written):  # without placeholders, so that it is for one tensor alone
            return make_parts(filled.written, self._find)
        sources = list(map(self._find, filled.keys))
        like = (id(filled.written), *[(one.shape, one.dtype) for one in sources])
        if like not in self._made:
            try:
                made = make_parts(filled.written, dict(zip(written, sources, strict=True)).__getitem__)
            except RecipeError:
                make_parts(filled.recipe, self._find)  # says the same with the keys of this tensor
                raise
            numbers = {key: i for i, key in enumerate(written)}
            self._made[like] = filled.written, made, [numbers[part.key] for part in made.parts]
        _, made, source = self._made[like]
        parts = [Part(filled.keys[i], *part[1:]) for i, part in zip(source, made.parts, strict=True)]
        return Made(made.shape, made.dtype, parts, made.cast)


def make_parts(recipe: Recipe, find: Callable[[str], SourceTensor]) -> Made:
    """The boxes of stored tensors that a recipe stands for.

    Args:
        recipe: The recipe.
        find: Gives what is stored under a flat key.

    Raises:
        RecipeError: an axis, a slice, a shape or a dtype does not fit, or it is too many boxes.
    """

    handled = 0

    def make(one: Recipe, parts: Sequence[Made]) -> Made:
        nonlocal handled
        handled += sum(len(made.parts) for made in parts)
        if handled > _MOST_BOXES:
            raise RecipeError(f"{_short(recipe)}: more than {_MOST_BOXES:,} boxes of stored tensors to be put together")
        if isinstance(one, Source):
            return _all_of_stored(one.key, find)
        if isinstance(one, Concat):
            return _joined(one, parts)
        (inner,) = parts
        if isinstance(one, Permuted):
            return _permuted(one, inner)
        if isinstance(one, Sliced):
            return _cut(inner, _window(one, inner.shape))
        if isinstance(one, SplitPart):
            return _cut(inner, _share(one, inner.shape))
        if isinstance(one, Squeezed):
            return _squeezed(one, inner)
        if isinstance(one, Unsqueezed):
            return _unsqueezed(one, inner)
        assert isinstance(one, Cast)
        return _converted(one, inner, find)

    return fold(recipe, make)


def _all_of_stored(key: str, find: Callable[[str], SourceTensor]) -> Made:
    """A stored tensor as it is."""
    shape, dtype = find(key)[:2]
    box, axes = _all_of(shape)
    return Made(shape, dtype, [Part(key, box, axes, box)] if math.prod(shape) else [])


@lru_cache(maxsize=256)  # most are like one of the latest
def _all_of(shape: tuple[int, ...]) -> tuple[Box, tuple[int, ...]]:
    """The box that is all of a tensor of this shape, and its axes: one for very many."""
    return whole(shape), tuple(range(len(shape)))


def recipe_of(parts: Sequence[Part], find: Callable[[str], SourceTensor]) -> Recipe | None:
    """A recipe that makes these parts, as short as they allow; None if there is none, or nothing to make.

    Args:
        parts: What tiles a tensor.
        find: Gives what is stored under a flat key.
    """
    if len(parts) == 1:
        return _recipe_of_part(parts[0], find(parts[0].key).shape)
    for axis in range(len(parts[0].place.shape) if parts else 0):
        groups = _groups(parts, axis)
        if len(groups) > 1:
            made = [recipe_of(group, find) for group in groups]
            known = [one for one in made if one is not None]
            return Concat(tuple(known), axis) if len(known) == len(made) else None
    return None


def _groups(parts: Sequence[Part], axis: int) -> list[list[Part]]:
    """Parts in groups one behind the other along an axis, as many as can be."""
    groups: list[list[Part]] = []
    end = -1
    for part in sorted(parts, key=lambda part: part.place.offset[axis]):
        if not groups or part.place.offset[axis] >= end:
            groups.append([])
        groups[-1].append(part)
        end = max(end, part.place.offset[axis] + part.place.shape[axis])
    return groups


def _recipe_of_part(part: Part, shape: Sequence[int]) -> Recipe:
    ends = [
        (start or None, start + length if start + length < n else None)
        for start, length, n in zip(part.box.offset, part.box.shape, shape, strict=True)
    ]
    while ends and ends[-1] == (None, None):
        ends.pop()
    found: Recipe = Source(part.key)
    found = Sliced(found, tuple(ends)) if ends else found
    kept = [axis for axis in part.axes if axis != NEW]
    for axis in reversed(range(len(shape))):
        found = found if axis in kept else found.squeeze(axis)
    order = tuple(sorted(kept).index(axis) for axis in kept)
    if order != tuple(range(len(order))):
        found = found.T if order == tuple(reversed(range(len(order)))) else Permuted(found, order)
    for axis, of_stored in enumerate(part.axes):
        found = found.unsqueeze(axis) if of_stored == NEW else found
    return Cast(found, part.dtype) if part.dtype is not None else found


def misfit(made: Made, shape: Sequence[int], dtype: DType, cast: bool) -> str | None:
    """Why a wanted tensor of this shape and dtype cannot be what a recipe makes, if it cannot.

    Args:
        made: What the recipe makes.
        shape, dtype: The wanted tensor's.
        cast: Whether dtypes are converted without a word of the recipe.
    """
    if made.shape != tuple(shape):
        return f"the target has shape {list(shape)}, its recipe makes {list(made.shape)}"
    if made.dtype is not dtype and made.is_cast:
        return f"its recipe casts to {made.dtype.name}, and not to {dtype.name}, the target's dtype"
    if made.dtype is not dtype and not (cast and can_cast(made.dtype, dtype)):
        return f"{WRONG_DTYPE} {dtype.name}, its recipe makes {made.dtype.name}{not_cast(made.dtype, dtype)}"
    return None


def not_cast(stored: DType, wanted: DType) -> str:
    """What is added to a mismatch of dtypes that no cast mends."""
    return "" if can_cast(stored, wanted) else NOT_CAST


def _permuted(one: Permuted, inner: Made) -> Made:
    axes = one.axes if one.axes is not None else tuple(reversed(range(len(inner.shape))))
    if len(axes) != len(inner.shape):
        raise RecipeError(f"{_short(one)}: {len(axes)} axes for a tensor of shape {list(inner.shape)}")
    shape = tuple(inner.shape[a] for a in axes)
    return inner._replace(shape=shape, parts=[part.permuted(axes) for part in inner.parts])


def _squeezed(one: Squeezed, inner: Made) -> Made:
    axis = _axis(one, one.axis, inner.shape)
    if inner.shape[axis] != 1:
        raise RecipeError(f"{_short(one)}: a tensor of shape {list(inner.shape)} has not one element along axis {axis}")
    return _with_axes(inner, lambda values, _: (*values[:axis], *values[axis + 1 :]))


def _unsqueezed(one: Unsqueezed, inner: Made) -> Made:
    axis = _axis(one, one.axis, (*inner.shape, 1))
    return _with_axes(inner, lambda values, new: (*values[:axis], new, *values[axis:]))


def _with_axes(inner: Made, changed: Callable[[tuple[int, ...], int], tuple[int, ...]]) -> Made:
    """The same with an axis of one element more or less; ``changed`` takes what there is for each axis, and for such
    an axis."""
    parts = [
        part._replace(
            axes=changed(part.axes, NEW), place=Box(changed(part.place.offset, 0), changed(part.place.shape, 1))
        )
        for part in inner.parts
    ]
    return inner._replace(shape=changed(inner.shape, 1), parts=parts)


def _window(one: Sliced, shape: Sequence[int]) -> Box:
    """The box that slices cut out of a tensor."""
    count = len(one.bounds) + len(one.last)
    if count > len(shape):
        raise RecipeError(f"{_short(one)}: {count} slices for a tensor of shape {list(shape)}")
    offset, extent = [0] * len(shape), list(shape)
    between = [(None, None)] * (len(shape) - count)
    for d, (start, stop) in enumerate([*one.bounds, *between, *one.last]):
        low, high = (_place(end, shape[d], rest) for end, rest in ((start, 0), (stop, shape[d])))
        if not 0 <= low <= high <= shape[d]:
            raise RecipeError(f"{_short(one)}: no such part of a tensor of shape {list(shape)}")
        offset[d], extent[d] = low, high - low
    return Box(tuple(offset), tuple(extent))


def _place(end: int | None, length: int, rest: int) -> int:
    """A slice's end, counted from the front; ``rest`` if it is left out."""
    return rest if end is None else end + length if end < 0 else end


def _share(one: SplitPart, shape: Sequence[int]) -> Box:
    """The box of one of several equal parts."""
    axis = _axis(one, one.axis, shape)
    step, left = divmod(shape[axis], one.count)
    if left:
        raise RecipeError(f"{_short(one)}: {shape[axis]} elements along axis {axis} make no {one.count} parts")
    offset, extent = [0] * len(shape), list(shape)
    offset[axis], extent[axis] = step * one.number, step
    return Box(tuple(offset), tuple(extent))


def _cut(inner: Made, window: Box) -> Made:
    found = (part.within(window) for part in inner.parts)
    parts = [part._replace(place=part.place.relative_to(window.offset)) for part in found if part is not None]
    return inner._replace(shape=window.shape, parts=parts)


def _joined(one: Concat, inner: Sequence[Made]) -> Made:
    first, axis = inner[0], _axis(one, one.axis, inner[0].shape)
    parts: list[Part] = []
    length = 0
    for made, part in zip(inner, one.parts, strict=True):
        if len(made.shape) != len(first.shape) or any(
            a != b for d, (a, b) in enumerate(zip(made.shape, first.shape, strict=True)) if d != axis
        ):
            raise RecipeError(
                f"{_short(one)}: {_short(part)} has shape {list(made.shape)}, the first part {list(first.shape)}"
            )
        if made.dtype is not first.dtype:
            raise RecipeError(
                f"{_short(one)}: {_short(part)} has dtype {made.dtype.name}, the first part {first.dtype.name}; "
                "a .cast(...) makes them alike"
            )
        parts += [each.moved(axis, length) for each in made.parts]
        length += made.shape[axis]
    shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
    return Made(shape, first.dtype, parts, any(made.cast for made in inner))


def _converted(one: Cast, inner: Made, find: Callable[[str], SourceTensor]) -> Made:
    dtype = DTYPES.get(one.dtype)
    if dtype is None:
        raise RecipeError(f"{_short(one)}: no such dtype; known are {', '.join(DTYPES)}")
    if not can_cast(inner.dtype, dtype):
        raise RecipeError(f"{_short(one)}: a cast from {inner.dtype.name} that is not done")
    for part in inner.parts:
        before = find(part.key).dtype
        if dtype is not inner.dtype and not _is_exact(before, inner.dtype):
            raise RecipeError(
                f"{_short(one)}: a cast from {before.name} by way of {inner.dtype.name} would round twice"
            )
    return Made(inner.shape, dtype, [part._replace(dtype=dtype.name) for part in inner.parts], cast=True)


def _is_exact(stored: DType, wanted: DType) -> bool:
    """Whether every value of one type is one of the other."""
    return bool(np.can_cast(arithmetic_dtype(stored), arithmetic_dtype(wanted), "safe"))


def _axis(one: Recipe, axis: int, shape: Sequence[int]) -> int:
    """The number of an axis, counted from the first."""
    if not -len(shape) <= axis < len(shape):
        raise RecipeError(f"{_short(one)}: no axis {axis} in a tensor of shape {list(shape)}")
    return axis % len(shape)


def _short(one: Recipe) -> str:
    return text_of(one, _LONGEST)
