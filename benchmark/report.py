"""From samples to medians, ratios and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmark.goals import goals_table
from benchmark.ratios import median_of, paired_ratio
from benchmark.schedule import JOBS, Peer

__all__ = ["Results", "as_json", "as_markdown", "duration", "table"]

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


@dataclass(slots=True)
class Results:
    """All that was measured.

    Attributes:
        machine: See :mod:`.machine`.
        versions: Of everything that was measured.
        settings: Of the run.
        peers: Who took part.
        seconds: Samples by state, work and peer's name: by round.
        planning: Seconds until this library knew what to write or read, slower rank, by state, work and peer's name.
        memory: Bytes by state, work and peer's name: ``peak`` and ``kept``, a sample each.
    """

    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    peers: Sequence[Peer]
    seconds: dict[tuple[str, str, str], dict[int, float]] = field(default_factory=dict)
    planning: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    memory: dict[tuple[str, str, str], list[dict[str, int]]] = field(default_factory=dict)


def as_json(results: Results) -> dict[str, Any]:
    """Everything, samples included."""
    return {
        "machine": dict(results.machine),
        "versions": dict(results.versions),
        "settings": dict(results.settings),
        "seconds": [
            {"state": state, "work": work, "peer": peer, "median": median_of(samples), "samples": samples}
            for (state, work, peer), samples in results.seconds.items()
        ],
        "planning": [
            {"state": state, "work": work, "peer": peer, "median": float(np.median(samples)), "samples": samples}
            for (state, work, peer), samples in results.planning.items()
        ],
        "memory": [
            {"state": state, "work": work, "peer": peer, "samples": samples}
            for (state, work, peer), samples in results.memory.items()
        ],
    }


def as_markdown(results: Results) -> str:
    """The report."""
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    lines = [
        "# Benchmark",
        "",
        f"{machine['cpu']}, {results.settings['cores']} of {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB of memory, {machine['filesystem']}, "
        f"{machine['kernel']}, Python {machine['python']}; {versions}. Load average before the run: "
        f"{machine['load_before']}.",
    ]
    for state in dict.fromkeys(state for state, _, _ in results.seconds):
        lines += ["", f"## {_STATES[state]}", "", *_time_table(results, state)]
    if results.memory:
        lines += ["", "## Memory that a call needs beyond the tensors", "", *_memory_table(results)]
    lines += ["", "## Goals", "", *table(*goals_table(results.seconds, results.memory))]
    return "\n".join([*lines, "", "## How it was measured", "", _NOTES, ""])


def _time_table(results: Results, state: str) -> list[str]:
    rows = []
    for work in [work for job in JOBS if job.state == state for work in job.works]:
        ours = results.seconds.get((state, work, "ours"))
        cells = [_time_cell(results.seconds.get((state, work, peer.name)), ours) for peer in results.peers]
        rows.append([work, *cells])
    return table(["", *(peer.title for peer in results.peers)], rows)


def _time_cell(samples: Mapping[int, float] | None, ours: Mapping[int, float] | None) -> str:
    if not samples:
        return "–"
    median = duration(median_of(samples))
    ratio = paired_ratio(samples, ours) if ours and samples is not ours else None
    if ratio is None:
        return median
    middle, low, high = ratio
    return f"{median}: {middle:.3g}x" + (f" ({low:.3g} to {high:.3g})" if len(samples) >= _FEWEST_FOR_INTERVAL else "")


def duration(seconds: float) -> str:
    """Seconds as a reader wants them."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _memory_table(results: Results) -> list[str]:
    peers = [peer for peer in results.peers if any(name == peer.name for _, _, name in results.memory)]
    rows = []
    for state, work in dict.fromkeys((state, work) for state, work, _ in results.memory):
        cells = []
        for peer in peers:
            samples = results.memory.get((state, work, peer.name))
            if not samples:
                cells.append("–")
                continue
            peak, kept = (np.median([sample[kind] for sample in samples]) / 2**20 for kind in ("peak", "kept"))
            cells.append(f"{peak:.0f} MiB, {max(0, kept):.0f} MiB kept")
        rows.append([f"state {state}: {work}", *cells])
    return table(["most at any moment, worse rank", *(peer.title for peer in peers)], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, all but its first column aligned to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
