"""From what ranks measured of their saves in the background to medians, goals and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmark.outcome import closing_sections
from benchmark.ratios import median_interval, median_of, paired_ratio
from benchmark.report import duration, table
from benchmark.schedule import Peer

__all__ = ["as_markdown", "goals", "merged"]

Measured = Mapping[str, Mapping[str, Mapping[int, float]]]
"""By peer's name and measure, for each round."""

_STALL_COPIES, _STALL_BEYOND = 1.2, 0.005
_MOST_OF_PEER = 1 / 3
_MOST_SLOWDOWN, _MOST_BACKGROUND, _MOST_COST = 0.05, 5.0, 0.06
_WORK, _COST = "A: save in the background", "training time lost in all"
_OURS, _DEFAULT = "ours_async", "torch_dcp_async"
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
""".strip()


def merged(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
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


def goals(measured: Measured) -> list[dict[str, Any]]:
    """Each goal in words, what was found, and whether that is enough. Those that were not measured are left out."""
    ours = measured.get(_OURS)
    if ours is None:
        return []
    copy = median_of(ours["copy"])
    most = _STALL_COPIES * copy + _STALL_BEYOND
    text = f"{_STALL_COPIES:g} x one memcpy ({duration(copy)}) + {duration(_STALL_BEYOND)} = {duration(most)}"
    return [
        _limit("stall", text, ours["stall"], most, duration),
        *_ratios("stall", "stall", measured),
        _limit("training slowed", _percent(_MOST_SLOWDOWN), ours["slowdown"], _MOST_SLOWDOWN, _percent),
        _limit("until it has ended", duration(_MOST_BACKGROUND), ours["background"], _MOST_BACKGROUND, duration),
        _limit(_COST, duration(_MOST_COST), ours["cost"], _MOST_COST, duration),
        *_ratios(_COST, "cost", measured),
    ]


def _limit(
    work: str, goal: str, samples: Mapping[int, float], most: float, shown: Callable[[float], str]
) -> dict[str, Any]:
    return {
        "work": f"{_WORK}: {work}",
        "goal": f"at most {goal}",
        "found": _interval(samples, shown),
        "met": median_of(samples) <= most,
    }


def _ratios(work: str, measure: str, measured: Measured) -> Iterator[dict[str, Any]]:
    """Against torch DCP's ``async_save`` without options, and against whichever variant of it is best."""
    others = {name: samples[measure] for name, samples in measured.items() if name != _OURS}
    if not others:
        return
    best = min(others, key=lambda name: median_of(others[name]))
    for name, title in ((_DEFAULT, "torch DCP without options"), (best, "the best variant of torch DCP")):
        ratio = paired_ratio(measured[_OURS][measure], others[name]) if name in others else None
        if ratio is not None:
            middle, low, high = ratio  # of ours to theirs: ours may be next to nothing, and its inverse then anything
            yield {
                "work": f"{_WORK}: {work}",
                "goal": f"at most 1/3 of that of {title}",
                "found": f"{_percent(middle)} ({_percent(low)} to {_percent(high)})",
                "met": middle <= _MOST_OF_PEER,
            }


def as_markdown(found: Mapping[str, Any], peers: Sequence[Peer]) -> str:
    """The report."""
    about = found["machine"]
    rounds, cores = found["settings"]["rounds"], found["settings"]["cores"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        "# Saves in the background",
        "",
        f"{about['cpu']}, {cores} of {about['cores']} cores, {about['memory_gib']} GiB of memory, "
        f"{about['filesystem']}, {about['kernel']}, Python {about['python']}; {versions}. Load average before the run: "
        f"{about['load_before']}. {rounds} rounds. Command: `{found['command']}`.",
        "",
        "State A (6 layers of hidden size 1536, float32, 0.68 GB), two ranks, while they train.",
        "",
        *table(["", *(peer.title for peer in peers)], _rows(found, peers)),
        "",
        *closing_sections(found, _NOTES),
    ]
    return "\n".join(lines)


_SHOWN = (
    ("stall", "stall", False),
    ("one copy of the bytes", "copy", False),
    ("step without a save", "step", False),
    ("step during a save", "step during", False),
    ("slowed by", "slowdown", True),
    ("until the save has ended", "background", False),
    ("a save costs in all", "cost", False),
    ("of that beyond the stall", "cost beyond stall", False),
)


def _rows(found: Mapping[str, Any], peers: Sequence[Peer]) -> list[list[str]]:
    first = [duration(found["first"][peer.name]) for peer in peers]
    return [
        ["stall of the first save", *first],
        *(
            [title, *(_interval(found["measured"][p.name][name], _percent if part else duration) for p in peers)]
            for title, name, part in _SHOWN
        ),
    ]


def _interval(samples: Mapping[int, float], shown: Callable[[float], str]) -> str:
    middle, low, high = median_interval(list(samples.values()))
    return f"{shown(middle)} ({shown(low)} to {shown(high)})"


def _percent(part: float) -> str:
    return f"{part * 100:.3g} %"
