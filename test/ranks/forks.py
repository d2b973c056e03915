"""Starts ranks by forking processes that have imported Paddle already, which is most of what a rank's start takes.

A source is such a process. For each rank it forks a keeper and that forks the rank, so that there is somebody who can
wait for the rank and tell how it ended. The library is imported in a source too, which starts no threads by that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

__all__ = ["AT_IMPORT", "DUMP_STACKS", "SOURCES", "ForkedProcess", "dumping_blocked", "fork", "serve"]

SOURCES = 2
"""How many sources there are. Forks of one have the same seed for hashes, the same addresses: so one is too few."""

AT_IMPORT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "FLAGS_selected_cpus": "0",
    "GLOG_minloglevel": "2",
}
"""Environment variables that are read when Paddle is imported, as all forks have them."""

DUMP_STACKS = signal.SIGUSR1
"""The signal that lets a rank write the stacks of its threads."""

_REPOSITORY = Path(__file__).resolve().parents[2]
_REQUEST_BYTES = 1 << 18
_MOST_DESCRIPTORS = 8

_sources: dict[tuple[Any, ...], socket.socket] = {}  # those that were started, for this process's whole life


class ForkedProcess:
    """A process that a source has forked, with the methods of `subprocess.Popen` that tests use.

    Attributes:
        returncode: Its exit code, or minus the signal that ended it; None as long as nobody has seen it end.
    """

    def __init__(self, status: Connection) -> None:
        self._status = status  # until it is closed, the keeper lets no other process have the id
        self.returncode: int | None = None

    @functools.cached_property
    def pid(self) -> int:
        """Its id."""
        return int(self._status.recv())

    def poll(self) -> int | None:
        """Return the exit code, None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and return the exit code."""
        if self.returncode is None:
            pid = self.pid
            if not self._status.poll(timeout):
                raise subprocess.TimeoutExpired(f"rank of process id {pid}", timeout or 0.0)
            self.returncode = int(self._status.recv())
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send it SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def dumping_blocked() -> Iterator[None]:
    """Block `DUMP_STACKS` in processes that are started meanwhile: it would end one that is not ready for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {DUMP_STACKS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork(
    number: int,
    descriptors: list[int],
    output: int,
    arguments: list[str],
    env: Mapping[str, str],
    at_import: Mapping[str, str] | None = None,
) -> ForkedProcess:
    """Fork a process that runs ``test.ranks.worker``, or the Python file that the first argument names.

    Args:
        number: The source, below `SOURCES`.
        descriptors: Descriptors for the worker, whose new numbers are its first arguments.
        output: The descriptor that takes what the process prints.
        arguments: The worker's further arguments.
        env: All environment variables. Among them should be `AT_IMPORT`, which cannot be changed any more.
        at_import: More variables that the source should have when it imports Paddle; those who have others have other
            sources.
    """
    at_import = at_import or {}
    key = (number, *sorted(at_import.items()))
    if key not in _sources:
        _sources[key] = _start_source(at_import)
    ours, theirs = Pipe()
    with theirs:
        request = pickle.dumps((arguments, dict(env)))
        socket.send_fds(_sources[key], [request], [theirs.fileno(), output, *descriptors])
    return ForkedProcess(ours)


def _start_source(at_import: Mapping[str, str]) -> socket.socket:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLAGS_"))}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, dumping_blocked():
        subprocess.Popen(  # it ends when this process has ended, or closed its socket
            [sys.executable, "-m", "test.ranks.source", str(theirs.fileno())],
            cwd=_REPOSITORY,
            env={**env, **AT_IMPORT, **at_import},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return ours


def serve(requests: socket.socket) -> list[str] | None:
    """Fork a process for each request. Returns in each of them, with the worker's arguments, and with None in the end.

    This is what a source does. The processes return rather than run here, so that they end as any program does.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, _MOST_DESCRIPTORS)
        if not request:
            return None
        if os.fork() == 0:
            requests.close()
            return _keep(Connection(descriptors[0]), descriptors[1:], *pickle.loads(request))
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(status: Connection, descriptors: list[int], arguments: list[str], env: dict[str, str]) -> list[str]:
    """Fork the process, in which this returns. What calls it tells how that ended, and ends then."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        status.close()
        return _prepare(descriptors, arguments, env)
    for descriptor in descriptors:
        os.close(descriptor)
    with contextlib.suppress(OSError, EOFError):  # nobody may want to know any more
        status.send(pid)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status.send(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
        status.recv()  # never comes: the end of the other side does
    os._exit(0)


def _prepare(descriptors: list[int], arguments: list[str], env: dict[str, str]) -> list[str]:
    """Make this process one that might have been started anew; returns the worker's arguments."""
    output, *others = descriptors
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ.clear()
    os.environ.update(env)
    # What Paddle's libraries do at the end of a process takes a lock that one of their threads, which takes it every
    # second, may have held in the source when it was forked. The process ends before that, when Python has ended.
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    return [*map(str, others), *arguments]
