"""Saves in the background, on simulated ranks: what they save, when they commit, and whom they wait for."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from paddle_dist_ckpt import CheckpointError, LoadOptions, verify
from paddle_dist_ckpt.core.tensors import Reduction
from paddle_dist_ckpt.files import datafile
from paddle_dist_ckpt.files.contents import WINDOW_BYTES
from paddle_dist_ckpt.reports import SaveReport
from paddle_dist_ckpt.saving.async_save import AsyncSave
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing import FaultyStorage, SimulatedRank
from test.background import (
    LONG,
    RANKS,
    Gate,
    error_of,
    failing,
    finish,
    in_background,
    job,
    options,
    version_in,
    versions,
    within,
)
from test.interrupts import interrupted
from test.jobs import (
    LAYOUTS,
    Watch,
    data_files,
    files_in,
    load_whole,
    make_array,
    rows_of,
    same_bits,
    sharded,
    without_times,
)
from test.waiting import PATIENCE, until


def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.files.writer.WINDOW_BYTES", 8192)
    for kind in ("TensorContents", "SnapshotContents"):
        monkeypatch.setattr(f"paddle_dist_ckpt.files.contents.{kind}.window_bytes", 8192)


# -- what is saved


def rich_arrays() -> dict[str, np.ndarray]:
    return {
        **{f"cut {how}": make_array((23, 301), "float32", i) for i, how in enumerate(LAYOUTS)},
        "odd": make_array((1237, 3), "uint8", 7),
        "whole": make_array((70, 90), "bfloat16", 8),
        "scalar": make_array((), "float64", 9),
        "empty": make_array((0, 5), "float32"),
    }


def rich_state(rank: int, ranks: int) -> dict[str, Any]:
    """Tensors in all sorts of memory, one of them partial, numpy arrays, small and large values."""
    arrays = rich_arrays()
    state: dict[str, Any] = {
        name: sharded(
            array, [rows_of(array.shape, rank, ranks) if array.ndim else rows_of((1,), 0, 1)], name[4:] or "c"
        )
        for name, array in arrays.items()
        if name.startswith("cut") or name == "odd"
    }
    state["whole"] = arrays["whole"].copy()
    state["scalar"] = arrays["scalar"].copy()
    state["empty"] = arrays["empty"].copy()
    state["partial"] = sharded(np.full((40, 60), rank + 1.0), [rows_of((40, 60), 0, 1)], "inner")
    state["partial"].reduction = Reduction("sum", rank, ranks)
    state["nested"] = {"list": [1, [2, 3]], "text": "old " * 5000, "n": 7}
    return state


def destroy(state: dict[str, Any]) -> None:
    """Change everything in a state, in place."""
    for value in list(state.values()):
        for array in getattr(value, "pieces", [value]):
            if isinstance(array, np.ndarray):
                array[...] = np.frombuffer(b"\x5a" * array.itemsize, array.dtype)[0]
    state["nested"]["list"][1].append(4)
    state["nested"] |= {"n": 8, "text": "new"}
    state.clear()


def check_rich(folder: Path, ranks: int) -> None:
    assert verify(folder).ok
    merged = load_whole(folder)
    for name, array in rich_arrays().items():
        assert same_bits(merged[name], array), name
    assert (merged["partial"] == sum(range(1, ranks + 1))).all()
    assert merged["nested"] == {"list": [1, [2, 3]], "text": "old " * 5000, "n": 7}


@pytest.mark.parametrize("bound", [None, 0, 1, 5000, WINDOW_BYTES])
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_what_was_there_at_the_call_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, bound: int | None
) -> None:
    small_windows(monkeypatch)
    gate = Gate()
    user = {"step": [1]}

    def work(rank: SimulatedRank) -> None:
        for changed in (False, True):  # by a new plan, and by the one before
            state = rich_state(rank.rank, ranks)
            how = options(snapshot_bytes=bound, user_metadata=user)
            pending = rank.save_in_background(state, gate.storage(tmp_path, rank), 0, how)
            destroy(state)
            user["step"] = [2]
            assert changed or gate.reached.wait(LONG)
            gate.opened.set()
            pending.result(LONG)

    job(ranks, work)
    check_rich(tmp_path, ranks)


def test_the_first_save_has_the_user_metadata_of_the_call(tmp_path: Path) -> None:
    gate, user = Gate(), {"steps": [1, {"a": 2}]}

    def work(rank: SimulatedRank) -> None:
        pending = rank.save_in_background({"a": 1}, gate.storage(tmp_path, rank), None, options(user_metadata=user))
        user["steps"][1]["a"] = 3  # type: ignore[index]
        user["steps"] = []
        gate.opened.set()
        pending.result(LONG)

    job(1, work)
    (file,) = data_files(tmp_path)
    info = datafile.read_info(LocalStorage(tmp_path).open(file.name), file.name)[0]
    assert info.user_metadata == {"dict": [["steps", [1, {"dict": [["a", 2]]}]]]}


@pytest.mark.parametrize("kind", ["save", "save_in_background"])
@pytest.mark.parametrize("how", LAYOUTS)
def test_addends_are_reduced_whatever_their_strides(tmp_path: Path, how: str, kind: str) -> None:
    def work(rank: SimulatedRank) -> None:
        state = {"t": sharded(np.full((4, 6), rank.rank + 1.0), [rows_of((4, 6), 0, 1)], how)}
        state["t"].reduction = Reduction("sum", rank.rank, RANKS)
        finish(getattr(rank, kind)(state, tmp_path, None, options()))

    job(RANKS, work)
    assert (load_whole(tmp_path)["t"] == 6).all()


def without_ids(content: bytes, data_start: int) -> bytes:
    """A file without what differs from save to save: ids, digests of what holds ids, and the time."""
    head = re.sub(rb"[0-9a-f]{16}", b"(id)", content[:data_start])
    return re.sub(rb"\d{4}-\d\d-\d\dT[^\"\\]*", b"(time)", head) + content[data_start:]


def layout_of(folder: Path) -> dict[str, bytes]:
    """Names and contents of a folder's files, without what differs from save to save."""
    found = {}
    for name, content in files_in(folder).items():
        is_data = name.endswith(".safetensors")
        if not is_data:
            content = without_times(folder / name)
        data_start = 8 + int.from_bytes(content[:8], "little") if is_data else len(content)
        found[re.sub(r"[0-9a-f]{16}", "(id)", name)] = without_ids(content, data_start)
    return found


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("bound", [None, 0, 8192, 20_000])
def test_its_files_are_those_of_a_synchronous_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int | None, parts: bool
) -> None:
    small_windows(monkeypatch)
    if parts:
        split = datafile.split_in_parts
        monkeypatch.setattr("paddle_dist_ckpt.saving.file_plan.split_in_parts", lambda table: split(table, 1500))

    def work(rank: SimulatedRank) -> None:
        state = rich_state(rank.rank, RANKS)
        rank.save(state, tmp_path / "sync", 4, options())
        report = rank.save_in_background(state, tmp_path / "async", 4, options(snapshot_bytes=bound)).result(LONG)
        assert report.files == len(data_files(tmp_path / "sync"))

    job(RANKS, work)
    assert layout_of(tmp_path / "async") == layout_of(tmp_path / "sync")
    assert len(data_files(tmp_path / "async")) > (2 * RANKS if parts else 0)
    check_rich(tmp_path / "async", RANKS)


