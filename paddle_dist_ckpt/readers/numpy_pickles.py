"""What numpy's arrays and scalars are in a pickle: names of functions, and states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.dtypes import DTYPES, DType, arithmetic_dtype
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from .pickle_machine import Built, Latin1, Lying, Refused

__all__ = ["NUMPY", "PickledArray"]

_EXTENDED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # of ml_dtypes
_NAMES = {np.dtype(name).str[1:]: name for name in DTYPES if name not in _EXTENDED} | {name: name for name in _EXTENDED}
_MOST_DIMENSIONS = 32


class _ElementType(Built):
    """A numpy dtype: the code that it was made of, such as ``f4``, and the order of its bytes."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *flags: Any) -> None:
        if not isinstance(code, str):
            raise TypeError(f"{type(code).__name__} for a dtype")
        self.code, self.order = str(code), "="

    def build(self, state: Any) -> None:
        order = state[1]
        if not isinstance(order, str) or order not in "<>=|":
            raise ValueError("a dtype without an order of bytes")
        self.order = str(order)
        if any(part is not None for part in state[2:5]):
            self.code = "V"  # of fields, or of arrays

    @property
    def dtype(self) -> DType:
        """The element type.

        Raises:
            Refused: this library has none of that kind.
        """
        name = _NAMES.get(self.code)
        if name is None:
            raise Refused(f"elements of numpy's dtype {self.code[:40]!r}, which cannot be held")
        dtype = DTYPES[name]
        if self.order == ">" and dtype.itemsize > 1:
            raise Refused("elements whose bytes have the other order")
        return dtype


class PickledArray(Built):
    """An array of a pickle. What is wrong with it is said when it is asked for, by who knows its name."""

    __slots__ = ("_data", "_element", "_fortran", "_shape")

    def __init__(self, *args: Any) -> None:
        self._shape: Any = None

    def build(self, state: Any) -> None:
        *_, self._shape, self._element, self._fortran, self._data = state

    def opened(self, where: object, size: int) -> tuple[DType, tuple[int, ...], int]:
        """Element type, shape, and where in the file its data begin.

        Args:
            where: Names the array in messages, its file first: text, or what becomes text.
            size: How many bytes the file has.

        Raises:
            CheckpointCorruptedError: it is none.
            UnsupportedValueError: it is one that cannot be held, or is not contiguous in the file.
        """
        try:
            dtype, shape = self._opened()
        except Refused as refused:
            raise UnsupportedValueError(f"{where} has {refused}") from refused
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointCorruptedError(f"{where} is a damaged array: {error}") from error
        nbytes = math.prod(shape) * dtype.itemsize
        data = self._data
        if isinstance(data, Latin1):
            data = Lying(data.position, len(data))
        if not nbytes:
            return dtype, shape, 0
        if data.form == "encoded":
            raise UnsupportedValueError(
                f"{where} was written with pickle protocol 2, which has its bytes as text; load it with what wrote it "
                "and save it again with protocol 4"
            )
        if data.nbytes != nbytes or data.position < 0 or data.position + nbytes > size:
            raise CheckpointCorruptedError(
                f"{where} has {data.nbytes} bytes; its shape {list(shape)} of {dtype.name} needs {nbytes}"
            )
        return dtype, shape, data.position

    def _opened(self) -> tuple[DType, tuple[int, ...]]:
        shape = self._shape
        if type(shape) is not tuple:
            raise ValueError("it has no shape")
        if len(shape) > _MOST_DIMENSIONS:
            raise Refused(f"{len(shape)} dimensions, which no array has")
        for n in shape:
            if type(n) is not int or not 0 <= n < 1 << 62:
                raise ValueError("it has no sizes for a shape")
        if math.prod(shape if 0 not in shape else [n or 1 for n in shape]) >= 1 << 58:
            raise Refused(f"the shape {list(shape)}, which no array has")
        if not isinstance(self._element, _ElementType):
            raise TypeError("it has no dtype")
        dtype = self._element.dtype
        if self._fortran not in (False, True, 0, 1):
            raise ValueError("it has no order")
        if self._fortran and sum(n > 1 for n in shape) > 1:
            raise Refused("its elements in Fortran's order")
        if not isinstance(self._data, (Lying, Latin1)) or getattr(self._data, "form", "") == "text":
            raise TypeError(f"it has {type(self._data).__name__} for data")
        return dtype, shape


def _from_buffer(data: Any, element: Any, shape: Any, order: Any, *more: Any) -> PickledArray:
    """As protocol 5 has arrays."""
    array = PickledArray()
    array.build((shape, element, order == "F", data))
    return array


def _scalar(element: Any, data: Any = None) -> Any:
    """The Python value of a numpy scalar."""
    dtype = element.dtype
    if isinstance(data, Latin1):
        data = Lying(data.position, len(data), data=data.encode("latin1"))
    if data.data is None or len(data.data) != dtype.itemsize:
        raise ValueError("a scalar of another size")
    return np.frombuffer(data.data, arithmetic_dtype(dtype))[0].item()


def _encoded(text: Any, encoding: Any) -> Lying:
    """As protocol 2 has byte strings of Python 3."""
    if encoding != "latin1":
        raise Refused("has bytes that are text of another encoding than latin1")
    if isinstance(text, Lying):
        return Lying(text.position, text.nbytes, "encoded")
    data = text.encode("latin1")
    return Lying(-1, len(data), "encoded", data)


def _no_bytes(*args: Any) -> Lying:
    if args:
        raise Refused("makes bytes of other things")
    return Lying(-1, 0, data=b"")


def _marker(*args: Any) -> Any:
    raise Refused("makes an array that was not pickled as one")


NUMPY: dict[str, Any] = {
    "numpy.ndarray": _marker,
    "numpy.dtype": _ElementType,
    **{f"ml_dtypes.{name}": name for name in _EXTENDED},
    "_codecs.encode": _encoded,
    "builtins.bytes": _no_bytes,
    "__builtin__.bytes": _no_bytes,
    **{
        f"numpy.{core}.{name}": function
        for core in ("core", "_core")
        for name, function in (
            ("multiarray._reconstruct", PickledArray),
            ("multiarray.scalar", _scalar),
            ("numeric._frombuffer", _from_buffer),
        )
    },
}
"""What arrays, scalars and byte strings need in the table of :func:`.walk`."""
