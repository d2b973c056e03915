"""What every rank is told when one of them errs, is missing, or does something else."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError, RankFailureError, UnsupportedValueError
from paddle_dist_ckpt.options import LoadOptions, SaveOptions
from paddle_dist_ckpt.testing import FaultyStorage, SimulatedRank, run_ranks
from test.jobs import (
    Watch,
    blank_like,
    check_pieces,
    data_files,
    errors_of,
    everything,
    files_in,
    load_on,
    load_whole,
    make_array,
    same_bits,
    save_alone,
    save_on,
    sharded,
    split_rows,
    try_load,
    try_save,
)
from test.waiting import PATIENCE


class Odd:
    """A type that cannot be stored."""


# -- descriptions that do not fit


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_unsupported_value_is_named_on_every_rank_and_nothing_is_written(tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "new"
    states: list[dict[str, Any]] = [{"w": np.zeros(4), "opt": {"x.y": 1}} for _ in range(ranks)]
    states[-1]["opt"]["bad.key"] = [1, Odd()]
    states[-1]["also"] = {1, 2}
    for error in errors_of(try_save(states, folder), UnsupportedValueError):
        assert "bad.key" in str(error)
        assert "also" in str(error)
        assert "Odd" in str(error)
        assert f"rank {ranks - 1}" in str(error)
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([{"a": np.zeros(3)}, {"a": np.zeros(4)}], ("a", "shape")),
        ([{"a": np.zeros(3)}, {"a": np.zeros(3, int)}], ("a", "dtype")),
        ([{"a": np.zeros(3)}, {"a": 1}], ("a", "value")),
        ([{"a": 1}, {"a": {"b": 1}}], ("a", "container")),
        ([{"a": np.zeros(3)}, {"a": {"b": np.zeros(3)}}], ("a", "container")),
        ([{"a": np.zeros((4, 2))}, {"a": sharded(np.zeros((4, 2)), [Box((0, 0), (4, 2))])}], ("a", "plain")),
        ([{"a": sharded(np.zeros((4, 2)), [Box((0, 0), (2, 2))])}, {}], ("a", "[2:4,0:2]")),
        ([{"a": sharded(np.zeros((4, 2)), [])}, {"a": sharded(np.zeros((4, 2)), [])}], ("a", "[0:4,0:2]")),
        ([{3.5: 1}, {}], ("3.5",)),
        ([{True: 1}, {}], ("True",)),
    ],
)
def test_parts_that_do_not_fit_together(tmp_path: Path, states: list[Any], words: tuple[str, ...]) -> None:
    for error in errors_of(try_save(states, tmp_path), UnsupportedValueError):
        for word in words:
            assert word in str(error)
    assert list(tmp_path.iterdir()) == []


def test_all_contradictions_are_listed(tmp_path: Path) -> None:
    states = [{f"k{i}": np.zeros(3) for i in range(5)}, {f"k{i}": np.zeros(2) for i in range(5)}]
    for error in errors_of(try_save(states, tmp_path), UnsupportedValueError):
        assert all(f"k{i}" in str(error) for i in range(5))


def test_a_shard_that_reaches_outside_its_tensor(tmp_path: Path) -> None:
    beyond = sharded(np.zeros((4, 2)), [Box((0, 0), (4, 2))])
    beyond.shape = (3, 2)
    for error in errors_of(try_save([{"a": beyond}, {}], tmp_path), UnsupportedValueError):
        assert "outside" in str(error)


def test_no_dict(tmp_path: Path) -> None:
    results = try_save([{}, [1]], tmp_path)  # type: ignore[list-item]
    errors_of(results, TypeError)


def test_ranks_that_pass_different_ids(tmp_path: Path) -> None:
    for error in errors_of(run_ranks(3, lambda rank: rank.save({"a": 1}, tmp_path, rank.rank // 2)), ValueError):
        assert "rank 2 passed unique_id=1" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_pass_different_block_sizes(tmp_path: Path) -> None:
    """One checkpoint has one block size; a rank that says another cannot be obeyed."""
    array = make_array((100, 100))
    parts = split_rows(array, 2)

    def work(rank: SimulatedRank) -> Any:
        options = SaveOptions(block_bytes=4096 << rank.rank, timeout=60)
        return rank.save({"a": parts[rank.rank]}, tmp_path, options=options)

    results = run_ranks(2, work)
    if any(isinstance(result, BaseException) for result in results):
        errors_of(results, ValueError)
        assert list(tmp_path.iterdir()) == []
    else:
        assert same_bits(load_whole(tmp_path)["a"], array)


@pytest.mark.parametrize("choices", [("off", "error"), ("auto", "sampled")])
def test_ranks_that_pass_different_checks_of_replicas(tmp_path: Path, choices: tuple[Any, Any]) -> None:
    def work(rank: SimulatedRank) -> Any:
        options = SaveOptions(check_replicas=choices[rank.rank], timeout=60)
        return rank.save({"a": np.full(3, rank.rank)}, tmp_path, options=options)

    for error in errors_of(run_ranks(2, work), ValueError):
        assert f"rank 1 passed check_replicas={choices[1]!r}, rank 0 check_replicas={choices[0]!r}" in str(error)
    assert list(tmp_path.iterdir()) == []


# -- failures


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_several_ranks_fail_and_all_are_named(tmp_path: Path, victim: int) -> None:
    def storage(rank: int) -> FaultyStorage:
        def hook(operation: str, name: str) -> None:
            if operation == "create" and rank != victim:
                raise PermissionError(13, f"no permission on {rank}")

        return FaultyStorage(tmp_path, hook)

    array = make_array((30, 30))
    results = try_save([{"a": part} for part in split_rows(array, 3)], [storage(rank) for rank in range(3)])
    for rank, error in enumerate(errors_of(results, RankFailureError)):
        assert set(error.failures) == {0, 1, 2} - {victim}
        assert all(f"no permission on {r}" in str(error) for r in error.failures)
        if rank in error.failures:
            assert isinstance(error.failures[rank], PermissionError), "its own exception"
    assert list(tmp_path.iterdir()) == []


def test_the_hub_can_be_used_again_after_a_failure(tmp_path: Path) -> None:
    array = make_array((40, 40))
    parts = split_rows(array, 3)
    errors: list[BaseException] = []
    together = threading.Barrier(3)

    def work(rank: SimulatedRank) -> Any:
        for bad in ({"x": Odd()}, {"a": np.zeros(rank.rank + 1)}):
            try:
                rank.save(bad, tmp_path)
            except CheckpointError as error:
                errors.append(error)
            # Who comes late for a failing call finds the others in their next one, and is out of step with them.
            together.wait(PATIENCE)
        rank.save({"a": parts[rank.rank]}, tmp_path)
        target = blank_like(array)
        rank.load({"a": target}, tmp_path, options=LoadOptions(exchange="always", timeout=60))
        return same_bits(target, array)

    assert run_ranks(3, work) == [True, True, True]
    assert len(errors) == 6


def test_a_rank_that_raises_outside_the_library_while_others_save(tmp_path: Path) -> None:
    def work(rank: SimulatedRank) -> Any:
        if rank.rank == 1:
            raise KeyError("the user's own error")
        return rank.save({"a": 1}, tmp_path)

    results = run_ranks(3, work)
    assert isinstance(results[1], KeyError)
    for result in (results[0], results[2]):
        assert isinstance(result, RankFailureError)
        assert list(result.failures) == [1]
    assert not data_files(tmp_path)


# -- silence


@pytest.mark.parametrize("doing", ["save", "load"])
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes_is_named_within_the_timeout(tmp_path: Path, absent: int, doing: str) -> None:
    save_alone({"a": 0}, tmp_path)
    before = files_in(tmp_path)
    over = threading.Event()

    def work(rank: SimulatedRank) -> Any:
        if rank.rank == absent:
            over.wait(PATIENCE)
            return None
        try:
            if doing == "save":
                return rank.save({"a": 1}, tmp_path, options=SaveOptions(timeout=1))
            return rank.load({"a": 1}, tmp_path, options=LoadOptions(timeout=1))
        finally:
            finished.append(time.monotonic())
            if len(finished) == 2:
                over.set()

    finished: list[float] = []
    start = time.monotonic()
    results = run_ranks(3, work)
    assert max(finished) - start < PATIENCE / 2
    for rank, result in enumerate(results):
        if rank != absent:
            assert isinstance(result, CheckpointTimeoutError), result
            assert result.missing_ranks == (absent,)
    assert files_in(tmp_path) == before


def test_slow_work_is_no_silence(tmp_path: Path) -> None:
    def hook(operation: str, name: str) -> None:
        if operation == "sync_file":
            time.sleep(2)

    array = make_array((20, 20))
    storages = [tmp_path, FaultyStorage(tmp_path, hook)]
    save_on([{"a": part} for part in split_rows(array, 2)], storages, options=SaveOptions(timeout=1))
    assert same_bits(load_whole(tmp_path)["a"], array)


def test_one_rank_saves_while_another_loads(tmp_path: Path) -> None:
    save_alone({"a": 1}, tmp_path)
    before = files_in(tmp_path)

    def work(rank: SimulatedRank) -> Any:
        return rank.save({"a": 2}, tmp_path) if rank.rank == 1 else rank.load({"a": 0}, tmp_path)

    for error in errors_of(run_ranks(2, work), CheckpointError):
        assert "rank 0" in str(error)
        assert "rank 1" in str(error)
        assert "'save_state_dict'" in str(error)
        assert "'load_state_dict'" in str(error)
    assert files_in(tmp_path) == before


# -- other ranks than 0, 1, 2 ...


@pytest.mark.parametrize(("ranks", "coordinator"), [((1, 3, 6), None), ((1, 3, 6), 6), ((0, 1, 2), 2), ((6, 1, 3), 3)])
@pytest.mark.parametrize("exchange", ["auto", "always"])
def test_any_ranks_and_any_coordinator(
    tmp_path: Path, ranks: tuple[int, ...], coordinator: int | None, exchange: Any
) -> None:
    array = make_array((50, 60))
    parts = split_rows(array, 3)
    watch = Watch([tmp_path] * 3)
    states = [
        {
            "w": part,
            "copy": sharded(array, everything(array)),
            "who": rank,
            "big": f"{rank} " * 3000,
            "p": np.array(rank),
        }
        for rank, part in zip(ranks, parts, strict=True)
    ]
    options = SaveOptions(block_bytes=4096, check_replicas="off", timeout=60)
    save_on(states, watch.storages(), None, options, ranks, coordinator)
    chief = ranks[0] if coordinator is None else coordinator
    assert {path.name.split("_")[0] for path in data_files(tmp_path)} == {str(rank) for rank in ranks}
    assert {watch.steps[i][0] for i, step in enumerate(watch.steps) if step[1] == "publish"} == {ranks.index(chief)}
    merged = load_whole(tmp_path)
    assert same_bits(merged["w"], array)
    assert same_bits(merged["copy"], array)
    assert merged["who"] == merged["p"] == chief, "values and plain tensors are the coordinator's"
    assert merged["big"] == f"{chief} " * 3000
    targets = split_rows(array, 3, fill=False, dimension=1)
    load = LoadOptions(exchange=exchange, timeout=60)
    load_on([{"w": target} for target in targets], tmp_path, None, load, (2, 9, 4), 4)
    for target in targets:
        check_pieces(target, array)


def test_failures_are_named_by_global_rank(tmp_path: Path) -> None:
    def hook(operation: str, name: str) -> None:
        if operation == "write":
            raise FaultyStorage.no_space(name)

    array = make_array((50, 60))
    states = [{"w": part} for part in split_rows(array, 3)]
    results = try_save(states, [tmp_path, FaultyStorage(tmp_path, hook), tmp_path], ranks=(1, 3, 6), coordinator=6)
    for error in errors_of(results, RankFailureError):
        assert list(error.failures) == [3]
        assert "No space left" in str(error)


def test_a_failure_while_others_wait_in_the_exchange(tmp_path: Path) -> None:
    """A reader's disk fails after everyone has arrived; nobody hangs, and the reader is named."""
    array = make_array((300, 300))
    save_on([{"w": array}], tmp_path)

    def hook(operation: str, name: str) -> None:
        count.append(operation)
        if count.count("read_into") > 2:
            raise OSError(5, "the disk died")

    count: list[str] = []
    folders = [FaultyStorage(tmp_path, hook), tmp_path / "none", tmp_path / "neither"]
    targets = [{"w": blank_like(array)} for _ in range(3)]
    for error in errors_of(try_load(targets, folders), RankFailureError):
        assert list(error.failures) == [0]
        assert "the disk died" in str(error)