def test_its_report_is_that_of_a_synchronous_save(tmp_path: Path) -> None:
    def work(rank: SimulatedRank) -> None:
        state = versions(1, RANKS)[rank.rank]
        expected = rank.save(state, tmp_path, 0, options())
        found = rank.save_in_background(state, tmp_path, 1, options()).result(LONG)
        assert (found.unique_id, found.path) == (1, expected.path)
        assert (found.total_bytes, found.bytes_written) == (expected.total_bytes, expected.bytes_written)
        assert (found.files, found.warnings) == (expected.files, expected.warnings)
        assert set(found.seconds) >= {"plan", "snapshot", "write"}

    job(RANKS, work)


@pytest.mark.parametrize(
    ("kind", "wanted", "shown"),
    [
        ("save", None, True),
        ("save", False, False),
        ("save", True, True),
        ("save_in_background", None, False),
        ("save_in_background", False, False),
        ("save_in_background", True, True),
    ],
)
def test_progress_is_shown_where_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, wanted: bool | None, shown: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr("paddle_dist_ckpt.core.progress._LONG_SECONDS", 0)

    def work(rank: SimulatedRank) -> None:
        finish(getattr(rank, kind)(versions(1, 1)[0], tmp_path, None, options(progress=wanted)))

    job(1, work)
    assert ("save" in sys.stderr.getvalue()) == shown  # type: ignore[attr-defined]


