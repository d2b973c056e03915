"""How far apart two arrays are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.dtypes import DType, arithmetic_dtype

__all__ = ["Difference", "compare_items"]


@dataclass(frozen=True, slots=True)
class Difference:
    """How a tensor, or a region of it, differs from another one.

    Attributes:
        tensor: Which tensor.
        differing: How many items differ.
        max_abs: The largest absolute difference, where neither item is NaN.
        max_rel: The largest difference relative to the larger of the two.
        nan_a: How many items are NaN in the first.
        nan_b: How many items are NaN in the second.
    """

    tensor: int
    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    nan_a: int = 0
    nan_b: int = 0

    def joined(self, other: Difference) -> Difference:
        """The difference of two regions of a tensor together."""
        return Difference(
            self.tensor,
            self.differing + other.differing,
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
            self.nan_a + other.nan_a,
            self.nan_b + other.nan_b,
        )


def compare_items(tensor: int, a: np.ndarray, dtype_a: DType, b: np.ndarray, dtype_b: DType) -> Difference | None:
    """How two arrays of raw items and of one shape differ; None if they are the same bit by bit.

    Args:
        tensor: What to call it.
        a: The one.
        dtype_a: What its items are.
        b: The other.
        dtype_b: What its items are. If that is something else, items are compared by value, and two NaNs are the same.
    """
    if dtype_a.name == dtype_b.name and np.array_equal(_bytes(a), _bytes(b)):
        return None
    left, right = _wide(a, dtype_a), _wide(b, dtype_b)
    nan_a, nan_b = np.isnan(left), np.isnan(right)
    if dtype_a.name == dtype_b.name:
        differs = (_bytes(a) != _bytes(b)).reshape(left.size, -1).any(axis=1)
    else:
        differs = ((left != right) & ~(nan_a & nan_b)).reshape(-1)
    with np.errstate(all="ignore"):
        apart = np.where(left == right, 0.0, np.abs(left - right))  # two infinities are not apart
        larger = np.maximum(np.abs(left), np.abs(right))
        relative = np.where(apart == 0, 0.0, np.where(np.isinf(larger), np.inf, apart / larger))
    known = ~(nan_a | nan_b)
    return Difference(
        tensor,
        int(differs.sum()),
        float(apart[known].max(initial=0.0)),
        float(relative[known].max(initial=0.0)),
        int(nan_a.sum()),
        int(nan_b.sum()),
    )


def _bytes(items: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(items).reshape(-1).view(np.uint8)


def _wide(items: np.ndarray, dtype: DType) -> Any:
    """The items as numbers that hold all their values: of integers of 64 bits where the machine has such floats."""
    values = items.view(arithmetic_dtype(dtype)).reshape(-1)
    if dtype.category == "int" and dtype.itemsize == 8:
        return values.astype(np.longdouble)
    return values.astype(np.complex128 if dtype.category == "complex" else np.float64)
