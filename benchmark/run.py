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
from benchmark.peers import PROBES, Peer
from benchmark.ranks import Ranks
from benchmark.report import median_of
from benchmark.run_report import as_markdown
from benchmark.schedule import JOBS, Job, Plan
from benchmark.session import Session, say, slower, versions_of
from benchmark.states import LAYOUTS

_MEMORY_ROUNDS = 3
_LARGE_GB = 12  # with room for what is deleted but not yet gone
_SMOKE_IDLE_SECONDS = 0.01

Key = tuple[str, str, str]
"""State, work and peer's name."""


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


if __name__ == "__main__":
    raise SystemExit(main("run", measure, as_markdown))
