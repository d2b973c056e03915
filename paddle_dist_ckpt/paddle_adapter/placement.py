"""Where a DistTensor's local value lies in its global tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.tensors import Reduction
from ..errors import UnsupportedValueError

__all__ = ["local_offset", "mesh_coordinate", "reduction_of"]


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


def local_offset(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any], key: str
) -> tuple[int, ...]:
    """The global offset of the local value at a mesh coordinate.

    A tensor dimension of n elements over p ranks is cut into pieces of ceil(n/p), the last ones smaller or empty. Where
    several mesh dimensions cut one tensor dimension, each cuts what the one before it left, in the order that
    ``Shard.get_co_shard_order`` gives.

    Args:
        shape: The global shape.
        mesh_shape: Shape of the mesh.
        coordinate: This rank's coordinate in it.
        placements: The tensor's placements, one a mesh dimension.
        key: Names the tensor in errors.

    Raises:
        UnsupportedValueError: a placement with a split factor, whose interleaved pieces are not boxes.
    """
    offset = [0] * len(shape)
    length = list(shape)
    for mesh_dim in _shard_order(placements, key):
        dim = placements[mesh_dim].get_dim()
        dim += len(shape) if dim < 0 else 0
        piece = -(-length[dim] // mesh_shape[mesh_dim])
        start = min(coordinate[mesh_dim] * piece, length[dim])
        length[dim] = min(piece, length[dim] - start)
        offset[dim] += start
    return tuple(offset)


def _shard_order(placements: Sequence[Any], key: str) -> list[int]:
    """The mesh dimensions that cut the tensor, in the order in which they do."""
    cutting = [i for i, placement in enumerate(placements) if placement.is_shard()]
    for i in cutting:
        factor = getattr(placements[i], "get_split_factor", _one)()
        if factor > 1:
            raise UnsupportedValueError(
                f"{key}: Shard(dim={placements[i].get_dim()}) has split_factor {factor}; its interleaved pieces "
                "cannot be saved or loaded. Reshard it to a plain Shard first"
            )
    return sorted(cutting, key=lambda i: getattr(placements[i], "get_co_shard_order", _zero)())


def _one() -> int:
    return 1


def _zero() -> int:
    return 0


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
    names = {str(placements[i].reduce_type()).rpartition("kRed")[2].lower() for i in partial}
    if len(names) > 1:
        raise UnsupportedValueError(f"{key}: partial with several reductions ({', '.join(sorted(names))})")
    position = 0
    for i in partial:
        position = position * mesh_shape[i] + coordinate[i]
    return Reduction(names.pop(), position, math.prod(mesh_shape[i] for i in partial))
