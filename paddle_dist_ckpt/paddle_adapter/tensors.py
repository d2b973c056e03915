"""Paddle tensors as the engine sees them: boxes of memory, without a copy."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle

from ..core.box import Box, cut_flat_range, whole
from ..core.cached import cached_property
from ..core.device_memory import contiguous_strides
from ..core.dtypes import DType, arithmetic_dtype, dtype_named
from ..core.shards import Kind
from ..core.tensors import Geometry, LocalShard, TensorView, TensorViews, is_native_array, view_of_array
from ..errors import UnsupportedValueError
from ..tree.objects import ObjectKind, state_of
from ..tree.paths import occurs, plain_key
from ..tree.state_dict import Leaves
from . import objects, optimizers
from .device import at_device, device_of, has_devices
from .device_copies import PaddleDevices
from .device_streams import current_stream
from .identity import KnownTensor, TensorIdentity, addresses_of, have_rest, looks_of, read, shape_bytes
from .masters import renew_masters, renew_masters_of_program
from .placement import IS_PADDLE_2_6, layout_of, local_box, mesh_coordinate, reduction_of
from .refusals import check_name, check_offloaded, check_plain, check_slice, no_memory
from .sharded_weight import WeightPart, is_sharded_weight
from .static_program import OFFLOADED, SLICE, is_program, program_state, variables_by_address
from .wrappers import refusal, unwrapped

__all__ = ["PaddleAdapter"]

_MOST_DIMENSIONS = 9  # that Paddle's tensors have
_NUMBERED = "eager_tmp_"  # so the names begin by which Paddle numbers what operations return


class PaddleAdapter:
    """Makes paddle.Tensor (plain and DistTensor), ShardedWeight and numpy arrays accessible to the engine.

    Args:
        rank: This process's global rank.
        piece_bytes: To fill tensors: cut what is on a device in pieces of at most so many bytes. None to save them:
            nothing is cut, and a static-graph program's state is all that it has, and not only what it has in its mode.
        place: Where to make tensors, as Paddle names it; None for Paddle's current device.

    Attributes:
        devices, tensor_types: See :class:`..core.tensors.TensorAdapter`.

    Raises:
        ValueError: this Paddle has no such place.
    """

    tensor_types = frozenset([paddle.Tensor, paddle.base.framework.EagerParamBase])

    def __init__(self, rank: int, piece_bytes: int | None = None, place: str | None = None) -> None:
        self._rank, self._piece_bytes, self._place = rank, piece_bytes, place
        if place is not None:
            paddle.device._convert_to_place(place)  # raises if there is none
        self._dtypes: dict[Any, DType] = {}
        self._known: dict[tuple[Any, ...], list[KnownTensor]] = {}
        self._likely: dict[tuple[Any, ...], KnownTensor] = {}  # the last one of each look
        self._last: KnownTensor | None = None
        self._sharded: dict[tuple[WeightPart, DType, str | None], tuple[Geometry, tuple[int, ...]]] = {}
        self._stepped: set[str] = set()  # the names of what is frozen and has an optimizer
        self._viewed: dict[int, KnownTensor] = {}  # by the id of each Paddle tensor that was looked at
        self.devices = PaddleDevices() if has_devices() else None

    @property
    def version(self) -> str | None:
        """Paddle's version."""
        return str(paddle.__version__)

    def is_tensor(self, value: Any) -> bool:
        """See :class:`..core.tensors.TensorAdapter`."""
        return isinstance(value, paddle.Tensor) or is_native_array(value) or is_sharded_weight(value)

    # See :class:`..tree.state_dict.Adapter`. The entries of an optimizer are its accumulators.
    is_object = staticmethod(objects.is_object)
    is_defined_by_user = staticmethod(objects.is_defined_by_user)
    needs_all_entries = staticmethod(objects.needs_all_entries)
    may_be_disabled = staticmethod(objects.may_be_disabled)
    make_entries = staticmethod(optimizers.make_accumulators)

    def open_object(self, value: Any, key: str) -> tuple[ObjectKind, dict[Any, Any]]:
        """See :class:`..tree.state_dict.Adapter`."""
        refused = refusal(value)
        if refused is not None:
            raise UnsupportedValueError(f"{key}: {refused}")
        value = unwrapped(value)
        if optimizers.is_optimizer(value):
            optimizers.check_optimizer(value, key)
            self._stepped.update(one.name for one in optimizers.parameters_of(value) if one.stop_gradient)
            return ObjectKind.OPTIMIZER, optimizers.optimizer_state(value, key)
        if is_program(value):
            return ObjectKind.PROGRAM, program_state(value, key, of_any_mode=self._piece_bytes is None)
        kind = ObjectKind.FIXED if isinstance(value, paddle.nn.Layer) else ObjectKind.FREE
        return kind, state_of(value, key)

    def restore(self, value: Any, state: dict[Any, Any]) -> list[str]:
        """See :class:`..tree.state_dict.Adapter`."""
        not_taken = objects.restore(value, state)
        renew_masters_of_program(value, self.names, self._rank)
        return not_taken

    def parameters(self, value: Any) -> list[int]:
        """See :class:`..tree.state_dict.Adapter`."""
        return [id(parameter) for parameter in optimizers.parameters_of(value)]

    def frozen(self, value: Any) -> list[int]:
        """See :class:`..tree.state_dict.Adapter`."""
        return [id(parameter) for parameter in optimizers.frozen_of(value)]

    def token(self, tensor: Any) -> int:
        """See :class:`..tree.state_dict.Adapter`."""
        return id(_local(tensor))

    def change(self, tensors: Sequence[Any]) -> None:
        """See :class:`..tree.state_dict.Adapter`. A gradient that needs what they have held is an error then."""
        if not self.tensor_types.issuperset(map(type, tensors)):  # else none need be asked, of which there may be many
            tensors = [tensor for tensor in map(_local, tensors) if isinstance(tensor, paddle.Tensor)]
        deque(map(paddle.Tensor._bump_inplace_version, tensors), maxlen=0)

    def renew(self, leaves: Leaves, filled: Collection[int], lacking: Collection[int]) -> set[int]:
        """See :class:`..tree.state_dict.Adapter`."""
        return renew_masters(leaves, filled, lacking, self.names, self._rank)

    def names(self, tensors: Sequence[Any]) -> list[str | None]:
        """See :class:`..core.tensors.TensorAdapter`."""
        return [self._name(one) if isinstance(one, paddle.Tensor) else None for one in map(_local, tensors)]

    def _name(self, tensor: Any) -> str | None:
        """The name of a tensor's variable, if it says anything."""
        name: str = tensor.name
        return name if not name.startswith(_NUMBERED) else self._of_variable(tensor, name)

    def _of_variable(self, tensor: Any, number: str) -> str | None:
        """The name of what is called by a number. That tells something of what an optimizer may step, or would if it
        were not frozen, for it calls accumulators after it; copies of such have another one in each save, which could
        keep no plan."""
        if (not tensor.stop_gradient and tensor.is_leaf) or number in self._stepped:
            return number
        return self._variables.get(tensor.data_ptr()) if self._variables and tensor._is_initialized() else None

    @cached_property
    def _variables(self) -> dict[int, str]:
        return variables_by_address()

    def view(self, value: Any, path: str) -> TensorView:
        """See :class:`..core.tensors.TensorAdapter`."""
        if not isinstance(value, paddle.Tensor):
            return view_of_array(value) if isinstance(value, np.ndarray) else self._view_part(value, path)
        is_dist, dtype = value.is_dist(), value.dtype
        if not is_dist:
            check_plain(value, path)
        known = self._last
        try:
            # In newer versions of Paddle dtypes are singletons, which is faster to see than that they are equal.
            device = device_of(value) if self.devices is not None else None
            if (
                known is None
                or not (known.dtype is dtype or known.dtype == dtype)
                or not known.is_of(value, is_dist, device)
            ):
                known = self._last = self._find(value, is_dist, device, path)
                self._likely[known.look] = known
        except NotImplementedError:  # so Paddle refuses to tell the local shape
            raise no_memory(path, value) from None
        if IS_PADDLE_2_6 and is_dist:
            check_name(value.name, path)
        self._viewed[id(value)] = known
        name, addresses = self._name(value), _addresses(value, known.geometry, known.starts, path)
        check_slice(name, path)
        return TensorView(known.geometry, addresses, value, name)

    def views(self, values: Sequence[Any], paths: Sequence[str] = ()) -> TensorViews | None:
        """See :class:`..core.tensors.TensorAdapter`. It cannot be done of those in pieces, or without elements."""
        if IS_PADDLE_2_6 or not self.tensor_types.issuperset(map(type, values)):
            return None
        if occurs(f"/{SLICE}", paths):  # some may have to be refused
            return None
        if any(value.dtype is not value.dtype for value in values[:1]):
            return None  # Paddle 3.0 makes a new dtype for each that asks, and so no two tensors would look the same
        try:
            known = [one for one in map(self._likely.get, looks_of(values)) if one is not None]
            if not known or len(known) < len(values) or not have_rest(values, known):
                return None
            if any(len(one.starts) > 1 for one in known):
                return None
        except RuntimeError:  # Paddle refuses to tell something of a tensor without memory
            return None
        addresses = addresses_of(list(itertools.compress(values, (one.starts for one in known))))
        if not all(addresses):  # as where there are no elements, or no memory
            return None
        self._viewed.update(zip(map(id, values), known, strict=True))
        names = [
            name if not name.startswith(_NUMBERED) else self._of_variable(value, name)
            for value, name in zip(values, read("name", values), strict=True)
        ]
        joined = "\n".join(filter(None, names))
        if SLICE in joined or OFFLOADED in joined:
            return None
        return TensorViews([one.geometry for one in known], addresses, values, names)

    def _placed(
        self, geometry: Geometry, starts: tuple[int, ...], device: str | None
    ) -> tuple[Geometry, tuple[int, ...]]:
        """The geometry, on the device if it is there, with large shards cut; and where in the memory each shard starts.

        Args:
            geometry: The geometry, not cut.
            starts: Where each of its shards starts, in bytes.
            device: The device that the tensor is on, if any.
        """
        if device is None or not starts:
            return geometry, starts
        shards: list[LocalShard] = []
        cut_starts: list[int] = []
        itemsize = geometry.dtype.itemsize
        most = max(1, (self._piece_bytes or 1 << 62) // itemsize)
        for (box, strides), start in zip(geometry.shards, starts, strict=True):
            steps = contiguous_strides(box.shape, itemsize) if strides is None else strides
            for low in range(0, max(1, box.size), most):
                for part in cut_flat_range(box.shape, low, min(low + most, box.size)) or [whole(box.shape)]:
                    moved = tuple(map(sum, zip(box.offset, part.offset, strict=True)))
                    shards.append(LocalShard(Box(moved, part.shape), strides))
                    cut_starts.append(start + sum(map(operator.mul, part.offset, steps)))
        return dataclasses.replace(geometry, shards=tuple(shards), device=device), tuple(cut_starts)

    def _view_part(self, weight: Any, path: str) -> TensorView:
        """A ShardedWeight. Parts that are the same box are compared, and are divided among the ranks that have them."""
        local, key = _local(weight), plain_key(path)
        if not isinstance(local, paddle.Tensor) or not (local.is_dist() or local.is_dense()):
            raise UnsupportedValueError(f"{key}: the local_tensor of a ShardedWeight must be a dense paddle.Tensor")
        if local.is_dist():
            local = local._local_value()
        check_offloaded(local, path)
        dtype = self._dtype(local.dtype, key)
        part = WeightPart.of(weight, local.shape, _strides(local, dtype) if local._is_initialized() else None)
        device = device_of(local) if self.devices is not None else None
        known = self._sharded.get((part, dtype, device))
        if known is None:
            known = self._sharded[part, dtype, device] = self._placed(*part.geometry(dtype, key), device)
        addresses = _addresses(local, *known, path)
        return TensorView(known[0], addresses, (local,), self._name(local))  # not the tensor itself: that is plain

    def _find(self, value: Any, is_dist: bool, device: str | None, path: str) -> KnownTensor:
        """The geometry of a tensor that is not like the one before."""
        shape, dtype = tuple(value.shape), value.dtype
        candidates = self._known.setdefault((shape_bytes(shape), dtype), [])
        for known in candidates:
            if known.is_of(value, is_dist, device):
                return known
        key = plain_key(path)
        element = self._dtype(dtype, key)
        if is_dist:
            geometry = self._dist_geometry(value, shape, element, key)
        else:
            shard = LocalShard(whole(shape), _strides(value, element))
            geometry = Geometry(Kind.TENSOR, element, shape, True, (shard,))
        placed = self._placed(geometry, (0,) * len(geometry.shards), device)
        candidates.append(KnownTensor.of(value, is_dist, device, *placed))
        return candidates[-1]

    def _dist_geometry(self, value: Any, shape: tuple[int, ...], dtype: DType, key: str) -> Geometry:
        mesh, placements = layout_of(value, key)
        coordinate = mesh_coordinate(mesh, self._rank)
        # A rank that has nothing says the same of the tensor as those that have.
        reduction = reduction_of(mesh.shape, coordinate or [0] * len(mesh.shape), placements, key)
        if coordinate is None:
            return Geometry(Kind.TENSOR, dtype, shape, False, (), reduction)
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
        shards = (LocalShard(box, _strides(local, dtype)),) if box.size or 0 in shape else ()
        return Geometry(Kind.TENSOR, dtype, shape, False, shards, reduction)

    def _dtype(self, dtype: Any, key: str) -> DType:
        known = self._dtypes.get(dtype)
        if known is None:
            try:
                known = self._dtypes[dtype] = dtype_named(str(dtype).rpartition(".")[2])
            except UnsupportedValueError as error:
                raise UnsupportedValueError(f"{key}: {error}") from None
        return known

    def identity(self, values: Sequence[Any], addresses: Sequence[int]) -> TensorIdentity | None:
        """See :class:`..core.tensors.TensorAdapter`."""
        known = [one for one in (self._viewed.get(id(value)) for value in values) if one is not None]
        if len(known) < len(values):  # a numpy array, or a tensor that was not looked at
            return None
        return TensorIdentity.of(values, known, addresses)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """See :class:`..core.tensors.TensorAdapter`."""
        if dtype.name.startswith("uint") and dtype.itemsize > 1:  # Paddle's own tensors never have these
            return np.empty(shape, arithmetic_dtype(dtype))
        if not paddle.in_dynamic_mode():
            raise UnsupportedValueError(
                "no tensors can be made while paddle.enable_static() is on: call paddle.disable_static() before"
            )
        if len(shape) > _MOST_DIMENSIONS:
            raise UnsupportedValueError(f"Paddle has no tensors of more than {_MOST_DIMENSIONS} dimensions")
        with current_stream, at_device(self._place) if self._place is not None else nullcontext():
            return paddle.empty(list(shape), dtype=dtype.name)


def _addresses(tensor: Any, geometry: Geometry, starts: tuple[int, ...], path: str) -> tuple[int, ...]:
    """Where a tensor's local shards are, each of which starts so many bytes behind the beginning of its memory.

    Raises:
        UnsupportedValueError: it has no memory.
    """
    if not starts:
        return ()
    if 0 in geometry.shape:
        return (0,)
    try:
        base = int(tensor.data_ptr() or 0)
    except (RuntimeError, ValueError):
        base = 0
    if not base:
        raise no_memory(path, tensor)
    return (base + starts[0],) if len(starts) == 1 else tuple(base + start for start in starts)


def _local(value: Any) -> Any:
    """The tensor of a ShardedWeight; another one itself."""
    return value.local_tensor if is_sharded_weight(value) else value


def _strides(local: Any, dtype: DType) -> tuple[int, ...] | None:
    """Bytes from one element to the next, one a dimension, or None for contiguous memory."""
    if local.is_contiguous() or 0 in local.shape:
        return None
    return tuple(stride * dtype.itemsize for stride in local.strides)
