"""Starts and ends the processes of one world of ranks on this machine."""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from test.ranks.forks import AT_IMPORT, DUMP_STACKS, SOURCES, ForkedProcess, dumping_blocked, fork

__all__ = ["REPOSITORY", "RankProcess", "World", "free_ports", "launch_environment", "reserved_ports"]

REPOSITORY = Path(__file__).resolve().parents[2]

_LOG_TAIL_BYTES = 6000
_STACK_DUMP_SECONDS = 5.0
_POLL_SECONDS = 0.05
_END_SECONDS = 1.0
_numbers = itertools.count()  # of worlds


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One rank: its process, this side of its pipe and the file that takes what it prints."""

    rank: int
    process: subprocess.Popen[bytes] | ForkedProcess
    connection: Connection
    log: Path

    def log_tail(self) -> str:
        """Return the end of what the rank has printed."""
        data = self.log.read_bytes()
        text = data[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"[...]{text}" if len(data) > _LOG_TAIL_BYTES else text

    def log_threads(self) -> None:
        """Add to the log what the system knows of the rank's threads: their names, states and where they wait."""
        with self.log.open("a") as log, contextlib.suppress(FileNotFoundError):
            print("It wrote no stacks. Its threads:", file=log)
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                state = task.joinpath("stat").read_text().rpartition(")")[2].split()[0]
                print(task.joinpath("comm").read_text().strip(), state, task.joinpath("wchan").read_text(), file=log)


class World:
    """Ranks 0 to ``size`` - 1, each a process that runs ``test.ranks.worker``.

    They are forked from processes that have imported Paddle, in turn from different ones, in each world others. Ranks
    that need environment variables of their own are started anew, since Paddle may read those when it is imported,
    unless ``at_import`` says which of them it does.

    Args:
        size: Number of ranks.
        groups: Let the workers make the groups of the first 2, 3, ... ranks, for `test.ranks.groups.group_of`.
        env: Environment variables to set on top of this process's own.
        at_import: Those of ``env`` that Paddle reads when it is imported.
    """

    def __init__(
        self,
        size: int,
        *,
        groups: bool = False,
        env: Mapping[str, str] | None = None,
        at_import: Mapping[str, str] | None = None,
    ) -> None:
        self._at_import = at_import
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self.ranks: list[RankProcess] = []
        arguments = ["groups"] if groups else []
        self._ports = reserved_ports(size + 1)  # for as long as this world lives: another one starts beside it
        ports = [each.getsockname()[1] for each in self._ports]
        self._plain = [launch_environment(rank, ports) for rank in range(size)]
        self._number = next(_numbers)
        self._life, _ = self._pipe = os.pipe()
        try:
            for rank in range(size):
                self.ranks.append(self._start(rank, arguments, {**self._plain[rank], **(env or {})}))
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, arguments: list[str], env: Mapping[str, str]) -> RankProcess:
        ours, theirs = Pipe()
        log = Path(self._directory.name, f"rank-{rank}.log")
        process: subprocess.Popen[bytes] | ForkedProcess
        with theirs, log.open("wb") as output, dumping_blocked():
            descriptors = [theirs.fileno(), self._life]
            if env == self._plain[rank] or self._at_import is not None:
                source = (self._number + rank) % SOURCES
                process = fork(source, descriptors, output.fileno(), arguments, env, self._at_import)
            else:
                process = subprocess.Popen(
                    [sys.executable, "-m", "test.ranks.worker", *map(str, descriptors), *arguments],
                    cwd=REPOSITORY,
                    env=dict(env),
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        return RankProcess(rank, process, ours, log)

    def dump_stacks(self, ranks: Iterable[int]) -> None:
        """Let ``ranks`` write the stack of each of their threads into their logs.

        Of one that cannot, because Python has ended or has not begun, the logs tell where the system has its threads.
        """
        chosen = [self.ranks[rank] for rank in ranks]
        before = seen = [each.log.stat().st_size for each in chosen]
        for each in chosen:
            each.process.send_signal(DUMP_STACKS)
        deadline = time.monotonic() + _STACK_DUMP_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            now = [each.log.stat().st_size for each in chosen]
            if now == seen and all(map(operator.gt, now, before)):
                return
            seen = now
        for each, size in zip(chosen, before, strict=True):
            if each.log.stat().st_size == size:
                each.log_threads()

    def await_end(self, rank: int) -> None:
        """Give ``rank`` a moment to end: its pipe is closed shortly before the process is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ranks[rank].process.wait(_END_SECONDS)

    def logs(self, ranks: Iterable[int]) -> str:
        """Return the ends of the logs of ``ranks``, each under a line that says how its rank is doing."""
        return "\n".join(f"--- rank {r} ({self._state(r)}), its log:\n{self.ranks[r].log_tail()}" for r in ranks)

    def _state(self, rank: int) -> str:
        code = self.ranks[rank].process.poll()
        if code is None:
            return "running"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Kill every rank that still runs and forget the logs."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()
            rank.connection.close()
        for descriptor in self._pipe:
            os.close(descriptor)
        for port in self._ports:
            port.close()
        self._directory.cleanup()


def free_ports(count: int) -> list[int]:
    """Return ``count`` TCP ports of the loopback device that nobody listens on now."""
    sockets = reserved_ports(count)
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def reserved_ports(count: int) -> list[socket.socket]:
    """Return sockets with ports of the loopback device that nobody is given until they are closed.

    Who knows a port can listen on it meanwhile, if its socket may reuse addresses, as those of Paddle's stores may.
    """
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(("127.0.0.1", 0))
    return sockets


def launch_environment(rank: int, ports: list[int]) -> dict[str, str]:
    """Return the environment in which Paddle joins a gloo world. The last port is the master's, the others a rank's."""
    *ours, master = (f"127.0.0.1:{port}" for port in ports)
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {
        **env,
        **AT_IMPORT,
        "PADDLE_CURRENT_ENDPOINT": ours[rank],
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_LOCAL_RANK": str(rank),
        "PADDLE_MASTER": master,
        "PADDLE_RANK_IN_NODE": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(ours)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(ours),
        "PADDLE_TRAINER_ID": str(rank),
    }
