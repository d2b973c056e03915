"""What is measured, how often, and in which order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmark.peers import PROBES, Peer

__all__ = ["JOBS", "Job", "Plan"]


@dataclass(frozen=True, slots=True)
class Job:
    """Something that a peer is told to do, and that is measured.

    Attributes:
        state: ``"A"`` or ``"B"``.
        works: What the table calls it; two names if it is done twice in a row and both count.
        layout: The layout to load into; None for a save.
        renew: Whether to take tensors that were not saved or loaded before.
        idle: For how many seconds nothing happens before.
        cold: Whether the files are not in the page cache.
    """

    state: str
    works: tuple[str, ...]
    layout: str | None = None
    renew: bool = False
    idle: float = 0.0
    cold: bool = False


JOBS = (
    Job("A", ("save",)),
    Job("A", ("save after 3 s idle",), idle=3.0),
    Job("A", ("load, same layout",), "same"),
    Job("A", ("load, Shard(0) and Shard(1) swapped",), "swapped"),
    Job("A", ("load 1 of 6 layers",), "layer"),
    Job("A", ("cold load, same layout",), "same", cold=True),
    Job("B", ("save, new tensors", "save again"), renew=True),
    Job("B", ("load, same layout, new tensors",), "same", renew=True),
    Job("B", ("load, Shard(1) instead of Shard(0), new tensors",), "swapped", renew=True),
)

# Rounds of the peers that take seconds, or minutes, for what others do in a fraction of one: (full, quick).
_SLOW = {
    ("paddle_builtin", "B", "swapped"): (1, 0),
    ("paddle_builtin", "B", "same"): (4, 1),
    ("paddle_builtin", "B", None): (4, 1),
    ("torch_dcp", "B", "swapped"): (2, 0),
    ("torch_dcp", "B", "same"): (2, 1),
    ("torch_dcp", "B", None): (2, 1),
}
_IDLE_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Plan:
    """How often, and in which order.

    Attributes:
        peers: Which peers take part.
        rounds: How often most jobs are measured.
        quick: Whether slow ones are left out, or measured once.
        seed: Of the order.
    """

    peers: Sequence[Peer]
    rounds: int
    quick: bool
    seed: int

    def rounds_of(self, peer: Peer, job: Job) -> int:
        """How often a peer's job is measured."""
        if peer.name in PROBES and (job.layout == "swapped" or (job.layout is not None and peer.name != "probe")):
            return 0  # they cannot, or all read alike
        if job.idle:
            return min(self.rounds, _IDLE_ROUNDS)
        slow = _SLOW.get((peer.name, job.state, job.layout))
        return self.rounds if slow is None else min(self.rounds, slow[self.quick])

    def warm_up(self, state: str) -> list[tuple[Peer, Job]]:
        """What is done once before anything is measured; not the slow jobs."""
        return [
            (peer, job)
            for peer in self.peers
            for job in JOBS
            if job.state == state and self.rounds_of(peer, job) and (peer.name, state, job.layout) not in _SLOW
        ]

    def in_rounds(self, state: str) -> Iterator[list[tuple[Peer, Job]]]:
        """For each round what is measured, shuffled. Jobs with fewer rounds are spread over all of them."""
        order = random.Random(f"{self.seed} {state}")
        jobs = [(peer, job) for peer in self.peers for job in JOBS if job.state == state]
        for i in range(self.rounds):
            now = [pair for pair in jobs if self._is_due(i, self.rounds_of(*pair))]
            order.shuffle(now)
            yield now

    def _is_due(self, i: int, times: int) -> bool:
        return (i + 1) * times // self.rounds != i * times // self.rounds
