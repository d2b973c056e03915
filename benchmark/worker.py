"""One rank of one peer: a process that lives as long as the benchmark and does what it is told.

Commands and answers are lines of JSON on a socket. Between commands the process waits in ``recv``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.machine import give_back_memory, reset_peak_memory, used_memory
from benchmark.peers import PEERS
from benchmark.peers.base import Checkpointer
from benchmark.states import TensorSpec, layout
from benchmark.training import Training

__all__ = ["Options", "Worker"]

_KNOWN_BYTES = 50_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """What a rank is told when it starts.

    Attributes:
        peer: Name of the peer.
        rank: The process's rank.
        world_size: How many ranks there are.
        sockets: File descriptors: of the socket for commands, and of those to the other ranks.
        smoke: Whether all states are tiny.
        own_core: Whether the process is bound to its part of the cores.
    """

    peer: str
    rank: int
    world_size: int
    sockets: list[int]
    smoke: bool
    own_core: bool


class Worker:
    """Does the commands, each a method with the command's name.

    Args:
        options: See there.
        others: Connected to the other ranks.
    """

    def __init__(self, options: Options, others: Sequence[socket.socket]) -> None:
        self._rank, self._world_size, self._smoke = options.rank, options.world_size, options.smoke
        self._others = others
        module, _, name = PEERS[options.peer].implementation.partition(":")
        self._peer: Checkpointer = getattr(importlib.import_module(f"benchmark.peers.{module}"), name)()
        self._peer.setup(self._rank, self._world_size)
        self._states: dict[str, Any] = {}
        self._specs: dict[str, list[TensorSpec]] = {}
        self._training: Training
        if options.smoke:
            gc.freeze()  # or each of the many collections would look at all of Paddle

    def versions(self) -> dict[str, str]:
        """Versions of what is measured."""
        return self._peer.versions()

    def build(self, state: str, layouts: list[str]) -> None:
        """Make a state in several layouts, or anew."""
        for name in layouts:
            self._states.pop(name, None)
            self._specs[name] = layout(state, name, self._smoke)
            self._states[name] = self._peer.build(self._specs[name], self._rank, self._world_size)

    def derive(self, layout: str, work: str) -> None:
        """Make a state of another, by the peer's method ``work``; it is called ``work``, too."""
        self._specs[work] = self._specs[layout]
        self._states[work] = getattr(self._peer, work)(self._states[layout])

    def drop(self) -> None:
        """Forget all states."""
        self._states.clear()
        gc.collect()
        give_back_memory()

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
            if not np.array_equal(arrays[spec.name], spec.local_part(self._rank, self._world_size)):
                raise ValueError(f"{spec.name} came back different")

    def measure(
        self, work: str, path: str, layout: str = "same", memory: bool = False, **options: Any
    ) -> dict[str, float]:
        """Do something once, when all ranks are there.

        Args:
            work: The peer's method.
            path: The folder that it is given.
            layout: Whose state it is given.
            memory: Whether to measure memory rather than time.
            options: For the peer's :meth:`Checkpointer.begin`.

        Returns:
            ``seconds`` and ``cpu``, those of this process on its cores; or ``peak``, the most bytes at any moment
            beyond what there was before, and ``kept``, those that stayed; and what the peer says.
        """
        state = self._states[layout]
        gc.collect()
        self._peer.begin(memory, **options)
        before: Mapping[str, int] = reset_peak_memory() if memory else {}
        self._meet()
        start, cpu = time.perf_counter(), time.process_time()
        outcome = getattr(self._peer, work)(state, Path(path))
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        found = {"seconds": seconds, "cpu": cpu}
        if memory:
            peak = used_memory()["VmHWM"]  # counts mapped files too, but nobody maps any in a save or load
            give_back_memory()
            found = {"peak": peak - before["VmRSS"], "kept": used_memory()["RssAnon"] - before["RssAnon"]}
        found.update(self._peer.end())
        if isinstance(outcome, Mapping):
            found.update(outcome)
        elif outcome is not None:
            outcome.result()
        return found

    def check_memory_probe(self) -> None:
        """Allocate a known amount, and see whether it is found.

        Raises:
            ValueError: it is not.
        """
        before = reset_peak_memory()["VmRSS"]
        np.ones(_KNOWN_BYTES, np.uint8).sum()
        found = used_memory()["VmHWM"] - before
        if not _KNOWN_BYTES * 0.95 < found < _KNOWN_BYTES * 1.3:  # the kernel counts in batches of pages
            raise ValueError(f"{_KNOWN_BYTES} bytes were allocated, and {found} were measured")

    def save_first(self, path: str) -> dict[str, float]:
        """Save in the background, and have the state's values gone as soon as the call returns.

        Returns:
            ``seconds`` and ``cpu``, those of this thread on a core, of the call.
        """
        self._meet()
        start, cpu = time.perf_counter(), time.thread_time()
        pending = self._peer.start_save(self._states["same"], Path(path))
        found = {"seconds": time.perf_counter() - start, "cpu": time.thread_time() - cpu}
        self.zero("same")
        pending.result()
        return found

    def get_ready(self, how: str, path: str, seconds: float) -> None:
        """Do what comes before the first save in the background, by a method of the peer, and train for a while."""
        getattr(self._peer, how)(self._states["same"], Path(path))
        self._training.train_for(seconds)

    def prepare_training(self, steps: int) -> None:
        """Make what is trained and the memory that is copied to, and use both."""
        self._training = Training(self._peer, self._states["same"])
        self._training.warm_up(steps)

    def train_and_save(self, **options: Any) -> dict[str, float]:
        """See :meth:`.training.Training.turn`."""
        gc.collect()
        return self._training.turn(self._meet, **options)

    def _meet(self) -> None:
        """Wait for the other ranks, by the same means for every peer."""
        for other in self._others:
            other.sendall(b"x")
        for other in self._others:
            if not other.recv(1):
                raise ConnectionError("another rank has died")


def main() -> None:
    """Do commands until the driver is gone."""
    options = Options(**json.loads(sys.argv[1]))
    if options.own_core:  # as launchers give them: otherwise the kernel moves ranks to and fro, which blurs all times
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[options.rank :: options.world_size] or cores)
    control, *others = (socket.socket(fileno=number) for number in options.sockets)
    lines = control.makefile("rw", encoding="utf-8")
    worker: Worker | None = None
    for line in lines:
        command = json.loads(line)
        try:
            if command["do"] == "start":
                worker, answer = Worker(options, others), None
            else:
                answer = getattr(worker, command.pop("do"))(**command)
            reply = {"answer": answer}
        except Exception:
            reply = {"error": traceback.format_exc()}
        lines.write(json.dumps(reply) + "\n")
        lines.flush()
    os._exit(0)  # the libraries' own teardown waits for ranks that may be gone


if __name__ == "__main__":
    main()
