"""Saves in the background between real ranks and in processes of their own: contents, failures, ends and forks."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import list_checkpoints, load_merged_state_dict, verify
from test.jobs import without_times
from test.paddle import cases_async as cases
from test.paddle.outcomes import Outcome
from test.paddle.tensors import to_array
from test.ranks.fresh import FreshRanks, fresh_ranks, logs_of
from test.ranks.pool import RankPool
from test.ranks.world import REPOSITORY
from test.strategies import draws, some
from test.waiting import PATIENCE, until

RANKS = 4


def alone(function: str, *args: Any, timeout: float = 5 * PATIENCE) -> subprocess.CompletedProcess[str]:
    """Run one of the cases in a process of its own, as a script would."""
    call = f"from test.paddle import cases_async as cases; cases.{function}(*{args!r})"
    command = [sys.executable, "-c", call]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout, check=False)


def alone_ok(function: str, *args: Any) -> None:
    """Run one of the cases, which must not raise, in a process of its own."""
    done = alone(function, *args)
    assert done.returncode == 0, done.stdout + done.stderr


def results_of(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; none may have raised."""
    assert [outcome.message for outcome in outcomes] == [""] * len(outcomes)
    return [outcome.result for outcome in outcomes]


def assert_numbers(folder: Path, numbers: list[int]) -> None:
    assert list_checkpoints(folder) == list(range(len(numbers)))
    assert [cases.numbers_in(folder, i) for i in range(len(numbers))] == numbers
    assert all(verify(folder, i).ok for i in range(len(numbers)))


# -- contents ----------------------------------------------------------------------------------------------------------


def check_rich(folder: Path, unique_id: int | None = None) -> None:
    assert verify(folder, unique_id).ok
    merged = load_merged_state_dict(folder, unique_id=unique_id)
    expected = {name: cases.rich_array(name) for name in cases.SHARDED}
    expected |= dict.fromkeys(("columns", "copy", "plain"), cases.rich_array("float32"))
    expected["transposed"] = cases.rich_array("float32").T
    for name, array in expected.items():
        found = to_array(merged[name])
        assert found.dtype == array.dtype, name
        assert found.tobytes() == array.tobytes(), name
    assert merged["array"].tobytes() == cases.rich_array("float64").tobytes()
    assert merged["strided"].tobytes() == cases.rich_array("float64")[::2, ::3].tobytes()
    for name in ("partial", "partial transposed"):
        assert np.unique(merged[name].numpy()).tolist() == [sum(range(1, RANKS + 1))], name
    assert merged["values"] == {"large": list(range(5000)), "small": [1, {"a": 2}], "text": "x"}


@pytest.mark.parametrize("bound", [None, 0, 50_000])
def test_what_was_there_at_the_call_is_saved(pool: RankPool, tmp_path: Path, bound: int | None) -> None:
    outcomes = pool.run(cases.save_and_destroy, str(tmp_path), RANKS, bound, ranks=RANKS)
    assert results_of(outcomes) == [[0, 1]] * RANKS
    check_rich(tmp_path, 0)
    check_rich(tmp_path, 1)


def layout_of(folder: Path) -> dict[str, bytes]:
    """Names and contents of a folder's files, without what differs from save to save: ids, digests, times."""
    found = {}
    for path in folder.iterdir():
        content = without_times(path) if path.suffix == ".metadata" else path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little") if path.suffix == ".safetensors" else len(content)
        head = re.sub(rb"\d{4}-\d\d-\d\dT[^\"\\]*", b"", re.sub(rb"[0-9a-f]{16}", b"", content[:start]))
        found[re.sub(r"[0-9a-f]{16}", "", path.name)] = head + content[start:]
    return found


def test_its_files_are_those_of_a_synchronous_save(pool: RankPool, tmp_path: Path) -> None:
    results_of(pool.run(cases.save_both_ways, str(tmp_path), RANKS, ranks=RANKS))
    assert layout_of(tmp_path / "async") == layout_of(tmp_path / "sync")
    assert len(layout_of(tmp_path / "async")) == RANKS + 1


