"""Saves in the background that fail, on simulated ranks: every rank hears of it, once, and nothing is left."""

from __future__ import annotations

import errno
import inspect
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from paddle_dist_ckpt.control.ranks import Ranks
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError, RankFailureError
from paddle_dist_ckpt.files.contents import TensorContents
from paddle_dist_ckpt.saving.async_save import AsyncSave
from paddle_dist_ckpt.saving.save import save
from paddle_dist_ckpt.saving.save_memory import SaveMemory
from paddle_dist_ckpt.storage.base import FolderIdentity
from paddle_dist_ckpt.testing import FaultyStorage, NumpyAdapter, SimulatedRank, run_ranks
from paddle_dist_ckpt.wiring import save_with
from test.background import (
    LONG,
    RANKS,
    THREAD,
    Gate,
    error_of,
    failing,
    finish,
    in_background,
    job,
    options,
    versions,
    versions_in,
    within,
)
from test.hooks import raises
from test.jobs import errors_of, files_in
from test.strategies import some
from test.waiting import until

FAULTS = [
    *[(operation, "safetensors", victim) for operation in ("create", "write", "sync_file") for victim in (0, 2)],
    ("sync", "", 0),
    ("publish", "metadata", 0),
    ("size", "safetensors", 0),
]


@pytest.mark.parametrize(
    ("operation", "name", "victim", "number", "bound"),
    some([(*fault, *how) for fault in FAULTS for how in ((errno.ENOSPC, None), (errno.EIO, 0))], len(FAULTS)),
)
def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_nothing(
    tmp_path: Path, operation: str, name: str, victim: int, number: int, bound: int | None
) -> None:
    together, armed, before = threading.Barrier(RANKS), threading.Event(), {}

    def work(rank: SimulatedRank) -> None:
        error = OSError(number, "injected", name)
        storage: Any = tmp_path
        if rank.rank == victim:
            storage = failing(tmp_path, operation, name, error, armed.is_set)
        rank.save(versions(1, RANKS)[rank.rank], storage, None, options())
        together.wait(LONG)
        before.update(files_in(tmp_path))
        armed.set()
        pending = rank.save_in_background(versions(2, RANKS)[rank.rank], storage, None, options(snapshot_bytes=bound))
        assert pending.wait(LONG)
        raised = errors_of([error_of(pending.result)], RankFailureError)[0]
        assert set(raised.failures) == {victim}
        assert "injected" in str(raised)
        assert f"rank {victim}" in str(raised)
        together.wait(LONG)
        assert files_in(tmp_path) == before
        together.wait(LONG)
        armed.clear()
        rank.load(versions(-1, RANKS)[rank.rank] | {"n": None, "text": None}, tmp_path)
        rank.save_in_background(versions(3, RANKS)[rank.rank], storage, None, options()).result(LONG)
        rank.save(versions(4, RANKS)[rank.rank], storage, None, options())

    job(RANKS, work)
    assert versions_in(tmp_path) == [1, 3, 4]


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_whose_disk_hangs_leaves_nothing_in_a_folder_of_its_own(tmp_path: Path, background: bool) -> None:
    theirs = tmp_path / "theirs"

    hangs = raises("sync_file", "*", CheckpointTimeoutError("it hangs"))
    storages = [tmp_path / "ours", FaultyStorage(theirs, hangs, FolderIdentity("host1", 1, 1))]

    def work(rank: SimulatedRank) -> None:
        save = rank.save_in_background if background else rank.save
        args = versions(1, 2)[rank.rank], storages[rank.rank], None, options(separate_folders=True)
        assert "it hangs" in str(error_of(lambda: finish(save(*args))))

    job(2, work)
    assert files_in(theirs) == {}
    opened = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
    assert not [path for path in opened if path.startswith(str(theirs))]


def broken_buffer(monkeypatch: pytest.MonkeyPatch, applies: Callable[[SaveMemory], bool]) -> None:
    """There is no memory for the snapshots of some ranks."""
    original = SaveMemory.snapshot_buffer

    def buffer(memory: SaveMemory, nbytes: int, allocate: Any = None) -> Any:
        if applies(memory):
            raise MemoryError("injected")
        return original(memory, nbytes)

    monkeypatch.setattr(SaveMemory, "snapshot_buffer", buffer)


