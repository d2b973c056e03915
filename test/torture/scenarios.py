"""Saves that are made in five ways, recorded: what each does to a disk, and when who is told that it is done."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from paddle_dist_ckpt.manager import CheckpointManager, manager
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.storage import direct
from paddle_dist_ckpt.testing import NumpyAdapter, SimulatedRank, run_ranks
from test.jobs import all_ok, save_on

from .calls import Disks
from .dead import leave_dead_save
from .leftovers import age_all
from .recorder import Recorder
from .states import states_of

__all__ = ["FOLDER", "SCENARIOS", "STEPS", "Made", "Recorded", "managers", "options_of", "past_the_cache"]

FOLDER = "some/ckpt"
"""The folder that is saved to; neither it nor the one above it is there at first."""
STEPS = (30, 40, 50)
_SETUP_STEPS = (10, 20)


@dataclass(frozen=True, slots=True)
class Made:
    """A save that was made while the disk was watched.

    Attributes:
        begun: How much had been done before it began.
        reported: How much had been done when the first rank was told that it is committed.
        unique_id: Its id.
        version: What was saved.
    """

    begun: int
    reported: int
    unique_id: int
    version: int


@dataclass(slots=True)
class Recorded:
    """Some saves and what they did to a disk.

    Attributes:
        name: Which scenario it is.
        ranks: How many ranks saved.
        recorder: What they did.
        before: The version under each id before.
        made: The saves, one after the other.
        keep_last: With a manager, how many steps it keeps; else 0.
    """

    name: str
    ranks: int
    recorder: Recorder
    before: dict[int, int]
    made: list[Made] = field(default_factory=list)
    keep_last: int = 0


def options_of(rng: random.Random) -> SaveOptions:
    """Options that make a difference to what is done to the disk."""
    suffix = rng.choice((None, ".shards"))
    return SaveOptions(block_bytes=4096, timeout=60, snapshot_bytes=rng.choice((None, 0)), data_suffix=suffix)


@contextmanager
def past_the_cache(wanted: bool) -> Iterator[None]:
    """Have files written past the page cache, if wanted, where the filesystem can do that at all."""
    if not wanted:
        yield
        return
    with mock.patch.object(direct, "_filesystem", return_value="ext4"):
        yield


def _watch(recorded: Recorded, disks: Disks, version: int, unique_id: int | None, rng: random.Random) -> None:
    """Save a version, in the background or not."""
    in_background, options = recorded.name == "async", options_of(rng)
    states, paths, begun = states_of(version, recorded.ranks), disks.paths(FOLDER), recorded.recorder.now()
    told: list[int] = []

    def work(rank: SimulatedRank) -> int:
        if in_background:
            report = rank.save_in_background(states[rank.rank], paths[rank.rank], unique_id, options).result()
        else:
            report = rank.save(states[rank.rank], paths[rank.rank], unique_id, options)
        told.append(recorded.recorder.now())
        return report.unique_id

    ids = set(all_ok(run_ranks(recorded.ranks, work)))
    assert len(ids) == 1
    recorded.made.append(Made(begun, min(told), ids.pop(), version))


def _prepared(disks: Disks, ranks: int, rng: random.Random, versions: dict[int, int]) -> None:
    """A folder with these versions, and now and then with what a dead save has left."""
    for unique_id, version in versions.items():
        save_on(states_of(version, ranks), disks.roots[0] / FOLDER, unique_id)
    if rng.random() < 0.4:
        leave_dead_save(disks.roots[0] / FOLDER, ranks, rng, rng.choice((None, *versions)), versions)
        age_all(disks.roots[0])


def _saves(name: str, versions: dict[int, int], ids: list[int | None]) -> Callable[[Disks, random.Random], Recorded]:
    """A scenario of saves under these ids into a folder that has these versions."""

    def record(disks: Disks, rng: random.Random) -> Recorded:
        ranks, before = len(disks.views), dict(versions)
        if before:
            _prepared(disks, ranks, rng, before)
        recorded = Recorded(name, ranks, Recorder(disks), before)
        with recorded.recorder, past_the_cache(rng.random() < 0.5):
            for number, unique_id in enumerate(ids):
                _watch(recorded, disks, 20 + number, unique_id, rng)
        return recorded

    return record


def _numpys(ranks: Any, state: Any, staging: Any = None, check: Callable[[], object] = lambda: None) -> Any:
    def find() -> tuple[Any, NumpyAdapter]:
        check()
        return state, NumpyAdapter()

    return find


@contextmanager
def managers() -> Iterator[Callable[..., CheckpointManager]]:
    """Makes managers of numpy's tensors for simulated ranks."""
    with (
        mock.patch.object(manager, "connected", lambda rank, coordinator, options: rank.connection),
        mock.patch.object(manager, "paddles", _numpys),
    ):
        yield lambda rank, root, **others: CheckpointManager(root, process_group=rank, **others)


def _managed(disks: Disks, rng: random.Random) -> Recorded:
    """A manager's steps, of which it keeps the last ones."""
    ranks, keep_last, in_background = len(disks.views), rng.choice((1, 2)), rng.random() < 0.5
    options, root = options_of(rng), "steps"
    before = {step: step for step in _SETUP_STEPS[-keep_last:]}
    told: dict[int, list[int]] = {step: [] for step in STEPS}
    begun: dict[int, int] = {}

    def run(rank: SimulatedRank, steps: tuple[int, ...], path: Path, now: Callable[[], int]) -> None:
        with make(rank, path, keep_last=keep_last, async_save=in_background, options=options) as managed:
            for step in steps:
                begun.setdefault(step, now())
                managed.save(step, states_of(step, ranks)[rank.rank])
                managed.wait()
                told.setdefault(step, []).append(now())

    with managers() as make:
        all_ok(run_ranks(ranks, lambda rank: run(rank, _SETUP_STEPS, disks.roots[0] / root, lambda: 0)))
        recorded = Recorded("manager", ranks, Recorder(disks), before, keep_last=keep_last)
        with recorded.recorder as recorder, past_the_cache(rng.random() < 0.5):
            all_ok(run_ranks(ranks, lambda rank: run(rank, STEPS, disks.paths(root)[rank.rank], recorder.now)))
    recorded.made += [Made(begun[step], min(told[step]), step, step) for step in STEPS]
    return recorded


SCENARIOS: tuple[Callable[[Disks, random.Random], Recorded], ...] = (
    _saves("first save", {}, [None]),
    _saves("over", {3: 2, 5: 1}, [5]),
    _saves("next id", {0: 1, 1: 2}, [None, None]),
    _saves("async", {0: 1, 1: 2}, [None, 1]),
    _managed,
)
"""Each makes a disk and records what saves do to it."""
