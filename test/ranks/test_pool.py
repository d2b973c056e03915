"""The rank pool and fresh ranks do what the tests that use them rely on."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.ranks import cases_pool as cases
from test.ranks.forks import DUMP_STACKS
from test.ranks.fresh import FreshRanks, fresh_ranks
from test.ranks.pool import RankPool
from test.ranks.remote import RankError, RankLostError, RemoteError
from test.ranks.world import REPOSITORY
from test.waiting import until


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks that a test may kill."""
    with RankPool(2) as ranks:
        yield ranks


def test_results_come_in_order_of_ranks(pool: RankPool) -> None:
    assert pool.run(cases.slow_first, 0.2) == list(range(8))
    assert pool.run(cases.rank_and, "a", {"b": 1}, ranks=2) == [(0, "a", {"b": 1}), (1, "a", {"b": 1})]
    assert pool.run("test.ranks.cases_pool:rank_and", ranks=[5, 2]) == [(5,), (2,)]


def test_ranks_stay_warm(pool: RankPool) -> None:
    first = pool.run(cases.process_id)
    assert len(set(first)) == 8
    assert pool.run(cases.process_id) == first


def test_ranks_use_one_thread_on_the_cpu(pool: RankPool) -> None:
    assert set(pool.run(cases.threads_and_device)) == {("1", "cpu")}


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
def test_group_of_first_ranks(pool: RankPool, size: int) -> None:
    assert pool.run(cases.sum_over, size, ranks=size) == [size * (size - 1) / 2] * size


def test_group_seen_from_outside(pool: RankPool) -> None:
    members = [0, 1, 2]
    assert pool.run(cases.ranks_of, 3, ranks=4) == [(members, 0), (members, 1), (members, 2), (members, -1)]
    assert pool.run(cases.ranks_of, 1, ranks=1)[0][0] == [0]


def test_new_groups_can_be_made(pool: RankPool) -> None:
    sums = pool.run(cases.sum_over_new_groups, 3)
    assert sums == [[0.0] * 3] + [[28.0] * 3] * 7


@pytest.mark.parametrize("ranks", [0, 9, [1, 1], [8], []])
def test_ranks_that_do_not_exist(pool: RankPool, ranks: int | list[int]) -> None:
    with pytest.raises(ValueError, match="must name different ranks from 0 to 7"):
        pool.run(cases.process_id, ranks=ranks)


def test_function_that_cannot_be_imported(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="top level of a module"):
        pool.run(lambda: None)


