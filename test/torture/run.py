"""Tries for some minutes to break what saves and loads promise: ``python -m test.torture.run --help``.

Every attempt follows from its seed. The first broken promise ends the run, with the command that repeats the attempt.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from .ledger import Ledger
from .suites import MINUTES, Suite, named
from .table import FORMS, table
from .workers import Result, Worker

__all__ = ["main"]

_NEWS_EVERY = 60.0  # seconds


class _Run:
    """One run: which attempt comes next, and what has gone wrong."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.suites = named(options.suites)
        self._options, self._begun = options, time.monotonic()
        what = {"seed": options.seed, "minutes": options.minutes, "attempts": options.attempts}
        self.ledger = Ledger(options.state, {**what, "suites": [suite.module for suite in self.suites]})
        self._before = self.ledger.minutes
        # The seeds that are being tried, and those that have broken something, which only a later run tries again.
        self._busy: dict[str, set[int]] = {suite.module: set() for suite in self.suites}
        self._next = dict.fromkeys(self._busy, options.seed)
        self.broken: list[str] = []

    @property
    def minutes(self) -> float:
        """How long it has taken, with what was done before it was interrupted."""
        return self._before + (time.monotonic() - self._begun) / 60

    def next(self) -> tuple[Suite, int] | None:
        """The next attempt: of the suite that is furthest behind; None if there is nothing left to do."""
        if self.minutes >= self._options.minutes or (self.broken and not self._options.keep_going):
            return None
        behind = min(self.suites, key=self._share)
        if self._share(behind) >= 1:
            return None
        known = self._busy[behind.module] | self.ledger.of(behind.module).seeds
        while self._next[behind.module] in known:
            self._next[behind.module] += 1
        seed = self._next[behind.module]
        self._busy[behind.module].add(seed)
        return behind, seed

    def _share(self, suite: Suite) -> float:
        """How much of a suite's goal is reached, or will be when what is under way has ended."""
        done, busy = self.ledger.of(suite.module), len(self._busy[suite.module])
        if self._options.attempts is not None:
            return (len(done.seeds) + busy) / self._options.attempts
        each = done.count / len(done.seeds) if done.seeds else 1
        return (done.count + busy * each) / (suite.goal * self._options.minutes / MINUTES)

    def ended(self, suite: Suite, seed: int, result: Result) -> None:
        """Take note of an attempt."""
        if result.broken is None:
            self._busy[suite.module].discard(seed)
            self.ledger.add(suite.module, seed, result.outcomes, result.seconds, self.minutes)
            return
        command = f"{sys.executable} -m test.torture.run --suites {suite.module} --seed {seed} --attempts 1"
        self.broken.append(f"{suite.name}, seed {seed}:\n{result.broken}\nTo repeat it: {command}\n")
        print(self.broken[-1], flush=True)

    def work(self, workers: Sequence[Worker]) -> None:
        """Make attempts until there is nothing left to do."""
        news = time.monotonic() + _NEWS_EVERY
        while True:
            for worker in workers:
                if worker.task is None and (task := self.next()) is not None:
                    worker.give(*task)
            busy = {worker.pipe: worker for worker in workers if worker.task is not None}
            if not busy:
                return
            for pipe in wait(list(busy), timeout=1.0):
                worker = busy[pipe]
                assert worker.task is not None
                suite, seed = worker.task
                self.ended(suite, seed, worker.take())
            for worker in workers:
                if worker.hangs():
                    self._give_up(worker)
            if time.monotonic() > news:
                news += _NEWS_EVERY
                shares = ", ".join(f"{suite.name} {min(1.0, self._share(suite)):.0%}" for suite in self.suites)
                print(f"{self.minutes:.0f} min: {shares}", flush=True)

    def _give_up(self, worker: Worker) -> None:
        assert worker.task is not None
        suite, seed = worker.task
        worker.kill()
        self.ended(suite, seed, worker.take()._replace(broken=f"it takes more than {suite.seconds:.0f} s"))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m test.torture.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long; more or less is tried by that")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of each suite")
    parser.add_argument("--suites", help="modules of test/torture, with commas between; all of them by default")
    parser.add_argument("--attempts", type=int, help="how many seeds of each suite, rather than its part of the time")
    parser.add_argument("--state", type=Path, help="a file by which a run that was interrupted goes on")
    parser.add_argument("--keep-going", action="store_true", help="collect broken promises rather than stop at one")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="how many processes make attempts")
    parser.add_argument("--table", choices=FORMS, default="text", help="how to print the table")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and print the table. Returns 1 if a promise was broken."""
    options = _options(arguments)
    run = _Run(options)
    if run.ledger.resumed:
        print(f"going on after {run.minutes:.1f} minutes, as {options.state} says", flush=True)
    for suite in run.suites:
        assert suite.name  # imported here, once for all workers
    workers = [Worker() for _ in range(options.workers)]
    try:
        run.work(workers)
    finally:
        for worker in workers:
            worker.kill()
    if not run.broken:
        run.ledger.end()
    print(f"{time.strftime('%Y-%m-%d', time.gmtime())}, {run.minutes:.1f} minutes, seed {options.seed}\n")
    print(table(run.suites, run.ledger, options.table))
    if run.broken:
        print(f"\n{len(run.broken)} broken")
    return 1 if run.broken else 0


if __name__ == "__main__":
    sys.exit(main())
