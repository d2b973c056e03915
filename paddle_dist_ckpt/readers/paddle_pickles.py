"""What Paddle's own pickles name beside numpy's arrays, and the element types that it means by numpy's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..core.box import Box, cut_flat_range
from ..core.dtypes import DTYPES, DType
from .numpy_pickles import NUMPY
from .orders import ArrayPart, LyingArray
from .pickled_values import Refused, ordered_dict, recorded

__all__ = ["PADDLE", "flat_parts", "meant"]

# What numpy arrays of tensors have for element types that numpy has not. Paddle has no tensors of uint16.
_STANDS_FOR = {"uint16": ("bfloat16",), "int8": ("float8_e4m3fn", "float8_e5m2")}


def _tuple(items: Any = ()) -> tuple[Any, ...]:
    """As `paddle.save` has a tensor: its name and its array."""
    if type(items) not in (list, tuple):
        raise TypeError("a tuple of what is no list")
    return tuple(items)


def _complex(*args: Any) -> complex:
    if len(args) != 2 or any(type(arg) is not float for arg in args):
        raise Refused("makes complex numbers of other things than two")
    return complex(*args)


def _data(*args: Any) -> Any:
    """As `paddle.save` has a DenseTensor: by having ``data`` evaluated, which is its array."""
    if len(args) != 2 or args[0] != "data" or type(args[1]) is not dict or list(args[1]) != ["data"]:
        raise Refused("asks for an evaluation of Python code")
    return args[1]["data"]


PADDLE: dict[str, Any] = {
    **NUMPY,
    "collections.OrderedDict": ordered_dict,
    **{
        f"{module}.{name}": function
        for module in ("builtins", "__builtin__")
        for name, function in (("tuple", _tuple), ("eval", _data), ("complex", _complex))
    },
    **{
        f"paddle.distributed.{module}.metadata.{kind}": recorded(kind)
        for module in ("checkpoint", "flex_checkpoint.dcp")
        for kind in ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")
    },
}
"""What pickles of Paddle need in the table of :func:`.walk`."""


def meant(dtype: DType, said: str | None = None) -> DType | None:
    """The element type of a tensor whose array has this one; None if that is no array of such a tensor.

    Args:
        dtype: The array's.
        said: What Paddle says of the tensor, None if it does not. `paddle.load` takes uint16 for bfloat16 then, and
            leaves int8, whether or not it was float8.
    """
    stands_for = _STANDS_FOR.get(dtype.name, ())
    if said is None:
        return DTYPES[stands_for[0]] if dtype.name == "uint16" else dtype
    name = said.removeprefix("paddle.")
    return DTYPES[name] if name == dtype.name or name in stands_for else None


def flat_parts(shard: Box, start: int, stop: int, file: int, array: LyingArray) -> Iterator[ArrayPart]:
    """The parts that a row-major range of a shard's elements is, which an array has one behind the other."""
    position = array.position
    for box in cut_flat_range(shard.shape, start, stop):
        offset = tuple(o + p for o, p in zip(shard.offset, box.offset, strict=True))
        yield ArrayPart(Box(offset, box.shape), file, LyingArray(array.dtype, box.shape, position))
        position += box.size * array.dtype.itemsize
