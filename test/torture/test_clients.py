"""Saves go on under every kind of hostile client and take hardly longer, cost the coordinator no memory and no files to
speak of, and a silent rank is noticed in time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from test.torture import clients
from test.torture.hostile_clients import KINDS

TRIES = 6
"""Other work on the machine can make saves slower just while a client is there, but not again and again."""


@pytest.mark.parametrize("seed", range(len(KINDS)), ids=list(KINDS))
def test_saves_go_on(seed: int, tmp_path: Path) -> None:
    slowdowns = list[float]()
    for number in range(TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = clients.checked(seed, folder)
        assert len(found["attacked"]) == 20
        slowdowns.append(clients.slowdown(found))
        if found["starved"]:
            slowdowns[-1] = math.nan  # of saves without a client
        elif slowdowns[-1] <= clients.MOST_TIME:
            return
    pytest.fail(f"saves take {', '.join(f'{ratio:.2f}' for ratio in slowdowns)} times as long")
