"""Saves in the background, on simulated ranks: what they save, when they commit, how they fail, who waits for whom."""

from __future__ import annotations

import errno
import gc
import io
import logging
import os
import random
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.memory import address_of
from paddle_dist_ckpt.core.reports import SaveReport
from paddle_dist_ckpt.core.tensors import Reduction
from paddle_dist_ckpt.engine import save as save_module
from paddle_dist_ckpt.engine.async_save import AsyncSave
from paddle_dist_ckpt.engine.commit import committed_ids
from paddle_dist_ckpt.engine.save_memory import SaveMemory
from paddle_dist_ckpt.engine.verify import verify_checkpoint
from paddle_dist_ckpt.engine.writer import WINDOW_BYTES, Tensors
from paddle_dist_ckpt.errors import CheckpointError, RankFailureError, StateDictMismatchError, UnsupportedValueError
from paddle_dist_ckpt.formats import datafile
from paddle_dist_ckpt.options import LoadOptions, SaveOptions
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing import FaultyStorage, SimulatedRank, run_ranks
from test.engine.helpers import (
    LAYOUTS,
    SMALL,
    Watch,
    all_ok,
    data_files,
    errors_of,
    files_in,
    load_whole,
    make_array,
    rows_of,
    same_bits,
    sharded,
    split_rows,
)

RANKS = 3
LONG = 30.0
THREAD = "paddle_dist_ckpt save"
SHAPE = (30, 700)
BLOCK = SMALL.block_bytes


def in_background() -> bool:
    """Whether this is the thread of a background save."""
    return threading.current_thread().name == THREAD


def options(**changes: Any) -> SaveOptions:
    return SaveOptions(**{"block_bytes": BLOCK, "timeout": LONG, **changes})


@dataclass
class Gate:
    """Stops the background thread of one rank, or of all, at its first operation of a kind, until it is opened."""

    operation: str = "write"
    rank: int | None = None
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def storage(self, folder: Path, rank: SimulatedRank) -> FaultyStorage:
        """A rank's folder."""

        def hook(operation: str, name: str) -> None:
            if operation == self.operation and in_background() and self.rank in (None, rank.rank):
                self.reached.set()
                assert self.opened.wait(LONG)

        return FaultyStorage(folder, hook)


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What it returns. Fails if it takes longer, instead of waiting for what may never come."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"still going on after {seconds} s"
    return results[0]


def job(ranks: int, work: Callable[[SimulatedRank], Any]) -> list[Any]:
    """Run a function on every rank, in time; none may raise."""
    return all_ok(within(LONG, lambda: run_ranks(ranks, work)))


