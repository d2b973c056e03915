"""What numpy's arrays and scalars are in a pickle: names of functions, and states."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..core.dtypes import DTYPES, DType, arithmetic_dtype
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from .checks import check_shape, counts_of
from .orders import LyingArray, fortran_axes
from .pickle_machine import Machine
from .pickled_values import NOTHING, Built, Latin1, Lying, Recurring, Refused

__all__ = ["NUMPY", "PickledArray"]

_EXTENDED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # of ml_dtypes
_NAMES = {np.dtype(name).str[1:]: name for name in DTYPES if name not in _EXTENDED} | {name: name for name in _EXTENDED}
_STEPS_OF_USUAL = 24
_SIZES = rb"(?:K.|M..|J.{4})"  # BININT1, BININT2, BININT
_USUAL = re.compile(
    # BINGET, BININT1, TUPLE1, MEMOIZE, BINGET, TUPLE3, MEMOIZE, REDUCE, MEMOIZE, MARK, BININT1: an array of no elements
    rb"h(.)K\x00\x85\x94h(.)\x87\x94R\x94\(K\x01"
    # its shape: EMPTY_TUPLE, or up to three sizes and TUPLE1 to TUPLE3, or more between MARK and TUPLE; MEMOIZE
    rb"(?:\)|(?:(" + _SIZES + rb"{1,3})([\x85-\x87])|\((" + _SIZES + rb"{4,32})t)\x94)"
    # its element type by BINGET or LONG_BINGET, NEWFALSE, and the data: SHORT_BINBYTES, BINBYTES or BINBYTES8
    rb"(?:h(.)|j(.{4}))\x89(?=C(.)|B(.{4})|\x8e(.{8}))",
    re.DOTALL,
)
"""The instructions that protocol 4 has for an array behind the one that gets the function which makes it."""
_SIZE = re.compile(rb"K(.)|M(..)|J(.{4})", re.DOTALL)
_LAST = b"\x94t\x94b"  # MEMOIZE, TUPLE, MEMOIZE, BUILD: behind an array's data


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

    __slots__ = ("_axes", "_data", "_element", "_fortran", "_shape")

    def __init__(self, *args: Any, axes: tuple[int, ...] | None = None) -> None:
        self._shape: Any = None
        self._axes = axes  # as its elements lie, if neither in C's order nor in Fortran's

    def build(self, state: Any) -> None:
        *_, self._shape, self._element, self._fortran, self._data = state

    def opened(self, where: object, size: int) -> LyingArray:
        """What it is, and where in the file its data begin.

        Args:
            where: Names the array in messages, its file first: text, or what becomes text.
            size: How many bytes the file has.

        Raises:
            CheckpointCorruptedError: it is none.
            UnsupportedValueError: it is one that cannot be held.
        """
        try:
            dtype, shape = self._opened()
        except Refused as refused:
            raise UnsupportedValueError(f"{where} has {refused}") from refused
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointCorruptedError(f"{where} is a damaged array: {error}") from error
        nbytes = check_shape(shape, dtype.itemsize, where)
        data = self._data
        if isinstance(data, Latin1):
            data = Lying(data.position, len(data))
        if not nbytes:
            return LyingArray(dtype, shape, 0)
        if data.form == "encoded":
            raise UnsupportedValueError(
                f"{where} was written with pickle protocol 2, which has its bytes as text; load it with what wrote it "
                "and save it again with protocol 4"
            )
        if data.nbytes != nbytes or data.position < 0 or data.position + nbytes > size:
            raise CheckpointCorruptedError(
                f"{where} has {data.nbytes} bytes; its shape {list(shape)} of {dtype.name} needs {nbytes}"
            )
        return LyingArray(dtype, shape, data.position, fortran_axes(shape) if self._fortran else self._axes)

    def _opened(self) -> tuple[DType, tuple[int, ...]]:
        shape = counts_of(self._shape)
        if not isinstance(self._element, _ElementType):
            raise TypeError("it has no dtype")
        dtype = self._element.dtype
        if self._fortran not in (False, True, 0, 1):
            raise ValueError("it has no order")
        if not isinstance(self._data, (Lying, Latin1)) or getattr(self._data, "form", "") == "text":
            raise TypeError(f"it has {type(self._data).__name__} for data")
        return dtype, shape


class _MakesArrays(Recurring):
    """What :func:`numpy.core.multiarray._reconstruct` stands for."""

    __slots__ = ()

    def __call__(self, *args: Any) -> PickledArray:
        return PickledArray(*args)

    def follow(self, machine: Machine, data: bytes, at: int) -> int:
        """Follow an array's instructions up to its data, and if these have been read, to its end.

        What they put into the memo is forgotten, since nothing that makes pickles gets it again, except for the array,
        and for data of no byte or one: Python has one object for all that are alike.
        """
        found = _USUAL.match(data, at)
        if found is None:
            return at
        marker, code, few, closing, many, near, far, *lengths = found.groups()
        memo, stack = machine.memo, machine.stack
        sizes = _SIZE.findall(few or many or b"")
        places = (near[0] if near else int.from_bytes(far, "little"), marker[0], code[0])
        if (few and len(sizes) != closing[0] - 0x84) or any(p >= len(memo) or memo[p] is NOTHING for p in places):
            return at
        shape = tuple([a[0] if a else int.from_bytes(b or c, "little", signed=bool(c)) for a, b, c in sizes])
        element = memo[places[0]]
        array = stack[-1] = PickledArray()
        memo += (NOTHING, NOTHING, array, NOTHING) if shape else (NOTHING, NOTHING, array)
        machine.count(_STEPS_OF_USUAL)
        end = found.end()
        length = next(filter(None, lengths))
        nbytes, start = int.from_bytes(length, "little"), end + 1 + len(length)
        if data.startswith(_LAST, start + nbytes):
            machine.window.at = start
            lying = Lying(machine.window.skip(nbytes), nbytes)
            array.build((shape, element, False, lying))
            memo += (lying if nbytes < 2 else NOTHING, NOTHING)
            return start + nbytes + len(_LAST)
        machine.mark()
        machine.stack += (1, shape, element, False)
        return end


def _from_buffer(data: Any, element: Any, shape: Any, order: Any, axes: Any = None) -> PickledArray:
    """As protocol 5 has arrays; in the order K, elements in C's order are of a shape whose axes are permuted then."""
    if order not in ("C", "F", "K") or (order == "K") != (axes is not None):
        raise Refused(f"an array in the order {order!r}")
    if order == "K":
        if type(shape) is not tuple or type(axes) is not tuple or sorted(axes) != list(range(len(shape))):
            raise Refused("an array whose axes are not permuted")
        shape = tuple(shape[axis] for axis in axes)
        axes = tuple(sorted(range(len(axes)), key=axes.__getitem__))
    array = PickledArray(axes=axes)
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
            ("multiarray._reconstruct", _MakesArrays()),
            ("multiarray.scalar", _scalar),
            ("numeric._frombuffer", _from_buffer),
        )
    },
}
"""What arrays, scalars and byte strings need in the table of :func:`.walk`."""
