"""Loads from disks that hang: every rank is told in time, and what comes late goes nowhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointTimeoutError,
    CollectiveError,
    LoadOptions,
    RankFailureError,
    copy_checkpoint,
    list_checkpoints,
    verify,
)
from paddle_dist_ckpt.core.memory import address_of
from paddle_dist_ckpt.core.protocols import Transport
from paddle_dist_ckpt.folder.selection import Selection
from paddle_dist_ckpt.loading import exchange
from paddle_dist_ckpt.loading.in_flight import note_in_flight
from paddle_dist_ckpt.loading.merged import load_merged
from paddle_dist_ckpt.testing import FaultyStorage, NumpyAdapter, SimulatedRank, Stall, run_ranks
from paddle_dist_ckpt.testing.faults import FaultyTransport
from paddle_dist_ckpt.wiring import source_of
from test.background import SHAPE, versions
from test.jobs import (
    age,
    blank_like,
    errors_of,
    load_alone,
    load_on,
    save_alone,
    save_on,
    split_rows,
    try_load,
)
from test.stalls import BOUND, all_at_once, check_error, hanging, helpers_end
from test.waiting import PATIENCE, until

RANKS = 3
GOLDEN = Path(__file__).parents[1] / "golden"
OPTIONS = LoadOptions(timeout=60, progress_timeout=BOUND)


def targets(ranks: int) -> list[dict[str, Any]]:
    """What is filled, without what is stored."""
    array = np.zeros(SHAPE, np.int64)
    cut = split_rows(array, ranks, fill=False)
    return [{"cut": cut[r], "plain": blank_like(np.zeros(50, np.int64)), "n": 0, "text": None} for r in range(ranks)]


def contents(state: dict[str, Any]) -> list[bytes]:
    return [*(piece.tobytes() for piece in state["cut"].pieces), state["plain"].tobytes()]


ANY_RANK = [("open", "safetensors", "opening"), ("read_into", "safetensors", "a read of")]
COORDINATOR = [("names", "", "listing"), ("read", ".metadata", "reading")]


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_a_load_that_hangs_anywhere_ends_on_every_rank(tmp_path: Path, ranks: int) -> None:
    save_on(versions(1, ranks), tmp_path)
    cases = [(0, *case) for case in ANY_RANK + COORDINATOR] + [(1, *case) for case in ANY_RANK if ranks > 1]
    before, stalls, filled = contents(targets(ranks)[0]), list[Stall](), list[dict[str, Any]]()

    def check(victim: int, operation: str, at: str, doing: str) -> None:
        stall, states = Stall(operation, at), targets(ranks)
        results = try_load(states, hanging(tmp_path, stall, victim, ranks), None, OPTIONS)
        check_error(results, victim, doing, at or str(tmp_path))
        stalls.append(stall)
        filled.append(states[victim])

    all_at_once(cases, check)
    after = [contents(state) for state in filled]
    assert all(len(content) == len(before) for content in after)
    for stall in stalls:
        stall.release()
    helpers_end()
    assert [contents(state) for state in filled] == after, "a late read has come into memory that is the caller's"
    states = targets(ranks)
    load_on(states, tmp_path, None, OPTIONS)
    assert all(state["n"] == 1 and (state["plain"] == 1).all() for state in states)


def test_a_late_read_of_data_comes_into_no_tensor(tmp_path: Path) -> None:
    """Of what is read straight into tensors otherwise: their memory may have another use by then."""
    save_alone({"w": np.arange(1 << 17)}, tmp_path)
    reads = []

    def hook(operation: str, name: str) -> None:
        reads.extend([name] if operation == "read_into" else [])
        if len(reads) == 3:  # after the parts of the header
            stall(operation, name)

    stall, target = Stall("read_into"), {"w": np.full(1 << 17, -1)}
    with pytest.raises(CheckpointTimeoutError, match="a read of"):
        load_alone(target, FaultyStorage(tmp_path, hook), None, OPTIONS)
    assert stall.reached.is_set()
    untouched = target["w"].copy()
    assert (untouched == -1).any()
    stall.release()
    helpers_end()
    assert (target["w"] == untouched).all()


def test_a_load_with_exchange_that_hangs(tmp_path: Path) -> None:
    save_on(versions(1, RANKS), tmp_path)
    options = LoadOptions(timeout=60, progress_timeout=BOUND, exchange="always")
    cases = [(victim, *case) for victim in (0, 1) for case in ANY_RANK]
    stalls = []

    def check(victim: int, operation: str, at: str, doing: str) -> None:
        stall = Stall(operation, at)
        stalls.append(stall)
        check_error(try_load(targets(RANKS), hanging(tmp_path, stall, victim, RANKS), None, options), victim, doing, at)

    try:
        all_at_once(cases, check)
    finally:
        for stall in stalls:
            stall.release()
    helpers_end()


def test_a_read_that_hangs_in_an_exchange_that_was_given_up_is_waited_for_by_later_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes straight into a tensor, so that no load fills that one meanwhile."""
    monkeypatch.setattr(exchange, "_LONGEST_READ", 0.01)
    array = np.arange(1 << 17)
    save_alone({"w": array}, tmp_path)
    states, stall, reads = [{"w": np.full(1 << 17, -1)} for _ in range(2)], Stall("read_into"), list[str]()

    def hook(operation: str, name: str) -> None:
        reads.extend([name] if operation == "read_into" else [])
        if len(reads) == 3:  # after the parts of the header
            stall(operation, name)

    class Breaking(FaultyTransport):
        def broadcast(self, *args: Any) -> None:
            assert stall.reached.wait(PATIENCE)
            raise OSError("broken")

    def work(rank: SimulatedRank) -> Any:
        options = LoadOptions(timeout=60, exchange="always")
        return rank.load(states[rank.rank], FaultyStorage(tmp_path, hook) if rank.rank else tmp_path, options=options)

    def over(transport: Transport, rank: int) -> Transport:
        return transport if rank else Breaking(transport, lambda *_: None)

    try:
        for error in errors_of(run_ranks(2, work, over=over), RankFailureError):
            assert "broken" in str(error)
        with pytest.raises(CollectiveError, match="given up may still write to w"):
            load_alone(states[1], tmp_path)
    finally:
        stall.release()
    until(lambda: not any(thread.name == "paddle_dist_ckpt collectives" for thread in threading.enumerate()))
    load_alone(states[1], tmp_path)
    assert (states[1]["w"] == array).all()


