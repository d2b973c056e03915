"""Measures saves in the background of several libraries: how long the call takes, and what training loses after it.

    python -m benchmark.async_save [--quick] [--smoke]

Prints a table, and writes it and all samples to benchmark/results/. Takes about 10 minutes, with --quick about 4.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmark.command import main
from benchmark.first_saves import first_save_goals, first_save_rows, measure_first_saves
from benchmark.peers import Peer, peers_named
from benchmark.ranks import Ranks
from benchmark.report import (
    duration,
    goal,
    goals_section,
    heading,
    interval,
    median_of,
    notes,
    paired_ratio,
    percent,
    table,
)
from benchmark.session import Session, say, versions_of

_WARM_UP_STEPS = 30
_STEPS = {
    "steps": 60,  # without a save, on either side of one
    "steps_between": 10,  # so that a save, like a copy, finds the caches as a step leaves them
    "steps_after": 20,  # by which what a save leaves behind would show
}
_SMOKE_STEPS = dict.fromkeys(_STEPS, 2)

Measured = Mapping[str, Mapping[str, Mapping[int, float]]]
"""By peer's name and measure, for each round."""

_STALL_COPIES, _STALL_BEYOND = 1.2, 0.005
_MOST_OF_PEER = 1 / 3
_MOST_SLOWDOWN, _MOST_BACKGROUND, _MOST_COST = 0.05, 5.0, 0.06
_WORK, _COST = "A: save in the background", "training time lost in all"
_OURS, _DEFAULT = "ours_async", "torch_dcp_async"
_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("stall", "stall", duration),
    ("one copy of the bytes", "copy", duration),
    ("step without a save", "step", duration),
    ("step during a save", "step during", duration),
    ("slowed by", "slowdown", percent),
    ("until the save has ended", "background", duration),
    ("a save costs in all", "cost", duration),
    ("of that beyond the stall", "cost beyond stall", duration),
)
_NOTES = """
Two ranks over gloo, each bound to its part of the cores given above, train three layers of 768 x 768 in steps of about
the same length with either library, with one small all-reduce a step. Each is single-threaded, and a process of the
idle class (`SCHED_IDLE`) keeps its core awake while it waits for the other: on virtual machines a halted core comes
back so late that a save, which keeps it awake too, would seem to make training faster.

In every round the libraries take turns in shuffled order; all others sleep. A turn is: steps without a save; one copy
of all of this rank's bytes, tensor by tensor, into memory that it already has (for paddle_dist_ckpt by address into
huge pages, for torch with `Tensor.copy_`); a few steps; the call; steps until the save has ended on all ranks, and 20
more; steps without a save. The *stall* is the time until the call returns, on the slower rank, from the second save on.
The *step during a save* is the mean from then on until the save has ended on all ranks; *slowed by* compares it with
the mean of the steps before and after. *Costs in all* is the time of the call and all steps until 20 after the end,
less what as many steps take without a save; *beyond the stall* leaves the stall out. Medians over the rounds, with
bootstrap intervals of 95 %.

Of the first save of each library all values were overwritten as soon as the call returned, and loaded and compared.
paddle_dist_ckpt computes a checksum for every block; both sync their files. torch DCP is measured without options (it
stages the state in fresh memory and a thread saves it), with a stager that keeps its memory for the next save, and with
one whose memory is shared with another process that saves; each of them talks in a group of its own.

The first saves that something prepares are medians over some process starts, of the slower rank: the ranks are started,
make the state, have a `CheckpointManager` `prepare` it or save it synchronously, train for 10 s, and save. Behind them
in brackets are the shortest and the longest.
""".strip()


def measure(session: Session) -> dict[str, Any]:
    """Run the ranks and collect what they measured.

    Returns:
        ``first``, the stall of the first save, and ``measured``, by peer's name; ``prepared``, the stalls of our first
        save by what came before it; ``steps``; ``goals``; ``versions``.
    """
    order = random.Random(session.seed)
    measured: dict[str, dict[str, dict[int, float]]] = {peer.name: {} for peer in session.peers}
    with session.started(own_core=True) as all_ranks:
        versions = versions_of(all_ranks)
        first = {ranks.peer.name: _prepare(ranks, session) for ranks in all_ranks}
        for i in range(-1, session.rounds):  # the first is the warm-up
            for ranks in order.sample(all_ranks, len(all_ranks)):
                say(f"round {i + 1} of {session.rounds}: {ranks.peer.title}")
                turn = _train_and_save(ranks, session)
                if i >= 0:
                    for name, value in turn.items():
                        measured[ranks.peer.name].setdefault(name, {})[i] = value
    prepared = measure_first_saves(session, _OURS)
    return {
        "steps": _STEPS,
        "first": first,
        "prepared": prepared,
        "measured": measured,
        "goals": [*_goals(measured), *first_save_goals(prepared)],
        "versions": versions,
    }