# -- when it commits


@pytest.mark.parametrize("operation", ["create", "write", "sync_file"])
@pytest.mark.parametrize("slow", [0, 2])
def test_it_commits_when_the_files_of_every_rank_are_durable(tmp_path: Path, slow: int, operation: str) -> None:
    gate, seen = Gate(operation, slow), threading.Barrier(RANKS)
    watch = Watch([tmp_path] * RANKS)
    inner = watch.storages()

    def work(rank: SimulatedRank) -> None:
        def hook(done: str, name: str) -> None:
            inner[rank.rank]._hook(done, name)
            if done == operation and rank.rank == slow:
                gate.reached.set()
                assert gate.opened.wait(LONG)

        pending = rank.save_in_background(versions(1, RANKS)[rank.rank], FaultyStorage(tmp_path, hook), None, options())
        assert gate.reached.wait(LONG)
        others = set(range(RANKS)) - {slow}
        until(lambda: others <= {r for r, done, _ in watch.steps if done == "sync_file"}, what="the others' end")
        assert not pending.wait(0.1)
        assert not pending.done()
        assert not (tmp_path / "0.metadata").exists()
        seen.wait(LONG)
        gate.opened.set()
        assert pending.wait(LONG)
        assert pending.done()
        assert pending.result(0).unique_id == 0

    job(RANKS, work)
    steps = [(done, name) for _, done, name in watch.steps]
    commit = next(i for i, (done, name) in enumerate(steps) if done == "publish" and "metadata" in name)
    for name in watch.names_of("create"):
        written = max(i for i, step in enumerate(steps) if step == ("write", name))
        assert written < steps.index(("sync_file", name)) < commit
    assert version_in(tmp_path) == 1


def test_it_does_not_end_before_its_time_is_up(tmp_path: Path) -> None:
    gate = Gate()

    def work(rank: SimulatedRank) -> None:
        pending = rank.save_in_background(versions(1, 1)[0], gate.storage(tmp_path, rank), None, options())
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="it goes on"):
            pending.result(0.2)
        with pytest.raises(TimeoutError):
            pending.result(timeout=0)
        assert 0.2 <= time.monotonic() - start < LONG
        assert not pending.wait(0.05)
        assert repr(pending) == f"<AsyncSave: the save to {tmp_path} goes on>"
        with pytest.raises(TypeError, match="timeout must be None or a number of seconds, not 'x'"):
            pending.result("x")  # type: ignore[arg-type]
        gate.opened.set()
        assert pending.result() is pending.result()
        assert repr(pending) == f"<AsyncSave: the save to {tmp_path} is committed>"

    job(1, work)


