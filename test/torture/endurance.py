"""Endurance: four processes save and load for two minutes; their memory, descriptors and threads stay what they are."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paddle_dist_ckpt.control import NoTransport, TcpHub
from paddle_dist_ckpt.testing import SimulatedRank
from test.control.file_store import FileStore
from test.waiting import PATIENCE

from .forked import Child, Failed
from .groups import OPTIONS
from .states import blank_states, check_states, states_of

NAME = "endurance"
RANKS, SECONDS = 4, 120.0
_MOST_GROWTH = 2 << 20
"""Bytes by which a rank's memory may grow between the second third of its time and the last, for chance."""


class Sample(NamedTuple):
    """What a process has: bytes of memory, open descriptors, threads."""

    memory: int
    descriptors: int
    threads: int


def attempt(seed: int, folder: Path) -> Counter[str]:
    """Save and load for two minutes."""
    return endure(RANKS, folder, SECONDS, 100_000)


def endure(ranks: int, folder: Path, seconds: float, rounds: int) -> Counter[str]:
    """Save and load again and again for so long, or so often."""
    notes = folder / "notes"
    notes.mkdir()
    with ExitStack() as ending:
        work = [partial(_one_rank, rank, ranks, folder / "ckpt", notes, seconds, rounds) for rank in range(ranks)]
        results = [child.result(seconds + PATIENCE) for child in [ending.enter_context(Child(job)) for job in work]]
    for rank, samples in enumerate(results):
        assert not isinstance(samples, Failed), samples
        _check_flat(rank, samples)
    return Counter({"saved and loaded": len(results[0])})


def _one_rank(rank: int, ranks: int, folder: Path, notes: Path, seconds: float, rounds: int) -> list[Sample]:
    hub = TcpHub(rank, range(ranks), 0, FileStore(notes), "k", bind_host="127.0.0.1", bootstrap_timeout=PATIENCE)
    saver, samples = SimulatedRank(rank, tuple(range(ranks)), hub, NoTransport()), list[Sample]()
    end = time.monotonic() + seconds
    while len(samples) < rounds and _all_go_on(hub, end):
        version = len(samples) % 50
        state = states_of(version, ranks)[rank]
        if version % 2:
            saver.save_in_background(state, folder, version % 3, OPTIONS).result()
        else:
            saver.save(state, folder, version % 3, OPTIONS)
        state = blank_states(ranks)[rank]
        saver.load(state, folder, version % 3)
        assert state["n"] == version
        check_states(
            [state]
            if ranks == 1
            else [*states_of(version, ranks)[:rank], state, *states_of(version, ranks)[rank + 1 :]]
        )
        samples.append(_sample())
    hub.close()
    return samples


def _all_go_on(hub: TcpHub, end: float) -> bool:
    """Whether the coordinator says that there is time left."""

    def decide(messages: object) -> dict[int, bytes]:
        return dict.fromkeys(hub.ranks, b"" if time.monotonic() >= end else b"on")

    with hub.session("go on", PATIENCE) as session:
        return bool(session.gather_scatter("go on", lambda: b"", decide))


def _sample() -> Sample:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threading.active_count())


def _check_flat(rank: int, samples: list[Sample]) -> None:
    """Compare the last third with the one before it; the first third is warming up."""
    third = len(samples) // 3
    assert third >= 3, f"{len(samples)} rounds are too few"
    middle, last = samples[third : 2 * third], samples[2 * third :]
    for what, most in (("memory", _MOST_GROWTH), ("descriptors", 0), ("threads", 0)):
        before, after = (statistics.median(getattr(sample, what) for sample in part) for part in (middle, last))
        assert after <= before + most, f"rank {rank}: {what} have grown from {before} to {after} in {len(last)} rounds"
