"""Measures what it costs a save to compare the copies that ranks have of the same parts.

    python -m benchmark.replicas [--quick] [--smoke]

Two ranks, of which each has all of state A (``Replicate``), save it together, with each way to compare copies in turn.
Prints a table and writes it and all samples to benchmark/results/. Takes about a minute.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from benchmark.command import main
from benchmark.report import duration, goal, goals_section, heading, interval, paired_ratio, table, times
from benchmark.session import Session, say, slower, versions_of

_CHOICES = {"save_off": "off", "save_sampled": "sampled", "save": "auto"}
"""The peer's methods, and what they give for ``check_replicas``."""
_GOALS = {"save_sampled": 1.05, "save": 1.05}
"""The most that a save may take, times one that compares nothing."""
_LAYOUT = "replicated"


def measure(session: Session) -> dict[str, Any]:
    """Run the ranks and collect what they measured.

    Returns:
        The slower rank's ``seconds`` by choice and round; the ``ratios`` of those that compare to the one that does
        not, with their intervals; ``goals`` and ``versions``.
    """
    order = random.Random(session.seed)
    seconds: dict[str, dict[int, float]] = {work: {} for work in _CHOICES}
    with session.started(2) as (ranks,):
        versions = versions_of([ranks])
        ranks.do("build", state="A", layouts=[_LAYOUT])
        for i in range(-1, session.rounds):  # the first is the warm-up
            for work in order.sample(list(seconds), len(seconds)):
                say(f"round {i + 1} of {session.rounds}: {work}")
                path = session.scratch / work
                found = slower(ranks.do("measure", work=work, path=str(path), layout=_LAYOUT))
                if i >= 0:
                    seconds[work][i] = found["seconds"]
                session.remove(path)
    ratios = {work: paired_ratio(seconds[work], seconds["save_off"]) for work in _CHOICES if work != "save_off"}
    return {
        "seconds": seconds,
        "ratios": ratios,
        "goals": [
            goal(
                f'check_replicas="{_CHOICES[work]}"',
                f"at most {most:g}x a save that compares nothing",
                interval(ratio, times),
                ratio[0] <= most,
            )
            for work, most in _GOALS.items()
            if (ratio := ratios[work]) is not None
        ],
        "versions": versions,
    }


def as_markdown(found: Mapping[str, Any]) -> str:
    """The report."""
    rows = [
        [
            f'`check_replicas="{choice}"`',
            interval(found["seconds"][work], duration),
            interval(found["ratios"][work], times) if work in found["ratios"] else "1",
        ]
        for work, choice in _CHOICES.items()
    ]
    lines = [
        *heading("Comparing copies", found),
        "Two ranks, each with all of state A, save it into one folder, a new one each time. Shuffled order, the slower "
        "rank's time.",
        "",
        *table(["", "save", "times one that compares nothing (95 %)"], rows),
        "",
        *goals_section(found["goals"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main("replicas", measure, as_markdown))
