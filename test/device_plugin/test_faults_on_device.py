"""When something goes wrong with tensors on devices, all ranks hear of it, and the checkpoint before is as it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dist_ckpt import SaveOptions, list_checkpoints, load_merged_state_dict, save_state_dict, verify
from test.device_plugin import build
from test.device_plugin import cases_faults as cases
from test.device_plugin.ranks import DevicePool, rank_environment, read_at_import
from test.paddle import cases_copies as copies_cases
from test.paddle import cases_failures as host_cases
from test.paddle.outcomes import Outcome
from test.paddle.test_failures import SOON, assert_holds, assert_saves_and_loads, no_files_but
from test.paddle.versions import EMPTY_CACHE, lacks
from test.ranks.fresh import FreshRanks, logs_of
from test.waiting import until

pytestmark = pytest.mark.skipif(build.reason_to_skip() is not None, reason=str(build.reason_to_skip()))

RANKS = 4
RANKS_OF_A_JOB = 2
SLOW = 5_000.0  # bytes per second: to copy a rank's part takes two minutes
MIB = 1 << 20


@pytest.fixture
def folder(devices: DevicePool, tmp_path: Path) -> Path:
    """A folder with one checkpoint, which says 1 everywhere."""
    assert {outcome.result for outcome in devices.run(host_cases.save_number, str(tmp_path), RANKS, 1)} == {0}
    return tmp_path


# -- what does not fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("how", ["shape", "dtype"])
def test_save_of_what_does_not_fit(devices: DevicePool, folder: Path, wrong: int, how: str) -> None:
    outcomes = devices.run(host_cases.save_wrongly, str(folder), RANKS, wrong, how)
    assert [outcome.error for outcome in outcomes] == ["UnsupportedValueError"] * RANKS
    assert no_files_but(folder, 0)
    assert_saves_and_loads(devices, folder, 2, [0, 1])


def test_copies_that_differ(devices: DevicePool, folder: Path) -> None:
    outcomes = devices.run(cases.differing_copies, str(folder), RANKS)
    assert len({outcome.error for outcome in outcomes}) == 1
    assert all(outcome.error is not None and "y" in outcome.message for outcome in outcomes)
    assert_holds(folder, 1, [0])


def test_copies_of_a_distributed_tensor_that_differ(devices: DevicePool, tmp_path: Path) -> None:
    """A tenth of the blocks is brought to the host to be compared; some bits of each are flipped on one rank."""
    same = devices.run(copies_cases.save_copies, str(tmp_path), RANKS, "replicate", -1)
    assert [outcome.result for outcome in same] == [()] * RANKS
    for outcome in devices.run(copies_cases.save_copies, str(tmp_path), RANKS, "replicate", 2):
        (warning,) = outcome.result
        assert "w: rank 2, the minority, differs from ranks 0, 1, 3" in warning


@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("how", ["shape", "dtype", "value"])
def test_load_into_what_does_not_fit(devices: DevicePool, folder: Path, wrong: int, how: str) -> None:
    results = devices.run(cases.load_wrongly, str(folder), RANKS, wrong, how)
    assert [outcome.error for outcome, *_ in results] == ["StateDictMismatchError"] * RANKS
    assert all("y" in outcome.message and f"rank {wrong}" in outcome.message for outcome, *_ in results)
    assert [untouched for _, *untouched in results] == [[True, True]] * RANKS


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [0, 3])
def test_full_disk(devices: DevicePool, folder: Path, full: int) -> None:
    outcomes = devices.run(host_cases.save_on_full_disk, str(folder), RANKS, full)
    assert [(outcome.error, outcome.ranks) for outcome in outcomes] == [("RankFailureError", (full,))] * RANKS
    assert all("No space left" in outcome.message for outcome in outcomes)
    assert_holds(folder, 1, [0])
    assert no_files_but(folder, 0)
    assert_saves_and_loads(devices, folder, 3, [0, 1])


@pytest.mark.parametrize("exchange", ["auto", "always"])
def test_disk_that_cannot_be_read(devices: DevicePool, folder: Path, exchange: str) -> None:
    bad = 2
    outcomes = devices.run(host_cases.load_from_bad_disk, str(folder), RANKS, bad, exchange)
    assert [(outcome.error, outcome.ranks) for outcome in outcomes] == [("RankFailureError", (bad,))] * RANKS
    assert all("partly written" in outcome.message for outcome in outcomes)
    outcomes = devices.run(host_cases.load_number, str(folder), RANKS, exchange)
    assert [outcome.result for outcome in outcomes] == [[1]] * RANKS


@pytest.mark.parametrize("exchange", ["auto", "always", "never"])
def test_damaged_block(devices: DevicePool, folder: Path, exchange: str) -> None:
    file = next(path for path in folder.glob("2_0.*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 16
    file.write_bytes(data)
    outcomes = devices.run(host_cases.load_number, str(folder), RANKS, exchange)
    assert [outcome.error for outcome in outcomes] == [outcomes[0].error] * RANKS
    assert outcomes[0].error in ("CheckpointCorruptedError", "RankFailureError")
    assert all(file.name in outcome.message and "x" in outcome.message for outcome in outcomes)
    assert not verify(folder).ok
    assert_saves_and_loads(devices, folder, 2, [0, 1])


def test_damage_everywhere_ends_a_load_by_many_threads(devices: DevicePool, tmp_path: Path) -> None:
    """Each group of what goes to the device fails, more of them than there are buffers."""
    save_state_dict({"w": paddle.ones([6 << 20])}, tmp_path, unique_id=0, options=SaveOptions(block_bytes=4 << 20))
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[1 << 20 :: 1 << 20] = b"\xff" * len(data[1 << 20 :: 1 << 20])
    file.write_bytes(data)
    (outcome,) = devices.run(cases.load_by_many_threads, str(tmp_path), ranks=1, timeout=60)
    assert outcome.error == "CheckpointCorruptedError"


# -- ranks that die ----------------------------------------------------------------------------------------------------

DEATHS: list[tuple[Any, tuple[Any, ...], int]] = [
    (host_cases.die_in, ("save", RANKS_OF_A_JOB, 1, ""), 1),
    (cases.die_in_copy, ("save", RANKS_OF_A_JOB, 0, SLOW), 0),
    (cases.die_in_copy, ("load", RANKS_OF_A_JOB, 1, SLOW), 1),
]


def test_killed_ranks(devices: DevicePool, tmp_path: Path) -> None:
    """One rank of each of several jobs dies: as it writes to a disk, as it copies from its device, and to it."""
    folders = [tmp_path / str(i) for i in range(len(DEATHS))]
    env = rank_environment(0, RANKS_OF_A_JOB)
    with ExitStack() as stack:
        jobs = []
        for folder, (function, (doing, *rest), _) in zip(folders, DEATHS, strict=True):
            folder.mkdir()
            arguments = (function, doing, str(folder), *rest)
            job = FreshRanks(RANKS_OF_A_JOB, *arguments, env=env, at_import=read_at_import(env))
            jobs.append(stack.enter_context(job))
        for folder, job, (*_, victim) in zip(folders, jobs, DEATHS, strict=True):
            until((folder / "stopped").exists)
            time.sleep(0.3)
            killed = time.monotonic()
            job.kill(victim)
            ends = job.wait()
            assert time.monotonic() - killed < SOON
            assert [end.exit_code for end in ends] == [-9 if rank == victim else 0 for rank in range(len(ends))], (
                logs_of(ends)
            )
            outcome: Outcome = ends[1 - victim].result
            assert (outcome.error, outcome.ranks) == ("RankFailureError", (victim,)), outcome
    for folder in folders:
        assert_holds(folder, 1, [0])
        assert_saves_and_loads(devices, folder, 3, [0, 1])


def test_killed_in_a_collective(devices: DevicePool, tmp_path: Path) -> None:
    """A rank dies while others receive from it, by collectives that wait for the dead for ever, as NCCL's may."""
    ranks, victim = 3, 1
    env = rank_environment(0, ranks, network_speed=100_000.0)
    arguments = (cases.die_in_collective, str(tmp_path), ranks, victim, 10.0)
    with FreshRanks(ranks, *arguments, env=env, at_import=read_at_import(env)) as fresh:
        until((tmp_path / "stopped").exists)
        time.sleep(1)
        killed = time.monotonic()
        fresh.kill(victim)
        ends = fresh.wait()
        seconds = time.monotonic() - killed
    assert [end.exit_code for end in ends] == [-9 if rank == victim else 0 for rank in range(ranks)], logs_of(ends)
    for end in ends:
        if end.rank != victim:
            assert (end.result.error, end.result.ranks) == ("RankFailureError", (victim,)), end.result
    assert seconds < SOON
    assert_holds(tmp_path, 1, [0])
    assert_saves_and_loads(devices, tmp_path, 3, [0, 1])