def _prepare(ranks: Ranks, session: Session) -> float:
    """Have ranks ready to train, and see whether they save what is there when the call is made; that call's seconds."""
    say(f"{ranks.peer.title} gets ready")
    path = session.scratch / f"first-{ranks.peer.name}"
    ranks.do("build", state="A", layouts=["same"])
    ranks.do("prepare_training", steps=_SMOKE_STEPS["steps"] if session.smoke else _WARM_UP_STEPS)
    seconds = max(answer["seconds"] for answer in ranks.do("save_first", path=str(path)))
    ranks.do("measure", work="load", path=str(path))
    ranks.do("check", layout="same")
    session.remove(path)
    return seconds


def _train_and_save(ranks: Ranks, session: Session) -> dict[str, float]:
    path = session.scratch / f"save-{ranks.peer.name}"
    answers = ranks.do("train_and_save", path=str(path), **(_SMOKE_STEPS if session.smoke else _STEPS))
    session.remove(path)
    return _merged(answers)


def _merged(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One turn's measures, from those of its ranks.

    The ranks train in lockstep, so that the one whose call returns last tells what steps cost: the other waits for it.
    """
    slower = max(answers, key=lambda answer: answer["stall"])
    step = slower["baseline"] / slower["baseline_steps"]
    cost = slower["total"] - step * slower["total_steps"]
    during = slower["during"] / slower["during_steps"]
    return {
        "stall": slower["stall"],
        "copy": max(answer["copy"] for answer in answers),
        "step": step,
        "step during": during,
        "slowdown": during / step - 1,
        "background": max(answer["background"] for answer in answers),
        "cost": cost,
        "cost beyond stall": cost - slower["stall"],
    }


def _goals(measured: Measured) -> list[dict[str, Any]]:
    """Those that were not measured are left out."""
    ours = measured.get(_OURS)
    if ours is None:
        return []
    copy = median_of(ours["copy"])
    most = _STALL_COPIES * copy + _STALL_BEYOND
    text = f"{_STALL_COPIES:g} x one memcpy ({duration(copy)}) + {duration(_STALL_BEYOND)} = {duration(most)}"
    return [
        _limit("stall", text, ours["stall"], most, duration),
        *_ratios("stall", "stall", measured),
        _limit("training slowed", percent(_MOST_SLOWDOWN), ours["slowdown"], _MOST_SLOWDOWN, percent),
        _limit("until it has ended", duration(_MOST_BACKGROUND), ours["background"], _MOST_BACKGROUND, duration),
        _limit(_COST, duration(_MOST_COST), ours["cost"], _MOST_COST, duration),
        *_ratios(_COST, "cost", measured),
    ]


def _limit(
    work: str, text: str, samples: Mapping[int, float], most: float, shown: Callable[[float], str]
) -> dict[str, Any]:
    return goal(f"{_WORK}: {work}", f"at most {text}", interval(samples, shown), median_of(samples) <= most)


def _ratios(work: str, measure: str, measured: Measured) -> Iterator[dict[str, Any]]:
    """Against torch DCP's ``async_save`` without options, and against whichever variant of it is best."""
    others = {name: samples[measure] for name, samples in measured.items() if name != _OURS}
    if not others:
        return
    best = min(others, key=lambda name: median_of(others[name]))
    for name, title in ((_DEFAULT, "torch DCP without options"), (best, "the best variant of torch DCP")):
        # Of ours to theirs: ours may be next to nothing, and its inverse then anything.
        ratio = paired_ratio(measured[_OURS][measure], others[name]) if name in others else None
        if ratio is not None:
            found, met = interval(ratio, percent), ratio[0] <= _MOST_OF_PEER
            yield goal(f"{_WORK}: {work}", f"at most 1/3 of that of {title}", found, met)


def as_markdown(found: Mapping[str, Any]) -> str:
    """The report."""
    peers = peers_named(*found["measured"])
    lines = [
        *heading("Saves in the background", found),
        "State A (6 layers of hidden size 1536, float32, 0.68 GB), two ranks, while they train.",
        "",
        *table(["", *(peer.title for peer in peers)], _rows(found, peers)),
        "",
        *goals_section(found["goals"]),
        *notes(_NOTES),
    ]
    return "\n".join(lines)


def _rows(found: Mapping[str, Any], peers: Sequence[Peer]) -> list[list[str]]:
    first = [["stall of the first save", *(duration(found["first"][peer.name]) for peer in peers)]]
    first += first_save_rows(found["prepared"], _OURS, [peer.name for peer in peers])
    measured = [found["measured"][peer.name] for peer in peers]
    return [*first, *([title, *(interval(one[name], shown) for one in measured)] for title, name, shown in _SHOWN)]


if __name__ == "__main__":
    raise SystemExit(main("async_save", measure, as_markdown))
