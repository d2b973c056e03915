"""When something goes wrong on one rank, all ranks hear of it, and the checkpoint before is as it was."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointTimeoutError,
    RankFailureError,
    list_checkpoints,
    load_merged_state_dict,
    verify,
)
from paddle_dist_ckpt.paddle_adapter import groups, job_secret
from test.control.groups import Store
from test.paddle import cases_failures as cases
from test.paddle.outcomes import Outcome
from test.ranks.fresh import FreshRanks, logs_of
from test.ranks.pool import RankPool
from test.strategies import draws, some
from test.waiting import until

RANKS = 4
SOON = 30.0
"""Seconds, on a busy machine, too: half of the timeout, for which a call waits that does not hear what has happened."""


@pytest.fixture
def folder(pool: RankPool, tmp_path: Path) -> Path:
    """A folder with one checkpoint, which says 1 everywhere."""
    assert {outcome.result for outcome in pool.run(cases.save_number, str(tmp_path), RANKS, 1, ranks=RANKS)} == {0}
    return tmp_path


def assert_holds(folder: Path, number: int, ids: list[int]) -> None:
    assert list_checkpoints(folder) == ids
    merged = load_merged_state_dict(folder)
    assert {merged["number"], *merged["y"].tolist(), *np.unique(merged["x"].numpy())} == {number}
    assert verify(folder).ok


def assert_saves_and_loads(pool: RankPool, folder: Path, number: int, ids: list[int]) -> None:
    outcomes = pool.run(cases.save_number, str(folder), RANKS, number, ranks=RANKS)
    assert [outcome.message for outcome in outcomes] == [""] * RANKS
    assert_holds(folder, number, ids)
    outcomes = pool.run(cases.load_number, str(folder), RANKS, ranks=RANKS)
    assert [outcome.result for outcome in outcomes] == [[number]] * RANKS


def no_files_but(folder: Path, unique_id: int) -> bool:
    return all(
        path.name == f"{unique_id}.metadata" or path.name.split(".")[0].endswith(f"_{unique_id}")
        for path in folder.iterdir()
    )


# -- a rank that passes something else ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("unsupported", "UnsupportedValueError", "callback"),
        ("shape", "UnsupportedValueError", "y"),
        ("dtype", "UnsupportedValueError", "int32"),
        ("kind", "UnsupportedValueError", "y"),
        ("container", "UnsupportedValueError", "y"),
        ("unique_id", "ValueError", "unique_id"),
        ("path", "TypeError", "path"),
        ("options", "TypeError", "options must be SaveOptions, not dict"),
    ],
)
def test_save_of_what_does_not_fit(pool: RankPool, folder: Path, wrong: int, how: str, error: str, words: str) -> None:
    outcomes = pool.run(cases.save_wrongly, str(folder), RANKS, wrong, how, ranks=RANKS)
    assert [outcome.error for outcome in outcomes] == [error] * RANKS
    assert all(words in outcome.message for outcome in outcomes)
    assert no_files_but(folder, 0)
    assert_saves_and_loads(pool, folder, 2, [0, 1])


@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("shape", "StateDictMismatchError", "y"),
        ("missing", "StateDictMismatchError", "z"),
        ("value", "StateDictMismatchError", "y"),
        ("options", "TypeError", "options must be LoadOptions, not dict"),
    ],
)
def test_load_into_what_does_not_fit(
    pool: RankPool, folder: Path, wrong: int, how: str, error: str, words: str
) -> None:
    results = pool.run(cases.load_wrongly, str(folder), RANKS, wrong, how, ranks=RANKS)
    assert [outcome.error for outcome, _ in results] == [error] * RANKS
    assert all(words in outcome.message for outcome, _ in results)
    others = [outcome for rank, (outcome, _) in enumerate(results) if rank != wrong]
    assert all(f"rank {wrong}" in outcome.message for outcome in others)
    assert all(untouched for _, untouched in results)


@pytest.mark.parametrize("wrong", [0, 1])
def test_what_one_rank_passes_wrongly_is_told_to_all(pool: RankPool, tmp_path: Path, wrong: int) -> None:
    results = pool.run(cases.call_wrongly, str(tmp_path), 2, wrong, ranks=2)
    for outcomes in results:
        assert outcomes.pop("and then").result == 1
    for name in results[0]:
        words = {
            "manager, async_save": "async_save must be a bool, not 'yes'",
            "manager, async_save differs": f"async_save is {wrong == 0} on rank 0, {wrong == 1} on rank 1",
            "restore, both": "restore takes a step or a path, not both",
            "restore, step": f"rank {wrong} calls 'restore step -1'",
            "save, step": "step must be an integer from 0 to below 10**18, not '1'",
            "save, step of an interval": "step must be an integer from 0 to below 10**18, not 2.0",
            "save, step after another": "step must be an integer from 0 to below 10**18, not 'next'",
            "save, step when it is time": "step must be an integer from 0 to below 10**18, not ''",
            "save, step that is due": "step must be an integer from 0 to below 10**18, not None",
            "save, metrics": "metrics that cannot be read",
        }.get(name, "options must be ")
        for outcomes in results:
            assert words in outcomes[name].message, name
            assert outcomes[name].seconds < SOON, name


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [0, 3])
def test_full_disk(pool: RankPool, folder: Path, full: int) -> None:
    outcomes = pool.run(cases.save_on_full_disk, str(folder), RANKS, full, ranks=RANKS)
    assert [(outcome.error, outcome.ranks) for outcome in outcomes] == [("RankFailureError", (full,))] * RANKS
    assert all("No space left" in outcome.message for outcome in outcomes)
    assert outcomes[full].causes == ("OSError",)
    assert_holds(folder, 1, [0])
    assert no_files_but(folder, 0)
    assert_saves_and_loads(pool, folder, 3, [0, 1])


@pytest.mark.parametrize("exchange", ["auto", "always"])
@pytest.mark.parametrize("bad", [0, 2])
def test_disk_that_cannot_be_read(pool: RankPool, folder: Path, bad: int, exchange: str) -> None:
    outcomes = pool.run(cases.load_from_bad_disk, str(folder), RANKS, bad, exchange, ranks=RANKS)
    assert [(outcome.error, outcome.ranks) for outcome in outcomes] == [("RankFailureError", (bad,))] * RANKS
    assert all("partly written" in outcome.message for outcome in outcomes)
    outcomes = pool.run(cases.load_number, str(folder), RANKS, exchange, ranks=RANKS)
    assert [outcome.result for outcome in outcomes] == [[1]] * RANKS


@pytest.mark.parametrize("exchange", ["auto", "always"])
def test_flipped_byte(pool: RankPool, folder: Path, exchange: str) -> None:
    file = next(path for path in folder.glob("2_0.*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 16
    file.write_bytes(data)
    outcomes = pool.run(cases.load_number, str(folder), RANKS, exchange, ranks=RANKS)
    assert len({outcome.error for outcome in outcomes}) == 1
    assert outcomes[0].error in ("CheckpointCorruptedError", "RankFailureError")
    assert all(file.name in outcome.message and "x" in outcome.message for outcome in outcomes)
    report = verify(folder)
    assert not report.ok
    assert file.name in report.problems[0]
    assert_saves_and_loads(pool, folder, 2, [0, 1])


@pytest.mark.parametrize("damage", ["cut", "gone", "header"])
def test_damaged_file(pool: RankPool, folder: Path, damage: str) -> None:
    file = next(path for path in folder.glob("1_0.*.safetensors"))
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(data[:-1])
    else:
        data[300] ^= 1
        file.write_bytes(data)
    outcomes = pool.run(cases.load_number, str(folder), RANKS, ranks=RANKS)
    assert [outcome.error for outcome in outcomes] == ["CheckpointCorruptedError"] * RANKS
    assert all(file.name in outcome.message for outcome in outcomes)
    assert not verify(folder).ok


# -- ranks that do not come --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [0, 3])
def test_rank_that_never_calls(pool: RankPool, folder: Path, absent: int) -> None:
    others = [rank for rank in range(RANKS) if rank != absent]
    outcomes = pool.run(cases.save_number, str(folder), RANKS, 2, None, 2.0, ranks=others)
    assert [(outcome.error, outcome.ranks) for outcome in outcomes] == [("CheckpointTimeoutError", (absent,))] * 3
    assert all(1.5 < outcome.seconds < SOON for outcome in outcomes)
    assert_holds(folder, 1, [0])
    outcomes = pool.run(cases.load_number, str(folder), RANKS, "auto", 2.0, ranks=others)
    assert [(outcome.error, outcome.ranks) for outcome in outcomes] == [("CheckpointTimeoutError", (absent,))] * 3
    # The late rank's calls meet sessions that are over; then all are in step again.
    late = pool.run(cases.save_number, str(folder), RANKS, 2, None, 2.0, ranks=[absent])
    assert late[0].error == "CheckpointTimeoutError"
    late = pool.run(cases.load_number, str(folder), RANKS, "auto", 2.0, ranks=[absent])
    assert late[0].error == "CheckpointTimeoutError"
    assert_saves_and_loads(pool, folder, 3, [0, 1])


@pytest.mark.parametrize("absent", some([0, 2], 1))
def test_rank_that_skipped_a_save_is_in_step_again_after_one_more(tmp_path: Path, absent: int) -> None:
    """Its next call may be the one that was missed, so that one must not be mixed with the others' next one."""
    with FreshRanks(3, cases.skip_one_save, str(tmp_path), 3, absent) as ranks:
        ends = ranks.wait()
    assert [end.exit_code for end in ends] == [0] * 3, logs_of(ends)
    skipped = [end.result[0] for rank, end in enumerate(ends) if rank != absent]
    assert [(outcome.error, outcome.ranks) for outcome in skipped] == [("CheckpointTimeoutError", (absent,))] * 2
    behind, in_step = ([end.result[1][i] for end in ends] for i in range(2))
    assert all(outcome.error in ("CheckpointTimeoutError", "RankFailureError") for outcome in behind)
    assert all(outcome.ranks == (absent,) for outcome in behind)
    assert max(outcome.seconds for outcome in behind) < SOON
    assert [outcome.message for outcome in in_step] == [""] * 3
    assert_holds(tmp_path, 4, [0, 1])


