"""Element types: names, sizes, and what a cast does to values."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paddle_dist_ckpt.core.dtypes import DTYPES, DType, arithmetic_dtype, can_cast, cast_array, dtype_named
from paddle_dist_ckpt.core.tensors import is_native_array, view_of_array
from paddle_dist_ckpt.errors import UnsupportedValueError

FLOATS = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"]
PAIRS = [(a, b) for a, b in itertools.product(DTYPES.values(), repeat=2) if can_cast(a, b)]


def cast(values: object, stored: str, wanted: str) -> tuple[np.ndarray, bool]:
    source = np.array(values).astype(arithmetic_dtype(DTYPES[stored])).view(DTYPES[stored].raw)
    target = np.empty(source.shape, DTYPES[wanted].raw)
    fits = cast_array(source, DTYPES[stored], target, DTYPES[wanted])
    return target.view(arithmetic_dtype(DTYPES[wanted])), fits


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_has_one_size_everywhere(dtype: DType) -> None:
    assert dtype.raw.itemsize == dtype.itemsize == arithmetic_dtype(dtype).itemsize
    assert arithmetic_dtype(dtype).name == dtype.name
    assert dtype_named(dtype.name) is dtype


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_an_array_of_every_dtype_is_seen_as_one(dtype: DType) -> None:
    array = np.zeros(3, arithmetic_dtype(dtype))
    assert is_native_array(array)
    assert view_of_array(array).geometry.dtype is dtype
    swapped = array.view(array.dtype.newbyteorder())
    assert is_native_array(swapped) == swapped.dtype.isnative
    assert not is_native_array(array.view(np.ma.MaskedArray))


@pytest.mark.parametrize("dtype", ["O", "U3", "S2", "M8[s]", "m8[s]", [("a", "f4")], "V4"])
def test_an_array_of_no_dtype_of_ours_is_a_value(dtype: Any) -> None:
    assert not is_native_array(np.zeros(3, dtype))


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(UnsupportedValueError, match="'float4'.*float32"):
        dtype_named("float4")


@pytest.mark.parametrize("wanted", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_float64_is_rounded_once(wanted: str) -> None:
    """To the nearest value, and to the even one of two: found here by looking at all values that there are."""
    dtype = arithmetic_dtype(DTYPES[wanted])
    codes = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}")
    exact = codes.view(dtype).astype(np.float64)
    order = np.argsort(exact[np.isfinite(exact) & (codes < len(codes) // 2)], kind="stable")  # those without a sign
    known, even = exact[np.isfinite(exact) & (codes < len(codes) // 2)][order], order % 2 == 0
    rng = np.random.default_rng(0)
    at = rng.integers(0, len(known) - 1, 3000)
    middle = (known[at] + known[at + 1]) / 2
    values = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf), middle * (1 + 2.0**-30)])
    above = np.searchsorted(known, values)
    low, high = known[above - 1], known[above]
    nearest = np.where((values - low < high - values) | ((values - low == high - values) & even[above - 1]), low, high)
    for sign in (1, -1):
        found, fits = cast(sign * values, "float64", wanted)
        assert fits
        assert (found.astype(np.float64) == sign * nearest).all()


def test_float64_that_are_no_numbers_stay_so() -> None:
    for wanted in ("bfloat16", "float8_e5m2"):
        found, fits = cast([np.nan, np.inf, -np.inf, -0.0, 1e-300, -1e-300], "float64", wanted)
        assert fits
        assert str(found.astype(np.float64).tolist()) == "[nan, inf, -inf, -0.0, 0.0, -0.0]"
        assert not cast([1e300], "float64", wanted)[1]


@pytest.mark.parametrize(
    ("stored", "wanted", "allowed"),
    [
        ("float32", "float16", True),
        ("float64", "float8_e4m3fn", True),
        ("bfloat16", "float32", True),
        ("int32", "int64", True),
        ("uint8", "int16", True),
        ("int64", "int32", False),
        ("int8", "uint8", False),
        ("uint8", "int8", False),
        ("uint64", "int64", False),
        ("bool", "uint8", True),
        ("int8", "bool", False),
        ("float32", "complex64", True),
        ("complex128", "complex64", True),
        ("complex64", "float32", False),
        ("int32", "float32", False),
        ("float32", "int32", False),
        ("bool", "float32", False),
    ],
)
def test_what_a_cast_allows(stored: str, wanted: str, allowed: bool) -> None:
    assert can_cast(DTYPES[stored], DTYPES[wanted]) is allowed


def test_every_dtype_casts_to_itself() -> None:
    assert all(can_cast(dtype, dtype) for dtype in DTYPES.values())


@pytest.mark.parametrize(("stored", "wanted"), PAIRS, ids=lambda dtype: dtype.name)
def test_every_allowed_cast_converts_small_values(stored: DType, wanted: DType) -> None:
    for values in ([0, 1, 1, 0], [[1], [0]], 1, []):
        result, fits = cast(values, stored.name, wanted.name)
        assert fits
        assert np.array_equal(result.astype(np.complex128), np.array(values, np.complex128))


@pytest.mark.parametrize("wanted", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "complex64"])
def test_a_finite_value_that_does_not_fit_is_told(wanted: str) -> None:
    stored = "complex128" if wanted == "complex64" else "float64"
    assert cast([1.0, 1e300], stored, wanted)[1] is False
    assert cast([[1.0, -1e300]], stored, wanted)[1] is False
    assert cast([1.0, 2.0], stored, wanted)[1] is True


def test_infinities_and_nans_stay_what_they_are() -> None:
    values = [np.inf, -np.inf, np.nan, -0.0]
    for stored, wanted in itertools.permutations([f for f in FLOATS if f != "float8_e4m3fn"], 2):
        result, fits = cast(values, stored, wanted)
        assert fits
        assert np.array_equal(result.astype(np.float64), values, equal_nan=True)
        assert np.signbit(result.astype(np.float64)[3])


def test_a_cast_rounds_as_numpy_and_ml_dtypes_do() -> None:
    values = np.random.default_rng(0).normal(size=100).astype(np.float32)
    assert np.array_equal(cast(values, "float32", "bfloat16")[0], values.astype(ml_dtypes.bfloat16))
    assert np.array_equal(cast(values, "float32", "float16")[0], values.astype(np.float16))
    assert cast([2**40, -1], "int64", "int64")[0].tolist() == [2**40, -1]


def test_a_cast_reads_and_writes_through_strides() -> None:
    source = np.arange(24, dtype="<f4").reshape(4, 6)[::2, 1::2]
    target = np.zeros((3, 2), "<f8").T
    assert cast_array(source.view("<u4"), DTYPES["float32"], target.view("<u8"), DTYPES["float64"])
    assert np.array_equal(target, source)
