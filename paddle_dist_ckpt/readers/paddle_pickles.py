"""What Paddle's own pickles name beside numpy's arrays, and the element types that it means by numpy's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..core.box import Box, cut_flat_range
from ..core.dtypes import DTYPES, DType
from .catalog import Piece
from .numpy_pickles import NUMPY
from .pickle_machine import Built, Refused, filled

__all__ = ["PADDLE", "Record", "flat_pieces", "meant"]

# What numpy arrays of tensors have for element types that numpy has not. Paddle has no tensors of uint16.
_STANDS_FOR = {"uint16": ("bfloat16",), "int8": ("float8_e4m3fn", "float8_e5m2")}


class Record(Built):
    """An object of one of Paddle's classes that only have fields.

    Attributes:
        kind: The name of the class.
        fields: Its fields by name.
    """

    __slots__ = ("fields", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fields: dict[str, Any] = {}

    def build(self, state: Any) -> None:
        if type(state) is not dict or not set(map(type, state)) <= {str}:
            raise TypeError("fields that are no dict of names")
        self.fields.update(state)  # a copy: what built the state may change it later, unchecked


def _record(kind: str) -> Any:
    return lambda: Record(kind)


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    if not isinstance(pairs, (list, tuple)) or any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in pairs):
        raise TypeError("an OrderedDict of what is no list of pairs")
    return filled({}, [part for pair in pairs for part in pair])


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
    "collections.OrderedDict": _ordered_dict,
    **{
        f"{module}.{name}": function
        for module in ("builtins", "__builtin__")
        for name, function in (("tuple", _tuple), ("eval", _data), ("complex", _complex))
    },
    **{
        f"paddle.distributed.{module}.metadata.{kind}": _record(kind)
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


def flat_pieces(shard: Box, start: int, stop: int, file: int, position: int, itemsize: int) -> Iterator[Piece]:
    """The pieces of a row-major range of a shard's elements, which lie one behind the other from a position on."""
    for box in cut_flat_range(shard.shape, start, stop):
        offset = tuple(o + p for o, p in zip(shard.offset, box.offset, strict=True))
        yield Piece(Box(offset, box.shape), file, position)
        position += box.size * itemsize
