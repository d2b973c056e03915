"""Network cuts: what goes between a rank and the coordinator is held back, lost or changed, and then goes on."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paddle_dist_ckpt import CheckpointError, CheckpointTimeoutError, LoadOptions, SaveOptions, SaveReport
from paddle_dist_ckpt.control import NoTransport, TcpHub
from paddle_dist_ckpt.testing import SimulatedRank
from test.control.file_store import FileStore
from test.waiting import PATIENCE, until

from .relay import HARMS, Relay, RelayedStore
from .states import LEFT_ALONE, blank_states, check_states, states_of, version_in

NAME = "network cuts"
_TIMEOUT = 1.0
"""Of calls beside the harm, in seconds: shorter than some, and longer than others."""
_SHORT, _LONG = 0.3, 2.5


class _Job:
    """Ranks that are threads, and one relay in front of the coordinator for each of the others."""

    def __init__(self, ranks: int, folder: Path, ending: ExitStack) -> None:
        self.folder, notes = folder / "ckpt", folder / "notes"
        notes.mkdir()
        everyone = tuple(range(ranks))
        stores = [RelayedStore(FileStore(notes)) if rank else FileStore(notes) for rank in everyone]
        self._savers = []
        for rank, store in zip(everyone, stores, strict=True):
            hub = TcpHub(rank, everyone, 0, store, "k", bind_host="127.0.0.1", bootstrap_timeout=PATIENCE)
            ending.callback(hub.close)
            self._savers.append(SimulatedRank(rank, everyone, hub, NoTransport()))
        self.relays: list[Relay] = [store.relay for store in stores[1:]]  # type: ignore[union-attr, misc]
        for relay in self.relays:
            ending.callback(relay.close)
        self._pool = ending.enter_context(ThreadPoolExecutor(ranks))

    def save(self, version: int, timeout: float) -> list[Any]:
        """Save a version; returns what each rank's call returned, or the error of this library that it raised."""
        states, options = states_of(version, len(self._savers)), SaveOptions(timeout=timeout, block_bytes=4096)
        return self._each(lambda saver: saver.save(states[saver.rank], self.folder, 0, options))

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

    def _each(self, work: Any) -> list[Any]:
        return [_ended(future) for future in [self._pool.submit(work, saver) for saver in self._savers]]


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
        job = _Job(rng.choice((2, 3)), folder, ending)
        assert job.saves(1)
        relay = rng.choice(job.relays)
        before = relay.passed
        assert job.saves(2)
        relay.harm(kind, rng.randrange(relay.passed - before))
        healing = ending.enter_context(_Healing(relay, rng.choice((_SHORT, _LONG))))
        results = job.save(3, _TIMEOUT)
        known = [not isinstance(result, CheckpointError) for result in results]
        found = version_in(job.folder)
        assert found in ((3,) if any(known) else (2, 3)), f"{found} is there, and the save has ended with {results}"
        if relay.begun.is_set() and rng.random() < 0.5:
            loaded = job.load(_TIMEOUT)
            assert {one for one in loaded if isinstance(one, int)} <= {found}, f"{found} is there, loaded were {loaded}"
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
