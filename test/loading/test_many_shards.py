"""A tensor of very many small shards: loaded right, with no object for each of them, in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box, flat_range
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import all_of
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.files.batches import ItemKind, Kinds
from paddle_dist_ckpt.files.runs import OpenFile, Segments
from paddle_dist_ckpt.loading import exchange_planner, needs
from paddle_dist_ckpt.loading.exchange_orders import SentPacks, ShardNeeds
from paddle_dist_ckpt.options import LoadOptions
from test.jobs import (
    check_pieces,
    load_alone,
    load_on,
    load_whole,
    make_array,
    same_bits,
    save_on,
    sharded,
    split_all,
)
from test.strategies import some
from test.torture.budgets import cost_of
from test.torture.crafting import Entry, column, write_checkpoint

SHARDS = 1 << 18


def irregular(folder: Path, shards: int) -> None:
    """A tensor whose rows are cut at random places; one box after the other, since they are no grid."""
    rng = np.random.default_rng(0)
    starts = np.flatnonzero(rng.random(2 * shards) < 0.5)[:shards]
    starts = np.unique(np.append(starts, np.arange(0, 2 * shards, 256)))
    lengths = np.diff(starts, append=2 * shards)
    rows = np.stack([starts // 256, starts % 256, np.ones_like(starts), lengths], axis=1)

    def edit(body: dict[str, Any]) -> None:
        cut = [column(values, "<u4") for values in rows.T]
        layout = {"shape": [shards // 128, 256], "count": len(rows), "offsets": cut[:2], "extents": cut[2:]}
        body["tensors"] |= {"layouts": [layout], "shard_file": column(np.zeros(len(rows)))}

    data = b"x" * (2 * shards)
    write_checkpoint(folder, {"/w": Boxes1D([shards // 128, 256], [], "uint8", 0, data, lengths.tolist())}, edit=edit)


@dataclass(frozen=True)
class Boxes1D(Entry):
    """An entry whose shards have these sizes."""

    sizes: Sequence[int] = ()

    @property
    def shards(self) -> list[int]:
        """Their sizes."""
        return list(self.sizes)


@pytest.mark.parametrize("dimensions", some([6, 1, "irregular", 2], 1))
def test_memory_for_a_shard_is_bounded(tmp_path: Path, dimensions: int | str) -> None:
    """Nor is all of the file's header ever there, which is larger than anything else."""
    if isinstance(dimensions, int):
        side = 1 << 18 // dimensions
        cuts = [list(range(1, side)) for _ in range(dimensions)]
        write_checkpoint(tmp_path, {"/w": Entry([side] * dimensions, cuts, "uint8", 0, b"x" * SHARDS)})
    else:
        irregular(tmp_path, SHARDS)
    few = tmp_path / "few"
    write_checkpoint(few, {"/w": Entry([2], [[1]], "uint8", 0, b"xx")})
    cost = cost_of(lambda folder: set(load_whole(folder, flat=True)["w"].flat) == {ord("x")}, few, tmp_path)
    assert cost.outcome == "True"
    assert cost.memory < 56 << 20  # a column of 64 bits takes 2 MiB, the header 20


@pytest.mark.parametrize("cut", ["a grid", "irregular"])
def test_ranks_are_told_once_what_shards_have_in_common(
    tmp_path: Path, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their shape, type and key, and what is needed of them: these for each would be most of an exchange's memory."""
    told: list[SentPacks] = []
    asked: list[ShardNeeds] = []

    def noted(*args: Any, **fields: Any) -> ShardNeeds:
        asked.append(ShardNeeds(*args, **fields))
        return asked[-1]

    def recorded(*args: Any, **fields: Any) -> SentPacks:
        told.append(SentPacks(*args, **fields))
        return told[-1]

    monkeypatch.setattr(exchange_planner, "SentPacks", recorded)
    monkeypatch.setattr(needs, "ShardNeeds", noted)
    monkeypatch.setattr(needs, "_TOGETHER", 300)
    if cut == "a grid":
        write_checkpoint(
            tmp_path, {"/w": Entry([16, 256], [list(range(1, 16)), list(range(1, 256))], "uint8", 0, b"x" * 4096)}
        )
    else:
        irregular(tmp_path, 2048)
    found = load_whole(tmp_path, flat=True)["w"]
    states = [{"w": sharded(found, [Box((0, 0), found.shape)], fill=False)} for _ in range(2)]
    load_on(states, tmp_path, options=LoadOptions(exchange="always", timeout=60))
    for state in states:
        check_pieces(state["w"], found)
    assert [len(all_of(said.box)) > 1000 for said in asked] == [True, True]
    for said in asked:
        boxes = all_of(said.boxes).reshape(-1, 4).tolist()
        assert len(boxes) == len(set(map(tuple, boxes))) < 64
        assert set(all_of(said.box).tolist()) == set(range(len(boxes)))
    senders = told
    assert sum(len(all_of(order.start)) for order in senders) > 1000
    for order in senders:
        assert len(order.keys) == 1
        assert len(order.kinds) == len({kind.shape for kind in order.kinds}) < 64


@pytest.mark.parametrize("files", [1, 3])
def test_what_is_read_some_after_other_is_what_was_saved(
    tmp_path: Path, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs of several files, tensors and kinds, few at a time, into targets that are divided otherwise."""
    arrays = {f"t{i}": make_array((12 + i, 10), seed=i) for i in range(5)}
    save_on(split_all(arrays, files), tmp_path)
    batches: list[int] = []
    real = needs.batches_of

    def counted(items: Any, *args: Any) -> Any:
        batches.append(sum(len(part.file) for part in items))
        return real(items, *args)

    monkeypatch.setattr(needs, "batches_of", counted)
    monkeypatch.setattr(needs, "_MANY", 2)
    monkeypatch.setattr(needs, "_READ_TOGETHER", 2)
    monkeypatch.setattr(needs, "_TOGETHER", 2)
    found = {key: np.zeros_like(array) for key, array in arrays.items()}
    load_alone(found, tmp_path)
    assert all(same_bits(found[key], array) for key, array in arrays.items())
    assert max(batches) == 2
    assert sum(batches) == 5 * files


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
    file = OpenFile("f", None, 0, None, None)  # type: ignore[arg-type]
    segments = Segments(file, 4096, starts, starts + 1, np.arange(len(starts)), str)
    runs = list(segments._runs(0))
    assert sum(b - a for a, b in runs) == len(starts)
    assert [a for a, _ in runs] == [0, *(b for _, b in runs[:-1])]
    assert not any(a < i < b for a, b in runs for i in (9,)), "they are apart"
    assert not any(b in (4, 5) for _, b in runs), "those that are the same stay together"
    assert max(b - a for a, b in runs) <= 6