def test_memory_that_may_be_written_to_is_known_though_what_begins_later_ends_sooner(tmp_path: Path) -> None:
    memory, over = np.zeros(120, np.uint8), threading.Event()
    array = memory[20:]
    save_alone({"w": np.arange(10, dtype=np.uint8)}, tmp_path)
    first, last = address_of(array) + np.array([10, 0]), address_of(array) + np.array([20, 60])
    note_in_flight(first, last, lambda: not over.is_set())
    for part in (array[:10], array[15:25], array[45:55], array[55:65]):
        with pytest.raises(CollectiveError, match="given up may still write to w"):
            load_alone({"w": part}, tmp_path)
    load_alone({"w": array[60:70]}, tmp_path)
    load_alone({"w": memory[10:20]}, tmp_path)
    over.set()
    load_alone({"w": array[45:55]}, tmp_path)
    assert memory.nonzero()[0].tolist() == [*range(11, 20), *range(66, 75), *range(81, 90)]


def merged(path: Any) -> Any:
    """A load of everything into one process."""
    with source_of(path, OPTIONS) as storage:
        return load_merged(storage, NumpyAdapter(), None, Selection(), False, OPTIONS)


def calls(folder: Path, golden: Path) -> list[tuple[str, Callable[[Any], Any], Path]]:
    """Calls without other ranks, the operation that hangs in each, and the folder."""
    return [
        ("read_into", merged, folder),
        ("size", merged, folder),
        ("read_into", merged, golden / "hf-safetensors"),
        ("read_into", merged, golden / "paddle-3.3.1"),
        ("names", merged, golden / "torch-dcp-2.13"),
        ("read_into", lambda path: verify(path, options=OPTIONS), folder),
        ("read_into", lambda path: copy_checkpoint(path, folder / "copy", options=OPTIONS), folder),
        ("write", lambda path: copy_checkpoint(folder, path, options=OPTIONS), folder / "hangs"),
        ("publish", lambda path: copy_checkpoint(folder, path, options=OPTIONS), folder / "hangs at publish"),
    ]


def test_calls_without_other_ranks_that_hang(tmp_path: Path) -> None:
    """Loads of whole checkpoints of any format, and what verifies and copies."""
    save_alone(*versions(1, 1), tmp_path)
    stalls = []

    def check(operation: str, call: Callable[[Any], Any], folder: Path) -> None:
        stall = Stall(operation)
        stalls.append(stall)
        with pytest.raises(CheckpointTimeoutError, match="on rank 0"):
            call(FaultyStorage(folder, stall))

    try:
        all_at_once(calls(tmp_path, GOLDEN), check)
    finally:
        for stall in stalls:
            stall.release()
    helpers_end()
    assert not list((tmp_path / "copy").iterdir()), "the other folder answers"
    assert list_checkpoints(tmp_path / "hangs") == []
    for path in (tmp_path / "hangs").iterdir():
        age(path)
    assert copy_checkpoint(tmp_path, tmp_path / "hangs").unique_id == 0
