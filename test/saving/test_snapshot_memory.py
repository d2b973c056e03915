"""The memory that a save in the background copies to: how much it is, and when it is used again."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.memory import address_of
from paddle_dist_ckpt.files.contents import WINDOW_BYTES
from paddle_dist_ckpt.saving.save_memory import SaveMemory
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing import SimulatedRank, shard_array
from test.background import LONG, error_of, failing, in_background, job, options, versions
from test.jobs import load_whole, make_array, same_bits
from test.waiting import until


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
        pending = rank.save_in_background(
            state, written.storage(tmp_path), None, options(snapshot_bytes=bound, block_bytes=1 << 20)
        )
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


@pytest.mark.parametrize("bound", [None, 1 << 40, 3 * WINDOW_BYTES])
def test_a_snapshot_takes_no_more_than_the_host_can_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bound: int | None
) -> None:
    """Two ranks of a host that has free memory for a copy of half of what they write."""
    each, free = 8 * WINDOW_BYTES, 8 * WINDOW_BYTES + 4
    room = int(0.9 * free / 2) if bound is None else min(bound, each)
    monkeypatch.setattr("paddle_dist_ckpt.saving.save_memory.free_memory", lambda: free)
    rows = each // 1024
    array, written = make_array((2 * rows, 1024), "uint8", 5), Written()

    def work(rank: SimulatedRank) -> None:
        state = {"w": shard_array(array, [Box((rank.rank * rows, 0), (rows, 1024))])}
        pending = rank.save_in_background(state, written.storage(tmp_path), 0, options(snapshot_bytes=bound))
        assert len(rank.memory._buffer) <= -(-room // WINDOW_BYTES) * WINDOW_BYTES
        state["w"].pieces[0][...] = 0
        pending.result(LONG)

    job(2, work)
    assert 2 * (room - WINDOW_BYTES) < written.later <= 2 * room
    assert same_bits(load_whole(tmp_path)["w"], array)
    said = [record.getMessage() for record in caplog.records if "has no room" in record.getMessage()]
    assert len(said) == (2 if bound is None else 0), "a bound is what the user wants, whatever the host says"
    for line in said:
        assert f": of {each:,} bytes that are saved in the background, {each - room:,} are written before" in line
        assert line.endswith("the memory that is free for the ranks of this host (2)")


def test_that_a_snapshot_has_no_room_is_said_again_only_if_there_is_much_less_or_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size, clock = 1 << 20, [1000.0]
    monkeypatch.setattr("paddle_dist_ckpt.saving.save_memory.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(SaveMemory, "snapshot_room", lambda memory, nbytes, ranks: int(size * room[0]))
    room = [1.0]

    def work(rank: SimulatedRank) -> list[int]:
        said = []
        for seconds, share in [(0, 1), (0, 0.5), (9, 0.5), (9, 0.41), (9, 0.9), (9, 1), (9, 0.5), (9, 0.39), (9, 0.3)]:
            clock[0] += seconds
            room[0] = share
            caplog.clear()
            rank.save_in_background({"w": np.zeros(size, "uint8")}, tmp_path, 0, options()).result(LONG)
            said.append(sum("has no room" in line for line in caplog.messages))
        clock[0] += 600
        rank.save_in_background({"w": np.zeros(size, "uint8")}, tmp_path, 0, options()).result(LONG)
        return [*said, sum("has no room" in line for line in caplog.messages)]

    assert job(1, work) == [[0, 1, 0, 0, 0, 0, 0, 1, 0, 1]]


def test_the_memory_that_is_kept_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, asked = SaveMemory(), []

    def room(free: int | None, nbytes: int, ranks: int) -> int:
        monkeypatch.setattr("paddle_dist_ckpt.saving.save_memory.free_memory", lambda: asked.append(free) or free)
        return memory.snapshot_room(nbytes, ranks)

    assert room(None, 1 << 50, 4) == 1 << 50
    assert [room(400, 80, 4), room(400, 91, 4)] == [80, 90]
    memory.snapshot_buffer(8 << 20)
    assert room(0, 9 << 20, 1) == 8 << 20, "what is there is used"
    assert room(64 << 20, 64 << 20, 2) == int(0.9 * (40 << 20))
    assert room(1 << 20, 10 << 20, 1) == 8 << 20, "for a little more, all pages would be made anew"
    assert room(2 << 20, 9 << 20, 1) == 9 << 20, "unless all of it has room"
    assert room(4 << 20, 20 << 20, 1) == int(0.9 * (12 << 20))
    asked.clear()
    assert room(0, 8 << 20, 8) == 8 << 20
    assert not asked, "there is enough"


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


def test_nothing_leaks_in_fifty_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def work(rank: SimulatedRank) -> None:
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
                before = counts()
        until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)), what="an end of threads")

    job(1, work)
