"""Measures how fast ranks load what each can read only a part of, against what gloo itself takes to move the bytes.

    python -m benchmark.exchange [--quick] [--smoke]

Ranks with a folder each, as on hosts of their own, save state A, of which every rank has all, and load all of it back,
and again without a look at what the collectives have delivered. In between, each rank broadcasts its part of as many
bytes from one buffer into one, and does nothing else; and again from the tensors' memory into the tensors', as a load
does. That is done by four ranks, and by as many as there are cores: where several share one, whatever a rank does
beside the broadcasts delays them. Prints a table and writes it and all samples to benchmark/results/. Takes two
minutes.

Between the ranks of one machine there is only memory, and their processors do the network's work. On Linux the same
with 10 Gbit/s for all of them together, in three minutes:

    unshare -rn sh -c 'ip link set lo up &&
        tc qdisc add dev lo root tbf rate 10gbit burst 8mb latency 100ms && python -m benchmark.exchange'
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

from benchmark.command import main
from benchmark.report import duration, goal, goals_section, heading, interval, paired_ratio, table, times
from benchmark.session import Session, say, slower, versions_of

_RANKS, _LEAST_RANKS = 4, 2
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
        For four ranks, and for as many as there are cores (``runs``), what :func:`_measured` returns; ``goals`` and
        ``versions``.
    """
    cores = max(_LEAST_RANKS, len(os.sched_getaffinity(0)))
    runs = [_measured(session, ranks) for ranks in dict.fromkeys((_LEAST_RANKS,) if session.smoke else (_RANKS, cores))]
    ratio, checks = runs[0]["ratio"], runs[-1]["checks"]
    return {
        "runs": runs,
        "goals": [
            goal(
                f"exchange: {runs[0]['ranks']} ranks with folders of their own",
                f"at least {_GOAL:g}x gloo alone",
                interval(ratio, times),
                ratio[0] >= _GOAL,
            ),
            goal(
                f"with all that has been delivered checked, {runs[-1]['ranks']} ranks, a core each",
                f"at most {_MOST_FOR_CHECKS:g}x an unchecked load",
                interval(checks, times),
                checks[0] <= _MOST_FOR_CHECKS,
            ),
        ],
        "versions": runs[0].pop("versions"),
    }


def _measured(session: Session, ranks_count: int) -> dict[str, Any]:
    """What some ranks measure.

    Returns:
        The slower rank's seconds of the ``load``, of the one that checks nothing that has been delivered
        (``load_unchecked``), and of the ``broadcast`` and ``broadcast_tensors`` alone, by round; what these take of
        processors on all ranks together (``cpu``); the ``ratio`` of the broadcasts' time to the load's, and that of the
        load's to the unchecked one's (``checks``), with their intervals; ``ranks``, bytes and ``versions``.
    """
    checkpoint = session.scratch / f"checkpoint{ranks_count}"
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
                say(f"{ranks_count} ranks, round {i + 1} of {session.rounds}: {work}")
                session.cache(checkpoint)
                latest[work] = ranks.do("measure", work=work, path=str(checkpoint), layout=_LAYOUT)
                if i >= 0:
                    seconds[work][i] = slower(latest[work])["seconds"]
                    cpu[work][i] = sum(answer["cpu"] for answer in latest[work])
            if i < 0:
                ranks.do("check", layout=_LAYOUT)
    session.remove(checkpoint)
    ratio = paired_ratio(seconds["broadcast"], seconds["load"])
    checks = paired_ratio(seconds["load"], seconds["load_unchecked"])
    assert ratio is not None
    assert checks is not None
    return {
        "ranks": ranks_count,
        "total_bytes": latest["broadcast"][0]["total_bytes"],
        "bytes_read": [answer["bytes_read"] for answer in latest["load"]],
        "bytes_received": [answer["bytes_received"] for answer in latest["load"]],
        **seconds,
        "cpu": cpu,
        "ratio": ratio,
        "checks": checks,
        "versions": versions,
    }


def as_markdown(found: Mapping[str, Any]) -> str:
    """The report."""
    head = ["", *_WORKS.values(), "load : unchecked (95 %)", "broadcasts : load (95 %)"]
    rows = []
    for run in found["runs"]:
        seconds = [interval(run[work], duration) for work in _WORKS]
        cpu = [interval(run["cpu"][work], duration) for work in _WORKS]
        rows += [
            [f"{run['ranks']} ranks", *seconds, interval(run["checks"], times), interval(run["ratio"], times)],
            [f"{run['ranks']} ranks: processor time of all together", *cpu, "", ""],
        ]
    lines = [
        *heading("Exchange", found),
        f"Ranks over gloo, each with a folder of its own; all want all of {found['runs'][0]['total_bytes'] / 1e9:.2f} "
        "GB, of which each of so many can read a part. Shuffled order, the slower rank's time, files in the page "
        "cache; the load checks every block.",
        "",
        *table(head, rows),
        "",
        *goals_section(found["goals"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main("exchange", measure, as_markdown))
