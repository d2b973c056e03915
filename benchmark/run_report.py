"""The report of :mod:`benchmark.run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmark.peers import Peer, peers_named
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
from benchmark.schedule import JOBS

__all__ = ["as_markdown"]

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


Samples = Mapping[tuple[str, str, str], Any]


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
