"""Starts the ranks of a peer and talks to them."""

from __future__ import annotations

import itertools
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.peers import Peer

__all__ = ["BenchmarkError", "RankOptions", "Ranks", "started"]

_ROOT = Path(__file__).resolve().parent.parent
_ANSWER_SECONDS = 900.0
_EXIT_SECONDS = 10.0
_LOG_LINES = 20


class BenchmarkError(Exception):
    """A peer failed."""


class Ranks:
    """The processes of one peer, started; :meth:`start` makes them ready.

    Args:
        peer: The peer.
        python: The interpreter of the environment that the peer is installed in.
        logs: Folder for what the processes print.
        options: How they run.
    """

    def __init__(self, peer: Peer, python: Path, logs: Path, options: RankOptions) -> None:
        self.peer, self._options = peer, options
        size = options.world_size
        self._logs = [logs / f"{peer.name}-{rank}.log" for rank in range(size)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        others: list[list[socket.socket]] = [[] for _ in range(size)]
        for one, other in itertools.combinations(range(size), 2):
            for rank, end in zip((one, other), socket.socketpair(), strict=True):
                others[rank].append(end)
        for rank, environment in enumerate(_environments(size)):
            mine, theirs = socket.socketpair()
            ends = [theirs, *others[rank]]
            self._processes.append(self._launch(rank, python, environment, [end.fileno() for end in ends]))
            for end in ends:
                end.close()
            self._sockets.append(mine)
        self._lines = [s.makefile("rw", encoding="utf-8") for s in self._sockets]

    def _launch(
        self, rank: int, python: Path, environment: Mapping[str, str], numbers: list[int]
    ) -> subprocess.Popen[bytes]:
        control, *others = map(str, numbers)
        words = ["--peer", self.peer.name, "--rank", str(rank), "--world-size", str(self._options.world_size)]
        words += ["--control", control, "--others", *others]
        words += ["--smoke"] * self._options.smoke + ["--own-core"] * self._options.own_core
        with self._logs[rank].open("wb") as output:
            return subprocess.Popen(
                [str(python), "-m", "benchmark.worker", *words],
                cwd=_ROOT,
                env={**environment, **self._options.environment(rank, self._options.world_size)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=numbers,
            )

    def do(self, command: str, **arguments: Any) -> list[Any]:
        """Have all ranks do something at once.

        Returns:
            The ranks' answers.

        Raises:
            BenchmarkError: it failed on a rank, or a rank died.
        """
        self._ask(command, arguments)
        return self._answers(command)

    def _ask(self, command: str, arguments: Mapping[str, Any]) -> None:
        for lines in self._lines:
            lines.write(json.dumps({"do": command, **arguments}) + "\n")
            lines.flush()

    def _answers(self, command: str) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _ANSWER_SECONDS
        size = self._options.world_size
        while len(answers) < size:  # whoever answers first is heard first: it may say why another never will
            waiting = [rank for rank in range(size) if rank not in answers]
            ready, _, _ = select.select(
                [self._sockets[r] for r in waiting], [], [], max(0, deadline - time.monotonic())
            )
            if not ready:
                raise self._failure(waiting[0], f"no answer to {command} for {_ANSWER_SECONDS:.0f} s")
            rank = self._sockets.index(ready[0])
            answers[rank] = self._answer(rank, command)
        return [answers[rank] for rank in range(size)]

    def _answer(self, rank: int, command: str) -> Any:
        line = self._lines[rank].readline()
        if not line:
            raise self._failure(rank, f"died while it was to {command}")
        reply = json.loads(line)
        if "error" in reply:
            raise self._failure(rank, f"could not {command}:\n{reply['error']}")
        return reply["answer"]

    def _failure(self, rank: int, what: str) -> BenchmarkError:
        tail = self._logs[rank].read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        return BenchmarkError("\n".join([f"{self.peer.name}, rank {rank}: {what}", *tail]))

    def stop(self) -> None:
        """End the processes: they exit when their socket is closed."""
        for lines, connection in zip(self._lines, self._sockets, strict=True):
            lines.close()
            connection.close()
        for process in self._processes:
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def started(pythons: Sequence[tuple[Peer, Path]], logs: Path, options: RankOptions) -> Iterator[list[Ranks]]:
    """The ranks of all peers, ready; they end with the block.

    Args:
        pythons: The peers, each with the interpreter of its environment.
        logs: Folder for what the processes print.
        options: How they run.
    """
    all_ranks: list[Ranks] = []
    try:
        for peer, python in pythons:
            all_ranks.append(Ranks(peer, python, logs, options))
        for ranks in all_ranks:
            ranks._ask("start", {})
        for ranks in all_ranks:
            ranks._answers("start")
        yield all_ranks
    finally:
        for ranks in all_ranks:
            ranks.stop()


def _no_environment(rank: int, world_size: int) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How the ranks of a peer run.

    Attributes:
        world_size: How many there are.
        smoke: Whether they take tiny states.
        own_core: Whether each is bound to cores of its own.
        environment: Makes environment variables of a rank and the number of ranks.
    """

    world_size: int = 2
    smoke: bool = False
    own_core: bool = False
    environment: Callable[[int, int], Mapping[str, str]] = _no_environment


def _environments(world_size: int) -> list[dict[str, str]]:
    """What Paddle's and torch's launchers would set, and each rank's part of the cores."""
    master, *ports = _free_ports(world_size + 1)
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master),
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // world_size)),
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_MASTER": f"127.0.0.1:{master}",
        "PADDLE_TRAINERS_NUM": str(world_size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
    }
    found = []
    for rank, endpoint in enumerate(endpoints):
        own = {
            "FLAGS_selected_cpus": str(rank),
            "PADDLE_CURRENT_ENDPOINT": endpoint,
            "PADDLE_LOCAL_RANK": str(rank),
            "PADDLE_RANK_IN_NODE": str(rank),
            "PADDLE_TRAINER_ID": str(rank),
        }
        found.append({**os.environ, **common, **own})
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
