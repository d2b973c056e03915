"""Loads of checkpoints that are being replaced. (``test.torture.mixes`` has saves and loads of all kinds at once.)"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.errors import CheckpointReplacedError
from paddle_dist_ckpt.options import LoadOptions
from paddle_dist_ckpt.testing import FaultyStorage
from test.jobs import (
    another_host,
    blank_like,
    errors_of,
    load_alone,
    load_on,
    load_whole,
    rows_of,
    save_alone,
    save_on,
    sharded,
    try_load,
)
from test.strategies import draws, some
from test.waiting import PATIENCE

SHAPE = (12, 500)


def states_of(version: int, ranks: int) -> list[dict[str, Any]]:
    """State_dicts in which everything is the version."""
    array = np.full(SHAPE, version)
    return [
        {
            "cut": sharded(array, [rows_of(SHAPE, rank, ranks)]),
            "plain": np.full(300, version),
            "n": version,
            "text": [version] * 3000,
        }
        for rank in range(ranks)
    ]


def blank_states(ranks: int) -> list[dict[str, Any]]:
    states = states_of(-1, ranks)
    for state in states:
        state["n"] = state["text"] = None
    return states


def versions_of(states: list[dict[str, Any]]) -> set[int]:
    """All that is in the states."""
    found: set[int] = set()
    for state in states:
        found |= {int(x) for piece in state["cut"].pieces for x in np.unique(piece)}
        found |= {int(x) for x in np.unique(state["plain"])} | {state["n"]} | set(state["text"])
    return found


@pytest.mark.parametrize(("ranks", "exchange"), some([(3, "always"), (3, "hosts")], 1))
def test_loads_while_the_id_is_replaced_again_and_again_see_one_version(
    tmp_path: Path, ranks: int, exchange: Any
) -> None:
    save_on(states_of(0, 2), tmp_path, 4)
    done = threading.Event()
    saved = [0]

    def replace() -> None:
        while not done.is_set():
            save_on(states_of(saved[0] + 1, 2), tmp_path, 4)
            saved[0] += 1

    saver = threading.Thread(target=replace)
    saver.start()
    outcomes: list[str] = []

    def seen_enough() -> bool:
        return saved[0] >= draws(10) and outcomes.count("loaded") >= draws(10)

    end = time.monotonic() + PATIENCE * draws(1)
    try:
        while not seen_enough() and saver.is_alive():
            assert time.monotonic() < end, (saved, outcomes)
            states = blank_states(ranks)
            first = saved[0]
            paths = [another_host(tmp_path, i) if exchange == "hosts" else tmp_path for i in range(ranks)]
            how = "auto" if exchange == "hosts" else exchange
            results = try_load(states, paths, 4, LoadOptions(exchange=how, timeout=60))
            failed = [result for result in results if isinstance(result, BaseException)]
            if failed:
                for error in errors_of(results, CheckpointReplacedError):
                    assert "was replaced 4 times" in str(error)
                assert {int(x) for state in states for x in np.unique(state["plain"])} == {-1}, "nothing is touched"
                outcomes.append("gave up")
                continue
            (version,) = versions_of(states)
            assert first <= version <= saved[0] + 1
            outcomes.append("loaded")
    finally:
        done.set()
        saver.join()
    assert seen_enough(), "a save has failed"


def replacing_storage(folder: Path, times: int, when: str) -> FaultyStorage:
    """A folder whose checkpoint 0 is replaced by another just before the first operations of a kind."""
    left = [times]

    def hook(operation: str, name: str) -> None:
        if operation == when and left[0]:
            left[0] -= 1
            save_alone({"w": np.full(900, 100 + left[0]), "x": np.full(900, 100 + left[0])}, folder, 0)

    return FaultyStorage(folder, hook)


@pytest.mark.parametrize("exchange", ["auto", "always"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_starts_again_when_its_checkpoint_is_replaced(tmp_path: Path, ranks: int, exchange: Any) -> None:
    save_on([{"w": np.zeros(900, int), "x": np.zeros(900, int)}] * 2, tmp_path)
    for times in range(1, 4):
        storage = replacing_storage(tmp_path, times, "open")
        states = [{"w": np.full(900, -1), "x": np.full(900, -1)} for _ in range(ranks)]
        load_on(states, [storage, *[tmp_path] * (ranks - 1)], options=LoadOptions(exchange=exchange, timeout=60))
        assert {int(x) for state in states for part in state.values() for x in np.unique(part)} == {100}


@pytest.mark.parametrize("exchange", ["auto", "always", "never"])
def test_a_load_gives_up_after_three_restarts(tmp_path: Path, exchange: Any) -> None:
    save_on([{"w": np.zeros(900, int), "x": np.zeros(900, int)}] * 2, tmp_path)
    states = [{"w": np.full(900, -1), "x": np.full(900, -1)} for _ in range(2)]
    paths = [replacing_storage(tmp_path, 1000, "open"), tmp_path]
    results = try_load(states, paths, options=LoadOptions(exchange=exchange, timeout=60))
    for error in errors_of(results, CheckpointReplacedError):
        assert "replaced 4 times" in str(error)
    assert all((part == -1).all() for state in states for part in state.values())


def test_a_load_that_has_opened_its_files_is_not_disturbed(tmp_path: Path) -> None:
    old = {"w": np.full(900, 1), "x": np.full(900, 1)}
    save_alone(old, tmp_path)
    state = {key: blank_like(value) for key, value in old.items()}
    reads = []

    def hook(operation: str, name: str) -> None:
        reads.append(operation)
        if reads.count("read_into") == 3 and operation == "read_into":
            save_alone({"w": np.full(900, 2), "x": np.full(900, 2)}, tmp_path, 0)

    load_alone(state, FaultyStorage(tmp_path, hook))
    assert reads.count("read_into") == 3, "a header's length, a header, and then data"
    assert (state["w"] == 1).all()
    assert (state["x"] == 1).all()
    assert (load_whole(tmp_path)["w"] == 2).all()


def test_a_merged_load_during_a_replacement(tmp_path: Path) -> None:
    save_alone({"w": np.zeros(900, int), "x": np.zeros(900, int)}, tmp_path)
    merged = load_whole(replacing_storage(tmp_path, 2, "open"))
    assert {int(x) for part in merged.values() for x in np.unique(part)} == {100}


def test_a_replacement_of_another_shape_during_a_merged_load(tmp_path: Path) -> None:
    """The targets were made for the old one: an error, or all of the new one, but nothing in between."""
    save_alone({"w": np.zeros(900, int)}, tmp_path)
    left = [1]

    def hook(operation: str, name: str) -> None:
        if operation == "open" and left:
            left.clear()
            save_alone({"w": np.ones((3, 7)), "y": 5}, tmp_path, 0)

    merged = load_whole(FaultyStorage(tmp_path, hook))
    assert set(merged) == {"w", "y"}
    assert merged["y"] == 5
    assert (merged["w"] == np.ones((3, 7))).all()
