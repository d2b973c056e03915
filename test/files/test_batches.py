"""Batches of small entries: what they read where entries lie within others, and the memory that casts take."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.buffers import Buffers
from paddle_dist_ckpt.core.dtypes import DTYPES, arithmetic_dtype
from paddle_dist_ckpt.core.memory import address_of
from paddle_dist_ckpt.files.batches import Batch, ItemKind, Kinds, hand_out
from paddle_dist_ckpt.files.holes import HoleBudget, Holes
from paddle_dist_ckpt.files.reader import clear
from paddle_dist_ckpt.files.runs import CHUNK_BYTES, OpenFile


class Bytes:
    """A file in memory."""

    def __init__(self, content: np.ndarray) -> None:
        self.content, self.size = content, len(content)

    def read_into(self, parts: Sequence[np.ndarray], offset: int, once: bool = False) -> None:
        for part in parts:
            part[:] = self.content[offset : offset + len(part)]
            offset += len(part)


def unverified(content: np.ndarray) -> OpenFile:
    file = Bytes(content)
    return OpenFile("file", file, 0, None, Holes("file", file, HoleBudget()))


def kind_of(stored: str, wanted: str, shape: tuple[int, ...], box: Box | None = None) -> ItemKind:
    """Items of entries of this shape, to be had whole, or a box of them, in contiguous targets."""
    box = box or whole(shape)
    return ItemKind(DTYPES[stored], DTYPES[wanted], shape, box, box.shape, whole(box.shape), None)


@pytest.mark.parametrize("box", [None, Box((0, 0), (500, 3))])
@pytest.mark.parametrize("inner", [0, 24])
def test_entries_within_others_are_read_whole(inner: int, box: Box | None) -> None:
    """As in files of other formats, where tensors may share their bytes."""
    content = np.random.default_rng(0).integers(0, 256, 1 << 20).astype(np.uint8)
    kinds = [kind_of("int64", "int64", (500, 4), box), kind_of("int64", "int64", (2,))]
    outer, small = np.zeros(kinds[0].target_shape, np.int64), np.zeros(2, np.int64)
    for starts in ([0, inner], [0, inner, 16_384]):
        last = np.zeros(2, np.int64)
        targets = [outer, small, last][: len(starts)]
        outer[:], small[:] = 0, 0
        batch = Batch(
            unverified(content),
            1 << 20,
            np.array(starts),
            np.array([start + (16_000 if i == 0 else 16) for i, start in enumerate(starts)]),
            np.arange(len(starts)),
            str,
            np.array([0, 1, 1][: len(starts)]),
            np.array([address_of(target) for target in targets]),
            Kinds.of(kinds),
            str,
        )
        for task in batch.tasks(Buffers(1), lambda _: None):
            task()
        expected = content[:16_000].view(np.int64).reshape(500, 4)
        assert (outer == (expected if box is None else expected[box.slices])).all()
        assert (small == content[inner : inner + 16].view(np.int64)).all()
        assert len(starts) < 3 or (last == content[16_384:16_400].view(np.int64)).all()


def test_entries_within_others_make_no_run_longer() -> None:
    """Where a short entry ends is no sign of where those before it end."""
    length = CHUNK_BYTES - 100
    content = np.random.default_rng(1).integers(0, 256, 2 * CHUNK_BYTES).astype(np.uint8)
    starts = np.array([0, length, length + 10, length + 20, length + 30])
    sizes = np.array([length, length, 4, 4, 4])
    targets = [np.zeros(size, np.uint8) for size in sizes]
    taken: list[int] = []

    class Counted(Buffers):
        def borrow(self, size: int) -> Any:
            taken.append(size)
            return super().borrow(size)

    batch = Batch(
        unverified(content),
        CHUNK_BYTES,
        starts,
        starts + sizes,
        np.arange(5),
        str,
        np.array([1, 1, 0, 0, 0]),
        np.array([address_of(target) for target in targets]),
        Kinds.of([kind_of("uint8", "uint8", (4,)), kind_of("uint8", "uint8", (length,))]),
        str,
    )
    for task in batch.tasks(Counted(1), lambda _: None):
        task()
    for start, target in zip(starts, targets, strict=True):
        assert (target == content[start : start + len(target)]).all()
    assert max(taken) <= CHUNK_BYTES


@pytest.mark.parametrize("strided", [False, True])
def test_a_cast_of_many_items_takes_little_memory(strided: bool) -> None:
    count, length = 2000, 2048
    stored, wanted = DTYPES["float8_e5m2"], DTYPES["float64"]
    values = (np.arange(count * length) % 60).astype(np.uint8)
    box = whole((length,))
    kind = ItemKind(stored, wanted, (length,), box, (length,), box, (16,) if strided else None)
    memory = np.zeros((count, length, 2 if strided else 1))
    targets = address_of(memory) + np.arange(count) * memory.strides[0]
    which = np.zeros(count, np.int64)
    tracemalloc.start()
    try:
        hand_out(Kinds.of([kind]), which, np.arange(count) * length, targets, values, str)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    expected = values.view(arithmetic_dtype(stored)).astype(np.float64)
    assert np.array_equal(memory[:, :, 0].reshape(-1), expected)
    assert most < 12 << 20


def test_time_is_no_square_of_the_kinds() -> None:
    """Each item may be of a kind of its own; what looks at all items for each kind takes minutes."""
    looked_at = 0

    class Counted(np.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal looked_at
            plain = [np.asarray(x) if isinstance(x, Counted) else x for x in inputs]
            looked_at += max(np.size(x) for x in plain)
            return getattr(ufunc, method)(*plain, **kwargs)

    count = 400
    box = whole((1,))
    kinds = Kinds.of([ItemKind(DTYPES["uint8"], DTYPES["uint8"], (1,), box, (1,), box, (2 + i,)) for i in range(count)])
    kinds.columns = kinds.columns.view(Counted)
    memory, values = np.zeros(count, np.uint8), np.arange(count).astype(np.uint8)
    places = np.arange(count)
    hand_out(kinds, places, places, address_of(memory) + places, values, str)
    assert (memory == values).all()
    assert looked_at < 20 * count


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
def test_zeros_are_positive(dtype: str) -> None:
    target = -np.zeros(3, dtype)
    clear(target.view(DTYPES[dtype].raw))
    assert target.tobytes() == bytes(target.nbytes)
