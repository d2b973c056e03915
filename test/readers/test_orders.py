"""Arrays whose elements lie in another order than C's, as transposed ones do, are read like all others."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from paddle_dist_ckpt import LoadOptions, export, read_metadata, stored, verify
from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.errors import CheckpointError
from paddle_dist_ckpt.readers.budget import Budget
from paddle_dist_ckpt.readers.catalog import Catalog
from paddle_dist_ckpt.readers.orders import (
    ArrayPart,
    LyingArray,
    Scattered,
    dense_axes,
    fortran_axes,
    parts_in_order,
)
from paddle_dist_ckpt.readers.pdparams import PdparamsReader
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.storage.local import as_source
from paddle_dist_ckpt.testing.catalogs import read_catalog
from paddle_dist_ckpt.testing.reader_conformance import ForeignCheckpoint, ReaderTests, check_catalog
from test.jobs import blank_like, check_pieces, load_on, load_whole, split_rows
from test.pace import slowness
from test.readers.measured import measured
from test.strategies import some

FLOAT = DTYPES["float32"]
WEIGHT = np.arange(24, dtype=np.float32).reshape(6, 4)
Array = npt.NDArray[Any]


def turned(shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """An array whose dimensions lie in this order."""
    lying = np.arange(np.prod(shape, dtype=np.int64), dtype=np.float32).reshape([shape[axis] for axis in axes])
    return lying.transpose(np.argsort(axes))


def strides_of(array: Array) -> tuple[int, ...]:
    """Its strides in elements."""
    return tuple(step // array.itemsize for step in array.strides)


def put_together(array: Array, lying: LyingArray) -> Array:
    """An array out of its memory and of the parts of it."""
    memory = np.empty(array.size, np.float32)
    memory[:] = array.transpose(np.argsort([-step for step in array.strides], kind="stable")).reshape(-1)
    found = np.full([n + 1 for n in array.shape], np.nan, np.float32)  # the box begins at 1
    box = Box((1,) * array.ndim, array.shape)
    for part, file, position in parts_in_order("w", ArrayPart(box, 7, lying), Budget()):
        at = (position - 100) // 4
        found[part.slices] = memory[at : at + part.size].reshape(part.shape)
        assert file == 7
    return found[(slice(1, None),) * array.ndim]


@pytest.mark.parametrize("shape", [(2, 3), (4, 1, 3), (2, 3, 4), (1, 5), (3, 2, 1, 4), (1, 1), (5,), ()])
def test_every_order_of_dimensions_is_put_together(shape: tuple[int, ...]) -> None:
    for axes in itertools.permutations(range(len(shape))):
        array = turned(shape, axes)
        found = dense_axes(shape, strides_of(array))
        assert found is not None
        assert np.array_equal(put_together(array, LyingArray(FLOAT, shape, 100, found)), array), axes


def test_parts_are_as_large_as_they_can_be() -> None:
    def boxes(shape: tuple[int, ...], axes: tuple[int, ...] | None) -> list[tuple[int, ...]]:
        array = LyingArray(FLOAT, shape, 0, axes)
        parts = parts_in_order("w", ArrayPart(Box((0,) * len(shape), shape), 0, array), Budget())
        return [part.box.shape for part in parts]

    assert boxes((2, 3, 4), None) == boxes((2, 3, 4), (0, 1, 2)) == [(2, 3, 4)]
    assert boxes((2, 3, 4), (2, 0, 1)) == [(2, 3, 1)] * 4
    assert boxes((2, 3, 4), (2, 1, 0)) == [(2, 1, 1)] * 12
    assert boxes((2, 3, 1), (2, 0, 1)) == [(2, 3, 1)]


def test_gaps_and_places_that_are_shared_are_no_order() -> None:
    assert dense_axes((2, 3), (6, 2)) is None
    assert dense_axes((2, 3), (0, 1)) is None
    assert dense_axes((2, 3), (1, 1)) is None
    assert dense_axes((2, 3), (1, 2)) == (1, 0)
    assert fortran_axes((1, 3)) is fortran_axes((0, 3, 2)) is None
    assert fortran_axes((2, 3, 4)) == (2, 1, 0)


def test_parts_for_which_there_is_no_room_are_not_made() -> None:
    narrow = LyingArray(FLOAT, (2, 10**7), 0, (1, 0))
    with pytest.raises(Scattered, match=r"^w has its elements in another order.* 10000000 parts of 8 bytes"):
        next(parts_in_order("w", ArrayPart(whole((2, 10**7)), 0, narrow), Budget()))
    wide = LyingArray(FLOAT, (10**7, 10**7), 0, (1, 0))  # of a file that would be larger than it is
    with pytest.raises(Scattered, match="10000000 parts"):
        next(parts_in_order("w", ArrayPart(whole((10**7, 10**7)), 0, wide), Budget()))


def test_arrays_that_share_their_elements_are_read_while_there_is_room(tmp_path: Path) -> None:
    array = np.asfortranarray(np.zeros((128, 40_000), np.float32))
    write(tmp_path, {"c": WEIGHT} | {f"w{i}": array for i in range(8)})
    storage = LocalStorage(tmp_path)
    catalog = PdparamsReader().read(storage, storage.names(), 0)
    assert 0 < len(catalog.left_out) < 8
    assert len(catalog.left_out) + len(catalog.tensors) == 9


# -- files of paddle.save


class TestOfTransposed(ReaderTests):
    """A state_dict of arrays in Fortran's order, and others between them."""

    @pytest.fixture
    def reader(self) -> PdparamsReader:
        return PdparamsReader()

    @pytest.fixture
    def checkpoint(self) -> ForeignCheckpoint:
        arrays = {"t": WEIGHT.T, "cube": turned((3, 4, 5), (2, 1, 0)), "c": WEIGHT, "bits": np.ones((3, 2), "u2").T}
        return ForeignCheckpoint({"m.pdparams": pickle.dumps(arrays, 4)}, arrays=arrays)