# -- collectives that lie ----------------------------------------------------------------------------------------------


LIARS = 3
LIES = [
    (["broadcast"], False, "a broadcast on ranks 1, 2"),
    (["broadcast"], True, "broadcast from rank"),
    (["all_to_all"], True, "exchange from rank"),
    (["all_to_all", "send"], False, "a scatter on ranks 1, 2"),
]


@pytest.fixture(scope="module")
def liars() -> Iterator[DevicePool]:
    """Ranks whose collectives a test lets lie."""
    with DevicePool(LIARS) as ranks:
        yield ranks


def _refused_at_last(found: list[dict[str, Any]]) -> None:
    """The device's collectives are not used any more, those of the host are."""
    assert [(one["after"].error, one["after"].ranks) for one in found] == [("CollectiveError", (0, 1, 2))] * LIARS
    assert all("offload=True" in one["after"].message and "'never'" in one["after"].message for one in found)
    assert [one["host"].result for one in found] == [[1.0]] * LIARS


@pytest.mark.parametrize(("lies", "works_first", "said"), LIES)
def test_collectives_that_say_they_have_succeeded(
    liars: DevicePool, tmp_path: Path, lies: list[str], works_first: bool, said: str
) -> None:
    assert {outcome.result for outcome in liars.run(cases.save_numbers, str(tmp_path), 1)} == {0}
    found = liars.run(cases.load_by_liars, str(tmp_path), lies, works_first)
    if works_first:
        assert [one["before"].result for one in found] == [[1.0]] * LIARS
    for outcome in (one["lying"] for one in found):
        assert outcome.error == "CollectiveError"
        assert outcome.ranks
        assert all(cause == "CollectiveError" for cause in outcome.causes)
        assert said in outcome.message
        assert "other bytes than were sent" in outcome.message
    if works_first:
        assert any(key in found[0]["lying"].message for key in ("copies", "rows"))
    _refused_at_last(found)