def broken_source(monkeypatch: pytest.MonkeyPatch, applies: Callable[[], bool]) -> None:
    """The tensors of some ranks cannot be read."""
    original = TensorContents.copy_to

    def copy_to(tensors: TensorContents, memory: Any, start: int) -> None:
        if applies():
            raise ValueError("injected")
        original(tensors, memory, start)

    monkeypatch.setattr(TensorContents, "copy_to", copy_to)


@pytest.mark.parametrize("how", ["memory", "source"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_snapshot_that_fails_on_one_rank_fails_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, how: str
) -> None:
    together, broken, threads, before = threading.Barrier(RANKS), set(), set(), {}
    broken_buffer(monkeypatch, lambda memory: how == "memory" and id(memory) in broken)
    broken_source(monkeypatch, lambda: how == "source" and threading.get_ident() in threads)

    def work(rank: SimulatedRank) -> None:
        rank.save(versions(1, RANKS)[rank.rank], tmp_path, None, options())
        together.wait(LONG)
        before.update(files_in(tmp_path))
        if rank.rank == victim:
            broken.add(id(rank.memory))
            threads.add(threading.get_ident())
        pending = rank.save_in_background(versions(2, RANKS)[rank.rank], tmp_path, None, options())
        raised = errors_of([error_of(lambda: pending.result(LONG))], (RankFailureError, ValueError))[0]
        assert "injected" in str(raised)
        assert f"rank {victim}" in str(raised)
        together.wait(LONG)
        assert files_in(tmp_path) == before
        broken.clear()
        threads.clear()
        together.wait(LONG)
        rank.save_in_background(versions(3, RANKS)[rank.rank], tmp_path, None, options()).result(LONG)

    job(RANKS, work)
    assert versions_in(tmp_path) == [1, 3]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_can_start_no_thread_saves_before_its_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, victim: int, fails: bool
) -> None:
    """So the call returns on all ranks alike, and handles tell what became of the save."""
    victims, start = set[int](), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith((THREAD, "paddle_dist_ckpt_")) and threading.get_ident() in victims:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    def work(rank: SimulatedRank) -> None:
        if rank.rank == victim:
            victims.add(threading.get_ident())
        broken = failing(tmp_path, "write", "safetensors", OSError(errno.EIO, "injected"), lambda: fails)
        storage = broken if rank.rank == victim else tmp_path
        pending = rank.save_in_background(versions(1, RANKS)[rank.rank], storage, 0, options())
        if rank.rank == victim:
            assert pending.done()
        if fails:
            assert "injected" in str(error_of(lambda: pending.result(LONG)))
        else:
            assert pending.result(LONG).unique_id == 0
        rank.save_in_background(versions(2, RANKS)[rank.rank], tmp_path, 1, options()).result(LONG)

    job(RANKS, work)
    assert versions_in(tmp_path) == ([2] if fails else [1, 2])
    assert "is made before its call returns: can't start new thread" in caplog.text


def test_an_interrupt_of_a_save_that_no_thread_makes_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == THREAD:
            raise RuntimeError("can't start new thread")
        start(thread)

    threads, ranks = {*threading.enumerate()}, Ranks.alone()
    storage = FaultyStorage(tmp_path, raises("publish", "*metadata*", KeyboardInterrupt()))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(KeyboardInterrupt):
            save_with(ranks, lambda: (versions(1, 1)[0], NumpyAdapter()), storage, 0, True, options())
    next_save_is_made(ranks, tmp_path, threads)


def next_save_is_made(ranks: Ranks, folder: Path, before: set[threading.Thread]) -> None:
    """Assert that nothing is in its way, and that nothing is left of what was interrupted before."""
    within(LONG, lambda: save_with(ranks, lambda: (versions(2, 1)[0], NumpyAdapter()), folder, 0, False, options()))
    ours = {THREAD, "paddle_dist_ckpt claim"}
    until(lambda: not any(thread.name in ours for thread in {*threading.enumerate()} - before))
    assert versions_in(folder) == [2]
    assert len(files_in(folder)) == 2


