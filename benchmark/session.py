"""What a run of a benchmark has: its settings, a folder for checkpoints, and the ranks of the peers."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmark import machine
from benchmark.peers import Peer
from benchmark.ranks import BenchmarkError, Ranks, started

__all__ = ["NothingToMeasureError", "Session", "say", "slower", "versions_of"]


class NothingToMeasureError(Exception):
    """What is measured cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Session:
    """One run.

    Attributes:
        scratch: Folder for checkpoints.
        pythons: The peers that take part, each with the interpreter of its environment.
        rounds: How often what is not slow is measured.
        seed: Of the order within the rounds.
        quick: Whether the slowest works are left out.
        smoke: Whether it is to be seen only that all works, with tiny states.
        states: Which states, or curves.
    """

    scratch: Path
    pythons: Sequence[tuple[Peer, Path]] = ()
    rounds: int = 1
    seed: int = 0
    quick: bool = False
    smoke: bool = False
    states: Sequence[str] = ()

    @property
    def peers(self) -> list[Peer]:
        """Who takes part."""
        return [peer for peer, _ in self.pythons]

    def started(
        self,
        world_size: int = 2,
        own_core: bool = False,
        environment: Callable[[int, int], Mapping[str, str]] | None = None,
    ) -> AbstractContextManager[list[Ranks]]:
        """The ranks of all peers, ready; they end with the block.

        Args:
            world_size: How many ranks each peer has.
            own_core: Whether each rank is bound to cores of its own.
            environment: Makes environment variables of a rank and the number of ranks.

        Raises:
            BenchmarkError: an environment is missing, or a rank failed.
        """
        for peer, python in self.pythons:
            if not python.exists():
                raise BenchmarkError(f"{peer.title}: there is no {python}; make bench makes it")
        say("starting the ranks")
        options = {"smoke": self.smoke, "own_core": own_core}
        return started(self.pythons, self.scratch, world_size, environment, **options)

    def require_space(self, gigabytes: int) -> None:
        """See whether there is room for checkpoints of so many GB.

        Raises:
            BenchmarkError: there is not.
        """
        free = shutil.disk_usage(self.scratch).free / 1e9
        if free < gigabytes and not self.smoke:
            raise BenchmarkError(f"{self.scratch} has {free:.1f} GB free, and {gigabytes} GB are needed")

    def remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint, at nobody's cost."""
        shutil.rmtree(checkpoint)
        if not self.smoke:
            os.sync()  # nobody pays for what another one left in the page cache

    def cache(self, checkpoint: Path, cold: bool = False) -> None:
        """Have the files of a checkpoint in the page cache, or not there."""
        if cold:
            machine.drop(checkpoint, checked=not self.smoke)
        else:
            machine.read_in(checkpoint)


def say(text: str) -> None:
    """Show what is going on, if somebody looks."""
    if sys.stderr.isatty():
        print(f"\r\033[2K{text}", end="", file=sys.stderr, flush=True)


def slower(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each number that ranks measured the largest."""
    return {name: max(answer[name] for answer in answers) for name in answers[0]}


def versions_of(all_ranks: Sequence[Ranks]) -> dict[str, str]:
    """The versions of everything that is measured."""
    return {name: version for ranks in all_ranks for name, version in ranks.do("versions")[0].items()}
