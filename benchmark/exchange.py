"""Measures how fast ranks load what each can read only a part of, against what gloo itself takes to move the bytes.

    python -m benchmark.exchange [--quick] [--smoke]

Four ranks, each with a folder of its own as on four hosts, save state A, of which every rank has all, and load all of
it back, and again without a look at what the collectives have delivered. In between, each rank broadcasts a quarter of
as many bytes from one buffer into one, and does nothing else; and again from the tensors' memory into the tensors', as
a load does. Prints a table and writes it and all samples to benchmark/results/. Takes about a minute.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from benchmark.command import main
from benchmark.report import duration, goal, goals_section, heading, interval, paired_ratio, table, times
from benchmark.session import Session, say, slower, versions_of

_RANKS, _SMOKE_RANKS = 4, 2
_GOAL = 0.8
_MOST_FOR_CHECKS = 1.05
_LAYOUT = "replicated"
_WORKS = {
    "load": "load",
    "load_unchecked": "unchecked load",
    "broadcast": "broadcasts alone",
    "broadcast_tensors": "the same between tensors",
}
"""What is measured, and what the table calls it."""


def measure(session: Session) -> dict[str, Any]:
    """Run the ranks and collect what they measured.

    Returns:
        The slower rank's seconds of the ``load``, of the one that checks nothing that has been delivered
        (``load_unchecked``), and of the ``broadcast`` and ``broadcast_tensors`` alone, by round; what these take of
        processors on all ranks together (``cpu``); the ``ratio`` of the broadcasts' time to the load's, and that of the
        load's to the unchecked one's (``checks``), with their intervals; bytes; ``goals`` and ``versions``.
    """
    ranks_count = _SMOKE_RANKS if session.smoke else _RANKS
    checkpoint = session.scratch / "checkpoint"
    order = random.Random(session.seed)
    seconds: dict[str, dict[int, float]] = {work: {} for work in _WORKS}
    cpu: dict[str, dict[int, float]] = {work: {} for work in _WORKS}
    latest: dict[str, list[dict[str, float]]] = {}
    with session.started(ranks_count) as (ranks,):
        versions = versions_of([ranks])
        ranks.do("build", state="A", layouts=[_LAYOUT])
        ranks.do("measure", work="save", path=str(checkpoint), layout=_LAYOUT)
        ranks.do("zero", layout=_LAYOUT)
        for i in range(-1, session.rounds):  # the first is the warm-up
            for work in order.sample(list(_WORKS), len(_WORKS)):
                say(f"round {i + 1} of {session.rounds}: {work}")
                session.cache(checkpoint)
                latest[work] = ranks.do("measure", work=work, path=str(checkpoint), layout=_LAYOUT)
                if i >= 0:
                    seconds[work][i] = slower(latest[work])["seconds"]
                    cpu[work][i] = sum(answer["cpu"] for answer in latest[work])
            if i < 0:
                ranks.do("check", layout=_LAYOUT)
    ratio = paired_ratio(seconds["broadcast"], seconds["load"])
    checks = paired_ratio(seconds["load"], seconds["load_unchecked"])
    assert ratio is not None
    assert checks is not None
    work = f"exchange: {ranks_count} ranks with folders of their own"
    return {
        "ranks": ranks_count,
        "total_bytes": latest["broadcast"][0]["total_bytes"],
        "bytes_read": [answer["bytes_read"] for answer in latest["load"]],
        "bytes_received": [answer["bytes_received"] for answer in latest["load"]],
        **seconds,
        "cpu": cpu,
        **dict(zip(("ratio", "low", "high"), ratio, strict=True)),
        "checks": checks,
        "goals": [
            goal(work, f"at least {_GOAL:g}x gloo alone", interval(ratio, times), ratio[0] >= _GOAL),
            goal(
                "with all that has been delivered checked",
                f"at most {_MOST_FOR_CHECKS:g}x an unchecked load",
                interval(checks, times),
                checks[0] <= _MOST_FOR_CHECKS,
            ),
        ],
        "versions": versions,
    }


def as_markdown(found: Mapping[str, Any]) -> str:
    """The report."""
    ratio = (found["ratio"], found["low"], found["high"])
    head = ["", *_WORKS.values(), "load : unchecked (95 %)", "broadcasts : load (95 %)"]
    seconds = [interval(found[work], duration) for work in _WORKS]
    rows = [
        ["all ranks", *seconds, interval(found["checks"], times), interval(ratio, times)],
        ["processor time, of all ranks together", *(interval(found["cpu"][work], duration) for work in _WORKS), "", ""],
    ]
    lines = [
        *heading("Exchange", found),
        f"{found['ranks']} ranks over gloo, each with a folder of its own; all want all of "
        f"{found['total_bytes'] / 1e9:.2f} GB, of which each can read {max(found['bytes_read']) / 1e9:.2f} GB at most. "
        "Shuffled order, the slower rank's time, files in the page cache; the load checks every block.",
        "",
        *table(head, rows),
        "",
        *goals_section(found["goals"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main("exchange", measure, as_markdown))
