"""Which leaves of two checkpoints have the same keys, in what order, and in how much memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np

from paddle_dist_ckpt.cli.matching import Held, Matched, Side
from paddle_dist_ckpt.folder.checkpoint import read_checkpoint
from paddle_dist_ckpt.storage import LocalStorage
from test.jobs import save_alone

MANY = 3_000


def held(path: Path, prefix: str | None = None) -> Held:
    storage = LocalStorage(path)
    return Held.of(Side(storage, None, prefix), read_checkpoint(storage, None))


def test_the_order_is_not_that_in_which_a_reader_has_found_them(tmp_path: Path) -> None:
    save_alone({key: np.full(3, i, np.int8) for i, key in enumerate("dacb")} | {"e": 5}, tmp_path)
    one = held(tmp_path)
    backwards = replace(one, paths=one.paths[::-1])
    assert [key for key, _ in backwards.leaves(None)] == [key for key, _ in one.leaves(None)] == [*"abcde"]
    assert [backwards.key(leaf) for _, leaf in backwards.leaves("b")] == ["b"]


def test_keys_are_not_kept(tmp_path: Path) -> None:
    state = {f"model.{'x' * 60}.{i}": np.zeros(0, np.int8) for i in range(MANY)}
    save_alone(state, tmp_path)
    one, other = held(tmp_path), held(tmp_path)
    _ = one.metadata.special_keys, other.metadata.special_keys  # made once for all that is done with a checkpoint
    tracemalloc.start()
    try:
        matched = Matched.of(one, other, None)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(matched.alike) == MANY
    assert kept < 40 * MANY  # a key alone takes more
