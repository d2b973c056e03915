"""What a save that has failed raises: what names the folder, or an error of the system as it was raised."""

from __future__ import annotations

import errno
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paddle_dist_ckpt import delete_checkpoint
from paddle_dist_ckpt.core.protocols import ControlSession
from paddle_dist_ckpt.errors import CheckpointError, RankFailureError
from paddle_dist_ckpt.files.writer import FileSave
from paddle_dist_ckpt.folder import commit
from paddle_dist_ckpt.saving.messages import WriteRequest
from paddle_dist_ckpt.saving.rank_files import RankFiles
from paddle_dist_ckpt.testing import FaultyStorage, SimulatedRank, run_ranks
from test.hooks import raises
from test.jobs import (
    Killed,
    all_ok,
    errors_of,
    everything,
    files_in,
    make_array,
    save_alone,
    sharded,
    split_rows,
    try_save,
)
from test.waiting import PATIENCE, until


def fail_with(error: Exception, patch: pytest.MonkeyPatch) -> None:
    """Have every save fail where files are written."""

    def fail(*_: object) -> None:
        raise error

    patch.setattr(FileSave, "finish", fail)


@pytest.mark.parametrize("raised", [OSError("(External) copy failed"), RuntimeError("(External) copy failed")])
def test_what_a_device_raises_is_said_of_the_folder(
    tmp_path: Path, raised: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(raised, monkeypatch)
    with pytest.raises(CheckpointError) as caught:
        save_alone({"w": make_array((30, 7))}, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "copy failed" in str(caught.value)
    assert caught.value.__cause__ is raised
    assert not list(tmp_path.glob("*.metadata"))


@pytest.mark.parametrize(
    "raised",
    [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken", "x"), MemoryError("no room"), TypeError("odd")],
)
def test_what_says_more_is_raised_as_it_is(tmp_path: Path, raised: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(raised, monkeypatch)
    with pytest.raises(type(raised)) as caught:
        save_alone({"w": make_array((30, 7))}, tmp_path)
    assert caught.value is raised


@pytest.mark.parametrize("raised", [OSError("(External) copy failed"), OSError(errno.EIO, "broken"), MemoryError("no")])
def test_on_several_ranks_each_has_its_own(tmp_path: Path, raised: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(raised, monkeypatch)
    results = try_save([{"w": part} for part in split_rows(make_array((30, 7)), 2)], tmp_path)
    for rank, error in enumerate(results):
        assert isinstance(error, RankFailureError)
        own = error.failures[rank]
        if "External" in str(raised):
            assert str(tmp_path) in str(error)
            own = own.__cause__
        assert own is raised


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entries": [0]}, "rank 1 wrote 0 shards of [0-9]+ bytes; 1 of [0-9]+ bytes were planned"),
        ({"nbytes": 1}, "rank 1 wrote 1 shards of 1 bytes; 1 of [0-9]+ bytes were planned"),
        ({"copied": b""}, "ranks sent digests of 1 boxes and 2 copies; 2 and 2 were planned"),
        ({"copies": b""}, "ranks sent digests of 2 boxes and 1 copies; 2 and 2 were planned"),
    ],
)
def test_nothing_is_committed_if_a_rank_has_done_something_else_than_was_planned(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RankFiles._write

    def write_otherwise(self: RankFiles) -> WriteRequest:
        written = write(self)
        return msgspec.structs.replace(written, **changes) if self._context.session.rank == 1 else written

    monkeypatch.setattr(RankFiles, "_write", write_otherwise)
    both = [make_array((20, 7)), make_array((20, 8))]  # each written by one rank, and compared with the other's copy
    states = [{str(i): sharded(array, everything(array)) for i, array in enumerate(both)} for _ in range(2)]
    for error in errors_of(try_save(states, tmp_path), RankFailureError):
        assert re.search(message, str(error))
    assert not list(tmp_path.glob("*.metadata"))


def _has_failed(session: ControlSession) -> bool:
    try:
        session.check()
    except CheckpointError:
        return True
    return False


def test_files_that_nobody_will_hear_of_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has written its files, to a folder of its own, when the others have given up already."""
    write, all_written = RankFiles._write, threading.Event()

    def write_late(self: RankFiles) -> WriteRequest:
        if self._context.session.rank == 0:
            assert all_written.wait(PATIENCE)
            raise Killed
        written = write(self)
        all_written.set()
        until(lambda: _has_failed(self._context.session))
        return written

    monkeypatch.setattr(RankFiles, "_write", write_late)
    folders = [tmp_path / str(rank) for rank in range(2)]
    first, second = try_save([{"w": part} for part in split_rows(make_array((30, 7)), 2)], folders)
    assert isinstance(first, Killed)
    assert isinstance(second, CheckpointError)
    assert not files_in(folders[1])


def test_memory_that_is_short_when_a_save_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hides neither why that was, nor from the next save that its files are left."""
    broken = [True]
    remove_saves = commit.remove_saves

    def fail(*arguments: Any) -> None:
        if broken:
            raise MemoryError("Unable to allocate 3.1 GiB")
        remove_saves(*arguments)

    monkeypatch.setattr(commit, "remove_saves", fail)
    storage = FaultyStorage(tmp_path, raises("sync", "*", errno.EIO, lambda: broken))

    def work(rank: SimulatedRank) -> Any:
        with pytest.raises(RankFailureError, match="Input/output error"):
            rank.save({"n": 1}, storage, 0)
        broken.clear()
        return rank.save({"n": 2}, storage, 0)

    all_ok(run_ranks(1, work))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".metadata", ".safetensors"]


@pytest.mark.parametrize("operation", ["create", "write", "sync_file", "sync"])
def test_an_interrupted_save_of_one_process_is_in_nobodys_way(tmp_path: Path, operation: str) -> None:
    """A deletion, or a copy to the folder, would be refused as long as its claim counts."""
    save_alone({"w": make_array((30, 7))}, tmp_path, 0)
    there = files_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        save_alone({"w": make_array((30, 7))}, FaultyStorage(tmp_path, raises(operation, "*", KeyboardInterrupt())), 1)
    assert files_in(tmp_path) == there
    delete_checkpoint(tmp_path, 0)
    assert not list(tmp_path.iterdir())
