"""The hub over TCP between real processes: killed, frozen and exiting ranks, and how long a round takes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from paddle_dist_ckpt.control import TcpHub
from paddle_dist_ckpt.errors import CheckpointError, CheckpointTimeoutError, RankFailureError
from test.control.file_store import FileStore
from test.strategies import some

RANKS = 4
LONG = 600.0
SHORT = 1.0
AT_ONCE = 10.0


def serve(rank: int, folder: Path, pipe: Connection) -> None:
    """A rank's process: makes a hub, then runs what it is sent; ends when sent None, without closing the hub."""
    hub = TcpHub(rank, range(RANKS), 0, FileStore(folder), "k", bind_host="127.0.0.1", bootstrap_timeout=30)
    pipe.send(None)
    while (work := pipe.recv()) is not None:
        try:
            pipe.send(work[0](hub, rank, *work[1:]))
        except CheckpointError as error:
            failures = {failed: str(failure) for failed, failure in getattr(error, "failures", {}).items()}
            pipe.send((type(error), str(error), failures, getattr(error, "missing_ranks", ())))


class Job:
    """The processes of a group."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # once, and not in each process
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(RANKS):
            near, far = context.Pipe()
            process = context.Process(target=serve, args=(rank, folder, far), daemon=True)
            process.start()
            # Else the other end would not notice that the process has ended.
            far.close()
            self.pipes.append(near)
            self.processes.append(process)
        for rank in range(RANKS):
            self.result(rank)

    def start(self, work: Callable[..., object], *arguments: object, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        for rank in ranks:
            self.pipes[rank].send((work, *arguments))

    def result(self, rank: int) -> Any:
        assert self.pipes[rank].poll(30), f"rank {rank} hangs"
        return self.pipes[rank].recv()

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def one_round(hub: TcpHub, rank: int, timeout: float) -> bytes:
    with hub.session("save", timeout) as session:
        return session.gather_scatter("r", lambda: b"%d" % rank, lambda parts: parts)


def round_with_sleeper(hub: TcpHub, rank: int, timeout: float, sleeper: int) -> bytes:
    """A round in which one rank tells nobody that it takes long."""
    with hub.session("save", timeout) as session:

        def local() -> bytes:
            if rank == sleeper:
                time.sleep(30)
            return b""

        return session.gather_scatter("write", local, lambda parts: parts)


def round_and_end(hub: TcpHub, rank: int, leaver: int) -> bytes:
    """A round, after which one rank ends as soon as it has succeeded, without any farewell."""
    reply = one_round(hub, rank, LONG)
    if rank == leaver:
        os._exit(9)
    return reply


def many_rounds(hub: TcpHub, rank: int, rounds: int) -> float:
    """Median seconds of a round."""
    took = []
    with hub.session("save", LONG) as session:
        for _ in range(rounds):
            begun = time.perf_counter()
            session.gather_scatter("r", lambda: b"x" * 100, lambda parts: parts)
            took.append(time.perf_counter() - begun)
    return statistics.median(took)


def test_a_killed_rank_is_named_at_once_and_in_the_next_session(job: Job) -> None:
    job.start(round_with_sleeper, LONG, 2)
    time.sleep(0.3)
    begun = time.monotonic()
    job.signal(2, signal.SIGKILL)
    for rank in (0, 1, 3):
        kind, text, failures, _ = job.result(rank)
        assert kind is RankFailureError
        assert text.startswith("save failed in round 'write' on rank 2: connection lost; a process has ended")
        assert failures == {2: "connection lost"}
    assert time.monotonic() - begun < AT_ONCE
    job.start(one_round, LONG, ranks=(0, 1, 3))
    assert [job.result(rank)[2] for rank in (0, 1, 3)] == [{2: "connection lost"}] * 3
    assert time.monotonic() - begun < AT_ONCE


def test_a_killed_coordinator_is_named_at_once(job: Job) -> None:
    job.start(round_with_sleeper, LONG, 0)
    time.sleep(0.3)
    begun = time.monotonic()
    job.signal(0, signal.SIGKILL)
    assert [job.result(rank)[2] for rank in (1, 2, 3)] == [{0: "connection lost"}] * 3
    assert time.monotonic() - begun < AT_ONCE


@pytest.mark.parametrize("frozen", some([0, 2], 1))
def test_a_frozen_rank_times_out_and_recovers(job: Job, frozen: int) -> None:
    others = tuple(rank for rank in range(RANKS) if rank != frozen)
    job.start(one_round, LONG)
    assert [job.result(rank) for rank in range(RANKS)] == [b"0", b"1", b"2", b"3"]
    job.signal(frozen, signal.SIGSTOP)
    begun = time.monotonic()
    job.start(one_round, SHORT)
    for rank in others:
        kind, _, _, missing = job.result(rank)
        assert (kind, missing) == (CheckpointTimeoutError, (frozen,))
    assert SHORT <= time.monotonic() - begun < SHORT + 3
    time.sleep(1)  # what they said last has come to the frozen one's system, also where that is slow to deliver
    job.signal(frozen, signal.SIGCONT)
    kind, _, _, missing = job.result(frozen)
    assert (kind, missing) == (CheckpointTimeoutError, (frozen,))
    job.start(one_round, LONG)
    assert [job.result(rank) for rank in range(RANKS)] == [b"0", b"1", b"2", b"3"]


def test_a_coordinator_that_was_frozen_when_it_had_the_others_answers_goes_on_with_nobody(job: Job) -> None:
    job.start(one_round, LONG)
    assert [job.result(rank) for rank in range(RANKS)] == [b"0", b"1", b"2", b"3"]
    for _ in range(3):
        job.start(one_round, SHORT, ranks=(1, 2, 3))
        time.sleep(SHORT / 4)  # their answers are with its hub
        job.signal(0, signal.SIGSTOP)
        job.start(one_round, SHORT, ranks=(0,))
        assert [job.result(rank)[3] for rank in (1, 2, 3)] == [(0,)] * 3
        time.sleep(1)
        job.signal(0, signal.SIGCONT)
        kind, _, _, missing = job.result(0)
        assert (kind, missing) == (CheckpointTimeoutError, (0,))
        job.start(one_round, LONG)
        assert [job.result(rank) for rank in range(RANKS)] == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_ends_after_its_success_takes_no_other_along(tmp_path: Path, leaver: int) -> None:
    for turn in range(3):
        folder = tmp_path / str(turn)
        folder.mkdir()
        job = Job(folder)
        try:
            job.start(round_and_end, leaver)
            replies = [job.result(rank) for rank in range(RANKS) if rank != leaver]
            assert replies == [b"%d" % rank for rank in range(RANKS) if rank != leaver]
            job.processes[leaver].join(AT_ONCE)
            assert job.processes[leaver].exitcode == 9
        finally:
            job.close()


def test_rounds_are_quick_and_processes_end_by_themselves(job: Job) -> None:
    job.start(many_rounds, 300)
    medians = [job.result(rank) for rank in range(RANKS)]
    print(f"median round among {RANKS} processes: {max(medians) * 1e6:.0f} us")
    # About 0.35 ms on an idle machine; a polling sleep anywhere would show.
    assert max(medians) < 0.02
    for pipe in job.pipes:
        pipe.send(None)
    begun = time.monotonic()
    for process in job.processes:
        process.join(10)
    assert [process.exitcode for process in job.processes] == [0] * RANKS
    assert time.monotonic() - begun < AT_ONCE