# -- commits and failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["write", "sync_file"])
@pytest.mark.parametrize("slow", [0, 2])
def test_it_waits_for_the_slowest_rank(pool: RankPool, tmp_path: Path, slow: int, operation: str) -> None:
    replies = pool.run(cases.save_with_slow_rank, str(tmp_path), RANKS, slow, operation, ranks=RANKS)
    assert [seen for seen, _ in replies] == [[False] * 5] * RANKS
    assert results_of([outcome for _, outcome in replies]) == [0] * RANKS
    assert_numbers(tmp_path, [1])


@pytest.mark.parametrize(("full", "bound"), [(0, None), (3, None), (3, 0)])
def test_full_disk(pool: RankPool, tmp_path: Path, full: int, bound: int | None) -> None:
    replies = pool.run(cases.save_on_full_disk, str(tmp_path), RANKS, full, bound, ranks=RANKS)
    for failed, left, *later in replies:
        assert (failed.error, failed.ranks) == ("RankFailureError", (full,))
        assert "No space left" in failed.message
        assert left.result == []
        assert results_of(later) == [0, 1]
    assert replies[full][0].causes == ("OSError",)
    assert_numbers(tmp_path, [3, 4])


@pytest.mark.parametrize("coordinator", [0, 1])
def test_a_failure_that_nobody_asked_for(pool: RankPool, tmp_path: Path, coordinator: int) -> None:
    """The group's next save raises it, whichever rank coordinates that."""
    for first, second in pool.run(cases.fail_unobserved, str(tmp_path), RANKS, 2, coordinator, ranks=RANKS):
        assert first.error == "RankFailureError"
        assert set(first.ranks) <= set(range(RANKS))
        assert "an earlier save in the background" in first.message
        assert "rank 2" in first.message
        assert second.result == 0
    assert_numbers(tmp_path, [4])


@pytest.mark.parametrize("coordinator", [0, 1])
def test_saves_while_one_is_under_way(pool: RankPool, tmp_path: Path, coordinator: int) -> None:
    for *refused, first, second, third in pool.run(
        cases.save_while_busy, str(tmp_path), RANKS, coordinator, ranks=RANKS
    ):
        for outcome in refused:
            assert outcome.error == "RankFailureError"
            assert "when_busy" in outcome.message
        assert results_of([first, second, third]) == [0, 1, 2]
    assert_numbers(tmp_path, [1, 4, 5])


def test_loads_while_one_is_under_way(pool: RankPool, tmp_path: Path) -> None:
    for *loads, save in pool.run(cases.load_meanwhile, str(tmp_path), RANKS, ranks=RANKS):
        assert [outcome.error for outcome in loads] == ["StateDictMismatchError"] * 2
        assert results_of([save]) == [1]
    assert_numbers(tmp_path, [1, 2])


@pytest.mark.parametrize("other", [0, 3])
def test_ranks_that_do_not_agree_how_to_save(pool: RankPool, tmp_path: Path, other: int) -> None:
    for first, second in pool.run(cases.save_differently, str(tmp_path), RANKS, other, ranks=RANKS):
        assert first.error is not None
        assert f"rank {other} calls 'save_state_dict(async_save=True)'" in first.message
        assert " calls 'save_state_dict'" in first.message
        assert second.result == 0
    assert_numbers(tmp_path, [2])


@pytest.mark.parametrize("victim", some([0, 1], 1))
def test_killed_rank(tmp_path: Path, victim: int) -> None:
    with FreshRanks(3, cases.die_meanwhile, str(tmp_path), 3, victim) as ranks:
        until((tmp_path / "stopped").exists)
        killed = time.monotonic()
        ranks.kill(victim)
        ends = ranks.wait()
        seconds = time.monotonic() - killed
    assert [end.exit_code for end in ends] == [-9 if rank == victim else 0 for rank in range(3)], logs_of(ends)
    for rank, end in enumerate(ends):
        if rank != victim:
            for outcome in end.result:
                assert (outcome.error, outcome.ranks) == ("RankFailureError", (victim,))
    assert seconds < 30
    assert_numbers(tmp_path, [1])


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
def test_tensors_are_let_go_when_they_are_copied(pool: RankPool, tmp_path: Path, partial: bool) -> None:
    assert pool.run(cases.kept_alive, str(tmp_path), 2, partial, ranks=2) == [[], []]


