"""A tensor of very many small shards: loaded right, with no object for each of them, in pieces."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box, flat_range
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.files.batches import ItemKind, Kinds
from paddle_dist_ckpt.files.runs import OpenFile, Segments
from test.jobs import load_alone, load_whole
from test.torture.crafting import Entry, write_checkpoint

SHARDS = 1 << 16


@pytest.mark.parametrize("dimensions", [1, 2, 4])
def test_memory_for_a_shard_is_bounded(tmp_path: Path, dimensions: int) -> None:
    side = 1 << 16 // dimensions
    cuts = [list(range(1, side)) for _ in range(dimensions)]
    write_checkpoint(tmp_path, {"/w": Entry([side] * dimensions, cuts, "uint8", 0, b"x" * SHARDS)})
    load_whole(tmp_path, flat=True)
    tracemalloc.start()
    found = load_whole(tmp_path, flat=True)["w"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found == ord("x")).all()
    header = 70 << 16
    assert (peak - header - (8 << 20)) / SHARDS < 450 + 100 * dimensions


def test_shards_go_to_where_they_belong_strided_or_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"/w": Entry([6, 8], [[2, 4], [1, 4, 5]], "uint8", 0, b"y" * 48)})
    wide = np.zeros((6, 20), np.uint8)
    target = wide[:, 3:19:2]
    load_alone({"w": target}, tmp_path)
    assert (target == ord("y")).all()
    assert int(wide.sum()) == 48 * ord("y")


def test_ranges_are_found_in_columns_as_one_by_one() -> None:
    rng = np.random.default_rng(0)
    shapes = rng.integers(1, 5, (500, 3))
    offset = rng.integers(0, shapes)
    shape = rng.integers(1, shapes - offset + 1)
    found = Boxes(offset, shape).flat_starts(shapes).tolist()
    for i, start in enumerate(found):
        one = flat_range(Box(tuple(offset[i].tolist()), tuple(shape[i].tolist())), shapes[i].tolist())
        assert start == (-1 if one is None else one[0])
    assert -1 in found
    assert max(found) > 0


def test_kinds_of_several_are_those_of_each() -> None:
    def kind(stored: str, strides: tuple[int, ...] | None, at: int) -> ItemKind:
        box = Box((at,), (2,))
        return ItemKind(DTYPES[stored], DTYPES["float32"], (9,), box, (9,), box, strides)

    one = [kind("float32", None, 1), kind("float32", (8,), 2)]
    two = [kind("float64", None, 3), kind("float32", (8,), 4), kind("float32", None, 5)]
    joined, all_of = Kinds.joined([Kinds.of(one), Kinds.of(two)]), Kinds.of([*one, *two])
    assert joined.pairs == all_of.pairs
    assert joined.columns.tolist() == all_of.columns.tolist()
    assert joined.entry_bytes.tolist() == all_of.entry_bytes.tolist() == [36, 36, 72, 36, 36]
    assert [joined.one(i) for i in range(5)] == [*one, *two]


def test_runs_are_cut_where_segments_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.files.runs._MOST_SEGMENTS", 4)
    starts = np.array([0, 1, 2, 3, 3, 3, 6, 7, 8, 99_999, 100_000])
    file = OpenFile("f", None, 0, None)  # type: ignore[arg-type]
    segments = Segments(file, 4096, starts, starts + 1, np.arange(len(starts)), str)
    runs = list(segments._runs(0))
    assert sum(b - a for a, b in runs) == len(starts)
    assert [a for a, _ in runs] == [0, *(b for _, b in runs[:-1])]
    assert not any(a < i < b for a, b in runs for i in (9,)), "they are apart"
    assert not any(b in (4, 5) for _, b in runs), "those that are the same stay together"
    assert max(b - a for a, b in runs) <= 6
