"""The first save in the background of a process, when something came before it that makes it shorter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmark.report import duration, goal
from benchmark.session import Session, say, slower

__all__ = ["FIRST_SAVES", "first_save_goals", "first_save_rows", "measure_first_saves"]

FIRST_SAVES = {
    "manage": "stall of the first save, prepared by a manager",
    "save_before": "stall of the first save in the background, after a synchronous one",
}
"""What comes before it, a method of the peer, and what tables call it."""
_MOST_SECONDS = 0.2
_TRAINING_SECONDS = 10.0  # between that and the save: a job that saves sooner has less to lose
_STARTS, _QUICK_STARTS = 5, 3
_WARM_UP_STEPS = 10

Found = dict[str, dict[str, list[float]]]


def measure_first_saves(session: Session, peer: str) -> Found:
    """In some process starts each: by what came before, the slower rank's ``seconds`` and the busier one's ``cpu``."""
    alone = dataclasses.replace(session, pythons=[one for one in session.pythons if one[0].name == peer])
    found: Found = {}
    for how in FIRST_SAVES if alone.pythons else ():
        found[how] = {"seconds": [], "cpu": []}
        for i in range(1 if session.smoke else _QUICK_STARTS if session.quick else _STARTS):
            say(f"first save, {how}: start {i + 1}")
            for name, value in _one_start(alone, how).items():
                found[how][name].append(value)
    return found


def _one_start(session: Session, how: str) -> dict[str, float]:
    before, path = session.scratch / "before", session.scratch / "first"
    with session.started(own_core=True) as (ranks,):
        ranks.do("build", state="A", layouts=["same"])
        ranks.do("prepare_training", steps=_WARM_UP_STEPS)
        ranks.do("get_ready", how=how, path=str(before), seconds=0.1 if session.smoke else _TRAINING_SECONDS)
        answers = slower(ranks.do("save_first", path=str(path)))
    for folder in (before, path):
        if folder.exists():
            session.remove(folder)
    return answers


def first_save_goals(found: Found) -> list[dict[str, Any]]:
    """Each of them, and whether it is short enough."""
    medians = {how: float(np.median(samples["seconds"])) for how, samples in found.items()}
    return [
        goal(f"A: {FIRST_SAVES[how]}", f"at most {duration(_MOST_SECONDS)}", duration(median), median <= _MOST_SECONDS)
        for how, median in medians.items()
    ]


def first_save_rows(found: Found, peer: str, peers: Sequence[str]) -> list[list[str]]:
    """Rows of a table with a column for each of ``peers``, of which one was measured."""
    rows = []
    for how, samples in found.items():
        middle, least, most = (duration(f(samples["seconds"])) for f in (np.median, min, max))
        rows.append([FIRST_SAVES[how], *(f"{middle} ({least} to {most})" if one == peer else "–" for one in peers)])
    return rows
