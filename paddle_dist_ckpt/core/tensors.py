"""What the engine knows of a tensor that lives on this rank, whatever framework it belongs to.

A tensor is a :class:`Geometry`, which tensors that are alike share, and the addresses of its local shards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .box import Box, whole
from .decoding import hash_of
from .device_memory import DeviceAccess
from .dtypes import DTYPES, DType
from .memory import address_of
from .shards import Kind

__all__ = [
    "Geometry",
    "Identity",
    "LocalShard",
    "Reduction",
    "TensorAdapter",
    "TensorView",
    "TensorViews",
    "is_native_array",
    "view_of_array",
]


class LocalShard(NamedTuple):
    """A box of a global tensor in this rank's memory.

    Attributes:
        box: Where it lies in the global tensor.
        strides: Bytes from one element to the next, one a dimension; None if it is contiguous.
    """

    box: Box
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Reduction:
    """This rank's part in a partial tensor, whose value is the reduction of several addends.

    Attributes:
        operation: ``"sum"``, ``"avg"``, ``"max"``, ``"min"``, ``"prod"``, ``"any"`` or ``"all"``.
        position: Which addend this rank holds.
        count: How many there are.
    """

    operation: str
    position: int
    count: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """All of a tensor but its memory and its names.

    Attributes:
        kind: Whether it is the framework's tensor or a numpy array.
        dtype: Its element type.
        shape: Its global shape.
        plain: Whether it is not distributed: whole on every rank that has it, and the same on all.
        shards: What this rank has of it, none of them empty; none if its mesh does not hold this rank. A tensor
            without elements has itself as its one shard.
        reduction: What this rank's shards are, if the tensor is partial.
        writable: Whether a load can fill it.
        device: The device whose memory it is in, and where alone its addresses mean something; None for the host.
    """

    kind: Kind
    dtype: DType
    shape: tuple[int, ...]
    plain: bool
    shards: tuple[LocalShard, ...]
    reduction: Reduction | None = None
    writable: bool = True
    device: str | None = None

    def __hash__(self) -> int:
        return hash_of(self.shape)  # shapes may be a stranger's

    @property
    def on_device(self) -> bool:
        """Whether its memory is a device's."""
        return self.device is not None


class TensorView(NamedTuple):
    """A tensor as this rank sees it.

    Attributes:
        geometry: What it has in common with tensors that are alike.
        addresses: Where each of its shards starts in this process's memory. (That of an empty one means nothing.)
        owner: Keeps that memory alive.
        name: The framework's name of the variable.
    """

    geometry: Geometry
    addresses: tuple[int, ...]
    owner: Any
    name: str | None


class TensorViews(NamedTuple):
    """Several tensors as this rank sees them, in columns; see :class:`TensorView`.

    Attributes:
        geometries: That of each.
        addresses: Where all their shards start, tensor by tensor.
        owners: What keeps the memory of each alive.
        names: The framework's names of the variables.
    """

    geometries: Sequence[Geometry]
    addresses: Sequence[int]
    owners: Sequence[Any]
    names: Sequence[str | None]


class Identity(Protocol):
    """Remembers tensors without keeping them alive, to tell later whether they are the same."""

    def matches(self, values: Sequence[Any]) -> bool:
        """Whether these are the very same tensors, still of the same geometry and at the same addresses."""
        ...


class TensorAdapter(Protocol):
    """Makes a framework's tensors accessible."""

    @property
    def devices(self) -> DeviceAccess | None:
        """How to reach the memory of devices; None if no tensor is ever there."""
        ...

    @property
    def tensor_types(self) -> frozenset[type]:
        """Types of which every instance is a tensor; there may be others."""
        ...

    def is_tensor(self, value: Any) -> bool:
        """Whether :meth:`view` takes it."""
        ...

    def names(self, tensors: Sequence[Any]) -> list[str | None]:
        """The framework's names of the tensors' variables."""
        ...

    def view(self, value: Any, path: str) -> TensorView:
        """Look at a tensor without copying it. Tensors that are alike get the same Geometry object, as far as possible.

        Args:
            value: The tensor.
            path: Its path, for errors.

        Raises:
            UnsupportedValueError: it cannot be saved or loaded.
        """
        ...

    def views(self, values: Sequence[Any], paths: Sequence[str] = ()) -> TensorViews | None:
        """Look at several tensors at once, which is faster than one by one. ``paths`` are theirs.

        None if that cannot be done: some of them are like none that :meth:`view` has seen, or cannot be saved.
        """
        ...

    def identity(self, values: Sequence[Any], addresses: Sequence[int]) -> Identity | None:
        """Something by which to recognise these tensors, or None if that is not possible for some of them.

        ``addresses`` are those of all their shards, as :meth:`view` has found them.
        """
        ...

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """A new plain tensor, its content arbitrary, where this adapter makes tensors.

        Raises:
            UnsupportedValueError: the framework has none of this shape.
        """
        ...

    @property
    def version(self) -> str | None:
        """The framework's version."""
        ...


def is_native_array(value: Any) -> bool:
    """Whether a value is a numpy array that is handled like a tensor."""
    return type(value) is np.ndarray and _native(value.dtype) is not None


def view_of_array(array: npt.NDArray[Any]) -> TensorView:
    """A numpy array of a native type as a plain tensor."""
    flags = array.flags
    strides = None if flags.c_contiguous else array.strides
    geometry = _geometry_of_array(array.dtype, array.shape, strides, flags.writeable)
    return TensorView(geometry, (address_of(array),), array, None)


@functools.lru_cache(maxsize=256)
def _geometry_of_array(
    dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...] | None, writable: bool
) -> Geometry:
    """What arrays that are alike have in common: most are like one of the latest."""
    native = _native(dtype)
    assert native is not None
    return Geometry(Kind.ARRAY, native, shape, True, (LocalShard(whole(shape), strides),), None, writable)


@functools.lru_cache(maxsize=256)
def _native(dtype: np.dtype[Any]) -> DType | None:
    """The element type that numpy has as this one, None if arrays of it are not handled like tensors. Numpy puts a
    type's name together whenever it is asked for it, which takes longer than all else that is asked of an array."""
    return DTYPES.get(dtype.name) if dtype.isnative else None
