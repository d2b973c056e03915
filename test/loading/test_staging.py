"""Rows on their way to a device: which of them are in host memory, and how long, in the rounds of an exchange; groups
that cannot be sent."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.threads import run_all
from paddle_dist_ckpt.loading.staging import GroupStaging, RoundStaging
from test.waiting import PATIENCE

ROW_BYTES = 100


class Rows:
    """Targets, and a queue of copies that remembers which rows were waited for."""

    def __init__(self, count: int) -> None:
        self.nbytes = np.full(count, ROW_BYTES)
        self.placed: set[int] = set()
        self.under_way: set[int] = set()

    def place(self, row: int, memory: np.ndarray) -> None:
        assert len(memory) == ROW_BYTES
        self.placed.add(row)

    def send(self, rows: Sequence[int], copies: Any) -> None:
        self.placed -= set(rows)
        self.under_way |= set(rows)

    def mark(self) -> _Mark:
        return _Mark(self.under_way, set(self.under_way))


class _Mark:
    def __init__(self, under_way: set[int], rows: set[int]) -> None:
        self._under_way, self._rows = under_way, rows

    def wait(self) -> None:
        self._under_way -= self._rows


def run(rounds: Sequence[Sequence[int]], most: int) -> tuple[Rows, list[int], list[set[int]]]:
    """The targets, the most rows that took host memory in each round, and those that were not waited for."""
    targets, counts, under_way = Rows(100), [], []
    staging = RoundStaging(targets, targets, [np.array(rows, np.int64) for rows in rounds], most, set())  # type: ignore[arg-type]
    for number, rows in enumerate(rounds):
        staging.begin(number)
        assert set(rows) <= targets.placed
        counts.append(len(targets.placed) + len(targets.under_way))
        under_way.append(set(targets.under_way))
        staging.end(number)
    staging.finish()
    assert not targets.placed | targets.under_way
    return targets, counts, under_way


def test_memory_of_rows_that_have_left_is_given_back_though_there_is_room() -> None:
    rounds = [[number, number + 50] for number in range(20)]
    _, counts, under_way = run(rounds, 100 * ROW_BYTES)
    assert max(counts) <= 4
    assert under_way[5] == {4, 54}  # a round's copies go on during the next one


def test_rows_stay_until_their_last_round() -> None:
    rounds = [[0, 1], [0, 2], [3], [4], [0, 4]]
    _, counts, _ = run(rounds, 100 * ROW_BYTES)
    assert counts[0] == 2
    assert counts[1] == 3  # row 1 on its way
    assert max(counts) <= 4


class _OnDevice(Rows):
    """Targets on a device, with what they have on the host and there."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.host: dict[int, np.ndarray] = {}
        self.there: dict[int, bytes] = {}

    def place(self, row: int, memory: np.ndarray) -> None:
        super().place(row, memory)
        self.host[row] = memory

    def send(self, rows: Sequence[int], copies: Any) -> None:
        super().send(rows, copies)
        self.there.update({row: self.host.pop(row).tobytes() for row in rows})

    def device_memory(self, rows: Sequence[int]) -> list[Any]:
        def read(start: int, stop: int, into: np.ndarray, copies: Any) -> None:
            into[:] = np.frombuffer(self.there[rows[0]][start:stop], np.uint8)

        return [SimpleNamespace(read=read)]


@pytest.mark.parametrize("most", [1, 2, 100])
def test_rows_that_leave_before_their_last_round_come_back_as_they_were(most: int) -> None:
    rounds, targets = [[0, 1], [1, 2], [0], [2, 1], [0]], _OnDevice(3)
    staging = RoundStaging(targets, targets, [np.array(rows, np.int64) for rows in rounds], most * ROW_BYTES, set())  # type: ignore[arg-type]
    for number, rows in enumerate(rounds):
        staging.begin(number)
        for row in rows:
            targets.host[row][number] = 1 + number  # what the round brings for it
        staging.end(number)
    staging.finish()
    for row in range(3):
        expected = [1 + number for number, rows in enumerate(rounds) if row in rows]
        assert [targets.there[row][at - 1] for at in expected] == expected


def test_all_threads_end_when_groups_cannot_be_sent() -> None:
    waiting, failures = threading.Event(), list[BaseException]()

    class Unsent(Rows):
        def place_all(self, rows: np.ndarray, memory: np.ndarray, starts: np.ndarray) -> None:
            pass

        def send(self, rows: Sequence[int], copies: Any) -> None:
            waiting.wait(PATIENCE)
            raise RuntimeError("the device is gone")

    class Watched(queue.SimpleQueue):
        def get(self, *args: Any) -> Any:  # type: ignore[override]
            if self.empty():
                waiting.set()
            return super().get(*args)

    targets = Unsent(100)
    staging = GroupStaging(targets, targets, functools.partial(np.zeros, dtype=np.uint8))  # type: ignore[arg-type]
    buffers, staging._buffers = staging._buffers, Watched()
    while not buffers.empty():
        staging._buffers.put(buffers.get())

    def load() -> None:
        tasks = (task for row in range(100) for task in staging.through(np.array([row]), lambda: [lambda: None]))
        try:
            run_all(tasks, 8, lambda: None)
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert [str(error) for error in failures] == ["the device is gone"]