# -- ranks that die ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("doing", "victim", "exchange"), [("save", 1, ""), ("save", 0, ""), ("load", 2, "auto"), ("load", 1, "always")]
)
def test_killed_rank(pool: RankPool, tmp_path: Path, doing: str, victim: int, exchange: str) -> None:
    with FreshRanks(3, cases.die_in, doing, str(tmp_path), 3, victim, exchange) as ranks:
        until((tmp_path / "stopped").exists)
        time.sleep(0.2)
        killed = time.monotonic()
        ranks.kill(victim)
        ends = ranks.wait()
        seconds = time.monotonic() - killed
    assert [end.exit_code for end in ends] == [-9 if rank == victim else 0 for rank in range(3)], logs_of(ends)
    outcomes: list[Outcome] = [end.result for rank, end in enumerate(ends) if rank != victim]
    assert [(outcome.error, outcome.ranks) for outcome in outcomes] == [("RankFailureError", (victim,))] * 2
    assert seconds < SOON
    assert_holds(tmp_path, 1, [0])
    assert_saves_and_loads(pool, tmp_path, 3, [0, 1])


@pytest.mark.parametrize(
    ("how", "error"), [(signal.SIGKILL, "RankFailureError"), (signal.SIGSTOP, "CheckpointTimeoutError")]
)
def test_coordinator_that_goes_before_it_has_a_hub(tmp_path: Path, how: signal.Signals, error: str) -> None:
    """With it goes the store, or its answers; Paddle raises a ValueError then, or waits for ever."""
    with FreshRanks(2, cases.save_without_coordinator, str(tmp_path), int(how)) as ranks:
        outcome = until(lambda: ranks.result(1))
    assert (outcome.error, outcome.ranks) == (error, (0,)), outcome
    assert "rank 0, the coordinator, " in outcome.message
    assert outcome.seconds < SOON


