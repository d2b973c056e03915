"""Paddle tensors as the engine sees them: boxes of memory, without a copy."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from ..core.box import whole
from ..core.dtypes import DType, arithmetic_dtype, dtype_named
from ..core.paths import plain_key
from ..core.shards import Kind
from ..core.tensors import Geometry, Piece, TensorView, is_native_array, view_of_array
from ..errors import UnsupportedValueError
from .placement import local_box, mesh_coordinate, reduction_of

__all__ = ["PaddleAdapter"]


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A geometry, and all attributes of a tensor from which it follows."""

    shape: list[int]
    dtype: Any
    strides: list[int]
    contiguous: bool
    local_shape: list[int] | None
    placements: Any
    mesh: Any
    geometry: Geometry

    def is_of(self, value: Any, is_dist: bool) -> bool:
        """Whether a tensor of this dtype has this geometry. To compare is much faster than to make a geometry."""
        if value.shape != self.shape or value.strides != self.strides:
            return False
        if not is_dist:
            return self.mesh is None
        if self.mesh is None or _local_shape(value) != self.local_shape:
            return False
        return bool(value.placements == self.placements and value.process_mesh == self.mesh)


class PaddleAdapter:
    """Makes paddle.Tensor (plain and DistTensor) and numpy arrays accessible to the engine.

    Args:
        rank: This process's global rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._dtypes: dict[Any, DType] = {}
        self._known: dict[tuple[Any, ...], list[_Known]] = {}
        self._last: _Known | None = None
        self._viewed: list[_Known] = []  # of each Paddle tensor that was looked at
        self._host_only = not _has_devices()

    @property
    def version(self) -> str | None:
        """Paddle's version."""
        return str(paddle.__version__)

    def is_tensor(self, value: Any) -> bool:
        """See :class:`..core.tensors.TensorAdapter`."""
        return isinstance(value, paddle.Tensor) or is_native_array(value)

    def view(self, value: Any, path: str) -> TensorView:
        """See :class:`..core.tensors.TensorAdapter`."""
        if isinstance(value, np.ndarray):
            return view_of_array(value)
        is_dist = value.is_dist()
        if not is_dist:
            _check_plain(value, path)
        known = self._last
        if known is None or known.dtype is not value.dtype or not known.is_of(value, is_dist):
            known = self._find(value, is_dist, path)
        self._viewed.append(known)
        geometry = known.geometry
        if not geometry.pieces:
            return TensorView(geometry, (), value, value.name)
        return TensorView(geometry, (self._address(value, geometry, path),), value, value.name)

    def _find(self, value: Any, is_dist: bool, path: str) -> _Known:
        """The geometry of a tensor that is not like the one before."""
        shape, dtype = tuple(value.shape), value.dtype
        candidates = self._known.setdefault((shape, dtype), [])
        for known in candidates:
            if known.is_of(value, is_dist):
                self._last = known
                return known
        make, key = self._dist_geometry if is_dist else self._plain_geometry, plain_key(path)
        geometry = make(value, shape, self._dtype(dtype, key), key)
        local, placements, mesh = None, None, None
        if is_dist:
            local, placements, mesh = _local_shape(value), value.placements, value.process_mesh
        self._last = _Known(value.shape, dtype, value.strides, value.is_contiguous(), local, placements, mesh, geometry)
        candidates.append(self._last)
        return self._last

    @staticmethod
    def _plain_geometry(value: Any, shape: tuple[int, ...], dtype: DType, key: str) -> Geometry:
        return Geometry(Kind.TENSOR, dtype, shape, True, (Piece(whole(shape), _strides(value, dtype)),))

    def _dist_geometry(self, value: Any, shape: tuple[int, ...], dtype: DType, key: str) -> Geometry:
        mesh, placements = value.process_mesh, value.placements
        coordinate = mesh_coordinate(mesh, self._rank)
        if coordinate is None:
            return Geometry(Kind.TENSOR, dtype, shape, False, ())
        reduction = reduction_of(mesh.shape, coordinate, placements, key)
        box = local_box(shape, mesh.shape, coordinate, placements, key)
        local = value._local_value()
        found = tuple(local.shape)
        if found != box.shape and 0 not in (*found, *box.shape):
            raise UnsupportedValueError(
                f"{key}: its local value has shape {list(found)}, but by its placements it is {box} of {list(shape)}; "
                "this version of Paddle cuts tensors otherwise than this library knows"
            )
        if 0 in shape:
            box = whole(shape)
        pieces = (Piece(box, _strides(local, dtype)),) if box.size or 0 in shape else ()
        return Geometry(Kind.TENSOR, dtype, shape, False, pieces, reduction)

    def _address(self, value: Any, geometry: Geometry, path: str) -> int:
        """Where a tensor's local value is.

        Raises:
            UnsupportedValueError: nowhere, or not in host memory.
        """
        if 0 in geometry.shape:
            return 0
        if not (self._host_only or value.place.is_cpu_place()):
            raise UnsupportedValueError(
                f"{plain_key(path)}: is on {value.place}; only tensors in host memory are supported so far"
            )
        try:
            address = int(value.data_ptr() or 0)
        except (RuntimeError, ValueError):
            address = 0
        if not address:
            raise UnsupportedValueError(f"{plain_key(path)}: the tensor has no memory yet; it was never initialized")
        return address

    def _dtype(self, dtype: Any, key: str) -> DType:
        known = self._dtypes.get(dtype)
        if known is None:
            try:
                known = self._dtypes[dtype] = dtype_named(str(dtype).rpartition(".")[2])
            except UnsupportedValueError as error:
                raise UnsupportedValueError(f"{key}: {error}") from None
        return known

    def identity(self, values: Sequence[Any], addresses: Sequence[int]) -> _Identity | None:
        """See :class:`..core.tensors.TensorAdapter`."""
        if not all(isinstance(value, paddle.Tensor) for value in values):
            return None
        references = [weakref.ref(value) for value in values]
        known = list(addresses) if len(addresses) == len(values) else _addresses(values)
        if len(self._viewed) != len(values):  # others were looked at meanwhile, so these are looked at again
            return _Identity(references, known, *map(list, _columns(values)))
        versions, distributed, names = (list(column) for column in itertools.islice(_columns(values), 3))
        shapes, dtypes = [one.shape for one in self._viewed], [one.dtype for one in self._viewed]
        contiguous = [one.contiguous for one in self._viewed]
        strides = [one.strides for one in self._viewed if not one.contiguous]
        return _Identity(references, known, versions, distributed, names, shapes, dtypes, contiguous, strides)

    def empty(self, shape: tuple[int, ...], dtype: DType, on_host: bool) -> Any:
        """See :class:`..core.tensors.TensorAdapter`."""
        if dtype.name.startswith("uint") and dtype.itemsize > 1:  # Paddle's own tensors never have these
            return np.empty(shape, arithmetic_dtype(dtype))
        tensor = paddle.empty(list(shape), dtype=dtype.name)
        return tensor.cpu() if on_host and not tensor.place.is_cpu_place() else tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Identity:
    """Tensors by weak references, with what could change in place: memory by ``set_value``, or anything but the object
    by ``x.data = ...``. A DistTensor's mesh and placements are not compared, because to read them takes longer than all
    the rest: only by assigning to ``data`` another DistTensor over the very same memory could they change."""

    references: list[weakref.ref[Any]]
    addresses: list[int]
    versions: list[int]
    distributed: list[bool]
    names: list[str]
    shapes: list[Any]
    dtypes: list[Any]
    contiguous: list[bool]
    strides: list[Any]

    def matches(self, values: Sequence[Any]) -> bool:
        if len(values) != len(self.references):
            return False
        if not all(map(operator.is_, (reference() for reference in self.references), values)):
            return False
        versions, distributed, names, shapes, dtypes, contiguous, strides = _columns(values)
        return (
            list(versions) == self.versions
            and list(distributed) == self.distributed
            and list(names) == self.names
            and all(map(operator.eq, shapes, self.shapes))
            and all(map(operator.is_, dtypes, self.dtypes))  # singletons; others would only be looked at anew
            and contiguous == self.contiguous
            and strides == self.strides
            and _addresses(values) == self.addresses
        )


