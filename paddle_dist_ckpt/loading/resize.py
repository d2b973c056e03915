"""Tensors that are longer or shorter than what is stored, along one axis: ``LoadOptions.resize``.

A vocabulary is padded so that tensor-parallel ranks can divide it, to another length for another number of them. What
both have is loaded: a longer tensor keeps what it has behind that, and what is stored beyond a shorter one is left out.
To the rest of a load such a tensor is one of the stored shape, of which this rank may have a little less.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from math import prod
from operator import index

from ..core.box import Box
from ..core.columns import IntArray
from ..core.device_memory import contiguous_strides
from ..core.local_tensors import LocalTensors
from ..core.shards import ShardTable
from ..core.tensors import Geometry, LocalShard
from ..tree.paths import WILDCARD, plain_key
from .key_map import matcher
from .messages import Mismatch

__all__ = ["LengthError", "Resizing", "Rules"]

Rules = Mapping[str, "int | tuple[int, int]"]
_Rule = tuple[int, int | None]
"""An axis, and the length that has to be loaded if one was given."""


class LengthError(Exception):
    """A tensor that a rule lets differ in length cannot be loaded all the same; the message says why."""


class Resizing:
    """Makes the geometries of tensors that a rule lets differ in length those of what is stored for them.

    Args:
        rules: The axis for each pattern of keys, perhaps with the length that has to be loaded.

    Attributes:
        notes: What of the tensors so far is left as it is, or left out.
    """

    def __init__(self, rules: Rules) -> None:
        self.notes: list[Mismatch] = []
        self._of_keys: dict[str, tuple[int, _Rule]] = {}  # rules for single keys, with their numbers
        self._of_patterns: list[tuple[int, Callable[[str], bool], _Rule]] = []
        for number, (pattern, given) in enumerate(rules.items()):
            axis, length = given if isinstance(given, tuple) else (given, None)
            rule = index(axis), None if length is None else index(length)  # Python's, and not numpy's
            if WILDCARD.search(pattern) is None:
                self._of_keys[pattern] = number, rule
            else:
                self._of_patterns.append((number, matcher([pattern]), rule))

    def _rule_of(self, key: str) -> _Rule | None:
        """The first rule that is about a key. Those for single keys, of which there may be very many, are not gone
        through."""
        found = self._of_keys.get(key)
        for number, matches, rule in self._of_patterns:
            if found is not None and found[0] < number:
                break
            if matches(key):
                return rule
        return None if found is None else found[1]

    def fitted(self, path: str, geometry: Geometry, shape: tuple[int, ...]) -> Geometry:
        """The geometry of a tensor as if it ended where what is stored for it ends, which has this shape; the geometry
        as it is if no rule is about the tensor, or the shapes differ otherwise. None is about a single element that is
        stored as one: a pattern of a parameter and its states also matches the powers of Adam's betas.

        Raises:
            LengthError: the rule does not allow it.
        """
        rule = self._rule_of(plain_key(path))
        if rule is None or (geometry.shape == shape and prod(shape) == 1):
            return geometry
        axis, length = rule
        if geometry.shape != shape and not _differ_there_alone(geometry.shape, shape, axis):
            return geometry  # it does not fit
        reason = _refusal(geometry, shape, length, axis)
        if reason is not None:
            raise LengthError(reason)
        if geometry.shape == shape:
            return geometry
        wanted, stored = geometry.shape[axis], shape[axis]
        span = f"{min(wanted, stored)} to {max(wanted, stored)} of axis {axis}"
        what = "are not stored, and left as they are" if wanted > stored else "are stored, and left out"
        self.notes.append(Mismatch.at(path, f"{span} {what}"))
        return _clipped(geometry, shape, axis)

    def fit(self, tensors: LocalTensors, table: ShardTable, place: IntArray, made: Container[str]) -> dict[int, str]:
        """Do so with tensors, but for those that are made of parts.

        Args:
            tensors: The wanted ones; changed in place.
            table: What is stored.
            place: The place of each tensor in the table, -1 for one of which there is nothing, ``[tensors]``.
            made: The paths of those that are made of parts.

        Returns:
            Why tensors cannot be loaded, by their number.
        """
        refused: dict[int, str] = {}
        for i, path in enumerate(tensors.paths) if self._of_keys or self._of_patterns else ():
            if place[i] < 0 or path in made:
                continue
            geometry = tensors.geometries[tensors.geometry[i]]
            try:
                fitted = self.fitted(path, geometry, table.shape_of(place[i]))
            except LengthError as error:
                refused[i] = str(error)
                continue
            if fitted is not geometry:
                tensors.geometry[i] = len(tensors.geometries)
                tensors.geometries.append(fitted)
        return refused


def _differ_there_alone(wanted: tuple[int, ...], stored: tuple[int, ...], axis: int) -> bool:
    """Whether two shapes differ in this axis and in no other."""
    return len(wanted) == len(stored) and [i for i, n in enumerate(wanted) if n != stored[i]] == [axis]


def _refusal(geometry: Geometry, shape: tuple[int, ...], length: int | None, axis: int) -> str | None:
    """Why a tensor cannot be filled from one of a shape that differs in this axis at the most, if it cannot."""
    if axis >= len(shape):
        return f"resize names axis {axis}, and it has {len(shape)}"
    wanted, stored = geometry.shape[axis], shape[axis]
    lengths = f"the target has length {wanted} along axis {axis}, the checkpoint {stored}"
    if geometry.reduction is not None and wanted != stored:
        return f"{lengths}, and a partial tensor cannot be resized"
    if length is None and wanted < stored:
        return f"{lengths}; resize={{...: ({axis}, n)}} leaves out what is stored beyond, if the first n are loaded"
    if length is not None and min(wanted, stored) < length:
        return f"{lengths}, and resize says that the first {length} have to be loaded"
    return None


def _clipped(geometry: Geometry, shape: tuple[int, ...], axis: int) -> Geometry:
    """A tensor's geometry as if the tensor ended along an axis where the shape does."""
    shards = []
    for box, strides in geometry.shards:
        extent = max(0, min(box.shape[axis], shape[axis] - box.offset[axis]))
        if extent == box.shape[axis]:
            shards.append(LocalShard(box, strides))
            continue
        less = Box(box.offset, (*box.shape[:axis], extent, *box.shape[axis + 1 :]))
        if strides is None and any(n != 1 for n in box.shape[:axis]):
            strides = contiguous_strides(box.shape, geometry.dtype.itemsize)
        shards.append(LocalShard(less, strides))
    return replace(geometry, shape=shape, shards=tuple(shards))