def write(folder: Path, state: dict[str, Any], protocol: int = 4) -> Path:
    """A file of paddle.save."""
    path = folder / "model.pdparams"
    path.write_bytes(pickle.dumps(state, protocol))
    return path


def read(path: Path) -> tuple[Catalog, dict[str, Array]]:
    """What a file holds."""
    storage = as_source(path)
    catalog = PdparamsReader().read(storage, storage.names(), 0)
    check_catalog(storage, catalog)
    return catalog, read_catalog(storage, catalog)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_transposed_arrays_are_read(protocol: int, tmp_path: Path) -> None:
    state = {"w": WEIGHT.T, "nested": {"v": (WEIGHT + 1).T}, "named": ("linear_0.w_0", WEIGHT.T), "c": WEIGHT}
    catalog, arrays = read(write(tmp_path, state, protocol))
    assert np.array_equal(arrays["w"].view(np.float32), WEIGHT.T)
    assert np.array_equal(arrays["nested.v"].view(np.float32), WEIGHT.T + 1)
    assert np.array_equal(arrays["c"].view(np.float32), WEIGHT)
    tensors = {tensor.path[0]: tensor for tensor in catalog.tensors}
    assert (tensors["named"].name, tensors["named"].shape) == ("linear_0.w_0", (4, 6))
    assert tensors["w"].offsets == [(0, 0)]  # whoever saved it had it in one piece
    assert tensors["c"].offsets is None
    assert catalog.left_out == []


def test_what_lies_in_too_many_parts_is_left_out_with_what_to_do(tmp_path: Path) -> None:
    narrow = np.asfortranarray(np.zeros((2, 200_000), np.float32))
    catalog, arrays = read(write(tmp_path, {"narrow": narrow, "w": WEIGHT.T}))
    assert list(arrays) == ["w"]
    ((path, reason),) = catalog.left_out
    assert path == ("narrow",)
    assert "200000 parts of 8 bytes" in reason
    assert "save it again as a contiguous copy" in reason


def many_small() -> dict[str, Any]:
    return {f"k{i}": np.asfortranarray(np.zeros((2, 2), np.float32)) for i in range(20_000)}


def shared(rows: int) -> dict[str, Any]:
    array = np.asfortranarray(np.zeros((rows, 40), np.float32))
    return {f"k{i}": array for i in range(100_000)}


def large() -> dict[str, Any]:
    return {f"k{i}": np.asfortranarray(np.zeros((120, 4096), np.float32)) for i in range(16)}


@pytest.mark.parametrize(
    "make", some([many_small, lambda: shared(2), lambda: shared(200), lambda: shared(8), large], 2)
)
def test_looking_at_them_takes_little_time_and_memory(make: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    size = write(tmp_path, make()).stat().st_size
    (taken,) = measured([tmp_path])
    assert taken["memory"] < size + (64 << 20)
    assert taken["seconds"] < (2 + size / (10 << 20)) * slowness()  # one, on a machine that has nothing else to do


# -- used as any other checkpoint


@pytest.fixture
def weight() -> Array:
    """Of more than a block."""
    return np.random.default_rng(0).random((700, 900), dtype=np.float32).T


@pytest.fixture
def path(weight: Array, tmp_path: Path) -> Path:
    """A file with it."""
    return write(tmp_path, {"w": weight, "c": WEIGHT})


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("exchange", ["never", "always"])
def test_ranks_load_their_parts(dimension: int, exchange: str, weight: Array, path: Path) -> None:
    parts = split_rows(blank_like(np.ascontiguousarray(weight)), 2, fill=False, dimension=dimension)
    load_on([{"w": part} for part in parts], path, options=LoadOptions(strict=False, exchange=exchange))
    for part in parts:
        check_pieces(part, np.ascontiguousarray(weight))


def test_a_recipe_turns_them_back(weight: Array, path: Path) -> None:
    whole = np.zeros(weight.T.shape, np.float32)
    load_on([{"v": whole}], path, options=LoadOptions(strict=False, recipes={"v": stored("w").T}))
    assert np.array_equal(whole, weight.T)


@pytest.mark.parametrize("format", ["safetensors", "native"])
def test_they_are_exported_and_verified(format: str, weight: Array, path: Path) -> None:
    assert verify(path).ok
    out = path.parent / "out"
    export(path, out, format)
    assert verify(out).ok
    assert np.array_equal(load_whole(out)["w"], weight)
    (shard,) = read_metadata(out).state_dict_metadata["w"]
    assert shard.global_shape == (900, 700)


def test_a_damaged_one_is_an_error_of_this_library(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError):
        read_metadata(LocalStorage(path.parent))