def test_an_interrupt_at_any_line_that_leads_to_the_background_is_in_no_saves_way(tmp_path: Path) -> None:
    threads = {*threading.enumerate()}
    ranks = Ranks.alone()
    traced = {one.__code__ for one in (save, inspect.unwrap(save), AsyncSave.__init__, AsyncSave.start)}
    for place in itertools.count(1):
        lines = itertools.count(1)

        def trace(frame: FrameType, event: str, arg: Any, place: int = place, lines: Any = lines) -> Any:
            if event == "line" and frame.f_code in traced and next(lines) == place:
                raise KeyboardInterrupt
            return trace if frame.f_code in traced else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            save_with(ranks, lambda: (versions(1, 1)[0], NumpyAdapter()), tmp_path, 0, True, options())
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(before)
        next_save_is_made(ranks, tmp_path, threads)
    assert place > 15


def test_an_interrupt_when_the_thread_has_begun_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = {*threading.enumerate()}
    gate, ranks, start = Gate("create"), Ranks.alone(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == THREAD:
            assert gate.reached.wait(LONG)
            raise KeyboardInterrupt

    def hook(operation: str, name: str) -> None:
        if operation == gate.operation and in_background():
            gate.reached.set()
            assert gate.opened.wait(LONG)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_with(ranks, lambda: (versions(1, 1)[0], NumpyAdapter()), FaultyStorage(tmp_path, hook), 0, True, options())
    gate.opened.set()
    until(lambda: (tmp_path / "0.metadata").exists())
    next_save_is_made(ranks, tmp_path, threads)


@pytest.mark.parametrize("kind", ["save", "save_in_background"])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_next_save_works_even_if_the_files_cannot_be_removed(tmp_path: Path, victim: int, kind: str) -> None:
    """As when an error makes the kernel mount the filesystem read-only."""
    read_only, together = threading.Event(), threading.Barrier(2)

    def hook(operation: str, name: str) -> None:
        if read_only.is_set() and operation in ("write", "delete") and "safetensors" in name:
            raise OSError(errno.EROFS, f"injected into {operation}", name)

    def save(rank: SimulatedRank, storage: Any, number: int, kind: str) -> None:
        finish(getattr(rank, kind)(versions(number, 2)[rank.rank], storage, None, options()))

    def work(rank: SimulatedRank) -> None:
        storage = FaultyStorage(tmp_path, hook) if rank.rank == victim else tmp_path
        read_only.set()
        raised = error_of(lambda: save(rank, storage, 1, kind))
        assert isinstance(raised, RankFailureError)
        assert "injected into write" in str(raised), "the cause, and not what came of it"
        together.wait(LONG)
        read_only.clear()
        together.wait(LONG)
        save(rank, storage, 2, "save")
        save(rank, storage, 3, "save_in_background")

    job(2, work)
    assert versions_in(tmp_path) == [2, 3]


def errors_logged(caplog: pytest.LogCaptureFixture, count: int) -> list[logging.LogRecord]:
    """What is logged as an error, as soon as it is so much."""

    def logged() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno == logging.ERROR]

    until(lambda: len(logged()) >= count)
    assert len(logged()) == count
    return logged()


@pytest.mark.parametrize("next_kind", ["save", "save_in_background"])
def test_a_failure_that_nobody_asked_for_is_logged_and_raised_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, next_kind: str
) -> None:
    caplog.set_level(logging.ERROR, "paddle_dist_ckpt")
    armed, together = threading.Event(), threading.Barrier(RANKS)

    def work(rank: SimulatedRank) -> None:
        storage = failing(tmp_path, "write", "", OSError(errno.EIO, "injected"), armed.is_set)
        armed.set()
        pending = rank.save_in_background(versions(1, RANKS)[rank.rank], storage, None, options())
        assert pending.wait(LONG), "which is not to ask for the result"
        together.wait(LONG)
        logged = errors_logged(caplog, RANKS)
        assert all(str(tmp_path) in record.getMessage() and "injected" in record.getMessage() for record in logged)
        armed.clear()
        together.wait(LONG)
        raised = error_of(lambda: getattr(rank, next_kind)(versions(2, RANKS)[rank.rank], storage, None, options()))
        assert isinstance(raised, CheckpointError)
        assert "an earlier save in the background" in str(raised)
        assert str(tmp_path) in str(raised)
        assert "injected" in str(raised)
        together.wait(LONG)
        assert list(tmp_path.iterdir()) == []
        together.wait(LONG)
        done = getattr(rank, next_kind)(versions(3, RANKS)[rank.rank], storage, None, options())
        assert finish(done).unique_id == 0
        assert "injected" in str(error_of(pending.result)), "it can still be asked"

    job(RANKS, work)
    assert versions_in(tmp_path) == [3]