def test_ranks_with_different_secrets(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name * 20)
    with FreshRanks(2, cases.save_with_secrets, str(tmp_path / "c"), [str(tmp_path / name) for name in "ab"]) as ranks:
        ends = ranks.wait()
    assert [end.exit_code for end in ends] == [0] * 2, logs_of(ends)
    for refused, same, refused_too, same_too in (end.result for end in ends):
        for outcome in (refused, refused_too):
            assert outcome.error == "ValueError", outcome
            assert "rank 1 has another control secret than rank 0; all ranks" in outcome.message
            assert outcome.seconds < SOON
        assert (same.error, same_too.error) == (None, None), "once it is put right"


@pytest.mark.parametrize(
    ("having", "words"),
    [
        ([0, 2], "rank 1: $PADDLE_DIST_CKPT_SECRET_FILE is not set, as it is on rank 0; set it on all ranks"),
        ([1, 2], "rank 0: $PADDLE_DIST_CKPT_SECRET_FILE is not set, as it is on rank "),
    ],
)
def test_all_ranks_hear_at_once_that_some_have_no_secret(tmp_path: Path, having: list[int], words: str) -> None:
    (tmp_path / "secret").write_text("s" * 20)
    with FreshRanks(3, cases.save_with_secret_on, str(tmp_path / "c"), str(tmp_path / "secret"), having) as ranks:
        ends = ranks.wait()
    assert [end.exit_code for end in ends] == [0] * 3, logs_of(ends)
    for outcome in (outcome for end in ends for outcome in end.result[:-1]):
        assert outcome.error == "ValueError", outcome
        assert words in outcome.message
        assert outcome.seconds < SOON
    assert {end.result[-1].result for end in ends} == {0}, "the first: they have agreed on none"


