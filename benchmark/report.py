"""From samples to medians, ratios and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmark.schedule import JOBS, Peer

__all__ = ["Results", "as_json", "as_markdown"]

_RESAMPLES = 4000
_FEWEST_FOR_INTERVAL = 3
_STATES = {
    "A": "State A: 6 layers of hidden size 1536, float32, 0.68 GB",
    "B": "State B: 20,000 float32 tensors of 8 x 8, 5 MB",
}
_NOTES = """
Two ranks on this machine over gloo, for every library. All processes live through the whole run and sleep while it is
another's turn. In every round the libraries take turns in shuffled order; a rank first waits for the other one, and a
round's time is that of the slower rank. Saves go to a new folder each, which is deleted afterwards; pending writes are
flushed between measurements. Loads find the files in the page cache. Every kind of load was compared once, value by
value. Cells show the median, and how it relates to that of paddle_dist_ckpt, with a 95 % bootstrap interval where there
are three rounds or more.

What is compared is not alike: paddle_dist_ckpt computes a checksum for every block, checks it on load, and syncs files
to the disk. torch DCP syncs but has no checksums. Paddle's own has neither, and on CPU can load at all only because its
calls of `Tensor.cuda` are made to do nothing. The plain probe is no library: each rank writes (with fsync) or reads one
buffer and hashes it in chunks of 2 MiB, without tensors or metadata; it shows what the machine allows.
""".strip()


@dataclass(slots=True)
class Results:
    """All that was measured.

    Attributes:
        machine: See :mod:`.machine`.
        versions: Of everything that was measured.
        settings: Of the run.
        peers: Who took part.
        seconds: Samples by state, work and peer's name.
        memory: Bytes by work and peer's name: ``peak`` and ``kept``, a sample each.
    """

    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    peers: Sequence[Peer]
    seconds: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    memory: dict[tuple[str, str], list[dict[str, int]]] = field(default_factory=dict)


def as_json(results: Results) -> dict[str, Any]:
    """Everything, samples included."""
    return {
        "machine": dict(results.machine),
        "versions": dict(results.versions),
        "settings": dict(results.settings),
        "seconds": [
            {"state": state, "work": work, "peer": peer, "median": float(np.median(samples)), "samples": samples}
            for (state, work, peer), samples in results.seconds.items()
        ],
        "memory": [
            {"state": "A", "work": work, "peer": peer, "samples": samples}
            for (work, peer), samples in results.memory.items()
        ],
    }


def as_markdown(results: Results) -> str:
    """The report."""
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    lines = [
        "# Benchmark",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB of memory, {machine['filesystem']}, "
        f"{machine['kernel']}, Python {machine['python']}; {versions}. Load average before the run: "
        f"{machine['load_before']}.",
    ]
    for state in dict.fromkeys(state for state, _, _ in results.seconds):
        lines += ["", f"## {_STATES[state]}", "", *_time_table(results, state)]
    if results.memory:
        lines += ["", "## Memory that a call needs beyond the tensors, state A", "", *_memory_table(results)]
    return "\n".join([*lines, "", "## How it was measured", "", _NOTES, ""])


def _time_table(results: Results, state: str) -> list[str]:
    rows = []
    for work in [work for job in JOBS if job.state == state for work in job.works]:
        ours = results.seconds.get((state, work, "ours"))
        cells = [_time_cell(results.seconds.get((state, work, peer.name)), ours) for peer in results.peers]
        rows.append([work, *cells])
    return _table(["", *(peer.title for peer in results.peers)], rows)


def _time_cell(samples: Sequence[float] | None, ours: Sequence[float] | None) -> str:
    if not samples:
        return "–"
    median = _duration(float(np.median(samples)))
    if ours is None or samples is ours:
        return median
    ratio = f"{np.median(samples) / np.median(ours):.3g}x"
    if min(len(samples), len(ours)) < _FEWEST_FOR_INTERVAL:
        return f"{median}: {ratio}"
    low, high = _ratio_interval(samples, ours)
    return f"{median}: {ratio} ({low:.3g} to {high:.3g})"


def _ratio_interval(samples: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the ratio of the medians."""
    generator = np.random.default_rng(0)
    medians = []
    for values in (samples, base):
        drawn = generator.choice(np.array(values), (_RESAMPLES, len(values)))
        medians.append(np.median(drawn, axis=1))
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    return float(low), float(high)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _memory_table(results: Results) -> list[str]:
    peers = [peer for peer in results.peers if any(name == peer.name for _, name in results.memory)]
    rows = []
    for work in dict.fromkeys(work for work, _ in results.memory):
        cells = []
        for peer in peers:
            samples = results.memory[work, peer.name]
            peak, kept = (np.median([sample[kind] for sample in samples]) / 1e6 for kind in ("peak", "kept"))
            cells.append(f"{peak:.0f} MB, {max(0, kept):.0f} MB kept")
        rows.append([work, *cells])
    return _table(["most at any moment, worse rank", *(peer.title for peer in peers)], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
