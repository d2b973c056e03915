"""One rank of one peer: a process that lives as long as the benchmark and does what it is told.

Commands and answers are lines of JSON on a socket. Between commands the process waits in ``recv``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.peers import peer_named
from benchmark.states import TensorSpec, layout

WORLD_SIZE = 2
_STATUS = Path("/proc/self/status")
_KNOWN_BYTES = 50_000_000
_RESET_PEAK = "5"  # for /proc/self/clear_refs


class Worker:
    """Does the commands, each a method with the command's name.

    Args:
        peer: Name of the peer.
        rank: This process's rank.
        barrier: Connected to the other rank.
    """

    def __init__(self, peer: str, rank: int, barrier: socket.socket) -> None:
        self._rank, self._barrier = rank, barrier
        self._peer = peer_named(peer)
        self._peer.setup(rank, WORLD_SIZE)
        self._states: dict[str, Any] = {}
        self._specs: dict[str, list[TensorSpec]] = {}

    def versions(self) -> dict[str, str]:
        """Versions of what is measured."""
        return self._peer.versions()

    def build(self, state: str, layouts: list[str]) -> None:
        """Make a state in several layouts, or anew."""
        for name in layouts:
            self._states.pop(name, None)
            self._specs[name] = layout(state, name)
            self._states[name] = self._peer.build(self._specs[name], self._rank, WORLD_SIZE)

    def drop(self) -> None:
        """Forget all states."""
        self._states.clear()
        gc.collect()
        _give_back_memory()

    def save(self, path: str, memory: bool) -> dict[str, Any]:
        """Save what ``build`` made."""
        return self._measure(lambda: self._peer.save(self._states["same"], Path(path)), memory)

    def load(self, path: str, layout: str, memory: bool) -> dict[str, Any]:
        """Load into one of the layouts."""
        return self._measure(lambda: self._peer.load(self._states[layout], Path(path)), memory)

    def zero(self, layout: str) -> None:
        """Forget a layout's values, so that a load has to bring them back."""
        self._peer.zero(self._states[layout])

    def check(self, layout: str) -> None:
        """Compare every value of a layout with what it must be.

        Raises:
            ValueError: a value differs.
        """
        arrays = self._peer.local_arrays(self._states[layout])
        for spec in self._specs[layout]:
            if not np.array_equal(arrays[spec.name], spec.local_part(self._rank, WORLD_SIZE)):
                raise ValueError(f"{spec.name} came back different")

    def check_memory_probe(self) -> None:
        """Allocate a known amount in what is measured, and see whether it is found.

        Raises:
            ValueError: it is not.
        """
        found = self._measure(lambda: np.ones(_KNOWN_BYTES, np.uint8).sum(), True)
        if not _KNOWN_BYTES * 0.95 < found["peak"] < _KNOWN_BYTES * 1.3:  # the kernel counts in batches of pages
            raise ValueError(f"{_KNOWN_BYTES} bytes were allocated, and {found} was measured")

    def _measure(self, work: Callable[[], Any], memory: bool) -> dict[str, Any]:
        gc.collect()
        before: Mapping[str, int] = {}
        if memory:
            before = reset_peak_memory()
        self._meet()
        start = time.perf_counter()
        plan = work()
        seconds = time.perf_counter() - start
        if not memory:
            return {"seconds": seconds, "plan": plan}
        peak = used_memory()["VmHWM"]  # counts mapped files too, but nobody maps any in a save or load
        _give_back_memory()
        return {"peak": peak - before["VmRSS"], "kept": used_memory()["RssAnon"] - before["RssAnon"]}

    def _meet(self) -> None:
        """Wait for the other rank, by the same means for every peer."""
        self._barrier.sendall(b"x")
        if not self._barrier.recv(1):
            raise ConnectionError("the other rank has died")


def reset_peak_memory() -> dict[str, int]:
    """Begin to watch for the highest use of memory; returns the use now."""
    _give_back_memory()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    return used_memory()


def used_memory() -> dict[str, int]:
    """This process's memory in bytes, as the kernel names it."""
    lines = [line.split() for line in _STATUS.read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1:] == ["kB"]}


def _give_back_memory() -> None:
    """Let the allocator return what is free: memory that it kept would hide what the next call needs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def serve(kind: type[Worker]) -> None:
    """Do commands until told to quit, or until the runner is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--control", type=int, required=True, help="file descriptor of the socket for commands")
    parser.add_argument("--barrier", type=int, required=True, help="file descriptor of the socket to the other rank")
    args = parser.parse_args()
    lines = socket.socket(fileno=args.control).makefile("rw", encoding="utf-8")
    worker: Worker | None = None
    for line in lines:
        command = json.loads(line)
        try:
            if command["do"] == "start":
                worker, answer = kind(args.peer, args.rank, socket.socket(fileno=args.barrier)), None
            else:
                answer = getattr(worker, command.pop("do"))(**command)
            reply = {"answer": answer}
        except Exception:
            reply = {"error": traceback.format_exc()}
        lines.write(json.dumps(reply) + "\n")
        lines.flush()
    os._exit(0)  # the libraries' own teardown waits for ranks that may be gone


if __name__ == "__main__":
    serve(Worker)