def test_memory_is_bounded(pool: RankPool, tmp_path: Path) -> None:
    """Each in a rank of its own that has not saved as much before."""
    megabytes, slack = 64, 12 << 20
    grown = [
        pool.run(cases.resident_growth, str(tmp_path / str(i)), megabytes, bound, ranks=[i])[0]
        for i, bound in enumerate((None, 0, 10 << 20))
    ]
    assert grown[0] > 60 << 20, "else this test sees nothing"
    assert grown[1] < slack
    assert grown[2] < (10 << 20) + slack


def test_nothing_leaks_in_ten_saves(pool: RankPool, tmp_path: Path) -> None:
    for descriptors, threads in pool.run(cases.leaks, str(tmp_path), 2, ranks=2):
        assert descriptors <= 0
        assert threads <= 0


# -- the end of a process ----------------------------------------------------------------------------------------------

ENDS = {"end": 0, "raise": 1, "exit": 3}
_TRIED = some(ENDS, 2)


def test_a_process_that_ends_commits_first(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        ends = threads.map(lambda how: alone("save_and_end", str(tmp_path / how), 1, how), _TRIED)
    for how, end in zip(_TRIED, ends, strict=True):
        assert end.returncode == ENDS[how], end.stderr
        assert end.stderr.count("Traceback") == (how == "raise"), end.stderr
        assert_numbers(tmp_path / how, [1, 2])


def test_ranks_that_end_commit_first(tmp_path: Path) -> None:
    with ExitStack() as stack:
        worlds = [stack.enter_context(FreshRanks(2, cases.save_and_end, str(tmp_path / how), 2, how)) for how in _TRIED]
        ends = [world.wait() for world in worlds]
    for how, (first, second) in zip(_TRIED, ends, strict=True):
        assert first.exit_code == second.exit_code == ENDS[how], logs_of((first, second))
        assert_numbers(tmp_path / how, [1, 2])


def test_processes_that_die_at_random_moments(tmp_path: Path) -> None:
    count = draws(3, 100)
    (end,) = fresh_ranks(1, cases.end_at_random, str(tmp_path), count, timeout=120 + 5 * count)
    assert end.exit_code == 0, end


# -- forks -------------------------------------------------------------------------------------------------------------


WAYS = [
    ("fork", "write"),
    ("exit", "sync_file"),
    ("fork", "publish"),
    ("multiprocessing", "write"),
    ("loader", "write"),
]


def test_forks_while_one_is_under_way(tmp_path: Path) -> None:
    ways = some(WAYS, 3)
    alone_ok("fork_alone", str(tmp_path / "parent"), ways)
    assert_numbers(tmp_path / "parent", [1, 2] * len(ways))


def test_forks_of_ranks_while_one_is_under_way(tmp_path: Path) -> None:
    ways = some([way for way in WAYS if way[0] != "exit"], 2)  # a rank's exit is not that of a script
    with FreshRanks(2, cases.fork_in_all_ways, str(tmp_path / "parent"), 2, ways) as ranks:
        ends = ranks.wait()
    for end in ends:
        assert end.exit_code == 0, end
        results_of(end.result)
    assert_numbers(tmp_path / "parent", [1, 2] * len(ways))


def test_a_fork_when_one_has_ended_has_memory_of_its_own(tmp_path: Path) -> None:
    (end,) = fresh_ranks(1, cases.fork_afterwards, str(tmp_path))
    assert end.exit_code == 0, end
