"""Measures saves and loads of several libraries on two ranks.

    python -m benchmark.run [--quick] [--smoke]

Prints a table, and writes it and all samples to benchmark/results/. Takes about 12 minutes, with --quick about 3.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.command import main
from benchmark.goals import goals
from benchmark.peers import PROBES, Peer, peers_named
from benchmark.ranks import Ranks
from benchmark.report import (
    by_work,
    duration,
    goals_section,
    heading,
    interval,
    median_of,
    notes,
    paired_ratio,
    table,
    times,
)
from benchmark.schedule import JOBS, Job, Plan
from benchmark.session import Session, say, slower, versions_of
from benchmark.states import LAYOUTS

_MEMORY_ROUNDS = 3
_LARGE_GB = 12  # with room for what is deleted but not yet gone
_SMOKE_IDLE_SECONDS = 0.01

Key = tuple[str, str, str]
"""State, work and peer's name."""

_FEWEST_FOR_INTERVAL = 3
_STATES = {
    "A": "State A: 6 layers of hidden size 1536, float32, 0.68 GB",
    "B": "State B: 20,000 float32 tensors of 8 x 8, 5 MB",
}
_NOTES = """
Two ranks on this machine over gloo, on the number of cores given above, for every library. All processes live through
the whole run and sleep while it is another's turn. In every round the libraries take turns in shuffled order; a rank
first waits for the other one, and a round's time is that of the slower rank. Saves go to a new folder each, which is
deleted afterwards; pending writes are flushed between measurements. Loads find the files in the page cache, but for the
cold ones, before which it is dropped. Every kind of load was compared once, value by value. Cells show the median time,
and the median over the rounds of its ratio to that of paddle_dist_ckpt in the same round, with a 95 % bootstrap
interval where there are three rounds or more.

What is compared is not alike: paddle_dist_ckpt computes a checksum for every block, checks it on load, and syncs files
to the disk. torch DCP syncs but has no checksums. Paddle's own has neither, and on CPU can load at all only because its
calls of `Tensor.cuda` are made to do nothing. The probes are no libraries: each rank writes (with fsync) or reads one
buffer and hashes it in chunks of 2 MiB, without tensors or metadata; they show what the machine allows. Memory is the
growth of the process's resident set to its peak (VmHWM, reset before the call).
""".strip()


Samples = Mapping[Key, Any]


class _Run:
    """One run of the benchmark.

    Args:
        session: Its settings and folder.
        all_ranks: The peers' processes.
    """

    def __init__(self, session: Session, all_ranks: Sequence[Ranks]) -> None:
        self._session, self._ranks = session, {ranks.peer.name: ranks for ranks in all_ranks}
        self._plan = Plan(session.peers, session.rounds, session.quick, session.seed)
        self._unchecked: set[tuple[str, str]] = set()
        self._saves = 0
        self.seconds: dict[Key, dict[int, float]] = {}
        self.planning: dict[Key, list[float]] = {}
        self.memory: dict[Key, list[dict[str, float]]] = {}

    def measure(self, state: str) -> None:
        """Everything about one state."""
        for peer in self._plan.peers:
            say(f"state {state}: {peer.title} gets ready")
            self._ranks[peer.name].do("build", state=state, layouts=LAYOUTS[state])
            self._ranks[peer.name].do("measure", work="save", path=str(self._checkpoint(peer)))
        self._unchecked = {(peer.name, layout) for peer in self._plan.peers for layout in LAYOUTS[state]}
        for peer, job in self._plan.warm_up(state):
            say(f"state {state}: warm-up: {peer.title}: {job.works[0]}")
            self._do(peer, job)
        for i, jobs in enumerate(self._plan.in_rounds(state)):
            for peer, job in jobs:
                say(f"state {state}: round {i + 1} of {self._plan.rounds}: {peer.title}: {job.works[0]}")
                for work, answers in self._do(peer, job):
                    self._record(i, (state, work, peer.name), answers)
        if state == "A":
            self._measure_memory()
        for peer in self._plan.peers:
            self._ranks[peer.name].do("drop")
            self._session.remove(self._checkpoint(peer))

    def _do(self, peer: Peer, job: Job) -> list[tuple[str, list[dict[str, float]]]]:
        """Have a peer do a job; each rank's measurement, by work."""
        if job.renew:
            self._ranks[peer.name].do("build", state=job.state, layouts=[job.layout or "same"])
        return [(work, self._call(peer, job)) for work in job.works]

    def _record(self, i: int, key: Key, answers: Sequence[Mapping[str, float]]) -> None:
        """Keep the slower rank's measurement."""
        found = slower(answers)
        self.seconds.setdefault(key, {})[i] = found["seconds"]
        if "plan" in found:
            self.planning.setdefault(key, []).append(found["plan"])

    def _call(self, peer: Peer, job: Job, memory: bool = False) -> list[dict[str, float]]:
        """Save to a new folder, or load from the page cache; each rank's measurement."""
        ranks = self._ranks[peer.name]
        time.sleep(min(job.idle, _SMOKE_IDLE_SECONDS) if self._session.smoke else job.idle)
        if job.layout is None:
            self._saves += 1
            path = self._session.scratch / f"save-{self._saves}"
            answers = ranks.do("measure", work="save", path=str(path), memory=memory)
            self._session.remove(path)
            return answers
        unchecked = (peer.name, job.layout) in self._unchecked
        if unchecked:
            ranks.do("zero", layout=job.layout)
        self._session.cache(self._checkpoint(peer), job.cold)
        path = self._checkpoint(peer)
        answers = ranks.do("measure", work="load", path=str(path), layout=job.layout, memory=memory)
        if unchecked:
            ranks.do("check", layout=job.layout)
            self._unchecked.remove((peer.name, job.layout))
        return answers

    def _measure_memory(self) -> None:
        for peer in self._plan.peers:
            if peer.name in PROBES:
                continue
            for job in (job for job in JOBS if job.state == "A" and not job.idle):
                say(f"memory: {peer.title}: {job.works[0]}")
                for _ in range(1 if self._session.smoke else _MEMORY_ROUNDS):
                    self._record_memory(("A", job.works[0], peer.name), self._call(peer, job, memory=True))

    def _record_memory(self, key: Key, answers: Sequence[Mapping[str, float]]) -> None:
        """Keep the worse rank's measurement."""
        worse = max(answers, key=lambda answer: answer["peak"])
        self.memory.setdefault(key, []).append({kind: worse[kind] for kind in ("peak", "kept")})

    def measure_large(self) -> None:
        """The memory that this library needs for a state of 4 GB."""
        ranks = self._ranks["ours"]
        ranks.do("build", state="C", layouts=["same"])
        path = self._session.scratch / "large"
        for work, title in (("save", "save"), ("load", "load, same layout")):
            for i in range(2):  # the first time connects the ranks
                if work == "save" and i:
                    self._session.remove(path)
                answers = ranks.do("measure", work=work, path=str(path), memory=True)
            self._record_memory(("C", title, "ours"), answers)
        ranks.do("drop")
        self._session.remove(path)

    def _checkpoint(self, peer: Peer) -> Path:
        """The checkpoint that a peer loads from."""
        return self._session.scratch / f"{peer.name}-checkpoint"


