"""Network cuts: what goes between a rank and the coordinator is held back, lost or changed, and then goes on."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paddle_dist_ckpt import CheckpointError, CheckpointTimeoutError, LoadOptions, SaveOptions, SaveReport
from paddle_dist_ckpt.control import NoTransport, TcpHub
from paddle_dist_ckpt.manager.schedule import Schedule
from paddle_dist_ckpt.testing import SimulatedRank
from test.control.file_store import FileStore
from test.waiting import PATIENCE, until

from .relay import HANDSHAKE_BYTES, HARMS, Relay, RelayedStore
from .states import LEFT_ALONE, blank_states, check_states, states_of, version_in

NAME = "network cuts"
_TIMEOUT = 1.0
"""Of calls beside the harm, in seconds: shorter than some, and longer than others."""
_SHORT, _LONG = 0.3, 2.5
_STEPS, _STEP = 100, 0.005
"""How many steps of training there are, and how many seconds each takes on average."""


class _Job:
    """Ranks that are threads, and one relay in front of the coordinator for each of the others.

    Args:
        ranks: How many.
        folder: Where they save.
        ending: Ends everything.
        changed: Which byte of the last rank's first handshake is changed, if any.
    """

    def __init__(self, ranks: int, folder: Path, ending: ExitStack, changed: int | None = None) -> None:
        self.folder, notes = folder / "ckpt", folder / "notes"
        notes.mkdir()
        everyone = tuple(range(ranks))
        store = FileStore(notes)
        stores = [store, *(RelayedStore(store, changed if rank == ranks - 1 else None) for rank in everyone[1:])]
        self._savers: list[SimulatedRank] = []
        self._hubs: list[TcpHub] = []
        for rank, store in zip(everyone, stores, strict=True):
            hub = TcpHub(rank, everyone, 0, store, "k", bind_host="127.0.0.1", bootstrap_timeout=PATIENCE)
            ending.callback(hub.close)
            self._hubs.append(hub)
            self._savers.append(SimulatedRank(rank, everyone, hub, NoTransport()))
        self.relays: list[Relay] = [store.relay for store in stores[1:]]  # type: ignore[union-attr, misc]
        for relay in self.relays:
            relay.others = [other for other in self.relays if other is not relay]
            ending.callback(relay.close)
        self._pool = ending.enter_context(ThreadPoolExecutor(ranks))

    def save(self, version: int, timeout: float, in_background: bool = False) -> list[Any]:
        """Save a version; returns what each rank's call returned, or the error of this library that it raised."""
        states, options = states_of(version, len(self._savers)), SaveOptions(timeout=timeout, block_bytes=4096)

        def work(saver: SimulatedRank) -> SaveReport:
            if in_background:
                return saver.save_in_background(states[saver.rank], self.folder, 0, options).result(PATIENCE)
            return saver.save(states[saver.rank], self.folder, 0, options)

        return self._each(work)

    def saves(self, version: int) -> bool:
        """Whether all ranks save a version, which then is there."""
        results = self.save(version, PATIENCE)
        assert not any(isinstance(result, CheckpointTimeoutError) for result in results), results
        return all(isinstance(one, SaveReport) for one in results) and version_in(self.folder) == version

    def load(self, timeout: float) -> list[Any]:
        """Load; returns the version that each rank has got, or the error of this library."""
        states, options = blank_states(len(self._savers)), LoadOptions(timeout=timeout, exchange="never")

        def work(saver: SimulatedRank) -> int:
            saver.load(states[saver.rank], self.folder, 0, options)
            return int(states[saver.rank]["n"])

        results = self._each(work)
        if not any(isinstance(result, CheckpointError) for result in results):
            assert check_states(states) != LEFT_ALONE
        return results

    def train(self, rng: random.Random) -> list[list[int]]:
        """Go through some steps, at one of which a rank asks for a save; returns at which each was told to save."""
        schedules = [Schedule(hub, "steps", _TIMEOUT) for hub in self._hubs]
        asking, asked_at = rng.randrange(len(self._hubs)), rng.randrange(_STEPS)
        seeds = [rng.random() for _ in self._hubs]

        def work(saver: SimulatedRank) -> list[int]:
            schedule, pace, told = schedules[saver.rank], random.Random(seeds[saver.rank]), []
            for step in range(_STEPS):
                if saver.rank == asking and step == asked_at:
                    schedule.request()
                answer = until(lambda: _answer(schedule, step), what=f"step {step}")  # noqa: B023
                told += [step] if answer == [True] else []
                time.sleep(2 * _STEP * pace.random())
            return told

        return self._each(work)

    def _each(self, work: Any) -> list[Any]:
        return [_ended(future) for future in [self._pool.submit(work, saver) for saver in self._savers]]


def _answer(schedule: Schedule, step: int) -> list[bool]:
    """Whether a step is due; nothing if there is no answer, in which case it can be asked again."""
    try:
        return [schedule.is_due(step)]
    except CheckpointError:
        return []


def _ended(future: Future[Any]) -> Any:
    """What a call has returned, or its error of this library. It does not hang, nor end otherwise."""
    try:
        return future.result(timeout=PATIENCE)
    except CheckpointError as error:
        return error


def attempt(seed: int, folder: Path) -> Counter[str]:
    """Do one kind of harm, by the seed, somewhere in a save or a load; see what has become of them, and of a later
    save."""
    rng, kind = random.Random(seed), HARMS[seed % len(HARMS)]
    with ExitStack() as ending:
        job = _Job(rng.choice((2, 3, 8)), folder, ending, rng.choice((None, rng.randrange(HANDSHAKE_BYTES))))
        until(lambda: job.saves(1), what="a first save")
        relay = rng.choice(job.relays)
        before = relay.passed
        assert job.saves(2)
        after, way, after_that = rng.randrange(relay.passed - before), rng.randrange(2), rng.randrange(HANDSHAKE_BYTES)
        relay.harm(kind, after, way, after_that)
        healing = ending.enter_context(_Healing(relay, rng.choice((_SHORT, _LONG))))
        results = job.save(3, _TIMEOUT, in_background=rng.random() < 0.3)
        known = [not isinstance(result, CheckpointError) for result in results]
        found = version_in(job.folder)
        assert found in ((3,) if any(known) else (2, 3)), f"{found} is there, and the save has ended with {results}"
        if relay.begun.is_set() and rng.random() < 0.5:
            loaded = job.load(_TIMEOUT)
            assert {one for one in loaded if isinstance(one, int)} <= {found}, f"{found} is there, loaded were {loaded}"
        told = job.train(rng)
        assert all(one == told[0] for one in told), f"ranks were told to save at different steps: {told}"
        healing.wait()
        until(lambda: job.saves(4), what="a save after it")  # a rank that was turned away tries again after a while
        assert job.load(PATIENCE) == [4] * len(results)
    outcome = "saved" if all(known) else "saved, as some ranks know" if any(known) else "refused"
    return Counter([f"{kind}: {outcome}" if relay.begun.is_set() else "not reached"])


class _Healing:
    """Lets a relay pass on everything again, some seconds after it has begun to do harm, or when that is waited for."""

    def __init__(self, relay: Relay, seconds: float) -> None:
        self._relay, self._seconds = relay, seconds
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._relay.begun.wait(0.05):
            if self._enough.is_set():
                break
        else:
            self._enough.wait(self._seconds)
        self._relay.heal()

    def wait(self) -> None:
        """Wait until it has; at once if nothing was harmed."""
        if not self._relay.begun.is_set():
            self._enough.set()
        self._thread.join()

    def __enter__(self) -> _Healing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()