def test_an_all_to_all_that_delivers_nothing_is_taken_for_none(liars: DevicePool, tmp_path: Path) -> None:
    assert {outcome.result for outcome in liars.run(cases.save_numbers, str(tmp_path), 1)} == {0}
    found = liars.run(cases.load_by_liars, str(tmp_path), ["all_to_all"], False)
    assert [[one[when].result for when in ("lying", "after", "host")] for one in found] == [[[1.0]] * 3] * LIARS


def test_scatters_that_say_they_have_succeeded(tmp_path: Path) -> None:
    with DevicePool(LIARS, all_to_all=False) as ranks:
        assert {outcome.result for outcome in ranks.run(cases.save_numbers, str(tmp_path), 1)} == {0}
        found = ranks.run(cases.load_by_liars, str(tmp_path), ["send"], True)
    assert [one["before"].result for one in found] == [[1.0]] * LIARS
    assert all("exchange from rank" in one["lying"].message and "rows" in one["lying"].message for one in found)
    _refused_at_last(found)


# -- a device without room ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[DevicePool]:
    """One rank whose device has 40 MiB."""
    pool = DevicePool(1, memory=40 * MIB)
    yield pool
    pool.close()


@lacks(EMPTY_CACHE, "cannot free cached memory of a device")
def test_no_room_for_a_merged_checkpoint(small: DevicePool, tmp_path: Path) -> None:
    save_state_dict({"small": paddle.full([100], 1.0), "large": paddle.full([12 * MIB], 2.0)}, tmp_path)
    (found,) = small.run(cases.merge_without_room, str(tmp_path))
    assert found["whole"].error == "CheckpointError"
    assert "large: no memory for a tensor of 50,331,648 bytes" in found["whole"].message
    assert found["left"] == 0, "memory is still in use after the failure"
    assert found["part"] == (["device"], [1.0])
    assert found["on_host"].message == ""
    assert found["on_host"].result == (["host"], [1.0, 2.0])


@lacks(EMPTY_CACHE, "cannot free cached memory of a device")
def test_no_more_device_memory_than_the_tensors_have(small: DevicePool, tmp_path: Path) -> None:
    ((peak, capacity),) = small.run(cases.save_and_load_without_room, str(tmp_path), 30)
    assert 30 * MIB <= peak <= capacity == 40 * MIB
    assert list_checkpoints(tmp_path) == [0, 1]


@pytest.mark.parametrize("kernels", [True, False])
def test_strided_tensors_on_a_full_device(tmp_path: Path, kernels: bool) -> None:
    env = rank_environment(0, 1, memory=16 * MIB, kernels=kernels)
    arguments = (cases.save_and_load_strided_when_full, str(tmp_path))
    with FreshRanks(1, *arguments, env=env, at_import=read_at_import(env)) as fresh:
        (end,) = fresh.wait()
    assert end.exit_code == 0, logs_of([end])
    outcomes, same = end.result
    assert [outcome.result for outcome in outcomes] == [0, 1, 1], outcomes
    assert same
    for unique_id in range(2):
        merged = load_merged_state_dict(tmp_path, unique_id=unique_id)
        assert merged["large"].numpy().T.tolist() == np.arange(300_000.0).reshape(600, 500).tolist()
        assert merged["small"].numpy().T.tolist() == np.arange(12.0).reshape(3, 4).tolist()


@pytest.mark.parametrize("full", [0, 1])
def test_no_room_for_the_first_collective(tmp_path: Path, full: int) -> None:
    """No rank waits in it for the one that has not begun, and the host's collectives do."""
    save_state_dict({"w": paddle.ones([64, 256])}, tmp_path)
    env = rank_environment(0, RANKS_OF_A_JOB, memory=16 * MIB)
    arguments = (cases.exchange_without_room, str(tmp_path), full)
    with FreshRanks(RANKS_OF_A_JOB, *arguments, env=env, at_import=read_at_import(env)) as fresh:
        ends = fresh.wait()
    assert [end.exit_code for end in ends] == [0, 0], logs_of(ends)
    for refused, by_host, again in (end.result for end in ends):
        assert (refused.error, refused.ranks) == ("RankFailureError", (full,)), refused
        assert "no memory on the device for a collective" in refused.message
        assert "offload=True" in refused.message
        assert (by_host.result, again.result) == (1.0, 1.0), (by_host, again)
