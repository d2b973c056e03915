"""Starts the ranks of a peer and talks to them."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmark.worker import WORLD_SIZE

__all__ = ["ROOT", "BenchmarkError", "Ranks", "environments", "started"]

ROOT = Path(__file__).resolve().parent.parent
_ANSWER_SECONDS = 900.0
_EXIT_SECONDS = 10.0
_LOG_LINES = 20
_WORKER = "benchmark.worker"


class BenchmarkError(Exception):
    """A peer failed."""


class Ranks:
    """The processes of one peer.

    Args:
        peer: Its name.
        python: The interpreter of the environment that the peer is installed in.
        logs: Folder for what the processes print.
        module: What the processes run: one that calls :func:`benchmark.worker.serve`.
    """

    def __init__(self, peer: str, python: Path, logs: Path, module: str = _WORKER) -> None:
        self.peer = peer
        self._logs = [logs / f"{peer}-{rank}.log" for rank in range(WORLD_SIZE)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        barriers = socket.socketpair()
        for rank, (barrier, environment, log) in enumerate(
            zip(barriers, environments(WORLD_SIZE), self._logs, strict=True)
        ):
            mine, theirs = socket.socketpair()
            arguments = {"peer": peer, "rank": rank, "control": theirs.fileno(), "barrier": barrier.fileno()}
            options = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [str(python), "-m", module, *options],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(), barrier.fileno()),
                )
            theirs.close()
            barrier.close()
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
        for lines in self._lines:
            lines.write(json.dumps({"do": command, **arguments}) + "\n")
            lines.flush()
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while len(answers) < WORLD_SIZE:  # whoever answers first is heard first: it may say why the other never will
            waiting = [rank for rank in range(WORLD_SIZE) if rank not in answers]
            ready, _, _ = select.select(
                [self._sockets[r] for r in waiting], [], [], max(0, deadline - time.monotonic())
            )
            if not ready:
                raise self._failure(waiting[0], f"no answer to {command} for {_ANSWER_SECONDS:.0f} s")
            rank = self._sockets.index(ready[0])
            answers[rank] = self._answer(rank, command)
        return [answers[rank] for rank in range(WORLD_SIZE)]

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
        return BenchmarkError("\n".join([f"{self.peer}, rank {rank}: {what}", *tail]))

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
def started(pythons: dict[str, Path], logs: Path, module: str = _WORKER) -> Iterator[list[Ranks]]:
    """The ranks of all peers, started; they end with the block.

    Args:
        pythons: For each peer, the interpreter of its environment.
        logs: Folder for what the processes print.
        module: See :class:`Ranks`.
    """
    peers: list[Ranks] = []
    try:
        for peer, python in pythons.items():
            peers.append(Ranks(peer, python, logs, module))
            peers[-1].do("start")
        yield peers
    finally:
        for ranks in peers:
            ranks.stop()


def environments(world_size: int) -> list[dict[str, str]]:
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
