"""Operations that are waited for no longer than is allowed: what becomes of those that return late, and of the rest."""

from __future__ import annotations

import errno
import functools
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import CheckpointTimeoutError
from paddle_dist_ckpt.storage import LocalStorage, bounded, local
from paddle_dist_ckpt.storage.base import Storage
from paddle_dist_ckpt.storage.bounding import _BoundedFile
from paddle_dist_ckpt.storage.helpers import Helpers, StorageCall
from paddle_dist_ckpt.testing import FaultyStorage, Stall
from test.interrupts import interrupted
from test.stalls import HELPER, helpers_end
from test.waiting import PATIENCE, until

BOUND = 0.8


@pytest.fixture
def helpers() -> Iterator[Helpers]:
    helpers = Helpers(BOUND, 3)
    yield helpers
    helpers.close()
    helpers_end()


def test_without_a_bound_the_storage_is_itself(tmp_path: Path) -> None:
    inner = LocalStorage(tmp_path)
    before = threading.active_count()
    with bounded(lambda: inner, tmp_path, None, 0) as storage:
        assert storage is inner
        assert threading.active_count() == before


def test_an_operation_returns_and_raises_what_it_does(helpers: Helpers) -> None:
    def fail(call: StorageCall) -> None:
        raise TimeoutError("of the filesystem's own")

    assert helpers.run(StorageCall("adding", lambda _: 1 + 2)) == 3
    with pytest.raises(TimeoutError, match="filesystem's own"):
        helpers.run(StorageCall("failing", fail))
    assert helpers.run(StorageCall("adding", lambda _: 2 + 2)) == 4


def test_no_operation_waits_for_another_to_begin() -> None:
    together = threading.Barrier(8)
    with closing(Helpers(10 * BOUND, 3)) as helpers, ThreadPoolExecutor(together.parties) as pool:
        meet = lambda _: helpers.run(StorageCall("meeting", lambda _: together.wait(PATIENCE)))  # noqa: E731
        assert sorted(pool.map(meet, range(together.parties))) == list(range(together.parties))
    helpers_end()


def test_one_that_takes_too_long_is_given_up_and_so_is_all_after_it(helpers: Helpers) -> None:
    released, late = threading.Event(), list[int]()

    def wait(call: StorageCall) -> int:
        released.wait()
        return 5

    with pytest.raises(CheckpointTimeoutError, match=r"reading /a/b has not returned for 0.8 s on rank 3;") as caught:
        helpers.run(StorageCall("reading /a/b", wait, late.append))
    assert caught.value.missing_ranks == (3,)
    ran = list[int]()
    with pytest.raises(CheckpointTimeoutError, match="reading /a/b has not"):
        helpers.run(StorageCall("another", lambda _: ran.append(1)))
    assert ran == []
    assert late == []
    released.set()
    until(lambda: late)
    assert late == [5]


def test_what_ends_something_is_done_even_then_but_not_waited_for(helpers: Helpers) -> None:
    released, ended = threading.Event(), threading.Event()
    with pytest.raises(CheckpointTimeoutError):
        helpers.run(StorageCall("waiting", lambda _: released.wait()))
    helpers.end_with(StorageCall("ending", lambda _: (released.wait(), ended.set())))
    assert not ended.is_set()
    released.set()
    assert ended.wait(PATIENCE)


