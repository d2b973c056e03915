"""Recognises Paddle's tensors by everything that their geometry follows from, one by one or many at once."""

from __future__ import annotations

import copy
import itertools
import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from ..core.tensors import Geometry
from .placement import local_shape, placement_copies, placement_texts

__all__ = ["KnownTensor", "TensorIdentity"]

_AT_ONCE = 256  # tensors whose attributes are compared one after the other: so many stay in a core's cache meanwhile


@dataclass(frozen=True, slots=True, eq=False)
class KnownTensor:
    """A geometry, and all attributes of a tensor from which it follows.

    The placements and the mesh that Paddle gives lie within the tensor, and are invalid memory when it is gone or given
    other data. So texts and copies of them are kept; the texts are compared where there are no copies.
    """

    shape: list[int]
    dtype: Any
    strides: list[int]
    contiguous: bool
    is_dist: bool
    local_shape: list[int] | None  # this and the following are None if it is not a DistTensor
    placements: list[str] | None
    copies: list[Any] | None
    mesh: Any
    geometry: Geometry
    starts: tuple[int, ...]  # of its local shards in its memory, in bytes

    @staticmethod
    def of(value: Any, is_dist: bool, geometry: Geometry, starts: tuple[int, ...]) -> KnownTensor:
        """What is known of a tensor whose geometry was found."""
        local, texts, copies, mesh = None, None, None, None
        if is_dist:
            local, texts, copies = local_shape(value), placement_texts(value), placement_copies(value)
            mesh = copy.copy(value.process_mesh)
        layout = value.shape, value.dtype, value.strides, value.is_contiguous()
        return KnownTensor(*layout, is_dist, local, texts, copies, mesh, geometry, starts)

    def is_of(self, value: Any, is_dist: bool, on_device: bool) -> bool:
        """Whether a tensor of this dtype has this geometry. To compare is much faster than to make a geometry."""
        if value.shape != self.shape or value.strides != self.strides or on_device is not self.geometry.on_device:
            return False
        if not (is_dist and self.is_dist):
            return is_dist is self.is_dist
        if local_shape(value) != self.local_shape:
            return False
        same = placement_texts(value) == self.placements if self.copies is None else value.placements == self.copies
        return bool(same and value.process_mesh == self.mesh)


@dataclass(frozen=True, slots=True, eq=False)
class TensorIdentity:
    """Tensors by weak references, with all that could change in place: contents apart, anything but the object can, by
    ``x.data = ...``, which may leave the address as it was, and the number of changes that Paddle counts.

    ``attributes`` are the fields of what is known of each, in columns: methods and getters, mapped, read many tensors
    several times faster than a loop over the tensors does.
    """

    references: list[weakref.ref[Any]]
    addresses: list[int]
    names: list[str]
    attributes: dict[str, list[Any]]

    @staticmethod
    def of(values: Sequence[Any], known: Sequence[KnownTensor], addresses: Sequence[int]) -> TensorIdentity:
        """The identity of tensors.

        Args:
            values: The tensors.
            known: What is known of each.
            addresses: Those of all their local shards.
        """
        where = list(addresses) if len(addresses) == len(values) else _addresses(values)
        attributes = {name: list(map(operator.attrgetter(name), known)) for name in KnownTensor.__slots__}
        return TensorIdentity(list(map(weakref.ref, values)), where, _read("name", values), attributes)

    def matches(self, values: Sequence[Any]) -> bool:
        """See :class:`..core.tensors.Identity`."""
        starts = range(0, len(values), _AT_ONCE)
        return len(values) == len(self.references) and all(
            self._match(values[start : start + _AT_ONCE], slice(start, start + _AT_ONCE)) for start in starts
        )

    def _match(self, values: Sequence[Any], place: slice) -> bool:
        """Whether these are the tensors at a place. The strides of contiguous ones follow from their shapes."""
        expected = {name: column[place] for name, column in self.attributes.items()}
        is_dist, contiguous = expected["is_dist"], expected["contiguous"]
        return (
            all(map(operator.is_, (reference() for reference in self.references[place]), values))
            and _read("name", values) == self.names[place]
            and _addresses(values) == self.addresses[place]
            and (all(is_dist) or list(map(paddle.Tensor.is_dist, values)) == is_dist)  # another one has no mesh
            and list(map(paddle.Tensor.is_contiguous, values)) == contiguous
            and _read("dtype", values) == expected["dtype"]
            and _read("shape", values) == expected["shape"]
            and _read("strides", _without(values, contiguous)) == _without(expected["strides"], contiguous)
            and not any(getattr(value, "is_distributed", False) for value in _without(values, is_dist))
            and (True not in is_dist or _are_distributed_so(values, expected))
        )


def _are_distributed_so(values: Sequence[Any], expected: Mapping[str, list[Any]]) -> bool:
    """Whether the DistTensors among tensors have the attributes that others do not have."""

    def of_dist(column: Sequence[Any]) -> list[Any]:
        return list(itertools.compress(column, expected["is_dist"]))

    values, copies = of_dist(values), of_dist(expected["copies"])
    return (
        list(map(local_shape, values)) == of_dist(expected["local_shape"])
        and _read("process_mesh", values) == of_dist(expected["mesh"])
        and (
            list(map(placement_texts, values)) == of_dist(expected["placements"])
            if None in copies
            else _read("placements", values) == copies
        )
    )


def _without(values: Sequence[Any], left_out: Sequence[bool]) -> list[Any]:
    return list(itertools.compress(values, map(operator.not_, left_out)))


def _read(name: str, values: Sequence[Any]) -> list[Any]:
    """An attribute of many tensors."""
    return list(map(getattr(paddle.Tensor, name).__get__, values))


def _addresses(values: Sequence[Any]) -> list[int]:
    try:
        return list(map(paddle.Tensor.data_ptr, values))
    except RuntimeError:  # of a tensor that has no memory on this rank
        return [value.data_ptr() if value._is_initialized() else 0 for value in values]
