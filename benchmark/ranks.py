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
from pathlib import Path
from typing import Any

from benchmark.peers import Peer

__all__ = ["BenchmarkError", "Ranks", "started"]

_ROOT = Path(__file__).resolve().parent.parent
_ANSWER_SECONDS = 900.0
_EXIT_SECONDS = 10.0
_LOG_LINES = 20


class BenchmarkError(Exception):
    """A peer failed."""


class Ranks:
    """The processes of one peer, started; they get ready with the command ``start``.

    Args:
        peer: The peer.
        python: The interpreter of the environment that the peer is installed in.
        logs: Folder for what the processes print.
        environments: Each rank's environment variables.
        options: What else :class:`benchmark.worker.Options` has.
    """

    def __init__(
        self, peer: Peer, python: Path, logs: Path, environments: Sequence[Mapping[str, str]], **options: Any
    ) -> None:
        self.peer, self._size = peer, len(environments)
        self._logs = [logs / f"{peer.name}-{rank}.log" for rank in range(self._size)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        others: list[list[socket.socket]] = [[] for _ in environments]
        for one, other in itertools.combinations(range(self._size), 2):
            for rank, end in zip((one, other), socket.socketpair(), strict=True):
                others[rank].append(end)
        for rank, environment in enumerate(environments):
            mine, theirs = socket.socketpair()
            ends = [theirs, *others[rank]]
            sockets = [end.fileno() for end in ends]
            words = {"peer": peer.name, "rank": rank, "world_size": self._size, "sockets": sockets, **options}
            with self._logs[rank].open("wb") as output:
                process = subprocess.Popen(
                    [str(python), "-m", "benchmark.worker", json.dumps(words)],
                    cwd=_ROOT,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=sockets,
                )
            for end in ends:
                end.close()
            self._processes.append(process)
            self._sockets.append(mine)
        self._lines = [s.makefile("rw", encoding="utf-8") for s in self._sockets]

    def do(self, command: str, **arguments: Any) -> list[Any]:
        """Have all ranks do something at once.

        Returns:
            The ranks' answers.

        Raises:
            BenchmarkError: it failed on a rank, or a rank died.
        """
        self.ask(command, arguments)
        return self.answers(command)

    def ask(self, command: str, arguments: Mapping[str, Any]) -> None:
        """Let all ranks begin with something; :meth:`answers` has to follow."""
        for lines in self._lines:
            lines.write(json.dumps({"do": command, **arguments}) + "\n")
            lines.flush()

    def answers(self, command: str) -> list[Any]:
        """Wait for what :meth:`ask` has begun; see :meth:`do`."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while len(answers) < self._size:  # whoever answers first is heard first: it may say why another never will
            waiting = [rank for rank in range(self._size) if rank not in answers]
            ready, _, _ = select.select(
                [self._sockets[r] for r in waiting], [], [], max(0, deadline - time.monotonic())
            )
            if not ready:
                raise self._failure(waiting[0], f"no answer to {command} for {_ANSWER_SECONDS:.0f} s")
            rank = self._sockets.index(ready[0])
            answers[rank] = self._answer(rank, command)
        return [answers[rank] for rank in range(self._size)]

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
def started(
    pythons: Sequence[tuple[Peer, Path]],
    logs: Path,
    world_size: int,
    environment: Callable[[int, int], Mapping[str, str]] | None,
    **options: Any,
) -> Iterator[list[Ranks]]:
    """The ranks of all peers, ready; they end with the block.

    Args:
        pythons: The peers, each with the interpreter of its environment.
        logs: Folder for what the processes print.
        world_size: How many ranks each has.
        environment: Makes environment variables of a rank and the number of ranks.
        options: See :class:`Ranks`.
    """
    all_ranks: list[Ranks] = []
    try:
        for peer, python in pythons:
            variables = _environments(world_size)
            if environment is not None:
                variables = [{**own, **environment(rank, world_size)} for rank, own in enumerate(variables)]
            all_ranks.append(Ranks(peer, python, logs, variables, **options))
        for ranks in all_ranks:
            ranks.ask("start", {})
        for ranks in all_ranks:
            ranks.answers("start")
        yield all_ranks
    finally:
        for ranks in all_ranks:
            ranks.stop()


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
