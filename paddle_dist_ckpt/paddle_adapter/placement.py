"""Where a DistTensor's local value lies in its global tensor."""

from __future__ import annotations

import copy
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import paddle.distributed as dist
from paddle.distributed.auto_parallel import api

from ..core.box import Box
from ..core.tensors import Reduction
from ..errors import UnsupportedValueError

__all__ = [
    "COPIES_ARE_COMPARED",
    "IS_PADDLE_2_6",
    "layout_of",
    "local_box",
    "local_shape",
    "mesh_coordinate",
    "placement_copies",
    "placement_texts",
    "reduction_of",
]

IS_PADDLE_2_6 = not hasattr(api, "dtensor_from_local")  # for what no object there tells


def _tells_splits() -> bool:
    """Whether a Shard that splits its dimension differs from one that does not. In Paddle 3.1 they are equal."""
    plain, split = dist.Shard(0), dist.Shard(0)
    if hasattr(split, "set_split_factor"):
        split.set_split_factor(2)
        return bool(split != plain)
    return True


COPIES_ARE_COMPARED = not IS_PADDLE_2_6 and _tells_splits()
"""Whether copies of placements equal just what their texts equal."""
_COPIED = (dist.Shard, dist.Replicate, dist.Partial)  # not a Shard with an order, which Paddle gives back as less


def layout_of(tensor: Any, key: str) -> tuple[Any, list[Any]]:
    """A DistTensor's mesh and placements.

    In Paddle 2.6 what ``reshard`` returns, or an optimizer's step did, has these only in other terms.

    Raises:
        UnsupportedValueError: it has none, or is partial in these terms, which do not tell the reduction.
    """
    if tensor.process_mesh.process_ids:
        return tensor.process_mesh, tensor.placements
    attributes = getattr(tensor, "dist_attr", None)
    if attributes is None or attributes._is_partial():
        raise UnsupportedValueError(
            f"{key}: the DistTensor does not tell its mesh and placements; use what a further operation on it returns"
        )
    mesh = copy.copy(attributes.process_mesh)
    placements: list[Any] = [dist.Replicate()] * len(mesh.shape)
    for dim, mesh_dim in enumerate(attributes.dims_mapping):
        if mesh_dim >= 0:
            placements[mesh_dim] = dist.Shard(dim)
    return mesh, placements


def placement_texts(tensor: Any) -> list[str]:
    """The placements of a DistTensor as texts, or another one that tells them, to see whether they have changed."""
    return list(map(str, tensor.placements)) or [str(tensor.dist_attr)]


def placement_copies(tensor: Any) -> list[Any] | None:
    """Copies of a DistTensor's placements, with which to compare those of others: faster than their texts are.

    Of some there are no copies, or they do not equal what they are of; then None.
    """
    placements = tensor.placements
    if not COPIES_ARE_COMPARED or not placements or not all(type(placement) in _COPIED for placement in placements):
        return None
    return [copy.copy(placement) for placement in placements]


def _local_shape(tensor: Any) -> Any:
    try:
        return tensor._local_shape
    except NotImplementedError:  # of one without elements
        return tensor._local_value().shape


local_shape: Callable[[Any], Any] = _local_shape if IS_PADDLE_2_6 else operator.attrgetter("_local_shape")
"""The shape of a DistTensor's local value."""


def mesh_coordinate(mesh: Any, rank: int) -> tuple[int, ...] | None:
    """A rank's coordinate in a ProcessMesh, None if the mesh does not hold it."""
    try:
        place = mesh.process_ids.index(rank)
    except ValueError:
        return None
    coordinate = []
    for size in reversed(mesh.shape):
        place, at = divmod(place, size)
        coordinate.append(at)
    return tuple(reversed(coordinate))


def local_box(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any], key: str
) -> Box:
    """Where the local value at a mesh coordinate lies in the global tensor.

    A tensor dimension of n elements over p ranks is cut into pieces of ceil(n/p), the last ones smaller or empty; by
    Paddle 2.6 into n mod p pieces of ceil(n/p) and others of floor(n/p). Where several mesh dimensions cut one tensor
    dimension, each cuts what the one before it left, in the order that ``Shard.get_co_shard_order`` gives.

    Args:
        shape: The global shape.
        mesh_shape: Shape of the mesh.
        coordinate: This rank's coordinate in it.
        placements: The tensor's placements, one a mesh dimension.
        key: Names the tensor in errors.

    Raises:
        UnsupportedValueError: a placement with a split factor, whose interleaved pieces are not boxes.
    """
    offset, length = [0] * len(shape), list(shape)
    for dim, mesh_dim in _cuts(placements, len(shape), key):
        start, stop = (_start(length[dim], mesh_shape[mesh_dim], coordinate[mesh_dim] + i) for i in (0, 1))
        length[dim] = stop - start
        offset[dim] += start
    return Box(tuple(offset), tuple(length))


def _start(length: int, pieces: int, place: int) -> int:
    """Where the piece at a place starts."""
    if IS_PADDLE_2_6:
        return length // pieces * place + min(length % pieces, place)
    return min(-(-length // pieces) * place, length)


def _cuts(placements: Sequence[Any], ndim: int, key: str) -> list[tuple[int, int]]:
    """Which tensor dimension is cut by which mesh dimension, in the order in which they are cut."""
    cuts = []
    for mesh_dim, placement in enumerate(placements):
        if not placement.is_shard():
            continue
        if getattr(placement, "get_split_factor", lambda: 1)() > 1:
            raise UnsupportedValueError(
                f"{key}: {placement} has the split factor {placement.get_split_factor()}; its interleaved pieces "
                "cannot be saved or loaded. Reshard it to a plain Shard first"
            )
        cuts.append((_order_of(placement), _dimension_of(placement, ndim), mesh_dim))
    cuts.sort(key=lambda cut: cut[0])
    return [(dim, mesh_dim) for _, dim, mesh_dim in cuts]


def _dimension_of(placement: Any, ndim: int) -> int:
    """The tensor dimension of a Shard. Paddle gives back one that has an order without the methods of its class."""
    if hasattr(placement, "get_dim"):
        dim = int(placement.get_dim())
        return dim + ndim if dim < 0 else dim
    return next(dim for dim in range(ndim) if placement.is_shard(dim))


def _order_of(placement: Any) -> int:
    if hasattr(placement, "get_co_shard_order"):
        return int(placement.get_co_shard_order())
    order = re.search(r"shard_order=(\d+)", str(placement))
    return int(order[1]) if order else 0


def reduction_of(
    mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any], key: str
) -> Reduction | None:
    """A rank's part in a partial tensor, None if no placement is Partial.

    Raises:
        UnsupportedValueError: mesh dimensions with different reductions, whose order would matter.
    """
    partial = [i for i, placement in enumerate(placements) if placement.is_partial()]
    if not partial:
        return None
    names = {_name_of_reduction(placements[i]) for i in partial}
    if len(names) > 1:
        raise UnsupportedValueError(f"{key}: partial with several reductions ({', '.join(sorted(names))})")
    position = 0
    for i in partial:
        position = position * mesh_shape[i] + coordinate[i]
    return Reduction(names.pop(), position, math.prod(mesh_shape[i] for i in partial))


def _name_of_reduction(placement: Any) -> str:
    if hasattr(placement, "reduce_type"):
        return str(placement.reduce_type()).rpartition("kRed")[2].lower()
    return str(placement).rpartition("=")[2].rstrip(")").lower()  # "Partial(reduce_type=SUM)"; in Paddle 2.6
