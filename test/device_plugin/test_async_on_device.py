"""Saves in the background from devices, and the order of copies among what the streams of computations do."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import load_merged_state_dict, verify
from test.device_plugin import build
from test.device_plugin import cases_async as cases
from test.device_plugin.ranks import DevicePool, rank_environment, read_at_import
from test.paddle import cases_async as host_cases
from test.paddle.outcomes import Outcome
from test.paddle.tensors import to_array
from test.paddle.test_async_save import assert_numbers, results_of
from test.paddle.versions import EMPTY_CACHE, lacks
from test.ranks.fresh import FreshRanks, logs_of
from test.strategies import some
from test.waiting import until

pytestmark = pytest.mark.skipif(build.reason_to_skip() is not None, reason=str(build.reason_to_skip()))

RANKS = 4
MIB = 1 << 20


# -- contents ----------------------------------------------------------------------------------------------------------


def check_rich(folder: Path, unique_id: int) -> None:
    assert verify(folder, unique_id).ok
    merged = load_merged_state_dict(folder, unique_id=unique_id)
    expected = {name: host_cases.rich_array(name) for name in host_cases.SHARDED}
    expected |= dict.fromkeys(("columns", "copy", "plain"), host_cases.rich_array("float32"))
    expected["uneven"] = cases.uneven_array()
    for name, array in expected.items():
        found = to_array(merged[name])
        assert found.dtype == array.dtype, name
        assert found.tobytes() == array.tobytes(), name
    assert merged["array"].tobytes() == host_cases.rich_array("float64").tobytes()
    assert np.unique(merged["partial"].numpy()).tolist() == [sum(range(1, RANKS + 1))]
    assert merged["values"] == {"large": list(range(5000)), "small": [1, {"a": 2}], "text": "x"}


@pytest.mark.parametrize(("bound", "later"), some(itertools.product([None, 0, 50_000], [False, True]), 2), ids=str)
def test_what_was_there_at_the_call_is_saved(
    devices: DevicePool, tmp_path: Path, bound: int | None, later: bool
) -> None:
    outcomes = devices.run(cases.save_and_overwrite, str(tmp_path), RANKS, bound, later)
    assert results_of(outcomes) == [[0, 1]] * RANKS
    check_rich(tmp_path, 0)
    check_rich(tmp_path, 1)


# -- commits and failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("full", "bound"), [(0, None), (3, 0)])
def test_full_disk(devices: DevicePool, tmp_path: Path, full: int, bound: int | None) -> None:
    replies = devices.run(cases.as_on_the_host, "save_on_full_disk", str(tmp_path), RANKS, full, bound)
    for failed, left, *later in replies:
        assert (failed.error, failed.ranks) == ("RankFailureError", (full,))
        assert "No space left" in failed.message
        assert left.result == []
        assert results_of(later) == [0, 1]
    assert_numbers(tmp_path, [3, 4])


def test_a_failure_that_nobody_asked_for(devices: DevicePool, tmp_path: Path) -> None:
    for first, second in devices.run(cases.as_on_the_host, "fail_unobserved", str(tmp_path), RANKS, 2, 0):
        assert first.error == "RankFailureError"
        assert "an earlier save in the background" in first.message
        assert "rank 2" in first.message
        assert second.result == 0
    assert_numbers(tmp_path, [4])


def test_saves_while_one_is_under_way(devices: DevicePool, tmp_path: Path) -> None:
    for *refused, first, second, third in devices.run(cases.as_on_the_host, "save_while_busy", str(tmp_path), RANKS, 0):
        assert [outcome.error for outcome in refused] == ["RankFailureError"] * 2
        assert results_of([first, second, third]) == [0, 1, 2]
    assert_numbers(tmp_path, [1, 4, 5])


def test_loads_while_one_is_under_way(devices: DevicePool, tmp_path: Path) -> None:
    for *loads, save in devices.run(cases.as_on_the_host, "load_meanwhile", str(tmp_path), RANKS):
        assert [outcome.error for outcome in loads] == ["StateDictMismatchError"] * 2
        assert results_of([save]) == [1]
    assert_numbers(tmp_path, [1, 2])


def test_killed_rank(tmp_path: Path) -> None:
    victim, ranks = 0, 2
    env = rank_environment(0, ranks)
    arguments = (str(tmp_path), ranks, victim)
    with FreshRanks(ranks, host_cases.die_meanwhile, *arguments, env=env, at_import=read_at_import(env)) as fresh:
        until((tmp_path / "stopped").exists)
        killed = time.monotonic()
        fresh.kill(victim)
        ends = fresh.wait()
        seconds = time.monotonic() - killed
    assert [end.exit_code for end in ends] == [-9, 0], logs_of(ends)
    outcomes: list[Outcome] = ends[1].result
    assert [(outcome.error, outcome.ranks) for outcome in outcomes] == [("RankFailureError", (victim,))] * 2
    assert seconds < 30
    assert_numbers(tmp_path, [1])


# -- memory ------------------------------------------------------------------------------------------------------------


@lacks(EMPTY_CACHE, "cannot free cached memory of a device")
def test_device_memory_is_free_again_when_the_call_returns(devices: DevicePool, tmp_path: Path) -> None:
    megabytes = 32
    for after, peak in devices.run(cases.device_memory_meanwhile, str(tmp_path), megabytes, ranks=1):
        assert after < MIB
        assert megabytes * MIB <= peak < (megabytes + 8) * MIB, "a save takes device memory"


def test_host_memory_is_bounded_and_used_again(devices: DevicePool, tmp_path: Path) -> None:
    """Each bound in a rank of its own that has not saved as much before."""
    megabytes, slack = 64, 24 * MIB  # for the pieces that go through host memory
    first, second = zip(
        *(
            devices.run(cases.host_memory_growth, str(tmp_path / str(i)), megabytes, bound, ranks=[i])[0]
            for i, bound in enumerate((None, 0, 10 * MIB), 1)
        ),
        strict=True,
    )
    assert first[0] > 60 * MIB, "else this test sees nothing"
    assert first[1] < slack
    assert first[2] < 10 * MIB + slack
    assert max(second) < slack


# -- the order of what streams do --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_background", "options"),
    [(False, {"check_replicas": "error"}), (True, {}), (True, {"snapshot_bytes": 0})],
)
def test_a_save_waits_for_the_copies_that_are_queued(
    devices: DevicePool, tmp_path: Path, in_background: bool, options: dict[str, Any]
) -> None:
    for unique_id in range(2):  # the second time by the plan of the first
        found = devices.run(cases.save_what_is_queued, str(tmp_path), in_background, options)
        assert [one for one, *_ in found] == [unique_id] * RANKS
        assert min(seconds for _, seconds, _ in found) > cases.HOLD_SECONDS / 2, "there was nothing to wait for"
        merged = load_merged_state_dict(tmp_path, unique_id=unique_id)
        assert {name: np.unique(value.numpy()).tolist() for name, value in merged.items()} == {
            "part": [2.0],
            "copy": [2.0],
            "plain": [2.0],
            "sum": [2.0 * RANKS],
        }


@pytest.fixture(scope="module")
def twos(devices: DevicePool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that says 2 everywhere."""
    path = str(tmp_path_factory.mktemp("twos"))
    devices.run(cases.save_what_is_queued, path, False, {})
    return path