@pytest.mark.parametrize(("content", "words"), [(None, "cannot be read"), (b"short", "has 5 bytes")])
def test_all_ranks_hear_of_one_whose_secret_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, words: str
) -> None:
    (tmp_path / "0").write_bytes(b"x" * 20)
    if content is not None:
        (tmp_path / "1").write_bytes(content)
    files = [str(tmp_path / name) for name in ("0", "1", "0")]
    store, local = Store(), threading.local()
    monkeypatch.setattr(job_secret.os.environ, "get", lambda name: files[local.rank])

    def agree(rank: int, bad: bool) -> bytes:
        local.rank = rank if bad else 0
        return job_secret.agreed_secret(store, "k", rank, (0, 1, 2), 30, 0 if bad else 1)

    with ThreadPoolExecutor(3) as threads:
        begun = time.monotonic()
        for outcome in [threads.submit(agree, rank, True) for rank in range(3)]:
            with pytest.raises(ValueError, match=rf"^rank 1: \$PADDLE_DIST_CKPT_SECRET_FILE: .*{words}"):
                outcome.result()
        assert time.monotonic() - begun < SOON
        assert [f.result() for f in [threads.submit(agree, rank, False) for rank in range(3)]] == [b"x" * 20] * 3


def test_a_rank_that_does_not_speak_of_its_secret_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 20)
    monkeypatch.setenv(job_secret.SECRET_FILE, str(tmp_path / "secret"))
    store = Store()
    with ThreadPoolExecutor(2) as threads:
        for outcome in [threads.submit(job_secret.agreed_secret, store, "k", rank, (0, 1, 2), 0.2) for rank in (0, 2)]:
            with pytest.raises(CheckpointTimeoutError, match=r"rank 1 did not say within") as caught:
                outcome.result()
            assert caught.value.missing_ranks == (1,)


