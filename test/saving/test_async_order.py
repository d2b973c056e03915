"""Saves in the background and other calls meanwhile, on simulated ranks: who waits, and who disturbs nobody."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import list_checkpoints
from paddle_dist_ckpt.errors import CheckpointError, RankFailureError, StateDictMismatchError, UnsupportedValueError
from paddle_dist_ckpt.options import LoadOptions
from paddle_dist_ckpt.saving import save as save_module
from paddle_dist_ckpt.testing import SimulatedRank
from test.background import LONG, RANKS, Gate, error_of, finish, in_background, job, options, versions, versions_in
from test.strategies import draws

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

    def report(saving: Any, *args: Any) -> Any:
        """The commit is done; one rank does not come to its end for a while."""
        if in_background() and saving._context.session.rank == busy:
            gate.reached.set()
            assert gate.opened.wait(LONG)
        return reporting(saving, *args)

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


@pytest.mark.parametrize("seed", range(draws(2)))
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
        assert f"rank {other} calls 'save_state_dict(async_save=True)'" in str(raised)
        assert f"rank {1 - other} calls 'save_state_dict'" in str(raised)
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


@pytest.mark.parametrize("check", ["auto", "off"])
def test_a_save_meanwhile_does_not_hide_that_ranks_are_out_of_step(tmp_path: Path, check: Any) -> None:
    """One rank leaves out a load. What it saves afterwards may belong to another step than the others'. Values tell,
    also if replicas are not compared."""
    gate, together = Gate("write"), threading.Barrier(2)
    state = {"x": np.arange(3000)}

    def save(rank: SimulatedRank, number: int) -> None:
        mark = 10 * number + rank.rank
        rank.save({"x": np.full(3000, mark), "n": mark}, tmp_path, None, options(check_replicas=check))

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
    assert list_checkpoints(tmp_path) == [0, 1]


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

    assert max(job(RANKS, work)) < LONG, "nobody waited for a timeout"
    assert list_checkpoints(tmp_path) == []
