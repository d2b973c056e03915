"""A process on one of the hosts of :mod:`.two_mounts`: does what it is told, each thing in a process that it forks.

What it is told, and what has come of it, are lines of JSON on its standard input and output.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dist_ckpt import delete_checkpoint, list_checkpoints, verify
from paddle_dist_ckpt.control import NoTransport, SoloHub, TcpHub
from paddle_dist_ckpt.core.protocols import ControlHub
from paddle_dist_ckpt.options import LoadOptions, SaveOptions
from paddle_dist_ckpt.testing import SimulatedRank, shard_array
from test.jobs import alike, load_whole, rows_of
from test.waiting import until

from .forked import Child, Failed
from .leftovers import age_all, check_clean
from .scenarios import managers

__all__ = ["ROWS", "TIMEOUT", "serve"]

ROWS = 512
"""A version has a tensor of so many rows of 4 KiB."""
TIMEOUT = 20.0
"""Seconds for which a rank may be silent."""


class Store:
    """A BootstrapStore that another process serves on a TCP port: see :class:`.two_mounts.Keys`."""

    def __init__(self, address: str, port: int) -> None:
        self._place = (address, port)

    def set(self, key: str, value: bytes) -> None:
        self._ask([key, value.hex()])

    def get(self, key: str, timeout: float) -> bytes:
        return until(lambda: bytes.fromhex(self._ask([key, ""])), timeout, key)

    def _ask(self, question: list[str]) -> str:
        with socket.create_connection(self._place, TIMEOUT) as connection, connection.makefile("rw") as file:
            print(json.dumps(question), file=file, flush=True)
            return str(json.loads(file.readline()))


def _whole(version: int) -> dict[str, Any]:
    """All of a version."""
    numbers = np.random.default_rng(version).integers(0, 2**32, (ROWS, 1024), np.uint32)
    return {"cut": numbers.view(np.float32), "plain": np.full(40, version), "n": version, "text": f"{version} " * 3000}


def _part(version: int, rank: int, ranks: int, fill: bool = True) -> dict[str, Any]:
    """A rank's state_dict of a version, or one to load into."""
    known = _whole(version)
    known["cut"] = shard_array(known["cut"], [rows_of(known["cut"].shape, rank, ranks)], fill)
    return known if fill else {**known, "plain": np.zeros(40, np.int64), "n": None, "text": None}


def _loaded(state: dict[str, Any], rank: int, ranks: int) -> int:
    """The version that a rank has loaded, bit for bit."""
    meant = _part(state["n"], rank, ranks)
    for found in (state, meant):
        found["cut"] = list(found["cut"].pieces)
    assert alike(state, meant), f"rank {rank} has a mix of version {state['n']} and something else"
    return int(state["n"])


def _hub(rank: int, ranks: int, key: str, address: str, port: int) -> ControlHub:
    if ranks == 1:
        return SoloHub()
    hub = TcpHub(rank, range(ranks), 0, Store(address, port), key, bind_host=address, bootstrap_timeout=TIMEOUT)
    with hub.session("meet", TIMEOUT) as session:  # whoever is lost from now on is missed at once
        session.gather_scatter("meet", lambda: b"", lambda messages: messages)
    return hub


def save(
    job: dict[str, Any],
    path: str,
    version: int,
    unique_id: int | None = None,
    in_background: bool = False,
    seconds: float | None = None,
    kill_after: float | None = None,
) -> int:
    """A rank's part of a save; returns the id. The process kills itself some time after the ranks have met."""
    with closing(_hub(**job)) as hub:
        if kill_after is not None:
            threading.Timer(kill_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        rank = SimulatedRank(job["rank"], tuple(range(job["ranks"])), hub, NoTransport())
        options = SaveOptions(timeout=TIMEOUT, progress_timeout=seconds)
        state = _part(version, job["rank"], job["ranks"])
        if in_background:
            return rank.save_in_background(state, path, unique_id, options).result().unique_id
        return rank.save(state, path, unique_id, options).unique_id


def load(job: dict[str, Any], path: str, unique_id: int | None = None, seconds: float | None = None) -> list[int]:
    """A rank's part of a load; returns the id and the version."""
    with closing(_hub(**job)) as hub:
        rank = SimulatedRank(job["rank"], tuple(range(job["ranks"])), hub, NoTransport())
        state = _part(0, job["rank"], job["ranks"], fill=False)
        options = LoadOptions(
            timeout=TIMEOUT, progress_timeout=seconds, exchange="never"
        )  # each reads in its own mount
        report = rank.load(state, path, unique_id, options)
        return [report.unique_id, _loaded(state, job["rank"], job["ranks"])]


def manage(job: dict[str, Any], path: str, steps: list[int], keep_last: int, in_background: bool) -> list[int]:
    """A rank's part of a training that saves these steps; returns those that are there at the end."""
    with closing(_hub(**job)) as hub, managers() as make:
        rank = SimulatedRank(job["rank"], tuple(range(job["ranks"])), hub, NoTransport())
        options = SaveOptions(timeout=TIMEOUT)
        with make(rank, path, keep_last=keep_last, async_save=in_background, options=options) as manager:
            for step in steps:
                manager.save(step, _part(step, job["rank"], job["ranks"]))
            manager.wait()
            return manager.all_steps()


def found(path: str) -> dict[str, int]:
    """The version under each id that is listed, all of whose bytes are looked at."""
    versions = {}
    for unique_id in list_checkpoints(path):
        assert verify(path, unique_id).ok
        state = load_whole(path, unique_id)
        assert alike(state, _whole(state["n"])), f"a mix of version {state['n']} and something else"
        versions[str(unique_id)] = int(state["n"])
    return versions


def newest(path: str, unique_id: int) -> list[Any]:
    """Which ids are listed, and the version that is loaded with the number, and without."""
    listed = list_checkpoints(path)
    return [listed, int(load_whole(path, unique_id)["n"]), int(load_whole(path)["n"])]


def delete(path: str, unique_id: int) -> None:
    """Delete a checkpoint."""
    delete_checkpoint(path, unique_id)


def clean(path: str) -> None:
    """See that a save that comes when all claims have expired leaves nothing but what is committed."""
    (Path(path) / "marker").touch()  # who has made a file sees what others have made before
    age_all(Path(path))
    (Path(path) / "marker").unlink()
    known = list_checkpoints(path)
    job = {"rank": 0, "ranks": 1, "key": "", "address": "", "port": 0}
    assert list_checkpoints(path) == known
    delete_checkpoint(path, save(job, path, 0))
    check_clean(Path(path))


DEEDS: dict[str, Callable[..., Any]] = {
    deed.__name__: deed for deed in (save, load, manage, found, newest, delete, clean)
}


def serve(host: str) -> None:
    """Do what is told until the end of the standard input, as one of this host: others have other mounts."""
    socket.gethostname = lambda: host
    print(json.dumps({"result": "ready"}), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        begun = time.monotonic()
        with Child(functools.partial(DEEDS[name], **arguments)) as child:
            try:
                result = child.result(10 * TIMEOUT)
            except AssertionError as error:
                result = Failed.of(error)
        took = time.monotonic() - begun
        said: dict[str, Any] = {"seconds": took}
        if isinstance(result, Failed):
            said |= {"error": f"{result.kinds[0]}: {result.text}", "kinds": result.kinds}
        else:
            said["result"] = result
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
