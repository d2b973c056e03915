"""Element types: their names, their sizes, and how safetensors and numpy call them.

Data moves as raw items, so most code needs only :attr:`DType.raw`, a numpy dtype of the right item size. Arithmetic
(casts, reductions of partial tensors) uses :func:`arithmetic_dtype`, which knows bfloat16 and float8 by ``ml_dtypes``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedValueError

__all__ = ["DTYPES", "DType", "arithmetic_dtype", "can_cast", "cast_array", "dtype_named"]

_RAW = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


@dataclass(frozen=True, slots=True, eq=False)  # there is one object of each, which is told and hashed by its identity
class DType:
    """One element type.

    Attributes:
        name: The name that Paddle and numpy give it, such as ``"bfloat16"``.
        itemsize: Bytes of one element.
        safetensors: The type's code in a safetensors header.
        view_items: How many items of that code make one element; more than 1 where safetensors lacks the type, in
            which case the stored shape has one more dimension of this length.
        category: ``"bool"``, ``"int"``, ``"float"`` or ``"complex"``.
        raw: A numpy dtype of ``itemsize`` bytes under which items can be copied unchanged.
    """

    name: str
    itemsize: int
    safetensors: str
    category: str
    view_items: int = 1
    raw: np.dtype[np.generic] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "raw", np.dtype(_RAW[self.itemsize]))


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("bool", 1, "BOOL", "bool"),
        DType("uint8", 1, "U8", "int"),
        DType("int8", 1, "I8", "int"),
        DType("uint16", 2, "U16", "int"),
        DType("int16", 2, "I16", "int"),
        DType("uint32", 4, "U32", "int"),
        DType("int32", 4, "I32", "int"),
        DType("uint64", 8, "U64", "int"),
        DType("int64", 8, "I64", "int"),
        DType("float8_e4m3fn", 1, "F8_E4M3", "float"),
        DType("float8_e5m2", 1, "F8_E5M2", "float"),
        DType("float16", 2, "F16", "float"),
        DType("bfloat16", 2, "BF16", "float"),
        DType("float32", 4, "F32", "float"),
        DType("float64", 8, "F64", "float"),
        DType("complex64", 8, "C64", "complex"),
        DType("complex128", 16, "F64", "complex", view_items=2),
    )
}


def dtype_named(name: str) -> DType:
    """The element type of that name.

    Raises:
        UnsupportedValueError: no such type is known.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedValueError(f"dtype {name!r} cannot be stored; known are {', '.join(DTYPES)}") from None


_OF_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def arithmetic_dtype(dtype: DType) -> np.dtype[np.generic]:
    """A numpy dtype that computes with ``dtype``'s values."""
    if dtype.name in _OF_ML_DTYPES:
        import ml_dtypes  # costs 10 ms, and only casts and partial tensors need it

        return np.dtype(getattr(ml_dtypes, dtype.name))
    return np.dtype(dtype.name)


def can_cast(stored: DType, wanted: DType) -> bool:
    """Whether ``LoadOptions(cast=True)`` converts ``stored`` into ``wanted``."""
    pair = (stored.category, wanted.category)
    if pair in (("float", "float"), ("bool", "int"), ("float", "complex"), ("complex", "complex")):
        return True
    if pair == ("int", "int"):
        return np.can_cast(np.dtype(stored.name), np.dtype(wanted.name), "safe")
    return stored.name == wanted.name


def cast_array(source: npt.NDArray[np.generic], stored: DType, target: npt.NDArray[np.generic], wanted: DType) -> bool:
    """Convert ``source`` (raw items of ``stored``) into ``target`` (raw items of ``wanted``), both of one shape.

    Returns:
        False if a finite value became infinite or NaN (the target is written all the same).
    """
    values = source.view(arithmetic_dtype(stored))
    with np.errstate(all="ignore"):
        exact = _float32_to_round_on(values) if stored.name == "float64" and wanted.name in _OF_ML_DTYPES else values
        converted = exact.astype(arithmetic_dtype(wanted))
    target[...] = converted.view(wanted.raw)
    if wanted.category not in ("float", "complex"):
        return True
    return not bool(np.any(_finite(values) & ~_finite(converted)))


def _float32_to_round_on(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """float64 as float32 that round on as the float64 would: towards zero, with the last bit set if anything is lost.

    ml_dtypes goes by way of float32, to the nearest; what lies just beside the middle of two values is rounded twice.
    """
    nearest = values.astype(np.float32)
    back = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    bits -= np.abs(back) > np.abs(values)
    bits |= (back != values) & ~np.isnan(back)
    return nearest


def _finite(values: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    known = values.dtype.kind in "biufc"
    finite: npt.NDArray[np.bool_] = np.isfinite(values if known else values.astype(np.float32))
    return finite