@pytest.mark.parametrize("exchange", ["auto", "always"])
def test_a_load_comes_after_the_copies_that_are_queued(devices: DevicePool, twos: str, exchange: str) -> None:
    for numbers, seconds, _ in devices.run(cases.load_over_what_is_queued, twos, exchange):
        assert numbers == [2.0]
        assert seconds > cases.HOLD_SECONDS / 2, "there was nothing to wait for"


@pytest.mark.parametrize("exchange", ["auto", "always"])
def test_all_is_there_when_a_load_returns(devices: DevicePool, twos: str, exchange: str) -> None:
    for at_once, later in devices.run(cases.load_and_look_at_once, twos, exchange):
        assert at_once == [2.0]
        assert later == [4.0]


def test_other_threads_run_while_a_call_waits_for_the_device(devices: DevicePool, tmp_path: Path) -> None:
    """A wait for a stream by its own function would hold Python's lock, each time; a busy machine may stop us once."""

    def pauses_less(function: Any, *args: Any) -> bool:
        return max(pause for *_, pause in devices.run(function, *args)) < cases.HOLD_SECONDS

    for in_background in (False, True):
        path = str(tmp_path / str(in_background))
        until(lambda: pauses_less(cases.save_what_is_queued, path, in_background, {}))  # noqa: B023
    until(lambda: pauses_less(cases.load_over_what_is_queued, str(tmp_path / "False"), "auto"))


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", some([None, 2000], 1))
def test_a_training_saved_at_every_step_comes_back(devices: DevicePool, tmp_path: Path, bound: int | None) -> None:
    steps = 4
    (contents, losses), second = devices.run(cases.train_and_save, str(tmp_path), steps, bound, ranks=RANKS)[:2]
    assert (contents, losses) == second
    assert len(set(losses)) == steps
    for unique_id in range(steps):
        for content, later in devices.run(cases.resume, str(tmp_path), unique_id, steps):
            assert content == contents[unique_id]
            assert later == losses[unique_id + 1 :]
