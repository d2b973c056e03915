"""Kills: one of the processes that save is killed at a call, or in the middle of a write; or all are, one by one."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .forked import Failed
from .groups import BEFORE, FOLDER, Case, after_a_dead_one, counts, made, start, versions
from .leftovers import check_later_save
from .strikes import Strike

NAME = "kills"


def attempt(seed: int, folder: Path) -> Counter[str]:
    """Kill one rank of two, and sometimes the other one thereafter."""
    rng = random.Random(seed)
    case = Case(2, rng.choice((None, 1)), shared=rng.random() < 0.75, in_background=rng.random() < 0.4)
    victim, all_die = rng.randrange(2), rng.random() < 0.3
    calls = counts(case)[victim]
    number = rng.randrange(calls) if rng.random() < 0.6 else rng.randrange(calls * 3 // 4, calls)  # where it commits
    strike = Strike(victim, number, rng.random() < 0.5, _kill)
    disks, notes = made(case, folder), folder / "notes"
    notes.mkdir()
    after_another = case.shared and rng.random() < 0.3
    if after_another:
        after_a_dead_one(disks, case.ranks, rng)
    try:
        with ExitStack() as ending:
            children = start(case, disks, notes, strike, ending)
            results = {victim: children[victim].result()}
            if all_die:
                children[1 - victim].kill()
            results[1 - victim] = children[1 - victim].result()
        outcome = _check(case, victim, all_die, results, disks.folders(FOLDER))
        check_later_save(disks.folders(FOLDER), fresh=not after_another)
        return Counter([outcome])
    except Exception as error:
        raise AssertionError(f"{case}, {strike}: {type(error).__name__}: {error}") from error


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _check(case: Case, victim: int, all_die: bool, results: dict[int, Any], folders: list[Path]) -> str:
    survivor = results[1 - victim]
    found = versions(folders)
    assert found in (BEFORE, case.after), f"{found}: neither what was there nor what was saved"
    if isinstance(survivor, Failed):
        assert "RankFailureError" in survivor.kinds, survivor
        assert victim in survivor.ranks, survivor
    elif not all_die:
        assert survivor is not None, "it was killed as well"
    told = any(isinstance(result, int) for result in results.values())
    assert found == case.after or not told, "reported, and not there"
    if results[victim] is not None:
        return "not reached"
    return ("the new one" if found == case.after else "the old one") + (", reported" if told else "")
