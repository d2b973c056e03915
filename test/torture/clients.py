"""Saves of two ranks while somebody does the coordinator's control port harm.

python -m test.torture.clients     # prints a line for each kind of client: time and memory, in turns with and without;
                                   # fails if one costs more than it may, each time it is measured
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dist_ckpt.control import NoTransport, TcpHub
from paddle_dist_ckpt.errors import CheckpointTimeoutError
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.testing import SimulatedRank
from test.control.file_store import FileStore
from test.torture.hostile_clients import KINDS, attack
from test.waiting import PATIENCE, until

NAME = "hostile clients"
RANKS = 2
MOST_GROWTH = 64
"""In MiB."""
MOST_TIME = 1.5
"""Times that of saves without a client. Other work on the machine can cost more, so it counts if it is so each time."""
MOST_LATE = 10.0
"""Seconds after the timeout until a silent rank is noticed, for a machine that does much else."""
MOST_FILES = 100
"""Descriptors that strangers may take: 64 of them, and what a save has open."""


def serve(rank: int, folder: Path, pipe: Connection) -> None:
    """A rank: saves as often as it is told to, and says how long each save took; none if the other rank was silent."""
    hub = TcpHub(rank, range(RANKS), 0, FileStore(folder), "k", bind_host="127.0.0.1", bootstrap_timeout=PATIENCE)
    saver = SimulatedRank(rank, tuple(range(RANKS)), hub, NoTransport())
    state = {f"{rank}.{number}": np.full(4096, number, np.float32) for number in range(50)}
    while (told := pipe.recv()) is not None:
        took, (times, timeout) = [], told
        with suppress(CheckpointTimeoutError):
            for _ in range(times):
                begun = time.perf_counter()
                saver.save(state, folder / "checkpoints", 0, SaveOptions(timeout=timeout))
                took.append(time.perf_counter() - begun)
        pipe.send(took)


@dataclass
class Job:
    """Two ranks, each a process.

    Attributes:
        pids: Of their processes; the coordinator's is the first.
    """

    pipes: list[Connection] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    def save(self, times: int) -> list[float]:
        """Save; returns the seconds that each save took on the coordinator."""
        for pipe in self.pipes:
            pipe.send((times, PATIENCE))
        assert all(pipe.poll(2 * PATIENCE) for pipe in self.pipes), "a rank hangs"
        took: list[list[float]] = [pipe.recv() for pipe in self.pipes]
        return took[0]

    def lateness(self, timeout: float) -> float:
        """Stop the other rank for good, and save; returns by how many seconds the coordinator notices it too late."""
        os.kill(self.pids[1], signal.SIGSTOP)
        begun = time.perf_counter()
        self.pipes[0].send((1, timeout))
        assert self.pipes[0].poll(2 * PATIENCE), "the coordinator hangs"
        assert self.pipes[0].recv() == [], "a save without one of its ranks"
        return time.perf_counter() - begun - timeout

    def memory(self, kind: str) -> float:
        """What the coordinator's process has in memory now (``VmRSS``), or had at most (``VmHWM``), in MiB."""
        lines = Path(f"/proc/{self.pids[0]}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{kind}:"))

    def files(self) -> int:
        """How many files the coordinator's process has open."""
        return len(os.listdir(f"/proc/{self.pids[0]}/fd"))


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paddle_dist_ckpt.testing", "test.torture.hostile_clients"])
    return context


@contextmanager
def _job(folder: Path) -> Iterator[Job]:
    job, processes = Job(), []
    try:
        for rank in range(RANKS):
            near, far = multiprocessing.Pipe()
            process = _context().Process(target=serve, args=(rank, folder, far), daemon=True)
            process.start()
            far.close()
            processes.append(process)
            job.pipes.append(near)
            job.pids.append(process.pid)
        yield job
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def _attacked(kind: str, seed: int, folder: Path) -> Iterator[int]:
    """A client of this kind at work; gives its process's id."""
    done = _context().Value("L", 0)
    process = _context().Process(target=attack, args=(kind, seed, folder, done), daemon=True)
    process.start()
    try:
        until(lambda: done.value > 0 or kind in ("idle connections", "endless parts"), what=f"an attack by {kind}")
        yield process.pid
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: done.value > 0, what=f"an attack by {kind}")
    finally:
        process.kill()
        process.join()


