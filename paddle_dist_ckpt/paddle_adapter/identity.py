"""Recognises Paddle's tensors by everything that their geometry follows from, one by one or many at once."""

from __future__ import annotations

import copy
import itertools
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import paddle

from ..core.tensors import Geometry
from .device import devices_of
from .placement import local_shape, placement_copies, placement_texts
from .refusals import is_offloaded

__all__ = ["KnownTensor", "TensorIdentity", "addresses_of", "have_rest", "looks_of", "read", "shape_bytes"]

_AT_ONCE = 256  # tensors whose attributes are compared one after the other: so many stay in a core's cache meanwhile

shape_bytes = msgspec.msgpack.Encoder().encode
"""A shape as a key of a dict: made faster than a tuple, and with a hash that nobody knows; see :func:`.hash_of`."""


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
    device: str | None
    is_dist: bool
    local_shape: list[int] | None  # this and the following are None if it is not a DistTensor
    placements: list[str] | None
    copies: list[Any] | None
    mesh: Any
    geometry: Geometry
    starts: tuple[int, ...]  # of its local shards in its memory, in bytes

    @property
    def look(self) -> tuple[Any, ...]:
        """What tells most tensors apart, with a fast hash. No other dtype has this id as long as this one is kept."""
        local = None if self.local_shape is None else shape_bytes(self.local_shape)
        return shape_bytes(self.shape), id(self.dtype), local, self.device

    @staticmethod
    def of(value: Any, is_dist: bool, device: str | None, geometry: Geometry, starts: tuple[int, ...]) -> KnownTensor:
        """What is known of a tensor whose geometry was found."""
        local, texts, copies, mesh = None, None, None, None
        if is_dist:
            local, texts, copies = local_shape(value), placement_texts(value), placement_copies(value)
            mesh = copy.copy(value.process_mesh)
        layout = value.shape, value.dtype, value.strides, value.is_contiguous()
        return KnownTensor(*layout, device, is_dist, local, texts, copies, mesh, geometry, starts)

    def is_of(self, value: Any, is_dist: bool, device: str | None) -> bool:
        """Whether a tensor of this dtype has this geometry. To compare is much faster than to make a geometry."""
        if value.shape != self.shape or value.strides != self.strides or device != self.device:
            return False
        if not (is_dist and self.is_dist):
            return is_dist is self.is_dist
        if local_shape(value) != self.local_shape:
            return False
        same = placement_texts(value) == self.placements if self.copies is None else value.placements == self.copies
        return bool(same and value.process_mesh == self.mesh)


@dataclass(frozen=True, slots=True, eq=False)
class TensorIdentity:
    """Tensors by weak references, with all that could change in place, but for their contents.

    Anything but the object itself can: ``x.data = ...`` may leave the address as it was, and the number of changes that
    Paddle counts.

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
        where = list(addresses) if len(addresses) == len(values) else addresses_of(values)
        return TensorIdentity(list(map(weakref.ref, values)), where, read("name", values), _columns(known))

    def matches(self, values: Sequence[Any]) -> bool:
        """See :class:`..core.tensors.Identity`."""
        starts = range(0, len(values), _AT_ONCE)
        return len(values) == len(self.references) and all(
            self._match(values[start : start + _AT_ONCE], slice(start, start + _AT_ONCE)) for start in starts
        )

    def _match(self, values: Sequence[Any], place: slice) -> bool:
        """Whether these are the tensors at a place."""
        return (
            all(map(operator.is_, map(weakref.ref.__call__, self.references[place]), values))
            and read("name", values) == self.names[place]
            and addresses_of(values) == self.addresses[place]
            and _have(values, {name: column[place] for name, column in self.attributes.items()})
        )


def looks_of(values: Sequence[Any]) -> Iterable[tuple[Any, ...]]:
    """Of each tensor, the :attr:`KnownTensor.look` that it has in common with those that it may be like.

    Raises:
        RuntimeError: one has no memory, where there are devices.
    """
    is_dist = list(map(paddle.Tensor.is_dist, values))
    local = [shape_bytes(local_shape(one)) if dist else None for one, dist in zip(values, is_dist, strict=True)]
    shapes, dtypes = map(shape_bytes, read("shape", values)), map(id, read("dtype", values))
    return zip(shapes, dtypes, local, devices_of(values), strict=True)


def have_rest(values: Sequence[Any], known: Sequence[KnownTensor]) -> bool:
    """Whether tensors have the geometries that are known of others that look the same."""
    return _have_rest(values, _columns(known))


def _columns(known: Sequence[KnownTensor]) -> dict[str, list[Any]]:
    """The fields of what is known of each tensor. Often they are all alike, which is fast to see."""
    if known and known.count(known[0]) == len(known):
        return {name: [getattr(known[0], name)] * len(known) for name in KnownTensor.__slots__}
    return {name: list(map(operator.attrgetter(name), known)) for name in KnownTensor.__slots__}


def _have(values: Sequence[Any], expected: Mapping[str, list[Any]]) -> bool:
    """Whether tensors have these attributes."""
    is_dist = expected["is_dist"]
    return (
        list(map(paddle.Tensor.is_dist, values)) == is_dist
        and read("dtype", values) == expected["dtype"]
        and read("shape", values) == expected["shape"]
        and devices_of(values) == expected["device"]
        and list(map(local_shape, _only(values, is_dist))) == _only(expected["local_shape"], is_dist)
        and _have_rest(values, expected)
    )


def _have_rest(values: Sequence[Any], expected: Mapping[str, list[Any]]) -> bool:
    """The same of those that have not been compared yet. The strides of contiguous ones follow from their shapes."""
    is_dist, contiguous = expected["is_dist"], expected["contiguous"]
    plain = _without(values, is_dist)
    return (
        all(map(paddle.Tensor.is_dense, plain))
        and not any(
            getattr(one, "is_distributed", False)
            or (getattr(one, "master_weight", None) is not None and is_offloaded(one))
            for one in plain
        )
        and list(map(paddle.Tensor.is_contiguous, values)) == contiguous
        and read("strides", _without(values, contiguous)) == _without(expected["strides"], contiguous)
        and (True not in is_dist or _are_distributed_so(values, expected))
    )


def _are_distributed_so(values: Sequence[Any], expected: Mapping[str, list[Any]]) -> bool:
    """Whether the DistTensors among tensors have these meshes and placements."""

    def of_dist(column: Sequence[Any]) -> Sequence[Any]:
        return _only(column, expected["is_dist"])

    values, copies = of_dist(values), of_dist(expected["copies"])
    return read("process_mesh", values) == of_dist(expected["mesh"]) and (
        list(map(placement_texts, values)) == of_dist(expected["placements"])
        if None in copies
        else read("placements", values) == copies
    )


def _only(values: Sequence[Any], chosen: Sequence[bool]) -> Sequence[Any]:
    return list(itertools.compress(values, chosen)) if False in chosen else values


def _without(values: Sequence[Any], left_out: Sequence[bool]) -> list[Any]:
    return list(itertools.compress(values, map(operator.not_, left_out))) if False in left_out else []


def read(name: str, values: Sequence[Any]) -> list[Any]:
    """An attribute of many tensors."""
    return list(map(getattr(paddle.Tensor, name).__get__, values))


def addresses_of(values: Sequence[Any]) -> list[int]:
    """Where tensors' memory starts; 0, or None, for one that has none on this rank."""
    try:
        return list(map(paddle.Tensor.data_ptr, values))
    except RuntimeError:
        return [value.data_ptr() if value._is_initialized() else 0 for value in values]