def test_exchanges_of_other_threads_do_not_wait_for_it(tmp_path: Path) -> None:
    gates = [Gate() for _ in range(2)]

    def work(rank: SimulatedRank) -> bool:
        gate, array = gates[rank.rank], np.arange(5000.0)
        rank.save({"a": array}, tmp_path / "old")
        pending = rank.save_in_background(versions(1, 2)[rank.rank], gate.storage(tmp_path / "new", rank))
        target = np.zeros_like(array)
        reading = LoadOptions(exchange="always", timeout=3)
        try:
            within(LONG, lambda: rank.load({"a": target}, tmp_path / "old", options=reading))
        finally:
            gate.opened.set()
        pending.result(LONG)
        return np.array_equal(target, array)

    assert job(2, work) == [True] * 2
    assert version_in(tmp_path / "new") == 1


def test_several_threads_may_ask(tmp_path: Path) -> None:
    gate, found, failed = Gate(), [], []

    def work(rank: SimulatedRank) -> None:
        pending = rank.save_in_background(versions(1, 1)[0], gate.storage(tmp_path, rank), None, options())
        threads = [threading.Thread(target=lambda: found.append(pending.result(LONG))) for _ in range(4)]
        threads += [threading.Thread(target=lambda: failed.append(pending.wait(0.05))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads[4:]:
            thread.join()
        assert found == []
        gate.opened.set()
        for thread in threads:
            thread.join()

    job(1, work)
    assert failed == [False] * 4
    assert len(found) == 4
    assert len(set(map(id, found))) == 1


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="needs getpriority")
def test_only_the_thread_in_the_background_has_the_lowest_priority(tmp_path: Path) -> None:
    seen: dict[str, set[int]] = {"background": set(), "call": set()}

    def hook(operation: str, name: str) -> None:
        mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        seen["background" if in_background() else "call"].add(mine)

    def work(rank: SimulatedRank) -> None:
        before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        for bound in (None, 0):
            how = options(snapshot_bytes=bound)
            rank.save_in_background(versions(1, 2)[rank.rank], FaultyStorage(tmp_path, hook), None, how).result(LONG)
        rank.save(versions(1, 2)[rank.rank], FaultyStorage(tmp_path, hook), None, options())
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    job(2, work)
    assert seen == {"background": {19}, "call": {before}}


def test_a_failure_is_logged_before_anybody_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hears of it may end the process, or look at the log. If it cannot be logged, it is heard of all the same."""
    started, done = threading.Event(), list[bool]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "background save" in record.getMessage():
                done.append(handles[0].done())
                raise RuntimeError("no log")

    def work(rank: SimulatedRank) -> None:
        storage = failing(tmp_path, "write", "safetensors", OSError(errno.EIO, "injected"), started.wait)
        handles.append(rank.save_in_background(versions(0, 1)[0], storage, 0, options()))
        started.set()
        assert "injected" in str(error_of(handles[0].result))
        handles[0]._thread.join(LONG)  # what it raises is for the hook

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    handles, handler, logger = list[Any](), Handler(), logging.getLogger("paddle_dist_ckpt")
    logger.addHandler(handler)
    try:
        job(1, work)
    finally:
        logger.removeHandler(handler)
    assert done == [False]


def test_no_interrupt_of_who_waits_keeps_a_save_from_ending() -> None:
    report, number, goes_on = mock.create_autospec(SaveReport, instance=True), 0, True
    while goes_on:
        begun = threading.Event()
        pending = AsyncSave("folder", lambda begun=begun: begun.wait(PATIENCE) and report)  # type: ignore[misc]
        pending.start()
        threading.Timer(0.005, begun.set).start()
        goes_on = interrupted(number, pending.result)
        assert pending.wait(PATIENCE)
        pending.raise_unobserved()
        assert pending.result() is report
        number += 1
    assert number > 3


def test_a_save_that_has_ended_keeps_no_forked_process_from_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = AsyncSave("folder", lambda: mock.create_autospec(SaveReport, instance=True))
    pending.start()
    pending.wait(PATIENCE)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    pending.raise_unobserved()
    with pytest.raises(CheckpointError, match="in the process that this one was forked from"):
        pending.result()
