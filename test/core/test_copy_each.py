"""Many copies between addresses: small ones in one operation, large ones each for itself."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_dist_ckpt.core.memory import address_of, copy_each, copy_various


@pytest.mark.parametrize("nbytes", [1, 3, 8, 100, 4096, 4097, 70_000])
def test_each_gets_its_own_bytes_and_nothing_beside_them_is_touched(nbytes: int) -> None:
    random = np.random.default_rng(nbytes)
    sources = [random.integers(1, 256, nbytes).astype(np.uint8) for _ in range(50)]
    targets = [np.zeros(nbytes + 2, np.uint8) for _ in sources]
    order = random.permutation(len(sources))
    copy_each(
        np.array([address_of(targets[i]) + 1 for i in order], np.int64),
        np.array([address_of(sources[i]) for i in order], np.int64),
        nbytes,
    )
    for source, target in zip(sources, targets, strict=True):
        assert np.array_equal(target[1:-1], source)
        assert target[0] == target[-1] == 0


def test_from_one_buffer_to_itself_and_from_one_place_to_several() -> None:
    memory = np.arange(100, dtype=np.uint8)
    base = address_of(memory)
    copy_each(np.array([base + 50, base + 30], np.int64), np.array([base, base], np.int64), 10)
    assert memory[50:60].tolist() == memory[30:40].tolist() == list(range(10))
    assert memory[40:50].tolist() == list(range(40, 50))


@pytest.mark.parametrize(("count", "nbytes"), [(0, 8), (3, 0)])
def test_nothing_to_copy(count: int, nbytes: int) -> None:
    nowhere = np.full(count, 8, np.int64)
    copy_each(nowhere, nowhere, nbytes)


@pytest.mark.parametrize("most", [1, 3, 40, 6000])
def test_each_its_own_number_of_bytes(most: int) -> None:
    random = np.random.default_rng(most)
    sources = [random.integers(1, 256, size).astype(np.uint8) for size in random.integers(1, most + 1, 100)]
    targets = [np.zeros(len(source) + 2, np.uint8) for source in sources]
    order = random.permutation(len(sources))
    copy_various(
        np.array([address_of(targets[i]) + 1 for i in order], np.int64),
        np.array([address_of(sources[i]) for i in order], np.int64),
        np.array([len(sources[i]) for i in order], np.int64),
    )
    for source, target in zip(sources, targets, strict=True):
        assert np.array_equal(target[1:-1], source)
        assert target[0] == target[-1] == 0


def test_nothing_of_any_size_to_copy() -> None:
    nowhere = np.zeros(0, np.int64)
    copy_various(nowhere, nowhere, nowhere)
