"""Saves that end as if their process had been killed, in this process: what they have made by then stays."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from paddle_dist_ckpt.testing import FaultyStorage
from test.jobs import Killed, try_save

from .states import states_of, versions_in

__all__ = ["leave_dead_save"]

_DEAD = 9
"""The version that a dead save has tried to save."""


def leave_dead_save(
    folder: Path, ranks: int, rng: random.Random, unique_id: int | None, versions: Mapping[int, int]
) -> None:
    """Make what a save leaves that dies before its commit."""
    moment, dead = rng.choice((("create", 1), ("sync_file", 1), ("sync", 1), ("publish", 2))), list[str]()

    def hook(operation: str, name: str) -> None:
        dead.append(operation)
        if dead.count(moment[0]) >= moment[1] or "dead" in dead:
            dead.append("dead")
            raise Killed

    results = try_save(states_of(_DEAD, ranks), FaultyStorage(folder, hook), unique_id)
    assert all(isinstance(result, BaseException) for result in results)
    assert versions_in(folder) == versions
