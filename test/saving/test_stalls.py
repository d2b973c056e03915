"""Saves to disks that hang: every rank is told in time, the older checkpoint stays, and so does what may be needed."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import DurabilityUnknownError, LocalStorage, SaveOptions
from paddle_dist_ckpt.testing import FaultyStorage, SimulatedRank, Stall, run_ranks
from test import background
from test.background import LONG, error_of, job, version_in, versions, versions_in
from test.jobs import data_files, errors_of, save_alone, save_on, saves_in, split_rows, try_save
from test.stalls import BOUND, all_at_once, check_error, hanging, helpers_end
from test.strategies import some
from test.torture.leftovers import age_all, check_clean
from test.waiting import until

RANKS = 3


def options(**changes: Any) -> SaveOptions:
    return background.options(**{"progress_timeout": BOUND, **changes})


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is slow here but what is to be."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


ANY_RANK = [
    ("prepare", "", "making"),
    ("create", "safetensors", "making"),
    ("write", "safetensors", "a write to"),
    ("sync_file", "safetensors", "fsync of"),
]
COORDINATOR = [
    ("names", "", "listing"),
    ("publish", ".claim", "publishing"),
    ("modified", ".claim", "a look at"),
    ("size", "safetensors", "a look at"),
    ("sync", "", "fsync of"),
    ("publish", ".metadata", "publishing"),
]


@pytest.mark.parametrize(("ranks", "for_good"), some([(RANKS, True), (1, False)], 1))
def test_a_save_that_hangs_anywhere_ends_on_every_rank(tmp_path: Path, ranks: int, for_good: bool) -> None:
    cases = [(0, *case) for case in ANY_RANK + COORDINATOR] + [(1, *case) for case in ANY_RANK if ranks > 1]

    def check(victim: int, operation: str, at: str, doing: str) -> None:
        folder = tmp_path / f"{victim}-{operation}-{at}"
        save_on(versions(1, ranks), folder)
        stall = Stall(operation, at, for_good)
        results = try_save(versions(2, ranks), hanging(folder, stall, victim, ranks), None, options())
        assert stall.reached.is_set()
        check_error(results, victim, doing, at or str(folder))
        assert "not known" not in str(results[0])
        assert versions_in(folder) == [1]
        begun = {path.name.split(".")[1] for path in data_files(folder)} - saves_in(folder).keys()
        claims = {path.name.split(".")[1] for path in folder.glob("*.claim")}
        assert begun <= claims, "nobody would remove these files"
        stall.release()
        if (operation, victim) == ("create", 1):
            until(lambda: not [path for path in data_files(folder) if path.name.startswith("1_1.")])

    try:
        all_at_once(cases, check)
    finally:
        helpers_end()
    for victim, operation, at, _ in cases:
        folder = tmp_path / f"{victim}-{operation}-{at}"
        assert versions_in(folder) == [1], "nothing comes late"
        save_on(versions(3, ranks), folder, None, options())
        assert versions_in(folder) == [1, 3]
        age_all(folder)
        save_alone(*versions(4, 1), folder)
        assert versions_in(folder) == [1, 3, 4]
        check_clean(folder)


def stuck_before(monkeypatch: pytest.MonkeyPatch, call: str) -> Stall:
    """Have a system call hang by which a `.metadata` gets its name."""
    stall, original = Stall(call, ".metadata"), getattr(os, call)

    def hang(source: Any, target: Any) -> None:
        stall(call, str(target))
        original(source, target)

    monkeypatch.setattr(os, call, hang)
    return stall


@pytest.mark.parametrize(("unique_id", "call"), [(None, "link"), (0, "replace")])
def test_a_commit_that_may_still_happen_is_called_unknown_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unique_id: int | None, call: str
) -> None:
    caplog.set_level(logging.WARNING, "paddle_dist_ckpt")
    save_on(versions(1, RANKS), tmp_path)
    stall, together = stuck_before(monkeypatch, call), threading.Barrier(RANKS)

    def work(rank: SimulatedRank) -> list[str]:
        told = []
        for number in (2, 3):  # the second must not be committed before the first, which would then replace it
            told.append(
                str(error_of(lambda n=number: rank.save(versions(n, RANKS)[rank.rank], tmp_path, unique_id, options())))
            )
            together.wait(LONG)
        assert versions_in(tmp_path) == [1]
        together.wait(LONG)
        if rank.rank == 0:
            stall.release()
            until(lambda: "published after all" in caplog.text)
        together.wait(LONG)
        assert versions_in(tmp_path) == ([1, 2] if unique_id is None else [2]), "all files of it are still there"
        together.wait(LONG)
        rank.save(versions(4, RANKS)[rank.rank], tmp_path, unique_id, options())
        return told

    for told in job(RANKS, work):
        assert all("publishing" in text and "whether it takes effect is not known" in text for text in told), told
    assert versions_in(tmp_path) == ([1, 2, 4] if unique_id is None else [4])
    age_all(tmp_path)
    save_alone(*versions(5, 1), tmp_path, 7)
    check_clean(tmp_path)
    helpers_end()


@pytest.mark.parametrize(("unique_id", "call"), [(None, "link"), (0, "replace")])
@pytest.mark.parametrize("background", [False, True])
def test_a_commit_that_hangs_when_it_can_be_seen_is_called_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unique_id: int | None, call: str, background: bool
) -> None:
    """All that is left to do is the fsync of the folder."""
    save_on(versions(1, RANKS), tmp_path)
    named, stall = threading.Event(), Stall("sync", "")
    original, sync = getattr(os, call), LocalStorage.sync

    def give_name(source: Any, target: Any) -> None:
        original(source, target)
        if str(target).endswith(".metadata"):
            named.set()

    def hang(storage: LocalStorage) -> None:
        if named.is_set():
            stall("sync", "")
        sync(storage)

    monkeypatch.setattr(os, call, give_name)
    monkeypatch.setattr(LocalStorage, "sync", hang)

    def work(rank: SimulatedRank) -> Any:
        state = versions(2, RANKS)[rank.rank]
        if not background:
            return rank.save(state, tmp_path, unique_id, options())
        return rank.save_in_background(state, tmp_path, unique_id, options()).result()

    expected = 1 if unique_id is None else 0
    for error in errors_of(run_ranks(RANKS, work), DurabilityUnknownError):
        assert str(error).startswith(f"committed as id {expected} to {tmp_path}, its durability unknown")
        assert (error.path, error.unique_id) == (str(tmp_path), expected)
    assert versions_in(tmp_path) == ([1, 2] if unique_id is None else [2])
    stall.release()
    helpers_end()
    named.clear()
    save_on(versions(3, RANKS), tmp_path, expected)
    age_all(tmp_path)
    save_alone(*versions(5, 1), tmp_path, 7)
    check_clean(tmp_path)


def test_a_commit_that_hung_until_others_took_it_for_dead_does_not_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_on(versions(1, RANKS), tmp_path)
    stall = stuck_before(monkeypatch, "replace")
    results = try_save(versions(2, RANKS), tmp_path, 0, options())
    check_error(results, 0, "publishing", "0.metadata")
    age_all(tmp_path)
    save_alone(*versions(3, 1), tmp_path, 0)
    assert versions_in(tmp_path) == [3]
    stall.release()
    helpers_end()
    assert versions_in(tmp_path) == [3]
    check_clean(tmp_path)


def test_what_hangs_after_the_commit_does_not_undo_it(tmp_path: Path) -> None:
    save_on(versions(1, RANKS), tmp_path, 0)
    committed, stall = threading.Event(), Stall("delete")

    def hook(done: str, name: str) -> None:
        if (tmp_path / "0.metadata").read_bytes() != before:
            committed.set()
        if committed.is_set():
            stall(done, name)

    before = (tmp_path / "0.metadata").read_bytes()
    storages = [FaultyStorage(tmp_path, hook) if rank == 0 else tmp_path for rank in range(RANKS)]
    save_on(versions(2, RANKS), storages, 0, options())
    assert stall.reached.is_set()
    assert versions_in(tmp_path) == [2]
    assert list(tmp_path.glob("*.claim")), "it says what is left to be removed"
    stall.release()
    helpers_end()
    age_all(tmp_path)
    save_alone(*versions(3, 1), tmp_path)
    check_clean(tmp_path)


def test_the_others_do_not_write_all_of_theirs_first(tmp_path: Path) -> None:
    stall, written = Stall("write"), list[str]()
    tensor = split_rows(np.zeros((2, 20 << 20), np.uint8), 2)

    def slow(operation: str, name: str) -> None:
        if operation == "write":
            time.sleep(BOUND)
            written.append(name)

    storages = [FaultyStorage(tmp_path, slow), FaultyStorage(tmp_path, stall)]
    results = try_save(
        [{"x": tensor[rank]} for rank in range(2)], storages, None, SaveOptions(progress_timeout=BOUND * 2)
    )
    stall.release()
    check_error(results, 1, "a write to", "safetensors")
    assert len(written) < 10, "windows of 2 MiB"
    helpers_end()


@pytest.mark.parametrize(("victim", "bound"), [(0, 0), (1, None)])
def test_a_save_in_the_background_that_hangs(tmp_path: Path, victim: int, bound: int | None) -> None:
    stall, together = Stall("write", "safetensors"), threading.Barrier(RANKS)

    def work(rank: SimulatedRank) -> None:
        rank.save(versions(1, RANKS)[rank.rank], tmp_path, None, options())
        storage: Any = FaultyStorage(tmp_path, stall) if rank.rank == victim else tmp_path
        pending = rank.save_in_background(versions(2, RANKS)[rank.rank], storage, None, options(snapshot_bytes=bound))
        check_error([error_of(lambda: pending.result(LONG))], victim, "a write to", "safetensors")
        together.wait(LONG)
        assert versions_in(tmp_path) == [1]
        together.wait(LONG)
        rank.save_in_background(versions(3, RANKS)[rank.rank], tmp_path, None, options()).result(LONG)  # still stuck

    try:
        job(RANKS, work)
    finally:
        stall.release()
    helpers_end()
    assert versions_in(tmp_path) == [1, 3]


def test_no_thread_is_made_and_no_sync_added_without_the_option(tmp_path: Path) -> None:
    operations = []

    def hook(operation: str, name: str) -> None:
        operations.append(operation)
        assert "storage" not in threading.current_thread().name

    save_alone(versions(1, 1)[0], FaultyStorage(tmp_path, hook))
    assert operations.count("sync_file") == 1
    assert version_in(tmp_path) == 1
