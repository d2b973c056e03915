"""Exchanges that are planned part by part: the same comes of them, and what they take does not grow with the shards."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.control.verified import VerifiedTransfers
from paddle_dist_ckpt.core.columns import all_of
from paddle_dist_ckpt.errors import (
    CheckpointCorruptedError,
    CheckpointReplacedError,
    CollectiveError,
    RankFailureError,
)
from paddle_dist_ckpt.loading import exchange, exchange_parts, exchange_planner
from paddle_dist_ckpt.loading.exchange_orders import ExchangeAnswer, ShardNeeds
from paddle_dist_ckpt.options import LoadOptions
from test.jobs import (
    alike,
    check_pieces,
    data_files,
    errors_of,
    everything,
    load_on,
    make_array,
    replaced_bytes,
    rows_of,
    save_on,
    sharded,
    try_load,
)
from test.torture.budgets import cost_of
from test.torture.crafting import Entry, write_checkpoint
from test.waiting import PATIENCE

ALWAYS = LoadOptions(exchange="always", timeout=60)
_LARGE = 3 << 20  # bytes, which is more than a block


class Seen:
    """The parts of the exchanges of a test: the needs that were planned in each, by rank, and where each ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.parts: list[list[list[int]]] = []
        self.ends: list[int] = []
        monkeypatch.setattr(exchange_parts, "_MOST_NEEDS", most)
        monkeypatch.setattr(exchange_parts, "_LEAST_NEEDS", 1)
        real = exchange_planner._AllNeeds.joined

        def joined(metadata: Any, messages: Sequence[ShardNeeds], end: int) -> Any:
            self.ends.append(end)
            self.parts.append([all_of(one.shard).tolist() for one in messages])
            found = real(metadata, messages, end)
            assert (found.shard < (end or len(metadata.table.shard_file))).all(), "others are planned in the next part"
            return found

        monkeypatch.setattr(exchange_planner._AllNeeds, "joined", joined)

    def check(self, most: int, ranks: int) -> None:
        """See that no rank said more than it may, but for needs of a single shard."""
        for part in self.parts:
            for shards in part:
                assert len(shards) <= max(1, most // ranks) or len(set(shards)) == 1


def state_of(rank: int, ranks: int, fill: bool, keys: Sequence[str]) -> dict[str, Any]:
    """What a rank has of some tensors: cut along rows, along columns, large, plain; and of a large value."""
    made = {f"rows{i}": make_array((24 + i, 10), seed=i) for i in range(6)}
    state: dict[str, Any] = {
        key: sharded(array, [rows_of(array.shape, rank, ranks, i % 2)], fill=fill)
        for i, (key, array) in enumerate(made.items())
    }
    large = make_array((_LARGE // 256, 64), seed=7)
    state["large"] = sharded(large, [rows_of(large.shape, rank, ranks)], fill=fill)
    state["plain"] = make_array((40,), "int64", 8) if fill else np.zeros(40, np.int64)
    state["text"] = "long " * 30_000 if fill else None
    return {key: value for key, value in state.items() if key in keys}


KEYS = [*(f"rows{i}" for i in range(6)), "large", "plain", "text"]


def check(states: Sequence[dict[str, Any]]) -> None:
    """See that states have what was saved."""
    whole = state_of(0, 1, True, KEYS)
    for state in states:
        for key, found in state.items():
            if hasattr(found, "pieces"):
                check_pieces(found, whole[key].pieces[0])
            else:
                assert alike(found, whole[key]), key


@pytest.mark.parametrize("most", [1, 5, 17, 1000])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 3), (3, 2), (4, 4)])
def test_parts_of_any_size_bring_what_was_saved(
    tmp_path: Path, saved_on: int, loaded_on: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_on([state_of(rank, saved_on, True, KEYS) for rank in range(saved_on)], tmp_path)
    seen = Seen(monkeypatch, most)
    states = [state_of(rank, loaded_on, False, KEYS) for rank in range(loaded_on)]
    load_on(states, tmp_path, options=ALWAYS)
    check(states)
    seen.check(most, loaded_on)
    passes = seen.ends.count(0)
    assert passes == 2, "the large value is looked at before it is used"
    assert (len(seen.ends) > passes) == (most < 1000)


@pytest.mark.parametrize("most", [1, 4, 1000])
def test_ranks_that_want_different_tensors(tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count shards otherwise than the coordinator, who has those of all; and some are through sooner."""
    save_on([state_of(rank, 3, True, KEYS) for rank in range(3)], tmp_path)
    seen = Seen(monkeypatch, most)
    wanted = [["rows3", "rows5"], ["plain", "rows0", "text", "large"], ["rows1", "rows2", "rows4"], []]
    states = [state_of(0, 1, False, keys) for keys in wanted]
    load_on(states, tmp_path, options=ALWAYS)
    check(states)
    seen.check(most, 4)


def test_no_part_takes_what_another_has_left_in_memory_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is delivered is checked with a nonce, another one for each part and each pass, the same on all ranks."""
    save_on([state_of(rank, 2, True, KEYS) for rank in range(2)], tmp_path)
    seen, nonces = Seen(monkeypatch, 4), Counter[str]()
    real = VerifiedTransfers.__init__

    def noted(self: VerifiedTransfers, operations: Any, rank: int, nonce: str) -> None:
        nonces[nonce] += 1
        real(self, operations, rank, nonce)

    monkeypatch.setattr(VerifiedTransfers, "__init__", noted)
    load_on([state_of(rank, 2, False, KEYS) for rank in range(2)], tmp_path, options=ALWAYS)
    assert set(nonces.values()) == {2}
    assert len(nonces) >= len(seen.ends) > 3


def test_many_needs_of_one_shard_are_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = make_array((64, 8))
    save_on([{"a": sharded(array, everything(array)), "b": array}, {}], tmp_path)
    seen = Seen(monkeypatch, 4)
    states = [{"a": sharded(array, [rows_of(array.shape, i, 32) for i in range(32)], fill=False)} for _ in range(2)]
    load_on(states, tmp_path, options=ALWAYS)
    for state in states:
        check_pieces(state["a"], array)
    assert [len(shards) for part in seen.parts for shards in part] == [32, 32], "a part, and no empty one behind it"


def _between_parts(monkeypatch: pytest.MonkeyPatch, number: int, work: Any) -> None:
    """Do something when the coordinator has planned so many parts."""
    real, planned = exchange_planner.ExchangePlanner.orders, []

    def orders(self: Any) -> dict[int, ExchangeAnswer]:
        planned.append(self)
        if len(planned) == number:
            work()
        return real(self)

    monkeypatch.setattr(exchange_planner.ExchangePlanner, "orders", orders)


def _saved_on_four(folder: Path, first: int) -> list[dict[str, Any]]:
    """A tensor a rank, in a file a rank; what is asked for, by two: the second has files
    of its own, none of them in the first part."""
    states = [{f"t{rank}": make_array((50,), "int32", first + rank)} for rank in range(4)]
    save_on(states, folder, 0)
    return [{f"t{i}": np.zeros(50, np.int32) for i in wanted} for wanted in ([0, 1, 2], [2, 3])]


def test_a_checkpoint_that_is_replaced_between_parts_is_not_mixed_with_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is too late to start again: the other one may lack something that has been written."""
    states = _saved_on_four(tmp_path, 0)
    Seen(monkeypatch, 2)
    _between_parts(monkeypatch, 4, lambda: _saved_on_four(tmp_path, 100))
    for error in errors_of(try_load(states, tmp_path, options=ALWAYS), CheckpointReplacedError):
        assert "was replaced while it was being read" in str(error)
        assert "partly written" in str(error)
    load_on(states, tmp_path, options=ALWAYS)
    for state in states:
        assert all(alike(array, make_array((50,), "int32", 100 + int(key[1]))) for key, array in state.items())


def test_a_file_that_is_missing_from_the_start_is_missed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = _saved_on_four(tmp_path, 0)
    last = max(data_files(tmp_path))
    last.unlink()
    Seen(monkeypatch, 2)
    for error in errors_of(try_load(states, tmp_path, options=ALWAYS), CheckpointCorruptedError):
        assert last.name in str(error)
        assert "partly written" not in str(error)
    assert not any(array.any() for state in states for array in state.values())


def test_what_parts_take_is_in_the_report_and_divided_among_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {f"t{i}": make_array((100,), "int32", i) for i in range(16)}
    save_on([arrays], tmp_path)
    seen = Seen(monkeypatch, 4)
    reports = load_on([{key: np.zeros(100, np.int32) for key in arrays} for _ in range(4)], tmp_path, options=ALWAYS)
    assert len(seen.ends) == 16
    assert [report.bytes_read for report in reports] == [1600] * 4
    assert [report.bytes_received for report in reports] == [4800] * 4
    assert all(report.seconds.keys() == {"plan", "open", "read"} for report in reports)


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_what_cannot_be_read_in_a_later_part_is_said_on_all_ranks(
    tmp_path: Path, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that tensors are partly written by then."""
    states = _saved_on_four(tmp_path, 0)
    last = max(data_files(tmp_path))
    Seen(monkeypatch, 2)
    if harm == "gone":
        kept = tmp_path / "kept"
        _between_parts(monkeypatch, 4, lambda: shutil.move(last, kept))
        results = try_load(states, tmp_path, options=ALWAYS)
    else:
        with replaced_bytes(last, {last.stat().st_size - 10: 77}):
            results = try_load(states, tmp_path, options=ALWAYS)
    kinds = (CheckpointCorruptedError, RankFailureError)
    for error in errors_of(results, CheckpointCorruptedError if harm == "gone" else kinds):  # type: ignore[arg-type]
        assert "partly written" in str(error)
        assert last.name in str(error)


def test_memory_is_bounded_however_many_shards_there_are(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    for folder, side in ((few, 4), (many, 512)):
        cuts = [list(range(1, side)), list(range(1, side))]
        write_checkpoint(folder, {"/w": Entry([side, side], cuts, "uint8", 0, b"x" * side**2)})

    def load(folder: Path) -> bool:
        side = 4 if folder == few else 512
        array = np.full((side, side), ord("x"), np.uint8)
        states = [{"w": sharded(array, everything(array), fill=False)} for _ in range(2)]
        load_on(states, folder, options=ALWAYS)
        for state in states:
            check_pieces(state["w"], array)
        return True

    cost = cost_of(load, few, many)
    assert cost.outcome == "True"
    assert cost.memory < 160 << 20


def test_no_rows_are_sent_to_a_device_for_an_exchange_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by a rank that only sends in the round in which a collective hung."""
    entered, released, sent = threading.Event(), threading.Event(), list[int]()

    class Staging:
        def __init__(self, *_: Any) -> None:
            self.begin, self.end = lambda number: None, sent.append

        def finish(self) -> None:
            pass

    def hang(*_: Any) -> None:
        entered.set()
        released.wait(PATIENCE)

    monkeypatch.setattr(exchange, "RoundStaging", Staging)
    monkeypatch.setattr(exchange, "messages_of", lambda one, me: {})
    monkeypatch.setattr(exchange, "needs_of", lambda one: None)
    needs = SimpleNamespace(rows_on_device=lambda chosen: np.array([0]), targets=None, block_bytes=1)
    session = SimpleNamespace(rank=0, check=lambda: None)
    one: Any = exchange.Exchange(session, needs, None, None, 1, lambda nbytes: None, set())  # type: ignore[arg-type]
    failures = list[BaseException]()

    def run() -> None:
        try:
            one.run([SimpleNamespace(senders=[(0, 1)])], SimpleNamespace(exchange=hang))
        except CollectiveError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(PATIENCE)
    one.give_up()
    released.set()
    thread.join(PATIENCE)
    assert len(failures) == 1
    assert sent == []
