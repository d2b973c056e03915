"""Layouts of tensors over ranks, and which part of a tensor each rank has, worked out with numpy alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from test.paddle.versions import FLOAT8, FROM_LOCAL

__all__ = ["LAYOUTS", "Array", "Layout", "Spread", "part_of"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """Where one tensor lies.

    Attributes:
        mesh: Ranks, nested as the mesh is.
        dims: For each mesh dimension the tensor dimension that it cuts, None where it replicates.
    """

    mesh: Any
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where all tensors lie.

    Attributes:
        ranks: How many ranks there are.
        spread: Gives a tensor's place by its number and shape.
        keeps_foreign: Whether a rank has the keys of tensors whose mesh does not hold it, as ``shard_tensor`` leaves
            them, or lacks these keys.
    """

    ranks: int
    spread: Callable[[int, tuple[int, ...]], Spread]
    keeps_foreign: bool = False


def part_of(array: Array, spread: Spread, rank: int) -> Array | None:
    """The part of a global array that a rank has; None if the mesh does not hold the rank.

    Each mesh dimension cuts what the one before left: ceil(n / parts) elements for each part but the last ones. Paddle
    2.6 makes parts that differ by one element at most.
    """
    mesh = np.array(spread.mesh)
    places = np.argwhere(mesh == rank)
    if not len(places):
        return None
    for parts, at, dim in zip(mesh.shape, places[0], spread.dims, strict=True):
        if dim is not None and not FROM_LOCAL:
            array = np.array_split(array, parts, axis=dim)[at]
        elif dim is not None:
            size = -(-array.shape[dim] // parts)
            index = np.arange(at * size, min((at + 1) * size, array.shape[dim]))
            array = np.take(array, index, axis=dim)
    return array


def _cut(shape: tuple[int, ...], dim: int) -> int | None:
    """``dim``, or the nearest dimension that the shape has; None if it has none."""
    return min(dim, len(shape) - 1) if shape else None


def _pair(first: int | None, second: int | None) -> tuple[int | None, int | None]:
    """Two tensor dimensions to cut. Paddle 2.6 cuts none twice, so there the second mesh dimension replicates then."""
    return (first, None) if first == second and not FROM_LOCAL else (first, second)


def _replicated(ranks: int) -> Callable[[int, tuple[int, ...]], Spread]:
    return lambda i, shape: Spread(list(range(ranks)), (None,))


def _cut_by(ranks: int, dim: int) -> Callable[[int, tuple[int, ...]], Spread]:
    return lambda i, shape: Spread(list(range(ranks)), (_cut(shape, dim),))


def _sharding2(i: int, shape: tuple[int, ...]) -> Spread:
    """Parameters on both ranks, optimizer states cut."""
    return Spread([0, 1], (_cut(shape, 0) if i % 2 else None,))


def _pp2(i: int, shape: tuple[int, ...]) -> Spread:
    return Spread([i % 2], (None,))


def _dp2_mp2(i: int, shape: tuple[int, ...]) -> Spread:
    return Spread([[0, 1], [2, 3]], (None, _cut(shape, 1)))


def _pp2_mp2(i: int, shape: tuple[int, ...]) -> Spread:
    return Spread([0, 1] if i % 2 else [2, 3], (_cut(shape, i // 2 % 2),))


def _uneven4(i: int, shape: tuple[int, ...]) -> Spread:
    return Spread([0, 1, 2, 3], (shape.index(13) if 13 in shape else _cut(shape, 0),))


def _mixed4(i: int, shape: tuple[int, ...]) -> Spread:
    first, second = _cut(shape, 0), _cut(shape, 1)
    if not shape:
        return Spread([2, 1], (None,))
    return [
        Spread([0, 1, 2, 3], (first,)),
        Spread([3, 2, 1, 0], (second,)),
        Spread([[0, 1], [2, 3]], _pair(first, second)),
        Spread([[0, 1], [2, 3]], _pair(first, first)),
        Spread([[3, 1], [2, 0]], (second, None)),
        Spread([3, 1], (first,)),
    ][i % 6]


def _ep4(i: int, shape: tuple[int, ...]) -> Spread:
    """Experts on one rank each, the rest on all."""
    return Spread([i // 2 % 4], (None,)) if i % 2 else Spread([0, 1, 2, 3], (None,))


def _dp2_pp2_mp2(i: int, shape: tuple[int, ...]) -> Spread:
    if i % 3 == 2 and not FROM_LOCAL:  # Paddle 2.6 cannot cut for such meshes of three dimensions
        return Spread([[0, 1, 2, 3], [4, 5, 6, 7]], (None, _cut(shape, 1)))
    if i % 3 == 2:
        return Spread([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], (None, _cut(shape, 1), _cut(shape, 0)))
    stage = [[0, 1], [4, 5]] if i % 3 else [[2, 3], [6, 7]]
    return Spread(stage, (None, _cut(shape, 0)))


LAYOUTS: dict[str, Layout] = {
    "one": Layout(1, _replicated(1)),
    "dp2": Layout(2, _replicated(2)),
    "mp2_rows": Layout(2, _cut_by(2, 0)),
    "mp2_columns": Layout(2, _cut_by(2, 1)),
    "pp2": Layout(2, _pp2),
    "sharding2": Layout(2, _sharding2),
    "dp2_mp2": Layout(4, _dp2_mp2),
    "pp2_mp2": Layout(4, _pp2_mp2, keeps_foreign=True),
    "uneven4": Layout(4, _uneven4),
    "mixed4": Layout(4, _mixed4, keeps_foreign=True),
    "ep4": Layout(4, _ep4),
    "dp2_pp2_mp2": Layout(8, _dp2_pp2_mp2),
}


def global_arrays() -> dict[str, Array]:
    """The tensors that every layout holds, whole."""
    numbers = np.random.default_rng(2024)

    def normal(shape: tuple[int, ...], dtype: Any) -> Array:
        array: Array = np.asarray(numbers.standard_normal(shape)).astype(dtype)
        return array

    arrays = {
        "embedding": normal((13, 8), np.float32),
        "weight": normal((8, 12), np.float32),
        "bias": normal((12,), np.float32),
        "half": normal((8, 13), ml_dtypes.bfloat16),
        "eighth": normal((16, 4), ml_dtypes.float8_e4m3fn),
        "spectrum": normal((6, 4), np.complex64) * np.complex64(1 - 2j),
        "ids": numbers.integers(-(2**62), 2**62, 13),
        "mask": numbers.integers(0, 2, (5, 8)).astype(bool),
        "cube": normal((4, 3, 10), np.float16),
        "scale": normal((), np.float32),
        "empty": normal((0, 4), np.float32),
        "double": normal((7, 13), np.float64),
        "columns": numbers.integers(-128, 128, (2, 40)).astype(np.int8),
    }
    if not FLOAT8:
        del arrays["eighth"]
    return arrays
