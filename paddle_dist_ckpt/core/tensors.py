"""What the engine knows of a tensor that lives on this rank, whatever framework it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .dtypes import DTYPES, DType
from .shards import Kind

__all__ = ["LocalShard", "Reduction", "TensorAdapter", "TensorView", "is_native_array", "view_of_array"]


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """A box of a global tensor, in this rank's memory.

    Attributes:
        offset: Where it starts in the global tensor.
        array: The memory itself as raw items of the tensor's type, of the box's shape, contiguous or not. Writing to it
            changes the tensor.
    """

    offset: tuple[int, ...]
    array: npt.NDArray[Any]


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


@dataclass(frozen=True, slots=True, eq=False)
class TensorView:
    """A tensor as this rank sees it.

    Attributes:
        kind: Whether it is the framework's tensor or a numpy array.
        dtype: Its element type.
        shape: Its global shape.
        plain: Whether it is not distributed: whole on every rank that has it, and the same on all.
        shards: The boxes that this rank has of it; none if its mesh does not hold this rank.
        name: The framework's name of the variable.
        reduction: What this rank's shards are, if the tensor is partial.
        writable: Whether a load can fill it.
    """

    kind: Kind
    dtype: DType
    shape: tuple[int, ...]
    plain: bool
    shards: tuple[LocalShard, ...]
    name: str | None = None
    reduction: Reduction | None = None
    writable: bool = True


class TensorAdapter(Protocol):
    """Makes a framework's tensors accessible."""

    def is_tensor(self, value: Any) -> bool:
        """Whether :meth:`view` takes it."""
        ...

    def view(self, value: Any, key: str) -> TensorView:
        """Look at a tensor without copying it.

        Args:
            value: The tensor.
            key: What to call it in errors.

        Raises:
            UnsupportedValueError: it cannot be saved or loaded.
        """
        ...

    def empty(self, shape: tuple[int, ...], dtype: DType, on_host: bool) -> Any:
        """A new plain tensor, its content arbitrary."""
        ...

    @property
    def version(self) -> str | None:
        """The framework's version."""
        ...


def is_native_array(value: Any) -> bool:
    """Whether a value is a numpy array that is handled like a tensor."""
    return type(value) is np.ndarray and value.dtype.name in DTYPES and value.dtype.isnative


def view_of_array(array: npt.NDArray[Any]) -> TensorView:
    """A numpy array as a plain tensor."""
    dtype = DTYPES[array.dtype.name]
    shard = LocalShard((0,) * array.ndim, array.view(dtype.raw))
    return TensorView(Kind.ARRAY, dtype, array.shape, True, (shard,), writable=array.flags.writeable)