def _columns(values: Sequence[Any]) -> Iterator[Any]:
    """Attributes of tensors, one after the other. Methods and getters, mapped, read them much faster than a loop."""
    tensor = paddle.Tensor
    yield map(tensor._inplace_version, values)
    yield map(tensor.is_dist, values)
    for name in ("name", "shape", "dtype"):
        yield map(getattr(tensor, name).__get__, values)
    contiguous = list(map(tensor.is_contiguous, values))
    yield contiguous
    # Those of a contiguous tensor follow from its shape.
    yield [value.strides for value in itertools.compress(values, map(operator.not_, contiguous))]


def _addresses(values: Sequence[Any]) -> list[int]:
    try:
        return list(map(paddle.Tensor.data_ptr, values))
    except RuntimeError:  # of a tensor that has no memory on this rank
        return [value.data_ptr() if value._is_initialized() else 0 for value in values]


def _check_plain(value: Any, path: str) -> None:
    """Refuse plain tensors that cannot be saved or loaded."""
    if not value.is_dense():
        raise UnsupportedValueError(
            f"{plain_key(path)}: sparse tensors cannot be saved or loaded; use to_dense() first"
        )
    if getattr(value, "is_distributed", False):
        raise UnsupportedValueError(
            f"{plain_key(path)}: a plain tensor that is marked is_distributed is one rank's part of a larger one, and "
            "says not which. The layer's sharded_state_dict() says it (but is not supported yet); or use a DistTensor"
        )


def _local_shape(value: Any) -> list[int]:
    shape: list[int] = value._local_shape if hasattr(value, "_local_shape") else value._local_value().shape
    return shape


def _strides(local: Any, dtype: DType) -> tuple[int, ...] | None:
    """Bytes from one element to the next, one a dimension, or None for contiguous memory."""
    if local.is_contiguous() or 0 in local.shape:
        return None
    return tuple(stride * dtype.itemsize for stride in local.strides)


def _has_devices() -> bool:
    """Whether this Paddle can have tensors elsewhere than in host memory."""
    builds = ("is_compiled_with_cuda", "is_compiled_with_rocm", "is_compiled_with_xpu", "is_compiled_with_ipu")
    if any(getattr(paddle, name)() for name in builds if hasattr(paddle, name)):
        return True
    custom = getattr(paddle.device, "get_all_custom_device_type", None)
    return bool(custom()) if custom is not None else True
