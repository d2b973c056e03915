"""A save that is committed is not said to have failed, whatever comes after that raises."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_dist_ckpt import AsyncSave, SaveOptions, list_checkpoints
from paddle_dist_ckpt.control.ranks import Ranks
from paddle_dist_ckpt.errors import CheckpointError, RankFailureError
from paddle_dist_ckpt.folder import commit
from paddle_dist_ckpt.testing import FaultyStorage, NumpyAdapter, SimulatedRank, run_ranks
from paddle_dist_ckpt.wiring import save_with
from test.background import error_of, in_background, within
from test.jobs import all_ok, errors_of, load_whole, save_on, try_save
from test.waiting import PATIENCE, until


class Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("the log is not shipped")


def save(rank: SimulatedRank, path: Path, in_background: bool) -> int:
    if not in_background:
        return rank.save({"n": 1}, path, 0).unique_id
    pending = rank.save_in_background({"n": 1}, path, 0)
    return pending.result().unique_id


@contextlib.contextmanager
def raising(level: int) -> Iterator[None]:
    """With a handler of the log that raises."""
    logger, handler = logging.getLogger("paddle_dist_ckpt"), Raises(level)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_handler_of_the_log_that_raises(tmp_path: Path, in_background: bool, ranks: int) -> None:
    with raising(logging.INFO):
        assert all_ok(run_ranks(ranks, lambda rank: save(rank, tmp_path, in_background))) == [0] * ranks
    assert list_checkpoints(tmp_path) == [0]


@pytest.mark.parametrize("folders", [1, 2])
@pytest.mark.parametrize("what", ["_aftermath", "remove_saves"])
def test_a_handler_of_the_log_that_raises_when_files_are_left(
    tmp_path: Path, folders: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / str(number % folders) for number in range(2)]
    save_on([{"n": 1}, {"n": 1}], paths, 0)

    def fail(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr(commit, what, fail)
    with raising(logging.WARNING):
        save_on([{"n": 2}, {"n": 2}], paths, 0)
    assert load_whole(paths[0])["n"] == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_handler_of_the_log_that_raises_does_not_hide_why_a_save_has_failed(tmp_path: Path, ranks: int) -> None:
    def hook(operation: str, name: str) -> None:
        if operation in ("sync_file", "delete") and name.endswith(".safetensors"):
            raise OSError(errno.EIO, "broken", name)

    with raising(logging.WARNING):
        results = try_save([{"n": 1}] * ranks, FaultyStorage(tmp_path, hook), 0)
    for error in errors_of(results, RankFailureError):
        assert "broken" in str(error)


def refusing_a_touch(error: Exception, path: Path) -> FaultyStorage:
    """A folder in which the thread that keeps a claim fresh fails once, and then does it before the data is synced."""
    touched: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "touch" and threading.current_thread().name == "paddle_dist_ckpt claim":
            touched.append(name)
            if len(touched) == 1:
                raise error
        if operation == "sync_file":
            until(lambda: len(touched) > 1, 10.0)

    return FaultyStorage(path, hook)


def test_a_handler_of_the_log_that_raises_while_a_claim_is_kept_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not end the thread that keeps it fresh: others would take the save for dead."""
    monkeypatch.setattr("paddle_dist_ckpt.folder.own_claim.FRESH_EVERY", 0.01)
    with raising(logging.WARNING):
        save_on([{"n": 1}], refusing_a_touch(OSError(errno.EIO, "for once"), tmp_path))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "for once"), MemoryError("for once"), RuntimeError("of its own")])
def test_a_touch_that_fails_for_once_is_made_up_for(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.folder.own_claim.FRESH_EVERY", 0.01)
    save_on([{"n": 1}], refusing_a_touch(error, tmp_path))


@pytest.mark.parametrize("background", [False, True])
def test_what_a_save_calls_does_not_wait_for_that_save(tmp_path: Path, background: bool) -> None:
    """A handler of the log, as here; one of a signal may come in the middle of a save as well."""
    ranks, told, pending, may_write = Ranks.alone(), list[str](), list[AsyncSave](), threading.Event()

    def save(folder: Any, in_background: bool = False) -> Any:
        return save_with(ranks, lambda: ({"n": 1}, NumpyAdapter()), folder, 0, in_background, SaveOptions())

    class Asks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            calls = [lambda: save(tmp_path / "within"), *(one.result for one in pending)]
            told.extend(str(error_of(call)) for call in calls)

    def hook(operation: str, name: str) -> None:
        if in_background() and operation == "write":
            assert may_write.wait(PATIENCE)

    def work() -> int:
        saved = save(FaultyStorage(tmp_path, hook), background)
        if background:
            pending.append(saved)
            may_write.set()
        report = saved.result() if background else saved
        return int(report.unique_id) + 1

    logger, handler = logging.getLogger("paddle_dist_ckpt"), Asks(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        assert within(PATIENCE, work) == 1
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    assert told[0].startswith(f"{tmp_path / 'within'}: a save was called within another one of the same ranks")
    assert not background or "would wait for itself" in told[1]
    assert list_checkpoints(tmp_path) == [0]
    assert not list_checkpoints(tmp_path / "within")
    assert save(tmp_path).unique_id == 0


@pytest.mark.parametrize("what", ["_aftermath", "remove_saves"])
def test_memory_that_is_short_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("Unable to allocate 3.1 GiB")

    monkeypatch.setattr(commit, what, fail)
    assert all_ok(run_ranks(2, lambda rank: save(rank, tmp_path, False))) == [0, 0]
    assert "are left" in caplog.text
    assert list_checkpoints(tmp_path) == [0]


@pytest.mark.parametrize("folders", [1, 2])
def test_a_rank_that_is_lost_when_all_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folders: int
) -> None:
    """The save fails for the others; its claim is gone because it has ended, not because somebody has removed it."""
    real = commit.finish

    def finish(*arguments: Any) -> None:
        real(*arguments)
        raise CheckpointError("connection lost")

    monkeypatch.setattr(commit, "finish", finish)
    paths = [tmp_path / str(number % folders) for number in range(2)]
    errors_of(try_save([{"n": 1}, {"n": 1}], paths, 0), CheckpointError)
    assert list_checkpoints(paths[0]) == [0]
    assert "for dead" not in caplog.text
    assert "are left" not in caplog.text
    assert not list(tmp_path.glob("*/*.claim"))
