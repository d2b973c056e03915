"""Lets jobs work in one folder a call of ``os`` at a time, in an order that is drawn, and with faults that are drawn.

Only one job runs at any moment. Before each of its calls another one may go on, or it may be frozen for longer than a
claim counts, killed, or told of an error. The clock is the schedule's own: it stands still but for what jobs sleep, and
for as long as one is frozen. So a history follows from its seed, and takes milliseconds.
"""

from __future__ import annotations

import enum
import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from paddle_dist_ckpt.core import threads
from paddle_dist_ckpt.folder import lease
from paddle_dist_ckpt.folder.claims import EXPIRES_AFTER
from paddle_dist_ckpt.folder.own_claim import OwnClaim
from test.jobs import Killed

from .calls import Call, Perform

__all__ = ["Fault", "Job", "Kind", "Moment", "Schedule", "without_threads"]

_LONG = EXPIRES_AFTER + 100.0  # seconds
_MOST_CALLS = 40_000
_MOST_SLEEPS = 2_000
_SECONDS = 120.0  # of the real clock
_MARKED = ("link", "rename", "replace", "unlink", "rmdir", "listdir")
_NEEDS_ROOM = ("open", "pwrite", "link", "rename", "replace", "mkdir", "posix_fallocate", "ftruncate")


@contextmanager
def without_threads() -> Iterator[None]:
    """Have all work be done by the thread that asks for it, as when the interpreter ends."""
    with mock.patch.object(threads, "at_exit", return_value=True):
        yield


class Kind(enum.Enum):
    """What happens before a call."""

    SWITCH = "switched"
    FREEZE = "frozen"
    KILL = "killed"
    FAIL = "failed"
    FAIL_AFTER = "failed when done"
    FULL = "disk full"
    REFRESH = "refreshed"
    PASS = "going on for long"
    STICK = "unable to remove"


class Moment(NamedTuple):
    """Before which call something happens.

    Attributes:
        number: How many calls come before it, of all jobs;
        is_marked: Whether only those count that list the folder, or name or remove something, of which there are few.
    """

    number: int
    is_marked: bool


class Fault(NamedTuple):
    """What happens before a call, and for how many calls.

    Attributes:
        kind: What it is.
        number: The error; 0 if it is none.
        lasts: Of a full disk for how many calls it is full; of who is frozen how many calls the others make; how many
            calls of the job after that a thread touches its claim; for how many calls names stay that it cannot remove.
        ending: How the names end that the job cannot remove from then on.
    """

    kind: Kind
    number: int = 0
    lasts: int = 0
    ending: str = ""