def error_of(call: Callable[[], Any]) -> BaseException:
    """What a call raises."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def finish(done: Any) -> SaveReport:
    """The report of a save of either kind, when it has ended."""
    return done.result(LONG) if isinstance(done, AsyncSave) else done


def versions(number: int, ranks: int) -> list[dict[str, Any]]:
    """State_dicts in which everything says the number."""
    array = np.full(SHAPE, number, np.int64)
    cut = split_rows(array, ranks)
    return [{"cut": cut[r], "plain": np.full(50, number), "n": number, "text": [number] * 3000} for r in range(ranks)]


def version_in(folder: Path, unique_id: int | None = None) -> int:
    """The number that a whole checkpoint says everywhere."""
    assert verify_checkpoint(LocalStorage(folder), unique_id, False).ok
    merged = load_whole(folder, unique_id)
    found = {merged["n"], *merged["text"], *np.unique(merged["cut"]).tolist(), *np.unique(merged["plain"]).tolist()}
    assert len(found) == 1, found
    return int(found.pop())


def versions_in(folder: Path) -> list[int]:
    """What all checkpoints say, in the order of their ids."""
    return [version_in(folder, unique_id) for unique_id in committed_ids(LocalStorage(folder))]


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
    assert verify_checkpoint(LocalStorage(folder), None, False).ok
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
    for module in ("file_save", "writer"):
        monkeypatch.setattr(f"paddle_dist_ckpt.engine.{module}.WINDOW_BYTES", 8192)
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
        data_start = 8 + int.from_bytes(content[:8], "little") if is_data else len(content)
        found[re.sub(r"[0-9a-f]{16}", "(id)", name)] = without_ids(content, data_start)
    return found


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("bound", [None, 0, 8192, 20_000])
def test_its_files_are_those_of_a_synchronous_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int | None, parts: bool
) -> None:
    for module in ("file_save", "writer"):
        monkeypatch.setattr(f"paddle_dist_ckpt.engine.{module}.WINDOW_BYTES", 8192)
    if parts:
        split = datafile.split_in_parts
        monkeypatch.setattr(
            "paddle_dist_ckpt.engine.part.split_in_parts", lambda entries, size: split(entries, size, 1500)
        )

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
        assert not pending.wait(0.3)
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
        assert 0.2 <= time.monotonic() - start < 5
        assert not pending.wait(0.05)
        gate.opened.set()
        assert pending.result() is pending.result()

    job(1, work)


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


# -- failures


def failing(folder: Path, operation: str, at: str, error: OSError, armed: Callable[[], bool]) -> FaultyStorage:
    """A folder in which the operations of a kind fail, on files whose names have a part."""

    def hook(done: str, name: str) -> None:
        if done == operation and at in name and armed():
            raise error

    return FaultyStorage(folder, hook)


FAULTS = [
    *[(operation, "safetensors", victim) for operation in ("create", "write", "sync_file") for victim in (0, 2)],
    ("sync", "", 0),
    ("publish", "metadata", 0),
    ("size", "safetensors", 0),
]


@pytest.mark.parametrize(("number", "bound"), [(errno.ENOSPC, None), (errno.EIO, 0)])
@pytest.mark.parametrize(("operation", "name", "victim"), FAULTS)
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


def broken_buffer(monkeypatch: pytest.MonkeyPatch, applies: Callable[[SaveMemory], bool]) -> None:
    """There is no memory for the snapshots of some ranks."""
    original = SaveMemory.snapshot_buffer

    def buffer(memory: SaveMemory, nbytes: int) -> Any:
        if applies(memory):
            raise MemoryError("injected")
        return original(memory, nbytes)

    monkeypatch.setattr(SaveMemory, "snapshot_buffer", buffer)


def broken_source(monkeypatch: pytest.MonkeyPatch, applies: Callable[[], bool]) -> None:
    """The tensors of some ranks cannot be read."""
    original = Tensors.copy_to

    def copy_to(tensors: Tensors, memory: Any, start: int) -> None:
        if applies():
            raise ValueError("injected")
        original(tensors, memory, start)

    monkeypatch.setattr(Tensors, "copy_to", copy_to)


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


@pytest.mark.parametrize("victim", [0, 1])
def test_a_thread_that_cannot_be_started_fails_the_call_and_the_others_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    together, victims, start = threading.Barrier(RANKS), set(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == THREAD and threading.get_ident() in victims:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    def work(rank: SimulatedRank) -> None:
        if rank.rank == victim:
            victims.add(threading.get_ident())
            with pytest.raises(RuntimeError, match="can't start"):
                rank.save_in_background(versions(1, RANKS)[rank.rank], tmp_path, 0, options())
            victims.clear()
        else:
            pending = rank.save_in_background(versions(1, RANKS)[rank.rank], tmp_path, 0, options())
            raised = error_of(lambda: pending.result(LONG))
            assert isinstance(raised, RankFailureError)
            assert set(raised.failures) == {victim}
        together.wait(LONG)
        assert not (tmp_path / "0.metadata").exists()
        together.wait(LONG)
        rank.save_in_background(versions(2, RANKS)[rank.rank], tmp_path, 0, options()).result(LONG)

    job(RANKS, work)
    assert versions_in(tmp_path) == [2]


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
    """What is logged as an error, in a moment at most."""
    for _ in range(100):
        logged = [record for record in caplog.records if record.levelno == logging.ERROR]
        if len(logged) >= count:
            break
        time.sleep(0.01)
    assert len(logged) == count
    return logged


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
            assert pending.wait(5)
            assert "injected" in str(error_of(lambda: pending.result(0)))

        job(1, work)
    finally:
        logger.removeHandler(handler)


# -- one after another


@pytest.mark.parametrize("second", ["save", "save_in_background"])
@pytest.mark.parametrize("state", ["same", "changed", "other"])
def test_a_save_waits_for_the_one_before(tmp_path: Path, second: str, state: str) -> None:
    gate, waiting = Gate(rank=1), threading.Barrier(RANKS)

    def work(rank: SimulatedRank) -> None:
        mine = versions(1, RANKS)[rank.rank]
        first = rank.save_in_background(mine, gate.storage(tmp_path, rank), None, options())
        if state == "changed":
            for array in (*mine["cut"].pieces, mine["plain"]):
                array += 1
            mine |= {"n": 2, "text": [2] * 3000}
        elif state == "other":
            mine = versions(2, RANKS)[rank.rank] | {"more": np.arange(2000)}
        assert gate.reached.wait(LONG)
        opener = threading.Timer(0.5, gate.opened.set)
        if rank.rank == 0:
            waiting.wait(LONG)
            opener.start()
        else:
            waiting.wait(LONG)
        done = getattr(rank, second)(mine, tmp_path, None, options())
        assert gate.opened.is_set(), "it has not waited"
        assert first.wait(LONG)
        assert first.result(0).unique_id == 0
        assert finish(done).unique_id == 1

    job(RANKS, work)
    assert versions_in(tmp_path) == ([1, 1] if state == "same" else [1, 2])


@pytest.mark.parametrize("second", ["save", "save_in_background"])
def test_a_save_that_is_not_to_wait_raises_on_every_rank(tmp_path: Path, second: str) -> None:
    gate, together = Gate(), threading.Barrier(RANKS)

    def work(rank: SimulatedRank) -> None:
        first = rank.save_in_background(versions(1, RANKS)[rank.rank], gate.storage(tmp_path, rank), None, options())
        for number in range(3):
            state = versions(2 + number, RANKS)[rank.rank]
            raised = error_of(lambda s=state: getattr(rank, second)(s, tmp_path, None, options(when_busy="raise")))
            assert isinstance(raised, RankFailureError)
            assert set(raised.failures) <= set(range(RANKS))
            assert "when_busy" in str(raised)
            together.wait(LONG)
        assert not first.done()
        together.wait(LONG)
        gate.opened.set()
        assert first.result(LONG).unique_id == 0
        together.wait(LONG)
        done = getattr(rank, second)(versions(9, RANKS)[rank.rank], tmp_path, None, options(when_busy="raise"))
        assert finish(done).unique_id == 1

    job(RANKS, work)
    assert versions_in(tmp_path) == [1, 9]


@pytest.mark.parametrize("busy", [0, 1])
def test_a_save_that_is_not_to_wait_raises_if_only_one_rank_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: int
) -> None:
    gate, reporting, together = Gate(), save_module._Saving._report, threading.Barrier(RANKS)

    def report(saving: Any, result: Any) -> Any:
        """The commit is done; one rank does not come to its end for a while."""
        if in_background() and saving._session.rank == busy:
            gate.reached.set()
            assert gate.opened.wait(LONG)
        return reporting(saving, result)

    monkeypatch.setattr(save_module._Saving, "_report", report)

    def work(rank: SimulatedRank) -> None:
        first = rank.save_in_background(versions(1, RANKS)[rank.rank], tmp_path, None, options())
        assert rank.rank == busy or first.wait(LONG)
        assert gate.reached.wait(LONG)
        together.wait(LONG)
        for number in (2, 3):
            state = versions(number, RANKS)[rank.rank]
            raised = error_of(lambda s=state: rank.save(s, tmp_path, None, options(when_busy="raise")))
            assert isinstance(raised, RankFailureError)
            assert set(raised.failures) == {busy}
            together.wait(LONG)
        gate.opened.set()
        assert first.result(LONG).unique_id == 0
        assert rank.save(versions(4, RANKS)[rank.rank], tmp_path, None, options()).unique_id == 1

    job(RANKS, work)
    assert versions_in(tmp_path) == [1, 4]


def test_a_save_that_does_not_fit_leaves_the_one_before_alone(tmp_path: Path) -> None:
    gate = Gate()

    def work(rank: SimulatedRank) -> None:
        first = rank.save_in_background(versions(1, RANKS)[rank.rank], gate.storage(tmp_path, rank), None, options())
        bad = versions(2, RANKS)[rank.rank] | ({"bad": print} if rank.rank == 1 else {})
        gate.opened.set()
        assert isinstance(error_of(lambda: rank.save_in_background(bad, tmp_path)), UnsupportedValueError)
        assert first.result(LONG).unique_id == 0
        rank.save_in_background(versions(3, RANKS)[rank.rank], tmp_path, None, options()).result(LONG)

    job(RANKS, work)
    assert versions_in(tmp_path) == [1, 3]


@pytest.mark.parametrize("seed", range(4))
def test_saves_of_all_kinds_in_a_row(tmp_path: Path, seed: int) -> None:
    def work(rank: SimulatedRank) -> None:
        rng = random.Random(seed)
        mine, pending = versions(0, RANKS)[rank.rank], []
        for number in range(12):
            if rng.random() < 0.3:
                mine = versions(number, RANKS)[rank.rank]
            for array in (*mine["cut"].pieces, mine["plain"]):
                array[...] = number
            mine |= {"n": number, "text": [number] * 3000}
            bound = rng.choice([None, 0, 10_000])
            if rng.random() < 0.3:
                rank.save(mine, tmp_path, None, options())
            else:
                pending.append(rank.save_in_background(mine, tmp_path, None, options(snapshot_bytes=bound)))
            if rng.random() < 0.3:
                [handle.result(LONG) for handle in pending]
        for handle in pending:
            handle.result(LONG)

    job(RANKS, work)
    assert versions_in(tmp_path) == list(range(12))
    assert not list(tmp_path.glob("*.claim*"))


@pytest.mark.parametrize("other", [0, 1])
def test_ranks_that_do_not_agree_how_to_save_are_told_so(tmp_path: Path, other: int) -> None:
    together = threading.Barrier(RANKS)

    def work(rank: SimulatedRank) -> None:
        kind = "save_in_background" if rank.rank == other else "save"
        together.wait(LONG)
        raised = error_of(lambda: getattr(rank, kind)(versions(1, RANKS)[rank.rank], tmp_path, None, options()))
        assert f"rank {other} calls 'save in background'" in str(raised)
        assert f"rank {1 - other} calls 'save'" in str(raised)
        together.wait(LONG)
        rank.save_in_background(versions(2, RANKS)[rank.rank], tmp_path, None, options()).result(LONG)

    job(RANKS, work)
    assert versions_in(tmp_path) == [2]


# -- other calls meanwhile


def test_loads_and_failing_loads_meanwhile(tmp_path: Path) -> None:
    gate, together = Gate("sync_file", 2), threading.Barrier(RANKS)

    def work(rank: SimulatedRank) -> None:
        rank.save(versions(1, RANKS)[rank.rank], tmp_path, None, options())
        pending = rank.save_in_background(versions(2, RANKS)[rank.rank], gate.storage(tmp_path, rank), None, options())
        for _ in range(3):
            state = versions(-1, RANKS)[rank.rank] | {"n": None, "text": None}
            rank.load(state, tmp_path)
            assert {state["n"], *np.unique(state["cut"].pieces[0]).tolist(), *state["plain"].tolist()} == {1}
            wrong = {"cut": np.zeros(3)} if rank.rank == 1 else {}
            assert isinstance(error_of(lambda w=wrong: rank.load(w, tmp_path)), StateDictMismatchError)
            assert versions_in(tmp_path) == [1]
        assert not pending.done()
        together.wait(LONG)
        gate.opened.set()
        assert pending.result(LONG).unique_id == 1

    job(RANKS, work)
    assert versions_in(tmp_path) == [1, 2]


def test_a_save_meanwhile_does_not_hide_that_ranks_are_out_of_step(tmp_path: Path) -> None:
    """One rank leaves out a load. What it saves afterwards may belong to another step than the others'."""
    gate, together = Gate("write"), threading.Barrier(2)
    state = {"x": np.arange(3000)}

    def save(rank: SimulatedRank, number: int) -> None:
        rank.save({"x": np.full(3000, 10 * number + rank.rank)}, tmp_path, None, options(timeout=10))

    def work(rank: SimulatedRank) -> None:
        pending = rank.save_in_background(state, gate.storage(tmp_path, rank), None, options())
        if rank.rank == 0:
            error_of(lambda: rank.load({"x": np.zeros(3000, int)}, tmp_path, options=LoadOptions(timeout=0.5)))
        together.wait(LONG)
        assert isinstance(error_of(lambda: save(rank, 1)), CheckpointError)
        together.wait(LONG)
        gate.opened.set()
        raised = error_of(lambda: save(rank, 2))
        assert isinstance(raised, UnsupportedValueError)
        assert "an earlier call was given up" in str(raised)
        pending.result(LONG)
        rank.save({"x": np.full(3000, 5)}, tmp_path, None, options())

    job(2, work)
    assert committed_ids(LocalStorage(tmp_path)) == [0, 1]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_goes_away_fails_the_others_saves(tmp_path: Path, victim: int) -> None:
    gate, together = Gate(rank=victim), threading.Barrier(RANKS)

    def work(rank: SimulatedRank) -> float:
        pending = rank.save_in_background(versions(1, RANKS)[rank.rank], gate.storage(tmp_path, rank), None, options())
        assert gate.reached.wait(LONG)
        together.wait(LONG)
        start = time.monotonic()
        if rank.rank == victim:
            rank.hub.close()
            assert not pending.done()
        else:
            raised = error_of(lambda: pending.result(LONG))
            assert isinstance(raised, RankFailureError)
            assert set(raised.failures) == {victim}
        seconds = time.monotonic() - start
        together.wait(LONG)
        gate.opened.set()
        error_of(lambda: pending.result(LONG))
        return seconds

    assert max(job(RANKS, work)) < 10
    assert committed_ids(LocalStorage(tmp_path)) == []


