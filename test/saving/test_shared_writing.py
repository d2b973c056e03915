"""Plain tensors that are equal on all ranks that have them are written by these together; no others ever are."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.errors import RankFailureError
from paddle_dist_ckpt.folder_calls import read_metadata, verify
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from test.background import failing
from test.jobs import all_ok, errors_of, laid_out, load_on, load_whole, make_array, same_bits, save_on

SHAPE = (256, 512)  # 512 KiB
NBYTES = 4 * SHAPE[0] * SHAPE[1]
ROOM = 64 << 10
BACKGROUND = pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in background"])


def options(check: Any = "warn") -> SaveOptions:
    return SaveOptions(check_replicas=check, timeout=60)


def save(rank: SimulatedRank, state: dict[str, Any], path: Any, in_background: bool, check: Any = "warn") -> Any:
    if in_background:
        return rank.save_in_background(state, path, options=options(check)).result(60)
    return rank.save(state, path, options=options(check))


def boxes(folder: Path, key: str, unique_id: int | None = None) -> int:
    """How many shards a tensor was saved in."""
    return len(read_metadata(folder, unique_id).state_dict_metadata[key])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("check", ["auto", "warn", "error"])
def test_what_all_ranks_have_alike_is_written_by_all(tmp_path: Path, ranks: int, check: Any) -> None:
    array = make_array(SHAPE, "int32")
    reports = save_on(
        [{"w": laid_out(array, "fortran" if r % 2 else "c")} for r in range(ranks)], tmp_path, None, options(check)
    )
    assert sum(report.bytes_written for report in reports) == NBYTES
    assert max(report.bytes_written for report in reports) <= NBYTES // ranks + ROOM
    assert reports[0].warnings == ()
    assert same_bits(load_whole(tmp_path)["w"], array)
    targets = [{"w": np.zeros_like(array)} for _ in range(3)]
    load_on(targets, tmp_path)
    assert all(same_bits(target["w"], array) for target in targets)
    verify(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "int64", "complex128"])
def test_of_every_dtype_and_shape(tmp_path: Path, dtype: str) -> None:
    shapes = {"scalar": (), "one": (1,), "none": (0, 7), "line": (70_001,), "cube": (33, 65, 66)}
    state = {name: make_array(shape, dtype) for name, shape in shapes.items()}
    reports = save_on([state | {"n": 1} for _ in range(3)], tmp_path)
    assert min(report.bytes_written for report in reports) > 0
    loaded = load_whole(tmp_path)
    assert all(same_bits(loaded[name], array) for name, array in state.items())


def test_only_the_ranks_that_have_it_write_it(tmp_path: Path) -> None:
    array = make_array(SHAPE, "int32")
    reports = save_on([{"n": 1} | ({"w": array} if rank in (1, 3) else {}) for rank in range(4)], tmp_path)
    assert [report.bytes_written for report in reports[::2]] == [0, 0]
    assert all(abs(report.bytes_written - NBYTES // 2) <= ROOM for report in reports[1::2])
    assert same_bits(load_whole(tmp_path)["w"], array)


def test_ranks_that_have_more_to_write_write_less_of_it(tmp_path: Path) -> None:
    array = make_array(SHAPE, "int32")
    reports = save_on([{"w": array} | ({"own": array} if rank == 1 else {}) for rank in range(2)], tmp_path)
    assert all(abs(report.bytes_written - NBYTES) <= ROOM for report in reports)


@pytest.mark.parametrize("coordinator", [0, 1, 2])
@pytest.mark.parametrize("odd", [0, 1, 2])
@BACKGROUND
def test_replicas_that_differ_are_never_mixed(tmp_path: Path, odd: int, coordinator: int, in_background: bool) -> None:
    array = make_array(SHAPE, "int32")

    def work(rank: SimulatedRank) -> Any:
        other = array.copy()
        other[-1, -1] += rank.rank == odd
        return save(rank, {"w": array, "v": other}, tmp_path, in_background)

    (report, *_) = all_ok(run_ranks(3, work, coordinator))
    assert len(report.warnings) == 1
    assert (boxes(tmp_path, "v"), boxes(tmp_path, "w")) == (1, 2)  # balanced: the coordinator has written v
    assert load_whole(tmp_path)["v"][-1, -1] == array[-1, -1] + (coordinator == odd)


def test_what_is_not_compared_is_written_by_one(tmp_path: Path) -> None:
    """It is not known to be equal."""
    array = make_array(SHAPE, "int32")
    states = [array, array, array + 1]

    def work(rank: SimulatedRank) -> Any:
        return rank.save({"w": states[rank.rank]}, tmp_path, options=options("off"))

    reports = all_ok(run_ranks(3, work))
    assert [report.bytes_written for report in reports] == [NBYTES, 0, 0]
    assert same_bits(load_whole(tmp_path)["w"], array)


@BACKGROUND
def test_each_save_divides_what_is_equal_in_it(tmp_path: Path, in_background: bool) -> None:
    """The structure stays the same, and with it the plan, until what is equal is another."""
    steps = [{}, {}, {1: "v"}, {1: "v"}, {2: "w"}, {0: "w", 1: "v"}, {}, {}]
    base = {"v": make_array(SHAPE, "int32"), "w": make_array(SHAPE, "int32", seed=1)}

    def work(rank: SimulatedRank) -> list[tuple[int, int]]:
        state = {key: array.copy() for key, array in base.items()}
        found = []
        for step, odd in enumerate(steps):
            for key, array in base.items():
                state[key][:] = array + step
            if rank.rank in odd:
                state[odd[rank.rank]][:] = -1 - rank.rank
            report = save(rank, state, tmp_path, in_background)
            assert report.unique_id == step
            found.append((report.bytes_written, rank.memory.plan.plan_id))
        return found

    found = all_ok(run_ranks(3, work))
    plans = [plan for _, plan in found[0]]
    assert [a == b for a, b in itertools.pairwise(plans)] == [True, False, True, False, False, False, True]
    for step, odd in enumerate(steps):
        loaded = load_whole(tmp_path, unique_id=step)
        for key, array in base.items():
            expected = np.full_like(array, -1) if odd.get(0) == key else array + step
            assert same_bits(loaded[key], expected), (step, key)
        assert {key for key in base if boxes(tmp_path, key, step) == 1} >= set(odd.values())
        written = [of_rank[step][0] for of_rank in found]
        assert sum(written) == 2 * NBYTES
        if not odd:
            assert max(written) <= 2 * NBYTES // 3 + ROOM


def test_whatever_differs_every_tensor_is_one_ranks_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    kinds = rng.integers(0, 3, (40, 4))  # which of three contents each rank has of each tensor; most often one
    kinds[::2] = kinds[::2, :1]
    sizes = rng.integers(1, 60_000, 40)

    def work(rank: SimulatedRank) -> Any:
        state = {f"{t:02}": np.full(sizes[t], kinds[t, rank.rank], "int32") for t in range(40)}
        return rank.save(state, tmp_path, options=options())

    (report, *_) = all_ok(run_ranks(4, work, 2))
    loaded = load_whole(tmp_path)
    assert all((loaded[f"{t:02}"] == kinds[t, 2]).all() for t in range(40))
    assert len(report.warnings) == sum(len(set(row)) > 1 for row in kinds.tolist()) > 5


@pytest.mark.parametrize("operation", ["create", "write", "sync_file"])
@BACKGROUND
def test_a_rank_that_cannot_write_its_part_fails_the_save_on_all(
    tmp_path: Path, operation: str, in_background: bool
) -> None:
    broken: list[bool] = []

    def work(rank: SimulatedRank) -> None:
        storage: Any = tmp_path
        if rank.rank == 1:
            storage = failing(
                tmp_path, operation, "safetensors", OSError(errno.ENOSPC, "injected"), lambda: bool(broken)
            )
        state = {"w": make_array(SHAPE, "int32")}
        save(rank, state, storage, in_background)
        rank.load({"w": np.zeros(SHAPE, "int32")}, tmp_path)  # all have saved
        broken.append(True)
        state["w"] += 1
        save(rank, state, storage, in_background)

    for error in errors_of(run_ranks(3, work), RankFailureError):
        assert list(error.failures) == [1]
    assert same_bits(load_whole(tmp_path)["w"], make_array(SHAPE, "int32"))
    assert [path.name for path in tmp_path.glob("*.metadata")] == ["0.metadata"]
