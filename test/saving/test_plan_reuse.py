"""A save of an unchanged state uses the last plan; whatever changes, what is saved is what is there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.tensors import Reduction
from paddle_dist_ckpt.errors import RankFailureError
from paddle_dist_ckpt.files import datafile
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.saving import planned_save, save_coordinator
from paddle_dist_ckpt.saving.save_memory import SaveMemory
from paddle_dist_ckpt.testing import FaultyStorage, ShardedArray, SimulatedRank, run_ranks, shard_array
from test.hooks import raises
from test.jobs import SMALL, alike, all_ok, load_whole, make_array, same_bits

RANKS = 3
SHAPE = (30, 40)
States = list[dict[str, Any]]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each plan that is made."""
    made: list[int] = []

    def counting(*args: Any) -> planned_save.PlannedSave:
        made.append(1)
        return planned_save.make_plan(*args)

    monkeypatch.setattr(save_coordinator, "make_plan", counting)
    return made


def rows_of(array: np.ndarray, ranks: int = RANKS) -> list[ShardedArray]:
    step = -(-array.shape[0] // ranks)
    bounds = [(r * step, min((r + 1) * step, array.shape[0])) for r in range(ranks)]
    return [shard_array(array, [Box((a, 0), (b - a, array.shape[1]))]) for a, b in bounds]


def states_of(seed: int = 0) -> States:
    """Sharded and plain tensors, values small and large."""
    w, v = rows_of(make_array(SHAPE, seed=seed)), rows_of(make_array((9, 5), "float64", seed))
    plain = make_array((50,), "int32", seed)
    return [
        {"w": w[r], "v": {"x": v[r]}, "p": plain.copy(), "step": seed, "text": "long" * 2000, "empty": {}}
        for r in range(RANKS)
    ]


def whole_of(states: States) -> dict[str, Any]:
    """What a checkpoint of these states holds."""
    w = np.concatenate([piece for s in states for piece in s["w"].pieces])
    v = np.concatenate([piece for s in states for piece in s["v"]["x"].pieces])
    return {**states[0], "w": w, "v": {"x": v}}


def run(saves: Callable[[SimulatedRank, int], None]) -> None:
    all_ok(run_ranks(RANKS, lambda rank: saves(rank, rank.rank)))


def check(folder: Path, expected: dict[str, Any]) -> None:
    assert alike(load_whole(folder), expected)


def test_an_unchanged_structure_is_planned_once(tmp_path: Path, plans: list[int]) -> None:
    states = states_of()

    def saves(rank: SimulatedRank, r: int) -> None:
        for i in range(4):
            if i:
                for piece in (*states[r]["w"].pieces, *states[r]["v"]["x"].pieces, states[r]["p"]):
                    piece.view("u1")[...] += 1
                states[r]["step"] = i
            rank.save(states[r], tmp_path, options=SMALL)

    run(saves)
    assert len(plans) == 1
    check(tmp_path, whole_of(states))
    assert load_whole(tmp_path, 0)["step"] == 0


def other_tensor(states: States, r: int) -> None:
    states[r]["w"] = rows_of(make_array(SHAPE, seed=9))[r]


def other_shape(states: States, r: int) -> None:
    states[r]["w"] = rows_of(make_array((17, 6), seed=9))[r]


def other_cut_on_two_ranks(states: States, r: int) -> None:
    """Rank 2 sends its fingerprint alone, and is asked for more."""
    array = make_array(SHAPE)
    if r == 0:
        states[r]["w"] = shard_array(array, [Box((0, 0), (5, 40))])
    if r == 1:
        states[r]["w"] = shard_array(array, [Box((5, 0), (15, 40))])


def one_more_on_one_rank(states: States, r: int) -> None:
    if r == 1:
        states[r]["new"] = make_array((4, 4), seed=5)


def values(states: States, r: int) -> None:
    states[r] |= {"step": "a word", "text": "short", "other": [1, 2]}


def large_value_of_another_length(states: States, r: int) -> None:
    states[r]["text"] = "longer" * 3000


def small_value_grows(states: States, r: int) -> None:
    states[r]["step"] = "x" * 10_000


def empty_container_is_filled_on_one_rank(states: States, r: int) -> None:
    if r == 2:
        states[r]["empty"] = {"now": make_array((3,), seed=1)}


def reshaped_in_place(states: States, r: int) -> None:
    states[r]["p"].shape = (5, 10)


CHANGES = (
    other_tensor,
    other_shape,
    other_cut_on_two_ranks,
    one_more_on_one_rank,
    values,
    large_value_of_another_length,
    small_value_grows,
    empty_container_is_filled_on_one_rank,
    reshaped_in_place,
)


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_saved_as_it_is(tmp_path: Path, change: Callable[[States, int], None]) -> None:
    """The same by ranks that remember as by ranks that do not."""
    states, folders = states_of(), [tmp_path / "remembering", tmp_path / "new"]
    originals = [dict(state) for state in states]

    def saves(rank: SimulatedRank, r: int) -> None:
        rank.save(originals[r], folders[0], options=SMALL)
        rank.save(states[r], folders[0], options=SMALL)

    run(lambda rank, r: rank.save(states[r], folders[0], options=SMALL) and None)
    for r in range(RANKS):
        change(states, r)

    run(saves)
    run(lambda rank, r: rank.save(states[r], folders[1], options=SMALL) and None)
    fresh = load_whole(folders[1])
    assert alike(load_whole(folders[0]), fresh)
    if "w" in fresh and change is not other_shape:
        assert same_bits(fresh["w"], np.concatenate([s["w"].pieces[0] for s in states]))


def test_another_block_size_is_another_plan_of_files(tmp_path: Path) -> None:
    states = states_of()

    def saves(rank: SimulatedRank, r: int) -> None:
        for size in (4096, 8192, 4096):
            rank.save(states[r], tmp_path / str(size), options=SaveOptions(block_bytes=size, timeout=60))

    run(saves)
    for size in (4096, 8192):
        check(tmp_path / str(size), whole_of(states))


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_rank_that_has_forgotten_is_told_the_plan(tmp_path: Path, plans: list[int], victim: int) -> None:
    states = states_of()

    def saves(rank: SimulatedRank, r: int) -> None:
        rank.save(states[r], tmp_path, options=SMALL)
        if r == victim:
            for name in SaveMemory.__slots__:
                setattr(rank.memory, name, getattr(SaveMemory(), name))
        rank.save(states[r], tmp_path, options=SMALL)

    run(saves)
    assert len(plans) == (2 if victim == 0 else 1)
    for unique_id in (0, 1):
        assert alike(load_whole(tmp_path, unique_id), whole_of(states))


def test_a_save_that_failed_on_one_rank_leaves_nothing_wrong_behind(tmp_path: Path) -> None:
    states = states_of()
    failing = [True]
    broken = FaultyStorage(tmp_path, raises("write", "*", errno.EIO, lambda: failing[0]))

    def saves(rank: SimulatedRank, r: int) -> None:
        storage = broken if r == 1 else tmp_path
        with pytest.raises(RankFailureError):
            rank.save(states[r], storage, options=SMALL)
        if r == 1:
            failing[0] = False
        rank.save(states[r], storage, options=SMALL)
        rank.save(states[r], storage, options=SMALL)

    run(saves)
    check(tmp_path, whole_of(states))


def test_partial_tensors_are_reduced_anew(tmp_path: Path, plans: list[int]) -> None:
    addends = [np.full((8, 8), float(r + 1), np.float32) for r in range(RANKS)]
    states = [{"g": shard_array(addends[r], [Box((0, 0), (8, 8))])} for r in range(RANKS)]
    for r, state in enumerate(states):
        state["g"].reduction = Reduction("sum", r, RANKS)

    def saves(rank: SimulatedRank, r: int) -> None:
        rank.save(states[r], tmp_path, options=SMALL)
        states[r]["g"].pieces[0][...] *= 10
        rank.save(states[r], tmp_path, options=SMALL)

    run(saves)
    assert len(plans) == 1
    assert (load_whole(tmp_path, 0)["g"] == 6).all()
    assert (load_whole(tmp_path, 1)["g"] == 60).all()


def test_several_files_of_a_rank(tmp_path: Path, plans: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    split = datafile.split_in_parts
    name = "paddle_dist_ckpt.saving.file_plan.split_in_parts"
    monkeypatch.setattr(name, lambda table: split(table, 2000))
    states = [{f"t{i}": make_array((7, i + 1), seed=i) for i in range(30)} for _ in range(RANKS)]

    def saves(rank: SimulatedRank, r: int) -> None:
        for _ in range(3):
            for tensor in states[r].values():
                tensor.view("u1")[...] += 1
            rank.save(states[r], tmp_path, options=SMALL)

    run(saves)
    assert len(plans) == 1
    check(tmp_path, states[0])


def test_replicas_that_differ_are_told_each_time(tmp_path: Path) -> None:
    states = [{"p": np.arange(4.0), "n": 1} for _ in range(RANKS)]
    reports: list[tuple[str, ...]] = []

    def saves(rank: SimulatedRank, r: int) -> None:
        for i in range(3):
            if i == 1 and r == 2:
                states[r]["p"][0] = 7
            report = rank.save(states[r], tmp_path, options=SMALL)
            if r == 0:
                reports.append(report.warnings)

    run(saves)
    assert [len(warnings) for warnings in reports] == [0, 1, 1]
    assert "rank 2 differ" in reports[2][0]
