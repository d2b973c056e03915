"""Mixes: jobs save, load, verify, delete and list in one folder at once, with pauses at calls that are drawn."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddle_dist_ckpt import delete_checkpoint, list_checkpoints, verify
from paddle_dist_ckpt.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
)
from paddle_dist_ckpt.manager import CheckpointManager
from paddle_dist_ckpt.manager.steps import step_folder
from paddle_dist_ckpt.options import LoadOptions
from paddle_dist_ckpt.testing import run_ranks
from test.jobs import all_ok, save_on, try_load

from .calls import Call, Disks, Interposer, Perform
from .leftovers import check_later_save
from .scenarios import managers, options_of
from .states import LEFT_ALONE, blank_states, check_states, states_of, versions_in

NAME = "mixes"
_JOBS = 4
_DEEDS = 6
_GIVEN_IDS = (0, 1)
_FOLDER, _STEPS = "ckpt", "steps"
_KEEP_LAST = 2


@dataclass(frozen=True, slots=True)
class _Saved:
    """A save that has succeeded: its id, its version, and when it began and ended."""

    unique_id: int
    version: int
    begun: float
    ended: float


@dataclass(slots=True)
class _World:
    """What all jobs have done."""

    disks: Disks
    make: Callable[..., CheckpointManager]
    saved: list[_Saved] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)

    def is_outdated(self, unique_id: int, version: int, moment: float) -> bool:
        """Whether a save has begun after that of this version had ended, and ended before a moment."""
        mine = [save.ended for save in self.saved if save.version == version]
        later = [save for save in self.saved if save.unique_id == unique_id and save.ended < moment]
        return any(save.begun > ended for save in later for ended in mine)


def attempt(seed: int, folder: Path) -> Counter[str]:
    """Let four jobs do six things each, at once; then see what is left."""
    rng, disks = random.Random(seed), Disks(folder, _JOBS)
    pause = rng.choice((0.0, 0.0002, 0.002))

    def handle(call: Call, perform: Perform) -> Any:
        if pauses.random() < 0.1:
            time.sleep(pause)
        return perform()

    pauses = random.Random(seed + 1)
    with managers() as make, Interposer(disks, handle):
        world = _World(disks, make)
        for unique_id in _GIVEN_IDS:
            _save(world, 0, rng, unique_id, 1 + unique_id)
        jobs: list[Callable[[], None]] = [_job(world, job, random.Random(rng.random())) for job in range(_JOBS)]
        if rng.random() < 0.3:
            jobs[0] = _manager(world, random.Random(rng.random()))
        _run(jobs)
    (root,) = disks.folders(_FOLDER)
    _check_end(world, root)
    return world.outcomes


def _run(jobs: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    started = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if failures:
        raise AssertionError(f"{type(failures[0]).__name__}: {failures[0]}") from failures[0]


def _job(world: _World, job: int, rng: random.Random) -> Callable[[], None]:
    def run() -> None:
        for number in range(_DEEDS):
            deed = rng.choices((_save_next, _save_given, _load, _load_step, _verify, _delete), (3, 4, 5, 1, 1, 1))[0]
            deed(world, job, rng, 100 * (job + 1) + number)

    return run


def _path(world: _World, job: int) -> Path:
    return world.disks.paths(_FOLDER)[job]


def _save(world: _World, job: int, rng: random.Random, unique_id: int | None, version: int) -> None:
    world.tried.add(version)
    begun = time.monotonic()
    report = save_on(states_of(version, rng.choice((1, 1, 2))), _path(world, job), unique_id, options_of(rng))[0]
    world.saved.append(_Saved(report.unique_id, version, begun, time.monotonic()))
    world.outcomes["saved"] += 1


def _save_next(world: _World, job: int, rng: random.Random, version: int) -> None:
    _save(world, job, rng, None, version)


def _save_given(world: _World, job: int, rng: random.Random, version: int) -> None:
    _save(world, job, rng, rng.choice(_GIVEN_IDS), version)


def _load(world: _World, job: int, rng: random.Random, version: int) -> None:
    """Load an id by one rank or two, which read for each other or not: one whole version, of the right time."""
    unique_id = rng.choice((None, *list_checkpoints(_path(world, job))))
    options = LoadOptions(exchange=rng.choice(("auto", "always", "never")), timeout=60)
    states, begun = blank_states(rng.choice((1, 2))), time.monotonic()
    results = try_load(states, _path(world, job), unique_id, options)
    if any(isinstance(result, BaseException) for result in results):
        world.outcomes[_refusal(results)] += 1
        return
    found = check_states(states)
    assert found != LEFT_ALONE
    assert found in world.tried
    assert not world.is_outdated(results[0].unique_id, found, begun), f"version {found} was replaced before this load"
    assert unique_id is None or results[0].unique_id == unique_id
    world.outcomes["loaded"] += 1


def _refusal(results: list[Any]) -> str:
    for error in results:
        if isinstance(error, CheckpointNotFoundError):
            return "not found"
        assert isinstance(error, CheckpointReplacedError), repr(error)
    return "replaced again and again"


def _load_step(world: _World, job: int, rng: random.Random, version: int) -> None:
    """Load a step that a manager may be removing."""
    folder = step_folder(world.disks.paths(_STEPS)[job], rng.randrange(1, _DEEDS))
    states = blank_states(1)
    results = try_load(states, folder)
    if isinstance(results[0], BaseException):
        world.outcomes["step " + _refusal(results)] += 1
    else:
        assert step_folder(folder.parent, check_states(states)) == folder
        world.outcomes["step loaded"] += 1


def _verify(world: _World, job: int, rng: random.Random, version: int) -> None:
    """Look at all bytes; what was replaced meanwhile may look bad, and nothing else."""
    unique_id, begun = rng.choice(_GIVEN_IDS), time.monotonic()
    try:
        report = verify(_path(world, job), unique_id)
    except CheckpointNotFoundError:
        world.outcomes["not found"] += 1
        return
    except CheckpointCorruptedError as error:
        raise AssertionError(f"nobody has damaged anything: {error}") from error
    if not report.ok:
        disturbed = [save for save in world.saved if save.unique_id == unique_id and save.ended > begun]
        assert disturbed or unique_id in world.deleted or threading.active_count() > 2, report.problems
    world.outcomes["verified" if report.ok else "replaced under verify"] += 1


def _delete(world: _World, job: int, rng: random.Random, version: int) -> None:
    unique_id = rng.choice(list_checkpoints(_path(world, job)) or [0])
    world.deleted.add(unique_id)
    try:
        delete_checkpoint(_path(world, job), unique_id)
        world.outcomes["deleted"] += 1
    except CheckpointError:
        world.outcomes["not deleted"] += 1


def _manager(world: _World, rng: random.Random) -> Callable[[], None]:
    """A job that saves steps, of which the last ones are kept."""
    in_background, options, root = rng.random() < 0.5, options_of(rng), world.disks.paths(_STEPS)[0]

    def run() -> None:
        def save(rank: Any) -> None:
            with world.make(rank, root, keep_last=_KEEP_LAST, async_save=in_background, options=options) as managed:
                for step in range(1, _DEEDS):
                    managed.save(step, states_of(step, 1)[0])
                managed.wait()
                assert managed.all_steps() == list(range(_DEEDS - _KEEP_LAST, _DEEDS))

        all_ok(run_ranks(1, save))
        world.outcomes["steps saved"] += _DEEDS - 1

    return run


def _check_end(world: _World, folder: Path) -> None:
    """What has been saved last is there unless it was deleted; and after one more save nothing else is."""
    found, end = versions_in(folder), time.monotonic()
    for unique_id, version in found.items():
        assert version in [save.version for save in world.saved if save.unique_id == unique_id], (unique_id, version)
        assert not world.is_outdated(unique_id, version, end), f"{unique_id} is still version {version}"
    for save in world.saved:
        assert save.unique_id in found or save.unique_id in world.deleted, f"{save} is gone"
    check_later_save([folder])
