"""One rank's part of a tensor that says itself what it is a part of: Paddle's ShardedWeight, from Paddle 3.3.

Fleet's layers and optimizers give these in ``sharded_state_dict()``. Anything with the same attributes is taken alike:

    local_tensor      the part's memory: a plain tensor
    global_shape      the shape of the whole tensor
    local_shape       the box that a rank has of it, or from which its part is cut
    global_offset     where that box starts
    is_flattened      whether the part is a range of the box's elements in row-major order, not the whole box
    flattened_range   which range: a slice
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.box import Box, cut_flat_range, whole
from ..core.dtypes import DType
from ..core.shards import Kind
from ..core.tensors import Geometry, LocalShard
from ..errors import UnsupportedValueError

__all__ = ["WeightPart", "is_sharded_weight"]

_FIELDS = ("local_tensor", "local_shape", "global_shape", "global_offset", "is_flattened", "flattened_range")


def is_sharded_weight(value: Any) -> bool:
    """Whether a value is a ShardedWeight, or has the same attributes."""
    return hasattr(value, "local_tensor") and all(hasattr(value, field) for field in _FIELDS)


class WeightPart(NamedTuple):
    """What a ShardedWeight says of itself, and how its memory lies.

    Attributes:
        shape: The whole tensor's.
        local_shape: The box's.
        offset: Where the box starts.
        flat: Which range of the box's elements in row-major order the part is, None for all, or () for one that cannot
            be.
        found: The shape of the memory.
        strides: Bytes from one element of it to the next, one a dimension; None if it is contiguous.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offset: tuple[int, ...]
    flat: tuple[int, ...] | None
    found: tuple[int, ...]
    strides: tuple[int, ...] | None

    @staticmethod
    def of(weight: Any, found: Sequence[int], strides: tuple[int, ...] | None) -> WeightPart:
        """That of a ShardedWeight, the shape and strides of whose memory are given."""
        return WeightPart(
            _ints(weight.global_shape),
            _ints(weight.local_shape),
            _ints(weight.global_offset),
            _range(weight.flattened_range) if weight.is_flattened else None,
            _ints(found),
            strides,
        )

    def geometry(self, dtype: DType, key: str) -> tuple[Geometry, tuple[int, ...]]:
        """What it is to the engine, and where in the memory each of its local shards starts, in bytes.

        Raises:
            UnsupportedValueError: what it says does not fit together.
        """
        offset = () if not self.shape and not any(self.offset) else self.offset  # Paddle gives scalars one of (0,)
        self._check(offset, key)
        if 0 in self.shape:
            return Geometry(Kind.TENSOR, dtype, self.shape, False, (LocalShard(whole(self.shape)),)), (0,)
        boxes = cut_flat_range(self.local_shape, *(self.flat or (0, math.prod(self.local_shape))))
        moved = [Box(tuple(map(sum, zip(offset, box.offset, strict=True))), box.shape) for box in boxes]
        shards = tuple(LocalShard(box, self.strides) for box in moved)  # it has strides only if it is one box
        starts = itertools.accumulate((box.size * dtype.itemsize for box in boxes), initial=0)
        return Geometry(Kind.TENSOR, dtype, self.shape, False, shards), tuple(starts)[: len(boxes)]

    def _check(self, offset: tuple[int, ...], key: str) -> None:
        def refuse(text: str) -> UnsupportedValueError:
            return UnsupportedValueError(f"{key}: this ShardedWeight of global shape {list(self.shape)} {text}")

        shape, local = self.shape, self.local_shape
        fits = len(shape) == len(local) == len(offset) and all(
            low >= 0 and size >= 0 and low + size <= length
            for low, size, length in zip(offset, local, shape, strict=True)
        )
        if not fits:
            raise refuse(f"cannot have a part of shape {list(local)} at {list(self.offset)}")
        size = math.prod(local)
        if self.flat == ():
            raise refuse("is flattened, but its flattened_range is not a slice with a stop and without a step")
        if self.flat is not None:
            start, stop = self.flat
            if not 0 <= start <= stop <= size:
                raise refuse(f"cannot have the elements {start}:{stop} of a part of {size}")
            size = stop - start
        if math.prod(self.found) != size:
            raise refuse(
                f"has a local tensor of shape {list(self.found)}, {math.prod(self.found)} elements; {size} are due"
            )
        if self.strides is not None and (self.flat is not None or self.found != local):
            raise refuse("has a local tensor of another shape than its part, which must be contiguous then")


def _range(span: Any) -> tuple[int, ...]:
    """A slice's start and stop, or nothing if it is none that a part may be."""
    if not isinstance(span, slice) or span.stop is None or span.step not in (None, 1):
        return ()
    return int(span.start or 0), int(span.stop)


def _ints(numbers: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(number) for number in numbers)
