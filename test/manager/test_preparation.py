"""Memory for the first save in the background is there before it; nobody else gets any."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import CheckpointManager, SaveOptions, load_state_dict
from paddle_dist_ckpt.control.ranks import Ranks
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.manager import manager as manager_module
from paddle_dist_ckpt.saving import preparing, save_memory
from paddle_dist_ckpt.saving.preparing import Touching, snapshot_bytes_of
from paddle_dist_ckpt.saving.save_memory import SaveMemory
from paddle_dist_ckpt.saving.turn import Ticket
from paddle_dist_ckpt.testing import NumpyAdapter, shard_array

STATE = {"x": np.arange(100_000.0), "y": {"z": np.ones(10, "int32")}, "n": 1}
NBYTES = 100_000 * 8 + 40


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """A rank that works alone, and has saved nothing yet."""
    alone = Ranks.alone()
    monkeypatch.setattr(manager_module, "connected", lambda *_: alone)
    return alone


def prepared(ranks: Ranks) -> int:
    """How much memory there is for a snapshot."""
    memory = ranks.memory.get("save")
    return 0 if memory is None else len(memory._buffer)


def test_restored_states_are_prepared_for_when_training_begins(tmp_path: Path, ranks: Ranks) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=2) as steps:
        steps.save(0, STATE)
    ranks.memory.clear()
    with CheckpointManager(tmp_path, save_interval_steps=2) as steps:
        assert steps.restore(STATE) == 0
        assert prepared(ranks) == 0, "one that only restores needs none"
        assert not steps.should_save(1)
        assert NBYTES <= prepared(ranks) < 1.1 * NBYTES + 4096
        before = ranks.memory["save"]._buffer
        ranks.memory["save"]._touching.join()
        steps.save(2, STATE)
        assert ranks.memory["save"]._buffer is before


def test_a_new_job_is_prepared_for_too(tmp_path: Path, ranks: Ranks) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=2) as steps:
        assert steps.restore(STATE) is None
        assert not steps.should_save(1)
        assert NBYTES <= prepared(ranks) < 1.1 * NBYTES + 4096


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_memory_is_touched_also_where_training_leaves_no_core_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    lower = preparing.lower_priority

    def lowered(nice: int) -> None:
        lower(nice)
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    monkeypatch.setattr(preparing, "lower_priority", lowered)
    touching = Touching(np.zeros(1, np.uint8))
    touching.start()
    touching.join()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert found == [max(own, 10)], "neither as an equal, nor as what hardly ever runs"


def test_what_numpy_loads_late_is_there_before_the_first_plan() -> None:
    code = """
import sys, numpy as np
from paddle_dist_ckpt.saving.preparing import Touching
touching = Touching(np.zeros(1, np.uint8))
assert "numpy.ma" not in sys.modules or np.__version__ < "2"  # numpy 1 imports it with the rest
touching.start()
touching.join()
assert "numpy.ma" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_state_is_prepared_for_when_asked(tmp_path: Path, ranks: Ranks) -> None:
    with CheckpointManager(tmp_path) as steps:
        steps.prepare(STATE)
        assert prepared(ranks) >= NBYTES
        ranks.memory["save"]._touching.join()
        steps.save(1, STATE)
    target: dict[str, Any] = {"x": np.zeros(100_000)}
    load_state_dict(target, tmp_path / "step-00000001")
    assert np.array_equal(target["x"], STATE["x"])


@pytest.mark.parametrize(
    ("async_save", "bound", "state", "most"),
    [
        (False, None, STATE, 0),
        (True, 0, STATE, 0),
        (True, 8192, STATE, 8192),
        (True, None, {"n": 1}, 0),
        (True, None, {"x": np.zeros(3), "odd": object()}, 0),
    ],
    ids=["not in the background", "no memory", "bound", "no tensors", "cannot be saved"],
)
def test_no_more_is_prepared_than_will_be_used(
    tmp_path: Path, ranks: Ranks, async_save: bool, bound: int | None, state: Any, most: int
) -> None:
    with CheckpointManager(tmp_path, async_save=async_save, options=SaveOptions(snapshot_bytes=bound)) as steps:
        steps.prepare(state)
    assert prepared(ranks) == most


def test_what_all_ranks_have_is_divided_among_them() -> None:
    array = np.zeros((40, 100))
    state = {"whole": array, "part": shard_array(array, [Box((0, 0), (10, 100))])}
    found = snapshot_bytes_of(lambda: (state, NumpyAdapter()), 0, 4, None)
    assert found == pytest.approx(2 * array.nbytes / 4, rel=0.05)


def test_a_host_without_room_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SaveMemory()
    monkeypatch.setattr(save_memory, "free_memory", lambda: 2 * NBYTES - 1)
    assert memory.prepare_snapshot(NBYTES) is None
    monkeypatch.setattr(save_memory, "free_memory", lambda: None)
    assert memory.prepare_snapshot(1 << 60) is None
    assert len(memory._buffer) == 0
    with memory.turn.taken(Ticket(), may_wait=False):
        assert memory.prepare_snapshot(NBYTES) is None, "a save has the turn"
    touching = memory.prepare_snapshot(NBYTES)
    assert touching is not None
    touching.join()
    assert memory.prepare_snapshot(NBYTES) is None, "it is there"


def test_nothing_writes_to_memory_that_a_save_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_AT_ONCE", 4096)
    memory = np.full(1 << 20, 7, np.uint8)
    touching = Touching(memory)
    touching.end()
    touching.start()
    touching.join()
    assert (memory == 7).all()
    touching = Touching(memory)
    touching.start()
    touching.join()
    assert (memory[::4096] == 0).all()

    kept = SaveMemory()
    begun = kept.prepare_snapshot(1 << 22)
    assert begun is not None
    buffer = kept.snapshot_buffer(1 << 22)
    buffer[:] = 9
    begun.join()
    assert (buffer == 9).all()
    assert kept._touching is None


def test_ranks_of_a_host_leave_memory_to_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds twice what it needs, before the others have touched theirs; a page takes one of what is free."""
    monkeypatch.setattr(preparing, "_AT_ONCE", 4096)
    ranks, each = [SaveMemory() for _ in range(4)], 256 * 4096
    threads: list[Touching] = []
    free = [2 * each]
    monkeypatch.setattr(save_memory, "free_memory", lambda: free[0] - sum(one.touched for one in threads))
    with monkeypatch.context() as patch:
        patch.setattr(Touching, "start", lambda touching: threads.append(touching))
        assert all(memory.prepare_snapshot(each) is not None for memory in ranks)
    for touching in threads:
        touching.start()
    for touching in threads:
        touching.join()
    taken = sum(touching.touched for touching in threads)
    assert each <= taken <= each + len(ranks) * 4096
    assert sum(memory.snapshot_room(each, len(ranks)) for memory in ranks) < 2 * each, "not what is not there yet"


def test_of_memory_that_is_not_touched_yet_only_what_is_used_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [4 << 20]
    monkeypatch.setattr(save_memory, "free_memory", lambda: free[0])
    monkeypatch.setattr(preparing, "at_exit", lambda: True)  # so the thread does not begin
    memory = SaveMemory()
    assert memory.prepare_snapshot(2 << 20) is not None
    free[0] = 1 << 20
    room = memory.snapshot_room(2 << 20, 1)
    assert room == int(0.9 * (1 << 20))
    memory.snapshot_buffer(room)
    free[0] = 0
    assert memory.snapshot_room(2 << 20, 1) == room
