"""The program that each rank runs: joins the world, then runs the functions that it is sent.

    python -m test.ranks.worker CALLS LIFE [groups]

Both are descriptors of pipes. Through CALLS come pickled (function name, arguments) pairs and go pickled
``("result", value)`` or ``("error", RemoteError)`` pairs, after a first ``("ready", None)``. The rank ends when it is
sent None (with exit code 1 if the last function raised), when the other side of CALLS is gone, or that of LIFE.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.base import core

from test.ranks import groups
from test.ranks.forks import DUMP_STACKS
from test.ranks.remote import RemoteError, load_function

__all__ = ["main", "run_program", "run_script"]

_MASTER_SECONDS = 60.0


def main(arguments: Sequence[str]) -> int:
    """Serve until told to stop, and return the exit code."""
    calls, life, *options = arguments
    faulthandler.enable()
    signal.signal(DUMP_STACKS, signal.SIG_IGN)  # which is again so when Python has ended, but not yet the process
    faulthandler.register(DUMP_STACKS)
    _unblock_dumping()
    threading.Thread(target=_end_with, args=(int(life),), daemon=True).start()
    join_world()
    if "groups" in options:
        groups.make_groups()
    with Connection(int(calls)) as connection:
        return serve(connection)


def join_world() -> None:
    """Initialise Paddle's parallel environment as the environment variables say."""
    paddle.set_device("cpu")
    alone = os.environ["PADDLE_TRAINERS_NUM"] == "1"
    if not alone:
        _reach_store()
    dist.init_parallel_env()
    groups.install()
    if not alone:
        _await_others()


def serve(connection: Connection) -> int:
    """Answer calls until None comes."""
    connection.send(("ready", None))
    code = 0
    with contextlib.suppress(EOFError):
        while (call := connection.recv()) is not None:
            code = _answer(connection, *call)
    return code


def run_program(path: str, *arguments: str) -> None:
    """Be what ``python path arguments...`` is, but for the seconds that it takes until ranks find each other."""
    _unblock_dumping()
    sys.path[0] = str(Path(path).parent)
    _reach_store()
    run_script(path, *arguments)


def run_script(path: str, *arguments: str) -> None:
    """Run the Python file at ``path`` as the main program."""
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def _answer(connection: Connection, name: str, arguments: tuple[Any, ...]) -> int:
    try:
        reply = pickle.dumps(("result", load_function(name)(*arguments)))
    except Exception as error:
        connection.send(("error", RemoteError.of(dist.get_rank(), error)))
        return 1
    connection.send_bytes(reply)
    return 0


def _unblock_dumping() -> None:
    """Take `DUMP_STACKS` from now on: see `test.ranks.forks.dumping_blocked`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {DUMP_STACKS})


def _reach_store() -> None:
    if os.environ["PADDLE_TRAINER_ID"] != "0":
        _await_master()
    core.create_or_get_global_tcp_store()
    groups.send_at_once()


def _await_master() -> None:
    """Wait until rank 0 listens: Paddle tries again only after three seconds if it came too early."""
    host, _, port = os.environ["PADDLE_MASTER"].partition(":")
    deadline = time.monotonic() + _MASTER_SECONDS
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.02)


def _await_others() -> None:
    """Let rank 0 wait until all have joined: they need its store until then, and it may have little to do."""
    store = core.create_or_get_global_tcp_store()
    joined = store.add("test/joined", 1)
    deadline = time.monotonic() + _MASTER_SECONDS
    while dist.get_rank() == 0 and joined < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.01)
        joined = store.add("test/joined", 0)


def _end_with(life: int) -> None:
    os.read(life, 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