def run(kind: str, seed: int, folder: Path, turns: int, saves: int) -> Mapping[str, Any]:
    """Save in turns with and without a client of this kind.

    Returns:
        The seconds of each save, by how much the coordinator's memory and open files grew at most, by how many seconds
        a silent rank was noticed too late under the client, and in how many turns other work on the machine has left
        the client no processor at all.
    """
    quiet: list[float] = []
    attacked: list[float] = []
    starved = 0
    with _job(folder) as job:
        job.save(3)
        memory, files, most_files = job.memory("VmRSS"), job.files(), 0
        Path(f"/proc/{job.pids[0]}/clear_refs").write_text("5")  # the peak begins anew
        with _attacked(kind, seed, folder) as attacker:
            for _ in range(turns):
                before = _switches(attacker)
                os.kill(attacker, signal.SIGCONT)
                attacked += job.save(saves)
                most_files = max(most_files, job.files())
                starved += _switches(attacker) == before
                os.kill(attacker, signal.SIGSTOP)
                quiet += job.save(saves)
            os.kill(attacker, signal.SIGCONT)
            late = job.lateness(1.0)
        growth = job.memory("VmHWM") - memory
    return {
        "quiet": quiet,
        "attacked": attacked,
        "growth": growth,
        "files": most_files - files,
        "late": late,
        "starved": starved,
    }


def _switches(pid: int) -> int:
    """How often a process has been given a processor, and has left it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches:" in line)


def checked(seed: int, folder: Path) -> Mapping[str, Any]:
    """What :func:`run` finds of one kind of client, by the seed: all saves succeed, memory and files are bounded, and
    deadlines are kept."""
    kind = list(KINDS)[seed % len(KINDS)]
    found = run(kind, seed, folder, turns=2, saves=10)
    assert found["growth"] <= MOST_GROWTH, f"seed {seed}, {kind}: memory grew by {found['growth']:.0f} MiB"
    assert found["files"] <= MOST_FILES, f"seed {seed}, {kind}: {found['files']} more files are open"
    assert found["late"] <= MOST_LATE, f"seed {seed}, {kind}: a silent rank is noticed {found['late']:.1f} s too late"
    return found


def attempt(seed: int, folder: Path) -> Counter[str]:
    """The same, as the runner counts it."""
    return Counter({f"saved under {list(KINDS)[seed % len(KINDS)]}": len(checked(seed, folder)["attacked"])})


def slowdown(found: Mapping[str, Any]) -> float:
    """How many times as long saves take under a client, by what :func:`run` returns: all of them, and not most of them.
    What a client leaves behind may make one of the others slow."""
    return statistics.fmean(found["attacked"]) / statistics.median(found["quiet"])


def within_bounds(kind: str, tries: int = 3) -> bool:
    """Print what a kind of client costs, up to so many times until that is no more than it may be."""
    for _ in range(tries):
        with tempfile.TemporaryDirectory() as folder:
            found = run(kind, 0, Path(folder), turns=10, saves=10)
        seconds = f"{statistics.median(found['quiet']):.4f} {statistics.fmean(found['attacked']):.4f}"
        print(f"{kind:24} {seconds} {slowdown(found):5.2f} {found['growth']:6.1f} MiB {found['files']:4d}", flush=True)
        if (
            not found["starved"]
            and slowdown(found) <= MOST_TIME
            and found["growth"] <= MOST_GROWTH
            and found["files"] <= MOST_FILES
        ):
            return True
    return False


def main() -> int:
    """Print what each kind of client costs; how many cost more than they may."""
    print(f"load average {os.getloadavg()[0]:.1f}; seconds of a save without (median) and with, ratio, memory, files")
    return sum(not within_bounds(kind) for kind in sys.argv[1:] or KINDS)


if __name__ == "__main__":
    raise SystemExit(main())
