"""Measures loads of checkpoints in formats of others, against those of our own format and of Paddle's own function.

    python -m benchmark.foreign [--quick] [--smoke]

Two ranks have the same state saved in three formats: our own, Paddle's `.distcp` as its own function writes it, and a
folder of safetensors as Hugging Face has it. They load state A of each in another layout, and Paddle loads its own.
Then it is measured how long it takes to find out what a checkpoint of very many tensors holds, and to load it. Prints
tables and writes them and all samples to benchmark/results/. Takes about 4 minutes, with --quick about one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.command import main
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
    table,
    times,
)
from benchmark.session import Session, say, slower, versions_of

Work = tuple[str, str]
"""The peer's method, and the format of the checkpoint that it is given."""
Samples = Mapping[Work, Mapping[int, float]]

_SAVES = {"own": "save", "paddle": "save_paddle", "safetensors": "save_safetensors"}
"""Formats, and the peer's methods that write them."""
_TITLES = {"own": "own format", "paddle": "Paddle's `.distcp`", "safetensors": "safetensors"}
_LOADS: list[Work] = [("load", name) for name in _SAVES]
_BY_PADDLE: Work = ("load_paddle", "paddle")
_LOOKS: list[Work] = [("read_metadata", name) for name in _SAVES]
_STATES = {
    "A": "State A: 6 layers of hidden size 1536, float32, 0.68 GB",
    "D": "State D: 5,000 float32 tensors of 8 x 8",
    "E": "State E: 50,000 float32 tensors of 8 x 8",
}
_MANY_ROUNDS = 5
_MOST, _LEAST = 1.3, 5.0
_NOTES = """
Two ranks on this machine over gloo. In every round all works take turns in shuffled order, in the same processes; a
rank first waits for the other one, and a round's time is that of the slower rank. Files are in the page cache. What is
loaded is cut in another dimension than it was saved. Ratios are medians over the rounds of the ratio within a round,
with 95 % bootstrap intervals: of times, and of the time on the cores (of the busier rank), which depends less on what
else the machine does. Every kind of load was compared once, value by value. Loads of our own format verify every block;
the other formats have no checksums. Paddle's own load can work on CPU only because its calls of `Tensor.cuda` are made
to do nothing; of very many tensors it is not measured. What a checkpoint holds is found out by one
rank, with `read_metadata`.
""".strip()


class _Run:
    """The works on all states.

    Args:
        session: The settings and the folder.
        ranks: The processes.
    """

    def __init__(self, session: Session, ranks: Ranks) -> None:
        self._session, self._ranks = session, ranks
        self.rows: list[dict[str, Any]] = []

    def measure(self, state: str, works: Sequence[Work], rounds: int) -> None:
        """Save a state in all formats, do works in turns, and keep their samples."""
        folders = {name: self._session.scratch / f"{state}-{name}" for name in _SAVES}
        self._ranks.do("build", state=state, layouts=["same"])
        for name, method in _SAVES.items():
            say(f"state {state} is saved: {_TITLES[name]}")
            self._ranks.do("measure", work=method, path=str(folders[name]))
        self._ranks.do("drop")
        self._ranks.do("build", state=state, layouts=["swapped"])
        samples: dict[str, dict[Work, dict[int, float]]] = {kind: {w: {} for w in works} for kind in ("seconds", "cpu")}
        order = random.Random(f"{self._session.seed} {state}")
        for i in range(-1, rounds):  # the first is the warm-up
            for work in order.sample(works, len(works)):
                say(f"state {state}: round {i + 1} of {rounds}: {' '.join(work)}")
                found = self._do(work, folders[work[1]], i < 0 and work not in _LOOKS)
                for kind, kept in samples.items():
                    if i >= 0:
                        kept[work][i] = found[kind]
        self._ranks.do("drop")
        for folder in folders.values():
            self._session.remove(folder)
        self.rows += [
            {"state": state, "work": work[0], "format": work[1], **{kind: kept[work] for kind, kept in samples.items()}}
            for work in works
        ]

    def _do(self, work: Work, folder: Path, check: bool) -> dict[str, float]:
        self._session.cache(folder)
        if check:
            self._ranks.do("zero", layout="swapped")
        found = slower(self._ranks.do("measure", work=work[0], path=str(folder), layout="swapped"))
        if check:
            self._ranks.do("check", layout="swapped")
        return found


def measure(session: Session) -> dict[str, Any]:
    """Run the ranks and collect what they measured.

    Returns:
        ``works``: rows with a ``state``, a ``work``, the ``format`` of the checkpoint, and by round the ``seconds`` of
        the slower rank and those on the cores, ``cpu``, of the busier one. Then ``goals`` and ``versions``.
    """
    with session.started() as (ranks,):
        versions = versions_of([ranks])
        run = _Run(session, ranks)
        run.measure("A", [*_LOADS, _BY_PADDLE], session.rounds)
        for state in ("D",) if session.quick else ("D", "E"):
            run.measure(state, [*_LOOKS, *_LOADS], min(session.rounds, _MANY_ROUNDS))
    return {"works": run.rows, "goals": _goals(_samples(run.rows, "A", "seconds")), "versions": versions}


def _samples(rows: Sequence[Mapping[str, Any]], state: str, kind: str) -> dict[Work, Mapping[int, float]]:
    """The samples of one state, by work."""
    return {(row["work"], row["format"]): row[kind] for row in rows if row["state"] == state}


def _goals(seconds: Samples) -> list[dict[str, Any]]:
    """Each goal, and whether state A meets it."""
    rows = []
    for work in _LOADS[1:]:
        title, ratio = f"A: load of {_TITLES[work[1]]}, resharded", _ratio(seconds, work, _LOADS[0])
        rows.append(goal(title, f"at most {_MOST:g}x our own format", interval(ratio, times), ratio[0] <= _MOST))
    ratio = _ratio(seconds, _BY_PADDLE, ("load", "paddle"))
    title = f"A: load of {_TITLES['paddle']}, resharded"
    return [*rows, goal(title, f"at least {_LEAST:g}x Paddle", interval(ratio, times), ratio[0] >= _LEAST)]


def _ratio(samples: Samples, work: Work, base: Work) -> tuple[float, float, float]:
    ratio = paired_ratio(samples[work], samples[base])
    assert ratio is not None
    return ratio


def as_markdown(found: Mapping[str, Any]) -> str:
    """The report."""
    lines = heading("Formats of others", found)
    for state in dict.fromkeys(row["state"] for row in found["works"]):
        lines += [f"## {_STATES[state]}", "", *_table(found["works"], state), ""]
    return "\n".join([*lines, *goals_section(found["goals"]), *notes(_NOTES)])


def _table(works: Sequence[Mapping[str, Any]], state: str) -> list[str]:
    seconds, cpu = (_samples(works, state, kind) for kind in ("seconds", "cpu"))
    titles = {"load": "load, {}", "load_paddle": "load by Paddle itself, {}", "read_metadata": "what is in it, {}"}
    rows = []
    for work in seconds:
        own = ("read_metadata" if work in _LOOKS else "load", "own")
        cells = [titles[work[0]].format(_TITLES[work[1]])]
        for samples in (seconds, cpu):
            cells.append(duration(median_of(samples[work])))
            cells.append("" if work == own else interval(_ratio(samples, work, own), times))
        rows.append(cells)
    return table(["", "time", ": own format (95 %)", "on the cores", ": own format (95 %)"], rows)


if __name__ == "__main__":
    raise SystemExit(main("foreign", measure, as_markdown))