def test_a_rank_that_gave_up_too_early_hears_later_what_was_said_of_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank has its hub by then, and does not ask again."""
    (tmp_path / "secret").write_bytes(b"x" * 20)
    monkeypatch.setenv(job_secret.SECRET_FILE, str(tmp_path / "secret"))
    store = Store()
    with pytest.raises(CheckpointTimeoutError, match=r"rank 0 did not say within"):
        job_secret.agreed_secret(store, "k", 1, (0, 1, 2), 0.1)
    with ThreadPoolExecutor(2) as threads:
        agreed = [threads.submit(job_secret.agreed_secret, store, "k", rank, (0, 1, 2), SOON) for rank in (0, 2)]
        assert [one.result() for one in agreed] == [b"x" * 20] * 2
    begun = time.monotonic()
    assert job_secret.agreed_secret(store, "k", 1, (0, 1, 2), 10 * SOON, 1) == b"x" * 20
    assert time.monotonic() - begun < SOON


def _reset() -> None:
    raise ValueError("TCP receive error")


class _GoneStore:
    """Paddle's, when the rank that keeps it has ended."""

    _bounded = staticmethod(groups._PaddleStore._bounded)

    def __init__(self, timeout: float) -> None: ...

    def set(self, key: str, value: bytes) -> None:
        self._bounded(_reset, SOON)

    def get(self, key: str, timeout: float) -> bytes:
        self._bounded(_reset, SOON)
        raise AssertionError


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("with_secret", [False, True])
def test_a_store_that_is_gone_is_told_of_the_rank_that_kept_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, first: int, with_secret: bool
) -> None:
    """Rank 0, which need not be the coordinator, nor one of the group's ranks."""
    (tmp_path / "secret").write_bytes(b"x" * 20)
    if with_secret:
        monkeypatch.setenv(job_secret.SECRET_FILE, str(tmp_path / "secret"))
    monkeypatch.setattr(groups, "_PaddleStore", _GoneStore)
    members = (first, first + 1)
    role = ", which keeps the store" if first else ", the coordinator, "
    with pytest.raises(RankFailureError, match=f"^rank 0{role}.*TCP receive error") as caught:
        groups._connection(SimpleNamespace(id=0, ranks=list(members)), members, members[rank], first, 5.0)
    assert list(caught.value.failures) == [0]


def test_a_store_that_does_not_answer_is_told_of_the_rank_that_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    thawed = threading.Event()
    monkeypatch.setattr(groups.core, "create_or_get_global_tcp_store", thawed.wait)
    monkeypatch.setattr(groups, "_STORE_GRACE", 0.0)
    group = SimpleNamespace(id=0, ranks=[1, 2])
    try:
        with pytest.raises(RankFailureError, match=r"^rank 0, which keeps the store.*has not answered") as caught:
            groups._connection(group, (1, 2), 2, 1, 0.1)
    finally:
        thawed.set()
    assert list(caught.value.failures) == [0]


@pytest.mark.parametrize("seed", range(draws(4, 40)))
def test_save_killed_at_any_moment(pool: RankPool, tmp_path: Path, seed: int) -> None:
    unique_id = 0 if seed % 2 else None
    with FreshRanks(2, cases.save_for_ever, str(tmp_path), 2, unique_id) as ranks:
        until((tmp_path / "done").exists)
        time.sleep(random.Random(seed).uniform(0, 0.3))
        ranks.kill(seed % 2)
        ranks.kill(1 - seed % 2)
        assert [end.exit_code for end in ranks.wait()] == [-9, -9]
    done = int((tmp_path / "done").read_text())
    number = load_merged_state_dict(tmp_path)["number"]
    assert number in (done, done + 1)
    ids = list_checkpoints(tmp_path)
    assert ids == ([0] if seed % 2 else list(range(number)))
    assert_holds(tmp_path, number, ids)
    assert_saves_and_loads(pool, tmp_path, 0, [*ids, ids[-1] + 1])