class Watched(threading.Event):
    """Tells when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.awaited.set()
        return super().wait(timeout)


def test_what_begins_after_the_end_is_done_as_well(helpers: Helpers) -> None:
    helpers.close()
    assert helpers.run(StorageCall("touching a claim", lambda _: 7)) == 7


def test_others_that_are_under_way_are_given_up_soon_after(helpers: Helpers) -> None:
    released, raised = threading.Event(), list[BaseException]()
    call = StorageCall("another", lambda _: released.wait())
    call.ended = watched = Watched()

    def run() -> None:
        try:
            helpers.run(call)
        except CheckpointTimeoutError as error:
            raised.append(error)

    try:
        helpers.seconds = 1000.0
        other = threading.Thread(target=run)
        other.start()
        assert watched.awaited.wait(PATIENCE)
        helpers.seconds = BOUND
        with pytest.raises(CheckpointTimeoutError, match="reading has not"):
            helpers.run(StorageCall("reading", lambda _: released.wait()))
        other.join(PATIENCE)
        assert ["reading has not" in str(error) for error in raised] == [True]
    finally:
        released.set()


class Interrupted(threading.Event):
    """Whoever waits for it is interrupted the first time, when what is waited for has begun."""

    def __init__(self, begun: threading.Event) -> None:
        super().__init__()
        self.begun, self.interrupted = begun, False

    def wait(self, timeout: float | None = None) -> bool:
        if not self.interrupted:
            self.interrupted = self.begun.wait(PATIENCE)
            raise KeyboardInterrupt
        return super().wait(timeout)


def test_an_interruption_waits_until_what_is_under_way_is_over(helpers: Helpers) -> None:
    """Else who cleans up after it would remove the files of a checkpoint that is committed just then."""
    done, begun = list[int](), threading.Event()
    call = StorageCall("publishing", lambda _: (begun.set(), threading.Event().wait(BOUND / 3), done.append(1)))
    call.ended = Interrupted(begun)
    with pytest.raises(KeyboardInterrupt):
        helpers.run(call)
    assert done == [1]
    begun, released = threading.Event(), threading.Event()
    call = StorageCall("publishing", lambda _: (begun.set(), released.wait()))
    call.ended = Interrupted(begun)
    with pytest.raises(CheckpointTimeoutError, match="publishing"):
        helpers.run(call)
    released.set()


def test_an_interrupt_before_an_operation_has_begun_waits_for_nothing() -> None:
    """It would never return, be given up after the bound, and be called a disk that hangs."""
    for number in itertools.count():
        with closing(Helpers(PATIENCE, 3)) as helpers:
            operation = StorageCall("asking", lambda _: None)
            begun = time.monotonic()
            if not interrupted(number, functools.partial(helpers.run, operation)):
                break
            assert time.monotonic() - begun < PATIENCE / 2
    assert number > 5
    helpers_end()


def test_where_no_thread_can_be_started_operations_run_on_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    helpers = Helpers(BOUND, 0)
    assert helpers.run(StorageCall("asking", lambda _: threading.current_thread())) is threading.current_thread()
    helpers.close()


def hung(folder: Path, operation: str, use: Callable[[Storage], Any]) -> Stall:
    """Use a bounded storage until an operation of its hangs."""
    stall = Stall(operation)
    with (
        bounded(lambda: FaultyStorage(folder, stall), folder, BOUND, 0) as storage,
        pytest.raises(CheckpointTimeoutError),
    ):
        use(storage)
    assert stall.reached.is_set()
    return stall


def test_a_folder_that_cannot_be_looked_at(tmp_path: Path) -> None:
    released = threading.Event()

    def find() -> Storage:
        released.wait()
        return LocalStorage(tmp_path)

    with pytest.raises(CheckpointTimeoutError, match=f"a look at {tmp_path}"), bounded(find, tmp_path, BOUND, 0):
        pass
    released.set()
    helpers_end()


def test_a_file_that_is_made_late_is_removed(tmp_path: Path) -> None:
    stall = hung(tmp_path, "create", lambda storage: storage.create("a"))
    stall.release()
    helpers_end()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("operation", ["write", "sync_file"])
def test_a_file_is_closed_when_what_hangs_has_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    closed = list[str]()

    def write(storage: Storage) -> None:
        file = storage.create("a")
        close = file._inner._inner.close  # type: ignore[attr-defined]
        monkeypatch.setattr(file._inner._inner, "close", lambda: (closed.append("a"), close()))  # type: ignore[attr-defined]
        try:
            file.write(np.zeros(5000, np.uint8), 0)
            file.sync()
        finally:
            file.close()

    stall = hung(tmp_path, operation, write)
    assert closed == [], "its number could be another file's, to which the rest would be written"
    stall.release()
    helpers_end()
    assert closed == ["a"]
    assert (tmp_path / "a").stat().st_size == 5000


def test_a_file_is_closed_when_the_last_of_what_is_under_way_has_returned(helpers: Helpers) -> None:
    """Its number could be another file's by then, which the rest would read or write."""
    closed, begun, released = list[str](), threading.Barrier(3), [threading.Event(), threading.Event()]
    file = _BoundedFile(lambda: closed.append("a"), "a", helpers)

    def work(release: threading.Event) -> None:
        begun.wait(PATIENCE)
        release.wait(PATIENCE)

    threads = [threading.Thread(target=file._do, args=(lambda release=one: work(release),)) for one in released]
    for thread in threads:
        thread.start()
    begun.wait(PATIENCE)
    file.close()
    for thread, release in zip(threads, released, strict=True):
        assert closed == []
        release.set()
        thread.join(PATIENCE)
    assert closed == ["a"]
    with pytest.raises(OSError, match="it is closed: 'a'"):
        file._do(lambda: closed.append("done to another file"))
    assert closed == ["a"]