# -- what it costs


def large_state(nbytes: int, fill: int) -> dict[str, Any]:
    """A few arrays of so many bytes together."""
    return {f"a{i}": np.full(nbytes // 4 // 8, fill + i, np.int64) for i in range(4)}


@dataclass
class Written:
    """Counts the bytes that are written by the call and in the background."""

    by_call: int = 0
    later: int = 0

    def storage(self, folder: Path) -> LocalStorage:
        outer = self

        class Counting(LocalStorage):
            def create(self, name: str) -> Any:
                file = super().create(name)
                write = file.write

                def counted(data: Any, offset: int) -> None:
                    if offset and in_background():
                        outer.later += len(data)
                    elif offset:
                        outer.by_call += len(data)
                    write(data, offset)

                file.write = counted  # type: ignore[method-assign]
                return file

        return Counting(folder)


REST = 64 * 1001
BOUNDS = [0, 1, REST - 1, REST, WINDOW_BYTES, WINDOW_BYTES + REST - 1, 3_333_333, 3 * WINDOW_BYTES, 1 << 40]


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_snapshot_keeps_to_its_bound(tmp_path: Path, bound: int) -> None:
    total, written = 5 * WINDOW_BYTES + REST, Written()

    def work(rank: SimulatedRank) -> None:
        state = large_state(total, 1)
        pending = rank.save_in_background(state, written.storage(tmp_path), None, options(snapshot_bytes=bound))
        assert len(rank.memory._buffer) <= -(-bound // WINDOW_BYTES) * WINDOW_BYTES, "of huge pages, all of them whole"
        for array in state.values():
            array[...] = 0
        pending.result(LONG)

    job(1, work)
    assert written.later <= bound
    assert written.by_call < total - min(bound, total) + WINDOW_BYTES
    assert written.by_call + written.later == sum(array.nbytes for array in large_state(total, 1).values())
    merged = load_whole(tmp_path)
    assert all(same_bits(merged[name], array) for name, array in large_state(total, 1).items())


def test_the_buffer_is_used_again(tmp_path: Path) -> None:
    def work(rank: SimulatedRank) -> list[int]:
        addresses = []
        for megabytes in (8, 8, 3, 8, 16, 4):
            rank.save_in_background(large_state(megabytes << 20, 1), tmp_path, 0, options()).result(LONG)
            addresses.append(address_of(rank.memory._buffer))
        rank.save(large_state(32 << 20, 1), tmp_path, 0, options())
        assert len(rank.memory._buffer) == 16 << 20, "only a snapshot needs it"
        return addresses

    (addresses,) = job(1, work)
    assert len(set(addresses[:4])) == 1
    assert len(set(addresses[4:])) == 1


def test_a_handle_that_is_kept_keeps_no_buffer(tmp_path: Path) -> None:
    def work(rank: SimulatedRank) -> None:
        handle = rank.save_in_background(large_state(8 << 20, 1), tmp_path, 0, options())
        assert handle.wait(LONG)
        old = weakref.ref(rank.memory._buffer)
        rank.save_in_background(large_state(16 << 20, 1), tmp_path, 0, options()).result(LONG)
        gc.collect()
        assert old() is None
        assert handle.result(0).unique_id == 0

    job(1, work)


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


def test_nothing_leaks_in_fifty_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def work(rank: SimulatedRank) -> tuple[Any, Any]:
        armed = [False]
        storage = failing(tmp_path, "write", "safetensors", OSError(errno.EIO, "injected"), lambda: armed[0])
        for number in range(50):
            armed[0] = number % 10 == 5
            pending = rank.save_in_background(versions(number, 1)[0], storage, 0, options())
            assert pending.wait(LONG)
            if armed[0]:
                assert "injected" in str(error_of(pending.result))
            else:
                pending.result()
            if number == 9:
                before = settled(counts)
        return before, settled(counts)

    before, after = job(1, work)[0]
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def settled(count: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """The least of what is counted within a moment: threads may be about to end."""
    found = []
    for _ in range(20):
        found.append(count())
        time.sleep(0.01)
    return min(found)