@pytest.mark.parametrize("next_kind", ["save", "save_in_background"])
def test_a_failure_that_was_asked_for_is_not_raised_again(tmp_path: Path, next_kind: str) -> None:
    armed, together = threading.Event(), threading.Barrier(RANKS)

    def work(rank: SimulatedRank) -> None:
        storage = failing(tmp_path, "write", "", OSError(errno.EIO, "injected"), armed.is_set)
        armed.set()
        pending = rank.save_in_background(versions(1, RANKS)[rank.rank], storage, None, options())
        for _ in range(2):
            assert "injected" in str(error_of(lambda: pending.result(LONG)))
        together.wait(LONG)
        armed.clear()
        together.wait(LONG)
        done = getattr(rank, next_kind)(versions(2, RANKS)[rank.rank], storage, None, options())
        assert finish(done).unique_id == 0

    job(RANKS, work)
    assert versions_in(tmp_path) == [2]


def test_a_failure_that_one_rank_did_not_ask_for_is_raised_on_all(tmp_path: Path) -> None:
    armed, together = threading.Event(), threading.Barrier(RANKS)

    def work(rank: SimulatedRank) -> None:
        storage = failing(tmp_path, "write", "", OSError(errno.EIO, "injected"), armed.is_set)
        armed.set()
        pending = rank.save_in_background(versions(1, RANKS)[rank.rank], storage, None, options())
        assert pending.wait(LONG)
        if rank.rank != 1:
            error_of(pending.result)
        together.wait(LONG)
        armed.clear()
        together.wait(LONG)
        raised = error_of(lambda: rank.save(versions(2, RANKS)[rank.rank], storage, None, options()))
        assert isinstance(raised, RankFailureError)
        assert set(raised.failures) == {1}
        rank.save(versions(3, RANKS)[rank.rank], storage, None, options())

    job(RANKS, work)
    assert versions_in(tmp_path) == [3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_logging_handler_that_raises_hides_no_failure(tmp_path: Path) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("from the handler")

    logger, handler = logging.getLogger("paddle_dist_ckpt"), Broken(logging.ERROR)
    logger.addHandler(handler)
    try:

        def work(rank: SimulatedRank) -> None:
            storage = failing(tmp_path, "write", "", OSError(errno.EIO, "injected"), lambda: True)
            pending = rank.save_in_background(versions(1, 1)[0], storage, None, options())
            assert pending.wait(LONG)
            assert "injected" in str(error_of(lambda: pending.result(0)))
            for thread in threading.enumerate():
                if thread.name == THREAD:
                    thread.join(LONG)

        job(1, work)
    finally:
        logger.removeHandler(handler)


def test_a_failure_is_told_once_even_where_its_thread_has_not_ended(tmp_path: Path) -> None:
    ended = threading.Event()

    def work(rank: SimulatedRank) -> int:
        def hook(operation: str, name: str) -> None:
            if in_background() and operation == "write" and rank.rank == 2:
                raise OSError(errno.EIO, "injected")
            if in_background() and operation == "delete" and rank.rank == 0:
                assert ended.wait(LONG)

        rank.save_in_background(versions(1, RANKS)[rank.rank], FaultyStorage(tmp_path, hook), 0, options())
        with pytest.raises(CheckpointError, match="an earlier save in the background"):
            rank.save(versions(2, RANKS)[rank.rank], tmp_path, 1, options())
        if rank.rank == 0:
            ended.set()
        return rank.save(versions(3, RANKS)[rank.rank], tmp_path, 2, options()).unique_id

    assert run_ranks(RANKS, work) == [2] * RANKS