def test_a_publication_that_is_given_up_before_its_last_step_does_not_happen(tmp_path: Path) -> None:
    stall = hung(tmp_path, "publish", lambda storage: storage.publish("a", b"x", "a.tmp", replace=True))
    stall.release()
    helpers_end()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["best", "."])
def test_only_a_publication_in_the_same_folder_is_waited_for(tmp_path: Path, folder: str) -> None:
    (tmp_path / "best").mkdir()
    unfinished, stall = list[StorageCall](), Stall("publish")

    def publish(storage: Storage) -> bool:
        return storage.publish("a", b"x", "a.tmp", replace=True, confirm=lambda: None)

    with (
        bounded(lambda: LocalStorage(tmp_path / folder), tmp_path, BOUND, 0, unfinished) as storage,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr(local, "rename", lambda source, target: stall("publish", "a"))
        with pytest.raises(CheckpointTimeoutError):
            publish(storage)
    with bounded(lambda: LocalStorage(tmp_path), tmp_path, BOUND, 0, unfinished) as storage:
        if folder == ".":
            with pytest.raises(CheckpointTimeoutError):
                publish(storage)
        else:
            assert publish(storage)
    stall.release()
    for seconds in (BOUND, None):  # and without a bound it is waited for as well
        with bounded(lambda: LocalStorage(tmp_path), tmp_path, seconds, 0, list(unfinished)) as storage:
            assert publish(storage)
    helpers_end()


def test_a_confirmation_has_a_bound_of_its_own(tmp_path: Path) -> None:
    """What it asks for may take as long as any operation; the publication does not hang meanwhile."""
    bound = 2 * BOUND
    with bounded(lambda: LocalStorage(tmp_path), tmp_path, bound, 0) as storage:
        confirm = lambda: [threading.Event().wait(bound * 0.7) for _ in range(2)]  # noqa: E731
        assert storage.publish("a", b"x", "a.tmp", replace=True, confirm=confirm)
    stall = hung(tmp_path, "names", lambda storage: storage.publish("b", b"x", "b.tmp", True, storage.names))
    stall.release()
    helpers_end()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_publication_hangs_after_a_confirmation_that_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk dies at what the confirmation asks for, so the clean-up of the publication does not return either."""
    stall, released, remove = Stall("names"), threading.Event(), local._remove_temporary

    def remove_temporary(path: Path) -> None:
        released.wait()
        remove(path)

    monkeypatch.setattr(local, "_remove_temporary", remove_temporary)
    errors: list[BaseException] = []

    def publish() -> None:
        with bounded(lambda: FaultyStorage(tmp_path, stall), tmp_path, BOUND, 0) as storage:
            try:
                storage.publish("a", b"x", "a.tmp", True, storage.names)
            except CheckpointTimeoutError as error:
                errors.append(error)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert "listing" in str(errors[0])
    stall.release()
    released.set()
    helpers_end()
    assert list(tmp_path.iterdir()) == []


def test_what_was_read_counts_though_the_file_cannot_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    released = threading.Event()
    with bounded(lambda: LocalStorage(tmp_path), tmp_path, BOUND, 0) as storage:
        file = storage.open("a")
        close = file._inner.close  # type: ignore[attr-defined]
        monkeypatch.setattr(file, "_close", lambda: (released.wait(), close()))
        data = np.empty(3, np.uint8)
        file.read_into([data], 0)
        file.close()
        with pytest.raises(CheckpointTimeoutError, match="closing"):
            storage.names()
    released.set()
    helpers_end()
    assert data.tobytes() == b"abc"


def test_a_large_file_is_synced_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the last fsync would have to wait for all of it."""
    monkeypatch.setattr("paddle_dist_ckpt.storage.bounding._SYNC_EVERY", 10000)
    operations = list[str]()
    storage = FaultyStorage(tmp_path, lambda operation, name: operations.append(operation))
    with bounded(lambda: storage, tmp_path, PATIENCE, 0) as inner:
        file = inner.create("a")
        for i in range(7):
            file.write(np.zeros(4000, np.uint8), 4000 * i)
        file.sync()
        file.close()
    assert "".join(operation[0] for operation in operations) == "cwwwswwwsws"
    assert HELPER not in {thread.name for thread in threading.enumerate()} or helpers_end() is None


def test_what_is_large_is_read_and_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.storage.bounding._MOST", 4096)
    operations = list[str]()
    inner = FaultyStorage(tmp_path, lambda operation, name: operations.append(operation))
    data = np.arange(10000).astype(np.uint8)
    parts = [np.zeros(size, np.uint8) for size in (0, 100, 4096, 5703)]
    with bounded(lambda: inner, tmp_path, PATIENCE, 0) as storage:
        file = storage.create("a")
        file.write(data, 1)
        file.write(data[:0], 1)
        file.close()
        opened = storage.open("a")
        opened.read_into(parts, 102)
        opened.read_into([], 0)
        opened.close()
    assert operations.count("write") == 3
    assert operations.count("read_into") == 1 + 1 + 2 + 1
    assert np.concatenate(parts).tolist() == data[101:].tolist()


_ENDS = """
import os, sys, threading
import numpy as np
from paddle_dist_ckpt import SaveOptions, CheckpointTimeoutError
from paddle_dist_ckpt.control import NoTransport, SoloHub
from paddle_dist_ckpt.testing import SimulatedRank

def hang(descriptor):
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
        threading.Event().wait()

os.fsync = hang
options = SaveOptions(progress_timeout=0.5)
state = {"w": np.arange(1000)}
rank = SimulatedRank(0, (0,), SoloHub(), NoTransport())
try:
    rank.save(state, sys.argv[1] + "/a", None, options)
except CheckpointTimeoutError:
    rank.save_in_background(state, sys.argv[1] + "/b", None, options)
print("the main thread ends")
"""


def test_a_process_ends_though_something_of_it_hangs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS, tmp_path], cwd=Path(__file__).parents[2], timeout=PATIENCE, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"the main thread ends" in done.stdout
    assert f"the background save to {tmp_path}/b failed: fsync of {tmp_path}/b/0_0." in done.stderr.decode()


def test_a_file_that_is_closed_is_not_used_any_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    with bounded(lambda: LocalStorage(tmp_path), tmp_path, PATIENCE, 0) as storage:
        file = storage.open("file")
        file.close()
        with pytest.raises(OSError, match=r"it is closed: .*/file") as caught:
            file.read_into([np.empty(4, np.uint8)], 0)
        assert caught.value.errno == errno.EBADF
    helpers_end()
