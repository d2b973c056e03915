"""The program that each rank runs: joins the world, then runs the functions that it is sent.

    python -m test.ranks.worker DESCRIPTOR [groups]

DESCRIPTOR is the rank's end of a pipe. Through it come pickled (function name, arguments) pairs and go pickled
``("result", value)`` or ``("error", RemoteError)`` pairs, after a first ``("ready", None)``. The rank ends when it is
sent None (with exit code 1 if the last function raised) or when the other side is gone.
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
from multiprocessing.connection import Connection
from typing import Any

import paddle
import paddle.distributed as dist

from test.ranks import groups
from test.ranks.remote import RemoteError, load_function

__all__ = ["main", "run_script"]

_MASTER_SECONDS = 60.0


def main() -> int:
    """Serve until told to stop, and return the exit code."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    join_world()
    if "groups" in sys.argv[2:]:
        groups.make_groups()
    with Connection(int(sys.argv[1])) as connection:
        return serve(connection)


def join_world() -> None:
    """Initialise Paddle's parallel environment as the environment variables say."""
    paddle.set_device("cpu")
    if os.environ["PADDLE_TRAINER_ID"] != "0":
        _await_master()
    dist.init_parallel_env()
    groups.install()


def serve(connection: Connection) -> int:
    """Answer calls until None comes."""
    connection.send(("ready", None))
    code = 0
    with contextlib.suppress(EOFError):
        while (call := connection.recv()) is not None:
            code = _answer(connection, *call)
    return code


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


def _await_master() -> None:
    """Wait until rank 0 listens: Paddle tries again only after three seconds if it came too early."""
    host, _, port = os.environ["PADDLE_MASTER"].partition(":")
    deadline = time.monotonic() + _MASTER_SECONDS
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.02)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
