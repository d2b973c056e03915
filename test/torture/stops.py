"""Stops: a save is stopped at a call, another save takes it for dead, and then the first one goes on.

It does so when the other save has ended, or in the middle of that: at one of its calls.
"""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from test.jobs import save_on

from .calls import Call, Interposer, Perform
from .forked import Child, Failed
from .groups import BEFORE, FOLDER, OPTIONS, Case, counts, made, start, versions
from .leftovers import age_all, check_later_save
from .states import states_of
from .strikes import Strike

NAME = "stops"
CASES = ((Case(1, None), None), (Case(1, 1), 1), (Case(1, 2), None), (Case(2, 1), None))
"""A save, and the id of the one that takes it for dead."""
PERIOD = 160
"""More than any save makes calls: so many seeds stop one at all of its calls, each of the cases in turn."""
_OTHER = 4


def attempt(seed: int, folder: Path) -> Counter[str]:
    """Stop one save, at the call whose number the seed is."""
    rng = random.Random(seed)
    case, unique_id = CASES[seed // PERIOD % len(CASES)]
    rank, number = rng.randrange(case.ranks), seed % PERIOD
    assert counts(case)[rank] < PERIOD
    if number >= counts(case)[rank]:
        return Counter()
    strike, in_the_middle = Strike(rank, number, False, _stop), rng.random() < 0.5
    disks, notes = made(case, folder), folder / "notes"
    notes.mkdir()
    try:
        with ExitStack() as ending:
            children = start(case, disks, notes, strike, ending)
            if not children[rank].is_stopped():
                return Counter(["not reached"])
            (shared,) = disks.folders(FOLDER)
            age_all(shared)
            thaw_at = rng.randrange(counts(Case(1, unique_id))[0]) if in_the_middle else None
            other = _take_over(disks, unique_id, children, rank, thaw_at)
            children[rank].thaw()
            results = [child.result() for child in children]
        return Counter([_check(results, other, shared)])
    except Exception as error:
        raise AssertionError(f"{case}, {strike}: {type(error).__name__}: {error}") from error


def _stop() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # no call more; a process would stop a bit later


def _take_over(disks: Any, unique_id: int | None, children: list[Child], stopped: int, thaw_at: int | None) -> int:
    """Save to the same folder; the stopped save may go on, to its end, when this one makes some call of its own."""

    def handle(call: Call, perform: Perform) -> Any:
        if call.number == thaw_at:
            children[stopped].thaw()
            for child in children:
                child.wait()
        return perform()

    with Interposer(disks, handle):
        return save_on(states_of(_OTHER, 1), disks.paths(FOLDER)[0], unique_id, OPTIONS)[0].unique_id


def _check(results: list[Any], other: int, folder: Path) -> str:
    """Each save has told the truth, and what is there is whole."""
    found, saved = versions([folder]), [result for result in results if not isinstance(result, Failed)]
    allowed: dict[int, set[int | None]] = {unique_id: {version} for unique_id, version in BEFORE.items()}
    allowed[other] = {_OTHER}
    assert not saved or len(saved) == len(results), f"not on all ranks: {results}"
    for unique_id in saved[:1]:
        allowed[unique_id] = {3, *(allowed[unique_id] if unique_id == other else ())}
    for unique_id in found.keys() | allowed.keys():
        assert found.get(unique_id) in allowed.get(unique_id, {None}), f"{found}, but {allowed}; {results}"
    for result in results:
        assert not isinstance(result, Failed) or {"CheckpointError", "OSError"} & {*result.kinds}, result
    check_later_save([folder])
    return "both saved" if saved else "the stopped one failed"