def test_exception_is_raised_with_all_tracebacks(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(cases.raise_on, [1, 3], ranks=4)
    assert list(caught.value.errors) == [1, 3]
    text = str(caught.value)
    assert "raise_on raised on 2 of 4 ranks" in text
    assert "boom on 1" in text
    assert "boom on 3" in text
    assert text.count("Traceback (most recent call last)") == 2


def test_exception_as_data(pool: RankPool) -> None:
    result, error = pool.run(cases.raise_on, [1], ranks=2, raises=False)
    assert result == 0
    assert isinstance(error, RemoteError)
    assert (error.rank, error.type_name, error.message) == (1, "RichError", "boom on 1")
    assert "cases_pool.py" in error.traceback
    assert error.attributes["missing_ranks"] == (1, 2)
    assert error.attributes["failures"][3].type_name == "ValueError"
    assert error.attributes["failures"][3].message == "inner"
    assert error.attributes["lock"].startswith("<unlocked _thread.lock")


def test_os_error_as_data(pool: RankPool) -> None:
    (error,) = pool.run(cases.missing_file, ranks=1, raises=False)
    assert error.type_name == "FileNotFoundError"
    assert error.attributes["filename"] == "/no/such/file"


def test_result_that_cannot_be_pickled(pool: RankPool) -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        pool.run(cases.unpicklable, ranks=1)


def test_killed_rank_is_named_and_the_next_call_has_new_ranks(pair: RankPool) -> None:
    before = pair.run(cases.process_id)
    started = time.monotonic()
    with pytest.raises(RankLostError) as caught:
        pair.run(cases.kill_rank, 1)
    assert time.monotonic() - started < 30
    assert caught.value.ranks == (1,)
    assert "rank 1 died" in str(caught.value)
    assert "SIGKILL" in str(caught.value)
    assert "these are the last words" in str(caught.value)
    after = pair.run(cases.process_id)
    assert not set(before) & set(after)
    assert pair.run(cases.sum_over, 2) == [1.0, 1.0]


def test_hanging_rank_is_named_with_its_stack(pair: RankPool) -> None:
    with pytest.raises(RankLostError) as caught:
        pair.run(cases.hang_here, 0, timeout=1.0)
    assert caught.value.ranks == (0,)
    assert "took longer than 1 s" in str(caught.value)
    assert "in hang_here" in str(caught.value)
    assert pair.run(cases.sum_over, 2) == [1.0, 1.0]


def test_ranks_out_of_step_are_replaced(pair: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test.ranks.pool._CHECK_SECONDS", 1.0)
    before = pair.run(cases.process_id)
    assert [error.type_name for error in pair.run(cases.raise_out_of_step, 1, raises=False)] == ["ValueError"] * 2
    assert not set(before) & set(pair.run(cases.process_id))


def test_fresh_ranks_return_results_and_exit_codes() -> None:
    ends = fresh_ranks(2, cases.raise_on, [1])
    assert [end.exit_code for end in ends] == [0, 1]
    assert ends[0].result == 0
    assert ends[0].error is None
    assert ends[1].error is not None
    assert ends[1].error.type_name == "RichError"


def wait_for_both(folder: Path) -> None:
    """Wait until two ranks have left their files."""
    until(lambda: {"0", "1"} <= {path.name for path in folder.iterdir()})


def test_fresh_rank_can_be_killed(tmp_path: Path) -> None:
    with FreshRanks(2, cases.touch_and_wait, str(tmp_path)) as ranks:
        wait_for_both(tmp_path)
        ranks.kill(1)
        (tmp_path / "go").touch()
        ends = ranks.wait()
    assert [end.exit_code for end in ends] == [0, -signal.SIGKILL]
    assert [end.result for end in ends] == [0, None]
    assert not any(end.timed_out for end in ends)


def test_fresh_rank_that_hangs_is_killed(tmp_path: Path) -> None:
    with FreshRanks(2, cases.hang_here, 1, str(tmp_path)) as ranks:
        wait_for_both(tmp_path)
        first, second = ranks.wait(3.0)
    assert (first.exit_code, first.timed_out) == (0, False)
    assert (second.exit_code, second.timed_out) == (-signal.SIGKILL, True)
    assert "in hang_here" in second.log


def test_what_fresh_ranks_were_doing_is_told_if_a_test_fails_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError), FreshRanks(2, cases.hang_here, 1, str(tmp_path)):
        wait_for_both(tmp_path)
        raise ZeroDivisionError
    assert "in hang_here" in capsys.readouterr().out


@pytest.mark.parametrize(
    "env", [pytest.param({}, id="forked"), pytest.param({"COLOUR": "red"}, id="started", marks=pytest.mark.long)]
)
def test_a_rank_asked_for_its_stacks_before_it_has_begun_runs_on(env: dict[str, str]) -> None:
    with FreshRanks(1, cases.process_id, env=env) as ranks:
        ranks.kill(0, DUMP_STACKS)
        (end,) = ranks.wait()
    assert end.exit_code == 0, end
    assert end.error is None


def test_a_rank_asked_for_its_stacks_when_python_has_ended_is_there_until_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test.ranks.world._STACK_DUMP_SECONDS", 0.5)
    with FreshRanks(1, cases.hang_at_the_very_end, str(tmp_path)) as ranks:
        (file,) = until(lambda: list(tmp_path.iterdir()))
        until(lambda: not can_dump_stacks(int(file.name)))
        (end,) = ranks.wait(0.1)
    assert (end.exit_code, end.timed_out) == (-signal.SIGKILL, True), end
    assert "It wrote no stacks. Its threads:\n" in end.log


def test_fresh_ranks_run_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, os\n"
        "import paddle.distributed as dist\n"
        "print('argument', sys.argv[1], os.environ['COLOUR'], dist.get_world_size())\n"
        "sys.exit(3 + dist.get_rank())\n"
    )
    ends = fresh_ranks(2, script, "one", env={"COLOUR": "red"}, at_import={})
    assert [end.exit_code for end in ends] == [3, 4]
    assert "argument one red 2" in ends[0].log


def test_ranks_differ_as_processes_that_are_started_anew() -> None:
    """They are forks, yet what is left to chance must not be the same on all of them, nor in the next world."""
    worlds = [[end.result for end in fresh_ranks(2, cases.left_to_chance)] for _ in range(2)]
    for which in range(2):
        first, second = ([chances[which] for chances in world] for world in worlds)
        assert len({*first}) == len({*second}) == 2
        assert first[0] != second[0]
    assert not set(worlds[0][0][2:]) & set(worlds[0][1][2:])


@pytest.mark.long
def test_ranks_end_with_those_who_started_them(tmp_path: Path) -> None:
    code = f"""
import os
from test.ranks import cases_pool as cases
from test.ranks.pool import RankPool
pool = RankPool(2)
print(*pool.run(cases.process_id), flush=True)
pool.run(cases.hang_here, 0, {str(tmp_path)!r}, timeout=60.0)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert starter.stdout is not None
    with starter.stdout as output:
        ranks = [int(word) for word in output.readline().split()]
        assert all(is_running(rank) for rank in ranks)
        wait_for_both(tmp_path)
        starter.kill()
        starter.wait()
    until(lambda: not any(is_running(rank) for rank in ranks))


def can_dump_stacks(process: int) -> bool:
    """Whether it handles the signal for it, as it does until Python ends."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) & 1 << DUMP_STACKS - 1)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