class Job:
    """Someone who works in the folder.

    Args:
        work: What it does; whatever it raises it has to keep.

    Attributes:
        dead: Whether it was killed.
        has_been_frozen: Whether it was frozen at some time.
        is_told: Whether a call of its has failed.
        had_no_room: Whether one has for want of room.
        silent: For how many seconds it has kept no claim fresh, all in all.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.frozen = self.dead = self.sleeps = self.ended = False
        self.thaws_at, self.refreshes_in = 0, -1
        self.turn = threading.Semaphore(0)
        self.claims: list[Callable[[], None]] = []
        self.is_told = self.has_been_frozen = self.had_no_room = False
        self.silent = 0.0
        self.stuck: dict[str, int] = {}  # the endings of names that it cannot remove, and until which call

    @property
    def can_go_on(self) -> bool:
        """Whether it waits for nothing but its turn."""
        return not (self.frozen or self.sleeps or self.ended)


class Schedule:
    """Who goes on when.

    Args:
        rng: Draws who goes on.
        faults: What happens when.
        age: Makes all files look older by so many seconds.
    """

    def __init__(self, rng: random.Random, faults: Mapping[Moment, Fault], age: Callable[[float], None]) -> None:
        self._rng, self._faults, self._age = rng, faults, age
        self._jobs: list[Job] = []
        self._own = threading.local()
        self._over = threading.Event()
        self._quiet = False
        self._full_until = self._sleeps = 0
        self.now, self.calls, self._marked = 1000.0, 0, 0
        self.problem: str | None = None
        self.happened = Counter[Kind]()
        self.trace: list[str] = []

    @property
    def current(self) -> Job:
        """Whose thread this is."""
        job: Job = self._own.job
        return job

    # -- what stands between the library and the system

    def handle(self, call: Call, perform: Perform) -> Any:
        """See :class:`.calls.Interposer`."""
        if self._quiet:
            return perform()
        job: Job = self._jobs[call.rank]
        if job.dead and call.name == "close":
            return perform()  # this process needs the descriptor
        self._check(job)
        number = self.calls
        self.calls += 1
        if number > _MOST_CALLS:
            self._give_up(job, f"more than {_MOST_CALLS} calls")
        self._thaw_due(job)
        self._refresh_due(job)
        fault = self._faults.get(Moment(number, False))
        if call.name in _MARKED:
            fault = self._faults.get(Moment(self._marked, True), fault)
            self._marked += 1
        self.trace.append(f"{number} {call}{f' ({fault.kind.value})' if fault else ''}")
        if fault is not None:
            self.happened[fault.kind] += 1
            try:
                self._strike(job, fault)
            except Killed:
                if call.name == "close":
                    perform()
                raise
        problem = self._error(call, fault)
        if problem is not None and fault is not None and fault.kind is Kind.FAIL_AFTER:
            result = perform()
            if call.name == "open":  # as the system would: nobody has got the descriptor
                os.close(result)
        if problem is not None:
            job.is_told = True
            job.had_no_room |= problem == errno.ENOSPC
            raise OSError(problem, f"{os.strerror(problem)} (injected)", call.path)
        return perform()

    def _check(self, job: Job) -> None:
        if job.dead or self.problem:
            raise Killed

    def _strike(self, job: Job, fault: Fault) -> None:
        """Do what comes before a call, but errors."""
        if fault.kind is Kind.SWITCH:
            self._switch(job)
        elif fault.kind is Kind.KILL:
            job.dead = True
            raise Killed
        elif fault.kind is Kind.FREEZE:
            job.frozen, job.has_been_frozen, job.thaws_at = True, True, self.calls + fault.lasts
            self._pass(_LONG)
            self._switch(job)
            job.refreshes_in = self._rng.choice((0, 0, 1, 2, 4, 8))
        elif fault.kind is Kind.REFRESH:
            job.refreshes_in = fault.lasts
        elif fault.kind is Kind.FULL:
            self._full_until = self.calls + fault.lasts
        elif fault.kind is Kind.PASS:
            self._pass(_LONG)
        elif fault.kind is Kind.STICK:
            job.stuck[fault.ending] = self.calls + fault.lasts

    def _error(self, call: Call, fault: Fault | None) -> int | None:
        """What the call fails with."""
        stuck = self._jobs[call.rank].stuck
        if call.name == "unlink" and any(
            self.calls <= until and str(call.path).endswith(ending) for ending, until in stuck.items()
        ):
            return errno.EACCES
        if self.calls <= self._full_until and call.name in _NEEDS_ROOM:
            makes = call.name != "open" or call.arguments[1] & os.O_CREAT
            return errno.ENOSPC if makes else None
        return fault.number or None if fault is not None and call.name != "close" else None

    # -- whose turn it is

    def run(self, jobs: Sequence[Job]) -> None:
        """Let all jobs do their work, to the end."""
        self._jobs = list(jobs)
        started = [threading.Thread(target=self._run, args=(job,), daemon=True) for job in jobs]
        with self._patched():
            for thread in started:
                thread.start()
            self._next(None)
            if not self._over.wait(_SECONDS):
                self.problem = f"nobody goes on; {[vars(job) for job in jobs]}"
                for job in jobs:
                    job.turn.release()
            for thread in started:
                thread.join(_SECONDS)
        assert self.problem is None, self.problem

    def _run(self, job: Job) -> None:
        self._own.job = job
        job.turn.acquire()
        try:
            job.work()
        finally:
            job.ended = True
            job.claims.clear()
            self._next(job)

    def _next(self, job: Job | None) -> None:
        """Give the turn to somebody, or end."""
        other = self._other(job)
        if other is None:
            self._over.set()
        else:
            other.turn.release()

    def _other(self, job: Job | None) -> Job | None:
        """Who can go on instead; somebody is thawed, or ends to sleep, if need be."""
        others = [other for other in self._jobs if other is not job and not other.ended]
        if ready := [other for other in others if other.can_go_on]:
            return self._rng.choice(ready)
        if job is not None and job.can_go_on:
            return None
        if frozen := [other for other in others if other.frozen]:
            thawed = self._rng.choice(frozen)
            thawed.frozen = False
            return thawed
        return self._rng.choice(others) if others else None

    def _switch(self, job: Job) -> None:
        """Let another one go on, if one can."""
        other = self._other(job)
        if other is not None:
            other.turn.release()
            job.turn.acquire()
        job.frozen = job.sleeps = False
        self._check(job)

    def _thaw_due(self, job: Job) -> None:
        for other in self._jobs:
            if other.frozen and other.thaws_at <= self.calls:
                other.frozen = False
                if self._rng.random() < 0.8:
                    other.turn.release()
                    job.turn.acquire()
                    self._check(job)

    # -- time

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """The schedule's clock in the place of the system's, and no threads, where leases and claims are."""
        clock = mock.Mock(monotonic=lambda: self.now, sleep=self._sleep)
        draws = mock.Mock(token_hex=lambda count: self._rng.randbytes(count).hex())
        schedule = self

        def keep_fresh(claim: OwnClaim, when_lost: Callable[[], str | None]) -> None:
            def refresh() -> None:
                if not claim.is_stopped:
                    claim.refresh(when_lost)

            schedule.current.claims.append(refresh)

        with ExitStack() as patched, without_threads():
            for target, name, value in (
                (lease, "time", clock),
                (lease, "secrets", draws),
                (OwnClaim, "keep_fresh", keep_fresh),
            ):
                patched.enter_context(mock.patch.object(target, name, value))
            yield

    def _refresh_due(self, job: Job) -> None:
        """Touch the claims of a job, as a thread of its own would, between two of its calls."""
        job.refreshes_in -= 1
        if job.refreshes_in == -1:
            for refresh in job.claims:
                refresh()

    def _sleep(self, seconds: float) -> None:
        job = self.current
        self._check(job)
        self._sleeps += 1
        if self._sleeps > _MOST_SLEEPS:
            self._give_up(job, "somebody waits for ever")
        self.now += seconds
        job.sleeps = True
        if not any(other.can_go_on or other.frozen for other in self._jobs):
            self._pass(_LONG / 10)
        self._switch(job)

    def _pass(self, seconds: float) -> None:
        """Let time pass; who is neither frozen nor dead keeps its claims fresh meanwhile."""
        self.now += seconds
        was, self._quiet = self._quiet, True
        try:
            self._age(seconds)
            for job in self._jobs:
                is_alive = not (job.frozen or job.dead or job.ended)
                if not (is_alive and job.claims):
                    job.silent += seconds
                else:
                    for refresh in job.claims:
                        refresh()
        finally:
            self._quiet = was

    def _give_up(self, job: Job, problem: str) -> None:
        self.problem = problem
        raise Killed