def measure(session: Session) -> dict[str, Any]:
    """Measure all states.

    Returns:
        ``seconds``, the slower rank's by round; ``planning``, the seconds until this library knew what to write or
        read; ``memory`` in bytes, ``peak`` and ``kept``: each in rows with the ``samples`` of a state, work and peer.
        Then ``goals`` and ``versions``.
    """
    with_ours = any(peer.name == "ours" for peer in session.peers)
    large = with_ours and "A" in session.states and not session.quick
    if large:
        session.require_space(_LARGE_GB)
    with session.started() as all_ranks:
        versions = versions_of(all_ranks)
        run = _Run(session, all_ranks)
        if with_ours:  # before anything else takes long
            next(ranks for ranks in all_ranks if ranks.peer.name == "ours").do("check_memory_probe")
        for state in session.states:
            run.measure(state)
        if large:
            say("memory for a state of 4 GB")
            run.measure_large()
    return {
        "versions": versions,
        "peers": [peer.name for peer in session.peers],
        "seconds": [{**row, "median": median_of(row["samples"])} for row in _rows(run.seconds)],
        "planning": [{**row, "median": float(np.median(row["samples"]))} for row in _rows(run.planning)],
        "memory": _rows(run.memory),
        "goals": goals(run.seconds, run.planning, run.memory),
    }


def _rows(found: Mapping[Key, Any]) -> list[dict[str, Any]]:
    return [
        {"state": state, "work": work, "peer": peer, "samples": samples}
        for (state, work, peer), samples in found.items()
    ]


def as_markdown(found: Mapping[str, Any]) -> str:
    """The report."""
    peers, seconds, memory = peers_named(*found["peers"]), by_work(found["seconds"]), by_work(found["memory"])
    lines = heading("Benchmark", found)
    for state in dict.fromkeys(state for state, _, _ in seconds):
        lines += [f"## {_STATES[state]}", "", *_time_table(seconds, state, peers), ""]
    if memory:
        lines += ["## Memory that a call needs beyond the tensors", "", *_memory_table(memory, peers), ""]
    return "\n".join([*lines, *goals_section(found["goals"]), *notes(_NOTES)])


def _time_table(seconds: Samples, state: str, peers: Sequence[Peer]) -> list[str]:
    rows = []
    for work in [work for job in JOBS if job.state == state for work in job.works]:
        ours = seconds.get((state, work, "ours"))
        rows.append([work, *(_time_cell(seconds.get((state, work, peer.name)), ours) for peer in peers)])
    return table(["", *(peer.title for peer in peers)], rows)


def _time_cell(samples: Mapping[int, float] | None, ours: Mapping[int, float] | None) -> str:
    if not samples:
        return "–"
    median = duration(median_of(samples))
    ratio = paired_ratio(samples, ours) if ours and samples is not ours else None
    if ratio is None:
        return median
    return f"{median}: {interval(ratio, times) if len(samples) >= _FEWEST_FOR_INTERVAL else times(ratio[0])}"


def _memory_table(memory: Samples, peers: Sequence[Peer]) -> list[str]:
    peers = [peer for peer in peers if any(name == peer.name for _, _, name in memory)]
    rows = [
        [f"state {state}: {work}", *(_memory_cell(memory.get((state, work, peer.name))) for peer in peers)]
        for state, work in dict.fromkeys((state, work) for state, work, _ in memory)
    ]
    return table(["most at any moment, worse rank", *(peer.title for peer in peers)], rows)


def _memory_cell(samples: Sequence[Mapping[str, int]] | None) -> str:
    if not samples:
        return "–"
    peak, kept = (np.median([sample[kind] for sample in samples]) / 2**20 for kind in ("peak", "kept"))
    return f"{peak:.0f} MiB, {max(0, kept):.0f} MiB kept"


if __name__ == "__main__":
    raise SystemExit(main("run", measure, as_markdown))
